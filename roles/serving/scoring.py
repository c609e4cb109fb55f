"""Scores token ids: the log-probability of each after those before it, by several equal models that share the work."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2ptrain.core.errors import P2PTrainError, first_error
from p2ptrain.core.serving import Sampling
from roles.serving.model import ModelSession, PassRequest, ServedModel
from wire.chain_messages import MAX_REQUEST_POSITIONS

Scores = npt.NDArray[np.float32]

_PASS_LOGITS = 1 << 26  # of a pass, which needs 12 bytes for each


class ScoreRequest(NamedTuple):
    """Token ids; the scores of those from number ``first`` on, at least 1, are wanted, and ``on_scores`` takes them."""

    ids: Sequence[int]
    first: int
    on_scores: Callable[[Scores], None]


async def score_ids(session: ModelSession, ids: Sequence[int], first: int, vocab_size: int) -> Scores:
    """The log-probability of each of ``ids[first:]``, as in ``Ran.scores``. It replaces the session's history.

    Raises as ``ModelSession.append``."""
    scores = list[bytes]()
    most = max(1, min(MAX_REQUEST_POSITIONS, _PASS_LOGITS // vocab_size))
    for start in range(0, len(ids) - 1, most):
        stop = min(start + most, len(ids) - 1)
        targets = tuple(ids[max(start + 1, first) : stop + 1])
        scores.append((await session.append(PassRequest(start, tuple(ids[start:stop]), targets=targets))).scores)
    return np.frombuffer(b"".join(scores), "<f4")


async def score_all(
    models: Sequence[ServedModel], requests: AsyncIterator[ScoreRequest], sessions: int, positions: int
) -> None:
    """Score requests with equal models, in any order. What a model had when it failed is scored by the others.

    ``sessions``, ``positions``: of each model, and of each session. Raises ``P2PTrainError``: all models have failed;
    or as ``requests``."""
    alive, again = list(models), deque[ScoreRequest]()
    turn = asyncio.Lock()  # the iterator serves one caller at a time

    async def take() -> ScoreRequest | None:
        async with turn:
            return again.popleft() if again else await anext(requests, None)

    async def serve(model: ServedModel) -> None:
        session: ModelSession | None = None
        try:
            while model in alive and (request := await take()) is not None:
                try:
                    session = session or await model.open(
                        positions=positions, sampling=Sampling(temperature=0), sample_from=positions
                    )
                    scores = await score_ids(session, request.ids, request.first, model.vocab_size)
                except P2PTrainError:
                    again.append(request)
                    if model in alive:
                        alive.remove(model)
                    if not alive:
                        raise
                else:
                    request.on_scores(scores)
        finally:
            if session is not None:
                await session.close()

    while True:
        try:
            async with asyncio.TaskGroup() as tasks:
                for model in alive * sessions:
                    tasks.create_task(serve(model), name="score")
        except* P2PTrainError as group:
            raise first_error(group) from None
        if not again:
            return
