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
]
ASKED: list[dict[str, Any]] = [{}, {"temperature": 0.3}, {"top_k": 7}, {"top_p": 0.4, "temperature": 1.1}]


@pytest.mark.parametrize("said", MODELS)
@pytest.mark.parametrize("asked", ASKED)
def test_as_transformers(said: dict[str, Any], asked: dict[str, Any]) -> None:
    """As ``_prepare_generation_config`` of transformers joins them; who asks for a shape sets ``do_sample``, too."""
    joined = GenerationConfig(**asked, **({"do_sample": True} if asked else {}))
    joined.update(**GenerationConfig(**said).to_dict(), defaults_only=True)
    joined.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    found = SamplingOptions(**asked, seed=5).of(said)
    if joined.do_sample:
        assert found == Sampling(joined.temperature, joined.top_k, joined.top_p, 5)
    else:
        assert found == Sampling(0.0, seed=5)


def test_zero_is_the_likeliest_whatever_else_is_said() -> None:
    assert SamplingOptions(temperature=0, top_k=5).of({"do_sample": True}) == Sampling(0.0)


@pytest.mark.parametrize("said", [{"temperature": "hot"}, {"top_p": 0}, {"top_k": -1}, {"top_k": True}])
def test_what_cannot_be_names_who_said_it(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json is invalid") as caught:
        SamplingOptions().of({"do_sample": True, **said})
    assert "--" in caught.value.remedy
    name, value = next(iter(said.items()))
    if not isinstance(value, str | bool):
        with pytest.raises(UserError, match=name):
            SamplingOptions(**said)


@pytest.mark.parametrize("said", ['{"top_k": 1e999}', '{"top_k": 2.5}', '{"temperature": 1%s}', '{"top_k": 1%s}'])
def test_numbers_of_a_file_that_no_machine_has_are_refused(said: str) -> None:
    numbers = json.loads(said.replace("%s", 400 * "0"))
    with pytest.raises(ConfigError, match=r"generation_config\.json is invalid"):
        SamplingOptions().of({"do_sample": True, **numbers})


def test_more_tokens_than_a_message_can_tell_of_are_refused_at_once() -> None:
    assert SamplingOptions(top_k=2**31).of({}).top_k == 2**31
    with pytest.raises(UserError, match="top_k is more than"):
        SamplingOptions(top_k=10**23)
