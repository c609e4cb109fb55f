from __future__ import annotations

import pytest

from p2ptrain.core.texts import human_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5.0 TiB"),
        (1 << 60, "1048576.0 TiB"),
    ],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert human_bytes(size_bytes) == text
