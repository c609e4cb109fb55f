"""What ``join --role verifier`` puts together: how a model is called, and what memory is left for its texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from p2ptrain.cli.join_options import JoinOptions
from p2ptrain.cli.serving import cache_bytes, check
from p2ptrain.core.adapters import model_name
from p2ptrain.core.errors import ResourceError, UserError


def test_how_a_model_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_job = tmp_path / "jobs" / "abc" / "checkpoints" / "step-00000400"
    first = of_job.with_name("step-00000000")
    for directory in (of_job, first, tmp_path / "SmolLM2-135M"):
        directory.mkdir(parents=True)
    assert model_name(of_job) == "abc@400"
    assert model_name(first) == "abc@0"
    assert model_name(tmp_path / "SmolLM2-135M") == "SmolLM2-135M"
    assert model_name(tmp_path / "models--acme--toy--2" / "snapshots" / ("0123456789" * 4)) == "acme/toy--2"
    monkeypatch.chdir(tmp_path / "SmolLM2-135M")
    assert model_name(Path(".")) == "SmolLM2-135M"


async def test_more_stages_than_layers_are_refused_before_it_joins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 4}')
    await check(JoinOptions(role="verifier", model=str(tmp_path), split=4))
    with pytest.raises(UserError, match="a model of 4 layers cannot have 9 stages"):
        await check(JoinOptions(role="verifier", model=str(tmp_path), split=9))


def test_what_memory_is_left_for_caches(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1000, np.uint8), "b": np.zeros(500, np.uint8)}, tmp_path / "model.safetensors")
    save_file({"moments": np.zeros(9000, np.uint8)}, tmp_path / "optimizer.safetensors")
    assert cache_bytes(0, tmp_path) == 0
    assert cache_bytes(4000, tmp_path) == 2500
    with pytest.raises(ResourceError, match="but --memory is"):
        cache_bytes(1500, tmp_path)


def test_what_memory_is_left_beside_weights_of_another_type(tmp_path: Path) -> None:
    save_file({"a": np.zeros((10, 100), np.float16), "b": np.zeros(500, np.float16)}, tmp_path / "model.safetensors")
    given = [cache_bytes(9000, tmp_path, dtype) for dtype in ("", "fp16", "bf16", "fp32")]
    assert given == [6000, 6000, 6000, 3000]
    with pytest.raises(ResourceError, match=r"5\.9 KiB in fp32, but --memory is"):
        cache_bytes(6000, tmp_path, "fp32")
    assert cache_bytes(9000, tmp_path, "fp32", 7000) == 2000, "the loaded weights count"


def test_buffers_in_old_files_take_no_memory(tmp_path: Path) -> None:
    tensors = {name: np.zeros(100, np.float32) for name in ("h.0.attn.bias", "h.0.attn.c_attn.bias")}
    save_file(tensors, tmp_path / "model.safetensors")
    assert cache_bytes(1000, tmp_path) == 600
