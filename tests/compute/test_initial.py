"""First weights of parts against those of the whole model, bit by bit."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaPreTrainedModel

from p2ptrain.compute.layout import LayerRange, ModelLayout
from p2ptrain.compute.model import build_model, model_config
from p2ptrain.compute.split_check import check_packs
from p2ptrain.compute.stage import build_training_part, initial_digest, initial_tensors
from p2ptrain.core.errors import ConfigError, ResourceError
from tests.compute.tiny_trainer import tiny

SPEC = tiny(layers=3, kv_heads=4)
CONFIG = model_config(SPEC, 256)


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True), ("mistral", False), ("gpt2", True)]
)
def test_parts_have_the_bits_of_the_whole(architecture: str, tied: bool) -> None:
    spec = tiny(layers=3, kv_heads=4, architecture=architecture, tie_embeddings=tied)
    config = model_config(spec, 256)
    before = torch.random.get_rng_state()
    whole = build_model(spec, 256, 7, config=config).state_dict()
    for start, stop in itertools.pairwise([0, 1, 3]):
        part = build_training_part(config, LayerRange(start, stop, 3), None, 7)
        assert part.names
        for name, parameter in part.module.named_parameters():
            assert torch.equal(parameter, whole[part.names[name]]), (name, start)
    assert torch.equal(torch.random.get_rng_state(), before), "the global random state is left as it was"
    other = build_model(spec, 256, 8, config=config).state_dict()
    assert sum(torch.equal(other[name], tensor) for name, tensor in whole.items() if tensor.ndim > 1) == 0


@torch.no_grad()
def test_weights_follow_the_distribution_of_their_own_modules() -> None:
    """As transformers draws them with one generator: the same means and spreads, and no two matrices alike. (gpt2's
    residual projections have a spread of their own.)"""
    from transformers import AutoModelForCausalLM

    wide: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "tie_embeddings": False}
    spec = tiny(layers=2, kv_heads=4, architecture="gpt2", **wide)
    config = model_config(spec, 256)
    plain: Any = AutoModelForCausalLM.from_config(config)
    seen: list[torch.Tensor] = []
    for (name, ours), theirs in zip(
        build_model(spec, 256, 7, config=config).named_parameters(), plain.parameters(), strict=True
    ):
        if ours.ndim > 1:
            spread = float(theirs.std())
            assert abs(float(ours.mean())) < 0.05 * spread, name
            assert float(ours.std()) == pytest.approx(spread, rel=0.05), name
            assert not any(torch.equal(ours.flatten()[:16], other.flatten()[:16]) for other in seen)
            seen.append(ours)
        else:
            assert torch.equal(ours, theirs), name


def test_one_unit_is_in_memory_at_a_time(limit_host: Callable[[int], None]) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    for _, tensor in initial_tensors(ModelLayout(CONFIG, torch.float32), 7):
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
    assert len(alive) > 20
    assert most <= 10, "a layer of llama has nine"
    limit_host(1000)
    with pytest.raises(ResourceError, match="initializing"):
        next(initial_tensors(ModelLayout(CONFIG, torch.float32), 7))


def test_a_weight_that_no_module_initializes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaPreTrainedModel._init_weights
    monkeypatch.setattr(
        LlamaPreTrainedModel,
        "_init_weights",
        lambda self, module: None if isinstance(module, torch.nn.Linear) else plain(self, module),
    )
    with pytest.raises(ConfigError, match="initialization does not set"):
        build_training_part(CONFIG, LayerRange(0, 1, 3), None, 7)


def test_threads_of_one_process_draw_the_same() -> None:
    alone, interval_s = initial_digest(CONFIG, None, 7, (0, 3)), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(initial_digest, CONFIG, None, 7, (0, 3)) for _ in range(30)]
            models = [pool.submit(build_model, SPEC, 256, 7) for _ in range(30)]  # without transformers' own drawing
            checks = [pool.submit(check_packs, CONFIG, split=True) for _ in range(6)]
            assert all(other.result() == alone for other in others)
            assert not any(check.result() for check in checks)
            assert all(model.result() for model in models)
    finally:
        sys.setswitchinterval(interval_s)


def test_the_digest_of_a_model_is_of_its_weights_and_of_its_cuts(tmp_path: Path) -> None:
    drawn = [(7, (0, 1, 3)), (7, (0, 2, 3)), (8, (0, 1, 3))]
    digests = {initial_digest(CONFIG, None, seed, bounds) for seed, bounds in drawn}
    model = build_model(SPEC, 256, 7, config=CONFIG)
    model.save_pretrained(tmp_path)
    digests.add(saved := initial_digest(CONFIG, tmp_path, 7, (0, 1, 3)))
    assert initial_digest(CONFIG, tmp_path, 9, (0, 1, 3)) == saved, "what is read is not drawn"
    with torch.no_grad():
        next(model.parameters())[0] += 1
    model.save_pretrained(tmp_path)
    digests.add(initial_digest(CONFIG, tmp_path, 7, (0, 1, 3)))
    assert len(digests) == 5
