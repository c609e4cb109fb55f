"""First weights of some tensors against those of the whole model, bit by bit."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from p2ptrain.compute.initial import InitialWeights
from p2ptrain.compute.model import build_model, model_config
from p2ptrain.compute.split import Part, part_bytes
from p2ptrain.compute.stage import even_bounds, initial_digest
from p2ptrain.compute.testing import tiny
from p2ptrain.core.errors import ConfigError, ResourceError

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gpt2"]


def both(seed: int = 7, **changes: Any) -> tuple[dict[str, torch.Tensor], InitialWeights]:
    spec = tiny(layers=3, kv_heads=4, **changes)
    config = model_config(spec, 256)
    return build_model(spec, 256, seed, config=config).state_dict(), InitialWeights(config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_choice_of_tensors_has_the_bits_of_the_whole(architecture: str, tied: bool) -> None:
    whole, initial = both(architecture=architecture, tie_embeddings=tied)
    assert initial.is_recorded
    assert list(initial.names) == list(whole)
    names = list(whole)
    for chosen in (names, names[: len(names) // 2], names[len(names) // 2 :], names[-1:], names[:1], names[5:6], []):
        drawn = initial.draw(7, chosen)
        assert list(drawn) == chosen
        for name, tensor in drawn.items():
            assert torch.equal(tensor, whole[name]), name
            assert not tensor.is_meta
    other = initial.draw(8, names)
    assert not torch.equal(other[names[0]], whole[names[0]])


def test_the_global_random_state_is_left_as_it_was() -> None:
    before = torch.random.get_rng_state()
    _, initial = both()
    initial.draw(1, initial.names)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_tied_tensors_share_memory() -> None:
    _, initial = both(tie_embeddings=True)
    drawn = initial.draw(7, ["model.embed_tokens.weight", "lm_head.weight"])
    assert drawn["lm_head.weight"].data_ptr() == drawn["model.embed_tokens.weight"].data_ptr()


def test_drawing_changes_nothing_that_was_drawn_before() -> None:
    whole, initial = both(tie_embeddings=False)
    one, _ = initial.draw(7, initial.names), initial.draw(8, initial.names)
    for name in whole:
        assert torch.equal(one[name], whole[name])
        one[name].zero_()
    again = initial.draw(7, initial.names)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_what_is_not_wanted_takes_no_memory() -> None:
    """Beside what is wanted there is room for one tensor, and the small ones that are made from values."""
    config = model_config(tiny(layers=64, hidden_size=64, intermediate_size=128, tie_embeddings=False), 256)
    allocated: list[int] = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default, torch.ops.aten.ones.default):
                allocated.append(result.untyped_storage().nbytes())
            return result

    initial = InitialWeights(config)
    with Counting():
        initial.draw(3, ["model.layers.1.mlp.up_proj.weight"])
    assert sum(allocated) <= 64 * 128 * 4 + 256 * 64 * 4


def test_a_model_that_cannot_be_recorded_is_built_whole_where_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, initial = both(architecture="qwen2_moe", extra={"num_experts": 2, "moe_intermediate_size": 16})
    assert not initial.is_recorded
    name = list(whole)[3]
    assert torch.equal(initial.draw(7, [name])[name], whole[name])
    monkeypatch.setattr("p2ptrain.compute.device._host_available", lambda: 1000)
    with pytest.raises(ResourceError, match="must be whole for that"):
        initial.draw(7, [name])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda weight: weight.copy_(torch.randn(weight.shape)),  # drawn beside a parameter
        lambda weight: weight.copy_(torch.empty_like(weight).normal_()),
        lambda weight: weight.mul_(weight),
        lambda weight: torch.nn.init.orthogonal_(weight),
        lambda weight: torch.nn.init.trunc_normal_(weight),  # draws until all are in range
    ],
)
def test_what_is_not_understood_is_not_recorded(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    from transformers import LlamaPreTrainedModel

    plain = LlamaPreTrainedModel._init_weights

    def other(self: Any, module: Any) -> None:
        plain(self, module)
        if isinstance(module, torch.nn.Linear):
            with torch.no_grad():
                spoil(module.weight)

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", other)
    whole, initial = both(tie_embeddings=False)
    assert not initial.is_recorded
    drawn = initial.draw(7, initial.names)
    assert all(torch.equal(drawn[name], whole[name]) for name in whole)


def test_views_and_constants_are_played_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaPreTrainedModel

    plain = LlamaPreTrainedModel._init_weights

    def other(self: Any, module: Any) -> None:
        plain(self, module)
        if isinstance(module, torch.nn.Linear):
            with torch.no_grad():
                module.weight[:, 1].zero_()
                module.weight.t()[2:5].normal_()
                module.weight.mul_(0.5).clamp_(-0.1, 0.1)
                module.weight[0].copy_(torch.arange(module.weight.shape[1]))
                module.weight[1].uniform_(-0.5, 0.5).erfinv_()

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", other)
    whole, initial = both(tie_embeddings=False)
    assert initial.is_recorded
    for chosen in (initial.names, list(initial.names)[7:8]):
        drawn = initial.draw(7, chosen)
        assert all(torch.equal(drawn[name], whole[name]) for name in chosen)


def test_impossible_sizes_are_refused() -> None:
    config = model_config(tiny(), 256)
    config.num_hidden_layers = -1
    config.hidden_size = -4
    with pytest.raises(ConfigError):
        InitialWeights(config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_digests_are_those_of_the_whole(architecture: str, tied: bool) -> None:
    whole, initial = both(architecture=architecture, tie_embeddings=tied)
    expected = {
        name: hashlib.blake2b(tensor.contiguous().numpy().tobytes(), digest_size=16).digest()
        for name, tensor in whole.items()
    }
    before = torch.random.get_rng_state()
    assert initial.digests(7) == expected
    assert torch.equal(torch.random.get_rng_state(), before)
    other = initial.digests(8)
    assert set(other) == set(expected)
    assert other != expected


def test_digests_of_what_has_no_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, initial = both()
    monkeypatch.setattr(initial, "is_recorded", False)
    assert initial.digests(7) == both()[1].digests(7)
    assert set(initial.digests(7)) == set(whole)


def test_digests_take_one_tensor_of_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, initial = both(tie_embeddings=False)
    asked: list[int] = []
    alive: list[weakref.ref[torch.Tensor]] = []
    empty = torch.empty

    def counting(numel: int, **options: Any) -> torch.Tensor:
        made = empty(numel, **options)
        alive.append(weakref.ref(made))
        asked.append(sum(ref() is not None for ref in alive))
        return made

    monkeypatch.setattr("p2ptrain.compute.initial.torch.empty", counting)
    initial.digests(7)
    assert len(asked) > 10
    assert max(asked) <= 3, "the scratch array, one tensor, and at most another that begins"


def test_threads_of_one_process_draw_one_after_the_other() -> None:
    made = [both()[1] for _ in range(8)]
    alone = made[0].digests(7)
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(initial.digests, 7) for initial in made]
        assert all(other.result() == alone for other in others)


def test_the_digest_of_a_model_is_of_its_weights_and_of_its_cuts(tmp_path: Path) -> None:
    spec = tiny(layers=3, kv_heads=4)
    config = model_config(spec, 256)
    digests = {
        initial_digest(config, None, 7, (0, 1, 3)),
        initial_digest(config, None, 7, (0, 2, 3)),
        initial_digest(config, None, 8, (0, 1, 3)),
    }
    model = build_model(spec, 256, 7, config=config)
    model.save_pretrained(tmp_path)
    digests.add(saved := initial_digest(config, tmp_path, 7, (0, 1, 3)))
    assert initial_digest(config, tmp_path, 9, (0, 1, 3)) == saved, "what is read is not drawn"
    with torch.no_grad():
        next(model.parameters())[0] += 1
    model.save_pretrained(tmp_path)
    digests.add(initial_digest(config, tmp_path, 7, (0, 1, 3)))
    assert len(digests) == 5


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", [3, 7])
def test_even_parts_have_the_least_largest_one(layers: int, tied: bool) -> None:
    config = model_config(tiny(layers=layers, kv_heads=4, tie_embeddings=tied), 256)
    for stages in range(1, layers + 1):
        bounds = even_bounds(config, stages)
        assert len(bounds) == stages + 1
        every = ((0, *cuts, layers) for cuts in itertools.combinations(range(1, layers), stages - 1))
        assert largest(config, bounds) == min(largest(config, each) for each in every)
    with pytest.raises(ConfigError, match="do not make"):
        even_bounds(config, layers + 1)


def largest(config: PretrainedConfig, bounds: Sequence[int]) -> int:
    """Bytes of the largest part."""
    parts = [Part(start, stop, bounds[-1]) for start, stop in itertools.pairwise(bounds)]
    return max(part_bytes(config, part, torch.float32) for part in parts)
