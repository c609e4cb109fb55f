"""``p2ptrain check``: every line can pass, every line can fail, and each failure names its remedy."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli.check import ProbeContext, ProbeResult, run_probes
from p2ptrain.cluster.access import Caller, reach
from p2ptrain.cluster.running import default_state_dir
from p2ptrain.core.errors import Refused, UserError
from p2ptrain.core.world import LoopClock
from tests.roles.in_process import Cluster
from wire.messages import Refuse
from wire.transport import TcpNetwork

from .conftest import Command

NAMES = ["DNS", "TCP", "handshake", "clock", "round trip", "dial-back"]


def _outcomes(document: dict[str, Any]) -> dict[str, bool | None]:
    return {line["name"]: line["ok"] for line in document["checks"]}


def test_all_is_well(command: Command, fake_seed: Any) -> None:
    outcome = command("check")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert [line[0] for line in lines] == ["✓"] * len(NAMES)
    for line, name in zip(lines, NAMES, strict=True):
        assert line.startswith(f"✓ {name} ")
    for part in (
        "127.0.0.1 is 127.0.0.1",
        "fake runs p2ptrain",
        "cluster c1",
        "median of 10",
        "the seed can reach this machine at 127.0.0.1:",
    ):
        assert part in outcome.out
    assert fake_seed.joined == []


def test_a_machine_behind_a_router_can_take_part_and_is_told_in_which_way(command: Command, fake_seed: Any) -> None:
    fake_seed.unreached = "cannot reach 203.0.113.7:7339: no answer within 5 s"
    outcome = command("check", "--json")
    assert (outcome.code, _outcomes(outcome.json)) == (0, dict.fromkeys(NAMES, True))
    line = outcome.json["checks"][-1]
    assert line["detail"].startswith("this machine can take part: others reach it through a relay, and directly where")
    assert line["detail"].endswith(f"firewall: {fake_seed.unreached}")
    for word in ("ufw allow", "nft insert rule", "netsh", "--advertise"):
        assert word in line["remedy"]


def test_once_joins_as_a_worker_and_leaves(command: Command, fake_seed: Any) -> None:
    outcome = command("check", "--once", "--json")
    assert _outcomes(outcome.json) == dict.fromkeys([*NAMES, "join"], True)
    (hello,) = fake_seed.joined
    assert (hello.roles, hello.purpose) == (["worker"], "peer")
    assert hello.port > 0
    assert fake_seed.left.get(timeout=10).reason == "it was only a check"


def test_nobody_there(command: Command, free_port: int) -> None:
    outcome = command("check", f"127.0.0.1:{free_port}", "--json")
    assert outcome.code == 3
    expected: dict[str, bool | None] = dict.fromkeys(NAMES)
    assert _outcomes(outcome.json) == expected | {"DNS": True, "TCP": False}
    assert outcome.json["checks"][1]["remedy"]
    lines = command("check", f"127.0.0.1:{free_port}").out.splitlines()
    assert lines[-1] == "– dial-back   skipped"


def test_an_unknown_name(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("p2ptrain.cli.runtime.loop_factory", lambda *, children: asyncio.new_event_loop)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    outcome = command("check", "no-such-host")
    assert outcome.code == 3
    assert outcome.out.splitlines()[:3] == [
        "✗ DNS         'no-such-host' is not known: Name or service not known",
        "  → check the spelling, or use the seed's IP address",
        "– TCP         skipped",
    ]


def test_a_wrong_clock(command: Command, fake_seed: Any) -> None:
    fake_seed.wall_offset_s = -3600.0
    outcome = command("check", "--json")
    assert outcome.code == 2
    assert _outcomes(outcome.json) == dict.fromkeys(NAMES, True) | {"clock": False}
    line = outcome.json["checks"][3]
    assert "behind this machine" in line["detail"]
    assert "NTP" in line["remedy"]


async def test_a_machine_that_has_joined_needs_no_access_as_an_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    cluster = Cluster(tmp_path / "seed", TcpNetwork(), encrypted=True)
    await cluster.start_seed()
    store = default_state_dir() / "worker-1" / "credentials"
    lines: list[ProbeResult] = []
    visit = ProbeContext(TcpNetwork(), LoopClock(), cluster.address, None)
    try:
        assert isinstance(await run_probes(visit.probes(join=False), lines.append), UserError), "it has no access yet"
        assert "ticket new --role operator" in lines[2].remedy
        await reach(cluster.ticket("worker"), Caller("worker", store, [], "a1"), TcpNetwork())
        lines.clear()
        assert await run_probes(visit.probes(join=True), lines.append) is None, lines
    finally:
        await visit.close()
        await cluster.close()
    assert {line.name: line.ok for line in lines} == dict.fromkeys([*NAMES, "join"], True) | {
        "clock": None,
        "round trip": None,
    }
    assert "access as a worker" in lines[2].detail
    assert "ticket new --role operator" in lines[3].detail


@pytest.mark.parametrize("name", ["dial-back", "clock"])
def test_a_refused_probe_fails_its_line(command: Command, fake_seed: Any, name: str) -> None:
    if name == "clock":
        fake_seed.answers["probe.clock"] = Refused("unreachable", "cannot", remedy="open the port in the firewall")
    else:
        fake_seed.refuse_peers = Refuse("unreachable", "cannot", remedy="open the port in the firewall")
    outcome = command("check", "--json")
    assert outcome.code == 3
    failed = {line["name"]: (line["detail"], line["remedy"]) for line in outcome.json["checks"] if not line["ok"]}
    said, remedy = failed[name]
    assert said.endswith("cannot")
    assert remedy == "open the port in the firewall"
    assert set(failed) == {name} | ({"round trip"} if name == "clock" else set())
