"""What an attacking engine contributes, and that nothing else of it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2ptrain.compute.trainer import Trainer
from p2ptrain.lab.attacker import ALIE_Z, FLIP, NOISE, SCALE, add_attack
from p2ptrain.lab.stand_in import StandInEngine
from roles.engine import Engine
from tests.compute.tiny_trainer import tiny_trainer, validate_all
from tests.roles.test_cluster import small_profile

PROFILE = small_profile(batch={"micro_batches": 4})


def contribution(engine: Engine, step: int, count: int) -> Any:
    engine.begin_step(step, 0, count)
    told: list[int] = []
    for index in range(count):
        engine.micro_batch(step, index, told.append if index == count - 1 else None)
    assert not told or isinstance(engine, StandInEngine | Trainer), "nothing is final before the attack"
    engine.finish_gradients(told.append)
    return engine.reduce_buffer.copy()


def attacker(attack: str) -> Engine:
    return add_attack(StandInEngine(PROFILE), attack, micro_batches=4, seed=3)


def test_flipped_scaled_and_random_vectors() -> None:
    true = contribution(StandInEngine(PROFILE), 0, 2)
    for attack, factor in (("sign-flip", FLIP), ("scale", SCALE)):
        np.testing.assert_array_equal(contribution(attacker(attack), 0, 2)[:-1], factor * true[:-1])
    noise = contribution(attacker("noise"), 0, 2)
    assert np.linalg.norm(noise[:-1]) == pytest.approx(NOISE * np.linalg.norm(true[:-1]), rel=0.2)
    assert abs(np.corrcoef(noise[:-1], true[:-1])[0, 1]) < 0.3
    assert noise[-1] == true[-1], "it tells the true loss"
    np.testing.assert_array_equal(contribution(attacker(""), 0, 2), true)


def test_a_little_is_enough_stays_some_deviations_from_the_truth() -> None:
    wrong, true, whole = attacker("alie"), StandInEngine(PROFILE), StandInEngine(PROFILE)
    squares = []
    for step in range(4):
        sent, own, aggregate = (contribution(engine, step, n) for engine, n in ((wrong, 2), (true, 2), (whole, 4)))
        spread = np.sqrt(np.mean(squares, axis=0)) if squares else 0 * own
        np.testing.assert_allclose(sent[:-1], (own - ALIE_Z / 2 * spread)[:-1], rtol=1e-3, atol=1e-6)
        squares.append((2 * own - aggregate) ** 2)  # ``own`` is half of the step
        for engine in (wrong, true, whole):
            engine.reduce_buffer[:] = aggregate
            engine.apply(step, 1.0)


def test_a_worker_of_chaos_learns_wrong_labels_and_validates_with_right_ones(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a tale of two towns " * 200)
    honest = tiny_trainer(text)
    wrong = add_attack(tiny_trainer(text), "label-flip", micro_batches=PROFILE.batch.micro_batches, seed=0)
    for engine in (honest, wrong):
        engine.state.load_initial()
    true, sent = contribution(honest, 0, 2)[:-1], contribution(wrong, 0, 2)[:-1]
    assert np.corrcoef(true, sent)[0, 1] < 0.5
    assert validate_all(wrong) == validate_all(honest)
