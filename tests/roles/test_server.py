"""Strategy 'server' in the real cluster: what its log says is what was trained, and the server may die."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name

from configs.loader import load
from configs.schema import Profile
from p2ptrain.compute.data import NO_TARGET, load_corpus
from p2ptrain.compute.sampling import WindowSampler
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.trainer import Trainer
from p2ptrain.lab.audit import AuditResult, audit
from p2ptrain.lab.stand_in import StandInEngine
from ring.ledger import counts_of_untrusted
from ring.staleness import Accepted, unpacked_untrusted
from roles.worker.build import engine_builder
from tests.compute.test_packing import ONE_EACH, written
from tests.roles.in_process import Cluster, Peer
from tests.roles.test_cluster import at, done, small_profile, state_of
from tests.roles.test_losses import initial_model
from tests.roles.test_robust import SignFlipping
from wire.records import LedgerPage

MICRO_BATCHES, SEQUENCES, TOKENS = 2, 2, 16
SETS = [
    "job.strategy=server", "job.workers=4", "job.steps=16", "device.threads=1", "validation.every=0",
    "validation.batches=1", "checkpoint.every=0", "model.layers=2", "model.hidden_size=64",
    "model.intermediate_size=128", f"data.sequence_tokens={TOKENS}", f"batch.micro_batches={MICRO_BATCHES}",
    f"batch.micro_batch_sequences={SEQUENCES}", "optimizer.warmup_steps=3", "optimizer.lr=1e-3",
]  # fmt: skip


async def audited(cluster: Cluster, job: str, profile: Profile) -> AuditResult:
    async with cluster.operator() as client:
        verdict = await audit(client, job, profile, lambda *_: None)
    assert verdict.fault is None, verdict.fault
    assert verdict.steps == profile.job.steps
    return verdict


async def versions(cluster: Cluster, job: str) -> list[list[Accepted]]:
    page = LedgerPage.from_map_untrusted(await cluster.ask("jobs.ledger", job=job, after_step=0))
    rows = [row for run in page.runs for row in run.rows()]
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    return [unpacked_untrusted(row.made_of, counts_of_untrusted(row.counts)) for row in rows]


@pytest.mark.parametrize(("buffer", "optimizer", "most"), [(1, "adamw", 1e-6), (2, "sgd", 1e-6), (1, "muon", 5e-4)])
async def test_a_replay_of_the_log_in_plain_torch_ends_with_the_same_weights(
    cluster: Cluster, tmp_path: Path, buffer: int, optimizer: str, most: float
) -> None:
    """With 'sgd' of conversations: a gradient is divided by the targets of all micro-batches of its step. Muon rounds
    to bf16, so it makes much of a gradient's last bit; its updates change a matrix by about 1e-2."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(2000)))
    data = [f"data.path={text}"]
    if optimizer == "sgd":
        data = [f"data.path={written(tmp_path / 'x.jsonl', ONE_EACH)}", "data.format=chat", "data.sequence_tokens=48"]
    sets = [*SETS, *data, f"server.buffer={buffer}", f"optimizer.name={optimizer}"]
    profile = load("tiny", {}, sets).profile
    job = await cluster.create(profile)
    peers = [cluster.join(engine_builder(threads=1)) for _ in range(4)]
    await cluster.job_until(job, done)
    await audited(cluster, job, profile)
    states = [bytes(b"".join(bytes(blob.view) for blob in peer.engines[-1].state.blobs())) for peer in peers]
    assert len(set(states)) == 1
    log = await versions(cluster, job)
    assert max(step - one.base for step, made in enumerate(log) for one in made) > 0, "nothing was stale"
    engine = peers[0].engines[-1]
    assert isinstance(engine, Trainer)
    ours = engine.built.flat.model.state_dict()
    worst = max(
        float((ours[name] - parameter.detach()).norm() / parameter.detach().norm())
        for name, parameter in replayed(profile, log).named_parameters()
    )
    assert worst < most


def replayed(profile: Profile, log: list[list[Accepted]]) -> torch.nn.Module:
    """Train a plain model by the log: each gradient at the weights of its base, weighted, then one step."""
    model, options, buffer = initial_model(profile), profile.optimizer, profile.server.buffer
    corpus = load_corpus(profile.data, Tokenizer.of_bytes())
    sampler = WindowSampler(len(corpus.training), profile.job.seed)
    parameters, share, decay = list(model.parameters()), MICRO_BATCHES // buffer, options.weight_decay
    matrices = [(name, it) for name, it in model.named_parameters() if it.ndim >= 2]
    hidden = [it for name, it in matrices if profile.optimizer.name == "muon" and ".layers." in name]
    decays = [{"params": [it for _, it in matrices if all(it is not one for one in hidden)], "weight_decay": decay},
              {"params": [it for it in parameters if it.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(decays, betas=(options.beta1, options.beta2), eps=options.eps)
    ]
    if hidden:
        optimizers.append(torch.optim.Muon(hidden, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    kept = [[parameter.detach().clone() for parameter in parameters]]

    def gradient(number: int, base: int) -> list[torch.Tensor]:
        newest = [parameter.detach().clone() for parameter in parameters]
        _set(parameters, kept[base])
        model.zero_grad()
        for index in range(number * share, (number + 1) * share):
            step = index // MICRO_BATCHES
            firsts = [(step * MICRO_BATCHES + place) * SEQUENCES for place in range(MICRO_BATCHES)]
            batches = [corpus.batch(corpus.training[sampler.numbered(first, SEQUENCES)]) for first in firsts]
            number = sum(int((batch.targets != NO_TARGET).sum()) for batch in batches)
            batch = batches[index % MICRO_BATCHES]
            logits_btv = model(torch.from_numpy(batch.inputs)).logits  # a conversation fills its window
            targets = torch.from_numpy(batch.targets).flatten()
            loss = F.cross_entropy(logits_btv.flatten(0, 1), targets, reduction="sum", ignore_index=NO_TARGET)
            (loss / number).backward()  # type: ignore[no-untyped-call]
        _set(parameters, newest)
        return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]

    for step, made in enumerate(log):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for one in made:
            assert one.weight == pytest.approx((1 + step - one.base) ** -0.5)
            for total, part in zip(sums, gradient(one.number, one.base), strict=True):
                total += one.weight * part
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total
        torch.nn.utils.clip_grad_norm_(parameters, options.clip_norm)
        least, warm = options.min_lr_ratio, options.warmup_steps
        done = (step - warm) / (profile.job.steps - warm)
        lr = options.lr * (
            (step + 1) / warm if step < warm else least + (1 - least) * (1 + math.cos(math.pi * done)) / 2
        )
        if profile.optimizer.name != "sgd":
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
        else:
            with torch.no_grad():
                for parameter in parameters:
                    assert parameter.grad is not None
                    parameter.mul_(1 - lr * decay * (parameter.ndim >= 2)).sub_(lr * parameter.grad)
        kept.append([parameter.detach().clone() for parameter in parameters])
    return model


def _set(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


async def _server(cluster: Cluster, job: str, peers: list[Peer]) -> Peer:
    members = (await cluster.ask("jobs.show", job=job))["job"]["members"]
    return next(peer for peer in peers if peer.identity.peer_id == members[0])


async def test_the_job_goes_on_without_its_server_and_the_audit_holds(cluster: Cluster) -> None:
    profile = small_profile(job={"strategy": "server", "workers": 4, "steps": 60}, ring={"codec": "int8"})
    job = await cluster.create(profile)
    peers = [cluster.join() for _ in range(4)]
    await cluster.job_until(job, at(10))
    await (await _server(cluster, job, peers)).die()
    await cluster.job_until(job, at(30))
    server = await _server(cluster, job, peers)
    await server.leave()
    await cluster.job_until(job, done)
    verdict = await audited(cluster, job, profile)
    assert verdict.views >= 3
    assert len({state_of(peer) for peer in peers if not peer.stop.is_set() and not peer.task.done()}) == 1


async def test_no_worker_waits_for_a_slow_one_and_its_stale_gradient_is_refused(cluster: Cluster) -> None:
    lock, go_on, slow = threading.Lock(), threading.Event(), list[StandInEngine]()

    def build(profile: Profile) -> StandInEngine:
        def first_is_slow(step: int, index: int) -> None:
            with lock:
                slow.extend([engine] * (not slow))
            assert slow[0] is not engine or go_on.wait(60), "the test never let it go on"

        engine = StandInEngine(profile, on_micro_batch=first_is_slow)
        return engine

    profile = small_profile(job={"strategy": "server", "workers": 3, "steps": 60}, server={"bound": 4})
    job = await cluster.create(profile)
    peers = [cluster.join(build) for _ in range(3)]
    await cluster.job_until(job, at(20))
    go_on.set()
    await cluster.job_until(job, done)
    await audited(cluster, job, profile)
    assert len({state_of(peer) for peer in peers}) == 1
    late = next(peer for peer in peers if peer.engines[-1] is slow[0])
    assert late.worker is not None
    assert late.worker._runner is not None
    assert late.worker._runner.activity_runner.contribution_stats()["refused"] >= 1


class NotFinite(StandInEngine):
    def contribution(self, step: int, index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        values = super().contribution(step, index)
        values[3] = np.nan
        return values


async def test_a_worker_whose_gradients_are_not_finite_is_excluded(cluster: Cluster) -> None:
    profile = small_profile(
        job={"strategy": "server", "workers": 3, "steps": 60}, robust={"rule": "mean", "byzantine": 0}
    )
    job = await cluster.create(profile)
    for _ in range(3):
        cluster.join()
    await cluster.job_until(job, at(5))
    newcomer = cluster.join(NotFinite)
    await cluster.job_until(job, done)
    await audited(cluster, job, profile)
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=100))["rows"]
    assert all(math.isfinite(row["loss"]) for row in rows)
    events = (await cluster.ask("events.list", limit=100))["events"]
    assert any(f"{newcomer.identity.name} is excluded" in event["text"] for event in events)


async def test_a_job_whose_gradients_are_nowhere_finite_fails(cluster: Cluster) -> None:
    job = await cluster.create(small_profile(job={"strategy": "server", "workers": 3}))
    for _ in range(3):
        cluster.join(NotFinite)
    record = await cluster.job_until(job, lambda item: item["state"] == "failed")
    assert "not finite on any worker" in record["reason"]


async def test_a_job_that_ends_early_tells_no_worker_that_every_step_is_done_and_each_has_every_row(
    cluster: Cluster,
) -> None:
    profile = small_profile(job={"strategy": "server", "workers": 3, "steps": 4000}, validation={"patience": 1})
    job = await cluster.create(profile)
    peers = [cluster.join() for _ in range(3)]
    record = await cluster.job_until(job, done)
    assert record["reason"].startswith("stopped early")
    for peer in peers:
        await peer.hears("the job is done")
        assert not any("all " in text for _, kind, text in peer.told if kind == "done")
        assert peer.worker is not None
        assert peer.worker._runner is not None
        assert [row.step for _, row in peer.worker._runner.state.reports.ledger._rows] == [
            *range(1, record["step"] + 1)
        ]


async def test_a_robust_rule_withstands_a_worker_that_flips_signs(cluster: Cluster) -> None:
    job_table, batch, server = {"strategy": "server", "workers": 4, "steps": 24}, {"micro_batches": 6}, {"buffer": 3}
    profile = small_profile(job=job_table, batch=batch, server=server, robust={"rule": "median"})
    job = await cluster.create(profile)
    for build in (StandInEngine, StandInEngine, StandInEngine, SignFlipping):
        cluster.join(build)
    ended = await cluster.job_until(job, done)
    log = await versions(cluster, job)
    assert all(len({one.rank for one in made}) == 3 for made in log)
    assert sum(score["steps"] for score in ended["scores"]) == 3 * 24
    assert ended["scores"][0]["steps"] == 0, "the server contributes nothing"
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=100))["rows"]
    assert rows[-1]["loss"] < rows[0]["loss"] / 3
