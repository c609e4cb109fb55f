"""What a model to be trained weighs, as placement is told, beside what its parts will keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import Profile
from p2ptrain.cli.model_sizes import _measured, shape_param
from p2ptrain.compute.device import Device
from p2ptrain.compute.model import model_config
from p2ptrain.compute.part import Part, layer_sizes
from p2ptrain.compute.stage import StageSpec, check_training_memory, kept_bytes
from roles.seed.jobs import training_of
from roles.worker.build import training_spec
from tests.compute.families import make

SPLIT = {"job": {"strategy": "pipeline", "workers": 2}, "pipeline": {"stages": 2}}


def profile_of(**tables: Any) -> Profile:
    return Profile.model_validate({**SPLIT, **tables})


def check_alike(profile: Profile) -> None:
    spec = training_spec(profile).model
    config = model_config(spec, 1 if spec.path else 256)
    built, found = layer_sizes(config, torch.float32), _measured(profile)
    sizes = found.sizes
    assert (sizes.layers_bytes, sizes.first_bytes, sizes.last_bytes, sizes.tied_bytes) == (
        built.layers_bytes, built.first_bytes, built.last_bytes, built.tied_bytes
    )  # fmt: skip
    assert (found.width, found.vocab) == (config.hidden_size, config.vocab_size)
    training = training_of(profile, found.to_map())
    assert training is not None
    for stop in (1, sizes.layers):
        kept = kept_bytes(config, training.tokens, Part(0, stop, sizes.layers))
        assert training.kept_bytes(0, stop) == kept


def test_a_model_is_measured_by_its_table_or_its_directory(tmp_path: Path) -> None:
    check_alike(profile_of(model={"architecture": "qwen2", "tie_embeddings": False, "kv_heads": 2}))
    make("gpt2", tmp_path)
    check_alike(profile_of(model={"path": str(tmp_path)}))


def test_a_directory_that_is_elsewhere_is_not_known() -> None:
    assert shape_param(profile_of(model={"path": "/nowhere"})) == {}
    assert shape_param(Profile()) == {}


@pytest.mark.parametrize("pipeline", [
    {}, {"schedule": "gpipe"}, {"recompute": True}, {"recompute": True, "activations": "int8"}, {"max_in_flight": 2}
])  # fmt: skip
def test_a_worker_checks_the_memory_that_the_seed_placed_it_by(
    pipeline: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = profile_of(pipeline={"stages": 2, **pipeline})
    found = _measured(profile)
    training = training_of(profile, found.to_map())
    assert training is not None
    config = model_config(training_spec(profile).model, 256)
    asked: list[int] = []
    monkeypatch.setattr("p2ptrain.compute.stage.check_memory", lambda need, device, what: asked.append(need))
    for device in (Device(torch.device("cpu"), "cpu"), Device(torch.device("mps"), "mps")):
        for stage, (start, stop) in enumerate([(0, 1), (1, 4)]):
            spec = StageSpec(
                stage, (0, 1, 4), activations=profile.pipeline.activations, recompute=profile.pipeline.recompute,
                in_flight=training.in_flight(stage),
            )  # fmt: skip
            asked.clear()
            check_training_memory(config, spec, device, micro_batch_tokens=training.tokens)
            assert asked[0] == training.need_bytes(stage, start, stop, on_host=device.kind == "cpu")
