"""Speculative sampling by rejection: drafts are kept with the chance that leaves the verifier's distribution as it is.

A draft that was drawn from ``draft_probs`` is kept with the chance ``min(1, target_probs / draft_probs)`` of its token;
where one is rejected, the token in its place is drawn from what ``target_probs`` has more than ``draft_probs``; behind
the last one, if all were kept, a token is drawn from ``target_probs`` (Leviathan, Kalman, Matias, "Fast inference from
transformers via speculative decoding", 2023, theorem in A.1; Chen et al., "Accelerating large language model decoding
with speculative sampling", 2023, theorem 1).

Three streams of randomness, each a pure function of the seed and a draw's number, and independent of one another: the
noise of ``picking``, with which the drafter draws drafts and the verifier its own tokens; whether drafts are kept; what
comes in place of a rejected one. At one position the noise serves either a draft or the verifier's own token, never
both, so that the two share it does no harm. It does good: what a drafter drafted for a position that the verifier came
to alone is still often right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from p2ptrain.compute.device import one_thread
from p2ptrain.compute.picking import Picker
from p2ptrain.core.serving import DraftProbs, Judged, Sampling, Weighed

Array = npt.NDArray[Any]
KEEP, INSTEAD = "keep", "instead"
"""Of ``uniform``: whether a draft is kept, and what comes in place of one that is not."""
ID_BYTES, PROB_BYTES = 4, 4
SPARSE = 2
"""Entries of a row, at least, for each that may come, for ids to be written beside the probabilities: it is shorter."""


def uniform(seed: int, draw: int, purpose: str) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(f"{seed} {draw} {purpose}".encode(), digest_size=8, person=b"rejection")
    return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53


def kept(target_prob: float, weight: float, chance: float) -> bool:
    """Whether a draft is kept that the drafter drew with probability ``weight``."""
    return chance * weight < target_prob


class RejectionPicker(Picker):
    """Picks, weighs and judges the tokens of one session. Its ``sampling`` is one that ``rejects``."""

    def __init__(self, sampling: Sampling) -> None:
        super().__init__(sampling)
        assert sampling.rejects
        self._seed = sampling.seed
        self._last: tuple[Tensor, tuple[int, ...]] | None = None  # of the last pick: its probabilities, and what came
        self._rejected: tuple[Tensor, int, int] | None = None  # target's probabilities, the draft, its draw's number

    def pick(self, logits: Tensor, draw: int) -> tuple[int, ...]:
        """As of ``Picker``."""
        probs = self.probs(logits)
        with one_thread():
            tokens = self._drawn(probs, draw)
        self._last = probs, tokens
        return tokens

    def weighed(self) -> tuple[Weighed, ...]:
        """What the tokens of the last pick were drawn from, in order."""
        assert self._last is not None
        return tuple(weigh(row, token) for row, token in zip(*self._last, strict=True))

    def judge(self, logits: Tensor, draw: int, drafts: Sequence[int], weights: Sequence[float]) -> Judged:
        """Keep drafts or reject one.

        Args:
            logits: (drafts + 1, vocab), of any device and dtype; row i is of draw ``draw + i``.
            weights: of the drafts, each drawn from probabilities among which it had this one, in (0, 1].

        Raises:
            JobFailed: there are logits that are not numbers.
        """
        assert len(logits) == len(drafts) + 1 == len(weights) + 1
        probs = self.probs(logits)
        for number, (token, weight) in enumerate(zip(drafts, weights, strict=True), draw):
            row = probs[number - draw]
            if not kept(float(row[token]), weight, uniform(self._seed, number, KEEP)):
                self._rejected = row.clone(), token, number  # the others need not stay in memory for it
                return Judged(tuple(drafts[: number - draw]), rejected=True)
        with one_thread():
            return Judged((*drafts, *self._drawn(probs[-1:], draw + len(drafts))), rejected=False)

    def settle(self, draft_probs: DraftProbs | None) -> int:
        """What comes in place of the draft that was rejected last.

        Args:
            draft_probs: that it was drawn from, checked; None: nobody knows them any more. Then it is drawn from
                the target's probabilities without the draft: right only where the drafter was certain of it.
        """
        assert self._rejected is not None
        (row, token, draw), self._rejected = self._rejected, None
        left = residual(row.numpy(), token, draft_probs)
        return inverse(left, uniform(self._seed, draw, INSTEAD))

    def probs(self, logits: Tensor) -> Tensor:
        """What tokens are drawn from: (rows, vocab), float32, on the CPU. Raises as ``judge``."""
        with one_thread():
            return self._warped(self._scores(logits)).softmax(-1)


def row_bytes(vocab_size: int, top_k: int) -> int:
    """Of what ``weigh`` gives beside the weight, at most, unless there are tokens that are exactly as likely as the
    last of the ``top_k`` (0: all may come)."""
    all_bytes = PROB_BYTES * vocab_size
    return min(all_bytes, (ID_BYTES + PROB_BYTES) * top_k) if top_k else all_bytes


def weigh(row: Tensor, token: int) -> Weighed:
    """A token and the probabilities that it was drawn from: ``row`` (vocab,), float32, on the CPU."""
    probs = row.numpy().astype("<f4", copy=False)
    weight = float(probs[token])
    ids = np.flatnonzero(probs)
    if SPARSE * len(ids) > len(probs):
        return Weighed(weight, DraftProbs(b"", probs.tobytes()))
    return Weighed(weight, DraftProbs(ids.astype("<i4").tobytes(), probs[ids].tobytes()))


def residual(target_probs: Array, token: int, draft_probs: DraftProbs | None) -> Array:
    """What comes in place of a rejected ``token``: not normalized, shape (vocab,), float64.

    Args:
        target_probs: (vocab,). draft_probs: as of ``RejectionPicker.settle``.
    """
    own = target_probs.astype(np.float64)
    own[token] = 0.0  # it was rejected, so the target has less of it
    if draft_probs is None:
        return own
    drafted = np.frombuffer(draft_probs.probs, "<f4")[: len(own) if not draft_probs.ids else None]
    left = own.copy()
    places = np.frombuffer(draft_probs.ids, "<i4") if draft_probs.ids else np.arange(len(drafted))
    left[places] -= drafted
    np.maximum(left, 0.0, out=left)
    return left if left.any() else own  # equal but for rounding: nothing is left where nothing differs


def inverse(weights: Array, chance: float) -> int:
    """The entry that ``chance`` in [0, 1) falls on, each as likely as its weight says. Some weight is not 0."""
    sums = np.cumsum(weights)
    found = int(np.searchsorted(sums, chance * sums[-1], side="right"))
    return min(found, int(np.flatnonzero(weights)[-1]))
