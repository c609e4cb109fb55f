"""LoRA adapters against peft: merged files, and the text of a model that is served with one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from p2ptrain.compute.adapter import MergedTable, write_merged
from p2ptrain.compute.model import directory_config
from p2ptrain.compute.served_part import load_whole
from p2ptrain.compute.text import ModelText
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.adapters import fingerprint, is_adapter, read_adapter
from p2ptrain.core.errors import ConfigError, P2PTrainError, StorageError, UserError
from p2ptrain.core.serving import Sampling
from p2ptrain.core.tensor_files import ADAPTER_CONFIG, ADAPTER_FILE, INDEX_FILE, TensorTable

from .families import VOCAB, generated, make, make_unsplit
from .test_served_part import Client, prompt

GREEDY = Sampling(temperature=0)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft calls it


def adapted(base: Path, directory: Path, targets: list[str], *, seed: int = 2, **settings: Any) -> Any:
    """A model with random factors, after its adapter was saved by peft."""
    whole: Any = AutoModelForCausalLM.from_pretrained(base)
    settings = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = peft.get_peft_model(whole, peft.LoraConfig(target_modules=targets, **settings))
    model.save_pretrained(directory, save_embedding_layers=False)
    return model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model ``base`` and its adapter ``plain``, which names it by a relative path."""
    root = tmp_path_factory.mktemp("adapters")
    make("llama", root / "base")
    Tokenizer.of_bytes().save(root / "base")
    adapted(root / "base", root / "plain", ["q_proj", "up_proj"])
    changed(root / "plain", base_model_name_or_path="../base")
    return root / "plain"


def changed(directory: Path, **values: Any) -> None:
    path = directory / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize(
    ("family", "targets", "settings"),
    [
        ("llama", ["q_proj", "k_proj", "down_proj"], {}),
        ("gpt2", ["c_attn", "c_proj"], {"fan_in_fan_out": True, "use_rslora": True}),
        ("gpt_neox", ["query_key_value"], {"rank_pattern": {"layers.1.attention.query_key_value": 5}}),
        ("mamba", ["in_proj"], {}),  # does not split
    ],
)
def test_the_merged_model_is_that_of_peft_and_an_adapter_is_served_as_it(
    tmp_path: Path, family: str, targets: list[str], settings: dict[str, Any]
) -> None:
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    if family == "mamba":
        make_unsplit(family, base)
    else:
        make(family, base, max_shard_size="60KB")
    expected = adapted(base, adapter, targets, **settings).merge_and_unload().eval()
    write_merged(read_adapter(adapter), out)
    merged: Any = AutoModelForCausalLM.from_pretrained(out).eval()
    untouched: Any = AutoModelForCausalLM.from_pretrained(base)
    wanted, before, differ = expected.state_dict(), untouched.state_dict(), 0
    for name, tensor in merged.state_dict().items():
        assert torch.allclose(tensor, wanted[name], rtol=0, atol=1e-6), name
        differ += not torch.equal(tensor, before[name])
    assert differ >= 3
    text = generated(merged, prompt(8), 12, GREEDY)
    assert text == generated(expected, prompt(8), 12, GREEDY) != generated(untouched, prompt(8), 12, GREEDY)
    assert Client([load_whole(adapter)], "s", GREEDY).say(prompt(8), 12) == text
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_half_precision_base_keeps_its_type(tmp_path: Path) -> None:
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    make("llama", base, dtype=torch.bfloat16)
    expected = adapted(base, adapter, ["q_proj"]).merge_and_unload().state_dict()
    write_merged(read_adapter(adapter), out)
    merged = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    for name, tensor in merged.items():
        assert torch.allclose(tensor.float(), expected[name].float(), atol=1e-2), name
    parts: list[Any] = [load_whole(adapter), load_whole(out)]
    states = [part._model.module.state_dict() for part in parts]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_what_an_adapter_lacks_is_its_bases(plain: Path, tmp_path: Path) -> None:
    base = plain.parent / "base"
    assert (is_adapter(plain), is_adapter(base)) == (True, False)
    assert (ModelText(plain).context, ModelText(plain).tokenizer.is_bytes) == (ModelText(base).context, True)
    own = copied(plain, tmp_path / "own")
    changed(own, base_model_name_or_path=str(base))
    assert fingerprint(own) == fingerprint(plain) != fingerprint(base)
    changed(own, lora_alpha=6)
    assert fingerprint(own) != fingerprint(plain)
    (own / "tokenizer.json").write_text((base / "tokenizer.json").read_text())
    write_merged(read_adapter(own), tmp_path / "out")
    assert ModelText(tmp_path / "out").tokenizer.is_bytes


def test_a_base_that_moved_is_named(plain: Path, tmp_path: Path) -> None:
    moved = copied(plain, tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"the base model of the adapter .* is not there: \.\./base") as caught:
        load_whole(moved)
    assert f"p2ptrain checkpoints merge {moved} OUT --base DIR" in caught.value.remedy
    assert write_merged(read_adapter(moved, plain.parent / "base"), tmp_path / "out").adapted


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "all"}, "bias = all"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = pissa"),
        ({"what_peft_has_next_year": 1}, "what_peft_has_next_year = 1"),
        ({"peft_type": "IA3"}, "is of the type 'IA3'"),
        ({"peft_type": 3}, "is not the configuration of an adapter"),
        ({"lora_alpha": "8"}, "has no lora_alpha"),
        ({"base_model_name_or_path": None}, "none is named"),
    ],
)
def test_an_adapter_that_is_more_than_lora_is_refused(
    plain: Path, tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    changed(copied(plain, tmp_path / "odd"), **settings)
    with pytest.raises(ConfigError, match=problem):
        load_whole(tmp_path / "odd")


def _without_b(tensors: dict[str, Any]) -> None:
    del tensors[next(name for name in tensors if "lora_B" in name)]


def _too_wide(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name] = torch.zeros(3, tensors[name].shape[1] + 1)


def _of_integers(tensors: dict[str, Any]) -> None:
    tensors.update({name: tensor.to(torch.int64) for name, tensor in tensors.items()})


def _embedding(tensors: dict[str, Any]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(3, VOCAB)


def _norm(tensors: dict[str, Any]) -> None:
    for side, shape in (("A", (1, 64)), ("B", (64, 1))):
        tensors[f"base_model.model.model.norm.lora_{side}.weight"] = torch.zeros(shape)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_without_b, "does not have as one tensor"),
        (_too_wide, "has factors of shapes"),
        (_of_integers, "in another type than F32, BF16, F16"),
        (_embedding, "lora_embedding_A, which is no factor of a linear layer"),
        (_norm, "is not a linear layer"),
    ],
)
def test_factors_that_do_not_fit_are_refused_before_they_are_read(
    plain: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = copied(plain, tmp_path / "odd")
    changed(odd, base_model_name_or_path=str(plain.parent / "base"))
    tensors = load_file(odd / ADAPTER_FILE)
    change(tensors)
    save_file(tensors, odd / ADAPTER_FILE)
    monkeypatch.setattr(TensorTable, "read", None)
    with pytest.raises(ConfigError, match=problem):
        MergedTable(read_adapter(odd))


def test_damaged_files_are_named(plain: Path, tmp_path: Path) -> None:
    odd = copied(plain, tmp_path / "odd")
    changed(odd, base_model_name_or_path=str(plain.parent / "base"))
    (odd / ADAPTER_FILE).write_bytes(b"\xff" * 64)
    with pytest.raises(StorageError, match=ADAPTER_FILE):
        load_whole(odd)
    (odd / ADAPTER_CONFIG).write_bytes(b"[" * 5000)
    with pytest.raises(ConfigError, match="is not JSON"):
        load_whole(odd)


def test_a_directory_is_written_whole_or_not_at_all(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"

    def leave(done_bytes: int, total_bytes: int) -> None:
        assert 0 < done_bytes <= total_bytes
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_merged(read_adapter(plain), out, leave)
    assert list(out.parent.iterdir()) == []
    make("llama", tmp_path / "parted", max_shard_size="60KB")
    index = tmp_path / "parted" / INDEX_FILE
    index.write_text(index.read_text().replace('"model.norm.weight"', '"model.other.weight"', 1))
    with pytest.raises(StorageError, match=r"model\.other\.weight"):
        write_merged(read_adapter(plain, index.parent), out)
    table = json.loads(index.read_text())
    del table["weight_map"]["model.other.weight"]
    index.write_text(json.dumps(table))
    with pytest.raises(StorageError, match=f"has tensors that {INDEX_FILE} does not name"):
        write_merged(read_adapter(plain, index.parent), out)
    assert list(out.parent.iterdir()) == []
    out.mkdir()
    with pytest.raises(UserError, match="exists"):
        write_merged(read_adapter(plain), out)


def test_where_only_a_whole_model_will_do_the_remedy_is_named(plain: Path) -> None:
    with pytest.raises(P2PTrainError, match=r"holds an adapter \(LoRA\), not a whole model") as caught:
        TensorTable(plain)
    assert f"p2ptrain checkpoints merge {plain} OUT" in caught.value.remedy
    with pytest.raises(ConfigError, match="holds an adapter"):
        directory_config(plain)
