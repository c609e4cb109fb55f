"""Options of commands that use a model whose layers lie on several workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from p2ptrain.core.errors import UserError

DTYPES = ("fp32", "bf16", "fp16")
WIRES = (*DTYPES, "int8")
BEST_NUMBER = 0
"""What a bare ``--split`` means: as many stages as are best."""

SplitOption = Annotated[
    int | None,
    typer.Option(
        "--split",
        metavar="[N]",
        min=0,
        help="Have N workers of the seed compute it, each some of the layers; no number: as many as are fastest.",
    ),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", metavar="TYPE", help="Compute in fp32, bf16 or fp16; default: what the model says.")
]
WireOption = Annotated[
    str,
    typer.Option(
        "--wire",
        metavar="TYPE",
        help="Hidden states travel as fp32, bf16, fp16, or int8 (prompts only); default: as they are computed.",
    ),
]
PositionsOption = Annotated[
    int, typer.Option("--positions", metavar="N", min=0, help="Have caches for so many tokens; 0: for what is asked.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Only show who would hold what, and how fast that would be.")
]
StatsOption = Annotated[
    bool,
    typer.Option(
        "--stats",
        help="Show where a token's time goes: of a verifier, or what each stage of a split model holds and computes.",
    ),
]


class WithBareSplit(TyperCommand):
    """A command whose ``--split`` may stand without its number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, with_number(args))
        except Exception as error:  # of the parser, and whose that is depends on the version of Typer
            word = _behind_split(args)
            if word and "unexpected extra" in str(error) and f"({word})" in str(error):
                remedy = "write --split N, or --split alone: as many as are fastest"
                raise UserError(f"--split {word}: that is no number of parts", remedy=remedy) from None
            raise


def _behind_split(args: list[str]) -> str:
    """What stands where a number may; empty where nothing does."""
    at = args.index("--split") + 1 if "--split" in args else len(args)
    return args[at] if at < len(args) and not args[at].startswith("-") else ""


def with_number(args: list[str]) -> list[str]:
    """The arguments with a number behind every ``--split``."""
    given = list[str]()
    for number, word in enumerate(args):
        if word == "--":
            return [*given, *args[number:]]
        is_bare = word == "--split" and not (number + 1 < len(args) and args[number + 1].isdecimal())
        given.append(f"{word}={BEST_NUMBER}" if is_bare else word)
    return given


_OF_VERIFIERS_TOO = ("--stats", "--sessions")


@dataclass(frozen=True, slots=True)
class SplitWish:
    """How a model is to be split.

    Attributes:
        stages: None for the best number.
        dtype, wire: of the options of that name; empty: not given.
        positions: 0: what is needed.
    """

    stages: int | None
    dtype: str = ""
    wire: str = ""
    positions: int = 0

    @property
    def encodings(self) -> tuple[str, str]:
        """Of what is decoded, and of prompts, as ``Chain.generate`` takes them."""
        return ("", "int8") if self.wire == "int8" else (self.wire, self.wire)


def check_dtype(dtype: str) -> None:
    """Raises ``UserError`` where it is none of ``DTYPES``, nor empty."""
    if dtype and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype} is not a type to compute in", remedy=f"use {', '.join(DTYPES)}")


def split_wish(split: int | None, dtype: str, wire: str, positions: int, **others: bool) -> SplitWish | None:
    """What the options ask for; None where nothing is to be split.

    Args:
        others: options that mean something with ``--split`` only, and whether they were given.

    Raises:
        UserError: they say what cannot be.
    """
    check_dtype(dtype)
    if wire and wire not in WIRES:
        raise UserError(f"--wire {wire} is not a type to send", remedy=f"use {', '.join(WIRES)}")
    if split is None:
        given = {"--dtype": bool(dtype), "--wire": bool(wire), "--positions": bool(positions)}
        given |= {f"--{name.replace('_', '-')}": value for name, value in others.items()}
        if extra := next((name for name, value in given.items() if value), None):
            meant = f"{extra} is for a model that is split"
            if extra in _OF_VERIFIERS_TOO:
                remedy = "add --split; or leave out --checkpoint and --job, so that a verifier writes; or leave it out"
                raise UserError(f"{meant}, or a verifier's", remedy=remedy)
            raise UserError(meant, remedy="add --split, or leave it out")
        return None
    return SplitWish(split or None, dtype, wire, positions)
