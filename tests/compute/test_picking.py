"""Many rows at once, and draws made again, against transformers' warpers and ``multinomial`` one row at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopPLogitsWarper,
)

from p2ptrain.compute import picking
from p2ptrain.compute.picking import _NO_IDS, MAX_STATES, Picker, _exponential, _remove_tail, make_warpers
from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.serving import Pass, Sampling, mask_bytes

SAMPLINGS = [
    Sampling(seed=1),
    Sampling(temperature=0.8, top_k=50, seed=2),
    Sampling(temperature=1.1, top_k=50, top_p=0.9, seed=3),
    Sampling(temperature=0.7, top_p=0.6, seed=2**63),
    Sampling(top_k=1, top_p=0.5, seed=5),
    Sampling(top_k=10_000, top_p=0.99, seed=6),
]


def one_by_one(logits: torch.Tensor, sampling: Sampling) -> list[int]:
    """As ``generate`` does: all warpers, then ``multinomial``, for each row in turn."""
    generator = torch.Generator("cpu").manual_seed(sampling.seed)
    made = []
    for row in logits.float():
        probabilities = make_warpers(sampling)(_NO_IDS, row[None].clone()).softmax(-1)  # type: ignore[arg-type]
        made.append(int(torch.multinomial(probabilities, num_samples=1, generator=generator)))
    return made


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("vocab_size", [7, 20_011])
def test_rows_at_once_are_rows_one_by_one(vocab_size: int, sampling: Sampling) -> None:
    logits = 4 * torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    wanted = one_by_one(logits, sampling)
    picker = Picker(sampling)
    assert [token for start in range(0, 40, 9) for token in picker.pick(logits[start : start + 9], start)] == wanted


@pytest.mark.parametrize("sampling", SAMPLINGS[1:3], ids=str)
@pytest.mark.parametrize("max_states", [MAX_STATES, 3, 1])
def test_going_back_in_draws_is_exact(sampling: Sampling, max_states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a verifier does: k + 1 rows, of which only the first few count."""
    monkeypatch.setattr(picking, "MAX_STATES", max_states)
    logits = 3 * torch.randn(150, 211, generator=torch.Generator().manual_seed(9))
    wanted = one_by_one(logits, sampling)
    rng = random.Random(max_states)
    picker = Picker(sampling)
    sample_index = 0
    while sample_index < len(wanted):
        rows = logits[sample_index : sample_index + rng.choice([1, 5, 17])]
        assert list(picker.pick(rows, sample_index)) == wanted[sample_index : sample_index + len(rows)]
        sample_index += rng.randrange(1, len(rows) + 1)
        assert len(picker._states) <= max_states
    for sample_index in [149, 86, 0, 64, 1]:
        assert picker.pick(logits[sample_index : sample_index + 1], sample_index) == (wanted[sample_index],)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_the_nucleus_of_a_few_is_that_of_all(dtype: torch.dtype, top_p: float) -> None:
    """bf16 has so few numbers that many entries are equal."""
    generator = torch.Generator().manual_seed(4)
    for scale in (0.0, 0.1, 2.0, 20.0):
        scores = (scale * torch.randn(12, 1_000, generator=generator)).to(dtype).float()
        left = make_warpers(Sampling(top_k=50))(_NO_IDS, scores)  # type: ignore[arg-type]
        wanted = TopPLogitsWarper(top_p)(_NO_IDS, left.clone())  # type: ignore[arg-type]
        assert torch.equal(_remove_tail(left.clone(), top_p), wanted)
    nothing = torch.full((2, 1_000), -torch.inf)
    assert torch.equal(_remove_tail(nothing.clone(), top_p), nothing)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), *SAMPLINGS], ids=str)
def test_a_vocabulary_of_another_size_has_the_same_draws(sampling: Sampling) -> None:
    """A drafter's may be padded otherwise than the verifier's: what both know has the same noise."""
    logits = 2 * torch.randn(40, 211, generator=torch.Generator().manual_seed(10))
    wanted = Picker(sampling).pick(logits, 0)
    drawn_for = replace(sampling, vocab_size=211)
    more = torch.cat([logits, torch.full((40, 13), 50.0)], 1)
    assert Picker(drawn_for).pick(more, 0) == wanted, "what the verifier does not have is not picked"
    fewer = logits.clone()
    fewer[:, 198:] = -torch.inf
    assert Picker(drawn_for).pick(logits[:, :198], 0) == Picker(sampling).pick(fewer, 0)
    assert Picker(replace(sampling, vocab_size=0)).pick(logits, 0) == wanted


@pytest.mark.parametrize("vocab_size", [0, 900, 2_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=0.3, top_k=3), *SAMPLINGS], ids=str
)
def test_rows_of_selected_entries_are_picked_as_whole_rows(
    sampling: Sampling, dtype: torch.dtype, vocab_size: int
) -> None:
    """As on a GPU, with equal entries at the maximum and at the last of the k, a few and too many."""
    generator = torch.Generator().manual_seed(8)
    sampling = replace(sampling, vocab_size=vocab_size)
    for spread in (0.001, 0.1, 5.0):
        logits = (16 + spread * torch.randn(20, 1_000, generator=generator)).to(dtype)
        whole, selected = Picker(sampling), Picker(sampling, selects_first=True)
        assert selected.pick(logits, 0) == whole.pick(logits, 0)
        rows = [whole._warp(_NO_IDS, picker._scores(logits)) for picker in (whole, selected)]  # type: ignore[arg-type]
        assert torch.equal(*rows)


def test_entries_that_the_temperature_makes_equal_are_all_picked_from() -> None:
    sampling = Sampling(temperature=0.9, top_k=3)
    above = torch.arange(31.0, 32.0, 2.0**-19)  # every float32 there
    below = above.nextafter(torch.zeros(()))
    higher, lower = torch.stack([above, below])[:, (above / 0.9 == below / 0.9).nonzero()[0, 0]]
    logits = torch.cat([higher.expand(40), lower.expand(100), torch.zeros(1_000)])[None]
    whole, selected = (Picker(sampling, selects_first=selects)._scores(logits) for selects in (False, True))
    assert torch.equal(*(make_warpers(sampling)(_NO_IDS, scores) for scores in (whole, selected)))  # type: ignore[arg-type]


def test_few_entries_of_a_row_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 30_000, generator=torch.Generator().manual_seed(8))
    copied: list[int] = []
    to_host = picking._to_host

    def counting(values: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        copied.append(values.numel())
        return to_host(values, indices)

    monkeypatch.setattr(picking, "_to_host", counting)
    Picker(Sampling(top_k=50), selects_first=True).pick(logits, 0)
    assert copied == [2 * (50 + picking._TIES)]
    assert Picker(Sampling(top_k=50))._selected_scores(torch.zeros(1, 30_000)) is None, "all entries are equal"


@pytest.mark.parametrize("entries", [4096, 4097, 151_936])
def test_numbers_that_are_drawn_at_once_are_those_of_torch(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, the generator's state behind them, too; and where a build of torch draws otherwise, as it does."""
    assert picking._is_uniform_equal(), "this build draws otherwise: drawing is slow, and as exact"
    ours, theirs, slowly = (torch.Generator().manual_seed(entries) for _ in range(3))
    for _ in range(5):
        wanted = torch.empty(entries).exponential_(1, generator=theirs)
        assert torch.equal(_exponential(entries, ours), wanted)
        assert torch.equal(ours.get_state(), theirs.get_state())
        with monkeypatch.context() as patched:
            patched.setattr(picking, "_is_uniform_equal", lambda: False)
            assert torch.equal(_exponential(entries, slowly), wanted)


PROCESSED = [
    Sampling(temperature=0.0, repetition_penalty=1.6, presence_penalty=0.7),
    Sampling(temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.2, seed=2),
    Sampling(temperature=1.3, min_p=0.02, presence_penalty=0.5, frequency_penalty=-0.4, seed=3),
    Sampling(temperature=1.5, top_k=30, min_p=0.1, logit_bias=((3, 5.0), (9, -100.0), (99999, 1.0)), seed=4),
]


def processed(logits: torch.Tensor, ids: list[int], prompt: int, sampling: Sampling, allowed: list[list[int]]) -> int:
    """One token, by transformers' processors, OpenAI's formula, and its warpers, in this order."""
    known = torch.tensor([ids])
    row = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(known, logits[None].float().clone())  # type: ignore[arg-type]
    for token in range(row.shape[1]):
        count = ids[prompt:].count(token)
        row[0, token] -= count * sampling.frequency_penalty + float(count > 0) * sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        row[0, token : token + 1] += bias
    if allowed:
        row = PrefixConstrainedLogitsProcessor(lambda _, text: allowed[len(text) - prompt], 1)(known, row)  # type: ignore[arg-type]
    if not sampling.temperature:
        return int(row.argmax())
    row = make_warpers(sampling)(_NO_IDS, row)  # type: ignore[arg-type]
    if sampling.min_p:
        row = MinPLogitsWarper(sampling.min_p)(_NO_IDS, row)
    generator = torch.Generator("cpu").manual_seed(sampling.seed)
    for _ in ids[prompt:]:
        _exponential(row.shape[1], generator)
    return int(torch.multinomial(row.softmax(-1), num_samples=1, generator=generator))


@pytest.mark.parametrize("sampling", PROCESSED, ids=str)
@pytest.mark.parametrize("is_masked", [False, True])
def test_penalties_bias_and_masks_are_those_of_transformers(sampling: Sampling, is_masked: bool) -> None:
    """In passes of several rows, some of which are wrong drafts and come again."""
    vocab_size, rng, picker = 211, random.Random(1), Picker(sampling)
    logits = 3 * torch.randn(60, vocab_size, generator=torch.Generator().manual_seed(9))
    ids, prompt, known = [5, 3, 3, 200, 7], 5, 0
    allowed = [sorted(rng.sample(range(vocab_size), rng.choice([3, 150]))) for _ in range(80)] if is_masked else []
    while len(ids) < 45:
        drafts = [rng.randrange(vocab_size) for _ in range(rng.choice([0, 1, 4]))]
        drafts = [processed(logits[len(ids)], ids, prompt, sampling, allowed), *drafts][: len(drafts)]
        text, keep = [*ids, *drafts], len(ids) - 1
        rows = range(len(ids), len(text) + 1)
        masks = bytearray(mask_bytes(vocab_size) * len(rows) * is_masked)
        for row, ends in enumerate(rows):
            for token in allowed[ends - prompt] if is_masked else ():
                masks[row * mask_bytes(vocab_size) + token // 8] |= 1 << token % 8
        history = encode_ids(text[min(known, keep) :])
        work = Pass(
            keep,
            memoryview(b""),
            len(text) - keep,
            "ids",
            "fp32",
            samples=len(rows),
            sample_index=len(ids) - prompt,
            history=history,
            masks=bytes(masks),
        )
        picker.check_untrusted(work, vocab_size)
        wanted = [processed(logits[ends], text[:ends], prompt, sampling, allowed) for ends in rows]
        assert list(picker.pick_pass(logits[rows.start : rows.stop], work)) == wanted
        known = len(text)
        ids.append(wanted[0])
        if drafts and drafts[0] == wanted[0]:
            ids.append(wanted[1])


def test_history_or_masks_that_do_not_fit_are_refused() -> None:
    picker = Picker(Sampling(repetition_penalty=2.0))
    work = Pass(2, memoryview(b""), 2, "ids", "fp32", samples=2, sample_index=1, history=encode_ids([1, 2, 3, 4]))
    picker.check_untrusted(work, 40)
    for changes in (
        {"history": encode_ids([3, 4])},  # the ids before them are not known
        {"history": encode_ids([1, 2, 3, 40])},
        {"history": encode_ids([0, 1, 2, 3, 4])},
        {"history": encode_ids([1, 2, 3, 4])[:-1]},
        {"masks": bytes(mask_bytes(40))},
    ):
        with pytest.raises(ProtocolError):
            picker.check_untrusted(replace(work, **changes), 40)
