"""One pool of real processes: a served model gains a drafter from an idle worker, and gives it back to a job."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.compute.model import build_model
from p2ptrain.compute.tokenizer import Tokenizer
from tests.compute.tiny_trainer import tiny
from tests.e2e.conftest import DEADLINE_S, Machine

pytestmark = pytest.mark.slow


async def state_is(machine: Machine, name: str, *states: str) -> dict[str, Any]:
    """The record of a peer, as soon as it is in one of these states."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            peers = {peer["name"]: peer for peer in (await machine.ask("peers.list"))["peers"]}
            if name in peers and peers[name]["state"] in states:
                found: dict[str, Any] = peers[name]
                return found
            await asyncio.sleep(0.1)


async def test_idle_worker_drafts_and_goes_to_a_job(machine: Machine, tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    for directory, layers in ((large, 6), (small, 1)):
        build_model(tiny(layers=layers, context=4096), 256, seed=1).save_pretrained(directory)
        Tokenizer.of_bytes().save(directory)
    await machine.seed("--no-job")
    verifier = await machine.join("--role", "verifier", "--model", str(large), "--name", "v")
    worker = await machine.join("--name", "w", "--allow", "train,serve,draft", "--model", str(small), "--threads", "1")
    await verifier.until("drafter w drafts with small")
    assert (await state_is(machine, "w", "drafting"))["model"] == "small"
    asked = ["generate", "once upon a time", "-n", "200", "--temperature", "0", "--seed", f"127.0.0.1:{machine.port}"]
    code, drafted = await machine.run(*asked, "--json")
    assert code == 0, drafted
    profile = ["--profile", "tiny", *machine.settings(job__workers=1, job__steps=30)]
    code, text = await machine.run("jobs", "create", *profile, "--seed", f"127.0.0.1:{machine.port}")
    assert code == 0, text
    await worker.until("building the model")
    done = await machine.job_until(lambda job: job["state"] == "done")
    assert done["step"] == 30
    await state_is(machine, "w", "drafting")
    code, text = await machine.run("status", "--seed", f"127.0.0.1:{machine.port}")
    assert "matching, workers moved 1 times" in text
    code, again = await machine.run(*asked, "--json")
    assert json.loads(again)["text"] == json.loads(drafted)["text"]


async def test_stage_moves_when_a_job_takes_its_worker(machine: Machine, tmp_path: Path) -> None:
    large = tmp_path / "large"
    build_model(tiny(layers=4, context=4096), 256, seed=1).save_pretrained(large)
    Tokenizer.of_bytes().save(large)
    await machine.seed("--no-job")
    seed = ["--seed", f"127.0.0.1:{machine.port}"]
    first = await machine.join("--name", "first", "--threads", "1")
    verifier = await machine.join("--role", "verifier", "--model", str(large), "--split", "--name", "v")
    await machine.served_until(lambda served: any(info.is_ready for info in served))
    asked = ["generate", "once upon a time", "-n", "100", "--temperature", "0", *seed, "--json"]
    code, before = await machine.run(*asked)
    assert code == 0, before
    assert [part["peer_name"] for part in (await machine.ask("parts.list"))["parts"]] == ["first"]
    profile = ["--profile", "tiny", *machine.settings(job__workers=1, job__steps=100_000)]
    code, text = await machine.run("jobs", "create", *profile, *seed)
    assert code == 0, text
    await first.until("building the model")
    code, beside = await machine.run(*asked)
    assert code == 0, "nobody else is there: the worker trains and serves"
    await machine.join("--name", "second", "--threads", "1")
    await verifier.until("second holds stage 0")
    code, after = await machine.run(*asked)
    assert code == 0, after
    texts = [json.loads(output)["text"] for output in (before, beside, after)]
    assert texts[0] == texts[1] == texts[2]
    peers = {peer["name"]: (peer["state"], peer["job"]) for peer in (await machine.ask("peers.list"))["peers"]}
    assert peers["first"][1]
    assert peers["second"] == ("serving", "")
