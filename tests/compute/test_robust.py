"""The robust rules against plain references, and what they promise."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from p2ptrain.compute import robust
from p2ptrain.compute.robust import aggregate, aggregate_scalars

Vectors = npt.NDArray[np.float32]
CASES = [(1, 0), (2, 0), (3, 1), (5, 1), (6, 2), (7, 1), (7, 2), (8, 1), (11, 2), (12, 3)]


def distances(vectors: npt.NDArray[np.float64], point: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.array([np.linalg.norm(vector - point) for vector in vectors])


def krum_order(vectors: npt.NDArray[np.float64], f: int) -> list[int]:
    n = len(vectors)
    scores = []
    for i in range(n):
        others = sorted(float(((vectors[i] - vectors[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(others[: max(n - f - 2, 1)]))
    return [int(i) for i in np.argsort(scores, kind="stable")]


def reference(rule: str, given: Vectors, f: int, center: Vectors | None = None) -> npt.NDArray[np.float64]:
    vectors, n = given.astype(np.float64), len(given)
    if rule == "mean":
        return vectors.mean(0)
    if rule == "median":
        return np.median(vectors, axis=0)
    if rule == "trimmed_mean":
        return np.array([np.mean(sorted(column)[f : n - f]) for column in vectors.T])
    if rule == "krum":
        return vectors[krum_order(vectors, f)[0]]
    if rule == "multi_krum":
        return vectors[krum_order(vectors, f)[: n - f]].mean(0)
    if rule == "geometric_median":
        point = vectors.mean(0)
        for _ in range(3000):
            near = 1 / np.maximum(distances(vectors, point), 1e-9)
            point = (near[:, None] * vectors).sum(0) / near.sum()
        return point
    if rule == "centered_clipping":
        point = np.zeros(vectors.shape[1]) if center is None else center.astype(np.float64)
        for _ in range(robust.CLIPPING_STEPS):
            apart = distances(vectors, point)
            kept = np.minimum(1.0, np.median(apart) / np.maximum(apart, 1e-30))
            point = point + (kept[:, None] * (vectors - point)).mean(0)
        return point
    assert rule == "bulyan"
    left = list(range(n))
    chosen = [left.pop(krum_order(vectors[left], f)[0]) for _ in range(n - 2 * f)]
    return np.array([np.mean(nearest_to_median(column)[: n - 4 * f]) for column in vectors[chosen].T])


def nearest_to_median(column: npt.NDArray[np.float64]) -> list[float]:
    return sorted(map(float, column), key=lambda value: (abs(value - np.median(column)), value))


def run(rule: str, vectors: Vectors, f: int, center: Vectors | None = None) -> Vectors:
    out = np.full(vectors.shape[1], np.nan, np.float32)
    cut = vectors.shape[1] // 3
    aggregate(rule, f, [vectors[:, :cut], vectors[:, cut:]], out, center)
    return out


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "BLOCK_NUMEL", 17)


LEAST = {"mean": 1, "median": 1, "trimmed_mean": 1, "geometric_median": 1, "centered_clipping": 1}
RULES = [*LEAST, "krum", "multi_krum", "bulyan"]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_computes_what_its_paper_says(rule: str) -> None:
    random = np.random.default_rng(5)
    compared = 0
    for n, f in CASES:
        if n < {"krum": 2 * f + 3, "multi_krum": 2 * f + 3, "bulyan": 4 * f + 3}.get(rule, 2 * f + 1):
            continue
        for wrong in (1.0, -30.0):
            vectors = random.standard_normal((n, 100)).astype(np.float32) + 1
            vectors[random.permutation(n)[:f]] *= wrong
            center = random.standard_normal(100).astype(np.float32) if n == 7 else None
            exact = reference(rule, vectors, f, center)
            np.testing.assert_allclose(run(rule, vectors, f, center), exact, rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize("rule", RULES)
def test_ties_go_to_the_lowest_rank_and_the_smaller_value(rule: str) -> None:
    vectors = np.tile(np.arange(7, dtype=np.float32)[:, None], (1, 40))
    vectors[3:5] = vectors[2]
    np.testing.assert_allclose(run(rule, vectors, 1), reference(rule, vectors, 1), rtol=1e-3, atol=1e-3)
    same = np.full((7, 40), 2.5, np.float32)
    np.testing.assert_allclose(run(rule, same, 1), same[0], rtol=1e-6)


def test_every_column_of_any_height_is_sorted() -> None:
    for n in range(1, 9):  # by the 0-1 principle, a network that sorts zeros and ones sorts everything
        columns = np.array(list(itertools.product([0.0, 1.0], repeat=n)), np.float32).T
        assert np.array_equal(np.stack(robust._sorted_rows(list(columns))), np.sort(columns, axis=0))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "mean"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 3e38, -1e9])
def test_a_vector_that_no_gradient_can_be_counts_as_zeros(rule: str, wrong: float) -> None:
    vectors = np.random.default_rng(2).standard_normal((7, 50)).astype(np.float32) + 1
    zeros = vectors.copy()
    zeros[4], vectors[4, 20:] = 0, wrong
    out = np.empty(50, np.float32)
    scores = aggregate(rule, 1, [vectors], out)
    assert np.array_equal(out, run(rule, zeros, 1))
    assert 4 in scores.excluded


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "mean"])
@pytest.mark.parametrize("length", [10.0, 1e3, 9e5])
def test_as_many_wrong_vectors_as_a_rule_allows_move_it_little(rule: str, length: float) -> None:
    f = 9
    n = {"krum": 2 * f + 3, "multi_krum": 2 * f + 3, "bulyan": 4 * f + 3}.get(rule, 2 * f + 1)
    vectors = np.random.default_rng(4).standard_normal((n, 36)).astype(np.float32)
    honest = vectors[f:].mean(0)
    vectors[:f] = 0
    vectors[:f, 0] = 6 * length  # the others' length is 6
    assert np.linalg.norm(run(rule, vectors, f) - honest) < 18


def test_scores_show_who_was_left_out_and_how_far_each_is() -> None:
    vectors = np.random.default_rng(3).standard_normal((7, 50)).astype(np.float32)
    vectors[5] += 20
    out = np.empty(50, np.float32)
    scores = aggregate("multi_krum", 1, [vectors], out)
    assert scores.excluded == (5,)
    assert scores.distances == pytest.approx(distances(vectors, out), rel=1e-5)
    assert aggregate("median", 1, [vectors], out).excluded == ()


def test_numbers_behind_the_vectors_are_not_an_attackers() -> None:
    rows = np.array([[8, 1.0], [8, 2.0], [8, np.nan], [8, 3.0]], np.float32)
    assert aggregate_scalars(rows, "krum").tolist() == [8, 2.0]
    assert aggregate_scalars(rows[:2], "mean").tolist() == [8, 1.5]


def test_unusable_vector_does_not_pull_from_the_center() -> None:
    center, vectors = np.full(2, 10, np.float32), np.array([[11, 11], [11.1, 11.1], [11.2, 11.2], [0, 0]], np.float32)
    vectors[3] = np.nan
    made = run("centered_clipping", vectors, 1, center)
    vectors[3] = center  # where it counts
    np.testing.assert_array_equal(made, run("centered_clipping", vectors, 1, center))
    assert (made > 10).all()


def test_vectors_that_equal_the_center_are_not_excluded() -> None:
    vectors = np.ones((4, 3), np.float32)
    scores = aggregate("centered_clipping", 1, [vectors], np.empty(3, np.float32), vectors[0])
    assert scores.excluded == ()
