"""Texts, durations and sizes, as people write and read them."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core import texts
from p2ptrain.core.errors import UserError
from p2ptrain.core.texts import TEXT_CHARS, human_bytes, install_command, printable, seconds_of, shortened, size_of


@given(st.text(max_size=40), st.integers(1, 20))
def test_what_is_cut_says_so(text: str, most_chars: int) -> None:
    short = shortened(text, most_chars)
    assert len(short) <= most_chars
    assert short == text or (short.endswith("…") and text.startswith(short[:-1]))
    assert printable(text, most_chars).isprintable()


def test_a_path_has_room() -> None:
    text = f"the model in /{'d' * 255}/{'f' * 255} is damaged: fetch it again"
    assert shortened(text) == text
    assert len(shortened("x" * 5000)) == TEXT_CHARS
    assert printable("a\x1b[2Jb") == "a�[2Jb"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60), ("500ms", 0.5), ("30m", 1800), ("1.5h", 5400), (" 2 min ", 120), ("7d", 604_800)],
)
def test_a_duration(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "s", "-1s", "1w", "1e3s", "٣s", "nan", "inf", "1s2s", "9" * 12])
def test_no_duration(text: str) -> None:
    with pytest.raises(UserError, match="not a duration"):
        seconds_of(text)


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


PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("extra", [*tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]])
def test_the_command_installs_the_packages_of_an_extra_for_this_interpreter(extra: str) -> None:
    command = install_command(extra)
    assert command.startswith(f"{sys.executable} -m pip install "), command
    packages = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"][extra]
    assert [word.strip("'") for word in command.split()[4:]] == packages


def test_pipx_and_uv_install_in_their_own_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pipx_metadata.json").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert install_command("experiments") == "pipx inject p2ptrain 'seaborn>=0.13'"
    monkeypatch.undo()
    monkeypatch.setattr(texts, "find_spec", lambda name: None)
    assert install_command("wandb") == f"uv pip install --python {sys.executable} 'wandb>=0.22'"
