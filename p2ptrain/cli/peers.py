"""``p2ptrain peers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.lazy import new_typer
from p2ptrain.cli.output import confirm, number, print_json, print_table, printable
from p2ptrain.cli.runtime import DEFAULT_SEED, JsonOption, SeedOption, YesOption, ask, not_empty
from p2ptrain.core.units import human_bytes

if TYPE_CHECKING:
    from wire.records import PeerInfo, ServingInfo

app = new_typer(help="Show who is there, and what each one does; evict one.", invoke_without_command=True)


@app.callback()
def peers(context: typer.Context, seed: SeedOption = DEFAULT_SEED, as_json: JsonOption = False) -> None:
    """Show who is there, and what each one does.

    Where models are served: MODEL is whose, SESSIONS how many texts are under way, ACCEPTED which share of a text's
    next tokens was drafted rightly.

    \b
    Examples:
      p2ptrain peers
      p2ptrain peers --seed 192.168.1.20 --json
      p2ptrain peers evict laptop
    """
    if context.invoked_subcommand is None:
        _list(seed, as_json)


@app.command("list")
def list_peers(seed: SeedOption = DEFAULT_SEED, as_json: JsonOption = False) -> None:
    """Show who is there, and what each one does: the same as `p2ptrain peers`.

    \b
    Examples:
      p2ptrain peers list --json
    """
    _list(seed, as_json)


@app.command("evict")
def evict(
    peer: Annotated[str, typer.Argument(metavar="NAME|ID", callback=not_empty, help="Whom; an id where names repeat.")],
    seed: SeedOption = DEFAULT_SEED,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let a peer go, and refuse its certificate from now on. Its job goes on without it.

    It could come back as another peer with a ticket that is still open: `p2ptrain ticket rotate` closes those.

    \b
    Examples:
      p2ptrain peers evict laptop
    """
    confirm(f"Evict {printable(peer)} for good?", yes=yes)
    gone, name = ask(seed, lambda client: client.evict(peer))
    if as_json:
        print_json({"evicted": gone, "name": name})
        return
    typer.echo(f"{printable(name)} ({printable(gone)}) is evicted")
    typer.echo("It could come back as another peer with an open ticket: p2ptrain ticket rotate closes those.", err=True)


def _list(seed: str, as_json: bool) -> None:
    found = ask(seed, lambda client: client.peers())
    serve = any(peer.model for peer in found)
    serving = {info.id: info for info in ask(seed, lambda client: client.serving())} if serve else {}
    if as_json:
        beside = {"serving": [info.to_map() for info in serving.values()]} if serve else {}
        print_json({"peers": [peer.to_map() for peer in found]} | beside)
        return
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
            f"{human_bytes(peer.memory_bytes)} / {human_bytes(peer.memory_total_bytes)}",
            *(_served(peer, serving.get(peer.id)) if serve else ()),
            peer.address,
        )
        for peer in found
    ]
    figures = ("RANK", "STAGE", "STEP", "RTT MS", "TOKENS/S", "MEMORY")
    of_serving = ("MODEL", "SESSIONS", "ACCEPTED") if serve else ()
    columns = ("NAME", "ID", "ROLES", "STATE", *figures[:3], "DEVICE", *figures[3:], *of_serving, "ADDRESS")
    print_table(columns, rows, right=(*figures, *of_serving[1:]))
    if not found:
        print_hint(seed)


def _served(peer: PeerInfo, serving: ServingInfo | None) -> tuple[str, str, str]:
    """Its model, its sessions, and which share of first drafts was right."""
    alpha = serving.stats.get("alpha") if serving is not None else None
    return peer.model or "-", str(peer.sessions) if peer.model else "-", "-" if alpha is None else f"{alpha:.0%}"


def print_hint(seed: str) -> None:
    join = "TICKET (`p2ptrain ticket new` prints one)" if seed.startswith("@") or "/" in seed else seed
    typer.echo(f"Nobody is here yet. On a machine that is to train: p2ptrain join {join}", err=True)
