"""The panel of those that write text: each verifier with its drafters, drawn."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from tui import format as fmt
from tui.chain_art import Row
from tui.chain_panel import ROOMY
from tui.format import Look, Span
from tui.model import Phase
from tui.panels import READABLE_S, Frame, lines, not_connected, seed_address, set_title
from tui.serving import unused, verifiers_of
from tui.serving_art import draw_verifier
from wire.records import ServingInfo


class ServingPanel(VerticalScroll):
    """Who writes text, who drafts for whom, and what it is worth."""

    TOPICS: ClassVar[frozenset[str]] = frozenset({"serving", "peers", "link"})
    TIMED = True
    EVERY_S = READABLE_S

    def __init__(self) -> None:
        super().__init__(id="serving", classes="panel")
        self.border_title = "Serving"
        self._text = Text()

    def compose(self) -> ComposeResult:
        yield Static(id="serving-text")

    def show(self, frame: Frame) -> None:
        count = sum(info.role == "verifier" for info in frame.store.serving.values())
        set_title(self, f"Serving · {count}" if count else "Serving")
        back = "1: ring and training" if self.size.width >= ROOMY else ""
        if self.border_subtitle != back:
            self.border_subtitle = back
        text = lines(serving_rows(frame, self.size.width - 2), frame.palette)
        if text != self._text or text.spans != self._text.spans:
            self._text = text
            self.query_one("#serving-text", Static).update(text)


def serving_rows(frame: Frame, width: int) -> list[Row]:
    """All verifiers, one below the other, and the drafters that nobody uses."""
    store = frame.store
    if store.cluster is None and store.link.phase is not Phase.LIVE:
        return not_connected(frame)

    def look_of(peer_id: str) -> Look:
        peer = store.peers.get(peer_id)
        return fmt.peer_look(peer.state if peer else "")

    rows: list[Row] = []
    for verifier in verifiers_of(store.serving):
        paces = store.paces(verifier.info.id, frame.now, max(1, width))
        rows += [*([[]] if rows else []), *draw_verifier(verifier, look_of, paces, width)]
        if not verifier.drafters:
            rows += [[], [Span("  no drafter: "), Span(_command("drafter", frame), "accent")]]
    if not rows:
        rows = _nobody(frame)
    left = unused(store.serving)
    if left:
        rows += [[], [Span("drafters that no verifier uses: ", "dim"), *_names(left)]]
    return rows


def _names(left: list[ServingInfo]) -> Row:
    return [Span(", ".join(f"{fmt.fit(info.name, 18)} ({fmt.fit(info.model, 20)})" for info in left))]


def _nobody(frame: Frame) -> list[Row]:
    return [
        [Span("nobody writes text yet", "strong")],
        [],
        [Span("A verifier writes with its model; drafters with a small one speed it up:")],
        [Span(f"  {_command('verifier', frame)}", "accent")],
        [Span(f"  {_command('drafter', frame)}", "accent")],
    ]


def _command(role: str, frame: Frame) -> str:
    return f"p2ptrain join {seed_address(frame)} --role {role} --model DIR"
