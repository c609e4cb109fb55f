"""Rejection sampling: what is written has the target's probabilities, whatever the drafter's are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.compute import rejection
from p2ptrain.compute.picking import Picker
from p2ptrain.compute.rejection import INSTEAD, KEEP, RejectionPicker, inverse, kept, residual, uniform, weigh
from p2ptrain.core.serving import DraftProbs, Judged, Sampling

from .chances import p_value

REJECTION = Sampling(seed=3, method="rejection")
ENTRIES = 6


def rows(count: int, seed: int, *, spread: float = 1.0) -> torch.Tensor:
    """Logits, (count, ENTRIES)."""
    return spread * torch.randn(count, ENTRIES, generator=torch.Generator().manual_seed(seed))


def as_probs(values: torch.Tensor) -> DraftProbs:
    return DraftProbs(b"", values.numpy().tobytes())


TARGET = rows(1, 1)[0].softmax(-1)
DRAFTERS = {
    "good": (rows(1, 1)[0] + 0.3 * rows(1, 2)[0]).softmax(-1),
    "by chance": torch.full((ENTRIES,), 1 / ENTRIES),
    "another": (-rows(1, 1)[0]).softmax(-1),
    "few": torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0, 0.0]),
    "one": torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
}


def hundred_thousand(draft_probs: torch.Tensor, seed: int) -> Counter[int]:
    chances = np.array(list(probs_of(draft_probs).values()))
    drafts = np.random.default_rng(seed).choice(ENTRIES, 100_000, p=chances)
    found: Counter[int] = Counter()
    own, left = TARGET.numpy(), dict[int, Any]()
    for draw, token in enumerate(drafts.tolist()):
        if kept(float(own[token]), float(draft_probs[token]), uniform(seed, draw, KEEP)):
            found[token] += 1
            continue
        if token not in left:
            left[token] = rejection.residual(own, token, as_probs(draft_probs))
        found[inverse(left[token], uniform(seed, draw, INSTEAD))] += 1
    return found


def probs_of(row: torch.Tensor) -> dict[int, float]:
    return dict(enumerate((row.double() / row.double().sum()).tolist()))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_hundred_thousand_draws_have_the_targets_probabilities(name: str) -> None:
    assert p_value(hundred_thousand(DRAFTERS[name], 5), probs_of(TARGET)) > 0.01


def test_the_test_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a rejected draft something from all that the target has, and not from what it has more."""
    monkeypatch.setattr(rejection, "residual", lambda target_probs, token, draft_probs: target_probs)
    assert p_value(hundred_thousand(DRAFTERS["good"], 5), probs_of(TARGET)) < 1e-6


# ------------------------------------------------------------------------------------------- several drafts at a time

_TARGET = 0.5 * rows(1 + ENTRIES, 7)  # the first token, and the second one behind each
_DRAFTER = _TARGET + 0.8 * rows(1 + ENTRIES, 8)


def two_tokens(texts: int, settle: bool = True) -> Counter[tuple[int, ...]]:
    """The first two tokens of many texts, by a drafter that is ahead by two, and drafts anew where it was wrong. Text
    ``n`` has draws ``2n`` and ``2n + 1``, and both sides the same noise for them."""
    drafter, verifier = RejectionPicker(REJECTION), RejectionPicker(REJECTION)
    found: Counter[tuple[int, ...]] = Counter()
    for text in range(texts):
        draw, first = 2 * text, _DRAFTER[:1]
        (one,) = drafter.pick(first, draw)
        drafts = [(one, drafter.weighed()[0])]
        (two,) = drafter.pick(_DRAFTER[1 + one][None], draw + 1)
        drafts.append((two, drafter.weighed()[0]))
        logits = torch.stack([_TARGET[0], _TARGET[1 + one], torch.zeros(ENTRIES)])
        judged = verifier.judge(logits, draw, [each for each, _ in drafts], [each.weight for _, each in drafts])
        made = judged.tokens
        if judged.rejected:
            probs = drafts[len(made)][1].probs
            made = (*made, verifier.settle(probs if settle else None))
        if len(made) < 2:
            again = drafter.pick(_DRAFTER[1 + made[0]][None], draw + 1)
            weighed = drafter.weighed()[0]
            logits = torch.stack([_TARGET[1 + made[0]], torch.zeros(ENTRIES)])
            judged = verifier.judge(logits, draw + 1, again, [weighed.weight])
            made += judged.tokens or (verifier.settle(weighed.probs if settle else None),)
        found[made[:2]] += 1
    return found


def expected_two() -> dict[tuple[int, ...], float]:
    probs = _TARGET.double().softmax(-1)
    return {(one, two): float(probs[0, one] * probs[1 + one, two]) for one, two in product(range(ENTRIES), repeat=2)}


def test_two_tokens_that_follow_each_other_have_the_targets_probabilities() -> None:
    assert p_value(two_tokens(4000), expected_two()) > 0.01


def test_without_the_drafters_probabilities_they_have_not() -> None:
    """Which is why such draws are counted."""
    assert p_value(two_tokens(4000, settle=False), expected_two()) < 1e-6


# --------------------------------------------------------------------------------------------------------- the picker


def test_drafts_are_those_of_the_coupled_way_and_so_is_what_the_verifier_draws_itself() -> None:
    logits = rows(20, 4)
    coupled = Picker(replace(REJECTION, method="coupled")).pick(logits, 5)
    picker = RejectionPicker(REJECTION)
    assert picker.pick(logits, 5) == coupled
    certain = [float(row[token]) for row, token in zip(logits.softmax(-1), coupled, strict=True)]
    judged = picker.judge(logits, 5, coupled[:19], certain[:19])
    assert judged == Judged(coupled, rejected=False), "who draws from the same probabilities is always right"


def test_weights_are_what_tokens_were_drawn_with() -> None:
    sampling = replace(REJECTION, temperature=0.7, top_k=2, vocab_size=5)
    picker = RejectionPicker(sampling)
    tokens = picker.pick(rows(40, 6), 0)
    for token, weighed, row in zip(tokens, picker.weighed(), rows(40, 6), strict=True):
        best = (row[:5] / 0.7).topk(2)
        assert np.frombuffer(weighed.probs.ids, "<i4").tolist() == sorted(best.indices.tolist())
        probs = dict(
            zip(np.frombuffer(weighed.probs.ids, "<i4"), np.frombuffer(weighed.probs.probs, "<f4"), strict=True)
        )
        assert probs[token] == weighed.weight
        assert sum(probs.values()) == pytest.approx(1, abs=1e-6)


def test_rows_where_much_may_come_are_told_without_ids() -> None:
    assert weigh(torch.tensor([0.5, 0.25, 0.25, 0.0]), 1).probs.ids == b""
    few = weigh(torch.tensor([0.5, 0.0, 0.5, 0.0]), 2)
    assert few.probs == DraftProbs(np.array([0, 2], "<i4").tobytes(), np.array([0.5, 0.5], "<f4").tobytes())
    assert few.probs.nbytes == 16
    assert weigh(torch.tensor([0.0, 1.0, 0.0, 0.0]), 1).probs == DraftProbs.certain(1)


def test_what_is_left_of_the_target() -> None:
    own = np.array([0.5, 0.3, 0.2, 0.0], "f4")
    none = residual(own, 0, None)
    assert none == pytest.approx([0, 0.3, 0.2, 0])
    assert residual(own, 0, DraftProbs.certain(0)) == pytest.approx(none), "who is certain need not be asked"
    assert residual(own, 0, as_probs(torch.tensor([0.8, 0.0, 0.2]))) == pytest.approx([0, 0.3, 0, 0])
    assert residual(own, 0, as_probs(torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1]))) == pytest.approx([0, 0.2, 0.1, 0])
    assert residual(own, 0, as_probs(torch.tensor([0.5, 0.3, 0.2]))) == pytest.approx(none), "equal, but for rounding"


def test_what_a_chance_falls_on() -> None:
    weights = np.array([0.0, 2.0, 0.0, 1.0, 0.0])
    assert [inverse(weights, chance) for chance in (0.0, 0.66, 0.67, 1.0)] == [1, 1, 3, 3]


def test_chances_are_even_and_of_their_own() -> None:
    tenths = Counter(int(10 * uniform(1, draw, KEEP)) for draw in range(20_000))
    assert p_value(tenths, dict.fromkeys(range(10), 0.1)) > 0.01
    assert len({uniform(seed, draw, what) for seed, draw, what in product((1, 2), (1, 2), (KEEP, INSTEAD))}) == 8
