"""``p2ptrain join``."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.join_options import JoinOptions
from p2ptrain.cli.options import WithBareSplit, takes_options
from p2ptrain.cli.output import step_line
from p2ptrain.cli.runtime import run

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.cli.island import IslandOptions
    from p2ptrain.cli.joining import Found, ProcessContext, Running
    from p2ptrain.compute.device import ComputeDevice
    from p2ptrain.compute.island import Island
    from roles.engine import Engine, Stage
    from wire.messages import Scalar

app = new_typer()


@app.command("join", cls=WithBareSplit)
@takes_options(JoinOptions)
def join(options: JoinOptions) -> None:
    """Join a seed: as a worker, which trains the seed's jobs, or to write text. Ctrl+C leaves.

    A worker leaves after its current step, or within one that takes more than a second. A verifier owns a model and
    writes with it, for `generate`, `chat` and programs (--http). Drafters guess its next tokens with a small model, so
    that it writes faster; its text stays the same.

    On the seed's machine no ticket is needed. On another machine give the seed's ticket; later its address is enough.

    \b
    Examples:
      p2ptrain join
      p2ptrain join 192.168.1.20:7337/AbC…
      p2ptrain join @ticket.txt --name laptop --device cpu --threads 4 --memory 4GiB
      p2ptrain join 192.168.1.20 --devices all
      p2ptrain join 192.168.1.20,192.168.1.21
      p2ptrain join 192.168.1.20 --data ~/letters
      p2ptrain join 192.168.1.20 --role verifier --model models/large --http 127.0.0.1:8000
      p2ptrain join 192.168.1.20 --role verifier --model models/large --split
      p2ptrain join 192.168.1.20 --role verifier --model models/large --dtype fp32
      p2ptrain join 192.168.1.20 --role drafter --model models/small --threads 2
    """
    from p2ptrain.cli.island import follow, island_options

    # Workers on one machine share its cores. By default OpenMP's threads spin while they wait, which made a step take
    # ten times as long. This must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options = options.checked()
    if options.role != "worker":
        from p2ptrain.cli.serving import join_to_serve

        run(join_to_serve(options))
        return
    island = island_options(options.devices, options.device, options.threads)
    if island is not None and not island.place.leads:
        run(follow(island, with_parent=options.with_parent))
        return
    run(_work(options, island), children=island is not None)


async def _work(options: JoinOptions, island: IslandOptions | None) -> None:
    from p2ptrain.cli.island import LeadIsland
    from p2ptrain.cli.joining import member_options, run_member, world_of
    from roles.worker.build import engine_builder, holding, island_builder, warm_up, with_data
    from roles.worker.worker import Worker

    device, threads, memory_bytes = options.device, options.threads, options.memory_bytes
    parts = holding(device=device, threads=threads, memory_bytes=memory_bytes) if island is None else None

    def worker(here: ProcessContext, found: Found, formed: tuple[Island, ComputeDevice] | None = None) -> Running:
        """``formed``: an island, and the device of this process in it."""
        build_engine = engine_builder(device=device, threads=threads, memory_bytes=memory_bytes)
        if formed is not None:
            build_engine = island_builder(*formed, memory_bytes)
        # Only workers of one process hold parts of models: the memory of others for them is too small for any.
        capabilities: dict[str, Scalar] = {
            "parts_memory_bytes": 1 if parts is None else parts.limit_bytes,
            "threads": threads,
        }
        if formed is not None:
            capabilities["device"] = formed[0].label

        def build(profile: Profile, stage: Stage) -> Engine:
            own = with_data(profile, options.data)
            with here.console.during(lambda: f"reading {own.data.path} and building the model"):
                return build_engine(own, stage)

        return Worker(
            world_of(options, found),
            here.identity,
            member_options(options, found, **capabilities),
            build_engine=build,
            warm_up=warm_up,
            notify=here.notify,
            on_step=lambda applied, total, values: here.console.progress(
                step_line(applied, total, values), last=applied == total
            ),
            membership=found.access.member,
            holding=parts,
        ).run

    if island is None:
        await run_member(options, worker)
        return
    lead = LeadIsland(island, options.root / "logs")
    try:
        await run_member(options, lambda here, found: partial(lead.run, here, partial(worker, here, found)))
    finally:
        await lead.close()
