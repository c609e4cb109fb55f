"""A language that costs nothing, for ``bench speculate``: what comes next is a hash of all that came before.

The verifier's stand-in knows it; the drafter's is wrong at some places, always the same ones. Both only take time. So
the text is known beforehand, whoever writes it, and how often the drafter is right, too. Without torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count

import numpy as np

from p2ptrain.core.activations import IDS
from p2ptrain.core.errors import ProtocolError, UserError
from p2ptrain.core.serving import PartSpec, Ran, Sampling

VOCAB = 256
CONTEXT = 1 << 16
CONFIG = f'{{"model_type": "stand-in", "vocab_size": {VOCAB}, "max_position_embeddings": {CONTEXT}}}'
_FINE = 1 << 32

Take = Callable[[float, float], None]
_AWAKE_S = 0.001
"""Before the end of a time that is to be met."""


def _after(state: int, token: int) -> int:
    """The state behind one more token; a state is 64 bits."""
    return int.from_bytes(blake2b(b"%d %d" % (state, token), digest_size=8).digest(), "big")


def _right(state: int) -> int:
    return state % VOCAB


def _drafted(state: int, alpha: float) -> int:
    """What the drafter says behind these tokens."""
    right = _right(state)
    return right if (state >> 32) < alpha * _FINE else (right + 1) % VOCAB


def text_after(prompt: Sequence[int], tokens: int) -> list[int]:
    """What the verifier writes."""
    return [right for right, _ in _told(prompt, tokens, 1.0)]


def _told(prompt: Sequence[int], tokens: int, alpha: float) -> list[tuple[int, int]]:
    """The right token and the draft, of each new place."""
    state = 0
    for token in prompt:
        state = _after(state, token)
    told = []
    for _ in range(tokens):
        told.append((_right(state), _drafted(state, alpha)))
        state = _after(state, told[-1][0])
    return told


def prompts_for(alpha: float, tokens: int, wanted: int) -> list[str]:
    """Prompts after which as many drafts are right as ``alpha`` says, to the nearest: chance has no part in how good
    the drafter is. The first new token is not counted, for it is the prompt's."""
    found: list[str] = []
    for number in count():
        prompt = f"text {number}: "
        rights = sum(right == draft for right, draft in _told(prompt.encode(), tokens, alpha)[1:])
        if abs(rights - alpha * (tokens - 1)) <= 0.5:
            found.append(prompt)
        if len(found) == wanted:
            break
    return found


def take(seconds: float, began: float) -> None:
    """Let so much time pass since ``began``, by the performance counter. A sleep alone ends late, by up to a
    millisecond where the processor went to sleep as well, and no model that computes has that."""
    while (left_s := began + seconds - time.perf_counter()) > 0:
        time.sleep(max(0.0, left_s - _AWAKE_S))


class TimedModel:
    """A ``roles.stage_engine.StageEngine`` of all layers, or of some: a hidden state is then the token's id.

    Args:
        pass_s: that a pass takes. row_s: longer for each pick beyond the first.
        alpha: how often it picks what the verifier's picks.
        take: as ``take``: how that time passes.
    """

    width, vocab_size, encoding, device = 1, VOCAB, "fp32", "stand-in"
    weights_bytes, cache_position_bytes = 0, 8

    def __init__(
        self,
        pass_s: float,
        *,
        row_s: float = 0.0,
        alpha: float = 1.0,
        spec: PartSpec | None = None,
        take: Take = take,
    ) -> None:
        self.spec = spec or PartSpec(CONFIG, 0, 1, 1)
        self._pass_s, self._row_s, self._alpha, self._take = pass_s, row_s, alpha, take
        self._states: dict[str, list[int]] = {}  # by session, behind each position, and before the first

    def open(self, session: str, *, positions: int, sampling: Sampling) -> None:
        if positions > CONTEXT:
            raise UserError(f"{positions} positions, and a stand-in knows {CONTEXT}", remedy="ask for fewer tokens")
        self._states[session] = [0]

    def run(
        self,
        session: str,
        *,
        keep: int,
        payload: memoryview,
        count: int,
        encoding: str,
        out_encoding: str,
        picks: int,
        draw: int,
    ) -> Ran:
        began = time.perf_counter()
        states = self._states[session]
        if not 0 <= keep < len(states) or payload.nbytes != 4 * count:
            raise ProtocolError(f"{keep} positions of {len(states) - 1} and {payload.nbytes} bytes of ids cannot be")
        del states[keep + 1 :]
        ids = np.frombuffer(payload, "<i4" if encoding == IDS else "<f4").astype("<i4")
        for token in ids.tolist():
            states.append(_after(states[-1], token))
        self._take(self._pass_s + self._row_s * max(0, picks - 1), began)
        if self.spec.stop < self.spec.layers:
            return Ran(memoryview(ids.astype("<f4").tobytes()), ())
        picked = states[len(states) - picks :] if picks else []
        return Ran(memoryview(b""), tuple(_drafted(state, self._alpha) for state in picked))

    def close(self, session: str) -> None:
        self._states.pop(session, None)
