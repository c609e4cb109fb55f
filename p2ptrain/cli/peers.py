"""``p2ptrain peers`` and ``p2ptrain parts``: tables of a seed's peers, and of the layers that they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import number, print_json, print_table
from p2ptrain.cli.runtime import JsonOption, SeedOption, YesOption, ask, confirm, not_empty
from p2ptrain.core.texts import human_bytes, layers_text, printable
from wire.address import how_to_join

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tui.chains import Gap, ShownChain
    from wire.records import PartInfo, PeerInfo, ServingInfo

app = new_typer(help="Show peers and what each one does; evict a peer.")


@app.command("list")
def list_peers(seed: SeedOption = "", as_json: JsonOption = False) -> None:
    """Show the peers, and what each one does.

    If models are served: MODEL has the names of a peer's models, SESSIONS the number of texts under way, ACCEPTED how
    often a drafted token is right.

    \b
    Examples:
      p2ptrain peers list
      p2ptrain peers list --seed 192.168.1.20 --json
    """
    found = ask(seed, lambda client: client.peers())
    serve = any(peer.model for peer in found)
    serving = ask(seed, lambda client: client.serving()) if serve else []
    if as_json:
        serving_maps = {"serving": [info.to_map() for info in serving]} if serve else {}
        print_json({"peers": [peer.to_map() for peer in found]} | serving_maps)
        return
    print_peers(found, serving)
    if not found:
        where = ask(seed, lambda client: client.cluster()).address
        typer.echo(f"No peers yet. On a machine that is to train: {how_to_join(where)}", err=True)


def print_peers(found: list[PeerInfo], serving: Sequence[ServingInfo] = ()) -> None:
    pushes = any(peer.accepted or peer.refused for peer in found)
    rows = [
        (
            peer.name,
            peer.id,
            ",".join(map(str, peer.roles)),
            peer.state,
            "-" if peer.rank is None else str(peer.rank),
            "-" if peer.stage is None else f"{peer.stage} of {peer.stages}",
            str(peer.step),
            peer.device,
            number(peer.rtt_ms, ".1f"),
            f"{peer.tokens_per_s:,.0f}",
            f"{human_bytes(peer.memory_bytes)} / {human_bytes(total)}" if (total := peer.memory_total_bytes) else "-",
            *(_serving_cells(peer, [info for info in serving if info.peer == peer.id]) if serving else ()),
            *((str(peer.accepted), str(peer.refused), _describe_staleness(peer)) if pushes else ()),
            peer.place,
        )
        for peer in found
    ]
    figures = ("RANK", "PART", "STEP", "RTT MS", "TOKENS/S", "MEMORY")
    of_serving = ("MODEL", "SESSIONS", "ACCEPTED") if serving else ()
    of_server = ("GRADIENTS", "REFUSED", "STALENESS") if pushes else ()
    columns = ("NAME", "ID", "ROLES", "STATE", *figures[:3], "DEVICE", *figures[3:], *of_serving, *of_server, "ADDRESS")
    less = ("DEVICE", "ADDRESS", "RTT MS", "MEMORY", *of_serving[:0:-1], "RANK", "PART", "STEP", "MODEL", "TOKENS/S")
    print_table(columns, rows, right=(*figures, *of_serving[1:], *of_server), less=less, cut=("NAME",))
    for info in serving:
        if info.role == "verifier":
            typer.echo(_describe_verifier(info))


def _describe_verifier(info: ServingInfo) -> str:
    from tui.format import count, waits_in_words

    texts = f"{info.sessions} running, {info.stats.get('waiting', 0):.0f} waiting"
    known = [texts, f"{count(info.stats.get('tokens_per_s'))} tok/s", *waits_in_words(info.stats)]
    return f"{printable(info.name)}, {printable(info.label)}: {', '.join(known)}"


def _describe_staleness(peer: PeerInfo) -> str:
    return f"{peer.staleness:.1f}, at most {peer.most_staleness}"


@app.command("evict")
def evict(
    peer: Annotated[str, typer.Argument(metavar="NAME|ID", callback=not_empty, help="Peer; its id if names repeat.")],
    seed: SeedOption = "",
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Disconnect a peer, and refuse its certificate from now on. Its job goes on without it.

    It could come back as another peer with a ticket that is still open: `p2ptrain ticket rotate` closes those.

    \b
    Examples:
      p2ptrain peers evict laptop
      p2ptrain peers evict laptop --yes
    """
    confirm(f"Evict {peer} for good?", seed, "peers", peer, yes=yes)
    evicted, name = ask(seed, lambda client: client.evict(peer))
    if as_json:
        print_json({"evicted": evicted, "name": name})
        return
    typer.echo(f"{printable(name)} ({printable(evicted)}) is evicted")
    typer.echo(
        "It could join again as another peer with an open ticket: p2ptrain ticket rotate closes those.", err=True
    )


def _serving_cells(peer: PeerInfo, serving: list[ServingInfo]) -> tuple[str, str, str]:
    alphas = [info.stats.get("alpha") for info in serving] or [None]
    accepted = ", ".join("-" if alpha is None else f"{alpha:.0%}" for alpha in alphas)
    return peer.model or "-", str(peer.sessions) if peer.model else "-", accepted


# ---------------------------------------------------------------------------------------------------------------- parts


COLUMNS = ("MODEL", "LAYERS", "HELD BY", "DTYPE", "MEMORY", "LIMIT", "SESSIONS", "WORK MS", "BUSY", "TOKENS/S",
           "TO NEXT", "NOTE")  # fmt: skip
_FIGURES = COLUMNS[4:-1]


def parts(seed: SeedOption = "", as_json: JsonOption = False) -> None:
    """Show which workers hold which layers of split models, chain by chain.

    MEMORY is weights and caches, LIMIT what the machine gives to parts. WORK MS is the time of one pass. BUSY is the
    share of time that it computes; in the rest, its bubble, it waits for the others. TO NEXT is the bytes of a token on
    its way to the next stage.

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
    less = ("TO NEXT", "LIMIT", "DTYPE", "WORK MS", "SESSIONS", "TOKENS/S", "NOTE", "MEMORY", "BUSY")
    rows = [row for chain in chains_of(found) for row in _chain_rows(chain)]
    print_table(COLUMNS, rows, right=_FIGURES, less=less, cut=("MODEL", "HELD BY"))
    if total > len(found):
        typer.echo(f"{total - len(found)} more parts are held: one answer has no room for them.", err=True)
    if not found:
        typer.echo(f"No model is split over machines yet. To use one: {how_to_split(seed)}", err=True)


def _chain_rows(chain: ShownChain) -> list[tuple[str, ...]]:
    from wire.records import PartInfo

    name = f"{chain.name} #{chain.number + 1}" if chain.number else chain.name
    rows = [
        _part_row(name, stage, "slowest" if stage is chain.slowest else "")
        if isinstance(stage, PartInfo)
        else _gap_row(name, chain, stage)
        for stage in chain.stages
    ]
    return rows + [_part_row(name, part, "in no chain") for part in chain.unchained]


def _gap_row(name: str, chain: ShownChain, gap: Gap) -> tuple[str, ...]:
    why = "no part fits this gap" if gap.held else "nobody holds these layers"
    return (name, f"{layers_text(gap.start, gap.stop)} of {chain.layers}", *(["-"] * (len(COLUMNS) - 3)), why)


def _part_row(name: str, part: PartInfo, note: str) -> tuple[str, ...]:
    return (
        name,
        f"{layers_text(part.start, part.stop)} of {part.layers}",
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
