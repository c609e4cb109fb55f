"""The panel of split models: each chain, drawn."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from tui import format as fmt
from tui.chain_art import Row, draw_chain
from tui.chains import Chain, chains_of, how_to_split
from tui.format import Look, Span
from tui.model import Phase
from tui.panels import READABLE_S, Frame, lines, not_connected, seed_address, set_title, what_next
from tui.ring_art import SLOWEST

LEGEND = (
    f"{fmt.WEIGHTS.symbol} weights {fmt.CACHES.symbol} caches {fmt.FREE.symbol} free",
    f"{fmt.BUSY.symbol} busy {fmt.BUBBLE.symbol} bubble",
    f"{SLOWEST.symbol} slowest stage",
)


ROOMY = 100
"""From this width on there are no tabs that say how to go back (``tui.app.WIDE_COLUMNS``, less the borders)."""


class ChainsPanel(VerticalScroll):
    """Which peers hold which layers of which models, and how fast the chains are."""

    TOPICS: ClassVar[frozenset[str]] = frozenset({"parts", "peers", "link"})
    TIMED = False
    EVERY_S = READABLE_S

    def __init__(self) -> None:
        super().__init__(id="chains", classes="panel")
        self.border_title = "Chains"
        self._found: tuple[int, list[Chain]] = (-1, [])
        self._text = Text()

    def compose(self) -> ComposeResult:
        yield Static(id="chains-text")

    def show(self, frame: Frame) -> None:
        version = frame.store.versions["parts"]
        if self._found[0] != version:  # peers change far more often
            jobs = {job.id: job.name for job in frame.store.jobs.values()}
            self._found = (version, chains_of(frame.store.parts.values(), jobs))
        chains = self._found[1]
        set_title(self, f"Chains · {len(chains)}" if chains else "Chains")
        back = ("1: ring and training",) if self.size.width >= ROOMY else ()
        legend = "  │  ".join((*LEGEND, *back) if chains else back)
        if self.border_subtitle != legend:
            self.border_subtitle = legend
        rows = chain_rows(frame, chains, self.size.width - 2) if chains else no_chains(frame)
        text = lines(rows, frame.palette)
        if text != self._text or text.spans != self._text.spans:
            self._text = text
            self.query_one("#chains-text", Static).update(text)


def chain_rows(frame: Frame, chains: list[Chain], width: int) -> list[Row]:
    """All chains, one below the other, a blank row between."""

    def look_of(peer_id: str) -> Look:
        peer = frame.store.peers.get(peer_id)
        return fmt.peer_look(peer.state if peer else "")

    rows: list[Row] = []
    for chain in chains:
        rows += [*([[]] if rows else []), *draw_chain(chain, look_of, width)]
    return rows


def no_chains(frame: Frame) -> list[Row]:
    """What to do while no model is split."""
    if frame.store.cluster is None and frame.store.link.phase is not Phase.LIVE:
        return not_connected(frame)
    if not frame.store.peers:
        return what_next(frame)
    return [
        [Span("no model is split over machines yet", "strong")],
        [],
        [Span("Talk to one that no machine here could hold alone:")],
        [Span(f"  {how_to_split(seed_address(frame))}", "accent")],
    ]
