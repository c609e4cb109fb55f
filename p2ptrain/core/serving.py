"""What passes between whatever computes a stage of a split model and whatever moves its bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from p2ptrain.core.errors import ConfigError, UserError

COLDEST = 1e-4
"""Below this temperature the scaled logits overflow and sampling has no distribution: it is the likeliest token."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """Which part of which model, and how it is computed.

    Attributes:
        config: the model's ``config.json``, as text.
        start, stop: layers [start, stop) of ``layers``.
        dtype: of weights, cache and arithmetic: ``fp32``, ``bf16`` or ``fp16``; empty: what the model's files hold.
        device: as of ``compute.device.pick_device``.
    """

    config: str
    start: int
    stop: int
    layers: int
    dtype: str = ""
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the last stage picks a token, as transformers' ``generate`` does.

    Attributes:
        temperature: 0 for the likeliest token each time.
        top_k: sample from the k likeliest only; 0 for all.
        top_p: sample from the fewest that have this probability together; 1 for all.
        vocab_size: that draws are made for, where it is not that of the model which picks: a drafter draws as the
            verifier does. Tokens beyond it are not picked. 0: the model's own.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    vocab_size: int = 0


MOST_TOP_K = 2**31
"""As a number, it travels to the last stage."""
USUAL = Sampling(temperature=1.0, top_k=50, top_p=1.0)
"""How transformers draws where neither its caller nor the model says."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What a person asks for, as of ``Sampling``; None: what the model says. Raises ``UserError``: it cannot be."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        top_p = 1.0 if self.top_p is None else self.top_p
        check_sampling(Sampling(self.temperature or 0.0, self.top_k or 0, top_p, self.seed))

    def of(self, said: Mapping[str, Any]) -> Sampling:
        """How tokens are picked of a model whose ``generation_config.json`` is ``said``: as transformers' ``generate``
        does it, with what was asked for in place of what the model says. Without both it is the likeliest token. Who
        asks for a temperature above 0, a ``top_k`` or a ``top_p`` wants tokens drawn.

        Raises:
            ConfigError: it says what cannot be.
        """
        given = (self.temperature, self.top_k, self.top_p)
        draws = said.get("do_sample") is True if given == (None, None, None) else self.temperature != 0
        if not draws:
            return Sampling(0.0, seed=self.seed)
        usual = {"temperature": USUAL.temperature, "top_k": USUAL.top_k, "top_p": USUAL.top_p}
        temperature, top_k, top_p = (
            value if value is not None else _number(said, name, usual[name])
            for value, name in zip(given, usual, strict=True)
        )
        return Sampling(float(temperature), int(top_k), float(top_p), self.seed)


def _number(said: Mapping[str, Any], name: str, usual: float) -> float:
    value = usual if said.get(name) is None else said[name]
    try:
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise UserError(f"{name} = {str(value)[:40]} is no {'whole ' * whole}number")
        if abs(value) > MOST_TOP_K:
            raise UserError(f"{name} = {str(value)[:40]} is too large")
        changed: dict[str, Any] = {name: value}
        check_sampling(replace(USUAL, **changed))
    except UserError as error:
        text = f"the model's generation_config.json says what cannot be: {error.message}"
        raise ConfigError(text, remedy=f"give --{name.replace('_', '-')}, or mend the file") from error
    return value


def check_sampling(sampling: Sampling) -> None:
    """Raises ``UserError`` for what cannot be."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise UserError(f"temperature = {sampling.temperature} cannot be", remedy="use 0 (the likeliest token) or more")
    if sampling.top_k < 0:
        raise UserError(f"top_k = {sampling.top_k} is negative", remedy="use 0 for all tokens")
    if sampling.top_k > MOST_TOP_K:
        raise UserError(f"top_k is more than {MOST_TOP_K}, and no model has as many", remedy="use 0 for all tokens")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"top_p = {sampling.top_p} is not above 0 and at most 1", remedy="use 1 for all tokens")
    if not -(2**63) <= sampling.seed < 2**64:
        raise UserError(f"seed = {sampling.seed} does not have 64 bits", remedy="use a smaller number")


@dataclass(frozen=True, slots=True)
class Pass:
    """What a part is to compute for a session: cut the history to its first ``keep`` positions, take ``count`` more.

    Attributes:
        payload: on the first stage ``count`` token ids, int32 little-endian; else hidden states in ``encoding``.
        samples: for so many of the last positions a token is picked; only on the last stage.
        sample_index: number of the first pick's draw: 0 for the first new token of the session.
    """

    keep: int
    payload: memoryview
    count: int
    encoding: str
    out_encoding: str
    samples: int = 0
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of one ``StageEngine.run``.

    Attributes:
        payload: hidden states of the new positions in ``out_encoding``; empty on the last stage. It stays unchanged.
        tokens: picked for the last ``samples`` positions, in order; empty but on the last stage.
    """

    payload: memoryview
    tokens: tuple[int, ...]
