"""The serving view: verifiers with their drafters, from what each reports.

Unknown figures are None. A verifier's figures describe the last tokens that it wrote. While it writes none they are
outdated and shown faded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from tui import format as fmt
from tui.format import UNKNOWN, Look, Row, Span, fit
from tui.panels import ROOMY, Frame, TextPanel, advice, explain_connection, seed_address
from wire.address import how_to_join
from wire.records import ServingInfo
from wire.text_messages import DrafterFigures

LABEL = 10
"""Cells of the label before a line of figures."""


@dataclass(frozen=True, slots=True)
class ShownDrafter:
    """A drafter of one verifier. ``pace``: drafts per second, for all its verifiers."""

    figures: DrafterFigures
    name: str
    model: str
    pace: float | None


def verifiers_of(serving: Mapping[str, ServingInfo]) -> list[ServingInfo]:
    """All models of verifiers: active ones first, then by the verifier's name."""
    found = [info for info in serving.values() if info.role == "verifier"]
    return sorted(found, key=lambda info: (not info.sessions, info.name, info.id))


def unused_drafters(serving: Mapping[str, ServingInfo]) -> list[ServingInfo]:
    used = {drafter.peer for info in serving.values() for drafter in info.drafters}
    found = [info for info in serving.values() if info.role == "drafter" and info.peer not in used]
    return sorted(found, key=lambda info: (info.name, info.id))


def drafters_of(info: ServingInfo, serving: Mapping[str, ServingInfo]) -> list[ShownDrafter]:
    """The drafters of a verifier, those that are right most often first."""
    found, served = [], {other.peer: other for other in serving.values()}
    for figures in info.drafters:
        if (known := served.get(figures.peer)) is not None:
            found.append(ShownDrafter(figures, known.name, known.model, known.stats.get("tokens_per_s")))
        else:
            found.append(ShownDrafter(figures, figures.peer, "", None))
    return sorted(found, key=lambda shown: (-(shown.figures.alpha or 0.0), shown.name, shown.figures.peer))


def draw_verifier(
    info: ServingInfo,
    drafters: Sequence[ShownDrafter],
    look_of: Callable[[str], Look],
    paces: Sequence[float | None],
    width: int,
    way_of: fmt.WayOf,
) -> list[Row]:
    """Rows of spans, each at most ``width`` cells. ``paces``: tokens per second, for each of the last seconds."""
    rows = [_title(info, look_of, width)]
    figures: list[Row] = []
    if "token_ms" in info.stats:
        waits = _labelled("waits", fmt.waits_in_words(info.stats), width - 2)
        figures = [_pace(info, paces, width - 2), *waits, *_token(info, width - 2), *_drafts(info, width - 2)]
    if not info.sessions:
        figures = [[Span(span.text, "dim") for span in row] for row in figures]
    rows += [[Span("  "), *row] for row in figures]
    if drafters:
        table = _drafter_rows(info.peer, drafters, look_of, width - 2, way_of)
        rows += [[], *([Span("  "), *row] for row in table)]
    return [fmt.cut(row, width) for row in rows]


def _title(info: ServingInfo, look_of: Callable[[str], Look], width: int) -> Row:
    look = look_of(info.peer)
    row = [Span(f"{look.symbol} ", look.role), Span(f"{fit(info.name, 24)}  ", "strong"), Span(fit(info.label, 40))]
    written = info.stats.get("tokens", 0.0)
    parts = [fmt.plural(info.sessions, "text") if info.sessions else "idle"]
    if waiting := info.stats.get("waiting"):
        parts.append(f"{fmt.count(waiting)} waiting")
    parts += [f"{fmt.count(written)} tokens so far" if written else "nothing written yet"]
    if not info.sessions and "token_ms" in info.stats:
        parts.append("figures of the last texts")
    if info.http:
        parts.append(info.http)
    return fmt.fitting(row, _join_with_dots(parts, "  ", "dim"), width)


def _pace(info: ServingInfo, paces: Sequence[float | None], width: int) -> Row:
    text = f" {fmt.count(info.stats.get('tokens_per_s', 0.0)):>6} tok/s"
    cells = max(0, width - LABEL - cell_len(text))
    line = fmt.sparkline(paces, cells) if any(paces) else " " * cells
    return [Span(f"{'pace':<{LABEL}}", "dim"), Span(line, "calm"), Span(text, "strong")]


def _token(info: ServingInfo, width: int) -> list[Row]:
    parts = [(name, max(0.0, info.stats.get(f"{name}_ms", 0.0))) for name in fmt.SPENT_LOOKS]
    whole = sum(spent for _, spent in parts)
    row: Row = [Span(f" {fmt.millis(info.stats.get('token_ms'))}", "strong")]
    if (speed_up := info.stats.get("speed_up")) is not None:
        role = "bad" if speed_up < 0.97 else "good" if speed_up > 1.03 else "strong"
        alone = info.stats.get("alone_ms")
        beside = f" ({fmt.millis(alone)})" if alone is not None else ""
        row += [Span(f" · {speed_up:.2f}×", role), Span(f" as fast as alone{beside}", "dim")]
    looks = [(fmt.SPENT_LOOKS[name], spent) for name, spent in parts]
    bar = fmt.stacked_bar(looks, whole, max(4, width - LABEL - fmt.cells(row)))
    legend: Row = [Span(" " * LABEL)]
    for name, spent in parts:
        if whole > 0 and spent >= 0.005 * whole:
            look = fmt.SPENT_LOOKS[name]
            legend += [Span(f"{look.symbol} ", look.role), Span(f"{name} {fmt.percent(spent / whole)}  ")]
    return [[Span(f"{'a token':<{LABEL}}", "dim"), *bar, *row], fmt.cut(legend, width)]


def _drafts(info: ServingInfo, width: int) -> list[Row]:
    parts: list[str] = []
    if (alpha := info.stats.get("alpha")) is not None:
        parts.append(f"{fmt.percent(alpha)} right")
    for name, words in (
        ("accepted_length", "{:.2f} tokens a pass"),
        ("wasted_share", "{:.0%} wasted"),
        ("bytes_per_token", "{:.1f} B a token"),
        ("alone_share", "{:.0%} of passes without"),
    ):
        if (value := info.stats.get(name)) is not None:
            parts.append(words.format(value))
    return _labelled("drafts", parts, width)


def _labelled(label: str, parts: Sequence[str], width: int) -> list[Row]:
    row = [Span(f"{label:<{LABEL}}", "dim")]
    return [fmt.fitting(row, _join_with_dots(parts, "", ""), width)] if parts else []


def _join_with_dots(words: Sequence[str], first: str, role: str) -> Row:
    return [Span(f"{' · ' if index else first}{word}", role) for index, word in enumerate(words)]


def _drafter_rows(
    peer: str, drafters: Sequence[ShownDrafter], look_of: Callable[[str], Look], width: int, way_of: fmt.WayOf
) -> list[Row]:
    names = max([cell_len(drafter.name) + cell_len(drafter.model) + 4 for drafter in drafters])
    columns = [("drafter", min(42, names)), ("right", 12), ("    away", 8), (" drafts/s", 9)]
    ways = [way_of(peer, drafter.figures.peer) for drafter in drafters]
    columns += [fmt.WAY_COLUMN] * any(ways)
    rows = []
    for drafter, way in zip(drafters, ways, strict=True):
        figures, look = drafter.figures, look_of(drafter.figures.peer)
        name = [
            Span(f"{look.symbol} ", look.role),
            Span(fit(drafter.name, 18)),
            Span(f"  {fit(drafter.model, 20)}", "dim"),
        ]
        away, pace = Span(f"{fmt.millis(figures.latency_ms):>8}"), Span(f"{fmt.count(drafter.pace):>9}", "dim")
        rows.append([name, _right_bar(figures.alpha), [away], [pace], [Span(way, "dim")]])
    return fmt.table(columns, rows, width)


def _right_bar(alpha: float | None) -> Row:
    if alpha is None:
        return [Span(f"{UNKNOWN:>12}", "dim")]
    return [Span(fmt.bar(alpha, 7), "good"), Span(f"{fmt.percent(alpha):>5}")]


class ServingPanel(TextPanel):
    NAME = "serving"
    TOPICS = frozenset({"serving", "peers", "link"})
    TIMED = True

    def show(self, frame: Frame) -> None:
        count = sum(info.role == "verifier" for info in frame.store.serving.values())
        self.set_title(count, "1: ring and training" if self.size.width >= ROOMY else "")
        self.draw(serving_rows(frame, self.size.width - 2), frame)


def serving_rows(frame: Frame, width: int) -> list[Row]:
    store = frame.store
    if frame.unconnected:
        return explain_connection(frame)
    rows: list[Row] = []
    for info in verifiers_of(store.serving):
        paces, drafters = store.paces(info.id, frame.now, max(1, width)), drafters_of(info, store.serving)
        rows += [*([[]] if rows else []), *draw_verifier(info, drafters, frame.look_of, paces, width, store.way)]
        if not drafters:
            rows += [[], [Span("  no drafter: "), Span(how_to_join(seed_address(frame), "drafter"), "accent")]]
    if not rows:
        text = "A verifier writes with its model; drafters with a small one speed it up:"
        commands = [how_to_join(seed_address(frame), role) for role in ("verifier", "drafter")]
        rows = advice("no verifier has joined yet", text, *commands)
    left = unused_drafters(store.serving)
    if left:
        names = ", ".join(f"{fit(info.name, 18)} ({fit(info.model, 20)})" for info in left)
        rows += [[], [Span("drafters that no verifier uses: ", "dim"), Span(names)]]
    return rows
