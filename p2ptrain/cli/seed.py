"""``p2ptrain seed``: its options, its web page and first job, and what it says once it listens.

The seed itself is ``roles.seed.run``; its HTTP API gets experiments from here, because ``roles`` cannot import them.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import typer

from p2ptrain.cli.runtime import (
    STATE_DEFAULT,
    WEB_EXAMPLE,
    NameOption,
    RelayOption,
    SetOption,
    host_and_port,
    option_field,
    relay_limits,
    run,
    takes_options,
)
from p2ptrain.cluster.access import addresses_for_others, operator, operator_name, shown_host
from p2ptrain.cluster.console import Console, stoppable, unless_stopped
from p2ptrain.cluster.jobs import create_job
from p2ptrain.cluster.running import announce_seed, default_state_dir
from p2ptrain.core.errors import UserError
from p2ptrain.core.texts import check_one_of
from wire.address import DEFAULT_PORT, EVERYWHERE, Ticket, dialable_host, format_address, is_loopback, parse_address
from wire.records import FINISHED_STATES

if TYPE_CHECKING:
    from configs.schema import Profile
    from roles.seed.server import Seed
    from roles.web.serving import Web, WebOptions
    from wire.client import SeedRequests


@dataclass(frozen=True, slots=True)
class SeedOptions:
    """What a person gives ``seed``. Each field is an option, and its help describes it."""

    host: str = option_field("--host ADDRESS", "Listen here; 0.0.0.0: for other machines too.", "127.0.0.1")
    port: int = option_field("--port PORT", "Listen on this port; 0: any free one.", DEFAULT_PORT, min=0, max=65535)
    state: Path | None = option_field("--state DIR", f"Where jobs and metrics are kept. {STATE_DEFAULT}", None)
    name: NameOption = ""
    profile: str = option_field("--profile -p NAME|PATH", "Profile of the first job, if there is no job yet.", "tiny")
    no_job: bool = option_field("--no-job", "Begin with no job; `p2ptrain jobs create` makes one.", False)
    sets: SetOption = field(default_factory=list)
    tls: bool = option_field("--tls", "Also encrypt the loopback; all else is always encrypted.", False)
    as_json: bool = option_field(
        "--json", "Write one line of JSON when it listens: event, host, port, tls, http.", False
    )
    backup: Path | None = option_field(
        "--backup DIR", "Directory for a copy of the seed's data, on another disk.", None
    )
    restore: Path | None = option_field("--restore DIR", "Directory with the copy of a lost seed to start from.", None)
    no_discovery: bool = option_field("--no-discovery", "Do not let `p2ptrain join` find it on the network.", False)
    pool: str = option_field(
        "--pool POLICY",
        "How workers get tasks: matching (jobs and served models share them, and they move), score (each alone), fifo"
        " (the oldest job first; nobody moves).",
        "matching",
    )
    relay: RelayOption = None
    http: str = option_field("--http HOST:PORT", "Address of the web page and the HTTP API; default: none.", "")
    http_cert: Path | None = option_field(
        "--http-cert FILE", "With --http: a certificate (PEM); default: its own.", None
    )
    http_cert_key: Path | None = option_field("--http-cert-key FILE", "The key of that certificate (PEM).", None)
    http_read_key: Path | None = option_field(
        "--http-read-key FILE", "With --http: file with the key of those who only look.", None
    )
    http_operator_key: Path | None = option_field(
        "--http-operator-key FILE", "With --http: file with the key of operators.", None
    )
    with_parent: bool = option_field("--with-parent", "", False, hidden=True)

    @property
    def root(self) -> Path:
        return (self.state or default_state_dir()).absolute()

    @property
    def web(self) -> WebOptions | None:
        """Raises ``UserError`` for a bad address, or a file without one."""
        place = host_and_port("--http", self.http, WEB_EXAMPLE)
        files = (self.http_cert, self.http_cert_key, self.http_read_key, self.http_operator_key)
        if place is None:
            if any(files):
                text = "--http-cert, --http-cert-key, --http-read-key and --http-operator-key are for an HTTP address"
                raise UserError(text, remedy="add --http HOST:PORT, or leave them out")
            return None
        from roles.web.serving import WebOptions

        return WebOptions(*place, *files)


@takes_options(SeedOptions)
def seed(options: SeedOptions) -> None:
    """Start a seed: the place where workers meet. It keeps the records and never computes.

    With --host it serves other machines, and everything is encrypted. It prints a ticket, with which they join.
    Stopping it harms nothing: workers go on, and find it again when it is back. With --backup the seed copies its
    records every minute and after each change of members. If its machine is lost, --restore starts from that copy
    anywhere. Workers find the new seed among the addresses that they were given (`p2ptrain join A --also B`).

    With --http it shows a web page and answers an HTTP API. Elsewhere than on the loopback both are encrypted, and need
    a key; the seed makes two of them, and names their files.

    \b
    Examples:
      p2ptrain seed
      p2ptrain seed --backup /mnt/other-disk/seed
      p2ptrain seed --restore /mnt/other-disk/seed --host 0.0.0.0
      p2ptrain seed --host 0.0.0.0 --profile small --set job.steps=2000
      p2ptrain seed --no-job --port 9000
      p2ptrain seed --http 127.0.0.1:8080
      p2ptrain seed --host 0.0.0.0 --http 0.0.0.0:8443
    """
    from ring.planning.matching import POLICIES

    check_one_of("--pool", options.pool, POLICIES)
    encrypted = options.tls or not is_loopback(options.host)
    first_job = None if options.no_job or options.restore is not None else _load_profile(options)
    if options.restore is not None:
        encrypted = _restore(options.restore.absolute(), options.root, encrypted=encrypted)
    run(_serve(options, first_job, encrypted=encrypted))


def _restore(directory: Path, root: Path, *, encrypted: bool) -> bool:
    """Restore the copy; return whether the seed is encrypted. Raises ``UserError``, ``StorageError``."""
    from datetime import datetime

    from p2ptrain.core.disk import RealDisk
    from roles.seed.run import restore

    found = restore(RealDisk(), directory, root / "seed")
    made = datetime.fromtimestamp(found.wall).astimezone().isoformat(sep=" ", timespec="seconds")
    typer.echo(
        f"restored the copy of {made}; the seed leads in term {found.term}\n"
        "running workers report what happened after that, except evictions, revocations and tickets:"
        " repeat those that you made since",
        err=True,
    )
    return encrypted or found.encrypted


async def _serve(options: SeedOptions, first_job: Profile | None, *, encrypted: bool) -> None:
    from p2ptrain.cluster.discovery import announce
    from p2ptrain.core.world import real_world
    from roles.seed.run import serving_seed
    from wire.circuits import CircuitNetwork
    from wire.transport import TcpNetwork, every_interface

    web, root = options.web, options.root
    circuits = CircuitNetwork(TcpNetwork(), limits=relay_limits(options.relay))
    console, stop = stoppable(with_parent=options.with_parent)
    serving = serving_seed(
        real_world(circuits),
        state_dir=root / "seed",
        host=every_interface() if options.host in EVERYWHERE else options.host,
        port=options.port,
        name=options.name or operator_name().removeprefix("cli@"),
        ticket_host=shown_host(options.host) if encrypted else "",
        backup_dir=None if options.backup is None else options.backup.absolute(),
        tracker_environ=os.environ,
        on_event=lambda event: console.event(event.level, event.text, event.wall),
        policy=options.pool,
        circuits=circuits,
    )
    async with serving as listening, AsyncExitStack() as stack:
        bound, port = listening.address
        near = dialable_host(bound), port
        if not options.with_parent:
            stack.enter_context(announce_seed(near, root))
        shown = None
        if web is not None:
            shown = await _show_web(stack, web, listening.seed, bound, near, root, console)
        _print_ready(console, bound, port, root, listening.ticket, shown, as_json=options.as_json)
        if listening.ticket is not None:
            _warn_of_addresses(console, options.host, bound, addresses_for_others())
            if not (options.no_discovery or is_loopback(bound)):
                name = listening.seed.overview.cluster_info().name
                work = announce(name, listening.ticket.pin, bound, port, console.event)
                announcing = asyncio.create_task(work, name="mdns")
                stack.callback(announcing.cancel)  # the loop awaits its farewell
        await unless_stopped(stop, _make_first_job(near, options, first_job, console))
        await stop.wait()


async def _show_web(
    stack: AsyncExitStack,
    options: WebOptions,
    seed: Seed,
    bound: str,
    near: tuple[str, int],
    root: Path,
    console: Console,
) -> Web:
    import socket

    from p2ptrain.lab.experiments.endpoints import Experiments
    from roles.web.serving import serving_web

    names = [name for name in (shown_host(options.host), options.host, socket.gethostname()) if name not in EVERYWHERE]
    names = list(dict.fromkeys([*names, "localhost", "127.0.0.1"]))
    experiments = Experiments(root / "seed" / "experiments", partial(operator, near, state=root))
    warn, create = partial(console.event, "warning"), partial(_create_checked, bound, console)
    served = serving_web(options, names, root / "seed", seed, create, experiments.endpoints(), warn=warn)
    web = await stack.enter_async_context(served)
    await stack.enter_async_context(experiments.serving())
    return web


async def _create_checked(
    bound: str, console: Console, client: SeedRequests, name: str, label: str, profile: Profile
) -> str:
    """Create a job for the HTTP API of a seed that listens on ``bound``."""
    from p2ptrain.cluster.models import resolve_inputs

    if is_loopback(bound):  # otherwise each worker reads its own disk
        profile = await asyncio.to_thread(resolve_inputs, profile)
    return await create_job(client, name, label, profile, console)


def _load_profile(options: SeedOptions) -> Profile:
    from configs.loader import load

    loaded = load(options.profile, os.environ, options.sets).profile
    if loaded.drafter.layers:
        more = f"p2ptrain jobs create --profile {options.profile} --drafter"
        typer.echo(
            f"--profile {options.profile} creates the main model's job only; for the drafter's: {more}", err=True
        )
    return loaded


async def _make_first_job(
    near: tuple[str, int], options: SeedOptions, profile: Profile | None, console: Console
) -> None:
    """Create the job of ``profile``, unless the seed has jobs already."""
    if profile is None:
        return
    async with operator(near, state=options.root) as client:
        jobs = await client.jobs()
        if unfinished := [job for job in jobs if job.state not in FINISHED_STATES]:
            job = unfinished[0]
            _, spec = await client.job(job.id)
            own = "" if spec == profile.to_spec() else ", with the settings that it began with"
            console.event("info", f"going on with job {job.name} ({job.id}), step {job.step}{own}")
        elif jobs:
            text = f"job {jobs[-1].name} ({jobs[-1].id}) is {jobs[-1].state} at step {jobs[-1].step:,}"
            console.event("info", f"{text}: `p2ptrain jobs create` starts another one")
        else:
            label = Path(options.profile).stem
            await create_job(client, label, options.profile, profile, console)


def _warn_of_addresses(console: Console, host: str, bound: str, others: list[str]) -> None:
    """Warn if no other machine can use the ticket, and name the other addresses that one may use."""
    remedy = "see `p2ptrain ticket new --host`"
    if is_loopback(bound) and not is_loopback(host):
        text = f"{host} is {bound} here, which only this machine reaches: restart the seed with --host 0.0.0.0"
        console.event("warning", text)
    elif bound in EVERYWHERE and not others:
        console.event("warning", f"this machine has no address that other machines can use: connect it, or {remedy}")
    elif bound in EVERYWHERE and len(others) > 1:
        console.event("info", f"other addresses of this machine: {', '.join(others[1:])}; for a ticket {remedy}")


def _print_ready(
    console: Console, host: str, port: int, root: Path, ticket: Ticket | None, web: Web | None, *, as_json: bool
) -> None:
    if as_json:
        more = {"http": web.url, "http_keys": [str(path) for path in web.key_files]} if web is not None else {}
        typer.echo(json.dumps({"event": "ready", "host": host, "port": port, "tls": ticket is not None} | more))
        return
    here = format_address(shown_host(host), port)
    only = "" if root == default_state_dir().absolute() else quote(f"@{root}")
    seed = f" --seed {only}" * bool(only)
    if web is not None:
        console.event("info", f"in a browser, watch at:      {web.url}")
        if not is_loopback(parse_address(web.url)[0]):
            console.event("info", f"on a phone, watch with:      the code of `p2ptrain status --qr{seed}`")
        if web.key_files:
            files = ", ".join(map(str, web.key_files))
            console.event("info", f"its keys, one to read and one for operators, are in: {files}")
        if web.own_certificate:
            console.event("info", f"its certificate is signed by: {root / 'seed' / 'authority' / 'ca.pem'}")
    console.event("info", f"on this machine, watch with: p2ptrain tui {only}".rstrip())
    console.event("info", f"on this machine, join with:  p2ptrain join {here}")
    if not is_loopback(host):
        console.event(
            "info", f"elsewhere, join with:        the same; `p2ptrain ticket code{seed}`, here, shows digits for it"
        )
        new = f"p2ptrain ticket new --role operator{seed}"
        console.event("info", f"elsewhere, watch with:       p2ptrain tui TICKET   (`{new}`, here, prints one)")
        console.event("info", "elsewhere, join without digits by this line, which holds a ticket and is a secret:")
    if ticket is not None:
        typer.echo(f"p2ptrain join {ticket}", err=True)
