"""The next token, as transformers' ``generate`` picks it: the same warpers in the same order, the same draws.

``generate`` draws once for each new token from a generator that was seeded once. So a draw has a number, 0 for the
first new token, and whoever is to make draw n first brings a generator there. Then it does not matter who picks, or
whether some tokens were picked before and thrown away: the same logits and the same number give the same token.

Generators of different devices draw different numbers from one seed. Rows are therefore brought to the CPU and all of
it is done there, as transformers does on a CPU: a last stage that is replaced by one of another kind goes on with the
same text, as far as its logits are the same. (It is one row of 4 bytes an entry of the vocabulary, for one token.)
"""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from p2ptrain.core.errors import JobFailed
from p2ptrain.core.serving import COLDEST, Sampling, check_sampling

_NO_IDS = cast(torch.LongTensor, torch.empty(0, dtype=torch.int64))  # these warpers do not look at what was said
_REMEMBERED = 32
"""States of the generator, 5 KB each, so that going back a few draws costs nothing."""


class Picker:
    """Picks the tokens of one session.

    Args:
        sampling: checked here; raises ``UserError``.
    """

    def __init__(self, sampling: Sampling) -> None:
        check_sampling(sampling)
        self._sampling = sampling
        self._sampled = sampling.temperature > COLDEST
        self._warp = _warpers(sampling)
        self._generator: torch.Generator | None = None
        self._next = 0  # the draw that the generator is about to make
        self._states: OrderedDict[int, Tensor] = OrderedDict()  # draw to the state before it

    def pick(self, logits: Tensor, draw: int) -> tuple[int, ...]:
        """A token for each row.

        Args:
            logits: (rows, vocab), of any device and dtype; row i is of draw ``draw + i``.

        Raises:
            JobFailed: there are logits that are not numbers.
        """
        scores = logits.to(device="cpu", dtype=torch.float32, copy=True)  # warpers may write into them
        return tuple(self._pick(row[None], draw + number) for number, row in enumerate(scores))

    def _pick(self, scores: Tensor, draw: int) -> int:
        if not scores.amax().isfinite():  # NaN where one of them is
            raise JobFailed(
                "the model gave logits that are not numbers, so there is no next token",
                remedy="compute in fp32 or bf16 (fp16 overflows in some models), and check the model's files",
            )
        if not self._sampled:
            return int(torch.argmax(scores, dim=-1))
        probabilities = torch.nn.functional.softmax(self._warp(_NO_IDS, scores), dim=-1)
        generator = self._at(draw, probabilities)
        return int(torch.multinomial(probabilities, num_samples=1, generator=generator))

    def _at(self, draw: int, like: Tensor) -> torch.Generator:
        """The generator, about to make ``draw``; afterwards it counts as made."""
        if self._generator is None:
            self._generator = torch.Generator("cpu").manual_seed(self._sampling.seed)
        if draw != self._next:
            self._go_to(draw, self._generator, like)
        self._states[draw] = self._generator.get_state()
        self._states.move_to_end(draw)
        while len(self._states) > _REMEMBERED:
            self._states.popitem(last=False)
        self._next = draw + 1
        return self._generator

    def _go_to(self, draw: int, generator: torch.Generator, like: Tensor) -> None:
        known = max((number for number in self._states if number <= draw), default=None)
        if known is not None:
            generator.set_state(self._states[known])
        else:
            generator.manual_seed(self._sampling.seed)
        # What a draw takes from the generator depends on the shape alone, not on the distribution.
        uniform = torch.full_like(like, 1 / like.numel())
        for _ in range(known or 0, draw):
            torch.multinomial(uniform, num_samples=1, generator=generator)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """Those that ``generate`` would use, in its order."""
    warpers = LogitsProcessorList()
    if sampling.temperature > COLDEST:
        if sampling.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers
