"""What commands show of a placement: who holds which layers, and how fast the chain is predicted to be."""

from __future__ import annotations

import math
from typing import Any

import typer

from p2ptrain.cli.output import print_table, printable
from p2ptrain.core.texts import human_bytes
from ring.placement import Placement

_COLUMNS = ("PEER", "LAYERS", "WEIGHTS", "CACHE", "KEPT", "LIMIT", "MS", "HOP MS", "TOKENS/S")


def placement_map(placement: Placement) -> dict[str, Any]:
    """A placement for programs. A rate without bound is null: JSON has no infinity."""
    return {
        "stages": [
            {
                "stage": index,
                "peer": stage.peer.id,
                "name": stage.peer.name,
                "start": stage.start,
                "stop": stage.stop,
                "weights_bytes": stage.weights_bytes,
                "cache_bytes": stage.cache_bytes,
                "kept_bytes": stage.kept_bytes,
                "limit_bytes": stage.peer.memory_bytes,
                "compute_s": stage.compute_s,
                "hop_s": stage.hop_s,
                "tokens_per_s": _finite(stage.tokens_per_s),
            }
            for index, stage in enumerate(placement.stages)
        ],
        "client_hop_s": placement.client_hop_s,
        "token_s": placement.token_s,
        "bottleneck_s": placement.bottleneck_s,
        "tokens_per_s": _finite(placement.tokens_per_s),
    }


def print_placement(placement: Placement) -> None:
    """The stages as a table of 80 columns, in their order, and what the whole chain is predicted to do. ``KEPT``: of
    what a stage gave on, to replay it; ``MS``: computing a token; ``LIMIT``: of the three together."""
    rows = [
        (
            stage.peer.name,
            f"{stage.start}–{stage.stop - 1}" if stage.stop - stage.start > 1 else str(stage.start),
            human_bytes(stage.weights_bytes),
            human_bytes(stage.cache_bytes),
            human_bytes(stage.kept_bytes),
            human_bytes(stage.peer.memory_bytes),
            _ms(stage.compute_s),
            _ms(stage.hop_s),
            _rate(stage.tokens_per_s),
        )
        for stage in placement.stages
    ]
    print_table(_COLUMNS, rows, right=tuple(name for name in _COLUMNS if name not in ("PEER", "LAYERS")))
    print_prediction(placement)


def print_prediction(placement: Placement) -> None:
    """What the whole chain is predicted to do, in a line."""
    slowest_s = placement.bottleneck_s
    count = len(placement.stages)
    typer.echo(
        f"{count} stage{'s' if count != 1 else ''}, predicted at best: {_ms(placement.token_s)} ms a token"
        f" ({_rate(1 / placement.token_s if placement.token_s else math.inf)} tokens/s) for one session,"
        f" {_rate(placement.tokens_per_s)} tokens/s with the chain full, held up by {_slowest(placement, slowest_s)}"
    )


def _slowest(placement: Placement, slowest_s: float) -> str:
    """Whoever keeps the next token longest."""
    stages = placement.stages
    behind = [*(printable(stage.peer.name) for stage in stages[1:]), "here"]
    for stage, following in zip(stages, behind, strict=True):
        busy_s = sum(other.compute_s for other in stages if other.peer.id == stage.peer.id)
        if busy_s >= slowest_s:
            return printable(stage.peer.name)
        if stage.occupied_s >= slowest_s:
            return f"the link from {printable(stage.peer.name)} to {following}"
    return f"the link from here to {printable(stages[0].peer.name)}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}" if seconds < 0.1 else f"{1000 * seconds:,.0f}"


def _rate(tokens_per_s: float) -> str:
    if math.isinf(tokens_per_s):
        return "–"
    return f"{tokens_per_s:,.2f}" if tokens_per_s < 10 else f"{tokens_per_s:,.0f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
