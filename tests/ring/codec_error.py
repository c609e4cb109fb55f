"""What a codec does to an all-reduce: a ring played in one process, and a table of its errors. Pure.

With error feedback, a member's *residual* holds what the encoding lost of it so far. In a ring every member encodes
each element once: as its own contribution, as a partial sum, or as the owner's final sum. So after any number of
exchanges, what came out and all residuals together are what went in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ring.codecs.base import F32, Codec
from ring.collectives import owned_range

_HEAVY_TAIL_FREEDOM = 3  # Student's t: the fewest whole degrees of freedom with a finite variance

DISTRIBUTIONS: Final[dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.float64]]]] = {
    "gaussian": lambda draw, numel: draw.standard_normal(numel),
    "heavy-tailed": lambda draw, numel: draw.standard_t(_HEAVY_TAIL_FREEDOM, numel),
}


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Relative errors ||got - exact|| / ||exact|| (L2, against fp64) of one all-reduce.

    Args:
        codec: its name.
        members: how many take part.
        distribution: of the members' gradients, independent of each other; one of ``DISTRIBUTIONS``.
        bytes_per_element: what one element costs on each edge.
        one_shot: of one exchange without error feedback.
        averaged: of the mean of ``rounds`` exchanges of the same gradients, with error feedback where the codec needs
            it. Without it, every round loses the same.
    """

    codec: str
    members: int
    distribution: str
    bytes_per_element: float
    one_shot: float
    averaged: float
    rounds: int


def exchange(gradients: Sequence[F32], codecs: Sequence[Codec], residuals: Sequence[F32] | None = None) -> F32:
    """The sum of ``gradients``, n arrays of shape (numel,), as the ring with a codec makes it: shape (numel,).

    Args:
        codecs: one of each member.
        residuals: error feedback of each member, n arrays of shape (numel,), updated; None: what is lost is lost.
    """
    n, numel = len(gradients), gradients[0].size
    result = np.empty(numel, np.float32)
    for owner in range(n):
        start, stop = owned_range(owner, n, numel)
        total = result[start:stop]
        total[:] = 0
        for hop in range(1, n + 1):
            member = (owner + hop) % n
            value = gradients[member][start:stop] + total
            if residuals is not None:
                value += residuals[member][start:stop]
            encoded = np.empty(codecs[member].encoded_bytes(value.size), np.uint8)
            codecs[member].encode(value, encoded)
            codecs[member].decode(encoded, total)
            if residuals is not None:
                np.subtract(value, total, out=residuals[member][start:stop])
    return result


def error_table(
    new_codec: Callable[[str], Codec],
    names: Sequence[str],
    *,
    members: Sequence[int] = (2, 4, 8),
    numel: int = 1 << 20,
    rounds: int = 50,
    seed: int = 0,
) -> Iterator[ErrorRow]:
    """A row for each codec, number of members and distribution, as soon as it is there; the same for equal arguments.

    Args:
        new_codec: ``ring.codecs.codec_named``.
        names: of the codecs.
        members: sizes of the ring.
        numel: elements of a gradient.
        rounds: over which the error with feedback is averaged.
        seed: of the gradients.
    """
    for distribution, drawn in DISTRIBUTIONS.items():
        for n in members:
            draw = np.random.default_rng(seed)
            gradients = [drawn(draw, numel).astype(np.float32) for _ in range(n)]
            exact: npt.NDArray[np.float64] = np.asarray(np.sum(gradients, axis=0, dtype=np.float64))
            for name in names:
                codecs = [new_codec(name) for _ in range(n)]
                one_shot = relative_error(exchange(gradients, codecs), exact)
                averaged = one_shot
                if codecs[0].feedback:
                    averaged = relative_error(mean_exchange(gradients, codecs, rounds), exact)
                size = codecs[0].encoded_bytes(numel) / numel
                yield ErrorRow(name, n, distribution, size, one_shot, averaged, rounds)


def mean_exchange(gradients: Sequence[F32], codecs: Sequence[Codec], rounds: int) -> npt.NDArray[np.float64]:
    """The mean of ``rounds`` exchanges of the same gradients with error feedback from zero: shape (numel,)."""
    residuals = [np.zeros_like(gradient) for gradient in gradients]
    total = np.zeros(gradients[0].size)
    for _ in range(rounds):
        total += exchange(gradients, codecs, residuals)
    return total / rounds


def relative_error(got: npt.NDArray[np.floating], exact: npt.NDArray[np.float64]) -> float:
    """||got - exact|| / ||exact||, in float64."""
    return float(np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact))
