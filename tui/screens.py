"""What lies over the panels for a moment: the help, and the question before something that cannot be undone."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from tui import format as fmt
from tui.chain_art import GONE
from tui.format import Span
from tui.ring_art import SLOWEST
from tui.serving_art import SPENT_LOOKS
from tui.theme import Palette

LEAVE = Binding("ctrl+c", "app.interrupt", show=False)
"""The app's own keys are asleep below a dialog; this one is not."""
KEYS = (
    ("p  r", "pause, resume the job in view"),
    ("s", "save a checkpoint after the next step"),
    ("c", "cancel the job (asks first)"),
    ("1 to 6", "cluster, training, jobs, events, split models, serving"),
    ("tab", "the next table or view"),
    ("↑ ↓", "move in a table; in Jobs: choose the job in view"),
    ("d", "dark or light"),
    ("q", "leave; training goes on"),
)


_CHAIN_LOOKS = {
    "weights": fmt.WEIGHTS,
    "caches": fmt.CACHES,
    "free": fmt.FREE,
    "busy": fmt.BUSY,
    "bubble": fmt.BUBBLE,
    "slowest": SLOWEST,
    "missing": GONE,
}


class HelpScreen(ModalScreen[None]):
    """Keys and symbols."""

    BINDINGS = [  # noqa: RUF012 - Textual's own type
        Binding("escape,question_mark,q,enter", "dismiss", "close"),
        LEAVE,
    ]

    def __init__(self, palette: Palette) -> None:
        super().__init__()
        self._palette = palette

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help", classes="dialog") as dialog:
            dialog.border_title = "Help"
            dialog.border_subtitle = "esc closes"
            yield Static(Text("\n").join(self._palette.text(row) for row in self._rows()))

    def _rows(self) -> list[list[Span]]:
        rows = [[Span(f"{keys:>9}  ", "accent"), Span(what)] for keys, what in KEYS]
        rows += [[], [Span("Peers", "strong")], *_legend(fmt.PEER_LOOKS)]
        rows += [[], [Span("Jobs", "strong")], *_legend(fmt.JOB_LOOKS)]
        rows += [[], [Span("Recoveries", "strong")], *_legend(fmt.PHASE_LOOKS)]
        rows += [[], [Span("Split models", "strong")], *_legend(_CHAIN_LOOKS)]
        rows += [[], [Span("Serving: where a token's time goes", "strong")], *_legend(SPENT_LOOKS)]
        rows += [
            [],
            [Span("An arrow of the ring is lit and walks on with every step that all members committed.", "dim")],
            [
                Span("A box tells the bandwidth and latency to the next member; ", "dim"),
                Span(f"{SLOWEST.symbol} ", SLOWEST.role),
                Span("and dashes are at the slowest.", "dim"),
            ],
        ]
        return rows


def _legend(looks: dict[str, fmt.Look], columns: int = 3) -> list[list[Span]]:
    cells = [(Span(f"  {look.symbol} ", look.role), Span(f"{state:<11}")) for state, look in looks.items()]
    return [[span for cell in cells[at : at + columns] for span in cell] for at in range(0, len(cells), columns)]


class ConfirmScreen(ModalScreen[bool]):
    """A question; ``n``, escape and enter on the button with the focus say no."""

    BINDINGS = [  # noqa: RUF012 - Textual's own type
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape", "answer(False)", "no"),
        Binding("left,right", "app.focus_next", show=False),
        LEAVE,
    ]

    def __init__(self, question: str, consequence: str, yes: str) -> None:
        super().__init__()
        self._question, self._consequence, self._yes = question, consequence, yes

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="confirm", classes="dialog", can_focus=False):
            yield Static(Text(self._question, style="bold"))
            yield Static(Text(self._consequence), id="consequence")
            with Horizontal(id="answers"):
                yield Button("No (n)", id="no", compact=True)
                yield Button(f"{self._yes} (y)", id="yes", variant="error", compact=True)

    def on_mount(self) -> None:
        self.query_one("#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)
