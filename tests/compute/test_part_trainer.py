"""Parts that train together against one process that trains the whole."""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoModelForCausalLM

from p2ptrain.compute.data import DataSpec, load_corpus
from p2ptrain.compute.model import ModelSpec, model_config
from p2ptrain.compute.recipe import stage_bounds
from p2ptrain.compute.sampling import WindowSampler
from p2ptrain.compute.stage import StageSpec, fit_training, kept_bytes
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.errors import ConfigError, ProtocolError, ResourceError
from tests.compute.tiny_trainer import state_bytes, take_step, tiny, tiny_trainer, validate_all

from .families import make_of_bytes, opened, randomize
from .pipelines import MODEL, Pipeline
from .saving import save

FAMILIES = {
    "llama-tied": MODEL,
    "llama": tiny(layers=4, tie_embeddings=False),
    "qwen2": tiny(layers=4, architecture="qwen2", tie_embeddings=False),
    "qwen3": tiny(layers=4, architecture="qwen3"),
    "mistral": tiny(layers=4, architecture="mistral", tie_embeddings=False, extra={"sliding_window": 8}),
    "gpt2": tiny(layers=4, architecture="gpt2", kv_heads=4),
}
BOUNDS = [(0, 2, 4), (0, 1, 2, 4), (0, 1, 2, 3, 4)]
CASES = [("llama-tied", 3, BOUNDS), ("llama", 1, BOUNDS[2:])] + [
    (family, 3, BOUNDS[1:2]) for family in ("qwen2", "qwen3", "mistral", "gpt2")
]


def backward(whole: Any, text: Path, micro_batches: int, step: int) -> float:
    """Gradients of ``transformers``' own model by plain autograd. Returns its loss of the step's whole batch."""
    corpus = load_corpus(DataSpec(path=str(text), sequence_tokens=16), Tokenizer.of_bytes())
    sampler = WindowSampler(len(corpus.training), 3)
    samples = [sampler.numbered(2 * (step * micro_batches + index), 2) for index in range(micro_batches)]
    windows = [corpus.window_tokens(corpus.training[sample]) for sample in samples]
    tokens = torch.from_numpy(np.concatenate(windows))
    loss = whole(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return float(loss.detach())


def check_gradients(pipeline: Pipeline, whole: Any, loss: float) -> None:
    expected = {name: parameter.grad for name, parameter in whole.named_parameters(remove_duplicate=False)}
    seen = set()
    for name, gradient in pipeline.named_gradients():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=4e-5, msg=lambda m, n=name: f"{n}: {m}")
        seen.add(name)
    assert seen == set(expected)
    assert float(pipeline.stages[-1].reduce_buffer[-1]) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("family", "micro_batches", "cuts"),
    CASES,
    ids=[family for family, _, _ in CASES],
)
def test_gradients_are_those_of_one_process(
    text_file: Path, family: str, micro_batches: int, cuts: list[tuple[int, ...]]
) -> None:
    spec = FAMILIES[family]
    whole: Any = AutoModelForCausalLM.from_config(model_config(spec, 256), attn_implementation="eager")
    randomize(whole)
    loss = backward(whole, text_file, micro_batches, step=1)
    for bounds in cuts:
        one_f_one_b, gpipe = list(range(len(bounds) - 2, -1, -1)), [micro_batches] * (len(bounds) - 1)
        pipeline = Pipeline(text_file, bounds, model=spec, micro_batches=micro_batches, steps=2)
        pipeline.set_weights(whole.state_dict())
        for recompute, warm_ups in ((False, one_f_one_b), (True, gpipe)):
            pipeline.set_recompute(recompute)
            pipeline.gradients(1, warm_ups)
            check_gradients(pipeline, whole, loss)


@pytest.mark.parametrize("family", ["gpt2", "gemma3-window", "falcon", "gpt_neox", "mixtral", "deepseek_v3"])
def test_families_train_in_parts_and_are_saved_as_one_model(text_file: Path, tmp_path: Path, family: str) -> None:
    directory, trained = tmp_path / "given", tmp_path / "trained"
    whole = make_of_bytes(family, directory)
    pipeline = Pipeline(text_file, (0, 2, 6), model=ModelSpec(path=directory), steps=1)
    loss = backward(whole, text_file, pipeline.micro_batches, step=0)
    squares = sum(
        float(parameter.grad.square().sum()) for parameter in whole.parameters() if parameter.grad is not None
    )
    applied = pipeline.run(0)
    assert applied.loss == pytest.approx(loss, rel=1e-5)
    assert applied.grad_norm == pytest.approx(squares**0.5, rel=1e-4)
    for stage in pipeline.stages:
        save(stage, trained, 1)
    saved = opened(trained).state_dict()
    assert saved.keys() == whole.state_dict().keys()
    for number, stage in enumerate(pipeline.stages):
        assert stage.built.stage is not None
        names = stage.built.stage.names
        for name, tensor in stage.built.flat.model.state_dict().items():
            assert torch.equal(saved[names[name]], tensor), (number, name)


@pytest.mark.parametrize(("fraction", "windows"), [(0.05, 1), (0.15, 3), (0.0, 0)])
def test_held_out_windows_that_fill_no_micro_batch_are_validated(fraction: float, windows: int) -> None:
    data = DataSpec(sequence_tokens=16, limit_bytes=321, validation_fraction=fraction)
    alone, parts = tiny_trainer(Path("stdlib"), model=MODEL, data=data), Pipeline("stdlib", (0, 2, 4), data=data)
    assert len(alone.batches.corpus.training) == 20 - windows
    losses, targets = validate_all(alone)
    assert targets == 16 * windows
    if windows:
        assert losses == pytest.approx(losses_of(alone, alone.batches.corpus.validation), rel=1e-6)
        assert parts.validation_loss() == pytest.approx(losses / targets, rel=1e-5)


def losses_of(trainer: Trainer, windows: np.ndarray[Any, Any]) -> float:
    tokens = torch.from_numpy(trainer.batches.corpus.window_tokens(windows))
    logits = trainer.built.flat.model(input_ids=tokens[:, :-1], use_cache=False).logits
    return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").detach())


def check_tied_copies(pipeline: Pipeline) -> None:
    """Bit-equal: the weight, and both moments."""
    ends = pipeline.stages[0], pipeline.stages[-1]
    if ends[0].built.tied is None:
        return
    for name in ("parameters", "exp_avg", "exp_avg_sq"):
        copies = []
        for stage in ends:
            assert stage.built.tied is not None
            array = stage.state.arrays()[name]
            copies.append(array[stage.built.tied.offset : stage.built.tied.offset + stage.built.tied.numel])
        assert torch.equal(*copies), name
        assert copies[0].any()


def test_the_norm_counts_a_tied_matrix_once_however_it_is_cut(text_file: Path) -> None:
    pipeline = Pipeline(text_file, (0, 2, 4))
    pipeline.gradients(0)
    gradients = {name: gradient for name, gradient in pipeline.named_gradients() if name != "lm_head.weight"}
    assert len(gradients) == len(pipeline.named_gradients()) - 1
    expected = sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values())
    for pieces in (1, 2, 7, 100):
        total = 0.0
        for stage in pipeline.stages:
            cuts = [round(len(stage.reduce_buffer) * piece / pieces) for piece in range(pieces + 1)]
            total += sum(stage.partial_square_sum(a, b) for a, b in itertools.pairwise(cuts))
        assert total == pytest.approx(expected, rel=1e-7)


def test_the_last_stage_counts_its_own_gradient_of_a_tied_matrix(text_file: Path) -> None:
    """Else whoever spoils it is not found, and the sum seems to be longer than all that was added up."""
    pipeline = Pipeline(text_file, (0, 2, 4))
    pipeline.exchange = lambda: None  # type: ignore[method-assign]
    pipeline.gradients(0)
    for stage in pipeline.stages:
        expected = float((np.asarray(stage.reduce_buffer[:-1], np.float64) ** 2).sum())
        assert stage.contributed_square_sum(0, len(stage.reduce_buffer)) == pytest.approx(expected, rel=1e-7)


def test_a_single_part_gives_the_bits_of_the_whole_model(text_file: Path) -> None:
    pipeline, alone = Pipeline(text_file, (0, 4)), tiny_trainer(text_file, model=MODEL)
    assert pipeline.stages[0].pipeline.tied_gradient() is None
    for step in range(3):
        assert pipeline.run(step) == take_step(alone, step)
    assert state_bytes(pipeline.stages[0]) == state_bytes(alone)


# ---------------------------------------------------------------------------------------------- what is kept, and turns


def test_a_backward_pass_frees_the_graph(text_file: Path) -> None:
    pipeline = Pipeline(text_file, (0, 2, 4))
    first, last = pipeline.stages
    first.begin_step(0)
    last.begin_step(0)
    last.pipeline.forward(0, 0, first.pipeline.forward(0, 0, None))
    graph = last.pipeline._flights[0].graph
    assert graph is not None
    watched = weakref.ref(graph[1])
    del graph
    last.pipeline.backward(0, None)
    assert watched() is None
    assert not last.pipeline._flights


def test_a_payload_of_the_wrong_size_is_a_protocol_error(text_file: Path) -> None:
    first, last = Pipeline(text_file, (0, 2, 4)).stages
    first.begin_step(0)
    last.begin_step(0)
    made = first.pipeline.forward(0, 0, None)
    assert made is not None
    assert len(made) == first.pipeline.activation_bytes == 2 * 16 * 32 * 4
    for payload in (made[:-1], made[:0], np.concatenate([made, made])):
        with pytest.raises(ProtocolError):
            last.pipeline.forward(0, 0, payload)
        with pytest.raises(ProtocolError):
            first.pipeline.backward(0, payload)
    last.pipeline.forward(0, 0, made)  # neither is spoilt by it
    first.pipeline.backward(0, last.pipeline.backward(0, None))


def test_an_abandoned_pipeline_step_changes_no_later_step(text_file: Path) -> None:
    pipeline, calm = Pipeline(text_file, (0, 2, 4)), Pipeline(text_file, (0, 2, 4))
    first, last = pipeline.stages
    first.begin_step(0)
    last.begin_step(0)
    last.pipeline.forward(0, 0, first.pipeline.forward(0, 0, None))
    pipeline.run(0)
    calm.run(0)
    for one, other in zip(pipeline.stages, calm.stages, strict=True):
        assert state_bytes(one) == state_bytes(other)


# -------------------------------------------------------------------------------------------------- the text, precision


@pytest.fixture(scope="module")
def full_losses(text_file: Path) -> list[float]:
    """Of the same training with fp32 everywhere."""
    full = Pipeline(text_file, (0, 1, 3, 4))
    return [full.run(step).loss for step in range(15)]


@pytest.mark.parametrize(
    ("split", "precision", "off"),
    [
        ({"activations": "bf16", "gradients": "bf16"}, "fp32", 0.02),
        ({"activations": "int8", "recompute": True}, "fp32", 0.03),
    ],
)
def test_compressed_activations_learn_nearly_as_well(
    text_file: Path, full_losses: list[float], split: dict[str, Any], precision: str, off: float
) -> None:
    short = Pipeline(text_file, (0, 1, 3, 4), split, precision=precision)
    losses = [short.run(step).loss for step in range(len(full_losses))]
    assert losses[-1] < losses[0] - 1
    assert losses[-1] == pytest.approx(full_losses[-1], rel=off)
    assert losses[-1] != full_losses[-1]
    check_tied_copies(short)


@pytest.mark.parametrize(
    ("precision", "encoding"), [("bf16", "fp32"), ("bf16-weights", "fp32"), ("bf16-weights", "bf16")]
)
def test_arithmetic_in_bf16_is_that_of_one_process(text_file: Path, precision: str, encoding: str) -> None:
    split = {"activations": encoding, "gradients": encoding}
    pipeline = Pipeline(text_file, (0, 1, 3, 4), split, precision=precision)
    alone = tiny_trainer(text_file, model=MODEL, precision=precision)
    losses = [(pipeline.run(step).loss, take_step(alone, step).loss) for step in range(3)]
    assert losses[0][0] == pytest.approx(losses[0][1], rel=1e-6)  # of the same weights
    assert losses[0][0] != pytest.approx(Pipeline(text_file, (0, 1, 3, 4)).run(0).loss, rel=1e-6)
    for got, expected in losses:
        assert got == pytest.approx(expected, rel=1e-3)


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(("stages", "cuts"), [(5, []), (2, [4]), (3, [2, 2]), (3, [3, 1]), (3, [2]), (1, [2])])
def test_bad_stages_are_refused(stages: int, cuts: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"do not cut 4 layers into {stages} parts") as caught:
        stage_bounds(MODEL, stages, cuts)
    assert caught.value.remedy


def test_stages_have_the_cuts_or_about_equally_many_layers() -> None:
    assert stage_bounds(MODEL, 3, [1, 3]) == (0, 1, 3, 4)
    assert stage_bounds(MODEL, 3) == (0, 1, 2, 4)


def test_the_memory_check_counts_micro_batches_in_flight(text_file: Path) -> None:
    pipeline = Pipeline(text_file, (0, 2, 4))
    device, stage = pipeline.device, pipeline.stages[0]
    assert stage.built.stage is not None
    config, part = model_config(MODEL, 256), stage.built.stage.part
    weights, kept = stage.built.stage.weights_bytes, kept_bytes(config, 32, part)

    def check(*, precision: str = "fp32", **changes: Any) -> None:
        spec = StageSpec(0, (0, 2, 4), **changes)
        fit_training(config, spec, device, micro_batch_tokens=32, precision=precision)

    check()
    with pytest.raises(ResourceError, match="1000000000 micro-batches of 32 tokens in flight"):
        check(in_flight=10**9)
    check(memory_bytes=5 * weights + kept)
    with pytest.raises(ResourceError, match="this worker offers"):  # whatever the machine has beside that
        check(memory_bytes=5 * weights + kept - 1)
    rounded = weights // 2
    check(memory_bytes=5 * weights + rounded + kept, precision="bf16-weights")
    with pytest.raises(ResourceError, match="this worker offers"):
        check(memory_bytes=5 * weights + rounded + kept - 1, precision="bf16-weights")
    check(in_flight=10**9, recompute=True)  # the first stage keeps nothing for that
    given = 5 * weights + 3 * kept + 1
    for memory_bytes, most, expected in ((given, 8, 3), (given - kept, 8, 2), (given, 2, 2), (0, 8, 8)):
        spec = StageSpec(0, (0, 2, 4), in_flight=2, memory_bytes=memory_bytes)
        assert fit_training(config, spec, device, micro_batch_tokens=32, most=most) == expected
    assert stage.pipeline.in_flight >= 1
