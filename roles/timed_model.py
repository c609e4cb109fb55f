"""A model without torch that only takes time, for ``bench generate``. The next token is a hash of all tokens before.

The verifier's model always samples the right token. The drafter's is wrong at a fixed set of positions. Such a model is
a directory, like any other.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np

from p2ptrain.core.errors import P2PTrainError, ProtocolError, UserError
from p2ptrain.core.serving import Pass, Ran, Sampling
from p2ptrain.core.tensor_files import header_of

KIND = "timed"
VOCAB, CONTEXT = 256, 1 << 16
PERIOD = 1000
"""Period of the positions at which a drafter is wrong. Each period has the exact share of them, shuffled."""


def write_timed_model(directory: Path, pass_s: float, *, alpha: float = 1.0) -> Path:
    """Write a model directory without a tokenizer. ``pass_s``: duration of a forward pass.

    ``alpha``: share of positions at which the model samples the right token.
    """
    config = {"model_type": KIND, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | {"pass_s": pass_s, "alpha": alpha}))
    (directory / "model.safetensors").write_bytes(header_of([("none", "F32", (1,), 4)], {}) + bytes(4))
    return directory


def load_timed_model(directory: Path) -> TimedModel | None:
    """The timed model in a directory; None if the directory has another kind of model."""
    try:
        values = json.loads((directory / "config.json").read_text("utf-8"))
        if values.get("model_type") != KIND:
            return None
        return TimedModel(float(values["pass_s"]), float(values["alpha"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None  # the loader of other models reports the problem


def text_after(prompt: bytes, tokens: int) -> bytes:
    """The verifier's text after a prompt: printable ASCII, one character per token."""
    state = 0
    for token in prompt:
        state = _after(state, token)
    made = bytearray()
    for _ in range(tokens):
        made.append(_right(state))
        state = _after(state, made[-1])
    return bytes(made)


def _after(state: int, token: int) -> int:
    return int.from_bytes(blake2b(b"%d %d" % (state, token), digest_size=8).digest(), "big")


def _right(state: int) -> int:
    return 32 + state % 64


class TimedModel:
    """A ``roles.engine.StageEngine`` of all layers."""

    width, vocab_size, encoding, device = 1, VOCAB, "fp32", "no"
    weights_bytes, cache_position_bytes, context = 4, 8, CONTEXT
    is_batched = True

    def __init__(self, pass_s: float, alpha: float) -> None:
        self._pass_s = pass_s
        self._states: dict[str, list[int]] = {}  # session → hash before the first position, then after each position
        right = round(alpha * PERIOD)
        self._is_right = [True] * right + [False] * (PERIOD - right)
        random.Random(1).shuffle(self._is_right)  # noqa: S311 - no secret

    free_positions = 1 << 40  # it has no keys and values

    def reserve(self, positions: int) -> None:
        """There is nothing to reserve."""

    def open(self, session: str, *, positions: int, sampling: Sampling, **unused: object) -> int:
        if positions > CONTEXT:
            raise UserError(f"{positions} positions, and the model knows {CONTEXT}", remedy="ask for fewer tokens")
        self._states[session] = [0]
        return 0

    def run(self, passes: Mapping[str, Pass]) -> dict[str, Ran | P2PTrainError]:
        ends_s = time.perf_counter() + self._pass_s
        ran: dict[str, Ran | P2PTrainError] = {}
        for session, work in passes.items():
            try:
                ran[session] = self._run_alone(session, work)
            except ProtocolError as error:
                ran[session] = error
        # A sleep may end a millisecond late, unlike a real computation, so the last millisecond is spent polling.
        while (left_s := ends_s - time.perf_counter()) > 0:
            time.sleep(max(0.0, left_s - 0.001))
        return ran

    def _run_alone(self, session: str, work: Pass) -> Ran:
        states = self._states[session]
        if not 0 <= work.keep < len(states) or work.payload.nbytes != 4 * work.count:
            text = f"invalid request: {work.keep} of {len(states) - 1} positions, {work.payload.nbytes} bytes of ids"
            raise ProtocolError(text)
        del states[work.keep + 1 :]
        for token in np.frombuffer(work.payload, "<i4").tolist():
            states.append(_after(states[-1], token))
        picked = []
        for position in range(len(states) - work.samples, len(states)):
            wrong = not self._is_right[position % PERIOD]
            picked.append(_right(states[position]) ^ wrong)
        return Ran(memoryview(b""), tuple(picked))

    def close(self, session: str) -> None:
        self._states.pop(session, None)
