"""``p2ptrain bench`` as a person runs it: real processes, real sockets, torch's own Gloo."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2ptrain.compute.model import build_model
from p2ptrain.compute.testing import tiny
from p2ptrain.compute.tokenizer import Tokenizer


async def document(process: Any) -> Any:
    """Standard output as one JSON document, and nothing else."""
    assert await process.end() == 0, process.text
    return json.loads("\n".join(process.out))


async def members_of(process: Any) -> list[psutil.Process]:
    await process.until(r"round 1")
    return psutil.Process(process.process.pid).children()


async def all_gone(members: list[psutil.Process]) -> None:
    await asyncio.to_thread(psutil.wait_procs, members, 10)
    assert not [member for member in members if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]


async def test_the_ring_beside_gloo_and_sockets(machine: Any) -> None:
    process = await machine.start("bench", "allreduce", "--sizes", "4K,1M", "--rounds", "2", "--json", "-")
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
    options = ("--sizes", "1M", "--rounds", "1", "--tls", "--codec", "int8", "--link", "lan", "--json", "-")
    found = await document(await machine.start("bench", "allreduce", *options))
    result = found["results"][0]
    assert set(result["contenders"]) == {"ring", "ring plain"}
    assert 1e-4 < result["relative_errors"]["ring"] < 0.05
    assert result["relative_errors"]["ring plain"] < 1e-6


@pytest.mark.slow
async def test_training_steps_beside_ddp(machine: Any) -> None:
    arguments = ("--steps", "6", "--json", "-", *machine.settings(job__workers=2))
    results = (await document(await machine.start("bench", "step", *arguments)))["results"]
    assert results["tokens_per_step"] == 8 * 2 * 32
    assert len(results["contenders"]["ring"]["seconds"]) == len(results["contenders"]["ddp"]["seconds"]) == 6
    assert results["largest_relative_loss_difference"] < 1e-4
    assert results["ring_to_ddp"] > 0
    assert len(results["exposed_s"]) == 6


@pytest.mark.slow
async def test_members_steps_while_a_newcomer_heals(machine: Any) -> None:
    options = ("--heals", "1", "--quiet", "8", "--set", "data.sequence_tokens=16", "--json", "-")
    process = await machine.start("bench", "heal", *options)
    found = await document(process)
    assert found["complete"]
    (heal,) = found["results"]["heals"]
    assert len(heal["before"]) >= 8
    assert len(heal["after"]) >= 8
    assert found["results"]["pinned"]
    if heal["beside"]:  # a busy machine may be too slow for that
        assert heal["state_bytes"] > 20e6
        assert heal["inside"]
        assert heal["pause_s"] > 0
        assert found["results"]["added"] is not None


@pytest.mark.slow
async def test_ctrl_c_while_a_newcomer_heals_leaves_no_process(machine: Any) -> None:
    process = await machine.start("bench", "heal", "--quiet", "8", "--json", "-", *machine.settings())
    await process.until("heal 1 of 10")
    members = psutil.Process(process.process.pid).children()
    assert len(members) == 3
    assert await process.interrupt() == 130
    await all_gone(members)
    assert not json.loads("\n".join(process.out))["complete"]


async def test_schedules_of_a_pipeline_over_a_slow_link(machine: Any) -> None:
    """Real stages. How fast is another day's question: a busy machine may hold anybody up."""
    options = ("--stages", "3", "--micro-batches", "4", "--rtt", "0,30", "--forward-ms", "10", "--backward-ms", "20")
    process = await machine.start("bench", "pipeline", *options, "--steps", "1", "--payload", "64K", "--json", "-")
    found = await document(process)
    assert found["complete"]
    near, far = found["results"]["distances"]
    assert far["measured_s"][0] > 0.03 > near["measured_s"][0]
    assert len(far["measured_s"]) == 2
    for item in (*near["schedules"].values(), *far["schedules"].values()):
        assert item["median_s"] >= item["ideal_s"] - 0.003, "a step that took less than it can"
        assert item["computed_s"][0] >= 0.12
    kept = {name: item["in_flight"] for name, item in far["schedules"].items()}
    assert kept["1f1b"] == [3, 2, 1]
    assert kept["extended"] in ([4, 3, 1], [4, 4, 1]), "as the link was measured"


async def test_ctrl_c_in_a_step_of_a_pipeline_leaves_no_process(machine: Any) -> None:
    process = await machine.start(
        "bench", "pipeline", "--rtt", "0", "--steps", "1000", "--micro-batches", "2", "--json", "-"
    )
    await process.until("step 1 of 1000")
    members = psutil.Process(process.process.pid).children()
    assert len(members) == 2
    assert await process.interrupt() == 130
    await all_gone(members)
    assert not json.loads("\n".join(process.out))["complete"]


async def test_a_stage_that_is_killed_is_told(machine: Any) -> None:
    process = await machine.start("bench", "pipeline", "--rtt", "0", "--steps", "1000", "--micro-batches", "2")
    await process.until("step 1 of 1000")
    members = psutil.Process(process.process.pid).children()
    members[1].kill()
    assert await process.end() in (3, 5)
    assert "error: member " in process.text
    await all_gone(members)


async def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(machine: Any) -> None:
    process = await machine.start("bench", "link", "--json", "-")
    members = await members_of(process)
    assert len(members) == 2
    assert await process.interrupt() == 130
    await all_gone(members)
    found = json.loads("\n".join(process.out))
    assert not found["complete"]
    assert found["results"]["transfers"]


async def test_members_end_with_a_command_that_is_killed(machine: Any) -> None:
    idle = await machine.start("bench", "member", "0", "2")  # its input has ended already
    async with asyncio.timeout(20):
        assert await idle.end() == 0
    process = await machine.start("bench", "link", "--rounds", "10000")
    members = await members_of(process)
    await process.kill()
    await all_gone(members)


async def test_a_member_that_dies_is_told(machine: Any) -> None:
    process = await machine.start("bench", "link", "--rounds", "10000")
    members = await members_of(process)
    members[1].kill()
    assert await process.end() == 5
    assert "error: member " in process.text
    await all_gone(members)


# --------------------------------------------------------------------------------------------------- whole clusters


async def peers_of(process: Any, names: int) -> list[psutil.Process]:
    """The command's children, as soon as there are so many."""
    peers = psutil.Process(process.process.pid).children(recursive=True)
    assert len(peers) == names, [peer.cmdline() for peer in peers]
    return peers


@pytest.mark.slow
async def test_a_slow_worker_beside_the_fast_one_alone(machine: Any) -> None:
    arguments = ("--rounds", "1", "--steps", "4", "--json", "-", *machine.settings(job__exact="true"))
    process = await machine.start("bench", "uneven", *arguments, TMPDIR=str(machine.root))
    results = (await document(process))["results"]
    assert results["both_to_alone"] > 0
    assert results["losses"]["bit_equal"] == results["losses"]["steps"] == 14
    assert sum(item["steps"] for item in results["shares"]) == 4
    assert all(sum(item["shares"]) == 8 for item in results["shares"])
    assert results["slowed_by"][0] > 2
    assert list(machine.root.glob("p2ptrain-bench-*")) == []


@pytest.mark.slow
async def test_ctrl_c_leaves_no_slowed_worker_behind(machine: Any) -> None:
    arguments = ("--rounds", "1", "--steps", "100000", *machine.settings())
    process = await machine.start("bench", "uneven", *arguments, TMPDIR=str(machine.root))
    await process.until("of 100010")
    peers = await peers_of(process, 2)
    assert await process.interrupt() == 130
    await all_gone(peers)
    assert "interrupted" in process.text
    assert list(machine.root.glob("p2ptrain-bench-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
async def test_a_slowed_worker_ends_with_the_command(machine: Any, killed: bool) -> None:
    # So slow that it is stopped when the command ends, and that the command does not end by itself.
    arguments = ("--rounds", "1", "--steps", "20", *machine.settings(), "--slower", "50")
    process = await machine.start("bench", "uneven", *arguments, TMPDIR=str(machine.root))
    await process.until("slow one: it runs one part in 50 of the time now")
    peers = await peers_of(process, 4)
    if killed:
        await process.kill()
    else:
        assert await process.interrupt() == 130
    await all_gone(peers)


@pytest.mark.slow
async def test_checkpoints_beside_the_steps_around_them(machine: Any) -> None:
    sets = machine.settings(checkpoint__every=0, validation__every=0)
    arguments = ("--size", "100K", "--saves", "2", "--quiet", "2", "--json", "-", "--state", str(machine.root), *sets)
    results = (await document(await machine.start("bench", "save", *arguments)))["results"]
    assert len(results["first"]) == 1
    assert len(results["saves"]) == 2
    for item in results["saves"]:
        assert item["size_bytes"] > 0
        assert item["writers"] == 2
        assert item["writing_s"] > 0
        assert item["overlapped_s"]
        assert len(item["quiet_s"]) >= 4
    assert list(machine.root.glob("p2ptrain-bench-*")) == []


@pytest.mark.slow
async def test_ctrl_c_between_saves_keeps_what_was_measured(machine: Any) -> None:
    arguments = ("--size", "100K", "--saves", "1000", "--json", "-", "--state", str(machine.root))
    process = await machine.start("bench", "save", *arguments, *machine.settings())
    await process.until(r"save [2-9] of 1000 is durable")
    peers = await peers_of(process, 5)  # a seed, two workers, their writers
    assert await process.interrupt() == 130
    await all_gone(peers)
    found = json.loads("\n".join(process.out))
    assert not found["complete"]
    assert len(found["results"]["saves"]) >= 1
    assert list(machine.root.glob("p2ptrain-bench-*")) == []


SMALL_CHAIN = ("--layers", "4", "--width", "64", "--vocab", "300", "--prompt", "12", "--tokens", "10")


async def test_a_token_on_its_way_through_a_chain(machine: Any) -> None:
    """Real stages, whose tokens are those of the whole model. How fast is another day's question."""
    process = await machine.start("bench", "chain", "--stages", "2", *SMALL_CHAIN, "--rtt", "30", "--json", "-")
    found = await document(process)
    assert found["complete"]
    (distance,) = found["results"]["distances"]
    assert distance["as_the_whole"]
    assert distance["link_s"] == pytest.approx(3 * 0.015)
    assert distance["token_s"] > distance["link_s"] + sum(distance["stages_us"]) / 2e6, "each hop takes its delay"
    assert distance["rest_s"] > -0.005, "a link that was faster than it is"
    assert [(stage["start"], stage["stop"]) for stage in distance["stages"]][-1][1] == 4
    assert distance["sessions_tokens_per_s"] > 0


@pytest.mark.slow
async def test_stages_killed_in_the_midst_of_a_text(machine: Any) -> None:
    options = ("--stages", "1", "--sessions", "1", "--rtt", "20", "--kill", "--json", "-")
    found = await document(await machine.start("bench", "chain", *options, *SMALL_CHAIN))
    kills = found["results"]["distances"][0]["kills"]
    assert [(kill["stage"], kill["phase"]) for kill in kills] == [(0, "prefill"), (0, "decode"), (0, "between")]
    assert [kill["alike"] for kill in kills] == [True] * 3
    assert [kill["failed"] for kill in kills] == [""] * 3


async def test_ctrl_c_while_a_chain_is_measured_leaves_nothing(machine: Any) -> None:
    options = ("--stages", "2", "--rtt", "0", *SMALL_CHAIN, "--tokens", "600", "--json", "-")
    process = await machine.start("bench", "chain", *options)
    await process.until("one text")
    members = psutil.Process(process.process.pid).children()
    assert len(members) == 3
    assert await process.interrupt() == 130
    await all_gone(members)
    assert not json.loads("\n".join(process.out))["complete"]


async def test_a_far_drafter_beside_none_and_one_that_is_killed(machine: Any) -> None:
    times = ("--pass-ms", "4", "--draft-ms", "0.5", "--tokens", "24", "--texts", "1")
    process = await machine.start("bench", "speculate", *times, "--rtt", "8", "--kill", "--json", "-")
    found = await document(process)
    assert found["complete"]
    (row,) = found["results"]["rows"]
    assert row["accepted_length"] >= 1
    assert row["goal_s"] is None
    assert row["bytes_per_token"] > 0
    assert min(row[name] for name in ("alone_s", "in_turns_s", "token_s", "simulated_s")) > 0
    (kill,) = found["results"]["kills"]
    assert 12 <= kill["killed_at"] <= 24


@pytest.mark.slow
async def test_a_real_pair_beside_assisted_generation(machine: Any, tmp_path: Path) -> None:
    for name, layers in (("big", 2), ("small", 1)):
        build_model(tiny(layers=layers), 256, seed=1).save_pretrained(tmp_path / name)
        Tokenizer.of_bytes().save(tmp_path / name)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def main(\nOnce upon a time")
    pair = ("--verifier", str(tmp_path / "big"), "--drafter", str(tmp_path / "small"), "--prompts", str(prompts))
    found = await document(
        await machine.start("bench", "speculate", *pair, "--tokens", "12", "--rtt", "0", "--json", "-")
    )
    assert [row["name"] for row in found["results"]["rows"]] == ["greedy", "drawn"]
    for row in found["results"]["rows"]:
        assert min(row[name] for name in ("alone_per_s", "ahead_per_s", "plain_per_s", "assisted_per_s")) > 0
    assert found["results"]["rows"][0]["assisted_alike"] == 2
