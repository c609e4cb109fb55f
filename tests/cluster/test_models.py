"""What a model to be trained weighs, as placement is told, beside what its parts will keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import Profile
from p2ptrain.cluster import models
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.models import _measure, shape_if_known, shape_of
from p2ptrain.compute.device import ComputeDevice
from p2ptrain.compute.layout import LayerRange, layer_sizes
from p2ptrain.compute.model import model_config
from p2ptrain.compute.stage import StageSpec, fit_training, kept_bytes
from p2ptrain.core.errors import ResourceError
from ring.planning.workloads import ModelShape
from roles.training_shape import training_of
from roles.worker.build import training_spec
from tests.compute.families import make

SPLIT = {"job": {"strategy": "pipeline", "workers": 2}, "pipeline": {"stages": 2}}


def profile_of(**tables: Any) -> Profile:
    return Profile.model_validate({**SPLIT, **tables})


def check_alike(profile: Profile, found: ModelShape | None) -> None:
    spec = training_spec(profile).model
    config = model_config(spec, 1 if spec.path else 256)
    built = layer_sizes(config, torch.float32)
    assert found is not None
    sizes = found.sizes
    assert (sizes.layers_bytes, sizes.first_bytes, sizes.last_bytes, sizes.tied_bytes) == (
        built.layers_bytes, built.first_bytes, built.last_bytes, built.tied_bytes
    )  # fmt: skip
    assert (found.width, found.vocab) == (config.hidden_size, config.vocab_size)
    training = training_of(profile, found.to_map())
    assert training is not None
    for stop in (1, sizes.layers):
        kept = kept_bytes(config, training.tokens, LayerRange(0, stop, sizes.layers))
        assert training.kept_bytes(0, stop) == kept


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **more: Any) -> ModelShape:
        raise ResourceError("it was killed")

    monkeypatch.setattr(models, "_measure_apart", refuse)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("llama", True), ("llama", False), ("mistral", True), ("qwen2", False), ("qwen3", True)],
)
def test_the_table_tells_what_the_built_model_tells(architecture: str, tied: bool) -> None:
    profile = profile_of(model={"architecture": architecture, "tie_embeddings": tied, "kv_heads": 2})
    check_alike(profile, shape_of(profile))


def test_a_model_in_a_directory_is_measured(tmp_path: Path) -> None:
    make("gpt2", tmp_path)
    profile = profile_of(model={"path": str(tmp_path)})
    check_alike(profile, _measure(profile))


@pytest.mark.usefixtures("broken")
def test_without_its_sizes_a_job_is_possible_and_a_plan_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    profile = profile_of(model={"architecture": "gpt2"})
    assert shape_if_known(profile, Console()) is None
    assert "it was killed" in capsys.readouterr().err
    with pytest.raises(ResourceError):
        shape_of(profile)
    assert shape_of(profile_of(model={"path": "/nowhere"})) is None


@pytest.mark.parametrize(("pipeline", "precision"), [
    ({}, "fp32"), ({}, "bf16-weights"), ({"recompute": True}, "fp32"),
    ({"recompute": True, "activations": "int8"}, "fp32"),
])  # fmt: skip
def test_a_worker_checks_the_memory_that_the_seed_placed_it_by(
    pipeline: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = profile_of(pipeline={"stages": 2, **pipeline}, device={"precision": precision})
    found = _measure(profile)
    training = training_of(profile, found.to_map())
    assert training is not None
    config = model_config(training_spec(profile).model, 256)
    asked: list[int] = []
    monkeypatch.setattr("p2ptrain.compute.stage.check_memory", lambda need, device, what, remedy: asked.append(need))
    for device in (ComputeDevice(torch.device("cpu"), "cpu"), ComputeDevice(torch.device("mps"), "mps")):
        for stage, (start, stop) in enumerate([(0, 1), (1, 4)]):
            spec = StageSpec(
                stage, (0, 1, 4), activations=profile.pipeline.activations, recompute=profile.pipeline.recompute,
                in_flight=training.in_flight(stage),
            )  # fmt: skip
            asked.clear()
            fit_training(config, spec, device, micro_batch_tokens=training.tokens, precision=precision)
            assert asked[0] == training.need_bytes(stage, start, stop, on_host=device.kind == "cpu")
