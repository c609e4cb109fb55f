"""Where a token's time goes in a chain of stages, and what each stage reads, holds and computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from p2ptrain.cli.output import print_table
from p2ptrain.core.activations import IDS, activation_bytes
from p2ptrain.core.texts import human_bytes, layers_text
from roles.chain.client import Chain
from roles.chain.generation import Token

_COLUMNS = ("PEER", "LAYERS", "READ", "RECEIVED", "WEIGHTS", "MEMORY", "MS/TOKEN", "WIRE")


@dataclass(slots=True)
class Meter:
    """Sums over the tokens of one or more texts. The first token of a text is its prompt's and counts apart."""

    tokens: int = 0
    took_s: float = 0.0
    stages_us: list[int] = field(default_factory=list)
    prompts: int = 0
    prompt_s: float = 0.0

    def add(self, token: Token) -> None:
        if token.number == 0:
            self.prompts += 1
            self.prompt_s += token.took_s
        elif not token.mended:  # else it took what mending took
            self.tokens += 1
            self.took_s += token.took_s
            if len(self.stages_us) != len(token.stages_us):
                self.stages_us = [0] * len(token.stages_us)
            self.stages_us = [one + other for one, other in zip(self.stages_us, token.stages_us, strict=True)]


def split_facts(
    chain: Chain, meter: Meter, encoding: str, mendings: Sequence[tuple[str, float]] = ()
) -> dict[str, Any]:
    """All of it, for programs. Times are per token and None where no token but a first one was made.

    ``rest_ms`` is what is neither computing nor the measured links: queueing, the loops of the stages, this program.
    """
    known = meter.tokens > 0
    compute_ms = sum(meter.stages_us) / 1e3 / meter.tokens if known else None
    token_ms = 1e3 * meter.took_s / meter.tokens if known else None
    placement = chain.plan.placement
    link_ms = 1e3 * (placement.client_hop_s + sum(stage.hop_s for stage in placement.stages))
    rest_ms = None if token_ms is None or compute_ms is None else token_ms - compute_ms - link_ms
    return {
        "stages": [_stage(chain, index, meter, encoding) for index in range(len(chain.plan.stages))],
        "token_ms": token_ms,
        "compute_ms": compute_ms,
        "link_ms": link_ms,
        "rest_ms": rest_ms,
        "prompt_ms": 1e3 * meter.prompt_s / meter.prompts if meter.prompts else None,
        "mendings": [{"lost": name, "seconds": seconds} for name, seconds in mendings],
    }


def _stage(chain: Chain, index: int, meter: Meter, encoding: str) -> dict[str, Any]:
    stage, loaded = chain.plan.stages[index], chain.loaded[index]
    is_last = index == len(chain.plan.stages) - 1
    width = activation_bytes(IDS if is_last else encoding, 1, loaded.width)
    return {
        "stage": index,
        "peer": stage.worker.peer_id,
        "name": stage.worker.name,
        "device": loaded.device,
        "start": stage.start,
        "stop": stage.stop,
        "read_bytes": loaded.read_bytes,
        "received_bytes": loaded.received_bytes,
        "weights_bytes": loaded.weights_bytes,
        "resident_bytes": loaded.resident_bytes,
        "compute_ms": meter.stages_us[index] / 1e3 / meter.tokens if meter.tokens else None,
        "wire_bytes": width,
    }


def print_split_facts(facts: dict[str, Any]) -> None:
    """The same as a table of 80 columns, stages in their order, and a line. ``WIRE``: what one token's hop takes."""
    columns = tuple(name for name in _COLUMNS if name != "MS/TOKEN" or facts["compute_ms"] is not None)
    rows = [
        {
            "PEER": stage["name"],
            "LAYERS": layers_text(stage["start"], stage["stop"]),
            "READ": human_bytes(stage["read_bytes"]),
            "RECEIVED": human_bytes(stage["received_bytes"]),
            "WEIGHTS": human_bytes(stage["weights_bytes"]),
            "MEMORY": human_bytes(stage["resident_bytes"]),
            "MS/TOKEN": _ms(stage["compute_ms"]),
            "WIRE": human_bytes(stage["wire_bytes"]),
        }
        for stage in facts["stages"]
    ]
    cells = [[row[name] for name in columns] for row in rows]
    print_table(columns, cells, right=tuple(name for name in columns if name not in ("PEER", "LAYERS")))
    if facts["token_ms"] is not None:
        typer.echo(
            f"a token took {_ms(facts['token_ms'])} ms: {_ms(facts['compute_ms'])} computing"
            f" + {_ms(facts['link_ms'])} on the way + {_ms(facts['rest_ms'])} the rest;"
            f" a prompt {_ms(facts['prompt_ms'])} ms"
        )
    for mending in facts["mendings"]:
        typer.echo(f"{mending['lost']} was lost; the text went on {mending['seconds']:.2f} s later")


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
