"""``p2ptrain parts``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from p2ptrain.cli.output import print_json, print_table
from p2ptrain.cli.runtime import DEFAULT_SEED, JsonOption, SeedOption, ask
from p2ptrain.core.units import human_bytes

if TYPE_CHECKING:
    from tui.chains import Chain, Gap
    from wire.records import PartInfo

COLUMNS = ("MODEL", "LAYERS", "HELD BY", "DTYPE", "MEMORY", "LIMIT", "SESSIONS", "WORK MS", "BUSY", "TOKENS/S",
           "TO NEXT", "NOTE")  # fmt: skip
_FIGURES = COLUMNS[4:-1]


def parts(seed: SeedOption = DEFAULT_SEED, as_json: JsonOption = False) -> None:
    """Show who holds which layers of which split models, chain by chain.

    MEMORY is weights and caches, LIMIT what the machine gives to parts, WORK MS how long one pass takes there; the rest
    of BUSY is its bubble: the share of time in which it waits for the others. TO NEXT is what a token weighs on its way
    to the next stage.

    \b
    Examples:
      p2ptrain parts
      p2ptrain parts --seed 192.168.1.20 --json
    """
    from tui.chains import chains_of, how_to_split

    found, total = ask(seed, lambda client: client.parts())
    if as_json:
        print_json({"parts": [part.to_map() for part in found], "total": total})
        return
    rows = [row for chain in chains_of(found) for row in _rows(chain)]
    print_table(COLUMNS, rows, right=_FIGURES)
    if total > len(found):
        typer.echo(f"{total - len(found)} more parts are held: an answer has room for these.", err=True)
    if not found:
        typer.echo(f"No model is split over machines yet. To talk to one: {how_to_split(seed)}", err=True)


def _rows(chain: Chain) -> list[tuple[str, ...]]:
    from wire.records import PartInfo

    name = f"{chain.name} #{chain.number + 1}" if chain.number else chain.name
    rows = [
        _row(name, stage, "slowest" if stage is chain.slowest else "")
        if isinstance(stage, PartInfo)
        else _missing(name, chain, stage)
        for stage in chain.stages
    ]
    return rows + [_row(name, part, "in no chain") for part in chain.beside]


def _layers(start: int, stop: int, layers: int) -> str:
    return f"{start}-{stop - 1} of {layers}" if stop - start > 1 else f"{start} of {layers}"


def _missing(name: str, chain: Chain, gap: Gap) -> tuple[str, ...]:
    why = "no part fits in here" if gap.held else "nobody holds these layers"
    return (name, _layers(gap.start, gap.stop, chain.layers), *(["-"] * (len(COLUMNS) - 3)), why)


def _row(name: str, part: PartInfo, note: str) -> tuple[str, ...]:
    return (
        name,
        _layers(part.start, part.stop, part.layers),
        part.peer_name,
        part.dtype,
        human_bytes(part.used_bytes),
        human_bytes(part.limit_bytes) if part.limit_bytes else "-",
        str(part.sessions),
        f"{part.compute_ms:.2f}" if part.compute_ms else "-",
        f"{part.busy:.0%}",
        f"{part.tokens_per_s:,.1f}",
        human_bytes(part.out_position_bytes) if part.out_position_bytes else "-",
        note,
    )
