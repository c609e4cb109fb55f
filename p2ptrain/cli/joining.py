"""What every ``p2ptrain join`` does, whatever its role: it claims a slot, finds its seed, and runs until Ctrl+C.

``join`` reads the options into ``JoinOptions``. It then runs ``run_member`` with a worker, or ``serving.join_to_serve``
for the other roles.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from p2ptrain.cli.runtime import relay_limits
from p2ptrain.cluster.access import MENDED_BY_A_TICKET, Access, Caller, place_of, reach_one, usual_host
from p2ptrain.cluster.console import Console, stoppable, unless_stopped
from p2ptrain.cluster.discovery import discover
from p2ptrain.cluster.running import default_state_dir
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError, Refused
from p2ptrain.core.hours import OpenHours
from p2ptrain.core.texts import human_seconds
from p2ptrain.core.threads import RealThreads
from p2ptrain.core.world import LoopClock, World, real_world
from roles.member import Identity, MemberOptions, Program, ServingMember, claim
from roles.seed_link import RetryTimeS, is_transient, until_reached
from roles.worker.build import capabilities
from wire.address import format_address
from wire.circuits import CircuitNetwork
from wire.emulate import EmulatedNetwork, preset_named
from wire.messages import RefusalCode, Scalar
from wire.transport import TcpNetwork, every_interface

if TYPE_CHECKING:
    from p2ptrain.cli.join_options import JoinOptions


CLOCK_S = 30.0
"""How often the clock is read, for ``--hours``: it may be put forward or back."""


@dataclass(frozen=True, slots=True)
class JoinContext:
    """What this process joins with: its identity, its terminal, a way to the seed, its circuits, and where to listen.
    ``others``: seeds to try if this one is lost."""

    identity: Identity
    console: Console
    access: Access
    circuits: CircuitNetwork
    listen: tuple[str, int | None]
    others: tuple[tuple[str, int], ...]
    retry_time_s: RetryTimeS

    def notify(self, level: str, kind: str, text: str) -> None:
        self.console.event(level, text)


MemberRun: TypeAlias = "Callable[[asyncio.Event], Coroutine[Any, Any, None]]"
"""Runs until the event is set."""


async def run_member(options: JoinOptions, make: Callable[[JoinContext], MemberRun]) -> None:
    """Claim a slot, find the seed, and run what ``make`` returns until Ctrl+C.

    ``make`` is called again if the seed needs this process to listen elsewhere, or to join afresh. With ``--hours`` it
    is called each time they begin, and leaves when they end.

    Raises:
        P2PTrainError: there is no seed in time, no slot or no ticket, or what ran raised it.
    """
    console, stop = stoppable(with_parent=options.with_parent)
    identity = claim(RealDisk(), options.root, role=options.role, name=options.name, slot=options.slot)
    try:
        if not options.no_discovery:
            found = await unless_stopped(stop, discover(options.address, console))
            options = options if found is None else replace(options, address=found)
        base, role, targets = _network(options), options.role, options.targets
        places = [place_of(target) for target in targets]
        states = [options.root, default_state_dir()]
        caller = Caller(role, identity.directory / "credentials", states, identity.peer_id, options.code)
        listen_host, afresh = options.host, False
        clock = LoopClock()
        began = clock.now()

        def retry_time_s(problem: P2PTrainError) -> float:
            waited_s = clock.now() - began
            if not is_transient(problem) or waited_s >= options.wait:
                return 0.0
            reason = f"{problem.message} ({problem.remedy})" if problem.remedy else problem.message
            text = f"waiting for the seed, {human_seconds(waited_s)}: {reason}; Ctrl+C gives up"
            console.progress(text, every_s=max(waited_s, 1.0))  # in a file the lines become rarer
            return options.wait - waited_s

        hours = options.open_hours
        while True:
            ending, closing = stop, None
            if hours is not None:
                await _until(is_open=True, hours=hours, stop=stop, console=console)
                if stop.is_set():
                    break
                ending = asyncio.Event()
                closing = asyncio.create_task(_until(is_open=False, hours=hours, stop=stop, console=console))
                closing.add_done_callback(partial(_set, ending))
            reaching = partial(reach_one, targets, caller, base, afresh=afresh)
            access = await unless_stopped(
                stop,
                until_reached(reaching, retry_time_s, random.Random()),  # noqa: S311 - a delay
            )
            if access is None:
                break
            seed = access.host, access.port
            console.event("info", f"{role} {identity.name} ({identity.peer_id}) joins {format_address(*seed)}")
            others = tuple(place for place in places if place != seed)
            listen = listen_host or usual_host(access.host), options.port
            run = make(JoinContext(identity, console, access, base, listen, others, retry_time_s))
            try:
                await run(ending)
                if closing is None or stop.is_set():
                    break
            except Refused as refusal:
                if refusal.code == RefusalCode.LOOPBACK_ONLY and not listen_host:
                    console.event("info", "members of other machines join this seed: listening on all addresses")
                    listen_host = every_interface()
                elif refusal.code in MENDED_BY_A_TICKET and access.member is not None and not afresh:
                    console.event("info", f"{refusal.message}; joining again with the ticket")
                    afresh = True
                else:
                    raise
    finally:
        console.finish()
        identity.release()
    console.event("info", "left")


async def _until(*, is_open: bool, hours: OpenHours, stop: asyncio.Event, console: Console) -> None:
    """Wait until the hours begin or end, or ``stop`` is set."""
    clock = LoopClock()
    while not stop.is_set() and (now := hours.until_change_s(clock.wall()))[0] != is_open:
        if is_open:
            console.progress(f"takes part {hours}: in {human_seconds(now[1])}; Ctrl+C ends", every_s=60.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(min(now[1], CLOCK_S)):
                await stop.wait()


def _set(ending: asyncio.Event, _: object) -> None:
    ending.set()


def world_of(options: JoinOptions, context: JoinContext) -> World:
    return replace(real_world(context.access.network), threads=RealThreads(options.straggler))


def member_options(options: JoinOptions, context: JoinContext, **more: Scalar) -> MemberOptions:
    """``more``: capabilities besides those of the machine."""
    return MemberOptions(
        role=options.role,
        seed=(context.access.host, context.access.port),
        listen=context.listen,
        advertise=options.advertised,
        capabilities=capabilities(options.device) | more,
        others=context.others,
        retry_time_s=context.retry_time_s,
        circuits=context.circuits,
    )


def serving_member(options: JoinOptions, program: Program, context: JoinContext) -> MemberRun:
    """A verifier or a drafter that runs ``program``."""
    return ServingMember(
        world_of(options, context),
        context.identity,
        member_options(options, context, weight=options.weight),
        program=program,
        notify=context.notify,
        membership=context.access.member,
    ).run


def _network(options: JoinOptions) -> CircuitNetwork:
    tcp = TcpNetwork()
    inner = EmulatedNetwork(tcp, preset_named(options.link), os.getpid()) if options.link else tcp
    return CircuitNetwork(inner, limits=relay_limits(options.relay))
