"""What commands share: the event loop, the seed's address, and requests to the seed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from p2ptrain.cli.loops import loop_factory
from p2ptrain.cluster.operator import operator
from p2ptrain.cluster.running import default_state_dir

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.cluster.console import Console
    from wire.client import SeedClient, SeedRequests
    from wire.records import CheckpointInfo

T = TypeVar("T")

DEFAULT_PORT = 7337  # copied from wire.address, so that --help does not load it; a test compares them
MEMBER_PORT = 7339  # copied for the same reason
DEFAULT_SEED = ""  # the seed that this user runs here (``running``)
SEED_VARIABLE = "P2PTRAIN_SEED"
NAME_BYTES = 64  # copied from roles.seed, for the same reason
STATE_DEFAULT = f"Default: {default_state_dir()}".replace(os.path.expanduser("~") + os.sep, f"~{os.sep}")
SEED_HELP = (
    "The seed: its address, a ticket, @FILE that holds one, or @DIR, the --state of a seed that runs here; several "
    "with commas between. Default: the one that you run here."
)
REQUEST_TIMEOUT_S = 20.0  # longer than the seed waits for a worker that it asks on our behalf

SeedOption = Annotated[str, typer.Option("--seed", envvar=SEED_VARIABLE, metavar="SEED", help=SEED_HELP)]
JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON document, for programs.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
ProfileOption = Annotated[
    str, typer.Option("--profile", "-p", metavar="NAME|PATH", help="A profile that ships, or a TOML file.")
]
WorkersOption = Annotated[int, typer.Option("--workers", "-w", metavar="N", min=1, max=64, help="Number of workers.")]
LinkOption = Annotated[
    str,
    typer.Option(
        "--link",
        metavar="PRESET",
        help="Emulate a link: lan, wifi, metro, wan, transcontinental, satellite, lossy; good, cellular, degraded, "
        "brownout; or 20ms. Default: none, or the profile's.",
    ),
]
StragglerOption = Annotated[
    float,
    typer.Option(
        "--straggler",
        metavar="K",
        min=1,
        max=100,
        help="Emulate a slow computer, such as 5: the worker, with `up` the last one, computes K times slower.",
    ),
]
HttpOption = Annotated[
    str, typer.Option("--http", metavar="HOST:PORT", help="Address of the verifier's OpenAI API; default: none.")
]
ApiKeyOption = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="FILE", help="With --http: file with the key of the API.")
]
_PORT_HELP = f"""Listen for the seed and other members on this port; 0: any free one. Default: {MEMBER_PORT}, or any
free one if that is taken, or if all is on this machine."""
MemberPortOption = Annotated[int | None, typer.Option("--port", metavar="PORT", min=0, max=65535, help=_PORT_HELP)]
SplitOption = Annotated[
    int | None,
    typer.Option(
        "--split",
        metavar="[N]",
        min=0,
        help="Split the model over N workers; no number: the fastest number.",
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Only show what a step is predicted to cost, and the plan of a split model.")
]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override one setting; may be repeated.")
]


def run(main: Coroutine[Any, Any, T], *, children: bool = False) -> T:
    """Run a command's coroutine, on uvloop if it is installed.

    ``children``: the coroutine starts processes.
    """
    try:
        with asyncio.Runner(loop_factory=loop_factory(children=children)) as runner:
            return runner.run(main)
    finally:
        main.close()  # avoids a warning if Ctrl+C came before it began


def ask(seed: str, question: Callable[[SeedClient], Awaitable[T]]) -> T:
    """Connect to the seed and return its answer, as in ``ask(seed, lambda client: client.jobs())``.

    Raises what ``SeedClient`` raises.
    """

    async def once() -> T:
        async with operator(seed) as client:
            return await question(client)

    return run(once())


def confirm(question: str, seed: str = "", group: str = "", name: str = "", *, yes: bool) -> None:
    """Ask before an action that cannot be undone. Raises ``UserError`` without the object, a yes, or a terminal."""
    import re

    from p2ptrain.cluster.console import printable
    from p2ptrain.core.errors import UserError

    async def is_listed(client: SeedClient) -> bool:
        found = await getattr(client, "tickets" if group == "ticket" else group)()
        return any(item.id.startswith(name) or getattr(item, "name", "") == name for item in found)

    if not yes and name and not re.fullmatch("[0-9a-f]{12}", name) and not ask(seed, is_listed):
        raise UserError(f"there is no {group.removesuffix('s')} {name}", remedy=f"see p2ptrain {group} list")
    if not yes and not sys.stdin.isatty():
        text = f"there is no terminal to ask: {printable(question)}"
        raise UserError(text, remedy="add --yes to do it without a question")
    if not yes and not typer.confirm(printable(question), err=True):
        raise UserError("nothing was done")


def newest_of(checkpoints: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """The newest one, preferably of a whole model."""
    return max(checkpoints, key=lambda item: (item.stage is None, item.step), default=None)


async def create_job(client: SeedRequests, name: str, label: str, profile: Profile, console: Console) -> str:
    """Create a job, with what its placement needs to know of a split model, and say so."""
    from p2ptrain.cli.model_sizes import shape_of

    warn = partial(console.event, "warning")
    if text := short_of_warm_up(profile):
        warn(text)
    shape = await asyncio.to_thread(shape_of, profile, warn) if profile.pipeline.stages > 1 else None
    more = {} if shape is None else {"shape": shape.to_map()}
    job = await client.create_job(name, label, profile.to_spec(), **more)
    console.event("info", f"created job {name} ({job}) from profile {label}")
    return job


def short_of_warm_up(profile: Profile) -> str:
    """Says that a job is over before its warm-up; empty if it is not."""
    steps, warm_up = profile.job.steps, profile.optimizer.warmup_steps
    if warm_up <= steps:
        return ""
    return (
        f"optimizer.warmup_steps = {warm_up:,} is more than job.steps = {steps:,}: the learning rate ends at "
        f"{100 * steps / warm_up:.3g} % of optimizer.lr; --set optimizer.warmup_steps={steps // 10} reaches all of it"
    )


def seed_option(seed: str) -> str:
    """The option by which another command reaches the same seed. It has no ticket, whose credentials are stored."""
    from p2ptrain.cluster.access import read_targets, shown_address

    if seed in ("", os.environ.get(SEED_VARIABLE)):
        return ""
    if seed.startswith("@"):
        return f" --seed {quote(seed)}"
    return f" --seed {','.join(map(shown_address, read_targets(seed)))}"


def at_terminal() -> bool:
    """Whether the full-screen view can run: it reads standard input and draws on standard error."""
    return sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()


def is_text(text: str) -> str:
    """Callback: refuse text that is not UTF-8, because it cannot be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("it is not UTF-8 text") from None
    return text


def not_empty(text: str) -> str:
    """Callback: refuse an empty argument, which is most often an unset variable of a script."""
    if not text.strip():
        raise typer.BadParameter("it is empty")
    return is_text(text)


def is_name(text: str) -> str:
    """Callback: limit the length of a name. An empty one means: not given."""
    if (size_bytes := len(is_text(text).encode())) > NAME_BYTES:
        raise typer.BadParameter(f"it has {size_bytes} bytes, a name may have {NAME_BYTES}")
    return text


NameOption = Annotated[
    str, typer.Option("--name", metavar="NAME", callback=is_name, help="Its name; default: that of the machine.")
]
