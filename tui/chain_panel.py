"""The panel of split models: draws their chains."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len

from p2ptrain.core.texts import layers_text
from tui import format as fmt
from tui.chains import Gap, ShownChain, chains_of, how_to_split
from tui.format import ABSENT, SLOWEST, Look, Row, Span, fit
from tui.panels import ROOMY, Frame, TextPanel, advice, explain_connection, seed_address, what_next
from wire.records import PartInfo

LEGEND = (
    f"{fmt.WEIGHTS.symbol} weights {fmt.CACHES.symbol} caches {fmt.FREE.symbol} free",
    f"{fmt.BUSY.symbol} busy {fmt.BUBBLE.symbol} bubble",
    f"{SLOWEST.symbol} slowest stage",
)
LookOf = Callable[[str], Look]
"""Peer id → how its state is shown."""


def draw_chain(chain: ShownChain, look_of: LookOf, width: int, way_of: fmt.WayOf) -> list[Row]:
    names = min(18, max([cell_len(part.peer_name or part.peer) for part in chain.parts], default=4))
    ranges = max([cell_len(layers_text(stage.start, stage.stop)) for stage in chain.stages], default=1)
    columns = [
        ("layers", max(6, ranges) + 2),
        ("held by", 2 + max(5, names)),
        ("request", 8),
        ("weights, caches", 20),
        ("busy ░ bubble", 14),
        ("tok/s", 6),
        ("to next", 9),
        ("sessions", 8),
    ]
    ways = [way_of(stage.peer, stage.next) if isinstance(stage, PartInfo) else "" for stage in chain.stages]
    columns += [fmt.WAY_COLUMN] * any(ways)
    stages = zip(chain.stages, ways, strict=True)
    cells = [[*_stage_cells(chain, stage, look_of), [Span(way, "dim")]] for stage, way in stages]
    rows = fmt.table(columns, cells, width)
    for row, stage in zip(rows[1:], chain.stages, strict=True):
        if isinstance(stage, Gap):
            why = "no part fits from here" if stage.held else "nobody holds these layers"
            text = f"{layers_text(stage.start, stage.stop):<{ranges + 2}} {ABSENT.symbol} {why}"
            row[:] = [Span(fit(text, width), ABSENT.role)]
    rows = [_title(chain, width), *rows]
    unchained = [
        (look_of(part.peer), f"{fit(part.peer_name or part.peer, 18)} {layers_text(part.start, part.stop)}  ")
        for part in chain.unchained
    ]
    return [*rows, fmt.list_items("beside: ", unchained, width)] if unchained else rows


def _stage_cells(chain: ShownChain, stage: PartInfo | Gap, look_of: LookOf) -> list[Row]:
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


def _title(chain: ShownChain, width: int) -> Row:
    parts = chain.parts
    name = f"{chain.name} #{chain.number + 1}" if chain.number else chain.name
    found = [Span(fit(name, width), "strong")]
    if chain.missing:
        text = f"  {ABSENT.symbol} {chain.missing} of {fmt.plural(chain.layers, 'layer')} missing"
        found.append(Span(text, ABSENT.role))
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


class ChainsPanel(TextPanel):
    NAME = "chains"
    TOPICS = frozenset({"parts", "peers", "link"})

    def show(self, frame: Frame) -> None:
        chains = chains_of(frame.store.parts.values(), {job.id: job.name for job in frame.store.jobs.values()})
        back = ("1: ring and training",) if self.size.width >= ROOMY else ()
        rows: list[Row] = []
        for chain in chains:
            rows += [*([[]] if rows else []), *draw_chain(chain, frame.look_of, self.size.width - 2, frame.store.way)]
        self.set_title(len(chains), "  │  ".join((*LEGEND, *back) if chains else back))
        self.draw(rows or no_chains(frame), frame)


def no_chains(frame: Frame) -> list[Row]:
    if frame.unconnected:
        return explain_connection(frame)
    if not frame.store.peers:
        return what_next(frame)
    text = "Talk to one that no machine here could hold alone:"
    return advice("no model is split over machines yet", text, how_to_split(seed_address(frame)))
