"""LoRA and frozen parameters: what trains is what peft trains, wherever it is computed, and its files are peft's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from p2ptrain.compute.adapter import MergedTable
from p2ptrain.compute.device import pick_device
from p2ptrain.compute.flat import OptimizerSpec
from p2ptrain.compute.model import ModelSpec
from p2ptrain.compute.recipe import ModelRecipe
from p2ptrain.compute.trainer import Trainer
from p2ptrain.compute.tuning import TuningSpec
from p2ptrain.core.adapters import read_adapter
from p2ptrain.core.checkpoints import CheckpointStore, add_whole_adapter, pieces
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ConfigError, StorageError
from p2ptrain.core.tensor_files import TensorTable
from tests.compute.tiny_trainer import run_step, state_bytes, tiny, tiny_spec, tiny_trainer, validate_all

from .families import make_of_bytes, randomize
from .pipelines import Pipeline
from .saving import save

LORA = TuningSpec(rank=4, alpha=12)  # not peft's usual alpha
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft


@pytest.fixture(scope="module")
def base(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers whose weights are all random, norms too, in fp32."""
    directory = tmp_path_factory.mktemp("base")
    trainer = tiny_trainer(text_file, model=tiny(layers=4, architecture="qwen2", tie_embeddings=True))
    randomize(trainer.built.flat.model)
    save(trainer, directory)
    return directory


def lora(**changes: Any) -> TuningSpec:
    return LORA.model_copy(update=changes)


def opened(base: Path, adapter: Path, **options: Any) -> Any:
    """The model as peft opens it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(40).view(2, 20) * 5).logits
    return result


def assembled(pipeline: Pipeline, root: Path) -> Path:
    """The stages' checkpoint in one directory, as a worker assembles it."""
    store = CheckpointStore(RealDisk(), root, 2)
    draft = store.draft(1, 0)
    for stage in pipeline.stages:
        blobs = {blob.name: blob.view for blob in stage.state.blobs()}
        for file in stage.state.checkpoint_files(1):
            draft.begin(file.name)
            for piece in pieces(file, blobs):
                draft.add(piece)
            draft.end()
    add_whole_adapter(RealDisk(), draft)
    return store.publish(draft, {}).path


def test_twenty_steps_are_those_of_peft_in_one_process(text_file: Path, base: Path, tmp_path: Path) -> None:
    """Of two workers, and of two stages. Only the adapters are exchanged."""
    settings: dict[str, Any] = {
        "model": ModelSpec(path=base),
        "tuning": LORA,
        "optimizer": OptimizerSpec(lr=3e-3, warmup_steps=0, min_lr_ratio=1.0, clip_norm=0.0),
        "steps": 20,
    }
    one, other = (tiny_trainer(text_file, **settings) for _ in range(2))
    pipeline = Pipeline(text_file, (0, 1, 4), **settings)
    save(one, tmp_path)
    plain = opened(base, tmp_path, is_trainable=True)
    adapters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    numel = sum(parameter.numel() for parameter in adapters)
    assert one.reduce_buffer.nbytes == 4 * numel + 8
    assert sum(stage.reduce_buffer.nbytes - 8 for stage in pipeline.stages) == 4 * numel
    worst = 0.0
    first = 0.0
    for step in range(20):
        for trainer, share in ((one, (0, 3)), (other, (1, 2))):
            trainer.begin_step(step)
            for index in share:
                trainer.micro_batch(step, index)
            trainer.finish_gradients()
        one.reduce_buffer[:] += other.reduce_buffer
        other.reduce_buffer[:] = one.reduce_buffer
        square_sum = one.partial_square_sum(0, len(one.reduce_buffer))
        losses = [trainer.apply(step, square_sum).loss for trainer in (one, other)]
        if step < 5:
            losses.append(pipeline.run(step).loss)

        optimizer.zero_grad()
        windows = np.concatenate([one.batches.window_numbers(step, index) for index in range(4)])
        tokens = torch.from_numpy(one.batches.corpus.window_tokens(one.batches.corpus.training[windows]))
        outputs = plain(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(outputs.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        first = first or loss.item()
        worst = max(worst, *(abs(ours / loss.item() - 1) for ours in losses))
    print(f"largest relative difference of a loss: {worst:.1e}; {first:.3f} to {loss.item():.3f}")
    assert worst < 1e-5
    assert loss.item() < first - 0.5
    assert state_bytes(one) == state_bytes(other)
    healed = tiny_trainer(text_file, **settings)
    for blob, source in zip(healed.state.blobs(), one.state.blobs(), strict=True):
        blob.view[:] = source.view
    healed.state.refresh(20)
    assert validate_all(healed) == validate_all(one)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_peft_opens_the_adapters_of_the_whole_model_and_of_its_stages(
    text_file: Path, tmp_path: Path, family: str
) -> None:
    base, ours = tmp_path / "base", tmp_path / "ours"
    make_of_bytes(family, base)
    settings: dict[str, Any] = {"model": ModelSpec(path=base), "tuning": LORA}
    whole, pipeline = tiny_trainer(text_file, **settings), Pipeline(text_file, (0, 2, 6), **settings)
    start, other_seed = state_bytes(whole)["parameters"], tiny_trainer(text_file, seed=4, **settings)
    assert start != state_bytes(other_seed)["parameters"]
    run_step(whole, 0)
    pipeline.run(0)
    save(whole, ours)
    joined = assembled(pipeline, tmp_path / "stages")
    expected = logits(whole.built.flat.model)
    for directory in (ours, joined):
        assert MergedTable(read_adapter(directory)).adapted.keys() <= TensorTable(base).entries.keys()
        model = opened(base, directory)
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(logits(model.merge_and_unload()), expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)), expected)
    with (
        safe_open(ours / "adapter_model.safetensors", "pt") as one,
        safe_open(joined / "adapter_model.safetensors", "pt") as other,
    ):
        assert set(one.keys()) == set(other.keys())
    assert (ours / "adapter_config.json").read_bytes() == (joined / "adapter_config.json").read_bytes()
    assert not (joined / "config.json").exists()
    other_seed.state.load(ours)
    assert state_bytes(other_seed) == state_bytes(whole)
    again = Pipeline(text_file, (0, 2, 6), **settings)
    for stage, saved in zip(again.stages, pipeline.stages, strict=True):
        stage.state.load(joined)
        assert state_bytes(stage) == state_bytes(saved)
    whole.state.load_initial()
    assert state_bytes(whole)["parameters"] == start


def test_dropout_is_a_function_of_the_micro_batch_alone(text_file: Path, base: Path) -> None:
    """Equal however often it is computed, in whichever part; none in a validation."""
    settings: dict[str, Any] = {"model": ModelSpec(path=base), "tuning": lora(dropout=0.25)}

    def gradients(trainer: Trainer, index: int) -> np.ndarray[Any, Any]:
        trainer.begin_step(1)
        trainer.micro_batch(1, index)
        trainer.finish_gradients()
        return trainer.reduce_buffer.copy()

    whole = tiny_trainer(text_file, **settings)
    run_step(whole, 0)
    mine = gradients(whole, 2)
    validated = whole.validate(0)
    assert gradients(whole, 1).tobytes() != mine.tobytes()
    assert whole.validate(0) == validated
    assert gradients(whole, 2).tobytes() == mine.tobytes()
    repeating = tiny_trainer(text_file, gradient_checkpointing=True, **settings)
    run_step(repeating, 0)
    assert gradients(repeating, 2).tobytes() == mine.tobytes()
    for index in (1, 2):  # both forward passes before the backward passes
        repeating.pipeline.forward(1, index, None)
    repeating.begin_step(1)
    for index in (1, 2):
        repeating.pipeline.forward(1, index, None)
    for index in (1, 2):
        repeating.pipeline.backward(index, None)
    assert repeating.reduce_buffer[:-1].tobytes() != mine[:-1].tobytes()
    np.testing.assert_allclose(repeating.reduce_buffer, mine + gradients(whole, 1), rtol=1e-4, atol=1e-7)
    for recompute in (False, True):
        pipeline = Pipeline(text_file, (0, 1, 4), {"recompute": recompute}, **settings)
        pipeline.run(0)
        pipeline.gradients(1, share=[2])
        assert float(pipeline.stages[-1].reduce_buffer[-1]) == pytest.approx(float(mine[-1]), rel=1e-5)
    attention = whole.built.flat.model.get_submodule("model.layers.0.self_attn")
    dropouts: list[Any] = [attention.get_submodule(f"{name}.lora_dropout.default") for name in ("q_proj", "k_proj")]
    masks = [dropout.mask(dropout.key, torch.empty(4, 16, 32)) for dropout in dropouts]
    for mask in masks:
        assert mask.unique().tolist() == pytest.approx([0, 4 / 3])
        assert float(mask.mean()) == pytest.approx(1, abs=0.1)
    assert not torch.equal(*masks)


@pytest.mark.parametrize("precision", ["bf16", "bf16-weights"])
def test_a_base_in_bf16_gives_the_bits_of_one_in_fp32(text_file: Path, base: Path, precision: str) -> None:
    """Where the arithmetic is bf16 anyway."""
    settings: dict[str, Any] = {"model": ModelSpec(path=base), "precision": precision}
    plain, halved = (tiny_trainer(text_file, tuning=lora(base=kind), **settings) for kind in ("fp32", "bf16"))
    assert [run_step(plain, step) for step in range(3)] == [run_step(halved, step) for step in range(3)]
    assert state_bytes(plain) == state_bytes(halved)
    assert halved.built.flat.model.get_submodule("model.layers.0.mlp.up_proj.base_layer").weight.dtype == torch.bfloat16
    spec = tiny_spec(text_file, tuning=lora(base="fp32"), **settings)
    held = ModelRecipe(spec, pick_device("cpu", 1)).tuning.held
    assert held == (0.5 if precision == "bf16-weights" else 1.0)


def test_a_base_in_4_bits_trains_after_a_validation(
    text_file: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor with AVX512-BF16, for which bitsandbytes packs the weights for inference."""
    from bitsandbytes.nn import modules

    packed = []

    def pack(weight: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        packed.append(state.shape)
        state.packing_format_for_cpu = True
        return weight, state

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    monkeypatch.setattr(modules, "_convert_weight_packed_for_cpu", pack)
    trainer = tiny_trainer(text_file, model=ModelSpec(path=base), tuning=lora(base="nf4"))
    layers = [it for it in trainer.built.flat.model.modules() if isinstance(it, modules.Linear4bit)]
    assert len(layers) == 4 * 7
    assert all(layer.weight.dtype == torch.uint8 for layer in layers)
    losses = [run_step(trainer, step) for step in range(3)]
    assert losses[2] < losses[0]
    trainer.built.flat.model.eval()
    with torch.no_grad():
        layers[0](torch.zeros(1, 1, layers[0].in_features))
    trainer.built.flat.model.train()
    trainer.validate(0)
    assert not packed
    trainer.begin_step(3)
    trainer.micro_batch(3, 0)
    parameters = trainer.built.flat.model.parameters()
    assert all(parameter.grad.any() for parameter in parameters if parameter.grad is not None)


def test_a_transposed_layer_is_held_in_4_bits(text_file: Path, tmp_path: Path) -> None:
    make_of_bytes("gpt2", tmp_path)
    settings: dict[str, Any] = {"model": ModelSpec(path=tmp_path)}
    exact, packed = (tiny_trainer(text_file, tuning=lora(base=kind), **settings) for kind in ("fp32", "nf4"))
    expected = logits(exact.built.flat.model)
    error = (logits(packed.built.flat.model) - expected).norm() / (expected - expected.mean()).norm()
    assert 0.001 < error < 0.2, float(error)
    assert run_step(packed, 0) == pytest.approx(run_step(exact, 0), rel=0.05)


FREEZE = TuningSpec(freeze=["*embed_tokens*", "model.layers.1.*", "*norm.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_partly_frozen_model_is_saved_whole(text_file: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    base, ours, parts = (tmp_path / name for name in ("base", "ours", "parts"))
    make_of_bytes("llama-tied", base, dtype=dtype)
    precision = "fp32" if dtype == torch.float32 else "bf16"
    settings: dict[str, Any] = {"model": ModelSpec(path=base), "tuning": FREEZE, "precision": precision}
    whole, pipeline = tiny_trainer(text_file, **settings), Pipeline(text_file, (0, 2, 6), **settings)
    assert all(stage.pipeline.tied_gradient() is None for stage in pipeline.stages)
    applied = pipeline.run(0)
    assert run_step(whole, 0) == pytest.approx(applied.loss, rel=1e-5)
    save(whole, ours)
    for stage in pipeline.stages:
        save(stage, parts)
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for directory in (ours, parts):
        after = AutoModelForCausalLM.from_pretrained(directory)
        assert after.dtype == dtype
        unchanged = {name for name, tensor in after.state_dict().items() if torch.equal(tensor, before[name])}
        assert {name for name in before if "embed_tokens" in name or ".layers.1." in name} <= unchanged
        assert "model.layers.0.mlp.up_proj.weight" not in unchanged
    fresh = tiny_trainer(text_file, seed=9, **settings)
    fresh.state.load(ours)
    assert state_bytes(fresh) == state_bytes(whole)
    fresh.state.load_initial()
    assert state_bytes(fresh)["parameters"] == state_bytes(tiny_trainer(text_file, **settings))["parameters"]
    for stage, saved in zip(Pipeline(text_file, (0, 2, 6), **settings).stages, pipeline.stages, strict=True):
        stage.state.load(parts)
        assert state_bytes(stage) == state_bytes(saved)


@pytest.mark.parametrize(
    ("tuning", "said", "remedy"),
    [
        (lora(targets=["q_projj"]), "lora.targets has 'q_projj', which fits no linear layer", "q_proj"),
        (lora(targets=["lm_head"]), "names the output layer, whose matrix", "all-linear"),
        (TuningSpec(freeze=["model.layer.*"]), "model.freeze has 'model.layer.*', which fits no", "model.layers.0."),
        (TuningSpec(freeze=["*"]), "nothing is left to train", "freeze fewer"),
    ],
)
def test_names_that_fit_nothing_are_refused(
    text_file: Path, base: Path, tuning: TuningSpec, said: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_trainer(text_file, model=ModelSpec(path=base), tuning=tuning)
    assert said in caught.value.message
    assert remedy in caught.value.remedy


def test_layers_that_peft_takes_for_experts_are_refused(text_file: Path, tmp_path: Path) -> None:
    make_of_bytes("deepseek_v3", tmp_path)
    with pytest.raises(ConfigError, match="no adapters for the feed-forward layers"):
        tiny_trainer(text_file, model=ModelSpec(path=tmp_path), tuning=LORA)
    tiny_trainer(text_file, model=ModelSpec(path=tmp_path), tuning=lora(targets=["o_proj"]))


def test_a_stage_with_nothing_to_train_is_refused(text_file: Path, base: Path) -> None:
    tuning = lora(targets=["layers.3.mlp.up_proj", "layers.0.mlp.up_proj"])
    Pipeline(text_file, (0, 2, 4), model=ModelSpec(path=base), tuning=tuning)
    with pytest.raises(ConfigError, match="nothing trains in these layers"):
        Pipeline(text_file, (0, 1, 3, 4), model=ModelSpec(path=base), tuning=tuning)


@pytest.mark.parametrize("bounds", [(0, 4), (0, 1, 4)])
def test_members_with_other_base_models_do_not_train_together(
    text_file: Path, base: Path, tmp_path: Path, bounds: tuple[int, ...]
) -> None:
    other, saved = tmp_path / "other", tmp_path / "saved"
    changed = tiny_trainer(text_file, model=ModelSpec(path=base))
    changed.built.flat.parameters[-40] += 1
    save(changed, other)
    ours, theirs, same = (
        Pipeline(text_file, bounds, model=ModelSpec(path=path), tuning=LORA).stages for path in (base, other, base)
    )
    assert len({stage.data.digest for stage in (*ours, *same)}) == 1
    assert ours[0].data.digest != theirs[0].data.digest
    assert ours[0].data.digest != changed.data.digest
    private = Pipeline(text_file, bounds, model=ModelSpec(path=base), tuning=LORA, private=True).stages[0]
    assert private.data.digest not in ("", ours[0].data.digest)
    assert not tiny_trainer(text_file, private=True).data.digest
    save(ours[0], saved)
    with pytest.raises(StorageError, match="another model"):
        theirs[0].state.load(saved)
