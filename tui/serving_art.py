"""A verifier and its drafters as a drawing. Pure.

◆ vera  large  2 texts · 12.3k tokens so far
  pace      ▁▂▃▅▆▇▇▆▆▇▇▇▇▇▆▆▇▇▇█▇▇▇▇    84.1 tok/s         of each of the last seconds
  a token   █████████▓▓▓░░░░· 19.8 ms · 2.31× alone (45.7 ms)    where its time goes
            █ verify 61%  ▓ draft 12%  ░ wire 20%  ▒ wait 5%  · rest 2%
  drafts    78% right · 3.90 tokens a pass · 31% wasted · 11.2 B a token

  drafter            right          away     its share    drafts/s    right by place in the pass
  ├◆ dora  small     █████▍  78%  4.2 ms   █████▌  92%         61    100%│▇▇ ▆▆ ▅▅ ▅▅
  ├◆ nils  smaller   ████▎   61%   80 ms   ▎        5%         12        │██ ██ ██ ██
  └· look-up here         –                ▏        3%                   └1  2  3  4

Where the width does not take both, the bars stand below the drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.cells import cell_len

from tui import format as fmt
from tui.chain_art import LookOf, Row
from tui.format import UNKNOWN, Look, Span, fit
from tui.serving import Drafter, Verifier

VERIFY, DRAFT, WIRE = Look("█", "compute"), Look("▓", "communicate"), Look("░", "busy")
WAIT, REST = Look("▒", "warn"), Look("·", "border")
SPENT_LOOKS = {"verify": VERIFY, "draft": DRAFT, "wire": WIRE, "wait": WAIT, "rest": REST}
SHARES = (0.97, 1.03)
"""Of the verifier's own speed: between them it is neither slower nor faster."""
_WAITS = 0.1
"""Of a token's time: who waits longer has a token take longer than a step, however fast those are."""
_LABEL = 10
_CHART_ROWS = 3
_LEVELS = " ▁▂▃▄▅▆▇█"
_AXIS = 5
_BAR = 3
_GAP = 4
_ROOMY = 100


def draw_verifier(verifier: Verifier, look_of: LookOf, paces: Sequence[float | None], width: int) -> list[Row]:
    """Rows of spans, each at most ``width`` cells. ``paces``: tokens a second, of each of the last seconds."""
    if width < 1:
        return []
    rows = [_title(verifier, look_of, width)]
    if verifier.wrote:
        figures = [_pace(verifier, paces, width - 2), *_token(verifier, width - 2), *_drafts(verifier, width - 2)]
        rows += [[Span("  "), *row] for row in (map(_faded, figures) if verifier.idle else figures)]
    if not verifier.drafters and not verifier.right_at:
        return [_cut(row, width) for row in rows]
    return [_cut(row, width) for row in (*rows, [], *_below(verifier, look_of, width))]


def _title(verifier: Verifier, look_of: LookOf, width: int) -> Row:
    info, look = verifier.info, look_of(verifier.info.id)
    row = [Span(f"{look.symbol} ", look.role), Span(f"{fit(info.name, 24)}  ", "strong"), Span(fit(info.model, 40))]
    written = verifier.figure("tokens") or 0.0
    told = ["idle" if verifier.idle else fmt.plural(info.sessions, "text")]
    if waiting := verifier.figure("waiting"):
        told.append(f"{fmt.count(waiting)} waiting")
    told += [f"{fmt.count(written)} tokens so far" if written else "nothing written yet"]
    if verifier.idle and verifier.wrote:
        told.append("figures of the last texts")
    if info.http:
        told.append(info.http)
    text = "  "
    for index, word in enumerate(told):  # as many of them as there is room for
        longer = f"{text}{' · ' if index else ''}{word}"
        if sum(cell_len(span.text) for span in row) + cell_len(longer) <= width:
            text = longer
    return [*row, Span(text, "dim")]


def _pace(verifier: Verifier, paces: Sequence[float | None], width: int) -> Row:
    told = f" {fmt.count(verifier.pace):>6} tok/s"
    cells = max(0, width - _LABEL - cell_len(told))
    line = fmt.sparkline(paces, cells) if any(paces) else " " * cells
    return [Span(f"{'pace':<{_LABEL}}", "dim"), Span(line, "calm"), Span(told, "strong")]


def _token(verifier: Verifier, width: int) -> list[Row]:
    """Where the time of a token goes, and what that is of the verifier's by itself."""
    parts = verifier.spent_ms
    whole = sum(spent for _, spent in parts)
    told: Row = [Span(f" {fmt.millis(verifier.figure('token_ms'))}", "strong")]
    if (speed_up := verifier.figure("speed_up")) is not None:
        role = "bad" if speed_up < SHARES[0] else "good" if speed_up > SHARES[1] else "strong"
        alone = verifier.figure("alone_ms")
        step = " a step" if dict(parts).get("wait", 0.0) > _WAITS * whole else ""
        beside = "" if alone is None else f" ({fmt.millis(alone)}{step})"
        words = " as fast as alone" if width >= _ROOMY else " alone"
        told += [Span(" · ", "dim"), Span(f"{speed_up:.2f}×", role), Span(f"{words}{beside}", "dim")]
    cells = width - _LABEL - sum(cell_len(span.text) for span in told)
    bar = fmt.stacked_bar([(SPENT_LOOKS[name], spent) for name, spent in parts], whole, max(4, cells))
    legend: Row = [Span(" " * _LABEL)]
    for name, spent in parts:
        if whole <= 0 or spent < 0.005 * whole:
            continue
        look, word = SPENT_LOOKS[name], f"{name} {fmt.percent(spent / whole)}  "
        if sum(cell_len(span.text) for span in legend) + cell_len(word) + 2 <= width:
            legend += [Span(f"{look.symbol} ", look.role), Span(word)]
    return [[Span(f"{'a token':<{_LABEL}}", "dim"), *bar, *told], legend]


def _drafts(verifier: Verifier, width: int) -> list[Row]:
    told: list[str] = []
    if (alpha := verifier.figure("alpha")) is not None:
        told.append(f"{fmt.percent(alpha)} right")
    if (length := verifier.figure("accepted_length")) is not None:
        told.append(f"{length:.2f} tokens a pass")
    if (wasted := verifier.figure("wasted_share")) is not None:
        told.append(f"{fmt.percent(wasted)} wasted")
    if moved := verifier.figure("bytes_per_token"):
        told.append(f"{moved:.1f} B a token")
    if alone := verifier.figure("alone_share"):
        told.append(f"{fmt.percent(alone)} of passes without")
    row: Row = [Span(f"{'drafts':<{_LABEL}}", "dim")]
    for index, word in enumerate(told):
        text = f"{' · ' if index else ''}{word}"
        if sum(cell_len(span.text) for span in row) + cell_len(text) <= width:
            row.append(Span(text))
    return [row] if told else []


# ----------------------------------------------------------------------------------------------------------- drafters


def _below(verifier: Verifier, look_of: LookOf, width: int) -> list[Row]:
    """The drafters, and beside or below them how often what they say is right, by place."""
    places = verifier.right_at
    places = places[: max(0, (width - 2 - _AXIS) // _BAR)]
    chart = _chart(places)
    if chart and verifier.idle:
        chart = [_faded(row) for row in chart]
    chart_cells = max((_cells(row) for row in chart), default=0)
    table = _drafter_rows(verifier, look_of, width - 2)
    side = 2 + max((_cells(row) for row in table), default=0) + _GAP
    if not table or not chart:
        return [[Span("  "), *row] for row in (table or chart)]
    if side + chart_cells > width:
        return [[Span("  "), *row] for row in (*table, [], *chart)]
    rows: list[Row] = []
    for index in range(max(len(table), len(chart))):
        left: Row = [Span("  "), *(table[index] if index < len(table) else [])]
        right = chart[index] if index < len(chart) else []
        rows.append([*left, Span(" " * (side - _cells(left))), *right])
    return rows


def _drafter_rows(verifier: Verifier, look_of: LookOf, width: int) -> list[Row]:
    drafters = verifier.drafters
    if not drafters:
        return []
    names = [f"{fit(each.name, 18)}  {fit(each.model, 20)}".rstrip() for each in drafters]
    name_cells = min(max([cell_len(name) for name in names] + [12]), max(12, width - 46))
    columns: list[tuple[str, int, Callable[[Drafter], Row]]] = [
        ("right", 12, lambda each: _share_bar(each.alpha, 7, "good")),
        ("  away", 8, lambda each: [Span(f"{fmt.millis(each.latency_ms) if each.peer else '':>8}")]),
        ("  its share", 13, lambda each: [Span("  "), *_share_bar(each.share, 6, "accent")]),
        (" drafts/s", 9, lambda each: [Span(f"{fmt.count(each.pace) if each.peer else '':>9}", "dim")]),
    ]
    room = width - 3 - name_cells
    shown: list[tuple[str, int, Callable[[Drafter], Row]]] = []
    for column in columns:
        if column[1] + 1 > room:
            break
        room -= column[1] + 1
        shown.append(column)
    head = f"{'drafter':<{name_cells + 3}}" + "".join(f" {label:<{cells}}" for label, cells, _ in shown)
    rows: list[Row] = [[Span(head.rstrip(), "dim")]]
    for index, (each, name) in enumerate(zip(drafters, names, strict=True)):
        look = look_of(each.peer) if each.peer else Look("·", "dim")
        text = fit(name, name_cells)
        row = [Span("└" if index + 1 == len(drafters) else "├", "border"), Span(f"{look.symbol} ", look.role)]
        row += [Span(text), Span(" " * (name_cells - cell_len(text)))]
        for _, cells, draw in shown:
            drawn = draw(each)
            row += [Span(" "), *drawn, Span(" " * (cells - _cells(drawn)))]
        rows.append(row)
    return rows


def _share_bar(share: float | None, cells: int, role: str) -> Row:
    if share is None:
        return [Span(f"{UNKNOWN:>{cells + 5}}", "dim")]
    return [Span(fmt.bar(share, cells), role), Span(f"{fmt.percent(share):>5}")]


def _chart(places: Sequence[float]) -> list[Row]:
    """A bar for each place in a pass: how often a draft there was right, where those before it were."""
    if not places:
        return []
    rows: list[Row] = [[Span("right by place in the pass", "dim")]]
    for level in range(_CHART_ROWS, 0, -1):
        row = [Span("100%│" if level == _CHART_ROWS else "    │", "dim")]
        for share in places:
            eighths = round(share * 8 * _CHART_ROWS) - 8 * (level - 1)
            row += [Span(_LEVELS[min(8, max(0, eighths))] * (_BAR - 1), "good"), Span(" ")]
        rows.append(row)
    numbers = "".join(f"{place:<{_BAR}}" for place in range(1, len(places) + 1))
    return [*rows, [Span(f"    └{numbers}".rstrip(), "dim")]]


# -------------------------------------------------------------------------------------------------------------- spans


def _faded(row: Row) -> Row:
    return [Span(span.text, "dim") for span in row]


def _cells(row: Row) -> int:
    return sum(cell_len(span.text) for span in row)


def _cut(row: Row, width: int) -> Row:
    """The row in at most ``width`` cells."""
    kept: Row = []
    for span in row:
        text = fit(span.text, width)
        if text:
            kept.append(Span(text, span.role))
        width -= cell_len(text)
    return kept
