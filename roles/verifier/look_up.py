"""A look-up that drafts within the verifier's process: the drafter's core and the index, without a wire between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2ptrain.core.activations import IDS, encode_ids
from roles.speculation.drafting import Drafting
from roles.speculation.events import Began, Drafted, DrafterEvent, DrafterReady, Run, RunDone, Send, Tell, Told
from roles.speculation.ngram import NgramEngine
from roles.verifier.seat import Beginning

SESSION = "here"
NAME = "look-up"


class LookUp:
    """Drafts for one session. A piece of a long prompt at a time is taken in, so that nobody is held up by it.

    Args:
        drafter: its number in the session.
        on_event: told from the loop, never from within a call.
    """

    def __init__(
        self,
        drafter: int,
        beginning: Beginning,
        vocab_size: int,
        on_event: Callable[[DrafterReady | Drafted], None],
    ) -> None:
        self.drafter = drafter
        self._known = len(beginning.ids)
        self._on_event = on_event
        self._engine = NgramEngine(vocab_size)
        self._engine.open(SESSION, positions=beginning.positions, sampling=beginning.sampling)
        self._core = Drafting(
            beginning.ids, prompt=beginning.prompt, positions=beginning.positions, depth=beginning.depth
        )
        self._ready = self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._feed, Began())

    def tell(self, tell: Tell) -> None:
        """Give it a verdict."""
        self._loop.call_soon(self._feed, Told(tell.number, tell.start, tell.tokens, tell.depth))

    def close(self) -> None:
        """Nothing is told any more."""
        self._closed = True

    def _feed(self, event: DrafterEvent) -> None:
        if self._closed:
            return
        instructions = self._core.handle(event, self._loop.time())
        if self._core.ready and not self._ready:
            self._ready = True
            self._on_event(DrafterReady(self.drafter, self._known, 0.0, name=NAME))
        for instruction in instructions:
            match instruction:
                case Send(epoch, position, tokens):
                    self._on_event(Drafted(self.drafter, epoch, position, tokens))
                case Run():
                    self._loop.call_soon(self._run, instruction)

    def _run(self, run: Run) -> None:
        if self._closed:
            return
        ran = self._engine.run(
            SESSION,
            keep=run.keep,
            payload=memoryview(encode_ids(run.ids)),
            count=len(run.ids),
            encoding=IDS,
            out_encoding=IDS,
            picks=run.picks,
            draw=run.draw,
        )
        self._feed(RunDone(ran.tokens))
