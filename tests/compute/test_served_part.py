"""Served parts against transformers: the tokens of ``generate``, bytes on the way, sessions side by side."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.activations import ACT2FN

from p2ptrain.compute.activations import DTYPES
from p2ptrain.compute.key_value_cache import WIDE, BatchCache, CacheShape, KeyValueMemory, SessionRows, _Scores
from p2ptrain.compute.layout import layer_sizes
from p2ptrain.compute.linears import WholeVectors, can_pack
from p2ptrain.compute.served_part import (
    ServedPart,
    ServedPartBuilder,
    config_of,
    load_whole,
    measure_model,
)
from p2ptrain.core.activations import activation_bytes, encode_ids
from p2ptrain.core.errors import ConfigError, JobFailed, ProtocolError, ResourceError, StorageError, UserError
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.core.serving import BLOCK_POSITIONS, PartSpec, Pass, Preempted, Ran, Sampling, hash_blocks
from p2ptrain.core.tensor_files import TensorTable
from tests.run_one import open_session, run_one

from .families import FAMILIES, VOCAB, generated, make, make_unsplit

GREEDY = Sampling(temperature=0)
SETTINGS = [
    GREEDY,
    Sampling(seed=1),
    Sampling(temperature=0.9, top_k=50, top_p=0.5, seed=2**63 - 1),
]


def spec_of(directory: Path, start: int, stop: int, **changes: Any) -> PartSpec:
    config = (directory / "config.json").read_text()
    arguments: dict[str, Any] = {"config": config, "start": start, "stop": stop, "layers": 6, "device": "cpu"}
    return PartSpec(**(arguments | changes))


def load(directory: Path, *cuts: int, **changes: Any) -> list[ServedPart]:
    table = TensorTable(directory)
    parts = []
    for start, stop in pairwise([0, *cuts, 6]):
        builder = ServedPartBuilder(spec_of(directory, start, stop, **changes), tuple(table.entries))
        for name in reversed(list(builder.wanted)):  # any order
            builder.place(name, table.entries[name].dtype, memoryview(table.read(name)))
        parts.append(builder.finish())
        # What the builder says before a byte is loaded is what the part takes, whatever the files' dtype is.
        said, made = builder, parts[-1]
        assert (said.weights_bytes, said.cache_position_bytes) == (made.weights_bytes, made.cache_position_bytes)
    return parts


class Client:
    """Runs a session through parts."""

    def __init__(
        self, parts: Sequence[ServedPart], name: str, sampling: Sampling, positions: int = 64, adapter: str = ""
    ) -> None:
        self.parts, self.name = parts, name
        for part in parts:
            open_session(part, name, positions=positions, sampling=sampling, adapter=adapter)
        self.length = 0

    def run(
        self, ids: list[int], *, samples: int = 1, sample_index: int = 0, keep: int | None = None, encoding: str = ""
    ) -> tuple[int, ...]:
        keep = self.length if keep is None else keep
        payload, coming = memoryview(encode_ids(ids)), "ids"
        for part in self.parts:
            last = part is self.parts[-1]
            going = encoding or part.encoding
            work = Pass(keep, payload, len(ids), coming, going, samples if last else 0, sample_index)
            ran = run_one(part, self.name, work)
            assert ran.payload.nbytes == (0 if last else activation_bytes(going, len(ids), part.width))
            payload, coming = ran.payload, going
        self.length = keep + len(ids)
        return ran.tokens

    def say(self, prompt: list[int], count: int, first_draw: int = 0) -> list[int]:
        said = [*self.run(prompt, sample_index=first_draw)]
        while len(said) < count:
            said += self.run(said[-1:], sample_index=first_draw + len(said))
        return said


def prompt(number: int) -> list[int]:
    return [(31 * number + 7 * index * index) % VOCAB for index in range(1 + number % 9)]


Loaded = tuple[Path, Any, list[ServedPart]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    made: dict[str, Loaded] = {}

    def of(family: str) -> Loaded:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family] = directory, make(family, directory), load(directory, 2, 5)
        return made[family]

    return of


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("family", ["llama-tied", "mistral-window", "gpt2"])
def test_the_tokens_are_those_of_generate(loaded: Callable[[str], Loaded], family: str, sampling: Sampling) -> None:
    _, whole, parts = loaded(family)
    for number in (2, 8):
        ids = prompt(number)
        client = Client(parts, "s", sampling)
        expected = generated(whole, ids, 10, sampling)
        assert client.say(ids, 10) == expected
        # Some are taken back and said again; and somebody new goes on in the middle.
        client.length = len(ids) + 3
        assert client.say(expected[3:4], 6, first_draw=4) == expected[4:]
        other = Client(parts, "t", sampling)
        assert other.say([*ids, *expected[:6]], 4, first_draw=6) == expected[6:]
        for name in ("s", "t"):
            for part in parts:
                part.close(name)


def test_logits_that_are_not_numbers(loaded: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    part, logits = loaded("llama-tied")[2][-1], torch.arange(2 * VOCAB, 0, -1.0).view(2, VOCAB)
    monkeypatch.setattr(part, "_compute", lambda group: [logits])
    open_session(part, "s", positions=10, sampling=GREEDY)
    work = Pass(0, memoryview(bytes(activation_bytes("fp32", 2, 64))), 2, "fp32", "fp32", samples=2)
    for wrong in (torch.nan, torch.inf):
        logits[0, 2] = wrong
        with pytest.raises(JobFailed, match="logits are not finite"):
            run_one(part, "s", work)
    logits[0, 2] = -torch.inf
    assert run_one(part, "s", work).tokens == (0, 0)
    part.close("s")


def test_interleaved_sessions_do_not_disturb_each_other(loaded: Callable[[str], Loaded]) -> None:
    _, whole, parts = loaded("mistral-window")
    sampled = Sampling(temperature=0.9, seed=21)
    clients = [Client(parts, f"i{number}", sampled) for number in range(4)]
    said = [list(client.run(prompt(number + 3))) for number, client in enumerate(clients)]
    for sample_index in range(1, 9):
        for client, tokens in zip(
            clients[:: 1 if sample_index % 2 else -1], said[:: 1 if sample_index % 2 else -1], strict=True
        ):
            tokens += client.run(tokens[-1:], sample_index=sample_index)
    for number, tokens in enumerate(said):
        assert tokens == generated(whole, prompt(number + 3), 9, sampled)
    for part in parts:
        cache_bytes = sum(tensor.nbytes for layer in part._memory.layers for tensor in layer)
        assert cache_bytes == 4 * BLOCK_POSITIONS * part.cache_position_bytes
        assert part.free_positions == 0
        for client in clients:
            part.close(client.name)
            part.close(client.name)
        assert part.free_positions == 4 * BLOCK_POSITIONS


def test_what_a_part_tells(loaded: Callable[[str], Loaded], tmp_path: Path) -> None:
    _, whole, parts = loaded("llama-tied")
    embedding = whole.get_input_embeddings().weight.nbytes
    whole_bytes = sum(parameter.nbytes for parameter in whole.parameters())
    assert sum(part.weights_bytes for part in parts) == whole_bytes + embedding
    assert [part.cache_position_bytes for part in parts] == [layers * 2 * 2 * 16 * 4 for layers in (2, 3, 1)]
    for part in parts:
        assert (part.width, part.vocab_size, part.encoding) == (64, VOCAB, "fp32")
        assert part.device.startswith("cpu")
    make("llama", tmp_path, dtype=torch.bfloat16)
    assert {part.encoding for part in load(tmp_path, 3)} == {"bf16"}
    assert {part.encoding for part in load(tmp_path, 3, dtype="fp32")} == {"fp32"}


def test_what_its_parts_weigh_depends_on_the_type(tmp_path: Path) -> None:
    make("llama", tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    for said, dtype in (("bfloat16", "bf16"), ("float16", "fp16"), ("float64", "fp32"), (None, "fp32")):
        text = json.dumps(table | {"dtype": said})
        own, wide = measure_model(text, ""), measure_model(text, "fp32")
        assert (own["dtype"], own["width"], wide["dtype"]) == (dtype, 64, "fp32")
        sizes = layer_sizes(config_of(text), DTYPES[dtype])
        assert ModelSizes(*(own[name] for name in ModelSizes.__slots__)) == sizes
        assert wide["layers_bytes"] == layer_sizes(config_of(text)).layers_bytes
    with pytest.raises(ConfigError, match="cannot be split"):
        measure_model(
            json.dumps({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50}), ""
        )


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"keep": 7}, "cannot keep 7 positions: the session has 6"),
        ({"keep": -1}, "cannot keep -1 positions"),
        ({"count": 7}, "cannot add 7 positions to 4: the session was opened for 10"),
        ({"payload": memoryview(encode_ids([1]))}, "2 positions as ids are 8 bytes, not 4"),
        ({"payload": memoryview(encode_ids([1, VOCAB]))}, "for a vocabulary"),
        ({"session": "other"}, "no session 'other'"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    loaded: Callable[[str], Loaded], changes: dict[str, Any], cause: str
) -> None:
    part = loaded("llama-tied")[2][0]
    good: dict[str, Any] = {
        "keep": 4,
        "payload": memoryview(encode_ids([1, 2])),
        "count": 2,
        "encoding": "ids",
        "out_encoding": "fp32",
        "samples": 0,
        "sample_index": 0,
    }
    open_session(part, "s", positions=10, sampling=GREEDY)
    run_one(part, "s", Pass(**good | {"keep": 0, "payload": memoryview(encode_ids([5, 6, 7, 8])), "count": 4}))
    expected = bytes(run_one(part, "s", Pass(**good)).payload)
    session = changes.pop("session", "s")
    with pytest.raises(ProtocolError, match=cause):
        run_one(part, session, Pass(**good | changes))
    assert part._tables["s"].length == 6
    assert bytes(run_one(part, "s", Pass(**good)).payload) == expected
    part.close("s")


def test_picks_and_scores_of_the_last_stage(loaded: Callable[[str], Loaded], limit_host: Callable[[int], None]) -> None:
    part = loaded("llama-tied")[2][-1]
    open_session(part, "s", positions=10, sampling=GREEDY)
    arguments: dict[str, Any] = {"keep": 0, "encoding": "fp32", "out_encoding": "fp32", "sample_index": 0}
    payload = memoryview(bytes(activation_bytes("fp32", 2, 64)))
    nan = memoryview(torch.full((2, 64), torch.nan).numpy().tobytes())
    with pytest.raises(JobFailed):
        run_one(part, "s", Pass(payload=nan, count=2, samples=1, **arguments))
    with pytest.raises(ProtocolError, match="cannot keep 1 positions: the session has 0"):
        run_one(part, "s", Pass(payload=payload, count=2, samples=1, **arguments | {"keep": 1}))
    for targets, cause in (((VOCAB,), "targets from 211"), ((-1, 5), "targets from -1")):
        with pytest.raises(ProtocolError, match=cause):
            run_one(part, "s", Pass(payload=payload, count=2, samples=0, targets=targets, **arguments))
    limit_host(12 * 2 * VOCAB - 1)
    with pytest.raises(ResourceError, match="scoring 2 tokens"):
        run_one(part, "s", Pass(payload=payload, count=2, samples=0, targets=(1, 2), **arguments))
    limit_host(12 * 2 * VOCAB)
    assert len(run_one(part, "s", Pass(payload=payload, count=2, samples=0, targets=(1, 2), **arguments)).scores) == 8
    part.close("s")


def test_a_run_that_fails_in_the_middle_leaves_what_was_kept(
    loaded: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = loaded("mistral-window")[2][1]
    open_session(part, "s", positions=30, sampling=GREEDY)
    arguments: dict[str, Any] = {"encoding": "fp32", "out_encoding": "fp32", "sample_index": 0, "samples": 0}
    payload = memoryview(torch.randn(12, 64, generator=torch.Generator().manual_seed(1)).numpy().tobytes())
    more = payload[: 2 * 64 * 4]
    run_one(part, "s", Pass(0, payload, 12, **arguments))
    expected = bytes(run_one(part, "s", Pass(keep=11, payload=more, count=2, **arguments)).payload)
    module: Any = part._model.module
    for error, seen in ((torch.OutOfMemoryError("no"), ResourceError), (RuntimeError("other"), RuntimeError)):

        def fails(*_: Any, told: Exception = error, **__: Any) -> None:
            raise told

        with monkeypatch.context() as patch:
            patch.setattr(module.model.layers[1].mlp, "forward", fails)
            with pytest.raises(seen):
                run_one(part, "s", Pass(keep=11, payload=more, count=2, **arguments))
        assert part._tables["s"].length == 11
        assert bytes(run_one(part, "s", Pass(keep=11, payload=more, count=2, **arguments)).payload) == expected
    part.close("s")


def test_sessions_that_cannot_be(loaded: Callable[[str], Loaded], limit_host: Callable[[int], None]) -> None:
    part = loaded("llama-tied")[2][0]
    for positions, cause in (
        (129, "129 positions are more than the model's context of 128"),
        (0, "0 positions"),
    ):
        with pytest.raises(UserError, match=cause) as caught:
            open_session(part, "s", positions=positions, sampling=GREEDY)
        assert caught.value.remedy
    open_session(part, "s", positions=128, sampling=GREEDY)
    with pytest.raises(UserError, match="already has a session 's'"):
        open_session(part, "s", positions=1, sampling=GREEDY)
    part.close("s")
    limit_host(0)
    part.open("s", positions=128, sampling=GREEDY)  # in memory that it has already
    with pytest.raises(ResourceError, match="the cache of 64000 tokens"):
        part.reserve(1000 * BLOCK_POSITIONS)
    part.close("s")


def test_parts_that_cannot_be(loaded: Callable[[str], Loaded], limit_host: Callable[[int], None]) -> None:
    directory = loaded("llama-tied")[0]
    config = json.loads((directory / "config.json").read_text())
    names = tuple(TensorTable(directory).entries)

    def refused(cause: str, **changes: Any) -> None:
        with pytest.raises((ConfigError, UserError), match=cause) as caught:
            ServedPartBuilder(spec_of(directory, 0, 2, **changes), names)
        assert caught.value.remedy

    refused("not JSON", config="{")
    refused("'nonsense' is not a causal language model", config='{"model_type": "nonsense"}')
    refused(
        "'lfm2' model cannot be split", config=json.dumps(config | {"model_type": "lfm2", "layer_types": ["conv"] * 6})
    )
    refused("quantized", config=json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    assert config_of(json.dumps(config | {"quantization_config": None})).vocab_size == VOCAB
    refused("cannot be computed in 'int8'", dtype="int8")
    refused("device.kind = 'tpu'", device="tpu")
    with pytest.raises(ConfigError, match="has 6 layers, not 7"):
        ServedPartBuilder(spec_of(directory, 0, 2, layers=7), names)
    with pytest.raises(ConfigError, match=r"lack model\.layers\.0\.mlp"):
        ServedPartBuilder(spec_of(directory, 0, 2), [name for name in names if "layers.0.mlp" not in name])
    limit_host(1000)
    with pytest.raises(ResourceError, match="a part of 2 of 6 layers"):
        ServedPartBuilder(spec_of(directory, 0, 2), names)


def test_tensors_that_cannot_be(loaded: Callable[[str], Loaded]) -> None:
    directory = loaded("llama-tied")[0]
    table = TensorTable(directory)
    builder = ServedPartBuilder(spec_of(directory, 0, 2), tuple(table.entries))
    name = "model.layers.1.input_layernorm.weight"
    assert builder.wanted[name] == (64,)
    with pytest.raises(ConfigError, match="has dtype I8"):
        builder.place(name, "I8", memoryview(bytes(64)))
    for size_bytes in (252, 260):
        with pytest.raises(ConfigError, match=rf"has {size_bytes} bytes; config\.json requires 256"):
            builder.place(name, "F32", memoryview(bytes(size_bytes)))
    with pytest.raises(ConfigError, match="not part of layers 0 to 2"):
        builder.place("model.layers.2.input_layernorm.weight", "F32", memoryview(bytes(256)))
    for each in builder.wanted:
        if each != name:
            builder.place(each, "F32", memoryview(table.read(each)))
    with pytest.raises(ConfigError, match=f"tensor {name} is missing"):
        builder.finish()


def test_where_frequencies_change_with_the_length_the_keys_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a whole model has the token ids for that: a part ends there."""
    pairs = 8
    factors = {"short_factor": [1.0] * pairs, "long_factor": [8.0] * pairs, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32, **factors}
    whole = make("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=32)
    for part in load(tmp_path, 3):
        with pytest.raises(UserError, match="33 positions are more than the model's context of 32"):
            open_session(part, "s", positions=33, sampling=GREEDY)
    part = load_whole(tmp_path, device="cpu")
    assert part.context == 128
    ids = [(7 * index * index) % VOCAB for index in range(28)]
    expected = generated(whole, ids, 12, GREEDY)
    client = Client([part], "one by one", GREEDY)
    assert client.say(ids, 12) == expected
    for keep, chunk, samples in ((36, 2, 2), (30, 9, 9), (30, 2, 1), (31, 8, 8)):  # drafts, also after a way back
        told = [*ids, *expected][keep : keep + chunk]
        got = client.run(told, keep=keep, samples=samples)
        assert list(got) == expected[keep + chunk - samples - 27 :][:samples], (keep, chunk)

    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no")

    model: Any = part._model
    with monkeypatch.context() as patch:
        patch.setattr(model.module.model.layers[1].mlp, "forward", fails)
        with pytest.raises(ResourceError):  # while all keys are computed again
            client.run([*ids, *expected][30:39], keep=30, samples=9)
    assert list(client.run([*ids, *expected][30:39], keep=30, samples=9)) == expected[3:12]
    chunked = Client([part], "chunked", GREEDY)
    chunked.run([*ids, *expected][:20])
    assert list(chunked.run([*ids, *expected][20:38])) == expected[10:11]


# --------------------------------------------------------------------------------------- a whole directory as one part


def test_what_a_whole_tells(tmp_path: Path) -> None:
    whole = make("llama-tied", tmp_path, dtype=torch.bfloat16, max_shard_size="100KB")
    heard: list[tuple[int, int]] = []
    part = load_whole(tmp_path, device="cpu", on_bytes=lambda *both: heard.append(both))
    with pytest.raises(UserError, match="there is memory for 0"):
        part.open("s", positions=1, sampling=GREEDY)
    assert (part.context, part.vocab_size, part.encoding) == (128, VOCAB, "bf16")
    assert part.weights_bytes == sum(parameter.nbytes for parameter in whole.parameters()) == heard[-1][1]
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
    assert heard[-1][0] == heard[-1][1]
    assert load_whole(tmp_path, device="cpu", dtype="fp32").encoding == "fp32"


def test_a_directory_that_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama", tmp_path)
    config = tmp_path / "config.json"
    said = json.loads(config.read_text())

    def refused(words: str, kind: type[Exception] = ConfigError, **options: str) -> None:
        with pytest.raises(kind, match=words) as caught:
            load_whole(tmp_path, **({"device": "cpu"} | options))  # type: ignore[arg-type]
        assert caught.value.remedy  # type: ignore[attr-defined]

    config.write_text(json.dumps(said | {"intermediate_size": 81}))
    refused(r"gate_proj\.weight has shape \(80, 64\); config\.json requires \(81, 64\)")
    config.write_text(json.dumps(said | {"hidden_size": "abc"}))
    refused("is not a model directory: .*hidden_size")
    config.write_text(" " * (64 << 10) + "{}")
    refused("more than 65536 characters")
    config.write_text(json.dumps(said))
    with monkeypatch.context() as patched:
        patched.setattr("p2ptrain.compute.device.memory_left_bytes", lambda _: 1000)
        refused("6 of 6 layers", ResourceError)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(StorageError, match="header describes"):
        load_whole(tmp_path)
    weights.unlink()
    refused("no weights in safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(r"are pickled \(pytorch_model.bin\)")
    config.write_bytes(b"\xff\xff")
    refused("cannot read .*utf-8")
    config.unlink()
    refused("cannot read .*No such file")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_split_in_two_and_in_three_writes_the_text_of_generate(tmp_path: Path, family: str) -> None:
    """From the files as ``save_pretrained`` writes them, in several; the whole model, loaded here, writes it too."""
    whole = make(family, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = generated(whole, prompt(8), 12, GREEDY)
    for parts in ([load_whole(tmp_path)], load(tmp_path, 3), load(tmp_path, 2, 4)):
        assert Client(parts, "s", GREEDY).say(prompt(8), 12) == expected


@pytest.mark.parametrize("family", ["mamba", "rwkv", "lstm", "lfm2"])
def test_a_model_that_does_not_split_runs_whole(tmp_path: Path, family: str) -> None:
    """With tokens taken back, and several at once, as a verifier asks for them."""
    whole = make_unsplit(family, tmp_path)
    part, ids = load_whole(tmp_path), prompt(8)
    assert part.cache_position_bytes == 0
    expected = generated(whole, ids, 10, GREEDY)
    client = Client([part], "s", GREEDY)
    assert client.say(ids, 10) == expected
    client.length = len(ids) + 3
    assert client.say(expected[3:4], 3) == expected[4:7]
    client.length = len(ids)
    assert client.run(expected[:4], samples=4) == tuple(expected[1:5])


@pytest.mark.parametrize("family", ["mamba", "lstm"])
def test_a_pass_of_a_whole_model_that_fails_leaves_no_state(tmp_path: Path, family: str) -> None:
    """The model's own cache has the new token already, and cannot be rolled back."""
    expected = generated(make_unsplit(family, tmp_path), ids := prompt(8), 10, GREEDY)
    client = Client([part := load_whole(tmp_path)], "s", GREEDY)
    assert client.say(ids, 4) == expected[:4]

    def fails(*_: Any) -> None:
        raise RuntimeError("no logits")

    model: Any = part._model
    hook = model.module.get_output_embeddings().register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="no logits"):
        client.run(expected[3:4])
    hook.remove()
    assert client.say(expected[3:4], 6) == expected[4:]


# ------------------------------------------------------------------------------------------- many sessions in one pass


PACKS_BF16 = pytest.mark.skipif(not can_pack("cpu", torch.bfloat16), reason="oneDNN has no bf16 on this processor")


class Work:
    """Passes of one session, with what they must give: its results when nothing else is computed."""

    def __init__(self, name: str, prompt: list[int], rng: random.Random) -> None:
        self.name, self.sampling, self.ids = name, Sampling(temperature=0.9, seed=rng.randrange(99)), prompt
        self.keep = self.done = 0

    def next(self, rng: random.Random) -> list[int]:
        """Ids of the next pass: a chunk of the prompt, a token, or drafts, after some positions were cut."""
        if self.done and rng.random() < 0.3:
            self.keep = max(1, self.keep - rng.randrange(1, 4))
        left = self.ids[self.keep :]
        return left[: rng.choice([1, 1, 2, 5, 17, 70])] or [rng.randrange(VOCAB)]


def run_through(
    parts: Sequence[ServedPart], passes: dict[str, tuple[int, list[int], tuple[bytes, ...]]]
) -> dict[str, Any]:
    """Each session's tokens and the bytes of its hidden states, or its error."""
    payloads = {name: memoryview(encode_ids(ids)) for name, (_, ids, _) in passes.items()}
    results: dict[str, Any] = {name: [] for name in passes}
    for part in parts:
        last = part is parts[-1]
        works = {
            name: Pass(
                passes[name][0],
                payload,
                len(passes[name][1]),
                "ids" if part is parts[0] else "fp32",
                "fp32",
                len(passes[name][1]) if last else 0,
                passes[name][0],
                targets=(1,) if last else (),
                block_hashes=passes[name][2],
            )
            for name, payload in payloads.items()
        }
        payloads = {}
        for name, ran in part.run(works).items():
            if isinstance(ran, Ran):
                payloads[name] = ran.payload
                results[name] += [bytes(ran.payload), ran.tokens, ran.scores]
            else:
                results[name] = ran
    return results


@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.startswith("falcon")])
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=PACKS_BF16)])
def test_sessions_of_a_batch_get_the_bits_of_each_alone(tmp_path: Path, family: str, dtype: str) -> None:
    """With chunks of prompts, drafts, rollbacks, shared beginnings, and memory for fewer sessions than there are; in a
    cut model, against each session alone in the whole one."""
    make(family, tmp_path)
    together, alone = load(tmp_path, *[(3,), (2, 4)][len(family) % 2], dtype=dtype), load(tmp_path, dtype=dtype)
    assert all(part.is_batched for part in together)
    rng, common = random.Random(2), [*range(80)]
    for part in together:
        part.reserve(6 * BLOCK_POSITIONS)
    works: list[Work] = []
    preempted = shared = 0
    for step in range(24):
        if len(works) < 5 and rng.random() < 0.5:
            work = Work(
                f"s{step}", [*common[: rng.choice([80, 70, 9])], *(rng.randrange(VOCAB) for _ in range(30))], rng
            )
            arguments: dict[str, Any] = {"positions": 128, "sampling": work.sampling}
            work.done = work.keep = min(
                part.open(work.name, **arguments, block_hashes=hash_blocks(work.ids)) for part in together
            )
            shared += work.keep > 0
            for part in alone:
                open_session(part, work.name, **arguments)
            if work.keep:
                run_through(alone, {work.name: (0, work.ids[: work.keep], ())})
            works.append(work)
        chosen = {work.name: (work.keep, work.next(rng)) for work in works if rng.random() < 0.8}
        passes: dict[str, tuple[int, list[int], tuple[bytes, ...]]] = {}
        for work in works:
            if work.name in chosen:
                _, ids = chosen[work.name]
                keep = work.keep
                text = [*work.ids[:keep], *ids][:128]
                passes[work.name] = keep, text[keep:], hash_blocks(text)
                work.ids = [*text, *work.ids[len(text) :]]
        results = run_through(together, {name: each for name, each in passes.items() if each[1]})
        for work in list(works):
            if work.name not in results:
                continue
            keep, ids, _ = passes[work.name]
            result = results[work.name]
            if isinstance(result, Preempted):
                preempted += 1
                work.keep = 0
            else:
                expected = run_through(alone, {work.name: (keep, ids, ())})[work.name]
                assert result[-2:] == expected[-2:], (step, work.name)  # tokens and scores
                work.keep = keep + len(ids)
            work.done = work.keep
            if work.keep >= 120 or rng.random() < 0.1:
                works.remove(work)
                for part in (*together, *alone):
                    part.close(work.name)
    assert preempted
    assert shared


@pytest.mark.parametrize("width", [WIDE, 2 * WIDE])
def test_query_of_the_least_call_is_attended_as_in_a_whole_block(width: int) -> None:
    memory = KeyValueMemory(AutoConfig.for_model("llama", num_hidden_layers=1), [], torch.float32, torch.device("cpu"))
    memory.shapes, memory.windows = [CacheShape((2, width), (2, width))], [None]
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (torch.randn(2, BLOCK_POSITIONS, width, generator=generator) for _ in range(3))
    memory.layers = [(keys.transpose(0, 1), values.transpose(0, 1))]

    def attend(start: int, stop: int) -> torch.Tensor:
        cache = BatchCache(memory, [SessionRows([0], start, stop)], stop - start)
        return cache.attend(0, query[:, start:stop], keys, values, _Scores(None, None))

    whole = attend(0, BLOCK_POSITIONS)
    for start, stop in ((9, 10), (3, 8), (20, 60)):
        assert torch.equal(attend(start, stop), whole[:, start:stop])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_activation_of_a_row_does_not_depend_on_other_rows(name: str, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    function = WholeVectors(ACT2FN[name])
    x = torch.randn(67, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = torch.cat([function(row) for row in x.split(1)])
    for count in (5, 17, 20, 67):
        assert torch.equal(function(x[:count]), expected[:count])
