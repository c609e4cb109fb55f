"""Sampling of the next token as in transformers' ``generate``: the same warpers in the same order, the same noise.

Before them come the repetition penalty (CTRL, arXiv 1909.05858), OpenAI's presence and frequency penalties, the bias,
and the mask of a constraint. All are functions of a row's position, so drafts after it change nothing.

``generate`` seeds a generator once and samples once per new token. So each sample has an index, 0 for the first new
token. To make sample n, a picker first advances its generator to n. So the same logits and the same sample index give
the same token on every peer, even if other tokens were sampled before and discarded.

To sample one token, ``torch.multinomial`` makes noise, one exponential number per vocabulary entry, and takes the token
with the largest probability / noise. The noise depends on the sample index alone, not on the probabilities. Models of
one tokenizer often have vocabularies padded to different sizes. Then the drafter makes noise of the verifier's size
(``Sampling.vocab_size``), so that each token has the same noise on both sides.

Generators of different devices produce different numbers from one seed. So tokens are sampled on the CPU, as
transformers does on a CPU. A last stage that is replaced by one on another device continues the same text, if its
logits are the same. At temperature 0, and with ``top_k``, a GPU selects the entries that can be picked, and only these
are copied. Else one token costs the transfer of one row, 4 bytes per vocabulary entry; so with penalties or a mask.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from p2ptrain.compute.activations import ids_untrusted
from p2ptrain.compute.device import one_thread
from p2ptrain.core.activations import ID_BYTES, decode_ids
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.serving import COLDEST, Pass, Sampling, mask_bytes

_NO_IDS = cast(torch.LongTensor, torch.empty(0, dtype=torch.int64))  # these warpers ignore earlier tokens
MAX_STATES = 128
"""Generator states that a picker keeps, 5 KB each. Going back by more samples begins with the seed again."""
_LARGE_VOCABULARY = 4096
"""Entries from which ``_exponential_from_uniform`` is faster than torch's ``exponential_``."""
_TIES = 64
"""More entries than ``top_k`` that are copied from a GPU: entries equal to the last of the k can be picked, too."""


class Picker:
    """Picks the tokens of one session.

    Args:
        selects_first: with ``top_k``, select entries on the logits' device. Affects speed only: faster on a GPU.
    """

    def __init__(self, sampling: Sampling, *, selects_first: bool = False) -> None:
        self._sampling, self._selects_first = sampling, selects_first
        self._needs_history = sampling.has_penalties
        self._history = torch.empty(0, dtype=torch.int64)  # token ids of the session's first positions
        self._bias = torch.tensor(sampling.logit_bias, dtype=torch.float64).reshape(-1, 2)
        self._warp = make_warpers(replace(sampling, top_p=1.0))  # ``_remove_tail`` follows
        self._generator = torch.Generator("cpu").manual_seed(sampling.seed)
        # By sample index: the generator's state before it. The newest is the last that was set.
        self._states: OrderedDict[int, Tensor] = OrderedDict({0: self._generator.get_state()})

    def check_untrusted(self, work: Pass, vocab_size: int) -> None:
        """Raise ``ProtocolError``: the pass's masks or history are not those of its samples, or positions lack ids."""
        if work.masks and len(work.masks) != work.samples * mask_bytes(vocab_size):
            raise ProtocolError(f"{len(work.masks)} bytes of masks for {work.samples} samples of {vocab_size} tokens")
        if self._needs_history:
            count, stop = len(work.history) // ID_BYTES, work.keep + work.count
            ids_untrusted(work.history, count, vocab_size)
            if not 0 <= stop - count <= min(len(self._history), work.keep):
                raise ProtocolError(f"the last {count} of {stop} token ids, after the first {len(self._history)}")

    def pick_pass(self, logits: Tensor, work: Pass) -> tuple[int, ...]:
        """``pick`` for a checked pass. ``logits``: of its last rows."""
        if self._needs_history:
            ids = torch.tensor(decode_ids(work.history))
            self._history = torch.cat([self._history[: work.keep + work.count - len(ids)], ids])
        return self.pick(logits[-work.samples :], work.sample_index, work.masks)

    def pick(self, logits: Tensor, sample_index: int, masks: bytes = b"") -> tuple[int, ...]:
        """Pick a token for each row. ``logits``: (rows, entries), any device and dtype, without NaN and infinity; row i
        has sample index ``sample_index + i``. The last row is that of the last position in the history, if there are
        penalties. ``masks``: as of ``Pass``."""
        # A row is little work. On a busy machine several threads would spend the time waiting for one another.
        with one_thread():
            is_changed = bool(masks) or self._needs_history or bool(self._sampling.logit_bias)
            if self._sampling.temperature <= COLDEST and not is_changed:
                # Of equal entries a row's maximum is the first one.
                return tuple(logits[:, : self._sampling.vocab_size or None].max(-1).indices.tolist())
            warped = self._changed(logits, sample_index, masks) if is_changed else self._scores(logits)
            if self._sampling.temperature <= COLDEST:
                return tuple(warped.max(-1).indices.tolist())
            for warper in self._warp:  # calling the list itself inspects their signatures, each time
                warped = warper(_NO_IDS, warped)
            if self._sampling.top_p < 1.0:
                warped = _remove_tail(warped, self._sampling.top_p)
            if self._sampling.min_p:  # equals ``MinPLogitsWarper``, without its sort
                likely = warped.softmax(-1)
                warped = warped.masked_fill(likely < self._sampling.min_p * likely.amax(-1, keepdim=True), -torch.inf)
            probabilities, entries = warped.softmax(-1), self._sampling.vocab_size or warped.shape[1]
            noise = torch.stack([self._noise(sample_index + row, entries) for row in range(len(warped))])
            return tuple((probabilities / noise[:, : warped.shape[1]]).argmax(-1).tolist())

    def _scores(self, logits: Tensor) -> Tensor:
        """A copy that warpers may write into: (rows, entries that may be picked), float32, on the CPU."""
        scores = self._selected_scores(logits) if self._selects_first else None
        return self._all_scores(logits) if scores is None else scores

    def _all_scores(self, logits: Tensor) -> Tensor:
        return logits.to(device="cpu", dtype=torch.float32, copy=True)[:, : self._sampling.vocab_size or None]

    def _changed(self, logits: Tensor, sample_index: int, masks: bytes) -> Tensor:
        """``_scores`` with penalties, bias and masks."""
        sampling, scores = self._sampling, self._all_scores(logits)
        entries = scores.shape[1]
        if self._needs_history:
            first = len(self._history) - len(scores) + 1  # number of tokens before the first row's sample
            for ends, row in enumerate(scores, first):
                before, penalty = self._history[:ends], sampling.repetition_penalty
                row[before] = torch.where(row[before] < 0, row[before] * penalty, row[before] / penalty)
                counts = torch.bincount(self._history[first - sample_index : ends], minlength=entries)
                row -= counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty
        if len(self._bias):
            known = self._bias[self._bias[:, 0] < entries]
            scores[:, known[:, 0].long()] += known[:, 1].float()
        if masks:
            packed = np.frombuffer(masks, np.uint8).reshape(len(scores), -1)
            allowed = np.unpackbits(packed, axis=1, count=entries, bitorder="little")
            scores.masked_fill_(torch.from_numpy(allowed) == 0, -torch.inf)
        return scores

    def _selected_scores(self, logits: Tensor) -> Tensor | None:
        """``_scores`` of the entries that ``top_k`` leaves, and minus infinity for others. None: they are not few."""
        logits, top_k = logits[:, : self._sampling.vocab_size or None], self._sampling.top_k
        if not top_k or 4 * (top_k + _TIES) > logits.shape[1]:
            return None
        values, indices = _to_host(*logits.topk(top_k + _TIES))
        scaled = values / self._sampling.temperature  # as the warper does: it can make entries equal
        if (scaled[:, -1] == scaled[:, top_k - 1]).any():
            return None
        return torch.full(logits.shape, -torch.inf).scatter_(1, indices, values)

    def _noise(self, sample_index: int, entries: int) -> Tensor:
        known = max((index for index in self._states if index <= sample_index), default=0)
        if known in self._states:
            self._generator.set_state(self._states[known])
        else:
            self._generator.manual_seed(self._sampling.seed)
        for _ in range(known, sample_index):
            _exponential(entries, self._generator)
        noise = _exponential(entries, self._generator)
        self._states[sample_index + 1] = self._generator.get_state()
        self._states.move_to_end(sample_index + 1)
        if len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
        return noise


def _to_host(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Copy both at once, so that the device is waited for once. Values become float32."""
    both = torch.stack([values.double(), indices.double()]).cpu()  # exact
    return both[0].float(), both[1].long()


def _exponential(entries: int, generator: torch.Generator) -> Tensor:
    """Equals ``torch.empty(entries).exponential_(1, generator=generator)``, in less than half of the time if
    ``entries`` is large: torch takes the logarithms one by one."""
    if entries >= _LARGE_VOCABULARY and _is_uniform_equal():
        return _exponential_from_uniform(entries, generator)
    return torch.empty(entries).exponential_(1, generator=generator)


def _exponential_from_uniform(entries: int, generator: torch.Generator) -> Tensor:
    uniform = torch.empty(entries, dtype=torch.float64).uniform_(generator=generator)
    return uniform.neg_().log1p_().neg_().to(torch.float32)


@functools.cache
def _is_uniform_equal() -> bool:
    """Whether ``_exponential_from_uniform`` gives the bits of this torch build's ``exponential_``."""
    ours, theirs = (torch.Generator("cpu").manual_seed(1) for _ in range(2))
    found = _exponential_from_uniform(_LARGE_VOCABULARY, ours)
    is_equal = torch.equal(found, torch.empty(_LARGE_VOCABULARY).exponential_(1, generator=theirs))
    return is_equal and torch.equal(ours.get_state(), theirs.get_state())


def _remove_tail(scores: Tensor, top_p: float) -> Tensor:
    """Equals ``TopPLogitsWarper`` bit by bit, but sorts only the entries that are not minus infinity, if they are few.

    Sums of the same numbers in another order differ in the last bit. So the sorted entries are placed where a fully
    sorted row has them: after all entries that are minus infinity.
    """
    count = max(1, int((scores > -torch.inf).sum(-1).max()))  # a peer's mask may allow none
    if 4 * count <= scores.shape[-1]:
        values, places = scores.topk(count)
        ordered = torch.full_like(scores, -torch.inf)
        ordered[:, -count:] = values.flip(-1)
        removed = (ordered.softmax(-1)[:, -count:].cumsum(-1) <= 1 - top_p).flip(-1)
        removed[:, 0] = False
        tied = (values[:, 1:] == values[:, :-1]) & (removed[:, 1:] != removed[:, :-1])
        if not tied.any():  # else the full sort decides which of them stays
            return scores.scatter(-1, places, values.masked_fill(removed, -torch.inf))
    return cast(Tensor, TopPLogitsWarper(top_p)(_NO_IDS, cast(torch.FloatTensor, scores)))


def make_warpers(sampling: Sampling) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if sampling.temperature > COLDEST:
        if sampling.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers
