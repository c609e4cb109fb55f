"""What a model says of drawing, and what a person does, against transformers' own rules."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import GenerationConfig

from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.serving import Sampling, SamplingOptions

MODELS: list[dict[str, Any]] = [
    {},
    {"do_sample": False, "temperature": 0.6},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    {"do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 0.7, "eos_token_id": 3},
    {"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.05},
    {"repetition_penalty": 1.05},
]
ASKED: list[dict[str, Any]] = [{}, {"temperature": 0.3}, {"top_k": 7}, {"top_p": 0.4, "temperature": 1.1}]
ASKED += [{"min_p": 0.2, "repetition_penalty": 1.0}]


@pytest.mark.parametrize("said", MODELS)
@pytest.mark.parametrize("asked", ASKED)
def test_as_transformers(said: dict[str, Any], asked: dict[str, Any]) -> None:
    """As ``_prepare_generation_config`` of transformers joins them; who asks for a shape sets ``do_sample``, too."""
    joined = GenerationConfig(**asked, **({"do_sample": True} if asked else {}))
    joined.update(**GenerationConfig(**said).to_dict(), defaults_only=True)
    joined.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    found = SamplingOptions(**asked, seed=5).of(said)
    repeated = 1.0 if joined.repetition_penalty is None else joined.repetition_penalty
    if joined.do_sample:
        shape = (joined.temperature, joined.top_k, joined.top_p)
        assert found == Sampling(*shape, 5, min_p=joined.min_p or 0.0, repetition_penalty=repeated)
    else:
        assert found == Sampling(0.0, seed=5, repetition_penalty=repeated)


def test_zero_is_the_likeliest_whatever_else_is_said() -> None:
    assert SamplingOptions(temperature=0, top_k=5).of({"do_sample": True}) == Sampling(0.0)


@pytest.mark.parametrize("key", ["temperature", "top_k", "top_p"])
@pytest.mark.parametrize("value", ['"hot"', "-1", "true", "1e999", "1" + 400 * "0"])
def test_what_cannot_be_names_the_file(key: str, value: str) -> None:
    numbers = json.loads(f'{{"{key}": {value}}}')
    with pytest.raises(ConfigError, match=r"generation_config\.json is invalid") as caught:
        SamplingOptions().of({"do_sample": True, **numbers})
    assert "--" in caught.value.remedy


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": -1},
        {"seed": 2**64},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 101.0},
        {"frequency_penalty": float("nan")},
        {"logit_bias": ((3, -101.0),)},
        {"logit_bias": ((-1, 1.0),)},
    ],
)
def test_what_cannot_be_names_the_option(asked: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(asked))):
        SamplingOptions(**asked)


def test_more_tokens_than_a_message_can_tell_of_are_refused_at_once() -> None:
    assert SamplingOptions(top_k=2**31).of({}).top_k == 2**31
    with pytest.raises(UserError, match="is not from 0 to 2147483648"):
        SamplingOptions(top_k=10**23)
