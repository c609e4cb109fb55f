"""``p2ptrain join``: the command, and what it runs for a worker. ``serving`` has what it runs for other roles."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.join_options import JoinOptions
from p2ptrain.cli.runtime import WithBareSplit, run, takes_options
from p2ptrain.cluster.access import CodeNeeded
from p2ptrain.cluster.jobs import step_line
from p2ptrain.core.errors import UserError
from p2ptrain.core.threads import OWN_CORES, SHARED_CORES
from wire.address import format_address, read_code

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.cli.joining import JoinContext, MemberRun
    from p2ptrain.cluster.island import FormedIsland, IslandOptions
    from roles.engine import Engine, Stage
    from roles.worker.context import BuildEngine
    from roles.worker.stages import Holding
    from wire.messages import Scalar

NO_PARTS_BYTES = 1
"""Memory for parts of models of a worker that holds none: too little for any part. 0 would mean: not known."""

app = new_typer()


@app.command("join", cls=WithBareSplit)
@takes_options(JoinOptions)
def join(options: JoinOptions) -> None:
    """Join a seed: as a worker, which trains the seed's jobs, or to write text. Ctrl+C leaves.

    A worker leaves after its current step, and abandons one that takes more than a second. A verifier owns a model
    and writes with it, for `generate`, `chat` and programs (--http); it may own several, or LoRA adapters of one, and a
    request names one.
    Drafters guess its next tokens with a small model, so that it writes faster; its text stays the same.

    On the seed's machine no ticket is needed. On another one give the seed's ticket, or only its address, and type the
    six digits that `p2ptrain ticket code` shows there; on the same network not even that. Later its address is enough.

    \b
    Examples:
      p2ptrain join
      p2ptrain join 192.168.1.20:7337/AbC…
      p2ptrain join @ticket.txt --name laptop --device cpu --threads 4 --memory 4GiB
      p2ptrain join 192.168.1.20 --devices all
      p2ptrain join 192.168.1.20,192.168.1.21
      p2ptrain join 192.168.1.20 --data ~/letters
      p2ptrain join 192.168.1.20 --hours 22-8
      p2ptrain join 192.168.1.20 --allow train,serve,draft --model models/small
      p2ptrain join 192.168.1.20 --role verifier --model models/large --http 127.0.0.1:8000
      p2ptrain join 192.168.1.20 --role verifier --model models/large --model models/code --http 127.0.0.1:8000
      p2ptrain join 192.168.1.20 --role verifier --model models/large --adapter tuned/support --adapter tuned/code
      p2ptrain join 192.168.1.20 --role verifier --model models/large --split
      p2ptrain join 192.168.1.20 --role verifier --model models/large --dtype fp32
      p2ptrain join 192.168.1.20 --role verifier --upstream http://127.0.0.1:8000
      p2ptrain join 192.168.1.20 --role drafter --model models/small --threads 2
    """
    from p2ptrain.cluster.island import follow, island_options

    is_whole = options.role == "verifier" and options.split is None
    for name, value in (OWN_CORES if is_whole else SHARED_CORES).items():
        os.environ.setdefault(name, value)
    options = options.resolve()
    if options.upstream:
        _run(_pass_on, options)
        return
    if options.role != "worker":
        from p2ptrain.cli.serving import join_to_serve

        _run(join_to_serve, options)
        return
    island = island_options(options.devices, options.device, options.threads)
    if island is not None and not island.place.leads:
        run(follow(island, with_parent=options.with_parent))
        return
    _run(partial(_work, island=island), options, children=island is not None)


def _run(
    member: Callable[[JoinOptions], Coroutine[Any, Any, None]], options: JoinOptions, *, children: bool = False
) -> None:
    """Run ``member``. If the seed needs a code, ask the person at this terminal for it, and run ``member`` again."""
    try:
        run(member(options), children=children)
    except CodeNeeded as needed:
        if not sys.stdin.isatty():
            raise
        seed, role = format_address(*needed.place), "" if options.role == "worker" else f" --role {options.role}"
        typer.echo(f"{seed} does not know this machine: run `p2ptrain ticket code{role}` there", err=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the loop left its own behind, which would do nothing
        code = ""
        while not code:
            with suppress(UserError):
                code = read_code(typer.prompt("The six digits", err=True))
        run(member(replace(options, address=seed, code=code)), children=children)


async def _pass_on(options: JoinOptions) -> None:
    """Be a verifier that passes requests on until Ctrl+C, without a model. Raises ``P2PTrainError``."""
    from p2ptrain.cli.joining import run_member, serving_member
    from roles.verifier.upstream import serve_upstream

    program = partial(serve_upstream, url=options.upstream, key_file=options.upstream_key)
    await run_member(options, partial(serving_member, options, program))


async def _work(options: JoinOptions, island: IslandOptions | None) -> None:
    """Be a worker until Ctrl+C: this process alone, or the island that it leads. Raises ``P2PTrainError``."""
    from p2ptrain.cli.joining import run_member
    from p2ptrain.cluster.island import LeadIsland

    factory = WorkerFactory(options)
    if island is None:
        await run_member(options, factory.make)
        return
    lead = LeadIsland(island, options.root / "logs")

    def make_island(context: JoinContext) -> MemberRun:
        return partial(lead.run, context.identity.name, context.console, partial(factory.make_in_island, context))

    try:
        await run_member(options, make_island)
    finally:
        await lead.close()


class WorkerFactory:
    """Makes the worker of this process: each time that it joins, it is a new one."""

    def __init__(self, options: JoinOptions) -> None:
        self._options, self._doing = options, ""

    @cached_property
    def _parts(self) -> Holding:
        from roles.worker.build import build_holding

        options = self._options
        return build_holding(device=options.device, threads=options.threads, memory_bytes=options.memory_bytes)

    def make(self, context: JoinContext) -> MemberRun:
        """A worker of one process. It also holds parts of models."""
        from roles.worker.build import engine_builder

        options = self._options
        build_engine = engine_builder(
            device=options.device,
            threads=options.threads,
            memory_bytes=options.memory_bytes,
            on_progress=self._show_progress,
        )
        return self._worker(context, build_engine, self._parts, parts_memory_bytes=self._parts.limit_bytes)

    def make_in_island(self, context: JoinContext, formed: FormedIsland) -> MemberRun:
        """The worker that an island is; this process leads it."""
        from roles.worker.build import island_builder

        island, device = formed
        build_engine = island_builder(island, device, self._options.memory_bytes)
        return self._worker(context, build_engine, None, parts_memory_bytes=NO_PARTS_BYTES, device=island.label)

    def _worker(
        self, context: JoinContext, build_engine: BuildEngine, parts: Holding | None, **capabilities: Scalar
    ) -> MemberRun:
        from p2ptrain.cli.joining import member_options, world_of
        from p2ptrain.lab.attacker import add_attack
        from roles.member import ALLOW
        from roles.worker.build import inputs_dir, warm_up, with_data
        from roles.worker.worker import Worker

        world, drafter = world_of(self._options, context), None
        capabilities[ALLOW] = ",".join(sorted(self._options.allowed))
        if "draft" in self._options.allowed:
            from p2ptrain.cli.serving import draft_tokenizer, open_drafter

            capabilities["draft_tokenizer"] = draft_tokenizer(self._options)
            drafter = partial(open_drafter, world, self._options, context.console, context.notify)

        def build(profile: Profile, stage: Stage) -> Engine:
            own = with_data(profile, self._options.data)
            self._doing = ""
            with context.console.during(lambda: self._doing or f"reading {own.data.path} and building the model"):
                engine = build_engine(own, stage)
            micro_batches = own.batch.micro_batches
            return add_attack(engine, self._options.attack, micro_batches=micro_batches, seed=os.getpid())

        def show_step(applied: int, total: int, values: dict[str, float]) -> None:
            context.console.progress(step_line(applied, total, values), last=applied == total)

        return Worker(
            world,
            context.identity,
            member_options(self._options, context, threads=self._options.threads, **capabilities),
            build_engine=build,
            warm_up=warm_up,
            notify=context.notify,
            on_step=show_step,
            membership=context.access.member,
            holding=parts,
            build_progress=lambda: self._doing,
            inputs_dir=inputs_dir,
            open_drafter=drafter,
        ).run

    def _show_progress(self, text: str, share: float) -> None:
        self._doing = f"{text}: {share:.0%}" if share < 1 else ""
