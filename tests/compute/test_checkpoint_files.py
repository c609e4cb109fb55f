"""Checkpoints of stages: together one Hugging Face directory, and each enough for its stage to go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from p2ptrain.compute.adapter import write_merged
from p2ptrain.compute.local import LocalSpec
from p2ptrain.compute.model import ModelSpec, build_model
from p2ptrain.compute.trainer import Trainer
from p2ptrain.compute.tuning import TuningSpec
from p2ptrain.core.adapters import read_adapter
from p2ptrain.core.checkpoints import weights_index
from p2ptrain.core.errors import StorageError
from p2ptrain.core.tensor_files import INDEX_FILE
from tests.compute.tiny_trainer import state_bytes, tiny, tiny_trainer

from .pipelines import MODEL, Pipeline
from .saving import check_kept, make_given, save

MODELS = [
    tiny(layers=3, architecture=architecture, kv_heads=4 if architecture == "gpt2" else 2, tie_embeddings=tied)
    for architecture, tied in (("llama", True), ("qwen2", False), ("qwen3", True), ("gpt2", True))
]
BOUNDS = (0, 1, 2, 3)


def name_of(spec: ModelSpec) -> str:
    return f"{spec.architecture}-{'tied' if spec.tie_embeddings else 'untied'}"


def save_all(stages: Sequence[Trainer], directory: Path, step: int = 0) -> None:
    for stage in stages:
        save(stage, directory, step)


def states(stages: Sequence[Trainer]) -> list[dict[str, bytes]]:
    return [state_bytes(stage) for stage in stages]


def opened(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize("spec", MODELS, ids=name_of)
def test_files_of_all_stages_are_one_model_with_the_first_weights(
    text_file: Path, tmp_path: Path, spec: ModelSpec
) -> None:
    pipeline = Pipeline(text_file, BOUNDS, model=spec)
    save_all(pipeline.stages, tmp_path)
    expected = build_model(spec, 256, 3).state_dict()
    loaded = opened(tmp_path)
    assert list(loaded.state_dict()) == list(expected)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == spec.tie_embeddings
    files = {path.name: load_file(path) for path in tmp_path.glob("model-*.safetensors")}
    sizes = {file: {name: tensor.nbytes for name, tensor in tensors.items()} for file, tensors in files.items()}
    assert (tmp_path / INDEX_FILE).read_bytes() == weights_index(sizes)
    again = Pipeline(text_file, BOUNDS, model=ModelSpec(path=tmp_path))
    assert states(again.stages) == states(pipeline.stages)


@pytest.mark.parametrize("spec", [MODEL, tiny(layers=4, tie_embeddings=False)], ids=name_of)
def test_each_stage_continues_from_its_own_files(text_file: Path, tmp_path: Path, spec: ModelSpec) -> None:
    pipeline = Pipeline(text_file, (0, 1, 4), model=spec)
    for step in range(2):
        pipeline.run(step)
    for number, stage in enumerate(pipeline.stages):
        own = tmp_path / str(number)
        save(stage, own, 2)
        notes = json.loads((own / f"training-0000{number + 1}-of-00002.json").read_text())
        assert (notes["step"], notes["layers"], notes["corpus"]) == (2, [[0, 1], [1, 4]][number], stage.data.digest)
    expected_state = states(pipeline.stages)
    expected = [pipeline.run(step).loss for step in (2, 3)]
    restored = Pipeline(text_file, (0, 1, 4), model=spec, seed=4)
    for number, stage in enumerate(restored.stages):
        stage.state.load(tmp_path / str(number))
    assert states(restored.stages) == expected_state
    restored.stages[0].batches.sampler = pipeline.stages[0].batches.sampler  # of the other seed
    restored.stages[1].batches.sampler = pipeline.stages[1].batches.sampler
    assert [restored.run(step).loss for step in (2, 3)] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bounds", [(0, 6), (0, 2, 6)])
def test_checkpoints_keep_settings_and_dtypes_of_the_base_model(
    text_file: Path, tmp_path: Path, bounds: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Also the type of the weights; and training goes on from those in fp32, to the bit."""
    given, saved = tmp_path / "given", tmp_path / "saved"
    make_given(given, dtype)
    spec = ModelSpec(path=given)
    pipeline = Pipeline(text_file, bounds, model=spec)
    pipeline.run(0)
    save_all(pipeline.stages, saved, 1)
    check_kept(given, saved)
    whole: Any = AutoModelForCausalLM.from_pretrained(saved)
    if len(bounds) > 2:
        index = json.loads((saved / INDEX_FILE).read_text())["metadata"]["total_size"]
        files = [load_file(path).values() for path in saved.glob("model*.safetensors")]
        assert index == sum(tensor.nbytes for tensors in files for tensor in tensors)
    for stage in pipeline.stages:
        for segment in stage.built.flat.segments:
            name = stage.built.stage.names[segment.name] if stage.built.stage else segment.name
            trained = stage.built.flat.parameters[segment.offset : segment.offset + segment.numel].view(segment.shape)
            assert torch.equal(whole.state_dict()[name], trained.to(dtype))
    again = Pipeline(text_file, bounds, model=spec)
    for stage in again.stages:
        stage.state.load(saved)
    assert states(again.stages) == states(pipeline.stages)


@pytest.mark.parametrize("slots", [0, 1])
def test_adapters_and_merged_models_keep_settings_of_the_base_model(
    text_file: Path, tmp_path: Path, slots: int
) -> None:
    given, saved, merged = tmp_path / "given", tmp_path / "saved", tmp_path / "merged"
    make_given(given, torch.float16)
    (given / INDEX_FILE).write_text("of an older model")
    local = LocalSpec(outer_lr=1.0, outer_momentum=0.0, fresh=True, slots=1) if slots else None
    save(tiny_trainer(text_file, model=ModelSpec(path=given), tuning=TuningSpec(rank=2, alpha=8), local=local), saved)
    (given / INDEX_FILE).unlink()
    check_kept(given, saved, adapter=not slots)
    if not slots:
        (given / INDEX_FILE).write_text("of an older model")
        write_merged(read_adapter(saved), merged)
        assert not (merged / INDEX_FILE).exists()
        (given / INDEX_FILE).unlink()
        check_kept(given, merged)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model", "short"),
        ("optimizer", "missing"),
        ("optimizer", "empty"),
        ("training", "nested"),
        ("training", "huge"),
    ],
)
def test_damaged_files_change_nothing(text_file: Path, tmp_path: Path, name: str, damage: str) -> None:
    pipeline = Pipeline(text_file, (0, 2, 4))
    stage = pipeline.stages[1]
    save(stage, tmp_path)
    (path,) = tmp_path.glob(f"{name}-*")
    if damage == "missing":
        path.unlink()
    elif damage in ("nested", "huge"):  # by whoever gave it: a stage's files may come from another worker
        path.write_bytes(b"[" * 100_000 if damage == "nested" else path.read_bytes() + b" " * (1 << 20))
    else:
        path.write_bytes(path.read_bytes()[: -9 if damage == "short" else 0])
    pipeline.run(0)
    before = state_bytes(stage)
    with pytest.raises(StorageError, match="cannot read the checkpoint"):
        stage.state.load(tmp_path)
    assert state_bytes(stage) == before


def test_files_of_another_cut_are_refused(text_file: Path, tmp_path: Path) -> None:
    stages = Pipeline(text_file, (0, 2, 4)).stages
    save(stages[0], tmp_path)
    with pytest.raises(StorageError):
        stages[1].state.load(tmp_path)
    other = Pipeline(text_file, (0, 1, 4)).stages[0]
    with pytest.raises(StorageError, match="of another model"):
        other.state.load(tmp_path)


def test_tensors_of_other_shapes_are_refused(text_file: Path, tmp_path: Path) -> None:
    stage = Pipeline(text_file, (0, 2, 4)).stages[0]
    save(stage, tmp_path)
    path = tmp_path / "model-00001-of-00002.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1].clone()
    save_file(tensors, path)
    with pytest.raises(StorageError, match="other names or shapes"):
        stage.state.load(tmp_path)
