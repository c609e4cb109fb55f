"""Colours by role, for a dark and a light terminal. Every text role has a contrast of 4.5 or more (WCAG AA)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text
from textual.theme import Theme

from tui.format import Span


@dataclass(frozen=True, slots=True)
class Palette:
    """Role → ``#rrggbb``. The roles are those of ``tui.format.Span``."""

    background: str
    surface: str
    panel: str
    foreground: str
    border: str
    dim: str
    strong: str
    accent: str
    good: str
    busy: str
    calm: str
    warn: str
    bad: str
    compute: str
    communicate: str
    wait: str
    train: str
    validation: str

    def style(self, role: str) -> Style:
        """The style of a role; an unknown role is the plain foreground."""
        colour = getattr(self, role, self.foreground) if role else self.foreground
        return Style(color=colour, bold=role == "strong" or None)

    def text(self, spans: Iterable[Span], *, right: bool = False) -> Text:
        """Spans as one line of a table or a panel, never wrapped."""
        line = Text(no_wrap=True, overflow="ellipsis", end="", justify="right" if right else None)
        for span in spans:
            line.append(span.text, self.style(span.role))
        return line

    def rgb(self, role: str) -> tuple[int, int, int]:
        """The colour as plotext wants it."""
        colour: str = getattr(self, role)
        return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


DARK = Palette(
    background="#0f131a",
    surface="#141922",
    panel="#1d2430",
    foreground="#d5dce6",
    border="#3a4556",
    dim="#8594a8",
    strong="#f2f5f9",
    accent="#56d4c8",
    good="#7fd88f",
    busy="#8db9ff",
    calm="#a9b6c8",
    warn="#f5b95f",
    bad="#ff7b7b",
    compute="#56d4c8",
    communicate="#bb9bf7",
    wait="#8594a8",
    train="#56d4c8",
    validation="#f5b95f",
)
LIGHT = Palette(
    background="#eef1f5",
    surface="#fbfcfd",
    panel="#e2e7ed",
    foreground="#222b37",
    border="#b3bdc9",
    dim="#566374",
    strong="#0b1119",
    accent="#00716a",
    good="#1c7434",
    busy="#1d58b8",
    calm="#4a5869",
    warn="#8a5200",
    bad="#b92626",
    compute="#007a71",
    communicate="#7442c8",
    wait="#5f6b7c",
    train="#00716a",
    validation="#b25b00",
)


def _theme(name: str, palette: Palette, *, dark: bool) -> Theme:
    return Theme(
        name=name,
        dark=dark,
        primary=palette.accent,
        secondary=palette.communicate,
        accent=palette.accent,
        success=palette.good,
        warning=palette.warn,
        error=palette.bad,
        foreground=palette.foreground,
        background=palette.background,
        surface=palette.surface,
        panel=palette.panel,
        variables={
            "line": palette.border,
            "dim": palette.dim,
            "footer-background": palette.panel,
            "footer-key-foreground": palette.accent,
            "footer-description-foreground": palette.foreground,
            "block-cursor-background": palette.panel,
            "block-cursor-foreground": palette.strong,
            "block-cursor-text-style": "none",
            "block-cursor-blurred-background": palette.surface,
            "block-cursor-blurred-foreground": palette.foreground,
            "scrollbar": palette.border,
            "scrollbar-background": palette.surface,
        },
    )


THEMES = {
    "p2ptrain-dark": (_theme("p2ptrain-dark", DARK, dark=True), DARK),
    "p2ptrain-light": (_theme("p2ptrain-light", LIGHT, dark=False), LIGHT),
}


def text_roles() -> list[str]:
    """The roles that texts are written in (all but the surfaces and the lines)."""
    surfaces = {"background", "surface", "panel", "border"}
    return [item.name for item in dataclasses.fields(Palette) if item.name not in surfaces]
