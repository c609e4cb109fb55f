"""A verifier that rejects drafts by their probabilities and its drafters, with models of a few tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import product
from typing import Any, cast

import torch

from p2ptrain.compute.picking import Picker
from p2ptrain.compute.rejection import RejectionPicker, row_bytes
from p2ptrain.core.activations import decode_ids
from p2ptrain.core.serving import DraftProbs, Judged, PartSpec, Ran, Sampling, Weighed
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock
from roles.compute_thread import ComputeThread
from roles.drafter.testing import TOKENIZER, DrafterHost, around_of, model_serves
from roles.verifier.drafter_link import Tokens
from roles.verifier.drafters import Drafters
from roles.verifier.session import TextSession
from roles.verifier.whole_target import WholeTarget
from wire.emulate import EmulatedNetwork
from wire.memory import MemoryNetwork
from wire.shaper import LinkPreset

VOCAB = 4
POSITIONS = 1 << 16
PASS_S, STEP_S = 0.05, 0.005


class Chain:
    """A model whose next token depends on the last one alone: a ``JudgingEngine``.

    Args:
        logits: (VOCAB, VOCAB): of the next token, by the last one.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.spec, self.width, self.vocab_size, self.encoding = PartSpec("", 0, 1, 1), 0, len(logits), "ids"
        self.weights_bytes, self.cache_position_bytes, self.device = 0, 4, "a table"
        self._sessions: dict[str, tuple[Picker, list[int]]] = {}

    def open(self, session: str, *, positions: int, sampling: Sampling) -> None:
        self._sessions[session] = (RejectionPicker if sampling.rejects else Picker)(sampling), []

    def _taken(self, session: str, keep: int, payload: memoryview, picks: int) -> tuple[Picker, torch.Tensor]:
        picker, history = self._sessions[session]
        assert keep <= len(history)
        del history[keep:]
        history += decode_ids(bytes(payload))
        return picker, self.logits[history[len(history) - picks :]]

    def run(self, session: str, *, keep: int, payload: memoryview, picks: int, draw: int, **rest: Any) -> Ran:
        picker, logits = self._taken(session, keep, payload, picks)
        return Ran(memoryview(b""), picker.pick(logits, draw) if picks else ())

    def weighed(self, session: str) -> tuple[Weighed, ...]:
        return cast(RejectionPicker, self._sessions[session][0]).weighed()

    def row_bytes(self, sampling: Sampling) -> int:
        return row_bytes(self.vocab_size, sampling.top_k)

    def judge(
        self, session: str, *, keep: int, payload: memoryview, count: int, draw: int, weights: Sequence[float]
    ) -> Judged:
        picker, logits = self._taken(session, keep, payload, len(weights) + 1)
        drafts = decode_ids(bytes(payload))[count - len(weights) :]
        return cast(RejectionPicker, picker).judge(logits, draw, drafts, weights)

    def settle(self, session: str, draft_probs: DraftProbs | None) -> int:
        return cast(RejectionPicker, self._sessions[session][0]).settle(draft_probs)

    def close(self, session: str) -> None:
        self._sessions.pop(session, None)

    def probs(self, sampling: Sampling, count: int) -> dict[tuple[int, ...], dict[int, float]]:
        """Of the next token, by the last ``count`` ones."""
        rows = RejectionPicker(sampling).probs(self.logits).double().tolist()
        return {before: dict(enumerate(rows[before[-1]])) for before in product(range(VOCAB), repeat=count)}


class _Writer:
    """Takes tokens, and makes no text of them."""

    end_tokens: frozenset[int] = frozenset()
    ended = ""

    def take(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _Target(WholeTarget):
    """Its passes take ``PASS_S``; to draw what comes instead of a draft takes no time."""

    def __init__(self, engine: Chain) -> None:
        self._threads = LoopThreads()
        self._threads.call_s["compute"] = PASS_S
        super().__init__(engine, ComputeThread(self._threads), LoopClock(), label="a table", context=POSITIONS)

    async def settle(self, name: str, draft_probs: DraftProbs | None) -> int:
        self._threads.call_s["compute"] = 0.0
        try:
            return await super().settle(name, draft_probs)
        finally:
            self._threads.call_s["compute"] = PASS_S


class Scene:
    """A verifier with this model, and drafters on links of ``one_way_ms``.

    Attributes:
        writing: the last text.
    """

    writing: TextSession

    def __init__(self, target: Chain, *, one_way_ms: float = 0.0, look_up: bool = False, seats: int = 2) -> None:
        self.memory, self.one_way_ms = MemoryNetwork(), one_way_ms
        self.target = _Target(target)
        self.told: list[tuple[str, str, str]] = []
        self.drafters = Drafters(
            around_of(self.at("verifier"), lambda *notice: self.told.append(notice)),
            Tokens(VOCAB, TOKENIZER),
            look_up=look_up,
            seats=seats,
        )

    def at(self, host: str) -> Any:
        network = self.memory.at(host)
        preset = LinkPreset("test", self.one_way_ms)
        return EmulatedNetwork(network, preset, len(host)) if self.one_way_ms else network

    def host(self, name: str, engine: Any) -> DrafterHost:
        return DrafterHost(name, self.at(name), model_serves(engine), STEP_S)

    async def write(
        self,
        tokens: int,
        sampling: Sampling,
        *,
        on_token: Callable[[int], None] = lambda count: None,
        pause: Callable[[int], Awaitable[None]] | None = None,
    ) -> tuple[list[int], dict[str, Any]]:
        """New tokens, and how they came about. ``on_token``: told how many there are; ``pause``: likewise, and nothing
        is read meanwhile."""
        opened = await self.target.open(positions=tokens + 1, sampling=sampling)
        session = TextSession(
            opened,
            cast(Any, _Writer()),
            [0],
            cached=0,
            max_new_tokens=tokens,
            vocab_size=VOCAB,
            left_out=0,
            now=asyncio.get_running_loop().time,
            on_end=lambda ended, clean: None,
        )
        self.writing = session
        session.begin(self.drafters, positions=tokens + 1, sampling=sampling)
        made: list[int] = []
        async for piece in session:
            made += piece.tokens
            on_token(len(made))
            if pause is not None:
                await pause(len(made))
        session.core.validate()
        await opened.close()
        return made, session.stats()


def behind(tokens: Sequence[int], count: int) -> dict[tuple[int, ...], Counter[int]]:
    """How often each token came, by the last ``count`` ones before it."""
    found: dict[tuple[int, ...], Counter[int]] = {}
    for at in range(count, len(tokens)):
        found.setdefault(tuple(tokens[at - count : at]), Counter())[tokens[at]] += 1
    return found


class Liar(Chain):
    """It says other probabilities than it drew from: of another token, none that are 1 together, ..."""

    def __init__(self, logits: torch.Tensor, says: Callable[[Weighed], Weighed]) -> None:
        super().__init__(logits)
        self._says = says

    def weighed(self, session: str) -> tuple[Weighed, ...]:
        return tuple(self._says(each) for each in super().weighed(session))
