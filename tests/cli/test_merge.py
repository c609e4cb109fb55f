"""``p2ptrain checkpoints merge``, and what commands say of an adapter that is not merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2ptrain.cli.text_options import newest_in
from tests.compute.families import make

from .conftest import Command

FACTOR = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Of a model that is not where it says."""
    make("llama", tmp_path / "base")
    directory = tmp_path / "adapter"
    directory.mkdir()
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "base_model_name_or_path": "owner/gone"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    ones = {FACTOR.format("A"): torch.ones(1, 64), FACTOR.format("B"): torch.ones(64, 1)}
    save_file(ones, directory / "adapter_model.safetensors")
    return directory


def test_an_adapter_becomes_a_whole_model(command: Command, adapter: Path, tmp_path: Path) -> None:
    base, out, typed = tmp_path / "base", tmp_path / "out", ("checkpoints", "merge", str(adapter))
    lost = command(*typed, str(out))
    assert (lost.code, "owner/gone" in lost.err, "--base DIR" in lost.err, out.exists()) == (2, True, True, False)
    made = command(*typed, str(out), "--base", str(base), "--json")
    assert made.json == {"model": str(out), "base": str(base), "merged_tensors": 1}
    merged, before = (load_file(path / "model.safetensors") for path in (out, base))
    changed = [name for name, tensor in merged.items() if not torch.equal(tensor, before[name])]
    assert changed == ["model.layers.1.self_attn.q_proj.weight"]
    assert torch.allclose(merged[changed[0]], before[changed[0]] + 2)
    again = command(*typed, str(out), "--base", str(base))
    assert (again.code, f"{out} exists" in again.err) == (2, True)
    assert "holds no adapter" in command("checkpoints", "merge", str(base), str(tmp_path / "new")).err
    assert "with 1 matrices adapted" in command(*typed, str(tmp_path / "new"), "--base", str(base)).out


@pytest.mark.parametrize(
    "typed",
    [["up", "--plain", "--set", "model.path={}"], ["up", "--split", "2", "-c", "{}"]],
    ids=["trained", "split"],
)
def test_where_it_cannot_be_used_the_remedy_is_to_merge_it(command: Command, adapter: Path, typed: list[str]) -> None:
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "../base"}))
    outcome = command(*(word.format(adapter) for word in typed))
    assert outcome.code == 2
    assert "holds an adapter (LoRA), not a whole model" in outcome.err
    assert f"p2ptrain checkpoints merge {adapter} OUT" in outcome.err


def test_the_newest_adapter_below_a_directory_is_found(adapter: Path) -> None:
    (adapter.parent / "base" / "config.json").rename(adapter.parent / "base" / "other.json")
    assert newest_in(adapter.parent) == adapter
    assert newest_in(adapter) == adapter
