"""Conversations in windows: what is a target, where each begins, and what the model learns of them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer

from p2ptrain.compute.data import NO_TARGET, Corpus, DataSpec, load_corpus
from p2ptrain.compute.device import pick_device
from p2ptrain.compute.flat import OptimizerSpec
from p2ptrain.compute.local import LocalSpec
from p2ptrain.compute.model import ModelSpec, build_model
from p2ptrain.compute.recipe import ModelRecipe
from p2ptrain.compute.sampling import WindowSampler
from p2ptrain.compute.split_check import check_packs
from p2ptrain.compute.text import ChatFormat, ModelText, Turn
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.errors import ConfigError, UserError
from tests.compute.families import FAMILIES
from tests.compute.saving import save
from tests.compute.tiny_trainer import run_step, tiny, tiny_spec, tiny_trainer, validate_all

BYTES = Tokenizer.of_bytes()
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATIONS = [
    list(zip(["user", "assistant"] * 3, [f"q{index}", "a" * (index % 7) + "!", "?", f"{index}", ""], strict=False))
    for index in range(40)
]


MODEL = tiny(context=160)


def written(path: Path, conversations: list[list[tuple[str, str]]]) -> Path:
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in conversations]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def by_hand(talk: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """Bytes of a conversation up to its last answer, and which of them are the assistant's."""
    found: list[tuple[str, bool]] = [("User: ", False)]
    for (_, question), (_, answer) in zip(talk[0:-1:2], talk[1::2], strict=True):
        found += [(question + "\nAssistant:", False), (f" {answer}\nUser:", True), (" ", False)]
    found.pop()
    return list("".join(text for text, _ in found).encode()), [mine for text, mine in found for _ in text]


def corpus_of(path: Path, width: int) -> Corpus:
    return load_corpus(DataSpec(path=str(path), format="chat", sequence_tokens=width), BYTES)


def everything(corpus: Corpus) -> np.ndarray[Any, Any]:
    return np.sort(np.concatenate([corpus.training[:], corpus.validation]))


def trainer_of(path: Path, width: int, **changes: Any) -> Trainer:
    data = DataSpec(path=str(path), format="chat", sequence_tokens=width, validation_fraction=0.3)
    data = data.model_copy(update={"private": changes.pop("private", False)})
    return Trainer(ModelRecipe(tiny_spec(path, data=data, model=MODEL, **changes), pick_device("cpu", 1)))


def summed_losses(model: torch.nn.Module, talk: list[tuple[str, str]]) -> tuple[torch.Tensor, int]:
    """Of the answers of a conversation, alone in its window; and how many tokens they have."""
    ids, answers = by_hand(talk)
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    losses = F.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    return losses[torch.tensor(answers[1:])].sum(), sum(answers[1:])


def check_gradients(trainer: Trainer, model: torch.nn.Module, gradient: np.ndarray[Any, Any]) -> None:
    gradients = dict(model.named_parameters())
    for segment in trainer.built.flat.segments:
        mine = torch.from_numpy(gradient[segment.offset : segment.offset + segment.numel])
        theirs = gradients[segment.name].grad
        assert theirs is not None
        assert torch.allclose(mine.view(segment.shape), theirs, rtol=1e-4, atol=1e-6), segment.name


def test_each_conversation_is_somewhere_once_with_its_answers_as_targets(tmp_path: Path) -> None:
    corpus = corpus_of(written(tmp_path / "x.jsonl", CONVERSATIONS), 128)
    batch = corpus.batch(everything(corpus))
    assert batch.positions is not None
    found = []
    for inputs, targets, positions in zip(batch.inputs, batch.targets, batch.positions, strict=True):
        starts = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
        assert (targets != NO_TARGET).any(), "a window without a target would have no mean"
        for start, stop in pairwise(starts):
            mine = targets[start:stop]
            assert positions[start:stop].tolist() == list(range(stop - start))
            if (mine != NO_TARGET).any():
                length = 1 + int(np.flatnonzero(mine != NO_TARGET)[-1])
                ids = [*inputs[start : start + length].tolist(), int(mine[length - 1])]
                found.append((bytes(ids), [False, *(mine[:length] != NO_TARGET).tolist()]))
    expected = [by_hand(talk) for talk in CONVERSATIONS]
    assert sorted(found) == sorted((bytes(ids), marks) for ids, marks in expected)
    used = sum(len(ids) for ids, _ in expected)
    assert used / len(corpus.tokens) > 0.8, "conversations share windows"


def test_what_does_not_fit_is_cut_and_counted(tmp_path: Path) -> None:
    long = [[("user", "x" * 90), ("assistant", "y")], [("user", "x"), ("assistant", "y" * 90)]]
    corpus = corpus_of(written(tmp_path / "x.jsonl", [*long, *CONVERSATIONS]), 64)
    assert corpus.note == (
        "2 of 42 conversations have more than data.sequence_tokens and are cut; "
        "1 have no answer in what is left, or an empty one, and are left out"
    )
    cut = bytes(corpus.tokens[:65])
    assert cut == b"User: x\nAssistant: " + b"y" * (65 - 19)


def test_the_reason_for_too_few_sequences_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [[("user", "x" * 90), ("assistant", "y")]] * 40)
    with pytest.raises(
        ConfigError, match=r"too few tokens.*; 40 of 40 conversations have more than .*40 have no answer"
    ):
        corpus_of(path, 64)


def test_the_limit_counts_whole_conversations(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", CONVERSATIONS)
    written(tmp_path / "y.jsonl", CONVERSATIONS[:11])
    most = sum(len(by_hand(talk)[0]) for talk in CONVERSATIONS[:12]) - 1
    spec = DataSpec(path=str(path), format="chat", sequence_tokens=64, limit_bytes=most)
    assert load_corpus(spec, BYTES).digest == corpus_of(tmp_path / "y.jsonl", 64).digest


def model_with(root: Path, template: str, **special: str) -> Tokenizer:
    backend = Backend(BPE(vocab={**BYTES.backend.get_vocab(), "Ġa": 256}, merges=[("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    backend.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    (root / "chat_template.jinja").write_text(template)
    return Tokenizer.of_directory(root)


def test_the_tokens_are_those_of_the_models_template(tmp_path: Path) -> None:
    tokenizer = model_with(tmp_path, CHATML)
    path = written(
        tmp_path / "x.jsonl", [[("system", "é"), ("user", "an a"), ("assistant", "a é a"), ("user", "x")]] * 4
    )
    corpus = load_corpus(DataSpec(path=str(path), format="chat", sequence_tokens=80), tokenizer)
    messages = json.loads(path.read_text().splitlines()[0])["messages"][:3]
    ids = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, return_dict=False)
    batch = corpus.batch(everything(corpus)[:1])
    assert batch.inputs[0, : len(ids)].tolist() == list(ids)
    learned = [int(token) for token in batch.targets[0, : len(ids)] if token != NO_TARGET]
    assert tokenizer.backend.decode(learned, skip_special_tokens=False) == "a é a<|im_end|>\n"


QWEN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ message.content.split('</think>')[-1].strip() }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The rule of Qwen3's: only the last answer has a thought, here an empty one."""


def learned_texts(corpus: Corpus, tokenizer: Tokenizer) -> set[tuple[str, str]]:
    """Of each text in the corpus: all of it, and what of it are targets."""
    found = set()
    batch = corpus.batch(everything(corpus))
    assert batch.positions is not None
    for inputs, targets, positions in zip(batch.inputs, batch.targets, batch.positions, strict=True):
        for start, stop in pairwise([*np.flatnonzero(positions == 0).tolist(), len(positions)]):
            answers = np.flatnonzero(targets[start:stop] != NO_TARGET)
            if len(answers):
                ids = [*inputs[start : start + answers[-1] + 1].tolist(), int(targets[start + answers[-1]])]
                marked = [int(token) for token in targets[start:stop] if token != NO_TARGET]
                decode = partial(tokenizer.backend.decode, skip_special_tokens=False)
                found.add((decode(ids), decode(marked)))
    return found


def test_where_a_template_changes_earlier_turns_each_answer_is_learned_as_it_is_prompted(tmp_path: Path) -> None:
    tokenizer = model_with(tmp_path, QWEN)
    talk = [("user", "q"), ("assistant", "<think>why</think> a"), ("user", "r"), ("assistant", "b")]
    path = written(tmp_path / "x.jsonl", [talk] * 4)
    corpus = load_corpus(DataSpec(path=str(path), format="chat", sequence_tokens=160), tokenizer)
    auto = AutoTokenizer.from_pretrained(tmp_path)
    expected = set()
    for stop in (1, 3):
        messages = [{"role": role, "content": text} for role, text in talk]
        prompt = auto.apply_chat_template(messages[:stop], add_generation_prompt=True, tokenize=False)
        text = auto.apply_chat_template(messages[: stop + 1], tokenize=False)
        expected.add((text, text[len(prompt) :]))
    assert learned_texts(corpus, tokenizer) == expected
    assert {answer for _, answer in expected} == {f"<think>\n\n</think>\n\n{text}<|im_end|>\n" for text in "ab"}
    assert corpus.note.startswith("the chat template changes earlier turns, so 4 conversations make 8 texts")


def test_a_conversation_whose_texts_are_large_together_is_read(tmp_path: Path) -> None:
    talk = [(("user", "assistant")[number % 2], "a" if number < 2 else "word " * 3000) for number in range(100)]
    path = written(tmp_path / "x.jsonl", [*CONVERSATIONS, talk])  # one text has 1.5 MB, and those of all turns 75 MB
    assert corpus_of(path, 128).note == "1 of 41 conversations have more than data.sequence_tokens and are cut"


def test_an_answer_of_weight_0_is_read_and_not_learned(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for first, second, learned in ((0, 1, " two\nUser:"), (1, 0.0, " one\nUser:"), (None, 1, " one\nUser: two\nUser:")):
        pairs = [[("user", "q"), ("assistant", text)] for text in ("one", "two")]
        talk = [{"role": role, "content": text} for role, text in chain(*pairs)]
        talk[1]["weight"], talk[3]["weight"] = first, second  # type: ignore[assignment]
        path.write_text("\n".join([json.dumps({"messages": talk})] * 8))
        [(text, marked)] = learned_texts(corpus_of(path, 64), BYTES)
        assert marked == learned
        assert text.startswith("User: q\nAssistant: one\nUser:")
    talk[1]["weight"] = talk[3]["weight"] = 0  # type: ignore[assignment]
    path.write_text(path.read_text() + "\n" + json.dumps({"messages": talk}))
    assert "1 have no answer" in corpus_of(path, 64).note
    talk[3]["weight"] = 2  # type: ignore[assignment]
    path.write_text(json.dumps({"messages": talk}))
    with pytest.raises(UserError, match="the weight 2, not 0 or 1, in message 4"):
        corpus_of(path, 64)


def test_a_token_with_characters_of_the_prompt_and_of_the_answer_is_learned(tmp_path: Path) -> None:
    """The prompt of this template ends with a space, which is one token with the answer's first letter."""
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    tokenizer = model_with(tmp_path, template + "{% if add_generation_prompt %}assistant: {% endif %}")
    path = written(tmp_path / "x.jsonl", [[("user", "b"), ("assistant", "abc")]] * 8)
    corpus = load_corpus(DataSpec(path=str(path), format="chat", sequence_tokens=32), tokenizer)
    assert learned_texts(corpus, tokenizer) == {("user: b\nassistant: abc\n", " abc\n")}


def test_the_date_of_a_template_is_the_jobs(tmp_path: Path) -> None:
    tokenizer = model_with(tmp_path, "{{ strftime_now('%d %b %Y %H:%M') }}\n" + CHATML)
    path = written(tmp_path / "x.jsonl", CONVERSATIONS)
    spec = DataSpec(path=str(path), format="chat", sequence_tokens=96, date="2026-03-09")
    corpus = load_corpus(spec, tokenizer)
    assert all(text.startswith("09 Mar 2026 00:00\n<|im_start|>") for text, _ in learned_texts(corpus, tokenizer))
    assert load_corpus(spec, tokenizer).digest == corpus.digest
    assert load_corpus(spec.model_copy(update={"date": "2026-03-10"}), tokenizer).digest != corpus.digest
    before = datetime.now(UTC)
    text = tokenizer.backend.decode(ChatFormat(tokenizer).ids([Turn("user", "q")]))
    days = [f"{moment:%d %b %Y %H:%M}" for moment in (before, datetime.now(UTC))]
    assert text.startswith(tuple(days)), "in serving: now, in UTC"


def test_a_template_that_prompts_otherwise_than_it_writes_is_refused(tmp_path: Path) -> None:
    """There is no answer that the model could learn to give to its prompt."""
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    path = written(tmp_path / "x.jsonl", CONVERSATIONS)
    for text, why in ((template, "behind the prompt for it"), ("{{ raise_exception('never') }}", "never")):
        tokenizer = model_with(tmp_path, text)
        with pytest.raises(ConfigError, match=why) as caught:
            load_corpus(DataSpec(path=str(path), format="chat", sequence_tokens=64), tokenizer)
        assert caught.value.remedy


def test_the_plain_format_is_prompted_as_it_is_trained(tmp_path: Path) -> None:
    """Also where the tokenizer adds tokens before and after a text."""
    tokenizer = model_with(tmp_path, "")
    (tmp_path / "chat_template.jinja").unlink()
    ids = {f"<|im_{name}|>": tokenizer.backend.token_to_id(f"<|im_{name}|>") for name in ("start", "end")}
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[*ids.items()]
    )
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    form = ChatFormat(Tokenizer.of_directory(tmp_path))
    assert form.is_plain
    [(text, bounds)] = form.training_texts([{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}])
    trained = form.encode([text])[0].ids
    prompt = form.ids([Turn("user", "q")])
    assert trained[: len(prompt)] == prompt
    assert form.tokenizer.backend.decode(prompt, skip_special_tokens=False) == "<|im_start|>User: q\nAssistant:"
    assert bounds == [len("User: q\nAssistant:"), len(text)]


def test_a_model_without_a_template_is_saved_with_the_one_that_it_was_trained_with(tmp_path: Path) -> None:
    model = tmp_path / "model"
    build_model(MODEL, 256, seed=3).save_pretrained(model)
    BYTES.backend.save(str(model / "tokenizer.json"))
    path = written(tmp_path / "x.jsonl", CONVERSATIONS)
    for form in ("text", "chat"):
        data = DataSpec(path=str(path), format=form, sequence_tokens=64)
        save(tiny_trainer(path, data=data, model=ModelSpec(path=model)), tmp_path / form)
    assert not (tmp_path / "text" / "chat_template.jinja").exists()
    auto = AutoTokenizer.from_pretrained(tmp_path / "chat")
    messages = [{"role": "user", "content": "q"}]
    ids = auto.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    saved = ChatFormat(Tokenizer.of_directory(tmp_path / "chat"))
    assert saved.ids([Turn("user", "q")]) == list(ids)
    assert saved.is_plain


def test_conversations_that_a_template_refuses_are_bad_rows(tmp_path: Path) -> None:
    tokenizer = model_with(
        tmp_path, "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    )
    path = written(tmp_path / "x.jsonl", [*CONVERSATIONS, [("system", "s"), *CONVERSATIONS[0]]])
    corpus = load_corpus(DataSpec(path=str(path), format="chat", sequence_tokens=64, bad_rows=0.1), tokenizer)
    assert "1 of 41 rows of the data are left out" in corpus.note
    assert "x.jsonl:41 is not usable: the chat template of" in corpus.note


def test_a_checkpoint_brings_the_plain_template(tmp_path: Path) -> None:
    """So transformers writes the prompt on which the model was trained, and that of `p2ptrain chat`."""
    BYTES.save(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    turns = [Turn("system", "s"), Turn("user", "q"), Turn("assistant", "a"), Turn("user", "q2")]
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    ids = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert bytes(ids) == b"s\n\nUser: q\nAssistant: a\nUser: q2\nAssistant:"
    form = ChatFormat(ModelText(tmp_path).tokenizer)
    assert form.ids(turns) == list(ids)
    trained, bounds = form.training_texts([*messages, {"role": "assistant", "content": "b"}])[0]
    assert trained.encode().startswith(bytes(ids))
    assert trained[bounds[2] :] == " b" + form.stop[0], "what ends an answer is learned"


ONE_EACH = [[("user", f"{index:02}"), ("assistant", "a" * (index * index % 19 + 1))] for index in range(40)]
"""Conversations that fill a window of 48 tokens each, so a loop needs no packing; with answers of different lengths."""


@pytest.mark.parametrize(("micro_batches", "sequences"), [(8, 1), (4, 2), (1, 8)])
def test_the_loss_and_its_gradient_are_the_mean_over_all_targets_however_a_step_is_cut(
    tmp_path: Path, micro_batches: int, sequences: int
) -> None:
    cut = {"micro_batches": micro_batches, "micro_batch_sequences": sequences, "validation_batches": 1}
    path = written(tmp_path / "x.jsonl", ONE_EACH)
    trainer = trainer_of(path, 48, **cut)
    corpus = trainer.batches.corpus
    assert len(everything(corpus)) == len(ONE_EACH)
    model = build_model(MODEL, 256, seed=3)
    windows = corpus.training[WindowSampler(len(corpus.training), 3).numbered(0, 8)]
    found = [summed_losses(model, ONE_EACH[window]) for window in windows]
    assert len({number for _, number in found}) > 3
    mean = torch.stack([total for total, _ in found]).sum() / sum(number for _, number in found)
    mean.backward()  # type: ignore[no-untyped-call]
    trainer.begin_step(0)
    for index in range(micro_batches):
        trainer.micro_batch(0, index)
    trainer.finish_gradients()
    check_gradients(trainer, model, trainer.reduce_buffer)
    assert trainer.apply(0, 1.0).loss == pytest.approx(mean.item(), rel=1e-6)
    assert run_step(trainer_of(path, 48, exact=True, **cut), 0, micro_batches) == pytest.approx(mean.item(), rel=1e-6)
    slow = OptimizerSpec(lr=1e-12)  # so the inner steps of 'local' have the losses of one step
    local = trainer_of(path, 48, local=LocalSpec(), optimizer=slow, **cut)
    assert run_step(local, 0, micro_batches) == pytest.approx(mean.item(), rel=1e-6)


def test_members_with_private_text_learn_the_mean_over_the_targets_of_all(tmp_path: Path) -> None:
    """None knows how many the others have. One has short answers, and 3 of 4 micro-batches."""
    texts = [[talk for talk in ONE_EACH if (len(talk[1][1]) < 9) is short] for short in (True, False)]
    plain = OptimizerSpec(name="sgd", lr=1.0, warmup_steps=0, weight_decay=0.0, clip_norm=0.5)
    members = [
        trainer_of(written(tmp_path / f"{number}.jsonl", text), 48, private=True, optimizer=plain)
        for number, text in enumerate(texts)
    ]
    model = build_model(MODEL, 256, seed=3)
    nats, targets, total = torch.zeros(()), 0, np.zeros(members[0].reduce_buffer.shape, np.float32)
    for trainer, text, (first, count) in zip(members, texts, [(0, 3), (3, 1)], strict=True):
        trainer.begin_step(0, first, count)
        for index in range(first, first + count):
            trainer.micro_batch(0, index)
        trainer.finish_gradients()
        total += trainer.reduce_buffer
        corpus = trainer.batches.corpus
        order = WindowSampler(len(corpus.training), 3).numbered(0, 2 * count)
        for window in corpus.training[order]:
            part, number = summed_losses(model, text[window])
            nats, targets = nats + part, targets + number
    (nats / targets).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert norm > 0.5, "the clipping was exercised"
    trainer, before = members[1], members[1].built.flat.parameters.clone()
    trainer.reduce_buffer[:] = total
    applied = trainer.apply(0, trainer.partial_square_sum(0, len(total)))
    assert (applied.loss, applied.grad_norm) == pytest.approx(((nats / targets).item(), norm.item()), rel=1e-5)
    check_gradients(trainer, model, ((before - trainer.built.flat.parameters) / plain.lr_at(0, 30)).numpy())
    for wrong in (-0.1, 1.1, np.nan):  # the share of targets in the sum is not believed
        trainer.reduce_buffer[-2] = wrong
        assert np.isnan(trainer.partial_square_sum(0, len(total)))


def test_packed_losses_are_those_of_each_conversation_alone(tmp_path: Path) -> None:
    trainer = trainer_of(written(tmp_path / "x.jsonl", CONVERSATIONS), 160)
    batch = trainer.batches.batch(everything(trainer.batches.corpus))
    assert len(batch.inputs) < len(CONVERSATIONS) / 2
    alone = 0.0
    targets = 0
    with torch.no_grad():
        packed = float(trainer.pipeline.compute(batch.inputs, batch))
        for talk in CONVERSATIONS:
            total, number = summed_losses(trainer.built.flat.model, talk)
            alone, targets = alone + float(total), targets + number
    assert int((batch.targets != NO_TARGET).sum()) == targets
    assert abs(packed / targets - alone / targets) < 1e-5
    losses_sum, number = validate_all(trainer)
    assert 0 < number < trainer.data.validation_batches * trainer.data.tokens_per_micro_batch
    assert losses_sum / number == pytest.approx(alone / targets, rel=0.1)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("falcon")])
def test_most_families_keep_conversations_apart(name: str) -> None:
    model_type, sizes = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **sizes)
    check_packs(config, split=False)
    check_packs(config, split=True)


@pytest.mark.parametrize("name", ["bloom", "falcon", "lstm"])
def test_an_architecture_that_mixes_them_is_refused(name: str) -> None:
    config = AutoConfig.for_model(
        name, vocab_size=97, hidden_size=32, num_hidden_layers=2, n_head=2, num_attention_heads=2
    )
    with pytest.raises(ConfigError, match=f"a '{name}' model cannot train on conversations") as caught:
        check_packs(config, split=False)
    assert "llama" in caught.value.remedy
