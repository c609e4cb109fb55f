"""A chain as a drawing: a box per stage in the order of layers, or a line per stage where there are many. Pure.

llama-1b  32 layers · 2 sessions · 31.2 tok/s · bubble 21% · bfloat16 · 2 stages
╭ 0–11 ○ ────────────────────╮              ╭ 12–31 ○ ──────── ! slowest ╮
│ atlas                      │              │ borea                      │
│ ████████▓▓······ 5.2/8 GiB │  4 KiB/tok   │ ████▓▓········· 5.2/12 GiB │    weights, caches, free of the limit
│ ███████▌    4.21 ms a work │─────────────▶│ ███████████ 6.21 ms a work │    beside the slowest stage's
│ ███░░ 61% busy, 39% bubble │              │ █████ 98% busy, 2% bubble  │    busy, and waiting
│ 2 sessions · 31.2 tok/s    │              │ 2 sessions · 31.2 tok/s    │
╰────────────────────────────╯              ╰────────────────────────────╯

Layers that nobody holds are a dashed box.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.cells import cell_len

from p2ptrain.core.texts import layers_text
from tui import format as fmt
from tui.chains import Chain, Gap
from tui.format import Look, Span, fit
from tui.ring_art import SLOWEST, Canvas
from wire.records import PartInfo

MIN_BOX_WIDTH, MAX_BOX_WIDTH = 16, 30
BOX_HEIGHT = 7
GAPS = ((14, 24), (10, 22), (3, MIN_BOX_WIDTH))
"""Cells between boxes, and what these must have then: with ``4.00 KiB/tok`` over the arrow, ``4.00 KiB``, or bare."""
STUB = 3
"""Cells of the arrow that leaves a row of boxes, and of that which enters the next one."""
MAX_BOX_ROWS = 2
GONE = Look("✗", "bad")
MIN_BAR = 4

LookOf = Callable[[str], Look]
"""Peer id → how its state is shown."""
Row = list[Span]


def draw_chain(chain: Chain, look_of: LookOf, width: int) -> list[Row]:
    """Rows of spans, each at most ``width`` cells."""
    if width < 1:
        return []
    rows = [_title(chain, width)]
    shape = _shape(len(chain.stages), width)
    rows += _boxes(chain, look_of, width, *shape) if shape else _lines(chain, look_of, width)
    if chain.beside:
        rows.append(_beside(chain, look_of, width))
    return rows


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
    return _as_fits(found, width)


def _as_fits(spans: Sequence[Span], width: int) -> Row:
    """The first spans that fit, the first one at least."""
    row = list(spans[:1])
    for span in spans[1:]:
        if sum(cell_len(item.text) for item in row) + cell_len(span.text) <= width:
            row.append(span)
    return row


# --------------------------------------------------------------------------------------------------------------- boxes


def _shape(count: int, width: int) -> tuple[int, int, int] | None:
    """Boxes in a row, their width, and the cells between them; None where they do not fit."""
    for rows in range(1, MAX_BOX_ROWS + 1):
        columns = -(-count // rows)
        room = width - (2 * STUB if rows > 1 else 0)
        for gap, least in GAPS:
            box = (room - (columns - 1) * gap) // columns
            if box >= least:
                return columns, min(box, MAX_BOX_WIDTH), gap
    return None


def _boxes(chain: Chain, look_of: LookOf, width: int, columns: int, box: int, gap: int) -> list[Row]:
    stages = chain.stages
    lines = -(-len(stages) // columns)
    canvas = Canvas(width, lines * BOX_HEIGHT)
    left = STUB if lines > 1 else 0
    for index, stage in enumerate(stages):
        x, y = left + (index % columns) * (box + gap), index // columns * BOX_HEIGHT
        last = index + 1 == len(stages)
        if isinstance(stage, Gap):
            _draw_gap(canvas, x, y, box, stage)
        else:
            _draw_stage(canvas, x, y, box, stage, look_of(stage.peer), chain)
        if not last:
            turns = (index + 1) % columns == 0
            _draw_hop(canvas, x + box, y, STUB if turns else gap, stage, stages[index + 1])
            if turns:
                canvas.put(0, y + BOX_HEIGHT + BOX_HEIGHT // 2, "─" * (STUB - 1) + "▶", "dim")
            if isinstance(stage, PartInfo) and (turns or gap == GAPS[-1][0]):
                _put_below(canvas, x, y, box, stage)
    return canvas.spans()


def _draw_stage(canvas: Canvas, x: int, y: int, box: int, part: PartInfo, look: Look, chain: Chain) -> None:
    slowest = chain.slowest is part
    role = SLOWEST.role if slowest else look.role
    canvas.box(x, y, box, BOX_HEIGHT, role)
    title = f" {layers_text(part.start, part.stop)} {look.symbol} "
    canvas.put(x + 1, y, title, role)
    if slowest:
        mark = next(
            text
            for text in (f" {SLOWEST.symbol} slowest ", f" {SLOWEST.symbol} ")
            if cell_len(title + text) <= box - 2 or text == f" {SLOWEST.symbol} "
        )
        canvas.put(x + box - 1 - cell_len(mark), y, mark, SLOWEST.role)
    inner = box - 4
    for row, spans in enumerate(_stage_lines(part, chain, inner)):
        at = x + 2
        for span in spans:
            canvas.put(at, y + 1 + row, span.text, span.role)
            at += cell_len(span.text)


def _stage_lines(part: PartInfo, chain: Chain, inner: int) -> list[Row]:
    longest = chain.slowest.compute_ms if chain.slowest else part.compute_ms
    role = SLOWEST.role if chain.slowest is part else "calm"
    pace = f"{fmt.count(part.tokens_per_s)} tok/s"
    told = [f"{fmt.plural(part.sessions, 'session')} · {pace}", f"{part.sessions} ses · {pace}", pace]
    if chain.trains:
        told = [f"training · {pace}", pace]
    return [
        [Span(fit(part.peer_name or part.peer, inner), "strong")],
        _memory(part, inner),
        _beside_bar(
            lambda cells: [Span(fmt.bar(part.compute_ms / longest if longest > 0 else 0.0, cells), role)],
            (f" {_work(part)} a work", f" {_work(part)}"),
            inner,
        ),
        _beside_bar(
            lambda cells: fmt.stacked_bar([(fmt.BUSY, part.busy), (fmt.BUBBLE, 1 - part.busy)], 1.0, cells),
            (
                f" {fmt.percent(part.busy)} busy, {fmt.percent(1 - part.busy)} bubble",
                f" {fmt.percent(part.busy)} busy",
                f" {fmt.percent(part.busy)}",
            ),
            inner,
        ),
        [Span(next((text for text in told if cell_len(text) <= inner), fit(told[-1], inner)), "dim")],
    ]


def _work(part: PartInfo) -> str:
    return fmt.millis(part.compute_ms or None)


def _memory(part: PartInfo, inner: int) -> Row:
    if part.limit_bytes <= 0:
        return [Span(fit(fmt.size(part.used_bytes), inner), "dim")]
    share = part.used_bytes / part.limit_bytes
    role = "bad" if share > 0.95 else "warn" if share > 0.85 else ""
    used = [(fmt.WEIGHTS, float(part.weights_bytes)), (fmt.CACHES, float(part.cache_bytes))]
    return _beside_bar(
        lambda cells: fmt.stacked_bar(used, float(part.limit_bytes), cells),
        (f" {fmt.used_of(part.used_bytes, part.limit_bytes)}", f" {fmt.percent(share)}"),
        inner,
        role,
    )


def _beside_bar(bar: Callable[[int], Row], texts: Sequence[str], width: int, role: str = "") -> Row:
    """A bar, and the longest of the texts that leaves ``MIN_BAR`` cells for it, at the right edge."""
    text = next((text for text in texts if cell_len(text) + MIN_BAR <= width), "")
    return [*bar(width - cell_len(text)), Span(text, role)]


def _draw_gap(canvas: Canvas, x: int, y: int, box: int, gap: Gap) -> None:
    canvas.dashed = True
    canvas.box(x, y, box, BOX_HEIGHT, GONE.role)
    canvas.dashed = False
    canvas.put(x + 1, y, f" {layers_text(gap.start, gap.stop)} {GONE.symbol} ", GONE.role)
    for row, text in enumerate(_why(gap)):
        canvas.put(x + 2, y + 2 + row, fit(text, box - 4), GONE.role)


def _why(gap: Gap) -> tuple[str, str]:
    return ("no part fits", "from here") if gap.held else ("nobody holds", "these layers")


def _draw_hop(canvas: Canvas, x: int, y: int, cells: int, stage: PartInfo | Gap, after: PartInfo | Gap) -> None:
    """The arrow from a box to the next, and what a token weighs on it; dashed where one of the two is missing."""
    canvas.dashed = isinstance(stage, Gap) or isinstance(after, Gap)
    row = y + BOX_HEIGHT // 2
    canvas.put(x, row, "─" * (cells - 1) + "▶", "dim")
    canvas.dashed = False
    weight = fmt.size(stage.out_position_bytes) if isinstance(stage, PartInfo) and stage.out_position_bytes else ""
    text = next((text for text in (f"{weight}/tok", weight) if weight and cell_len(text) + 2 <= cells), "")
    canvas.put(x + (cells - cell_len(text)) // 2, row - 1, text, "dim")


def _put_below(canvas: Canvas, x: int, y: int, box: int, part: PartInfo) -> None:
    """What a token weighs on the way from here, on the box's lower edge: between the boxes there is no room."""
    if not part.out_position_bytes:
        return
    weight = fmt.size(part.out_position_bytes)
    text = next((text for text in (f" {weight}/tok ▶ ", f" {weight} ▶ ") if cell_len(text) <= box - 3), "")
    canvas.put(x + box - 2 - cell_len(text), y + BOX_HEIGHT - 1, text, "dim")


# --------------------------------------------------------------------------------------------------------------- lines


def _lines(chain: Chain, look_of: LookOf, width: int) -> list[Row]:
    """A header line, and a line per stage with as many columns as fit."""
    parts = chain.parts
    ranges = max([cell_len(layers_text(stage.start, stage.stop)) for stage in chain.stages], default=1)
    names = min(18, max([cell_len(part.peer_name or part.peer) for part in parts], default=4))
    columns: list[tuple[str, int, Callable[[PartInfo], Row]]] = [
        ("layers", max(6, ranges), lambda part: [Span(layers_text(part.start, part.stop), "strong")]),
        ("", 1, lambda part: [Span(SLOWEST.symbol if part is chain.slowest else " ", SLOWEST.role)]),
        ("held by", 2 + max(5, names), lambda part: _name(part, look_of(part.peer), max(5, names))),
        ("a work", 8, lambda part: [Span(f"{_work(part):>8}", SLOWEST.role if part is chain.slowest else "")]),
        ("weights, caches", 20, lambda part: _memory(part, 20)),
        (
            "busy ░ bubble",
            14,
            lambda part: _beside_bar(
                lambda cells: fmt.stacked_bar([(fmt.BUSY, part.busy), (fmt.BUBBLE, 1 - part.busy)], 1.0, cells),
                (f"{fmt.percent(part.busy):>5}",),
                14,
            ),
        ),
        ("tok/s", 6, lambda part: [Span(f"{fmt.count(part.tokens_per_s):>6}")]),
        ("to next", 9, lambda part: [Span(f"{fmt.size(part.out_position_bytes or None):>9}", "dim")]),
        ("sessions", 8, lambda part: [Span(f"{fmt.count(part.sessions):>8}", "dim")]),
    ]
    room = width
    shown: list[tuple[str, int, Callable[[PartInfo], Row]]] = []
    for column in columns:
        if column[1] + (1 if shown else 0) > room:
            break
        room -= column[1] + (1 if shown else 0)
        shown.append(column)
    rows = [_joined([[Span(fit(label, cells), "dim")] for label, cells, _ in shown], [cells for _, cells, _ in shown])]
    for stage in chain.stages:
        if isinstance(stage, Gap):
            text = f"{layers_text(stage.start, stage.stop):<{max(6, ranges)}} {GONE.symbol} {' '.join(_why(stage))}"
            rows.append([Span(fit(text, width), GONE.role)])
        else:
            rows.append(_joined([draw(stage) for _, _, draw in shown], [cells for _, cells, _ in shown]))
    return rows


def _name(part: PartInfo, look: Look, cells: int) -> Row:
    return [Span(f"{look.symbol} ", look.role), Span(fit(part.peer_name or part.peer, cells))]


def _joined(cells: Sequence[Row], widths: Sequence[int]) -> Row:
    """Cells cut or padded to their widths, one blank between."""
    row: Row = []
    for spans, width in zip(cells, widths, strict=True):
        row += [Span(" ")] if row else []
        for span in spans:
            text = fit(span.text, width)
            width -= cell_len(text)
            row.append(Span(text, span.role))
        row.append(Span(" " * width))
    return row


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
