"""Colours by role, for a dark and a light terminal. Every text role has a contrast of 4.5 or more (WCAG AA)."""

from __future__ import annotations

from collections.abc import Iterable

from rich.style import Style
from rich.text import Text
from textual.theme import Theme

from tui.format import Span

_COLOURS = {  # role: dark, light
    "background": ("#0f131a", "#eef1f5"),
    "surface": ("#141922", "#fbfcfd"),
    "panel": ("#1d2430", "#e2e7ed"),
    "foreground": ("#d5dce6", "#222b37"),
    "border": ("#3a4556", "#b3bdc9"),
    "dim": ("#8594a8", "#566374"),
    "strong": ("#f2f5f9", "#0b1119"),
    "accent": ("#56d4c8", "#00716a"),
    "good": ("#7fd88f", "#1c7434"),
    "busy": ("#8db9ff", "#1d58b8"),
    "calm": ("#a9b6c8", "#4a5869"),
    "warn": ("#f5b95f", "#8a5200"),
    "bad": ("#ff7b7b", "#b92626"),
    "compute": ("#56d4c8", "#007a71"),
    "communicate": ("#bb9bf7", "#7442c8"),
    "wait": ("#8594a8", "#5f6b7c"),
    "train": ("#56d4c8", "#00716a"),
    "validation": ("#f5b95f", "#b25b00"),
}


class Palette:
    """``colours``: role → ``#rrggbb``. The roles are those of ``tui.format.Span``."""

    def __init__(self, colours: dict[str, str]) -> None:
        self.colours = colours
        self._styles = {role: Style(color=colours[role], bold=role == "strong" or None) for role in colours}

    def style(self, role: str) -> Style:
        return self._styles.get(role, self._styles["foreground"])

    def text(self, spans: Iterable[Span]) -> Text:
        """Spans as one line of a table or a panel, never wrapped."""
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        for span in spans:
            line.append(span.text, self.style(span.role))
        return line

    def rgb(self, role: str) -> tuple[int, int, int]:
        colour = self.colours[role]
        return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


DARK, LIGHT = (Palette({role: both[shade] for role, both in _COLOURS.items()}) for shade in (0, 1))


def _theme(name: str, palette: Palette) -> Theme:
    colour = palette.colours
    return Theme(
        name=name,
        dark=palette is DARK,
        primary=colour["accent"],
        secondary=colour["communicate"],
        success=colour["good"],
        warning=colour["warn"],
        error=colour["bad"],
        accent=colour["accent"],
        foreground=colour["foreground"],
        background=colour["background"],
        surface=colour["surface"],
        panel=colour["panel"],
        variables={
            "line": colour["border"],
            "dim": colour["dim"],
            "footer-background": colour["panel"],
            "footer-key-foreground": colour["accent"],
            "footer-description-foreground": colour["foreground"],
            "block-cursor-background": colour["panel"],
            "block-cursor-foreground": colour["strong"],
            "block-cursor-text-style": "none",
            "block-cursor-blurred-background": colour["surface"],
            "block-cursor-blurred-foreground": colour["foreground"],
            "scrollbar": colour["border"],
            "scrollbar-background": colour["surface"],
        },
    )


THEMES = {
    name: (_theme(name, palette), palette) for name, palette in (("p2ptrain-dark", DARK), ("p2ptrain-light", LIGHT))
}
