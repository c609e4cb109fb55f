"""Sizes as people write them."""

from __future__ import annotations

import pytest

from p2ptrain.core.errors import UserError
from p2ptrain.core.texts import size_of


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("64K", 65536),
        ("64k", 65536),
        ("1M", 1 << 20),
        ("1MiB", 1 << 20),
        (" 2 GB ", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("2T", 2 << 40),
    ],
)
def test_a_size(text: str, size_bytes: int) -> None:
    assert size_of(text) == size_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "1.", ".5M", "1e9", "nan", "K", "64KM", "much", "٣", "9" * 20])
def test_no_size(text: str) -> None:
    with pytest.raises(UserError, match="is not a size"):
        size_of(text)
