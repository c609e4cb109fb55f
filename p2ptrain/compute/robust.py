"""Robust rules: aggregate n members' vectors so that f wrong ones among them change the result little.

Every member applies the same rule to the same vectors, so all get the same bits. A vector arrives in pieces, each of
shape (n, numel), row r from rank r. Everything runs over blocks that fit a cache, so there is no second copy of the
vectors. Only numpy's element-wise operations and sums are used: the number of threads changes no bit.

Most rules are a weighted mean of the vectors, whose weights follow from their squared distances. ``median`` and
``trimmed_mean`` look at each coordinate alone, and ``bulyan`` at each coordinate of the vectors that it selects.

A vector that is not finite, or is ``LONGEST`` times longer than the median one, counts as zeros: it is one of the f.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float32]
Squares: TypeAlias = npt.NDArray[np.float64]

BLOCK_NUMEL = 1 << 14
LONGEST = 1e6
WEISZFELD_STEPS = 64
CLIPPING_STEPS = 5
BY_COORDINATE = frozenset({"median", "trimmed_mean"})


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the members, in rank order.

    Attributes:
        distances: L2 distance of each vector to the aggregate; empty if they were not asked for.
        excluded: ranks whose vectors the rule left out, or counted as zeros.
    """

    distances: tuple[float, ...]
    excluded: tuple[int, ...]


def aggregate(
    rule: str,
    byzantine: int,
    pieces: Sequence[Array],
    out: Array,
    center: Array | None = None,
    *,
    measured: bool = True,
) -> Scores:
    """Write the aggregate into ``out``, shape (numel,): the pieces' columns, one piece after the other.

    Args:
        rule: one of ``configs.schema.Robust``.
        byzantine: f. The caller has checked n against it (``configs.schema.Robust.least``).
        center: shape (numel,): where 'centered_clipping' begins; None: zero.
        measured: whether to compute the distances to the aggregate, which takes another pass over the vectors.
    """
    members = len(pieces[0])
    with np.errstate(over="ignore", invalid="ignore"):
        points = [*range(members), members]  # the last point is the center
        squares = np.zeros((members + 1, members + 1))
        by_distance = rule != "mean" and rule not in BY_COORDINATE
        for rows, place in _blocks(pieces):
            middle = center[place] if center is not None else np.zeros(rows.shape[1], np.float32)
            every = [*rows, middle]
            for one in points:
                for other in points[one + 1 :] if by_distance else points[max(one + 1, members) :]:
                    squares[one, other] += _square_distance(every[one], every[other])
        squares += squares.T
        fit = [True] * members if rule == "mean" else _fit(squares[:members, members])
        for one in (rank for rank in range(members) if not fit[rank]):  # as zeros, so where the center is
            squares[one, :], squares[:, one] = squares[members], squares[:, members]
            squares[one, one] = squares[one, members] = squares[members, one] = 0.0
        combine, used = _combination(rule, squares, byzantine, fit)
        apart = np.zeros(members)
        for rows, place in _blocks(pieces):
            zeros = np.zeros(rows.shape[1], np.float32)
            block = [row if fit[rank] else zeros for rank, row in enumerate(rows)]
            combine(block, zeros if center is None else center[place], out[place])
            if measured:
                apart += [_square_distance(row, out[place]) for row in rows]
    excluded = tuple(rank for rank in range(members) if rank not in used or not fit[rank])
    distances = tuple(math.sqrt(square) if square >= 0 else math.inf for square in apart) if measured else ()
    return Scores(distances, excluded)


def middle_of(rows: Array, rule: str) -> Array:
    """The numbers behind the vectors, such as losses, from those of all members, shape (n, numel): their median over
    finite ones, with 'mean' the mean."""
    if rule == "mean":
        return np.asarray(np.add.reduce(rows, axis=0) / np.float32(len(rows)), np.float32)
    return np.array([median_low([float(it) for it in column if np.isfinite(it)] or [math.nan]) for column in rows.T],
                    np.float32)  # fmt: skip


Combine: TypeAlias = "Callable[[list[Array], Array, Array], None]"
"""Takes the members' blocks, that of the center, and the block of the result."""


def _combination(rule: str, squares: Squares, byzantine: int, fit: Sequence[bool]) -> tuple[Combine, set[int]]:
    """How blocks are combined, and the ranks that take part."""
    members = len(squares) - 1
    everyone = set(range(members))
    if rule == "median":
        return lambda block, center, out: _trimmed(block, (members - 1) // 2, out), everyone
    if rule == "trimmed_mean":
        return lambda block, center, out: _trimmed(block, byzantine, out), everyone
    if rule == "bulyan":
        chosen = _bulyan_selection(squares[:-1, :-1], byzantine)
        keep = len(chosen) - 2 * byzantine
        return lambda block, center, out: _around_median([block[rank] for rank in chosen], keep, out), set(chosen)
    weights = _weights(rule, squares, byzantine)
    return lambda block, center, out: _weighted([*block, center], weights, out), {
        rank for rank in everyone if weights[rank] > 0
    }


# ---------------------------------------------------------------------------------------------------- rules of distance


def _weights(rule: str, squares: Squares, byzantine: int) -> Squares:
    members = len(squares) - 1
    weights = np.zeros(members + 1)
    if rule == "mean":
        weights[:members] = 1 / members
    elif rule in ("krum", "multi_krum"):  # Blanchard et al., NeurIPS 2017; multi_krum: the mean of the n - f best
        scores = krum_scores(squares[:-1, :-1], byzantine)
        best = sorted(range(members), key=lambda rank: (scores[rank], rank))[
            : 1 if rule == "krum" else -byzantine or None
        ]
        weights[best] = 1 / len(best)
    elif rule == "geometric_median":  # Weiszfeld's iteration as in Pillutla et al., arXiv 1912.13445
        # If far vectors are nearly half, hundreds of steps lead away from the mean. So each vector counts first by its
        # distance to the majority.
        apart = np.sqrt(np.median(squares[:members, :members], axis=1))
        for _ in range(WEISZFELD_STEPS):
            inverse = 1 / np.maximum(apart, 1e-6 * max(median(apart), 1e-30))
            weights[:members] = inverse / sum(inverse)
            apart = _distances(squares, weights)[:members]
    elif rule == "centered_clipping":  # Karimireddy et al., arXiv 2012.10333, with the median distance as the radius
        weights[members] = 1.0
        for _ in range(CLIPPING_STEPS):
            apart = _distances(squares, weights)[:members]
            kept = np.minimum(1.0, median(apart) / np.maximum(apart, 1e-30))
            weights *= 1 - sum(kept) / members
            weights[:members] += kept / members
    else:
        raise ValueError(f"no robust rule is called {rule!r}")
    return weights


def _distances(squares: Squares, weights: Squares) -> Squares:
    """Distance of every point to the weighted mean of the points; the weights sum to 1."""
    to_each = np.add.reduce(squares * weights, axis=1)
    return np.asarray(np.sqrt(np.maximum(to_each - np.add.reduce(to_each * weights) / 2, 0.0)))


def krum_scores(squares: Squares, byzantine: int) -> list[float]:
    """Sum of each vector's squared distances to its n - f - 2 nearest others."""
    members = len(squares)
    nearest = max(members - byzantine - 2, 1)
    return [
        math.fsum(sorted(np.delete(squares[rank], rank))[:nearest]) if members > 1 else 0.0 for rank in range(members)
    ]


def _bulyan_selection(squares: Squares, byzantine: int) -> list[int]:
    """The n - 2f vectors that Krum picks one after the other (El Mhamdi et al., arXiv 1802.07927)."""
    left = list(range(len(squares)))
    chosen: list[int] = []
    while len(chosen) < len(squares) - 2 * byzantine:
        scores = krum_scores(squares[np.ix_(left, left)], byzantine)
        chosen.append(left.pop(scores.index(min(scores))))
    return sorted(chosen)


def _fit(norms: Squares) -> list[bool]:
    finite = [float(norm) for norm in norms if math.isfinite(norm)]
    longest = LONGEST**2 * median(finite) if finite else 0.0
    return [math.isfinite(norm) and (norm <= longest or not longest) for norm in norms]


def _square_distance(one: Array, other: Array) -> float:
    apart = np.subtract(one, other, dtype=np.float64)
    return float(np.add.reduce(np.square(apart, out=apart)))


def _weighted(block: Sequence[Array], weights: Squares, out: Array) -> None:
    total = np.zeros(len(out), np.float64)
    for row, weight in zip(block, weights, strict=True):
        if weight:
            total += np.multiply(row, weight, dtype=np.float64)
    out[:] = total


# ------------------------------------------------------------------------------------------------- rules of coordinates


def _trimmed(block: list[Array], trim: int, out: Array) -> None:
    """Mean of each coordinate without its ``trim`` least and greatest values (Yin et al., arXiv 1803.01498)."""
    rows = _sorted_rows(block)[trim : len(block) - trim]
    _weighted(rows, np.full(len(rows), 1 / len(rows)), out)


def _around_median(block: list[Array], keep: int, out: Array) -> None:
    """Mean of each coordinate's ``keep`` values that are nearest to its median; of two equally near, the smaller."""
    rows = np.stack(_sorted_rows(block))
    count = len(rows)
    middle = (rows[(count - 1) // 2] + rows[count // 2]) / np.float32(2)
    low = np.zeros((1, rows.shape[1]), np.intp)
    for dropped in range(count - keep):
        last = np.take_along_axis(rows, low + (count - dropped - 1), 0) - middle
        low += middle - np.take_along_axis(rows, low, 0) > last
    _weighted([np.take_along_axis(rows, low + it, 0)[0] for it in range(keep)], np.full(keep, 1 / keep), out)


def _sorted_rows(block: list[Array]) -> list[Array]:
    """Sort every column by Batcher's odd-even merges (1968), which compare whole rows."""
    rows = [row + np.float32(0) for row in block]  # -0 becomes 0: equal values have equal bits
    spare, count, run = np.empty_like(rows[0]), len(rows), 1
    while run < count:
        step = run
        while step:
            for start in range(step % run, count - step, 2 * step):
                for one in range(start, start + min(step, count - start - step)):
                    if one // (2 * run) == (other := one + step) // (2 * run):
                        np.minimum(rows[one], rows[other], out=spare)
                        np.maximum(rows[one], rows[other], out=rows[other])
                        rows[one], spare = spare, rows[one]
            step //= 2
        run *= 2
    return rows


def _blocks(pieces: Sequence[Array]) -> Iterator[tuple[Array, slice]]:
    """The pieces in blocks of columns, each with its place in the whole vector."""
    first = 0
    for piece in pieces:
        for start in range(0, piece.shape[1], BLOCK_NUMEL):
            rows = piece[:, start : start + BLOCK_NUMEL]
            yield rows, slice(first + start, first + start + rows.shape[1])
        first += piece.shape[1]
