"""The model that only takes time: it writes what is known beforehand, whoever drafts and however it is cut."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.serving import Sampling
from roles.timed_model import TimedModel, text_after, timed_model_in, write_timed_model

PROMPT = b"TEXT 1: "


def run(model: TimedModel, keep: int, ids: list[int], picks: int = 1) -> list[int]:
    payload = memoryview(b"".join(each.to_bytes(4, "little") for each in ids))
    how = {"count": len(ids), "encoding": "ids", "out_encoding": "ids", "picks": picks, "draw": 0}
    return list(model.run("s", keep=keep, payload=payload, **how).tokens)  # type: ignore[arg-type]


def opened(directory: Path, pass_s: float = 0.0, alpha: float = 1.0) -> TimedModel:
    model = timed_model_in(write_timed_model(directory, pass_s, alpha=alpha))
    assert model is not None
    model.open("s", positions=4096, sampling=Sampling(0.0))
    return model


def test_it_writes_the_known_text_also_where_passes_take_wrong_drafts(tmp_path: Path) -> None:
    model, wanted = opened(tmp_path), text_after(PROMPT, 9)
    written = run(model, 0, list(PROMPT))
    while len(written) < 9:
        # A pass over the last token, a right draft and a wrong one: the pick behind the right one is the text's.
        keep = len(PROMPT) + len(written) - 1
        picked = run(model, keep, [written[-1], wanted[len(written)], 0], picks=3)
        written += picked[:2]
    assert bytes(written[:9]) == wanted
    assert all(32 <= token < 96 for token in wanted)


def test_a_drafter_is_right_as_often_as_it_is_told_to_be(tmp_path: Path) -> None:
    model, text = opened(tmp_path, alpha=0.8), text_after(b"A", 999)
    picked = run(model, 0, [ord("A"), *text], picks=1000)
    assert sum(one == other for one, other in zip(picked, text, strict=False)) == pytest.approx(800, abs=1)


def test_a_pass_takes_its_time(tmp_path: Path) -> None:
    model, began = opened(tmp_path, 0.02), time.perf_counter()
    run(model, 0, [1])
    assert time.perf_counter() - began >= 0.02


def test_what_cannot_be_is_refused_and_other_models_are_none_of_these(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError):
        run(opened(tmp_path), 5, [1])
    (tmp_path / "config.json").write_text("[]")
    assert timed_model_in(tmp_path) is None
    assert timed_model_in(tmp_path / "nowhere") is None
    Tokenizer.of_bytes().save(tmp_path)
