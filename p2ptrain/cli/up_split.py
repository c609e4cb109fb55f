"""``p2ptrain up --split N``: a seed and N workers on this machine that hold a model between them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from p2ptrain.cli.children import Child, end_all, start_seed_process, until_it_listens
from p2ptrain.cli.output import print_json
from p2ptrain.cli.runtime import DEFAULT_PORT, operator_name
from p2ptrain.core.errors import JobFailed, UserError

if TYPE_CHECKING:
    from p2ptrain.cli.console import Console
    from p2ptrain.cli.split import Planned
    from roles.chain.client import Chain
    from wire.client import SeedClient

THERE_S = 120.0
"""Until all workers have joined: they import torch first, on few cores one after the other."""
_GONE = ("lost", "leaving", "away")


@dataclass(frozen=True, slots=True)
class SplitCluster:
    """What is started. ``spares``: workers beyond the chain's, who take the place of one that dies."""

    stages: int
    spares: int
    checkpoint: Path
    memory: str
    dtype: str
    root: Path
    port: int
    link: str

    @property
    def workers(self) -> int:
        return self.stages + self.spares


def check_split(split: int | None, checkpoint: Path | None, **others: bool) -> None:
    """Raises ``UserError`` where options of ``up`` do not belong together.

    Args:
        others: options that mean something with ``--split`` only, and whether they were given.
    """
    if split is None:
        given = {"checkpoint": checkpoint is not None, **others}
        if extra := next((name for name, value in given.items() if value), None):
            raise UserError(f"--{extra} is for a model that is split", remedy="add --split N, or leave it out")
    elif checkpoint is None:
        raise UserError("up --split needs a model", remedy="name its directory: --checkpoint DIR")


def check_layers(directory: Path, stages: int) -> None:
    """Refuse before anything is started what the seed's workers would refuse. Raises ``UserError``."""
    from p2ptrain.core.model_config import config_untrusted

    try:
        table = config_untrusted((directory / "config.json").read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {directory / 'config.json'}: {error}") from error
    layers = table.get("num_hidden_layers", table.get("n_layer"))
    if isinstance(layers, int) and stages > layers:
        raise UserError(f"a model of {layers} layers has no {stages} stages", remedy=f"give --split 1 to {layers}")


async def stay(cluster: SplitCluster, *, as_json: bool) -> None:
    """Start everything, load the chain, and stay until Ctrl+C. Raises ``P2PTrainError``."""
    from p2ptrain.cli.split import LEAVE_S, Wanted, planned, within
    from p2ptrain.cli.split_chat import positions_of
    from p2ptrain.cli.split_options import SplitWish
    from p2ptrain.cli.stopping import stoppable, unless_stopped
    from wire.client import SeedClient
    from wire.transport import TcpNetwork

    (console, stop), children = stoppable(), list[Child]()
    seed_at = f"127.0.0.1:{cluster.port}"

    async def work() -> None:
        children.append(await start_seed_process(cluster.root, cluster.port))
        await until_it_listens(children[0])
        client = await SeedClient.connect(TcpNetwork(), "127.0.0.1", cluster.port, name=operator_name())
        try:
            for number in range(1, cluster.workers + 1):
                children.append(await _start_worker(cluster, number))
            said = f"{cluster.workers} workers start; logs are in {cluster.root / 'logs'}"
            console.event("info", said if cluster.workers > 1 else said.replace("workers start", "worker starts"))
            await _or_ended(children, _all_there(client, cluster.workers))
        finally:
            await client.close()
        wanted = Wanted(SplitWish(cluster.stages, cluster.dtype), cluster.checkpoint, "", seed_at)
        async with planned(wanted, lambda text: positions_of(wanted, text), console) as plan:
            chain = await _or_ended(children, plan.load())
            try:
                _tell(plan, chain, cluster, as_json=as_json)
                await _watch(children, console)
            finally:
                await within(LEAVE_S, chain.close())

    try:
        await unless_stopped(stop, work())
    finally:
        console.finish()
        await end_all(children[1:])
        await end_all(children[:1])


async def _start_worker(cluster: SplitCluster, number: int) -> Child:
    # Several texts are under way at once, and one stage's threads would keep the other stages from the cores.
    threads = max(1, (os.cpu_count() or 1) // cluster.stages)  # spares compute once a stage is lost
    arguments = ["join", f"127.0.0.1:{cluster.port}", "--state", str(cluster.root), "--slot", str(number)]
    arguments += ["--name", f"worker-{number}", "--threads", str(threads)]
    if cluster.memory:
        arguments += ["--memory", cluster.memory]
    if cluster.link:
        arguments += ["--link", cluster.link]
    return await Child.start(f"worker-{number}", arguments, cluster.root / "logs" / f"worker-{number}.log")


async def _all_there(client: SeedClient, count: int) -> None:
    """Returns when so many workers have joined. Raises ``JobFailed`` when it takes too long."""
    there: set[str] = set()
    try:
        async with asyncio.timeout(THERE_S):
            await client.request("subscribe")
            async for update in client.updates():
                for item in update.items if update.topic == "peers" else []:
                    if "worker" in item.get("roles", []):
                        (there.discard if item.get("state") in _GONE else there.add)(item["id"])
                if len(there) >= count:
                    return
    except TimeoutError:
        raise JobFailed(
            f"{len(there)} of {count} workers joined within {THERE_S:.0f} s", remedy="their logs say what they wait for"
        ) from None


async def _or_ended(children: list[Child], work: Any) -> Any:
    """The result of ``work``. Raises ``JobFailed`` where one of the processes ends before."""
    task = asyncio.ensure_future(work)
    ends = {asyncio.create_task(child.process.wait()): child for child in children}
    try:
        await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        child = next(child for end, child in ends.items() if end.done())
        raise child.failed(f"{child.name} ended")
    finally:
        for end in ends:
            end.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _watch(children: list[Child], console: Console) -> None:
    """Until the seed or the last worker is gone, which raises ``JobFailed``. A worker that dies is told of."""
    ends = {asyncio.create_task(child.process.wait()): child for child in children}
    try:
        while True:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                child = ends.pop(end)
                if child is children[0] or len(ends) == 1:
                    raise child.failed(f"{child.name} ended")
                console.event("warning", child.failed(f"{child.name} ended").message)
    finally:
        for end in ends:
            end.cancel()


def _tell(plan: Planned, chain: Chain, cluster: SplitCluster, *, as_json: bool) -> None:
    """What is there now, and how to use it."""
    from p2ptrain.cli.placement import placement_map, print_prediction
    from p2ptrain.cli.split_stats import Meter, print_split_facts, split_facts

    placement, facts = chain.plan.placement, split_facts(chain, Meter(), plan.encoding)
    seed_at = f"127.0.0.1:{cluster.port}"
    if as_json:
        where = {"seed": seed_at, "state": str(cluster.root), "checkpoint": plan.label}
        print_json({**where, "workers": cluster.workers, "split": facts, "plan": placement_map(placement)})
        return
    print_split_facts(facts)
    print_prediction(placement)
    options = f"--split {cluster.stages} -c {plan.label}" + f" --dtype {cluster.dtype}" * bool(cluster.dtype)
    options += f" --seed {seed_at}" * (cluster.port != DEFAULT_PORT)
    typer.echo("\nIt is loaded and stays so. From another terminal:\n")
    typer.echo(f'  p2ptrain generate "Once upon a time" {options}')
    typer.echo(f"  p2ptrain chat {options}")
    typer.echo(f"  p2ptrain tui {seed_at}\n\nCtrl+C stops everything.")
