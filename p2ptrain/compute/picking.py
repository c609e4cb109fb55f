"""Sampling of the next token as in transformers' ``generate``: the same warpers in the same order, the same noise.

``generate`` seeds a generator once and samples once per new token. So each sample has an index, 0 for the first new
token. To make sample n, a picker first advances its generator to n. So the same logits and the same sample index give
the same token on every peer, even if other tokens were sampled before and discarded.

To sample one token, ``torch.multinomial`` makes noise, one exponential number per vocabulary entry, and takes the token
with the largest probability / noise. The noise depends on the sample index alone, not on the probabilities. Recent
noise is cached, because a verifier of drafts makes many samples twice. Models of one tokenizer often have vocabularies
padded to different sizes. Then the drafter makes noise of the verifier's size (``Sampling.vocab_size``), so that each
token has the same noise on both sides.

Generators of different devices produce different numbers from one seed. So all work is done on the CPU, as transformers
does on a CPU. A last stage that is replaced by one on another device continues the same text, if its logits are the
same. One token costs the transfer of one row, 4 bytes per vocabulary entry.
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

_NO_IDS = cast(torch.LongTensor, torch.empty(0, dtype=torch.int64))  # these warpers ignore earlier tokens
REMEMBERED = 128
"""Cached generator states, 5 KB each: going back by up to so many samples is as fast as going on."""
NOISE_BYTES = 8 << 20
"""Size of the noise cache: 40 samples of a vocabulary of 50,000 entries."""
_MANY = 4096
"""Entries from which ``_at_once`` is faster than torch's ``exponential_``."""
_FEW = 4096
"""Most remaining entries of a row for which ``_nucleus`` is faster than a full sort."""


class Picker:
    """Picks the tokens of one session.

    Args:
        remembered, noise_bytes: sizes of the caches. They affect speed only.

    Raises:
        UserError: ``sampling`` has an invalid value.
    """

    def __init__(self, sampling: Sampling, *, remembered: int = REMEMBERED, noise_bytes: int = NOISE_BYTES) -> None:
        check_sampling(sampling)
        self._sampling = sampling
        self._sampled = sampling.temperature > COLDEST
        self._few = sampling.top_p < 1.0 and 0 < sampling.top_k <= _FEW
        self._warp = _warpers(sampling, top_p=not self._few)
        self._remembered, self._noise_bytes = remembered, noise_bytes
        self._generator: torch.Generator | None = None
        self._next = 0  # sample index of the generator's next noise
        self._states: OrderedDict[int, Tensor] = OrderedDict()  # sample index → generator state before it
        self._noise: OrderedDict[int, Tensor] = OrderedDict()  # sample index → noise

    def pick(self, logits: Tensor, sample_index: int) -> tuple[int, ...]:
        """Pick a token for each row.

        Args:
            logits: (rows, entries), any device and dtype; row i has sample index ``sample_index + i``.

        Raises:
            JobFailed: a logit is not finite.
        """
        # A row is little work. On a busy machine several threads would spend the time waiting for one another.
        with one_thread():
            scores = self._scores(logits)
            if not self._sampled:
                return tuple(scores.argmax(-1).tolist())
            warped = self._warp(_NO_IDS, scores)
            return self._drawn(
                (_nucleus(warped, self._sampling.top_p) if self._few else warped).softmax(-1), sample_index
            )

    def _scores(self, logits: Tensor) -> Tensor:
        """A copy that warpers may write into: (rows, entries that may be picked), float32, on the CPU."""
        scores = logits.to(device="cpu", dtype=torch.float32, copy=True)
        scores = scores[:, : self._sampling.vocab_size or None]
        if not scores.amax(-1).isfinite().all():  # a row's maximum is NaN if any entry is
            raise JobFailed(
                "the model's logits are not finite, so no next token can be chosen",
                remedy="compute in fp32 or bf16 (fp16 overflows in some models), and check the model's files",
            )
        return scores

    def _drawn(self, probabilities: Tensor, sample_index: int) -> tuple[int, ...]:
        vocab_size = self._sampling.vocab_size or probabilities.shape[1]
        noise = torch.stack([self._noise_of(sample_index + row, vocab_size) for row in range(len(probabilities))])
        return tuple((probabilities / noise[:, : probabilities.shape[1]]).argmax(-1).tolist())

    def _noise_of(self, sample_index: int, entries: int) -> Tensor:
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
    """Equals ``torch.empty(entries).exponential_(1, generator=generator)``, in a third of the time if ``entries`` is
    large. torch takes the logarithms one by one: for 150,000 entries this takes as long as a pass of a small model."""
    if entries >= _MANY and _same_at_once():
        return _at_once(entries, generator)
    return torch.empty(entries).exponential_(1, generator=generator)


def _at_once(entries: int, generator: torch.Generator) -> Tensor:
    uniform = torch.empty(entries, dtype=torch.float64).uniform_(generator=generator)
    return uniform.neg_().log1p_().neg_().to(torch.float32)


@functools.cache
def _same_at_once() -> bool:
    """Whether ``_at_once`` gives the bits of this torch build's ``exponential_``; tested once per process."""
    ours, theirs = (torch.Generator("cpu").manual_seed(1) for _ in range(2))
    same = torch.equal(_at_once(_MANY, ours), torch.empty(_MANY).exponential_(1, generator=theirs))
    return same and torch.equal(ours.get_state(), theirs.get_state())


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Equals ``TopPLogitsWarper`` bit by bit, but sorts only the entries that are not minus infinity.

    Sums of the same numbers in another order differ in the last bit. So the sorted entries are placed where a fully
    sorted row has them: after all entries that are minus infinity.
    """
    entries = scores.shape[-1]
    left = [(row > -torch.inf).nonzero()[:, 0] for row in scores]
    if max(map(len, left)) > _FEW:  # many entries tie with the last of the ``top_k``
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
        if removed and values[removed - 1] == values[removed]:  # the full sort decides which of the ties stays
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
