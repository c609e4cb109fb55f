"""First weights of some tensors against those of the whole model, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from p2ptrain.compute.initial import InitialWeights
from p2ptrain.compute.model import build_model, model_config
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
