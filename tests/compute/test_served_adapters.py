"""LoRA adapters that share a model and its passes, against peft with that adapter, and each against itself alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.compute.served_adapters import LowRankFactors
from p2ptrain.compute.served_part import ServedPart, load_whole
from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import UserError
from p2ptrain.core.serving import BLOCK_POSITIONS, Pass, Ran, Sampling, hash_blocks
from tests.run_one import open_session, result_of

from .families import VOCAB, generated, make, make_unsplit
from .kernel_recorder import KernelRecorder
from .test_adapter import adapted
from .test_served_part import Client, prompt

GREEDY = Sampling(temperature=0)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft calls it
FAMILIES: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    "llama": (["q_proj", "v_proj", "down_proj"], ["k_proj", "lm_head"], {}),
    "gpt2": (["c_attn"], ["c_proj"], {"fan_in_fan_out": True, "use_rslora": True}),
    "qwen3_moe": (["o_proj"], ["q_proj"], {}),
    "falcon": (["query_key_value"], ["dense"], {}),  # one session at a time
    "mamba": (["in_proj"], ["x_proj"], {}),  # does not split
}


class Served:
    """A model of a family with the adapters ``one`` and ``two``. ``peft``: by adapter, and "" without one."""

    def __init__(self, family: str, root: Path) -> None:
        base = root / "base"
        (make_unsplit if family == "mamba" else make)(family, base)
        *targets, settings = FAMILIES[family]
        self.peft = {
            name: adapted(base, root / name, each, seed=seed, **settings).eval()
            for seed, (name, each) in enumerate(zip(("one", "two"), targets, strict=True))
        }
        self._base = base
        self.part = self.load()

    def load(self) -> ServedPart:
        return load_whole(self._base, adapters={name: self._base.parent / name for name in self.peft})

    def log_probabilities(self, adapter: str, ids: Sequence[int]) -> torch.Tensor:
        """Of each id but the first, after those before it."""
        model = self.peft[adapter or "one"]
        with torch.no_grad():
            if adapter:
                logits = model(torch.tensor([ids])).logits[0]
            else:
                with model.disable_adapter():
                    logits = model(torch.tensor([ids])).logits[0]
        return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    return cache(lambda family: Served(family, tmp_path_factory.mktemp(family)))


def scored(ids: Sequence[int], keep: int, stop: int) -> Pass:
    """The positions [keep, stop) of a text, each with the score of the next one."""
    new = ids[keep:stop]
    return Pass(keep, memoryview(encode_ids(new)), len(new), "ids", "fp32", 1, 0, tuple(ids[keep + 1 : stop + 1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_session_has_the_numbers_of_peft_with_its_adapter(served: Callable[[str], Served], family: str) -> None:
    model = served(family)
    texts = {name: [(7 * at * at + len(name)) % VOCAB for at in range(24)] for name in ("", "one", "two")}
    for name in texts:
        open_session(model.part, f"a{name}", positions=64, sampling=GREEDY, adapter=name)
    ran = model.part.run({f"a{name}": scored(ids, 0, len(ids) - 1) for name, ids in texts.items()})
    for name, ids in texts.items():
        result = ran[f"a{name}"]
        assert isinstance(result, Ran)
        found = torch.from_numpy(np.frombuffer(result.scores, np.float32).copy())
        assert torch.allclose(found, model.log_probabilities(name, ids), rtol=0, atol=1e-5), name
    said = {}
    for name, reference in model.peft.items():
        said[name] = Client([model.part], f"b{name}", GREEDY, adapter=name).say(prompt(8), 12)
        assert said[name] == generated(reference, prompt(8), 12, GREEDY)
    assert said["one"] != said["two"]


def runs(part: ServedPart, texts: dict[str, tuple[str, list[int]]], *, together: bool, seed: int) -> dict[str, bytes]:
    """The scores of each text, whose passes have random numbers of rows, some of them after a rollback. ``texts``: by
    session, the adapter and the ids."""
    draws = {session: random.Random(f"{seed} {session}") for session in texts}
    for session, (adapter, _) in texts.items():
        open_session(part, session, positions=BLOCK_POSITIONS * 2, sampling=GREEDY, adapter=adapter)
    done, scores = dict.fromkeys(texts, 0), {session: [b""] * len(ids) for session, (_, ids) in texts.items()}
    while left := [session for session, (_, ids) in texts.items() if done[session] < len(ids) - 1]:
        batch = {}
        for session in left if together else left[:1]:
            ids, draw = texts[session][1], draws[session]
            keep = max(0, done[session] - draw.choice([0, 0, 3]))
            stop = min(len(ids) - 1, max(done[session], keep) + draw.choice([1, 1, 2, 5, 30]))
            batch[session] = scored(ids, keep, stop)
        for session, ran in part.run(batch).items():
            assert isinstance(ran, Ran)
            work = batch[session]
            for at in range(work.count):
                scores[session][work.keep + at] = ran.scores[4 * at : 4 * at + 4]
            done[session] = work.keep + work.count
    for session in texts:
        part.close(session)
    return {session: b"".join(each) for session, each in scores.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_batch_of_several_adapters_has_the_bits_of_each_session_alone(
    served: Callable[[str], Served], family: str
) -> None:
    part = served(family).part
    draw = random.Random(1)
    texts = {
        f"s{number}": (adapter, [draw.randrange(VOCAB) for _ in range(90)])
        for number, adapter in enumerate(["", "one", "two", "one", ""])
    }
    alone = runs(part, texts, together=False, seed=3)
    assert runs(part, texts, together=True, seed=3) == alone


def test_captured_passes_of_each_adapter_write_its_text(served: Callable[[str], Served]) -> None:
    """As on a GPU, where each adapter has captures of its own."""
    names, part, recorder = ("", "one", "two"), served("llama").load(), KernelRecorder()
    expected = [Client([part], f"usual {name}", GREEDY, adapter=name).say(prompt(8), 16) for name in names]
    part.capture_passes(recorder)
    clients = [Client([part], f"captured {name}", GREEDY, adapter=name) for name in names]
    said = [[*client.run(prompt(8))] for client in clients]
    while len(said[0]) < len(expected[0]):
        batch = {
            client.name: Pass(client.length, memoryview(encode_ids(text[-1:])), 1, "ids", "fp32", 1, len(text))
            for client, text in zip(clients, said, strict=True)
        }
        ran = part.run(batch)
        for client, text in zip(clients, said, strict=True):
            text += result_of(ran[client.name]).tokens
            client.length += 1
    assert said == expected
    assert (recorder.captures, expected[0] != expected[1] != expected[2]) == (3, True)


def test_sessions_of_different_adapters_share_no_blocks(served: Callable[[str], Served]) -> None:
    part = served("llama").part
    ids = [at % VOCAB for at in range(BLOCK_POSITIONS)]
    hashes = hash_blocks(ids)
    open_session(part, "first", positions=128, sampling=GREEDY, adapter="one")
    part.run({"first": Pass(0, memoryview(encode_ids(ids)), len(ids), "ids", "fp32", block_hashes=hashes)})
    found = {
        adapter: open_session(
            part, f"then {adapter}", positions=128, sampling=GREEDY, block_hashes=hashes, adapter=adapter
        )
        for adapter in ("", "one", "two")
    }
    assert found == {"": 0, "one": BLOCK_POSITIONS, "two": 0}
    with pytest.raises(UserError, match="there is no adapter 'three'"):
        open_session(part, "last", positions=8, sampling=GREEDY, adapter="three")


@pytest.mark.parametrize("rank", [5, 8])
def test_product_of_a_row_has_the_same_bits_among_any_number_of_rows(rank: int) -> None:
    factors, x = LowRankFactors(torch.randn(rank, 3072), torch.randn(64, rank)), torch.randn(300, 3072)
    product = factors.product(x)
    for count in (1, 2, 8, 17, 100):
        assert torch.equal(factors.product(x[:count]), product[:count])
