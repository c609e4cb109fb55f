"""The next token, as transformers' ``generate`` picks it: the same warpers in the same order, the same draws.

``generate`` draws once for each new token from a generator that was seeded once. So a draw has a number, 0 for the
first new token, and whoever is to make draw n first brings a generator there. Then it does not matter who picks, or
whether some tokens were picked before and thrown away: the same logits and the same number give the same token.

A draw of one token is noise, as many exponential numbers as the vocabulary has, and the token whose probability divided
by its noise is the largest; so ``torch.multinomial`` does it. The noise is the draw's, whatever the probabilities are:
that of recent draws is kept, for who verifies drafts makes many of them twice. Models of one tokenizer often have
vocabularies that are padded to different sizes; then the drafter makes the draws of the verifier's size
(``Sampling.vocab_size``), and a token's noise is the same on both sides.

Generators of different devices draw different numbers from one seed. Rows are therefore brought to the CPU and all of
it is done there, as transformers does on a CPU: a last stage that is replaced by one of another kind goes on with the
same text, as far as its logits are the same. (It is one row of 4 bytes an entry of the vocabulary, for one token.)
"""

from __future__ import annotations

import functools
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

from p2ptrain.compute.device import one_thread
from p2ptrain.core.errors import JobFailed
from p2ptrain.core.serving import COLDEST, Sampling, check_sampling

_NO_IDS = cast(torch.LongTensor, torch.empty(0, dtype=torch.int64))  # these warpers do not look at what was said
REMEMBERED = 128
"""States of the generator, 5 KB each, so that going back so many draws costs no more than going on."""
NOISE_BYTES = 8 << 20
"""Of noise that is kept: of 40 draws where the vocabulary has 50,000 entries."""
_MANY = 4096
"""Entries from which on ``_exponential`` is worth its operations."""
_FEW = 4096
"""Entries of a row that are left, at most, for ``_nucleus`` to be worth it."""


class Picker:
    """Picks the tokens of one session.

    Args:
        sampling: checked here; raises ``UserError``.
        remembered, noise_bytes: as of ``REMEMBERED`` and ``NOISE_BYTES``. They change the time that it takes only.
    """

    def __init__(self, sampling: Sampling, *, remembered: int = REMEMBERED, noise_bytes: int = NOISE_BYTES) -> None:
        check_sampling(sampling)
        self._sampling = sampling
        self._sampled = sampling.temperature > COLDEST
        self._few = sampling.top_p < 1.0 and 0 < sampling.top_k <= _FEW
        self._warp = _warpers(sampling, top_p=not self._few)
        self._remembered, self._noise_bytes = remembered, noise_bytes
        self._generator: torch.Generator | None = None
        self._next = 0  # the draw that the generator is about to make
        self._states: OrderedDict[int, Tensor] = OrderedDict()  # draw to the state before it
        self._noise: OrderedDict[int, Tensor] = OrderedDict()  # draw to its noise

    def pick(self, logits: Tensor, sample_index: int) -> tuple[int, ...]:
        """A token for each row.

        Args:
            logits: (rows, entries), of any device and dtype; row i is of draw ``sample_index + i``.

        Raises:
            JobFailed: there are logits that are not numbers.
        """
        # Rows are short work for many threads, which would wait for one another at each operation on a busy machine.
        with one_thread():
            scores = self._scores(logits)
            if not self._sampled:
                return tuple(scores.argmax(-1).tolist())
            warped = self._warp(_NO_IDS, scores)
            return self._drawn(
                (_nucleus(warped, self._sampling.top_p) if self._few else warped).softmax(-1), sample_index
            )

    def _scores(self, logits: Tensor) -> Tensor:
        """(rows, entries that may be picked), float32, on the CPU: warpers may write into them."""
        scores = logits.to(device="cpu", dtype=torch.float32, copy=True)
        scores = scores[:, : self._sampling.vocab_size or None]
        if not scores.amax(-1).isfinite().all():  # NaN where one of them is
            raise JobFailed(
                "the model gave logits that are not numbers, so there is no next token",
                remedy="compute in fp32 or bf16 (fp16 overflows in some models), and check the model's files",
            )
        return scores

    def _drawn(self, probabilities: Tensor, sample_index: int) -> tuple[int, ...]:
        vocab_size = self._sampling.vocab_size or probabilities.shape[1]
        noise = torch.stack([self._noise_of(sample_index + row, vocab_size) for row in range(len(probabilities))])
        return tuple((probabilities / noise[:, : probabilities.shape[1]]).argmax(-1).tolist())

    def _noise_of(self, sample_index: int, entries: int) -> Tensor:
        """(entries,). The generator is asked where it is not kept."""
        known = self._noise.get(sample_index)
        if known is not None and len(known) == entries:
            self._noise.move_to_end(sample_index)
            return known
        noise = _exponential(entries, self._at(sample_index, entries))
        self._noise[sample_index] = noise
        while len(self._noise) > 1 and len(self._noise) * noise.nbytes > self._noise_bytes:
            self._noise.popitem(last=False)
        return noise

    def _at(self, sample_index: int, entries: int) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator("cpu").manual_seed(self._sampling.seed)
        if sample_index != self._next:
            self._go_to(sample_index, self._generator, entries)
        self._states[sample_index] = self._generator.get_state()
        self._states.move_to_end(sample_index)
        while len(self._states) > self._remembered:
            self._states.popitem(last=False)
        self._next = sample_index + 1
        return self._generator

    def _go_to(self, sample_index: int, generator: torch.Generator, entries: int) -> None:
        known = max((number for number in self._states if number <= sample_index), default=None)
        if known is not None:
            generator.set_state(self._states[known])
        else:
            generator.manual_seed(self._sampling.seed)
        for _ in range(known or 0, sample_index):
            _exponential(entries, generator)


def _exponential(entries: int, generator: torch.Generator) -> Tensor:
    """As ``torch.empty(entries).exponential_(1, generator=generator)``, in a third of the time where there are many.

    That takes a logarithm of one number after the other: for 150,000 entries several milliseconds, as long as a pass of
    a small model. Here it is of all at once.
    """
    if entries >= _MANY and _same_at_once():
        return _at_once(entries, generator)
    return torch.empty(entries).exponential_(1, generator=generator)


def _at_once(entries: int, generator: torch.Generator) -> Tensor:
    uniform = torch.empty(entries, dtype=torch.float64).uniform_(generator=generator)
    return uniform.neg_().log1p_().neg_().to(torch.float32)


@functools.cache
def _same_at_once() -> bool:
    """Whether this build of torch draws its exponential numbers like that: tried once in a process, bit by bit."""
    ours, theirs = (torch.Generator("cpu").manual_seed(1) for _ in range(2))
    same = torch.equal(_at_once(_MANY, ours), torch.empty(_MANY).exponential_(1, generator=theirs))
    return same and torch.equal(ours.get_state(), theirs.get_state())


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """As ``TopPLogitsWarper``, bit by bit, where few entries of each row are left: it would sort all of them.

    Sums of the same numbers in another order differ in the last bit. So the few stand where a sorted row has them,
    behind all that are minus infinity.
    """
    entries = scores.shape[-1]
    left = [(row > -torch.inf).nonzero()[:, 0] for row in scores]
    if max(map(len, left)) > _FEW:  # many are exactly as likely as the last of the ``top_k``
        return _sorted_nucleus(scores, top_p)
    ordered = torch.full_like(scores, -torch.inf)
    places = []
    for row, (indices, out) in enumerate(zip(left, ordered, strict=True)):
        values, order = scores[row, indices].sort()
        out[entries - len(values) :] = values
        places.append(indices[order])
    cumulative = ordered.softmax(-1)
    for row, indices in enumerate(places):
        tail = cumulative[row, entries - len(indices) :].cumsum(-1)
        removed = min(int((tail <= 1 - top_p).sum()), len(indices) - 1)
        values = ordered[row, entries - len(indices) :]
        if removed and values[removed - 1] == values[removed]:  # which of equals stays depends on how all were sorted
            scores[row] = _sorted_nucleus(scores[row][None], top_p)[0]
        else:
            scores[row, indices[:removed]] = -torch.inf
    return scores


def _sorted_nucleus(scores: Tensor, top_p: float) -> Tensor:
    return cast(Tensor, TopPLogitsWarper(top_p)(_NO_IDS, cast(torch.FloatTensor, scores)))


def _warpers(sampling: Sampling, *, top_p: bool = True) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if sampling.temperature > COLDEST:
        if sampling.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0 and top_p:
            warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers
