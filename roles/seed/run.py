"""Running a seed: opens its record, listens, and ends cleanly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from p2ptrain.core.errors import P2PTrainError, first_error
from p2ptrain.core.world import World
from roles.seed.server import Beats, Seed
from roles.seed.store import Store
from wire.handshake import Server, serve
from wire.transport_base import format_address


async def run_seed(
    world: World,
    *,
    state_dir: Path,
    host: str,
    port: int,
    name: str,
    heartbeat_s: float = 0,
    death_s: float = 0,
    on_ready: Callable[[tuple[str, int]], None],
    stop: asyncio.Event,
) -> None:
    """Run a seed until ``stop`` is set; then it says goodbye, writes what is left, and ends within about a second.

    Args:
        state_dir: where it keeps its record; made where it does not exist. One seed at a time.
        heartbeat_s, death_s: of the links to workers; 0 and 0: from each worker's measured round trip.
        on_ready: called with the address that it listens on.

    Raises:
        UserError: the address or the directory is in use. StorageError: the record cannot be read or written.
    """
    store = await Store.open(world.disk, state_dir)
    try:
        seed = await Seed.open(world, store, name=name, beats=Beats(heartbeat_s, death_s))
        server = await serve(world.network, host, port, decide=seed.decide, serve=seed.serve, on_problem=seed.problem)
        try:
            await _until(stop, seed, server, on_ready)
        finally:
            await server.close()
    finally:
        await store.close()


async def _until(stop: asyncio.Event, seed: Seed, server: Server, on_ready: Callable[[tuple[str, int]], None]) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(_work(seed, server.address))
            seed.note("info", "seed-started", f"the seed listens on {format_address(*server.address)}", "", "")
            on_ready(server.address)
            await stop.wait()
            seed.stop()
            work.cancel()
    except* P2PTrainError as group:
        raise first_error(group) from None


async def _work(seed: Seed, address: tuple[str, int]) -> None:
    async with asyncio.TaskGroup() as tasks:
        seed.start(tasks, address)
        await asyncio.Event().wait()  # until cancelled: jobs come and go
