"""The engine without torch: any split gives what one part gives, and whatever goes wrong changes the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.serving import Sampling
from roles.engine import StageEngine
from tests.roles.stage_stand_in import StandInStage, picked, stand_in_config, stand_in_part, tokens_of

CONFIG = stand_in_config(layers=6)
PROMPT = [5, 80, 11, 11, 3]
GREEDY = Sampling(temperature=0)
SEEDED = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=4)


def parts_of(cuts: Sequence[int]) -> list[StandInStage]:
    return [stand_in_part(CONFIG, start, stop) for start, stop in itertools.pairwise(cuts)]


def through(
    parts: Sequence[StageEngine],
    ids: Sequence[int],
    *,
    session: str = "s",
    keep: int,
    picks: int,
    draw: int,
    encoding: str,
) -> tuple[int, ...]:
    payload, coded = memoryview(np.array(ids, "<i4").tobytes()), "ids"
    for part in parts:
        last = part is parts[-1]
        ran = part.run(
            session,
            keep=keep,
            payload=payload,
            count=len(ids),
            encoding=coded,
            out_encoding=encoding,
            picks=picks if last else 0,
            draw=draw,
        )
        payload, coded = ran.payload, encoding
    return ran.tokens


@pytest.mark.parametrize("encoding", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("cuts", [(0, 6), (0, 2, 6), (0, 1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_any_split_gives_what_one_part_gives(cuts: Sequence[int], encoding: str, sampling: Sampling) -> None:
    parts, made, ids = parts_of(cuts), list[int](), PROMPT
    for part in parts:
        part.open("s", positions=40, sampling=sampling)
    for draw in range(12):
        keep = 0 if draw == 0 else len(PROMPT) + draw - 1
        made += through(parts, ids, keep=keep, picks=1, draw=draw, encoding=encoding)
        ids = [made[-1]]
    assert made == tokens_of(CONFIG, PROMPT, 12, sampling)
    assert len(set(made)) > 4


def test_history_order_and_weights_all_decide_the_tokens() -> None:
    def answer(history: list[int], *, seed: int = 1, skip: int = -1) -> list[int]:
        config = CONFIG
        parts = [stand_in_part(config, layer, layer + 1, seed=seed) for layer in range(6) if layer != skip]
        for part in parts:
            part.open("s", positions=40, sampling=GREEDY)
        through(parts, history, keep=0, picks=0, draw=0, encoding="fp32")
        return list(through(parts, [1, 2, 3, 4], keep=len(history), picks=4, draw=0, encoding="fp32"))

    right = answer([1, 2, 3])
    assert right == answer([1, 2, 3])
    for other in (answer([1, 3, 2]), answer([1, 2]), answer([0, 2, 3]), answer([1, 2, 3], seed=2)):
        assert other != right
    assert answer([1, 2, 3], skip=3) != right


def test_rollback_forgets_what_was_beyond() -> None:
    parts = parts_of((0, 3, 6))
    for part in parts:
        part.open("s", positions=40, sampling=GREEDY)
    through(parts, PROMPT, keep=0, picks=0, draw=0, encoding="fp32")
    first = through(parts, [1, 2, 3], keep=5, picks=3, draw=0, encoding="fp32")
    through(parts, [9, 9, 9, 9], keep=5, picks=1, draw=0, encoding="fp32")
    assert through(parts, [1, 2, 3], keep=5, picks=3, draw=0, encoding="fp32") == first


def test_a_draw_is_picked_by_its_number_alone() -> None:
    logits = np.arange(50) * 90
    assert [picked(logits, SEEDED, draw) for draw in range(9)][5] == picked(logits, SEEDED, 5)
    assert len({picked(logits, SEEDED, draw) for draw in range(40)}) > 3
    assert picked(logits, GREEDY, 3) == 49


def test_what_no_correct_peer_sends_is_a_protocol_error() -> None:
    part = stand_in_part(CONFIG, 0, 2)
    part.open("s", positions=4, sampling=GREEDY)
    good = {"keep": 0, "count": 2, "encoding": "ids", "out_encoding": "fp32", "picks": 0, "draw": 0}
    ids = memoryview(np.array([1, 2], "<i4").tobytes())
    for change in ({"keep": 1}, {"count": 3}, {"encoding": "fp32"}, {"keep": 0, "count": 5}):
        with pytest.raises(ProtocolError):
            part.run("s", payload=ids, **(good | change))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        part.run("s", payload=memoryview(np.array([1, 97], "<i4").tobytes()), **good)  # type: ignore[arg-type]
    assert part.sessions["s"].history == []
