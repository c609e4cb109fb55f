"""``p2ptrain check``: probes everything from the seed's name to a working worker, and prints a line for each probe.

If an essential probe fails, the rest is skipped, because its result would mean nothing.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from p2ptrain.cli.output import print_json
from p2ptrain.cli.runtime import REQUEST_TIMEOUT_S, JsonOption, MemberPortOption, SeedArgument, option, run
from p2ptrain.cluster.access import (
    CONNECT_TIMEOUT_S,
    Access,
    Caller,
    Target,
    connect_operator,
    operator_name,
    place_of,
    reach,
    read_target,
    shown_address,
    usual_host,
)
from p2ptrain.cluster.running import default_state_dir
from p2ptrain.core.errors import P2PTrainError, Unreachable, UserError
from p2ptrain.core.ids import new_id
from p2ptrain.core.texts import human_time, printable
from p2ptrain.core.world import Clock, LoopClock, Network
from wire.address import MEMBER_PORT, format_address, how_to_open
from wire.handshake import PERMITTED, PeerServer, dial, local_hello, local_welcome, serve
from wire.messages import Hello, Leave, RefusalCode, Refuse, Welcome
from wire.transport import TcpNetwork, resolve, unreachable

if TYPE_CHECKING:
    from wire.client import SeedClient
    from wire.connection import Connection

PINGS = 10


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The outcome of one probe. ``ok`` is None if it was skipped."""

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


class ProbeSkipped(Exception):
    """A probe that this caller may not make; the text says why."""


Probe: TypeAlias = "tuple[str, bool, Callable[[], Awaitable[str | ProbeResult]]]"
"""Its name; whether all later probes need it; and its work, which returns what it saw or its result, or raises."""


def check(
    address: SeedArgument = "",
    port: MemberPortOption = None,
    once: Annotated[bool, option("--once", "Also join as a worker, and leave at once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find out why this machine cannot join a seed: one line for each thing that can go wrong.

    The seed dials this machine back, as it does when it joins, to tell in which way others will reach it. Clocks and
    round trips need an operator's access.

    \b
    Examples:
      p2ptrain check 192.168.1.20:7337/AbC…
      p2ptrain check --port 7400 --once
    """
    target = read_target(address)
    lines: list[ProbeResult] = []

    def report(line: ProbeResult) -> None:
        lines.append(line)
        if not as_json:
            _print(line)

    async def probe_all() -> P2PTrainError | None:
        visit = ProbeContext(TcpNetwork(), LoopClock(), target, port)
        try:
            return await run_probes(visit.probes(join=once), report)
        finally:
            await visit.close()

    failure = run(probe_all())
    if as_json:
        print_json(
            {"address": shown_address(target), "ok": failure is None, "checks": [asdict(line) for line in lines]}
        )
    if failure is not None:
        raise typer.Exit(failure.exit_code)


def _print(line: ProbeResult) -> None:
    mark, colour = {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "bright_black")}[line.ok]
    typer.secho(mark, fg=colour, nl=False)
    typer.echo(f" {line.name:<10}  {printable(line.detail)}")
    if line.remedy:
        typer.echo(f"  → {printable(line.remedy)}")


async def run_probes(probes: list[Probe], report: Callable[[ProbeResult], None]) -> P2PTrainError | None:
    """Run the probes in order and report each. Returns the first failure."""
    failure: P2PTrainError | None = None
    blocked = False
    for name, essential, work in probes:
        if blocked:
            report(ProbeResult(name, None, "skipped"))
            continue
        try:
            found = await work()
            report(found if isinstance(found, ProbeResult) else ProbeResult(name, True, found))
        except ProbeSkipped as reason:
            report(ProbeResult(name, None, f"skipped: {reason}"))
        except P2PTrainError as error:
            report(ProbeResult(name, False, error.message, error.remedy))
            failure, blocked = failure or error, essential
    return failure


class ProbeContext:
    """The resources of one run: a connection to the seed, and a port for its dial-back."""

    def __init__(self, network: Network, clock: Clock, target: Target, dialback_port: int | None) -> None:
        self._network, self._clock, self._target = network, clock, target
        self._host, self._port = place_of(target)
        self._role = "operator" if isinstance(target, tuple) else target.role
        self._dialback_port = dialback_port
        self._peer_id = new_id()  # the seed checks that the peer that it dials back is the caller
        self._access: dict[str, Access] = {}
        self._client: SeedClient | None = None
        self._server: PeerServer | None = None
        self._pings: list[tuple[float, float]] = []

    def probes(self, *, join: bool) -> list[Probe]:
        """The probes; each may need the ones before it."""
        probes: list[Probe] = [("DNS", True, self.resolve), ("TCP", True, self.reach)]
        if self._role == "operator":
            probes += [
                ("handshake", True, self.shake_hands),
                ("clock", False, self.compare_clocks),
                ("round trip", False, self.measure_round_trip),
            ]
        else:
            probes.append(("ticket", True, self.enrol))
        probes.append(("dial-back", False, self.be_dialled_back))
        return [*probes, ("join", False, self.join_and_leave)] if join else probes

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.close()

    async def resolve(self) -> str:
        """Resolve the seed's name."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                found = await resolve(self._host, self._port)
        except TimeoutError:
            problem = f"the name server did not answer for {self._host!r} within {CONNECT_TIMEOUT_S:g} s"
            raise Unreachable(problem, remedy="use the seed's IP address, which it prints when it starts") from None
        except OSError as error:
            problem = f"{self._host!r} is not known: {error.strerror or error}"
            raise Unreachable(problem, remedy="check the spelling, or use the seed's IP address") from None
        return f"{self._host} is " + ", ".join(dict.fromkeys(str(address[0]) for _, address in found))

    async def reach(self) -> str:
        """Open a TCP connection and close it."""
        started = self._clock.now()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            raise unreachable(self._host, self._port, error, CONNECT_TIMEOUT_S) from error
        answered = self._clock.now()
        writer.close()
        return f"port {self._port} answered in {1000 * (answered - started):.1f} ms"

    async def shake_hands(self) -> str:
        """Hello and Welcome, as an operator, or else with the access that this machine has as a worker."""
        way = ""
        try:
            self._client = await connect_operator(await self._reach("operator"))
            welcome = self._client.welcome
        except UserError as no_access:
            try:
                access = await self._reach("worker")
            except UserError:
                raise no_access from None
            self._role, way = "worker", "; with this machine's access as a worker"
            connection, welcome = await self._call(access, "worker", "probe", 0)
            await connection.close()
        runs = f"{welcome.name} runs {welcome.software} (protocol {welcome.version}), cluster {welcome.cluster_id}"
        return runs + way

    async def enrol(self) -> str:
        """Get a certificate with the ticket."""
        until = (await self._reach(self._role)).member
        assert until is not None, "a ticket leads to an encrypted seed"
        return f"valid; this machine has a certificate until {human_time(until.credentials.identity.not_after)}"

    async def compare_clocks(self) -> str:
        """Compare the seed's wall clock with ours, at the middle of the quickest round trip."""
        trip_s, skew_s = min(await self._ping())
        difference = f"{abs(skew_s):.2f} s {'ahead of' if skew_s > 0 else 'behind'} this machine (± {trip_s / 2:.3f} s)"
        if abs(skew_s) > 30.0:
            remedy = "set both clocks by NTP: times in logs will mislead"
            raise UserError(f"the seed's clock is {difference}", remedy=remedy)
        return f"the seed's is {difference}"

    async def measure_round_trip(self) -> str:
        trips_ms = [1000 * trip_s for trip_s, _ in await self._ping()]
        return f"{statistics.median(trips_ms):.2f} ms (median of {PINGS}; {min(trips_ms):.2f} to {max(trips_ms):.2f})"

    async def _ping(self) -> list[tuple[float, float]]:
        """(round trip, skew) in seconds of ``PINGS`` requests; measured once."""
        while len(self._pings) < PINGS:
            started, wall = self._clock.now(), self._clock.wall()
            theirs = await self._connected().clock()
            trip_s = self._clock.now() - started
            self._pings.append((trip_s, theirs - (wall + trip_s / 2)))
        return self._pings

    async def be_dialled_back(self) -> ProbeResult:
        """Let the seed dial a port of ours, as other workers would."""
        access = await self._reach(self._role)
        port = await self._listen(access)
        connection, welcome = await self._call(access, self._role, "probe", port)
        await connection.close()
        if not welcome.unreached:
            at = format_address(connection.ends.local[0], port)
            return ProbeResult("dial-back", True, f"the seed can reach this machine at {at}: others dial it")
        way = "others reach it through a relay, and directly where both routers keep ports or over IPv6"
        detail = f"this machine can take part: {way}. It is behind a router or a firewall: {welcome.unreached}"
        port = port if self._dialback_port else MEMBER_PORT  # a free port was taken because a member here has the other
        return ProbeResult("dial-back", True, detail, f"to be dialled by all, {how_to_open(port)}")

    async def join_and_leave(self) -> str:
        """Join in the ticket's role, else as a worker, and leave before there is anything to do."""
        role = self._role if self._role in PERMITTED["peer"] else "worker"
        access = await self._reach(role)
        connection, welcome = await self._call(access, role, "peer", await self._listen(access))
        connection.send(Leave("it was only a check"))
        await connection.close()
        return f"joined {welcome.name} as a {role} and left again"

    async def _call(self, access: Access, role: str, purpose: str, port: int) -> tuple[Connection, Welcome]:
        peer_id = access.peer_id or self._peer_id
        hello = local_hello(peer_id=peer_id, name=operator_name(), roles=[role], purpose=purpose, port=port)
        network = access.network
        return await dial(network, self._host, self._port, hello, timeout_s=REQUEST_TIMEOUT_S, expect_role="seed")

    async def _listen(self, access: Access) -> int:
        if self._server is not None:
            await self._server.close()
        self._server = await serve(
            access.network,
            usual_host(self._host),
            self._dialback_port,
            decide=partial(_welcome, self._clock, access.peer_id or self._peer_id),
            serve=_hold_until_closed,
            on_problem=lambda error, remote: None,  # strangers may dial our port
        )
        return self._server.address[1]

    async def _reach(self, role: str) -> Access:
        if role not in self._access:
            root = default_state_dir()
            same = isinstance(self._target, tuple) or self._target.role == role
            target = self._target if same else (self._host, self._port)
            stores = [root / ("operator" if role == "operator" else "check")]
            if isinstance(target, tuple):  # what `join` saved
                stores += root.glob(f"{role}-*/credentials")
            for store in stores:
                try:
                    self._access[role] = await reach(target, Caller(role, store, [root]), self._network)
                    break
                except UserError:
                    if store == stores[-1]:
                        raise
        return self._access[role]

    def _connected(self) -> SeedClient:
        if self._client is None:
            raise ProbeSkipped("it needs a ticket of the seed: p2ptrain ticket new --role operator")
        return self._client


async def _welcome(clock: Clock, peer_id: str, hello: Hello, connection: Connection) -> Welcome | Refuse:
    if hello.purpose != "probe":
        return Refuse(RefusalCode.ROLE, "this is only a check, no worker")
    return local_welcome(peer_id=peer_id, name=operator_name(), wall=clock.wall())


async def _hold_until_closed(connection: Connection, hello: Hello) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await connection.closed.wait()
