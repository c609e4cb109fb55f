"""Texts of captured passes are those of usual ones. ``KernelRecorder`` captures and replays, in place of CUDA."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from p2ptrain.compute import captured
from p2ptrain.compute.captured import MOST_NEW, PASSES_BEFORE_CAPTURE
from p2ptrain.compute.served_part import ServedPart, load_whole
from p2ptrain.core.activations import encode_ids
from p2ptrain.core.serving import Pass, Sampling
from tests.run_one import open_session, result_of, run_one

from .families import FAMILIES, VOCAB, make, make_unsplit
from .kernel_recorder import KernelRecorder
from .test_served_part import GREEDY, Client, load, prompt

SAMPLED = Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=3)
Recorded = tuple[list[ServedPart], list[ServedPart], list[KernelRecorder]]


def record(parts: list[ServedPart]) -> list[KernelRecorder]:
    recorders = [KernelRecorder() for _ in parts]
    for part, recorder in zip(parts, recorders, strict=True):
        part.capture_passes(recorder)
    return recorders


@pytest.fixture(scope="module", params=["llama-tied", "mistral-window"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The parts of a model as usual, and again with captures."""
    directory = tmp_path_factory.mktemp(request.param)
    make(request.param, directory)
    usual, parts = load(directory, 2), load(directory, 2)
    return usual, parts, record(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_of_every_family_write_the_usual_text(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2ptrain.compute.served_part.replace_linears", lambda module: None)  # as on a GPU
    make(family, tmp_path)
    parts = load(tmp_path, 3)
    expected = Client(parts, "usual", GREEDY).say(prompt(8), 18)
    recorders = record(parts)
    assert Client(parts, "captured", GREEDY).say(prompt(8), 18) == expected
    replays = 0 if family.startswith("falcon") else 17 - PASSES_BEFORE_CAPTURE
    assert [recorder.replays for recorder in recorders] == 2 * [replays]


def test_text_that_outgrows_its_bucket_is_captured_again(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "SMALLEST_BUCKET", 16)
    usual, parts, recorders = recorded
    before = [recorder.captures for recorder in recorders]
    texts = []
    for group in (usual, parts):
        client = Client(group, "long", SAMPLED, positions=90)
        texts.append(client.say(prompt(8), 80))
        client.length = 20  # back into the smallest bucket, with later positions still in memory
        texts[-1] += client.say(texts[-1][:1], 12)
        for part in group:
            part.close("long")
    assert texts[0] == texts[1]
    # A block has 64 positions.
    assert [recorder.captures - old for recorder, old in zip(recorders, before, strict=True)] == [2, 2]


def test_sessions_with_drafts_and_rollbacks_pick_the_usual_tokens(recorded: Recorded) -> None:
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
    open_session(part, "s", positions=64, sampling=GREEDY)

    def run(keep: int, *ids: int) -> memoryview:
        return run_one(part, "s", Pass(keep, memoryview(encode_ids(ids)), len(ids), "ids", "fp32")).payload

    run(0, *range(9))
    payloads = [run(9 + index, index) for index in range(PASSES_BEFORE_CAPTURE + 1)]
    before = bytes(payloads[-1])
    run(9 + len(payloads), 7)
    assert bytes(payloads[-1]) == before
    part.close("s")


def test_sessions_of_one_pass_share_a_replay(recorded: Recorded) -> None:
    usual, parts, recorders = recorded
    texts = []
    for group in (usual[:1], parts[:1]):
        [part] = group
        for name, count in (("a", 9), ("b", 40), ("c", 64)):
            open_session(part, name, positions=100, sampling=GREEDY)
            run_one(part, name, Pass(0, memoryview(encode_ids([*range(count)])), count, "ids", "fp32"))
        lengths, outs = {"a": 9, "b": 40, "c": 64}, []
        before = recorders[0].replays
        for step in range(PASSES_BEFORE_CAPTURE + 3):
            news = {name: [step + length] * (1 + (name == "b")) for name, length in lengths.items()}
            passes = {
                name: Pass(lengths[name], memoryview(encode_ids(new)), len(new), "ids", "fp32")
                for name, new in news.items()
            }
            ran = part.run(passes)
            outs += [np.frombuffer(result_of(ran[name]).payload, np.float32) for name in lengths]
            lengths = {name: length + len(news[name]) for name, length in lengths.items()}
        texts.append(outs)
        replays = recorders[0].replays - before
        for name in lengths:
            part.close(name)
    assert replays == 3
    for one, other in zip(*texts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_passes_of_many_rows_or_of_long_texts_run_as_usual(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    _, parts, recorders = recorded
    before = recorders[0].captures
    many = Client(parts, "many", GREEDY, positions=128)
    for _ in range(PASSES_BEFORE_CAPTURE + 2):
        many.run([*range(MOST_NEW + 1)], keep=min(many.length, 60))
    monkeypatch.setattr(captured, "LARGEST_BUCKET", 24)
    Client(parts, "long", GREEDY, positions=128).say([*range(100)], 2 * PASSES_BEFORE_CAPTURE)
    assert recorders[0].captures == before
    for part in parts:
        for name in ("many", "long"):
            part.close(name)


def test_captures_are_bounded_and_end_with_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_CAPTURES", 1)
    make("llama", tmp_path)
    part = load_whole(tmp_path, device="cpu")
    record([part])
    client = Client([part], "s", GREEDY)
    client.run(prompt(8))
    replays: list[weakref.ref[Any]] = []
    for count in (1, 2):
        for _ in range(PASSES_BEFORE_CAPTURE + 1):
            client.run([1] * count, keep=9)
        [made] = [made for made in part._runner._passes.values() if isinstance(made, captured.CapturedPass)]
        replays.append(weakref.ref(made.replay))
        del made
    assert replays[0]() is None
    part.reserve(500)
    client.run([1], keep=9)
    assert replays[1]() is None


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

    part.capture_passes(fails)
    with caplog.at_level(logging.WARNING):
        for name in ("first", "second"):
            assert Client([part], name, GREEDY).say(prompt(8), 30) == expected
    assert attempts == 1
    assert [record.message for record in caplog.records] == ["decoding steps are not captured: no memory for the graph"]


@pytest.mark.parametrize("family", ["mamba", "falcon"])
def test_models_whose_sessions_are_computed_in_turns_are_not_captured(tmp_path: Path, family: str) -> None:
    make_unsplit(family, tmp_path) if family == "mamba" else make(family, tmp_path)
    part = load_whole(tmp_path, device="cpu")
    [recorder] = record([part])
    Client([part], "s", GREEDY).say(prompt(8), 12)
    assert (recorder.captures, part._runner, part.is_batched) == (0, None, False)
