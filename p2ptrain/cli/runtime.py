"""What commands share: options and their checks, the event loop, and requests to the seed."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import MISSING, field, fields
from functools import wraps
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from p2ptrain.cluster.loops import loop_factory
from p2ptrain.cluster.running import SEED_VARIABLE, default_state_dir
from p2ptrain.core.errors import UserError
from p2ptrain.core.texts import printable

if TYPE_CHECKING:
    from wire.client import SeedClient
    from wire.relay import RelayLimits

T = TypeVar("T")

MEMBER_PORT = 7339  # copied from wire.address, so that --help does not load it; a test compares them
NAME_BYTES = 64  # copied from roles.seed, for the same reason
STATE_DEFAULT = f"Default: {default_state_dir()}".replace(os.path.expanduser("~") + os.sep, f"~{os.sep}")
SEED_HELP = (
    "The seed: its address, a ticket, @FILE that holds one, or @DIR, the --state of a seed that runs here; several "
    "with commas between. Default: the one that you run here."
)
HTTP_EXAMPLE = "such as 127.0.0.1:8000, where programs reach it"
WEB_EXAMPLE = "such as 127.0.0.1:8080, where a browser reaches it"
REQUEST_TIMEOUT_S = 20.0  # longer than the seed waits for a worker that it asks on our behalf


def option(names: str, text: str = "", **more: Any) -> Any:
    """Declare an option as its help shows it: ``option("--workers -w N", "Number of workers.", min=1)``."""
    words = names.split()
    values = [word for word in words if not word.startswith("-")]
    return typer.Option(*words[: len(words) - len(values)], metavar=values[0] if values else None, help=text, **more)


def option_field(names: str, text: str, default: Any, **more: Any) -> Any:
    """A field of a dataclass that is an option of a command that ``takes_options``. The only list is an empty one."""
    metadata = {"option": option(names, text, **more)}
    return (
        field(default_factory=list, metadata=metadata) if default == [] else field(default=default, metadata=metadata)
    )


SeedArgument = Annotated[str, typer.Argument(envvar=SEED_VARIABLE, metavar="[SEED]", help=SEED_HELP)]
SeedOption = Annotated[str, option("--seed SEED", SEED_HELP, envvar=SEED_VARIABLE)]
JsonOption = Annotated[bool, option("--json", "Write one JSON document, for programs.")]
YesOption = Annotated[bool, option("--yes -y", "Do not ask for confirmation.")]
ProfileOption = Annotated[str, option("--profile -p NAME|PATH", "A profile that ships, or a TOML file.")]
WorkersOption = Annotated[int, option("--workers -w N", "Number of workers.", min=1, max=64)]
LinkOption = Annotated[
    str,
    option(
        "--link PRESET",
        "Emulate a link: lan, wifi, metro, wan, transcontinental, satellite, lossy; good, cellular, degraded, "
        "brownout; or 20ms. Default: none, or the profile's.",
    ),
]
StragglerOption = Annotated[
    float,
    option(
        "--straggler K",
        "Emulate a slow computer, such as 5: the worker, with `up` the last one, computes K times slower.",
        min=1,
        max=100,
    ),
]
HttpOption = Annotated[str, option("--http HOST:PORT", "Address of the verifier's OpenAI API; default: none.")]
ApiKeyOption = Annotated[Path | None, option("--api-key-file FILE", "With --http: file with the key of the API.")]
_PORT_HELP = f"""Listen for the seed and other members on this port; 0: any free one. Default: {MEMBER_PORT}, or any
free one if that is taken, or if all is on this machine."""
MemberPortOption = Annotated[int | None, option("--port PORT", _PORT_HELP, min=0, max=65535)]
RelayOption = Annotated[
    float | None,
    option(
        "--relay MB/S",
        "Pass on at most so many megabytes a second between peers behind routers; 0: none. Default: no limit.",
        min=0,
    ),
]
SplitOption = Annotated[
    int | None, option("--split [N]", "Split the model over N workers; no number: the fastest number.", min=0)
]
DownloadOption = Annotated[
    bool, option("--download", "Fetch the model from the Hugging Face hub if its name is an id, OWNER/NAME.")
]
DryRunOption = Annotated[
    bool, option("--dry-run", "Only show what a step is predicted to cost, and the plan of a split model.")
]
SetOption = Annotated[list[str], option("--set TABLE.KEY=VALUE", "Override one setting; may be repeated.")]


def relay_limits(relay: float | None) -> RelayLimits:
    """What ``--relay`` allows."""
    from wire.relay import RelayLimits

    return RelayLimits(circuits=0) if relay == 0 else RelayLimits(bytes_per_s=1e6 * (relay or 0.0))


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
    from p2ptrain.cluster.access import operator

    async def once() -> T:
        async with operator(seed) as client:
            return await question(client)

    return run(once())


def confirm(question: str, seed: str = "", group: str = "", name: str = "", *, yes: bool) -> None:
    """Ask before an action that cannot be undone. Raises ``UserError`` without the object, a yes, or a terminal."""

    async def is_listed(client: SeedClient) -> bool:
        listed = await getattr(client, group)()
        return any(item.id.startswith(name) or getattr(item, "name", "") == name for item in listed)

    if yes:
        return
    if name and not re.fullmatch("[0-9a-f]{12}", name) and not ask(seed, is_listed):
        raise UserError(f"there is no {group.removesuffix('s')} {name}", remedy=f"see p2ptrain {group} list")
    if not sys.stdin.isatty():
        text = f"there is no terminal to ask: {printable(question)}"
        raise UserError(text, remedy="add --yes to do it without a question")
    if not typer.confirm(printable(question), err=True):
        raise UserError("nothing was done")


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


NameOption = Annotated[str, option("--name NAME", "Its name; default: that of the machine.", callback=is_name)]


def takes_options(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every field of the dataclass ``kind`` as an option; its argument ``options`` receives them."""
    declared, hints = fields(kind), get_type_hints(kind, include_extras=True)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**arguments: Any) -> None:
            options = kind(**{item.name: arguments.pop(item.name) for item in declared})
            command(**arguments, options=options)

        signature = inspect.signature(command, eval_str=True)
        parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "options"]
        for item in declared:
            default = item.default if item.default_factory is MISSING else item.default_factory()
            hint = hints[item.name]
            hint = Annotated[hint, item.metadata["option"]] if item.metadata else hint
            keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter(item.name, keyword, default=default, annotation=hint))
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


class WithBareSplit(TyperCommand):
    """A command that accepts ``--split`` without a number, which means the best number of stages (0)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, with_number(args))
        except Exception as error:  # a parser error; its type depends on the version of Typer
            at = args.index("--split") + 1 if "--split" in args else len(args)
            word = args[at] if at < len(args) and not args[at].startswith("-") else ""
            if word and "unexpected extra" in str(error) and f"({word})" in str(error):
                remedy = "write --split N, or --split alone for the fastest number"
                raise UserError(f"--split {word} is not a number of parts", remedy=remedy) from None
            raise


def with_number(args: list[str]) -> list[str]:
    """Give every ``--split`` without a number the number 0."""
    words = list[str]()
    for number, word in enumerate(args):
        if word == "--":
            return [*words, *args[number:]]
        is_bare = word == "--split" and not (number + 1 < len(args) and args[number + 1].isdecimal())
        words.append("--split=0" if is_bare else word)
    return words


def check_http(http: tuple[str, int] | None, api_keys: Path | None) -> None:
    """Raises ``UserError`` for a key without an endpoint."""
    if api_keys is not None and http is None:
        raise UserError("--api-key-file is for an HTTP endpoint", remedy="add --http HOST:PORT, or leave it out")


def host_and_port(option: str, text: str, meaning: str) -> tuple[str, int] | None:
    """Read HOST:PORT; None if ``text`` is empty. Raises ``UserError``."""
    from wire.address import parse_address

    if not text:
        return None
    remedy = f"write HOST:PORT, {meaning}"
    try:
        host, port = parse_address(text, default_port=1)
        named = port == parse_address(text, default_port=2)[1]
    except UserError as problem:
        raise UserError(f"{option}: {problem.message}", remedy=remedy) from None
    if not named:
        raise UserError(f"{option} {text} has no port", remedy=remedy)
    return host, port
