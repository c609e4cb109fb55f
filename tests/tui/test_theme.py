from __future__ import annotations

import pytest
from textual.color import Color

from tui.format import JOB_LOOKS, LEVEL_LOOKS, PEER_LOOKS
from tui.theme import DARK, LIGHT, Palette

TEXT_ROLES = sorted(DARK.colours.keys() - {"background", "surface", "panel", "border"})


@pytest.mark.parametrize("palette", [DARK, LIGHT], ids=["dark", "light"])
@pytest.mark.parametrize("role", TEXT_ROLES)
@pytest.mark.parametrize("ground", ["surface", "panel"])
def test_every_text_can_be_read(palette: Palette, role: str, ground: str):
    """Contrast as WCAG 2.1 defines it: 4.5 on the surface; 3 on the bar under the cursor, which is passing."""
    colours = [Color.parse(palette.colours[name]) for name in (role, ground)]
    lighter, darker = sorted((_luminance(colour) for colour in colours), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= (4.5 if ground == "surface" else 3.0)


def _luminance(colour: Color) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour.normalized]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_look_has_a_role_of_the_palette():
    for looks in (PEER_LOOKS, JOB_LOOKS, LEVEL_LOOKS):
        assert {look.role for look in looks.values()} <= set(TEXT_ROLES)
