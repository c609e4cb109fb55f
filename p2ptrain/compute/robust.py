"""Robust rules: aggregate n members' vectors so that f wrong ones among them change the result little.

Every member applies the same rule to the same vectors, so all get the same bits. A vector arrives in pieces, each of
shape (n, numel), row r from rank r. Everything runs over blocks that fit a cache, so there is no second copy of the
vectors. Only numpy's element-wise operations and sums are used: the number of threads changes no bit.

Most rules are a weighted mean of the vectors, whose weights follow from their squared distances. ``median`` and
``trimmed_mean`` look at each coordinate alone, and ``bulyan`` at each coordinate of the vectors that it selects.

A vector that is not finite, or is ``LONGEST`` times longer than the median one, is *unusable*: it is one of the f, and
counts as zeros, with ``centered_clipping`` as the center.
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
Float64Array: TypeAlias = npt.NDArray[np.float64]

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
        excluded: ranks whose vectors are unusable, or that the rule left out.
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
        between_vectors = rule != "mean" and rule not in BY_COORDINATE
        squares = _pairwise_squares(pieces, center, between_vectors=between_vectors)
        is_usable = [True] * members if rule == "mean" else _usable(squares[:members, members])
        for rank in range(members):
            if not is_usable[rank]:
                # It gets the distances of the center.
                squares[rank, :], squares[:, rank] = squares[-1], squares[:, -1]
                squares[rank, rank] = squares[rank, -1] = squares[-1, rank] = 0.0
        combine, used = _combination(rule, squares, byzantine)
        to_aggregate = np.zeros(members)  # squared distances
        for rows, place in _blocks(pieces):
            middle = _center_of(center, rows, place)
            block = [row if is_usable[rank] else middle for rank, row in enumerate(rows)]
            combine(block, middle, out[place])
            if measured:
                to_aggregate += [_square_distance(row, out[place]) for row in rows]
    excluded = tuple(rank for rank in range(members) if rank not in used or not is_usable[rank])
    distances = tuple(math.sqrt(square) if square >= 0 else math.inf for square in to_aggregate) if measured else ()
    return Scores(distances, excluded)


def _pairwise_squares(pieces: Sequence[Array], center: Array | None, *, between_vectors: bool) -> Float64Array:
    """Squared distances of the n vectors and the center, the last point, to each other: shape (n + 1, n + 1). Without
    ``between_vectors`` only those to the center."""
    members = len(pieces[0])
    squares = np.zeros((members + 1, members + 1))
    for rows, place in _blocks(pieces):
        points = [*rows, _center_of(center, rows, place)]
        for rank in range(members):
            for other in range(rank + 1 if between_vectors else members, members + 1):
                squares[rank, other] += _square_distance(points[rank], points[other])
    return np.asarray(squares + squares.T)


def _center_of(center: Array | None, rows: Array, place: slice) -> Array:
    return np.zeros(rows.shape[1], np.float32) if center is None else center[place]


def aggregate_scalars(rows: Array, rule: str) -> Array:
    """Aggregate the numbers that are sent behind the vectors, such as losses, of all members, shape (n, numel): the
    median of the finite ones, with 'mean' the mean."""
    if rule == "mean":
        return np.asarray(np.add.reduce(rows, axis=0) / np.float32(len(rows)), np.float32)
    finite = [[float(value) for value in column if np.isfinite(value)] for column in rows.T]
    return np.array([median_low(column or [math.nan]) for column in finite], np.float32)


Combine: TypeAlias = "Callable[[list[Array], Array, Array], None]"
"""Takes the members' blocks, that of the center, and the block of the result."""


def _combination(rule: str, squares: Float64Array, byzantine: int) -> tuple[Combine, set[int]]:
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


def _weights(rule: str, squares: Float64Array, byzantine: int) -> Float64Array:
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
        distances = np.sqrt(np.median(squares[:members, :members], axis=1))
        for _ in range(WEISZFELD_STEPS):
            inverse = 1 / np.maximum(distances, 1e-6 * max(median(distances), 1e-30))
            weights[:members] = inverse / sum(inverse)
            distances = _distances(squares, weights)[:members]
    else:  # centered_clipping: Karimireddy et al., arXiv 2012.10333, with the median distance as the radius
        weights[members] = 1.0
        for _ in range(CLIPPING_STEPS):
            distances = _distances(squares, weights)[:members]
            radius = median(distances)
            kept = np.where(distances <= radius, 1.0, radius / np.maximum(distances, 1e-30))
            weights *= 1 - sum(kept) / members
            weights[:members] += kept / members
    return weights


def _distances(squares: Float64Array, weights: Float64Array) -> Float64Array:
    """Distance of every point to the weighted mean m of the points; the weights w sum to 1.

    |p - m|^2 = sum_i w_i |p - p_i|^2 - sum_ij w_i w_j |p_i - p_j|^2 / 2.
    """
    to_each = np.add.reduce(squares * weights, axis=1)
    return np.asarray(np.sqrt(np.maximum(to_each - np.add.reduce(to_each * weights) / 2, 0.0)))


def krum_scores(squares: Float64Array, byzantine: int) -> list[float]:
    """Sum of each vector's squared distances to its n - f - 2 nearest others."""
    members = len(squares)
    nearest = max(members - byzantine - 2, 1)
    return [math.fsum(sorted(np.delete(squares[rank], rank))[:nearest]) for rank in range(members)]


def _bulyan_selection(squares: Float64Array, byzantine: int) -> list[int]:
    """The n - 2f vectors that Krum picks one after the other (El Mhamdi et al., arXiv 1802.07927)."""
    left = list(range(len(squares)))
    chosen: list[int] = []
    while len(chosen) < len(squares) - 2 * byzantine:
        scores = krum_scores(squares[np.ix_(left, left)], byzantine)
        chosen.append(left.pop(scores.index(min(scores))))
    return sorted(chosen)


def _usable(norms: Float64Array) -> list[bool]:
    """Whether each vector is usable. ``norms``: squared. If the median one is 0, no length is too long."""
    finite = [float(norm) for norm in norms if math.isfinite(norm)]
    longest = LONGEST**2 * median(finite) if finite else 0.0
    return [math.isfinite(norm) and (norm <= longest or not longest) for norm in norms]


def _square_distance(one: Array, other: Array) -> float:
    difference = np.subtract(one, other, dtype=np.float64)
    return float(np.add.reduce(np.square(difference, out=difference)))


def _weighted(block: Sequence[Array], weights: Float64Array, out: Array) -> None:
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
    # The kept values of a sorted column are rows low to low + keep. Each step drops the farther end of the longer run.
    low = np.zeros((1, rows.shape[1]), np.intp)
    for dropped in range(count - keep):
        last = np.take_along_axis(rows, low + (count - dropped - 1), 0) - middle
        low += middle - np.take_along_axis(rows, low, 0) > last
    _weighted([np.take_along_axis(rows, low + offset, 0)[0] for offset in range(keep)], np.full(keep, 1 / keep), out)


def _sorted_rows(block: list[Array]) -> list[Array]:
    """Sort every column by Batcher's odd-even merges (1968), which compare whole rows."""
    rows = [row + np.float32(0) for row in block]  # -0 becomes 0: equal values have equal bits
    # Before each round of the outer loop, runs of ``run`` rows are sorted; the round merges two of them.
    spare, count, run = np.empty_like(rows[0]), len(rows), 1
    while run < count:
        step = run
        while step:
            for start in range(step % run, count - step, 2 * step):
                for low in range(start, start + min(step, count - start - step)):
                    high = low + step
                    if low // (2 * run) == high // (2 * run):
                        np.minimum(rows[low], rows[high], out=spare)
                        np.maximum(rows[low], rows[high], out=rows[high])
                        rows[low], spare = spare, rows[low]
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
