"""Split models as chains: which parts, in the order of their layers, carry a position from the first layer to the last.

Parts come from peers one by one; which of them make a chain is found here. A chain is a way over the layers of a model
that leaves the fewest of them to nobody, then uses the fewest idle parts, then has the fewest stages (a shortest path
over the places where parts begin and end). Of equal parts that work the one is taken that the stage before sends to,
else the busier one. What is left over makes further chains where it is whole, else it is *beside*: held, and in no
chain. The panel shows each chain as a table of its stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from p2ptrain.core.texts import layers_text
from tui import format as fmt
from tui.format import GONE, SLOWEST, Look, Row, Span, fit
from tui.model import Phase
from tui.panels import READABLE_S, ROOMY, Frame, lines, not_connected, seed_address, set_title, what_next
from wire.records import PartInfo

MAX_CHAINS = 16
"""Of one model; what is left is beside them. Each costs a search."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Layers [start, stop) that a chain lacks. ``held``: parts that do not fit in here have all of them."""

    start: int
    stop: int
    held: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    """One way through a model.

    Attributes:
        number: of the chains of this model, from 0.
        stages: parts and gaps in the order of their layers; each begins where the one before stops.
        beside: parts of the model that are in no chain; those of the model's last chain.
        held: layers of the model that somebody holds, in this chain or out of it.
        trains: it is the pipeline of a job, whose id ``model`` is.
    """

    model: str
    name: str
    layers: int
    number: int
    stages: tuple[PartInfo | Gap, ...]
    beside: tuple[PartInfo, ...]
    held: int
    trains: bool = False

    @property
    def parts(self) -> list[PartInfo]:
        """The stages that somebody holds."""
        return [stage for stage in self.stages if isinstance(stage, PartInfo)]

    @property
    def missing(self) -> int:
        """Layers that nobody holds in it."""
        return sum(stage.stop - stage.start for stage in self.stages if isinstance(stage, Gap))

    @property
    def slowest(self) -> PartInfo | None:
        """The stage that one work takes longest, which bounds the chain's pace; None where fewer than two are known."""
        known = [part for part in self.parts if part.compute_ms > 0]
        return max(known, key=lambda part: part.compute_ms) if len(known) > 1 else None

    @property
    def bubble(self) -> float | None:
        """Mean share of the stages' time in which they wait; None where there is none, or none of them works."""
        shares = [1 - part.busy for part in self.parts]
        return sum(shares) / len(shares) if any(share < 1 for share in shares) else None

    @property
    def tokens_per_s(self) -> float:
        """What comes out at its end: the rate of its last stage that somebody holds."""
        return self.parts[-1].tokens_per_s if self.parts else 0.0

    @property
    def sessions(self) -> int:
        return max((part.sessions for part in self.parts), default=0)


def how_to_split(seed: str) -> str:
    """The command that splits a model over the workers of a seed."""
    return f"p2ptrain chat --split -c DIRECTORY --seed {seed}"


def chains_of(parts: Iterable[PartInfo], jobs: Mapping[str, str] | None = None) -> list[Chain]:
    """All chains, by the names of their models; the busiest of a model first.

    Args:
        jobs: names of jobs by id: what one of them trains bears its name.
    """
    models: dict[tuple[str, str, int], list[PartInfo]] = defaultdict(list)
    for part in parts:
        models[(jobs or {}).get(part.model, part.name), part.model, part.layers].append(part)
    return [chain for key in sorted(models) for chain in _chains(*key, models[key], key[1] in (jobs or {}))]


def _chains(name: str, model: str, layers: int, parts: list[PartInfo], trains: bool) -> list[Chain]:
    left = {part.id: part for part in parts}
    held = _union(parts)
    ways: list[tuple[PartInfo | Gap, ...]] = []
    while left and len(ways) < MAX_CHAINS:
        stages = _best_way(list(left.values()), layers)
        if ways and any(isinstance(stage, Gap) for stage in stages):
            break
        ways.append(stages)
        for stage in stages:
            if isinstance(stage, PartInfo):
                del left[stage.id]
    beside = tuple(sorted(left.values(), key=lambda part: (part.start, part.stop, part.peer_name, part.id)))
    return [
        Chain(model, name, layers, number, stages, beside if number == len(ways) - 1 else (), held, trains)
        for number, stages in enumerate(ways)
    ]


def _union(parts: Sequence[PartInfo]) -> int:
    """Layers that at least one of the parts has."""
    total, reached = 0, 0
    for part in sorted(parts, key=lambda part: part.start):
        total += max(0, part.stop - max(part.start, reached))
        reached = max(reached, part.stop)
    return total


def _idle(part: PartInfo) -> bool:
    return not part.sessions and not part.tokens_per_s and not part.busy


def _best_way(parts: Sequence[PartInfo], layers: int) -> tuple[PartInfo | Gap, ...]:
    """Least (layers that nobody holds, idle parts, stages) from layer 0 to ``layers``."""
    choices: dict[tuple[int, int], list[PartInfo]] = defaultdict(list)
    for part in parts:
        choices[part.start, part.stop].append(part)
    places = sorted({0, layers, *(place for ends in choices for place in ends)})
    edges: dict[int, list[tuple[tuple[int, int, int], int, bool]]] = defaultdict(list)  # from → (cost, to, a gap)
    for start, stop in pairwise(places):
        edges[start].append(((stop - start, 0, 0), stop, True))
    for (start, stop), same in choices.items():
        edges[start].append(((0, int(all(map(_idle, same))), 1), stop, False))
    reached: dict[int, tuple[tuple[int, int, int], int, bool]] = {0: ((0, 0, 0), 0, False)}  # to → (cost, from, a gap)
    for place in places:  # in order: every edge leads on
        missing, idle, stages = reached[place][0]
        for (more_missing, more_idle, more_stages), stop, gap in edges[place]:
            cost = (missing + more_missing, idle + more_idle, stages + more_stages)
            if stop not in reached or cost < reached[stop][0]:
                reached[stop] = (cost, place, gap)
    cuts: list[tuple[int, int, bool]] = []
    place = layers
    while place > 0:
        _, start, gap = reached[place]
        cuts.append((start, place, gap))
        place = start
    way: list[PartInfo | Gap] = []
    for start, stop, gap in cuts[::-1]:
        before = way[-1] if way else None
        if not gap:
            way.append(_preferred(choices[start, stop], before.next if isinstance(before, PartInfo) else ""))
            continue
        # From one place to the next, a part has all of the layers or none.
        held = any(part.start <= start and stop <= part.stop for part in parts)
        if isinstance(before, Gap) and before.held == held:
            way[-1] = Gap(before.start, stop, held)
        else:
            way.append(Gap(start, stop, held))
    return tuple(way)


def _preferred(same: Sequence[PartInfo], peer: str) -> PartInfo:
    def rank(part: PartInfo) -> tuple[bool, bool, int, float, str, str]:
        return (_idle(part), part.peer != peer, -part.sessions, -part.tokens_per_s, part.peer_name, part.id)

    return min(same, key=rank)


# ------------------------------------------------------------------------------------------------------ how it is drawn

LEGEND = (
    f"{fmt.WEIGHTS.symbol} weights {fmt.CACHES.symbol} caches {fmt.FREE.symbol} free",
    f"{fmt.BUSY.symbol} busy {fmt.BUBBLE.symbol} bubble",
    f"{SLOWEST.symbol} slowest stage",
)
LookOf = Callable[[str], Look]
"""Peer id → how its state is shown."""


def draw_chain(chain: Chain, look_of: LookOf, width: int) -> list[Row]:
    """A title, and a line per stage with as many columns as fit; each row has at most ``width`` cells."""
    names = min(18, max([cell_len(part.peer_name or part.peer) for part in chain.parts], default=4))
    ranges = max([cell_len(layers_text(stage.start, stage.stop)) for stage in chain.stages], default=1)
    columns = [
        ("layers", max(6, ranges) + 2),
        ("held by", 2 + max(5, names)),
        ("a work", 8),
        ("weights, caches", 20),
        ("busy ░ bubble", 14),
        ("tok/s", 6),
        ("to next", 9),
        ("sessions", 8),
    ]
    rows = fmt.table(columns, [_stage_cells(chain, stage, look_of) for stage in chain.stages], width)
    for row, stage in zip(rows[1:], chain.stages, strict=True):
        if isinstance(stage, Gap):
            why = "no part fits from here" if stage.held else "nobody holds these layers"
            row[:] = [
                Span(fit(f"{layers_text(stage.start, stage.stop):<{ranges + 2}} {GONE.symbol} {why}", width), GONE.role)
            ]
    rows = [_title(chain, width), *rows]
    if chain.beside:
        rows.append(_beside(chain, look_of, width))
    return rows


def _stage_cells(chain: Chain, stage: PartInfo | Gap, look_of: LookOf) -> list[Row]:
    if isinstance(stage, Gap):
        return []
    look, slowest = look_of(stage.peer), stage is chain.slowest
    return [
        [Span(layers_text(stage.start, stage.stop), "strong"), Span(f" {SLOWEST.symbol}" * slowest, SLOWEST.role)],
        [Span(f"{look.symbol} ", look.role), Span(stage.peer_name or stage.peer)],
        [Span(f"{fmt.millis(stage.compute_ms or None):>8}", SLOWEST.role if slowest else "")],
        _memory(stage, 20),
        [
            *fmt.stacked_bar([(fmt.BUSY, stage.busy), (fmt.BUBBLE, 1 - stage.busy)], 1.0, 9),
            Span(f"{fmt.percent(stage.busy):>5}"),
        ],
        [Span(f"{fmt.count(stage.tokens_per_s):>6}")],
        [Span(f"{fmt.size(stage.out_position_bytes or None):>9}", "dim")],
        [Span(f"{fmt.count(stage.sessions):>8}", "dim")],
    ]


def _title(chain: Chain, width: int) -> Row:
    parts = chain.parts
    name = f"{chain.name} #{chain.number + 1}" if chain.number else chain.name
    found = [Span(fit(name, width), "strong")]
    if chain.missing:
        found.append(Span(f"  {GONE.symbol} {chain.missing} of {fmt.plural(chain.layers, 'layer')} missing", GONE.role))
    kind = " · ".join(sorted({part.dtype for part in parts} - {""}))
    pace = f" · {fmt.count(chain.tokens_per_s)} tok/s"
    use = "in training" if chain.trains else fmt.plural(chain.sessions, "session")
    found += [Span(f"  {fmt.plural(chain.layers, 'layer')} · {use}", "dim")]
    found += [Span(pace, "accent" if chain.tokens_per_s else "dim")]
    if chain.bubble is not None:
        found.append(Span(f" · bubble {fmt.percent(chain.bubble)}", "dim"))
    found += [Span(f" · {word}", "dim") for word in (kind, fmt.plural(len(parts), "stage")) if word]
    return fmt.fitting(found[:1], found[1:], width)


def _memory(part: PartInfo, width: int) -> Row:
    if part.limit_bytes <= 0:
        return [Span(fmt.size(part.used_bytes), "dim")]
    share = part.used_bytes / part.limit_bytes
    text = f" {fmt.used_of(part.used_bytes, part.limit_bytes)}"
    used = [(fmt.WEIGHTS, float(part.weights_bytes)), (fmt.CACHES, float(part.cache_bytes))]
    bar = fmt.stacked_bar(used, float(part.limit_bytes), max(4, width - cell_len(text)))
    return [*bar, Span(text, "bad" if share > 0.95 else "warn" if share > 0.85 else "")]


def _beside(chain: Chain, look_of: LookOf, width: int) -> Row:
    row = [Span(fit("beside: ", width), "dim")]
    room = width - 8
    for index, part in enumerate(chain.beside):
        look = look_of(part.peer)
        text = f"{fit(part.peer_name or part.peer, 18)} {layers_text(part.start, part.stop)}  "
        if cell_len(text) + 2 > room - 6:  # room to say how many more there are
            return [*row, Span(fit(f"+{len(chain.beside) - index}", max(0, room)), "dim")]
        row += [Span(f"{look.symbol} ", look.role), Span(text)]
        room -= cell_len(text) + 2
    return row


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
