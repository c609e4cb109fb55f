"""Reader ``fortune``: files of short texts with a line ``%`` between them, as the program fortune reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO


class FortuneReader:
    """``separator``: the line between two texts."""

    suffixes = (".fortune",)

    def __init__(self, *, separator: str = "%") -> None:
        self._separator = separator.encode()

    def texts(self, stream: BinaryIO) -> Iterator[str | None]:
        lines: list[bytes] = []
        for line in stream:
            if line.rstrip() == self._separator:
                yield self._text(lines)
                lines.clear()
            else:
                lines.append(line)
        yield self._text(lines)

    def _text(self, lines: list[bytes]) -> str | None:
        try:
            return b"".join(lines).decode()
        except UnicodeDecodeError:
            return None  # counted, and left out
