"""Texts of captured steps are those of usual passes. ``KernelRecorder`` captures and replays, in place of CUDA."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from p2ptrain.compute import captured
from p2ptrain.compute.captured import MOST_NEW, STEPS_BEFORE_CAPTURE
from p2ptrain.compute.served_part import ServedPart, load_whole
from p2ptrain.core.activations import encode_ids
from p2ptrain.core.serving import Pass, Sampling
from tests.run_one import run_one

from .families import FAMILIES, VOCAB, make, make_unsplit
from .kernel_recorder import KernelRecorder
from .test_served_part import GREEDY, Client, load, prompt

SAMPLED = Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=3)
Recorded = tuple[list[ServedPart], list[ServedPart], list[KernelRecorder]]


def record(parts: list[ServedPart]) -> list[KernelRecorder]:
    recorders = [KernelRecorder() for _ in parts]
    for part, recorder in zip(parts, recorders, strict=True):
        part.capture_steps(recorder)
    return recorders


@pytest.fixture(scope="module", params=["llama-tied", "mistral-window"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The parts of a model as usual, and again with captures."""
    directory = tmp_path_factory.mktemp(request.param)
    make(request.param, directory)
    usual, parts = load(directory, 2), load(directory, 2)
    return usual, parts, record(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_of_every_family_write_the_usual_text(tmp_path: Path, family: str) -> None:
    make(family, tmp_path)
    parts = load(tmp_path, 3)
    expected = Client(parts, "usual", GREEDY).say(prompt(8), 18)
    recorders = record(parts)
    assert Client(parts, "captured", GREEDY).say(prompt(8), 18) == expected
    replays = 0 if family.startswith("falcon") else 17 - STEPS_BEFORE_CAPTURE
    assert [recorder.replays for recorder in recorders] == 2 * [replays]


def test_text_that_outgrows_its_bucket_is_captured_again(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "SMALLEST_BUCKET", 16)
    usual, parts, recorders = recorded
    before = [recorder.captures for recorder in recorders]
    texts = []
    for group in (usual, parts):
        client = Client(group, "long", SAMPLED, positions=80)
        texts.append(client.say(prompt(8), 60))
        client.length = 20  # back into the smallest bucket, with later positions still in memory
        texts[-1] += client.say(texts[-1][:1], 12)
        for part in group:
            part.close("long")
    assert texts[0] == texts[1]
    # The first capture is at position 17, and a bucket has room for eight steps: 32, 64, 128 of 80.
    assert [recorder.captures - old for recorder, old in zip(recorders, before, strict=True)] == [3, 3]


def test_sessions_in_turns_with_drafts_and_rollbacks_pick_the_usual_tokens(recorded: Recorded) -> None:
    usual, parts, recorders = recorded
    replays = recorders[0].replays
    rng = random.Random(4)
    pairs = [[Client(group, f"s{number}", SAMPLED) for group in (usual, parts)] for number in range(3)]
    for client in (client for pair in pairs for client in pair):
        client.run(prompt(8))
    for _ in range(80):
        pair = pairs[rng.randrange(3)]
        # Drafts follow what is kept; all, some or none of them were accepted before.
        keep = max(9, pair[0].length - rng.choice([0, 0, 1, 3]))
        ids = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 4]))]
        if keep + len(ids) > 64:
            keep = 30
        picked = {client.run(ids, keep=keep, samples=len(ids), sample_index=keep) for client in pair}
        assert len(picked) == 1
    for pair in pairs:
        for part in (*usual, *parts):
            part.close(pair[0].name)
    assert recorders[0].replays - replays > 30


def test_result_of_a_replay_is_not_overwritten_by_the_next(recorded: Recorded) -> None:
    part = recorded[1][0]
    part.open("s", positions=64, sampling=GREEDY)

    def run(keep: int, *ids: int) -> memoryview:
        return run_one(part, "s", Pass(keep, memoryview(encode_ids(ids)), len(ids), "ids", "fp32")).payload

    run(0, *range(9))
    payloads = [run(9 + index, index) for index in range(STEPS_BEFORE_CAPTURE + 1)]
    before = bytes(payloads[-1])
    run(9 + len(payloads), 7)
    assert bytes(payloads[-1]) == before
    part.close("s")


def test_steps_that_do_not_earn_back_a_capture_run_as_usual(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, parts, recorders = recorded
    before = recorders[0].captures
    Client(parts, "short", GREEDY).say(prompt(8), 1 + STEPS_BEFORE_CAPTURE)
    # More steps than that, but after the last of them there is no room for as many again.
    Client(parts, "full", GREEDY, positions=8 + 2 * STEPS_BEFORE_CAPTURE).say(prompt(8), 2 * STEPS_BEFORE_CAPTURE)
    many = Client(parts, "many", GREEDY, positions=128)
    for _ in range(STEPS_BEFORE_CAPTURE + 2):
        many.run([*range(MOST_NEW + 1)], keep=min(many.length, 60))
    monkeypatch.setattr(captured, "LARGEST_BUCKET", 24)
    Client(parts, "long", GREEDY).say(prompt(8), 2 * STEPS_BEFORE_CAPTURE)
    assert recorders[0].captures == before
    for part in parts:
        for name in list(part._sessions):
            part.close(name)


def test_closed_session_drops_its_captures_at_once(recorded: Recorded) -> None:
    parts = recorded[1]
    Client(parts, "s", GREEDY).say(prompt(8), 12)
    [step] = parts[0]._sessions["s"].steps.values()
    assert isinstance(step, captured.CapturedStep)
    replay: weakref.ref[Any] = weakref.ref(step.replay)
    for part in parts:
        part.close("s")
    del step
    assert replay() is None, "a reference cycle keeps the memory of the captured step"


def test_after_a_failed_capture_all_steps_run_as_usual(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make("llama", tmp_path)
    part = load_whole(tmp_path, device="cpu")
    expected = Client([part], "usual", GREEDY).say(prompt(8), 30)
    attempts = 0

    def fails(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        nonlocal attempts
        attempts += 1
        step()  # as a warm-up does; it writes keys and values
        raise torch.OutOfMemoryError("no memory for the graph")

    part.capture_steps(fails)
    with caplog.at_level(logging.WARNING):
        for name in ("first", "second"):
            assert Client([part], name, GREEDY).say(prompt(8), 30) == expected
    assert attempts == 1
    assert [record.message for record in caplog.records] == ["decoding steps are not captured: no memory for the graph"]


@pytest.mark.parametrize("case", ["does not split", "keys computed again", "unknown family", "old transformers"])
def test_other_models_are_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    make_unsplit("mamba", tmp_path) if case == "does not split" else make("llama", tmp_path)
    part = load_whole(tmp_path, device="cpu")
    if case == "keys computed again":
        part._model.switches = [32]
    elif case == "unknown family":
        part._model.config.model_type = "another"
    elif case == "old transformers":
        monkeypatch.delattr("transformers.Cache.get_query_offset")
    [recorder] = record([part])
    if case != "old transformers":  # whose masks are made otherwise
        Client([part], "s", GREEDY).say(prompt(8), 12)
    assert (recorder.captures, part._runner) == (0, None)
