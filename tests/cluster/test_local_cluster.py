"""Why a child process ended, told by its parent."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cluster import local_cluster
from p2ptrain.cluster.local_cluster import LocalCluster, PeerProcess
from p2ptrain.cluster.running import running_seeds
from p2ptrain.core.errors import ConnectionLost, JobFailed, UserError
from tests.cluster.doubles import Process
from wire.records import PeerInfo
from wire.schema import Record


def old(directory: Path) -> Path:
    """The log that an earlier child left."""
    log = directory / "log"
    log.write_text("error: of an earlier start\n  → its remedy\n")
    return log


async def child(log: Path, *arguments: str) -> PeerProcess:
    """A child that ended by itself."""
    made = await PeerProcess.start("one", list(arguments), log)
    await made.process.wait()
    return made


async def test_its_own_error_and_remedy(tmp_path: Path) -> None:
    failed = (await child(old(tmp_path), "sed")).failure("it did not start")
    assert failed.exit_code == 2, "as that of the process"
    assert failed.message == "it did not start: no such command: sed"
    assert failed.remedy == f"did you mean seed? `p2ptrain --help` lists the commands; its log is {tmp_path / 'log'}"


async def test_the_error_of_an_earlier_start_is_not_its_own(tmp_path: Path) -> None:
    failed = (await child(old(tmp_path), "seed", "--help")).failure("it ended")
    assert (failed.message, failed.remedy) == ("it ended", f"its log is {tmp_path / 'log'}")


async def test_the_signal_that_killed_it(tmp_path: Path) -> None:
    made = await PeerProcess.start(
        "one", ["seed", "--no-job", "--port", "0", "--state", str(tmp_path)], tmp_path / "log"
    )
    made.process.send_signal(signal.SIGKILL)
    await made.process.wait()
    failed = made.failure("it ended")
    assert failed.message == "it ended: it was killed by SIGKILL"
    assert failed.remedy == f"the machine may have run out of memory; its log is {tmp_path / 'log'}"
    assert failed.exit_code == 5


async def test_a_port_that_is_taken_when_the_seed_starts_is_no_obstacle_if_nobody_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(local_cluster, "DEFAULT_PORT", taken.getsockname()[1])
        cluster = LocalCluster(tmp_path, announce=True)
        try:
            await cluster.start_seed()
            assert cluster.port not in (0, taken.getsockname()[1])
            assert [seed.address for seed in running_seeds()] == [("127.0.0.1", cluster.port)]
        finally:
            await cluster.end()
        assert running_seeds() == []


async def test_taken_web_address_is_named_by_the_option_of_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cluster = LocalCluster(tmp_path, web=taken.getsockname())
        with pytest.raises(UserError, match="in use") as caught:
            await cluster.start_seed()
    assert "--web" in caught.value.remedy
    assert "--http" not in caught.value.remedy


async def test_a_line_of_many_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talks = tmp_path / "talks"
    talks.write_text(f"#!{sys.executable}\nprint('x' * 1_000_000)\n")
    talks.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(talks))
    made = await PeerProcess.start("one", [], tmp_path / "log", listen=True)
    assert made.process.stdout is not None
    assert len(await made.process.stdout.readline()) == 1_000_001
    await made.process.wait()


def living(directory: Path, *names: str) -> tuple[list[PeerProcess], list[Process]]:
    processes = [Process() for _ in names]
    children = [PeerProcess(name, process, directory / name, 0) for name, process in zip(names, processes, strict=True)]  # type: ignore[arg-type]
    return children, processes


async def test_work_ends_with_a_process_that_it_needs(tmp_path: Path) -> None:
    cluster, (children, processes) = LocalCluster(tmp_path, 1), living(tmp_path, "seed", "one", "two")
    told: list[str] = []
    working = asyncio.create_task(
        cluster.while_alive(
            asyncio.Event().wait(),
            needed=children[:1],
            others=children[1:],
            least=1,
            on_end=lambda child: told.append(child.name),
        )
    )
    processes[1].die()
    await asyncio.sleep(0.01)
    assert (told, working.done()) == (["one"], False), "another one lives"
    processes[2].die()
    with pytest.raises(JobFailed, match="two ended"):
        await working
    children, processes = living(tmp_path, "seed")
    working = asyncio.create_task(cluster.while_alive(asyncio.Event().wait(), needed=children))
    processes[0].die()
    with pytest.raises(JobFailed, match="seed ended"):
        await working


async def test_that_a_process_died_says_more_than_that_its_connection_is_lost(tmp_path: Path) -> None:
    cluster, (children, processes) = LocalCluster(tmp_path, 1), living(tmp_path, "seed")

    async def loses() -> None:
        asyncio.get_running_loop().call_later(0.01, processes[0].die)
        raise ConnectionLost("the seed ended the connection")

    (tmp_path / "seed").write_text("error: no room\n  → make some\n")
    with pytest.raises(JobFailed, match="seed ended: no room"):
        await cluster.while_alive(loses(), needed=children)
    with pytest.raises(ConnectionLost, match="the seed ended the connection"):
        await cluster.while_alive(loses(), needed=[])


class Seed:
    """A client that hears these updates."""

    def __init__(self, *updates: list[Record]) -> None:
        self._updates = updates

    async def news(self) -> AsyncIterator[list[Record]]:
        for update in self._updates:
            yield update


async def test_a_peer_that_went_away_again_has_not_joined(tmp_path: Path) -> None:
    class Watched(LocalCluster):
        def operator(self) -> Any:
            return nullcontext(seed)

    cluster = Watched(tmp_path, 1)
    cluster._seed = living(tmp_path, "seed")[0][0]
    one, two = (PeerInfo(name, name, ["worker"], "cpu", "idle", "", 0.0) for name in ("one", "two"))
    seed = Seed([one], [replace(one, state="left")], [two])
    await cluster.wait_until_joined(["one"])
    with pytest.raises(ConnectionLost):
        await cluster.wait_until_joined(["one", "two"])


async def test_the_result_of_work(tmp_path: Path) -> None:
    assert await LocalCluster(tmp_path, 1).while_alive(asyncio.sleep(0, 7), needed=living(tmp_path, "seed")[0]) == 7
