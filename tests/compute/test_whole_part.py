"""A whole model directory as one part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from p2ptrain.compute.served_part import load_whole
from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import ConfigError, ResourceError, StorageError, UserError
from p2ptrain.core.serving import Sampling

from .families import VOCAB, make

IDS = [3, 14, 15, 92, 65]


def likeliest(directory: Path, count: int = 4, dtype: str = "") -> tuple[int, ...]:
    part = load_whole(directory, device="cpu", dtype=dtype)
    part.open("s", positions=8, sampling=Sampling(temperature=0))
    ran = part.run(
        "s",
        keep=0,
        payload=memoryview(encode_ids(IDS)),
        count=len(IDS),
        encoding="ids",
        out_encoding=part.encoding,
        picks=count,
        draw=0,
    )
    return ran.tokens


@pytest.mark.parametrize("family", ["llama-tied", "qwen2-window", "gpt2"])
def test_it_computes_what_transformers_does(family: str, tmp_path: Path) -> None:
    whole = make(family, tmp_path, max_shard_size="100KB")
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([IDS])).logits.argmax(-1)[0].tolist()
    assert list(likeliest(tmp_path)) == expected[-4:]


def test_what_it_tells(tmp_path: Path) -> None:
    whole = make("llama-tied", tmp_path, dtype=torch.bfloat16, max_shard_size="100KB")
    heard: list[tuple[int, int]] = []
    part = load_whole(tmp_path, device="cpu", on_bytes=lambda *both: heard.append(both))
    assert (part.context, part.vocab_size, part.encoding) == (128, VOCAB, "bf16")
    assert (part.spec.start, part.spec.stop, part.spec.layers) == (0, 6, 6)
    assert part.weights_bytes == sum(parameter.nbytes for parameter in whole.parameters()) == heard[-1][1]
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
    assert heard[-1][0] == heard[-1][1]
    assert load_whole(tmp_path, device="cpu", dtype="fp32").encoding == "fp32"


def test_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama", tmp_path)
    config = tmp_path / "config.json"
    said = json.loads(config.read_text())

    def refused(words: str, kind: type[Exception] = ConfigError, **options: str) -> None:
        with pytest.raises(kind, match=words) as caught:
            load_whole(tmp_path, **({"device": "cpu"} | options))  # type: ignore[arg-type]
        assert caught.value.remedy  # type: ignore[attr-defined]

    refused("device.kind = 'tpu'", device="tpu")
    refused("not computed in 'int8'", dtype="int8")
    for kind, why in (("opt", "its list of layers"), ("gemma2", "scaled_dot_product"), ("mamba", "attention_heads")):
        config.write_text(json.dumps({"model_type": kind}))
        refused(f"a '{kind}' model cannot be split: .*{why}")
    config.write_text(json.dumps(said | {"quantization_config": {"quant_method": "gptq"}}))
    refused("quantized")
    config.write_text(json.dumps(said | {"intermediate_size": 81}))
    refused(r"gate_proj\.weight is of shape \(80, 64\); by config\.json it is \(81, 64\)")
    config.write_text(json.dumps(said))
    with monkeypatch.context() as patched:
        patched.setattr("p2ptrain.compute.device._host_available", lambda: 1000)
        refused("6 of 6 layers", ResourceError)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(StorageError, match="accounts for"):
        load_whole(tmp_path)
    weights.unlink()
    refused("no weights in safetensors")
    config.write_text(" " * (64 << 10) + "{}")
    refused("larger than")
    config.write_bytes(b"\xff\xff")
    refused("is no text")
    config.unlink()
    refused("there is no")


def test_what_hears_of_pieces_may_end_it(tmp_path: Path) -> None:
    make("llama", tmp_path)

    def enough(done_bytes: int, total_bytes: int) -> None:
        raise UserError("enough")

    with pytest.raises(UserError, match="enough"):
        load_whole(tmp_path, device="cpu", on_bytes=enough)
