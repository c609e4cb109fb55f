"""The protocol reference is that of the message schema."""

from __future__ import annotations

from pathlib import Path

from wire.codec import MESSAGE_TYPES
from wire.protocol import document

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "make format writes it"


def test_every_message_is_on_the_page() -> None:
    page = document()
    assert all(f"### {cls.__name__} (kind {cls.KIND}" in page for cls in MESSAGE_TYPES.values())
