"""What a step must not be made of, and who is named for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.token import LEAST_STEPS, Flag, NormGuard, Token, TokenFault, granted, judge_tokens, odd_ones_out, square_sum

TOKEN = Token(1, 5, Flag(0), 1.0, b"d" * 16, b"l" * 16, own=1.0)
NAN, INF = math.nan, math.inf


def experienced(factor: float, square_sum: float = 4.0, steps: int = LEAST_STEPS) -> NormGuard:
    guard = NormGuard(factor)
    for _ in range(steps):
        guard.committed(square_sum)
    return guard


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("own", [NAN, INF])
def test_what_is_not_finite_is_refused_always(own: float, lenient: bool) -> None:
    assert NormGuard(0.0).refuses(own, lenient=lenient)
    assert experienced(10.0).refuses(own, lenient=lenient)


def test_what_is_absurdly_long_is_refused_by_who_knows_what_is_usual() -> None:
    assert experienced(10.0).refuses(401.0, lenient=False)
    assert not experienced(10.0).refuses(401.0, lenient=True)
    assert not experienced(10.0, steps=LEAST_STEPS - 1).refuses(401.0, lenient=False)
    assert not experienced(0.0).refuses(401.0, lenient=False)
    assert not experienced(10.0).refuses(400.0, lenient=False)
    forgetful = experienced(10.0)
    forgetful.forget()
    assert not forgetful.refuses(401.0, lenient=False)


def test_a_few_outliers_do_not_change_what_is_usual() -> None:
    guard = experienced(10.0)
    for _ in range(3):
        guard.committed(1e12)
    assert guard.refuses(401.0, lenient=False)


def judged(
    changed: dict[int, dict[str, object]], members: int = 3, last: float = 1.0, stages: int = 1
) -> TokenFault | None:
    tokens = [replace(TOKEN, **({"usual": 4.0} | changed.get(rank, {}))) for rank in range(members)]  # type: ignore[arg-type]
    return judge_tokens(tokens, NormGuard(100.0), last=last, stages=stages)


@pytest.mark.parametrize(("own", "lenient", "refused"), [(1e8, False, True), (1e8, True, False), (NAN, True, True)])
def test_a_lenient_view_takes_an_outlier_if_it_is_finite(own: float, lenient: bool, refused: bool) -> None:
    tokens = [replace(TOKEN, usual=4.0, own=own if rank == 1 else 1.0) for rank in range(3)]
    fault = judge_tokens(tokens, NormGuard(100.0), last=1.0, lenient=lenient)
    assert (fault is not None and fault.suspect == 1) is refused


def test_equal_tokens_are_a_commit() -> None:
    assert judged({1: {"flags": Flag.HOLD, "own": 9.0, "unit_us": 3}}) is None


@pytest.mark.parametrize(
    ("changed", "cause", "suspect", "word"),
    [
        ({0: {"digest": b"x" * 16}}, "digest", 0, "digest of step 6"),  # the lone one, not the first that differs
        ({2: {"lineage": b"x" * 16}}, "", 2, "lineage"),
        ({2: {"step": 9}}, "", 2, "step"),
        ({1: {"own": NAN}, 0: {"part": NAN}, 2: {"part": NAN}}, "figure", 1, "others inf"),
        ({1: {"own": NAN}}, "contribution", 1, "finite"),
        ({1: {"own": 1e8}}, "contribution", 1, "norm 1e+04"),
        ({0: {"own": 1e8, "part": 1e8}, 1: {"part": 1e8}, 2: {"part": 1e8}}, "contribution", 0, "an outlier"),
        ({rank: {"part": 1e8} for rank in range(3)}, "contribution", None, "norm of 1e+04, which does not match"),
        ({rank: {"part": NAN} for rank in range(3)}, "contribution", None, "does not match"),
        ({2: {"part": 1e30}}, "figure", 2, "told a squared norm of 1e+30, the others 1"),
        ({0: {"part": -1000.0}}, "figure", 0, "-1e+03"),
        ({0: {"part": 1.01}}, "figure", 0, "1.01"),
        ({0: {"part": NAN}}, "figure", 0, "nan"),
        ({0: {"own": -1000.0}}, "figure", 0, "-1e+03"),
        ({0: {"own": 1e308}}, "contribution", 0, "1e+154"),
        ({2: {"flags": Flag.STOP}}, "figure", 2, "alone in saying that the job ends"),
        ({0: {"flags": Flag.STOP}, 1: {"flags": Flag.STOP}}, "figure", 2, "goes on"),
    ],
)
def test_who_is_named(changed: dict[int, dict[str, object]], cause: str, suspect: int | None, word: str) -> None:
    fault = judged(changed)
    assert fault is not None
    assert (fault.cause, fault.suspect) == (cause, suspect)
    assert word in fault.what


@pytest.mark.parametrize("told", [1e30, 1e-30, -1000.0, 0.0, NAN])
def test_of_two_the_one_whose_norm_is_farther_from_the_last_is_named(told: float) -> None:
    for liar in (0, 1):
        fault = judged({liar: {"part": told}}, members=2, last=1.5)
        assert fault is not None
        assert (fault.cause, fault.suspect) == ("figure", liar)


@pytest.mark.parametrize("usual", [1e-30, 0.0, 1e300, -1.0, NAN])
def test_one_member_has_no_step_refused_by_what_it_calls_usual(usual: float) -> None:
    for members in (2, 3):
        assert judged({0: {"usual": usual}}, members=members) is None
    assert judged({0: {"usual": usual}, 1: {"usual": 0.0}, 2: {"usual": 0.0}}) is None, "newcomers do not know it"
    assert judged({0: {"usual": usual}, 2: {"own": 1e8}}) is not None, "nor applied"


def test_parts_of_a_model_have_norms_of_their_own_and_replicas_the_same() -> None:
    parts = {rank: {"part": (1.0, 9.0)[rank % 2]} for rank in range(4)}
    assert judged(parts, members=4, stages=2) is None
    tokens = [replace(TOKEN, **parts[rank]) for rank in range(4)]  # type: ignore[arg-type]
    assert square_sum(tokens, 0.0, 2) == 10.0
    fault = judged({**parts, 1: {"part": 1e30}}, members=4, stages=2, last=10.0)
    assert fault is not None
    assert fault.suspect == 1
    for told in (NAN, 1e30):  # in a lone replica nobody else has that sum
        fault = judged({1: {"part": told}}, members=2, stages=2)
        assert fault is not None
        assert (fault.cause, fault.suspect) == ("figure", 1)


def test_a_stop_is_what_all_say_and_other_requests_are_those_of_any_member() -> None:
    stop, save = replace(TOKEN, flags=Flag.STOP), replace(TOKEN, flags=Flag.SAVE)
    assert granted([stop, save]) == Flag.SAVE
    assert granted([stop, stop]) == Flag.STOP
    assert judge_tokens([stop, save], NormGuard(0.0)) is None, "of two, neither is alone"


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=7))
def test_the_odd_ones_are_those_beside_the_most(digests: list[bytes]) -> None:
    odd = odd_ones_out(digests)
    usual = {digest for rank, digest in enumerate(digests) if rank not in odd}
    assert len(usual) == 1
    assert digests.count(usual.pop()) == max(digests.count(digest) for digest in digests)
    assert 0 not in odd or digests.count(digests[0]) < len(digests) - len(odd)
