"""An island's processes as threads of this one, over Gloo, against one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from configs.loader import load
from p2ptrain.compute import reduce_buffer
from p2ptrain.compute.data import DataSpec
from p2ptrain.compute.device import pick_device
from p2ptrain.compute.fsdp import mesh_of
from p2ptrain.compute.island import Island, IslandTrainer
from p2ptrain.compute.local import LocalSpec
from p2ptrain.compute.reduce_buffer import HostCopier
from p2ptrain.core.errors import ConfigError, ConnectionLost, P2PTrainError, ResourceError
from p2ptrain.core.island import IslandPlace
from roles.worker.build import check_island, island_trainer
from tests.compute.saving import save
from tests.compute.test_packing import ONE_EACH, written
from tests.compute.tiny_trainer import MICRO_BATCHES, run_step, state_bytes, tiny_spec, tiny_trainer, validate_all

NUMBERS = itertools.count()
WINDOWS = Path(__file__).parents[2] / "ARCHITECTURE.md"


def gloo(store: dist.Store, rank: int, size: int) -> dist.DeviceMesh:
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
    group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(f"island-{next(NUMBERS)}")
    return mesh_of(group, "cpu")


class Islanders:
    """``size`` processes. ``build`` at the leader; the others have followed since."""

    def __init__(self, size: int, lost: Callable[[P2PTrainError], None] = lambda problem: None) -> None:
        device, store = pick_device("cpu", 1), dist.HashStore()
        self.device = device

        def made(rank: int) -> Island:
            return Island(IslandPlace(rank, size, rank, size, "", 0), device, gloo(store, rank, size), lost)

        with ThreadPoolExecutor(size) as pool:
            self.islands = list(pool.map(made, range(size)))
        self.leader = self.islands[0]
        self.specs: dict[str, Any] = {}
        self.trainers: dict[int, IslandTrainer] = {}

    def follow(self, rank: int) -> None:
        self.islands[rank].follow(lambda name: self.make(rank, name))

    def make(self, rank: int, name: str) -> IslandTrainer:
        spec = self.specs[name]
        if isinstance(spec, P2PTrainError) and rank:
            raise spec
        spec = tiny_spec(WINDOWS) if isinstance(spec, P2PTrainError) else spec
        self.trainers[rank] = IslandTrainer(spec, self.device, self.islands[rank])
        return self.trainers[rank]

    def build(self, spec: Any) -> IslandTrainer:
        name = str(len(self.specs))
        self.specs[name] = spec
        return self.leader.build(name, lambda: self.make(0, name))


@contextmanager
def islanders(size: int = 2) -> Iterator[Islanders]:
    made = Islanders(size)
    with ThreadPoolExecutor(size) as pool:
        following = [pool.submit(made.follow, rank) for rank in range(1, size)]
        try:
            yield made
        finally:
            made.leader.end()
        for future in following:
            future.result(30)


def test_an_island_learns_what_one_process_does() -> None:
    """Of three: the second round has a micro-batch for one process only."""
    alone = tiny_trainer(WINDOWS)
    losses = [run_step(alone, step) for step in range(10)]
    with islanders(3) as made:
        together = made.build(tiny_spec(WINDOWS))
        assert [run_step(together, step) for step in range(10)] == pytest.approx(losses, abs=1e-5)
        assert validate_all(together) == pytest.approx(validate_all(alone))
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("form", ["text", "chat"])
def test_an_inner_step_of_an_island_is_one_of_all_its_micro_batches(tmp_path: Path, form: str) -> None:
    """So two processes with micro-batches of two sequences do what one does with half as many, of four. Those of
    conversations have different numbers of targets."""
    path = WINDOWS if form == "text" else written(tmp_path / "x.jsonl", ONE_EACH)
    data = DataSpec(path=str(path), sequence_tokens=48, format=form, validation_fraction=0.3)
    spec = tiny_spec(path, data=data, local=LocalSpec(outer_lr=1.0), micro_batches=8)
    alone = tiny_trainer(WINDOWS, data=data, local=spec.local, micro_batches=4, micro_batch_sequences=4)
    losses = [run_step(alone, step) for step in range(5)]
    with islanders() as made:
        together = made.build(spec)
        found = [run_step(together, step, micro_batches=8) for step in range(5)]
        assert found == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] - 0.5


def test_state_checkpoints_and_digests_are_those_of_a_worker_of_one_process(tmp_path: Path) -> None:
    alone = tiny_trainer(WINDOWS)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with islanders() as made:
        together = made.build(tiny_spec(WINDOWS))
        assert state_bytes(together) == state_bytes(alone)  # the first weights
        for step in range(3):
            run_step(alone, step)
        for blob, written in zip(together.state.blobs(), alone.state.blobs(), strict=True):  # as healing does
            blob.view[:] = written.view
        together.state.refresh(3)
        assert state_bytes(together) == state_bytes(alone)
        for trainer, path in ((together, ours), (alone, theirs)):
            save(trainer, path)
        found, wanted = ({it.name: it.read_bytes() for it in path.iterdir()} for path in (ours, theirs))
        assert found == wanted
        run_step(together, 3)
        together.state.load(theirs)
        assert state_bytes(together) == state_bytes(alone)
        together.state.load_initial()
        alone.state.load_initial()
        assert state_bytes(together) == state_bytes(alone)


def test_contribution_is_measured_in_the_array_of_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a worker of one process has a copier that measures the pieces which it copies. In an island it has none
    to copy."""
    unused = HostCopier(lambda start, stop, piece: pytest.fail("copied"), [1], torch.zeros(1, dtype=torch.float64))
    monkeypatch.setattr(reduce_buffer, "host_copier", lambda *_: unused)
    with islanders() as made:
        together = made.build(tiny_spec(WINDOWS))
        run_step(together, 0)
        numel = len(together.reduce_buffer)
        assert together.contributed_square_sum(0, numel) == together.partial_square_sum(0, numel) > 0


@pytest.mark.parametrize("local", [None, LocalSpec()], ids=["sync", "local"])
def test_a_sum_of_the_ring_gives_the_bits_that_a_worker_of_one_process_has(local: LocalSpec | None) -> None:
    alone = tiny_trainer(WINDOWS, local=local)
    with islanders(3) as made:
        together = made.build(tiny_spec(WINDOWS, local=local))
        for step in range(3):
            for trainer in (alone, together):
                trainer.begin_step(step)
                for index in range(MICRO_BATCHES):
                    trainer.micro_batch(step, index)
                trainer.finish_gradients()
            together.reduce_buffer[:] = alone.reduce_buffer
            square_sum = alone.partial_square_sum(0, len(alone.reduce_buffer))
            assert together.partial_square_sum(0, len(alone.reduce_buffer)) == square_sum
            assert together.apply(step, square_sum) == alone.apply(step, square_sum)
            assert state_bytes(together) == state_bytes(alone)


def test_idle_processes_hear_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.compute.island.BEAT_S", 0.0)
    loss = run_step(tiny_trainer(WINDOWS), 0)
    with islanders() as made:
        assert run_step(made.build(tiny_spec(WINDOWS)), 0) == pytest.approx(loss, abs=1e-5)


def test_a_model_that_one_process_cannot_build_is_refused_by_all() -> None:
    with islanders() as made:
        with pytest.raises(ResourceError, match="process 1 of this worker: no memory"):
            made.build(ResourceError("no memory"))
        assert made.build(tiny_spec(WINDOWS)).data.tokens_per_micro_batch


def test_a_lost_process_is_reported_and_the_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.compute.island.LEAVE_S", 0.0)
    told: list[P2PTrainError] = []
    made = Islanders(2, told.append)
    made.specs["no model"] = ConfigError("none")
    made.islands.pop()  # and its connections with it
    with pytest.raises(ConnectionLost, match="lost, or failed: Connection closed by peer") as raised:
        made.leader.build("", lambda: made.make(0, "no model"))
    assert told == [raised.value]


def test_a_memory_limit_is_for_all_processes_together() -> None:
    with islanders() as made, pytest.raises(ResourceError, match=r"this worker offers 1\.0 KiB"):
        island_trainer(load("tiny", {}, []).profile, made.leader, made.device, 2 << 10)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["job.exact=true"], "job.exact"),
        (["lora.rank=4", "model.path=/a"], "lora.rank"),
        (["job.strategy=pipeline", "pipeline.stages=2"], "job.strategy = 'pipeline'"),
        (["job.strategy=local", "local.fragments=2"], "local.fragments"),
    ],
)
def test_jobs_that_an_island_cannot_train_are_refused_with_a_remedy(settings: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot train a job with {named}") as raised:
        check_island(load("tiny", {}, settings).profile)
    assert "join --device cuda:0" in raised.value.remedy
