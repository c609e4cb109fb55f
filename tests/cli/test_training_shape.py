"""What a model to be trained weighs, without torch, beside the model that torch builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import Profile
from p2ptrain.cli import model_sizes
from p2ptrain.cli.model_sizes import shape_of, shape_param
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
    built, found = layer_sizes(config, torch.float32), shape_of(profile)
    assert found is not None
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


@pytest.fixture
def never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it was built")

    monkeypatch.setattr(model_sizes, "_shape_by_building", refuse)


@pytest.mark.usefixtures("never_built")
@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("llama", True), ("llama", False), ("mistral", True), ("qwen2", False), ("qwen3", True)],
)
def test_the_table_tells_what_the_built_model_tells(architecture: str, tied: bool) -> None:
    check_alike(profile_of(model={"architecture": architecture, "tie_embeddings": tied, "kv_heads": 2}))


@pytest.mark.usefixtures("never_built")
@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])  # what names tell of all: test_model_sizes
def test_a_directory_tells_what_the_built_model_tells(family: str, tmp_path: Path) -> None:
    make(family, tmp_path)
    check_alike(profile_of(model={"path": str(tmp_path)}))


def test_another_architecture_is_built_where_that_may_be() -> None:
    other = profile_of(model={"architecture": "olmo2"})
    check_alike(other)
    assert shape_param(other, may_build=False) == {}


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
    found = shape_of(profile)
    assert found is not None
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
