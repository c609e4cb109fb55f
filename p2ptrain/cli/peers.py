"""``p2ptrain peers``."""

from __future__ import annotations

from p2ptrain.cli.output import checked, human_bytes, number, print_json, print_table
from p2ptrain.cli.runtime import DEFAULT_SEED, JsonOption, SeedOption, ask


def peers(seed: SeedOption = DEFAULT_SEED, as_json: JsonOption = False) -> None:
    """Show who is there, and what each one does.

    \b
    Examples:
      p2ptrain peers
      p2ptrain peers --seed 192.168.1.20 --json
    """
    from wire.records import PeerInfo

    found = [PeerInfo.from_map_untrusted(item) for item in checked(ask(seed, "peers.list"), "peers", list)]
    if as_json:
        print_json({"peers": [peer.to_map() for peer in found]})
        return
    rows = [
        (
            peer.name,
            peer.id,
            ",".join(map(str, peer.roles)),
            peer.state,
            "-" if peer.rank is None else str(peer.rank),
            str(peer.step),
            peer.device,
            number(peer.rtt_ms, ".1f"),
            f"{peer.tokens_per_s:,.0f}",
            f"{human_bytes(peer.memory_bytes)} / {human_bytes(peer.memory_total_bytes)}",
            peer.address,
        )
        for peer in found
    ]
    columns = ("NAME", "ID", "ROLES", "STATE", "RANK", "STEP", "DEVICE", "RTT MS", "TOKENS/S", "MEMORY", "ADDRESS")
    print_table(columns, rows, right=("RANK", "STEP", "RTT MS", "TOKENS/S", "MEMORY"))
    if not found:
        print_hint(seed)


def print_hint(seed: str) -> None:
    import typer

    typer.echo(f"Nobody is here yet. On a machine that is to train: p2ptrain join {seed}", err=True)
