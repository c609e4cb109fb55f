"""``p2ptrain bench`` as a person runs it: real processes, real sockets, torch's own Gloo."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2ptrain.compute.model import build_model
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.lab.bench.training import PHASES
from tests.compute.tiny_trainer import tiny
from tests.e2e.conftest import gone


async def document(process: Any) -> Any:
    """Standard output as one JSON document, and nothing else."""
    assert await process.end() == 0, process.text
    return json.loads("\n".join(process.out))


async def members_of(process: Any) -> list[psutil.Process]:
    await process.until(r"round \d")
    return psutil.Process(process.process.pid).children()


async def test_the_ring_beside_gloo_and_sockets(machine: Any) -> None:
    process = await machine.start("bench", "allreduce", "--sizes", "4K,1M", "--rounds", "2", "--json")
    found = await document(process)
    assert found["complete"]
    assert found["origin"]["torch"]
    assert [result["size_bytes"] for result in found["results"]] == [4096, 1 << 20]
    for result in found["results"]:
        assert {name: item["samples"] for name, item in result["contenders"].items()} == {
            "ring": 2,
            "gloo": 2,
            "sockets": 2,
        }
        assert result["ring_to_gloo"] > 0
        assert result["relative_errors"]["ring"] < 1e-6


async def test_encrypted_with_a_codec_over_an_emulated_link(machine: Any) -> None:
    options = ("--sizes", "1M", "--rounds", "1", "--tls", "--codec", "int8", "--link", "lan", "--json")
    found = await document(await machine.start("bench", "allreduce", *options))
    result = found["results"][0]
    assert set(result["contenders"]) == {"ring", "ring plain"}
    assert 1e-4 < result["relative_errors"]["ring"] < 0.05
    assert result["relative_errors"]["ring plain"] < 1e-6


@pytest.mark.slow
async def test_training_steps_beside_ddp(machine: Any, environment: dict[str, str]) -> None:
    arguments = ("--steps", "6", "--backend", "torch", "--json", *machine.settings(job__workers=2))
    (found,) = (await document(await machine.start("bench", "step", *arguments, **environment)))["results"]
    ring, ddp = found["contenders"]["ring"], found["contenders"]["ddp"]
    assert ring["tokens_per_s"] * ring["median_s"] == pytest.approx(8 * 2 * 32)
    assert len(ring["seconds"]) == len(ddp["seconds"]) == len(ring["exposed_s"]) == 6
    assert found["largest_relative_loss_difference"] < 1e-4
    assert found["ring_to_ddp"] > 0
    assert set(found["contenders"]) == {"ring", "ddp", "ddp-p2p", "fsdp2", "fsdp2-p2p"}
    assert found["ddp_p2p_to_gloo"] > 0
    assert found["fsdp2_p2p_to_gloo"] > 0


@pytest.mark.slow
async def test_one_worker_beside_the_plain_loop(machine: Any) -> None:
    options = ("--device", "cpu", "--steps", "6", "--no-compiled", "--json", *machine.settings())
    (found,) = (await document(await machine.start("bench", "device", *options)))["results"]
    worker, plain = found["contenders"]["ring"], found["contenders"]["plain"]
    assert set(found["contenders"]) == {"ring", "plain"}
    assert worker["tokens_per_s"] * worker["median_s"] == pytest.approx(8 * 2 * 32)
    assert len(worker["seconds"]) == len(plain["seconds"]) == 6
    assert {len(worker[name]) for name in PHASES} == {6}
    assert len(worker["losses"]) == len(plain["losses"]) == 9
    assert found["largest_relative_loss_difference"] < 1e-4
    assert found["worker_to_plain"] > 0
    assert found["worker_to_compiled"] is None
    assert sum(found["phases_s"].values()) == pytest.approx(sum(worker["seconds"]) / 6)
    assert worker["mfu"] == pytest.approx(worker["tokens_per_s"] * found["flops_per_token"] / found["peak_flops"])


@pytest.mark.slow
@pytest.mark.skipif("P2PTRAIN_LONG" not in os.environ, reason="compiles for a minute: P2PTRAIN_LONG=1")
async def test_a_worker_with_compiled_blocks_beside_the_compiled_loop(machine: Any) -> None:
    options = ("--device", "cpu", "--steps", "6", "--json", *machine.settings(model__layers=1))
    process = await machine.start("bench", "device", *options)
    await process.until(r"round 1")
    report = await document(process)
    (found,) = report["results"]
    assert set(found["contenders"]) == {"ring", "blocks", "plain", "compiled"}
    assert found["blocks_to_compiled"] > 0
    assert found["largest_relative_loss_difference"] < 1e-3
    assert any("used from step 3" in note for note in report["notes"]), "before the first measured step"


async def test_schedules_of_a_pipeline_over_a_slow_link(machine: Any) -> None:
    """Real stages. How fast is another day's question: a busy machine may hold anybody up."""
    options = ("--stages", "3", "--micro-batches", "4", "--rtt", "0,30", "--forward-ms", "10", "--backward-ms", "20")
    process = await machine.start("bench", "pipeline", *options, "--steps", "1", "--payload", "64K", "--json")
    found = await document(process)
    assert found["complete"]
    near, far = found["results"]
    assert far["measured_s"][0] > 0.03 > near["measured_s"][0]
    assert len(far["measured_s"]) == 2
    for item in (*near["contenders"].values(), *far["contenders"].values()):
        assert item["median_s"] >= item["ideal_s"] - 0.003, "a step that took less than it can"
    kept = {name: item["in_flight"] for name, item in far["contenders"].items()}
    assert kept["1f1b"] == [3, 2, 1]
    assert kept["extended"] in ([4, 3, 1], [4, 4, 1]), "as the link was measured"


async def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(machine: Any, real_starts: None) -> None:
    process = await machine.start("bench", "link", "--rounds", "10000", "--json")
    members = await members_of(process)
    assert len(members) == 2
    assert await process.interrupt() == 130
    assert await gone(members)
    found = json.loads("\n".join(process.out))
    assert not found["complete"]
    assert found["results"]


async def test_members_end_with_a_command_that_is_killed(machine: Any, real_starts: None) -> None:
    idle = await machine.start("bench", "member", "0", "2")  # its input has ended already
    async with asyncio.timeout(20):
        assert await idle.end() == 0
    process = await machine.start("bench", "link", "--rounds", "10000")
    members = await members_of(process)
    await process.kill()
    assert await gone(members)


async def test_a_member_that_dies_is_told(machine: Any, real_starts: None) -> None:
    process = await machine.start("bench", "link", "--rounds", "10000")
    members = await members_of(process)
    members[1].kill()
    assert await process.end() == 5
    assert "error: member " in process.text
    assert await gone(members)


@pytest.mark.slow
async def test_a_far_drafter_beside_none(machine: Any) -> None:
    """Texts are checked against the known one. How fast they come is another day's question."""
    times = ("--pass-ms", "4", "--draft-ms", "0.5", "--tokens", "24", "--texts", "1")
    found = await document(await machine.start("bench", "generate", *times, "--rtt", "8", "--json"))
    (case,) = found["results"]
    assert {name: item["samples"] for name, item in case["contenders"].items()} == {"alone": 1, "ahead": 1}
    assert case["differ"] == 0


@pytest.mark.slow
@pytest.mark.skipif("P2PTRAIN_LONG" not in os.environ, reason="takes half a minute: P2PTRAIN_LONG=1")
async def test_a_real_pair_and_a_split_model_beside_transformers(machine: Any, tmp_path: Path) -> None:
    for name, layers in (("big", 2), ("small", 1)):
        build_model(tiny(layers=layers), 256, seed=1).save_pretrained(tmp_path / name)
        Tokenizer.of_bytes().save(tmp_path / name)
    models = ("--model", str(tmp_path / "big"), "--draft-model", str(tmp_path / "small"), "--split", "2")
    options = ("--tokens", "12", "--texts", "2", "--rtt", "0", "--json")
    found = await document(await machine.start("bench", "generate", *models, *options))
    (case,) = found["results"]
    assert set(case["contenders"]) == {"alone", "ahead", "transformers", "assisted"}
    assert case["differ"] == 0, "fp32 parts compute what the whole does"
