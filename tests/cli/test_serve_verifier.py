"""What ``join --role verifier`` puts together: how a model is called, and what memory is left for its texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.cli.serve_verifier import _cache_bytes, model_name
from p2ptrain.core.errors import ResourceError


def test_how_a_model_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_job = tmp_path / "jobs" / "abc" / "checkpoints" / "step-00000400"
    first = of_job.with_name("step-00000000")
    for directory in (of_job, first, tmp_path / "SmolLM2-135M"):
        directory.mkdir(parents=True)
    assert model_name(of_job) == "abc@400"
    assert model_name(first) == "abc@0"
    assert model_name(tmp_path / "SmolLM2-135M") == "SmolLM2-135M"
    monkeypatch.chdir(tmp_path / "SmolLM2-135M")
    assert model_name(Path(".")) == "SmolLM2-135M"


def test_what_memory_is_left_for_caches(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(bytes(1000))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(500))
    assert _cache_bytes(0, tmp_path) == 0
    assert _cache_bytes(4000, tmp_path) == 2500
    with pytest.raises(ResourceError, match="--memory says"):
        _cache_bytes(1500, tmp_path)
