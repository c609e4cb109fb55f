"""``p2ptrain status``, ``p2ptrain tui`` and ``p2ptrain logs``: a cluster on one screen, full-screen, and by events."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.output import print_json, print_pairs
from p2ptrain.cli.runtime import JsonOption, SeedArgument, SeedOption, ask, at_terminal, option, run
from p2ptrain.cluster.access import operator, read_targets
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.running import running_seeds
from p2ptrain.core.errors import UserError
from p2ptrain.core.texts import human_seconds, human_time, printable
from wire.address import how_to_join
from wire.records import (
    FINISHED_STATES,
    CheckpointInfo,
    ClusterInfo,
    EventInfo,
    JobInfo,
    PeerInfo,
    ServingInfo,
    ways_text,
)

if TYPE_CHECKING:
    from wire.client import SeedClient
    from wire.schema import Record

RECENT_S = 600.0
SHOWN = 8  # peers, jobs and problems, so that all fits one screen
NEWEST = 200  # events that a seed sends at a time
AT_WORK = frozenset({"idle", "serving", "drafting", "following", "training"})
PASSING = frozenset(
    {"lost", "seed-lost", "hung", "struck-off", "not-following", "ring-broken", "step-refused", "link", "waiting"}
    | {"stage-lost", "stage-lacking"}
)


def status(
    seed: SeedOption = "",
    as_json: JsonOption = False,
    qr: Annotated[bool, option("--qr", "Show only the QR code with which a phone opens the web page.")] = False,
) -> None:
    """Show the cluster on one screen: the seed, the peers, the jobs, and what needs attention.

    \b
    Examples:
      p2ptrain status
      p2ptrain status --json | jq -r '.attention[]'
      p2ptrain status --qr
    """
    if qr:
        import segno

        link = ask(seed, lambda client: client.watch_link())
        print_json({"link": link}) if as_json else segno.make_qr(link).terminal(compact=True)
        typer.echo("the code holds the key to look: who photographs it can watch", err=True)
        return
    from p2ptrain.cli.jobs import print_jobs
    from p2ptrain.cli.peers import print_peers

    async def look() -> tuple[
        ClusterInfo, list[PeerInfo], list[ServingInfo], list[JobInfo], list[str], dict[str, str], float
    ]:
        async with operator(seed) as client:
            cluster, peers, jobs = await client.cluster(), await client.peers(), await client.jobs()
            serving = await client.serving() if any(peer.model for peer in peers) else []
            saved, now = await client.checkpoints(), await client.clock()
            events = [item for item in await client.events(-NEWEST, NEWEST) if not is_over(item, peers, jobs, saved)]
            building = {event.peer: event.text for event in events if event.kind == "building"}
            return cluster, peers, serving, jobs, attention(cluster, peers, jobs, events, now), building, now

    cluster, peers, serving, jobs, problems, building, now = run(look())
    if as_json:
        maps = {"peers": [peer.to_map() for peer in peers], "jobs": [job.to_map() for job in jobs]}
        maps |= {"serving": [info.to_map() for info in serving]} if serving else {}
        maps["groups"] = [
            {"group": name, "members": [peer.name for peer in members], "since": members[0].joined_at}
            for name, members in groups(peers).items()
        ]
        print_json({"cluster": cluster.to_map(), **maps, "attention": problems})
        return
    states = ", ".join(f"{count} {state}" for state, count in Counter(peer.state for peer in peers).items())
    up = human_seconds(max(now - cluster.started_at, 0.0))
    unfinished = [job for job in jobs if job.state not in FINISHED_STATES]
    print_pairs(
        [
            ("seed", f"{cluster.name} at {cluster.address}, up {up}, version {cluster.version}"),
            ("peers", f"{len(peers)}{': ' + states if states else ''}"),
            ("jobs", f"{len(jobs)}, {len(unfinished)} of them not finished"),
            ("pool", f"{cluster.policy}, workers moved {cluster.moves} times"),
        ]
    )
    for name, members in list(groups(peers).items())[:SHOWN]:
        since, who = human_seconds(max(now - members[0].joined_at, 0.0)), ", ".join(peer.name for peer in members)
        typer.echo(printable(f"process group {name}: {len(members)} members for {since}: {who}"))
    if peers:
        typer.echo()
        print_peers(peers[:SHOWN], serving)
        for peer in peers[:SHOWN]:
            if peer.state == "building" and peer.id in building:
                typer.echo(printable(f"{peer.name}: {building[peer.id]}"))
    if shown := (unfinished or jobs)[-SHOWN:]:
        typer.echo()
        print_jobs(shown)
    if links := ways_text(peers):
        typer.echo(printable(f"links: {links}"))
    typer.echo()
    for text in problems[:SHOWN] or ["nothing needs attention"]:
        typer.echo(f"{'!' if problems else '✓'} {printable(text)}")


def groups(peers: list[PeerInfo]) -> dict[str, list[PeerInfo]]:
    """The members of each process group, in order of rank."""
    found: dict[str, list[PeerInfo]] = {}
    for peer in sorted(peers, key=lambda peer: peer.rank or 0):
        if peer.group and peer.state not in ("lost", "left", "evicted"):
            found.setdefault(peer.group, []).append(peer)
    return found


def is_over(event: EventInfo, peers: list[PeerInfo], jobs: list[JobInfo], saved: list[CheckpointInfo]) -> bool:
    """Whether a problem has passed: its job has ended well, or its peer has saved, or both are at work again."""
    job = next((job for job in jobs if job.id == event.job), None)
    if event.job and (job is None or job.state in ("done", "cancelled")):
        return True
    if event.kind == "checkpoint-failed":
        return any(item.peer_id == event.peer and item.created_at > event.wall for item in saved)
    peer = next((peer for peer in peers if peer.id == event.peer), None)
    is_at_work = peer.state in AT_WORK and event.job in ("", peer.job) if peer else not event.peer
    return event.kind in PASSING and is_at_work and (job is None or job.state == "running")


def attention(
    cluster: ClusterInfo, peers: list[PeerInfo], jobs: list[JobInfo], events: list[EventInfo], now: float
) -> list[str]:
    """What a person should look at, the most important first. ``now``: the seed's Unix time."""
    coming = {peer.job for peer in peers if peer.state in ("joining", "building", "healing")}
    stuck = [job for job in jobs[-1:] if job.state == "failed"]
    stuck += [
        job for job in jobs if job.state in ("paused", "saving") or (job.state == "waiting" and job.id not in coming)
    ]
    found = [f"job {job.name} ({job.id}) is {job.state}{': ' * bool(job.reason)}{job.reason}" for job in stuck]
    absent = [peer for peer in peers if peer.state in ("lost", "away", "failed")]
    found += [f"peer {peer.name} ({peer.id}) is {peer.state}: p2ptrain logs {peer.id}" for peer in absent]
    names = {peer.id: peer.name for peer in peers}
    for job in jobs:
        for score in (score for score in job.scores if score.is_far and job.state not in FINISHED_STATES):
            who = names.get(score.peer, score.peer)
            found.append(f"{who} may send wrong vectors ({score}): if so, p2ptrain peers evict {score.peer}")
    if not peers:
        found.append(f"no peer has joined: {how_to_join(cluster.address)}")
    elif not jobs and {role for peer in peers for role in peer.roles} == {"worker"}:
        found.append("the workers have no job: p2ptrain jobs create")
    recent = [event for event in events if event.level != "info" and now - event.wall < RECENT_S]
    return found + [f"{human_seconds(max(now - event.wall, 0))} ago: {event.text}" for event in reversed(recent)]


def tui(seed: SeedArgument = "") -> None:
    """Watch a cluster full-screen, control its jobs, and chat with the models that it serves. Leaving the view stops
    nothing.

    \b
    Examples:
      p2ptrain tui
      p2ptrain tui 192.168.1.20:7337/EJd0…
      p2ptrain tui @./run
    """
    if not at_terminal():
        remedy = "for scripts there are `p2ptrain jobs list --json` and `p2ptrain peers list --json`"
        raise UserError("the full-screen view needs a terminal, and there is no terminal here", remedy=remedy)
    from p2ptrain.cluster.viewing import new_app

    new_app(seed).run()


def logs(
    peer: Annotated[str, typer.Argument(metavar="[PEER]", help="Only of this peer: its name or id.")] = "",
    limit: Annotated[int, option("--limit N", "The newest N events, or lines of a log.", min=1, max=NEWEST)] = 20,
    follow: Annotated[bool, option("--follow -f", "Show new events as they come, until Ctrl+C.")] = False,
    seed: SeedOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the newest events of the cluster, or of one peer.

    With the log of its process, if `p2ptrain up` runs the peer on this machine.

    \b
    Examples:
      p2ptrain logs
      p2ptrain logs worker-1 --limit 50
      p2ptrain logs --follow
      p2ptrain logs --json | jq -r '.events[].text'
    """
    if follow and as_json:
        raise UserError("--follow and --json exclude each other", remedy="leave one of them out")

    async def read() -> None:
        async with operator(seed) as client:
            ids = await _find_peers(client, peer)

            def about(events: Iterable[Record]) -> list[EventInfo]:
                return [item for item in events if isinstance(item, EventInfo) and (not peer or item.peer in ids)]

            found = about(await client.events(-NEWEST, NEWEST))[-limit:]
            if as_json:
                print_json({"events": [event.to_map() for event in found]})
                return
            for name in sorted({*ids.values()}):
                _print_log(seed, name, limit)
            last = _print_events(found, 0)
            if not found:
                typer.echo("No event yet.", err=True)
            if follow:
                async for records in client.news():
                    last = _print_events(about(records), last)

    run(read())


async def _find_peers(client: SeedClient, peer: str) -> dict[str, str]:
    """Id → name of the peers with this name or id. Raises ``UserError`` for an unknown peer."""
    peers = await client.peers() if peer else []
    ids = {info.id: info.name for info in peers if peer in (info.id, info.name)}
    if peer and not ids:
        raise UserError(f"there is no peer {peer}", remedy="see p2ptrain peers list")
    return ids


def _print_events(events: list[EventInfo], last: int) -> int:
    """Print those after event ``last``; return the last one."""
    for event in events:
        if event.id > last:
            mark, last = Console.mark(event.level), event.id
            typer.echo(f"{human_time(event.wall)} {mark} {printable(event.text)}")
    return last


def _print_log(seed: str, peer: str, limit: int) -> None:
    targets = read_targets(seed)
    for state in [running.state for running in running_seeds() if running.address in targets]:
        path = Path(state, "logs", f"{Path(peer).name}.log")
        if path.is_file():
            typer.echo(f"{path}:")
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in deque(file, maxlen=limit):
                    typer.echo(f"  {printable(line.rstrip())}")
