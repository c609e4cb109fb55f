"""Types shared by the code that computes a served model, the code that moves its bytes, and commands."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any

from p2ptrain.core.activations import decode_ids, encode_ids
from p2ptrain.core.errors import ConfigError, ResourceError, UserError

COLDEST = 1e-4
"""Up to this temperature the likeliest token is taken: scaled logits would overflow, and leave no distribution."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part of a model to serve, and how to compute it.

    Attributes:
        config: text of the model's ``config.json``.
        start, stop: layers [start, stop) of ``layers``.
        dtype: dtype of weights, cache and arithmetic: ``fp32``, ``bf16`` or ``fp16``; empty: the configuration's.
        device: as in ``compute.device.pick_device``.
        weights: how the linear layers' weights are held: one of ``QUANTIZED``; empty: in ``dtype``.
    """

    config: str
    start: int
    stop: int
    layers: int
    dtype: str = ""
    device: str = "auto"
    weights: str = ""


QUANTIZED = (INT8, INT4) = ("int8", "int4")


def check_positions(positions: int, context: int | None) -> None:
    """Check the length of a session against the model's context; None: it has no limit. Raises ``UserError``."""
    if positions < 1:
        raise UserError(f"a session cannot have {positions} positions", remedy="use at least one")
    if context is not None and positions > context:
        raise UserError(
            f"{positions} positions are more than the model's context of {context}",
            remedy=f"ask for at most {context}, prompt and new tokens together",
        )


MOST_SETTING = 2**31
"""A bound on ``top_k``, which is sent to the last stage as an integer, and on others that have none."""
MOST_BIAS, MOST_BIASES = 100, 1024
"""Largest penalty or bias of a logit, and most tokens with a bias."""
_BIAS = f"from {-MOST_BIAS} to {MOST_BIAS}", lambda value: -MOST_BIAS <= value <= MOST_BIAS, "use 0 for none"
_LIMITS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "temperature": (f"from 0 to {MOST_SETTING}", lambda value: 0 <= value <= MOST_SETTING, "use 0 (likeliest)"),
    "top_k": (f"from 0 to {MOST_SETTING}", lambda value: 0 <= value <= MOST_SETTING, "use 0 for all tokens"),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1, "use 1 for all tokens"),
    "seed": ("a number of 64 bits", lambda value: -(2**63) <= value < 2**64, "use a smaller number"),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1, "use 0 for all tokens"),
    "repetition_penalty": ("above 0", lambda value: 0 < value <= MOST_SETTING, "use 1 for none"),
    "presence_penalty": _BIAS,
    "frequency_penalty": _BIAS,
}
"""Field of ``Sampling`` → its values, a test of them, and what to do."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """A person's options, as in ``Sampling``; None: the model's default. Raises ``UserError`` for an invalid value."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, (allowed, is_allowed, remedy) in _LIMITS.items():
            if (value := getattr(self, name)) is not None and not is_allowed(value):
                raise UserError(f"{name} = {str(value)[:40]} is not {allowed}", remedy=remedy)
        valid = [token >= 0 and _BIAS[1](bias) for token, bias in self.logit_bias]
        if len(valid) > MOST_BIASES or not all(valid):
            text = f"logit_bias has more than {MOST_BIASES} tokens, a negative one, or a number that is not {_BIAS[0]}"
            raise UserError(text, remedy="use fewer tokens and smaller numbers")

    def of(self, table: Mapping[str, Any]) -> Sampling:
        """Combine these options with a model's ``generation_config.json``, ``table``, as in transformers' ``generate``.
        Options override the model's settings. Temperature 0 takes the likeliest token. Any other option enables
        sampling. Without options the model's ``do_sample`` decides.

        Raises:
            ConfigError: a value in ``table`` is invalid.
        """
        options = {item.name: getattr(self, item.name) for item in fields(SamplingOptions)}
        drawn = ("temperature", "top_k", "top_p", "min_p")
        asked = any(options[name] is not None for name in drawn)
        draws = self.temperature != 0 if asked else table.get("do_sample") is True
        if not draws:
            options |= {name: getattr(_LIKELIEST, name) for name in drawn}
        left_out = [name for name, value in options.items() if value is None]
        return Sampling(**options | {name: _number(table, name, getattr(USUAL, name)) for name in left_out})


@dataclass(frozen=True, slots=True)
class Sampling(SamplingOptions):
    """How the last stage samples tokens, as in transformers' ``generate``: all options are chosen.

    Attributes:
        temperature: 0 always takes the likeliest token.
        top_k: sample only from the k likeliest tokens; 0 for all.
        top_p: sample only from the fewest tokens with this total probability; 1 for all.
        vocab_size: vocabulary size of the noise. A drafter uses its verifier's size. Tokens beyond it are never
            sampled. 0: the model's own size.
        min_p: sample only from tokens that are at least so likely, as a share of the likeliest one's probability.
        repetition_penalty: logits of tokens in the prompt or the text are divided by it if positive, else multiplied.
        presence_penalty, frequency_penalty: subtracted from the logits of the text's tokens, once and each time.
        logit_bias: (token, number that is added to its logit).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    vocab_size: int = 0

    @property
    def has_penalties(self) -> bool:
        """Whether what is sampled depends on the tokens before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


USUAL = Sampling(temperature=1.0, top_k=50, top_p=1.0)
"""transformers' defaults."""
_LIKELIEST = Sampling(temperature=0.0)


def _number(table: Mapping[str, Any], name: str, usual: float) -> float:
    value = usual if table.get(name) is None else table[name]
    try:
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise UserError(f"{name} = {str(value)[:40]} is not a {'whole ' * whole}number")
        changed: dict[str, Any] = {name: value}
        replace(USUAL, **changed)
    except UserError as error:
        text = f"the model's generation_config.json is invalid: {error.message}"
        option = f"--{name.replace('_', '-')}" if name in ("temperature", "top_k", "top_p") else name
        raise ConfigError(text, remedy=f"set {option}, or correct the file") from error
    return value


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural log-probability of a token among all, before temperature, penalties and masks.

    ``top``: the likeliest tokens with theirs, the likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


MOST_TOP_LOGPROBS = 20
TOP_BYTES, MOST_TOPS = 8, 256 * MOST_TOP_LOGPROBS
"""Bytes of each of the likeliest tokens in ``Ran.tops``, and most of them in a pass: the results fit a message."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward request of a session: cut the history to its first ``keep`` positions, then append ``count`` positions.

    Attributes:
        payload: on the first stage ``count`` token ids, int32 little-endian; else hidden states in ``encoding``.
        samples: number of final positions to sample a token for; only on the last stage.
        sample_index: index of the first sample; the first new token of the session has index 0.
        targets: token ids to score, one after each of the final positions; only on the last stage.
        tops: so many of the likeliest tokens are wanted with each target; without targets the samples are scored. None:
            neither.
        history: with samples: token ids, int32 little-endian, of the positions up to the last new one that the last
            stage has not yet. Unused without ``Sampling.has_penalties``.
        masks: of each sample, as of ``mask_bytes``: which tokens may be sampled. Empty: all.
        block_hashes: of the last blocks that are full after this pass, as of ``hash_blocks``: later sessions that begin
            alike may use them.
    """

    keep: int
    payload: memoryview
    count: int
    encoding: str
    out_encoding: str
    samples: int = 0
    sample_index: int = 0
    targets: tuple[int, ...] = ()
    block_hashes: tuple[bytes, ...] = ()
    tops: int | None = None
    history: bytes = b""
    masks: bytes = b""

    @property
    def scored(self) -> int:
        return scored_rows(len(self.targets), self.samples, self.tops)


def mask_bytes(vocab_size: int) -> int:
    """Bytes of a mask: a bit for each token, the lowest one first, in whole 32-bit words."""
    return -(-vocab_size // 32) * 4


def scored_rows(targets: int, samples: int, tops: int | None) -> int:
    """How many tokens a pass scores: its targets, or its samples, if that is wanted."""
    return targets or (samples if tops is not None else 0)


BLOCK_POSITIONS = 64
"""Positions of a block: the unit of memory for keys and values, and of what sessions that begin alike share."""
HASH_BYTES = 16


def blocks_of(positions: int) -> int:
    """Number of blocks that so many positions are in."""
    return -(-positions // BLOCK_POSITIONS)


def round_to_blocks(positions: int) -> int:
    """The positions of all blocks that so many positions need."""
    return blocks_of(positions) * BLOCK_POSITIONS


def hash_blocks(ids: Sequence[int], known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
    """The hash of each full block of a text, which depends on all ids up to the block's end. ``known``: those of the
    first blocks, which are not computed again."""
    hashes = list(known)
    for start in range(len(hashes) * BLOCK_POSITIONS, len(ids) - BLOCK_POSITIONS + 1, BLOCK_POSITIONS):
        before = hashes[-1] if hashes else b""
        block = encode_ids(ids[start : start + BLOCK_POSITIONS])
        hashes.append(blake2b(before + block, digest_size=HASH_BYTES).digest())
    return tuple(hashes)


class HashedIds:
    """A session's token ids as far as they were sent to be computed, and the hashes of their full blocks."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids, self._hashes = list(ids), list(hash_blocks(ids))
        self._passed_on = 0

    def append(self, keep: int, ids: Sequence[int]) -> tuple[bytes, ...]:
        """Cut the ids to the first ``keep``, and append others. Returns the hashes of the blocks that are full then,
        from the one of the first new position on, as of ``Pass.block_hashes``."""
        full = keep // BLOCK_POSITIONS
        self._ids[keep:] = ids
        self._passed_on = min(self._passed_on, keep)
        del self._hashes[full:]
        if len(self._ids) // BLOCK_POSITIONS > full:
            self._hashes = list(hash_blocks(self._ids, self._hashes))
        return tuple(self._hashes[full:])

    def next_history(self) -> tuple[int, ...]:
        """The ids that it has not returned before, or that replaced those: ``Pass.history`` of the next samples."""
        start, self._passed_on = self._passed_on, len(self._ids)
        return tuple(self._ids[start:])


class Preempted(ResourceError):
    """The session's positions were dropped, because older sessions need the memory: it has none now. Its owner has them
    computed again when there is room."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of ``StageEngine.run``.

    Attributes:
        payload: hidden states of the new positions in ``out_encoding``; empty on the last stage. It never changes.
        tokens: sampled tokens of the last ``samples`` positions, in order; empty except on the last stage.
        scores: natural log-probability of each scored token among all tokens, at temperature 1; fp32, little-endian.
        tops: of each scored token the ids of the likeliest ones instead of it, int32; then their log-probabilities.
    """

    payload: memoryview
    tokens: tuple[int, ...]
    scores: bytes = b""
    tops: bytes = b""


def token_logprobs(tokens: Sequence[int], scores: bytes, tops: bytes) -> list[TokenLogprob]:
    """``Ran.scores`` and ``Ran.tops`` of the scored ``tokens``."""
    each = len(tops) // TOP_BYTES // max(1, len(tokens))
    size = each * len(tokens)
    pairs = list(zip(decode_ids(tops[: 4 * size]), struct.unpack(f"<{size}f", tops[4 * size :]), strict=True))
    return [
        TokenLogprob(token, score, tuple(pairs[row * each : (row + 1) * each]))
        for row, (token, score) in enumerate(zip(tokens, struct.unpack(f"<{len(tokens)}f", scores), strict=True))
    ]


class StopStrings:
    """The stop strings of one text that arrives in pieces. The text ends before the first one that is complete.

    The division into pieces does not matter. Of several strings that end at the same character the longest wins. A tail
    that may become a stop string is held back, so no part of one is shown.

    Attributes:
        found: the stop string that ended the text, or None.

    Raises:
        UserError: a string is empty.
    """

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self.found: str | None = None
        self._strings = tuple(dict.fromkeys(strings))
        self._held = ""
        if "" in self._strings:
            raise UserError("a stop string is empty", remedy="give the text at which to stop, or leave out --stop")

    def feed(self, piece: str) -> str:
        """Take the next piece. Returns what is now certain to be part of the text."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(at + len(string), at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        certain = len(text) - self._may_begin(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """End the text. Returns what was held back."""
        rest, self._held = self._held, ""
        return rest

    def _may_begin(self, text: str) -> int:
        longest = max(map(len, self._strings), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(string.startswith(tail) for string in self._strings):
                return size
        return 0
