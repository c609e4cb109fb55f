"""``p2ptrain agent``: starts a coding agent with the address, the key and a model of a cluster."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import ssl
import tomllib
from contextlib import aclosing
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import print_table
from p2ptrain.cli.runtime import SeedOption, ask, option, run
from p2ptrain.core.errors import UserError
from p2ptrain.core.texts import did_you_mean

NO_KEY = "none"
app = new_typer()


@app.command("agent")
def agent(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The agent; without it, all are listed.")] = "",
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="What the agent is started with.")
    ] = None,
    url: Annotated[str, option("--url URL", "An --http address. Default: the seed's, else a verifier's.")] = "",
    api_key_file: Annotated[
        Path | None, option("--api-key-file FILE", "Its key. Default: the operators' key of a seed that you run here.")
    ] = None,
    model: Annotated[str, option("--model-name NAME", "The model. Default: the only one.")] = "",
    dry_run: Annotated[bool, option("--dry-run", "Only show the command and its variables, without the key.")] = False,
    seed: SeedOption = "",
) -> None:
    """Start a coding agent that a model of the cluster answers. Without NAME, list the known agents.

    \b
    Examples:
      p2ptrain agent
      p2ptrain agent aider -- --message "add a test" app.py
      p2ptrain agent claude --model-name Qwen3-Coder-30B-A3B-Instruct
      p2ptrain agent codex --url http://192.168.1.20:8000 --api-key-file api-key --dry-run
    """
    from roles.http.access import read_key

    agents = tomllib.loads(Path(__file__).with_name("agents.toml").read_text("utf-8"))
    if not name:
        rows = [(each, str(shutil.which(row["program"]) or "no"), row["install"]) for each, row in agents.items()]
        print_table(("AGENT", "INSTALLED", "INSTALL"), rows)
        return
    if (chosen := agents.get(name)) is None:
        raise UserError(
            f"there is no agent {name}", remedy=f"{did_you_mean(name, agents)}choose one of {', '.join(agents)}"
        )
    program: str = chosen["program"]
    if not dry_run and shutil.which(program) is None:
        raise UserError(f"{program} is not installed here", remedy=chosen["install"])
    state = None
    if not url:
        url, state = _endpoint_of(seed)
    url = url.rstrip("/").removesuffix("/v1")
    if not re.fullmatch(r"https?://[^\s?#@\"\\]+", url):
        raise UserError(f"--url {url!r} is no address of an endpoint", remedy="such as http://127.0.0.1:8000")
    names = () if state is None else ("http-operate.key", "authority/ca.pem")
    own = {name: path for name in names if state and (path := state / name).is_file()}
    api_key_file = api_key_file or own.get("http-operate.key")
    authority = own.get("authority/ca.pem") if url.startswith("https:") else None
    key = NO_KEY if api_key_file is None else read_key(api_key_file, lambda text: typer.echo(text, err=True))
    model = _choose_model(url, run(_read_models(url, key, authority)), model)
    values = {"url": url, "key": "HIDDEN" if dry_run and key != NO_KEY else key, "model": model}

    def filled(text: str) -> str:
        return Template(text).substitute(values)

    variables = {each: filled(text) for each, text in chosen["variables"].items()}
    if authority is not None:
        variables |= dict.fromkeys(("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"), str(authority))
    command = [program, *map(filled, chosen.get("arguments", ())), *(arguments or ())]
    if dry_run:
        typer.echo(shlex.join(["env", *(f"{each}={value}" for each, value in variables.items()), *command]))
        return
    os.execvpe(program, command, os.environ | variables)  # noqa: S606 - the program is one of the table


def _endpoint_of(seed: str) -> tuple[str, Path | None]:
    """The address at which the cluster answers HTTP, and the seed's directory if its endpoint is on this machine.
    Raises ``UserError``, and as ``ask``."""
    from p2ptrain.cluster.access import read_targets
    from p2ptrain.cluster.running import running_seeds

    if http := ask(seed, lambda client: client.cluster()).http:
        targets = read_targets(seed)
        return http, next((each.state / "seed" for each in running_seeds() if each.address in targets), None)
    if http := next((info.http for info in ask(seed, lambda client: client.serving()) if info.http), ""):
        return http, None
    remedy = "start the seed or a verifier with --http 127.0.0.1:8000, or name another endpoint with --url"
    raise UserError("neither the seed nor a verifier answers HTTP", remedy=remedy)


async def _read_models(url: str, key: str, authority: Path | None) -> list[str]:
    """The models at ``url``. Raises ``NetworkError``, ``ProtocolError``."""
    from roles.verifier.upstream import UpstreamServer

    trusted = ssl.create_default_context(cafile=authority)
    async with aclosing(UpstreamServer(url, key, lambda *_: None, trusted=trusted)) as server:
        return [served.model for served in await server.read_models()]


def _choose_model(url: str, models: list[str], wanted: str) -> str:
    """Raises ``UserError`` if there is no such model, or no only one."""
    listed = f"{url} has {', '.join(models) or 'no model yet'}"
    if (not wanted and len(models) != 1) or (wanted and wanted not in models):
        remedy = f"{did_you_mean(wanted, models)}name one of them: --model-name NAME"
        remedy = remedy if models else "start a verifier: p2ptrain join SEED --role verifier --model DIR"
        raise UserError(f"no model {wanted}: {listed}" if wanted else listed, remedy=remedy)
    [model] = [wanted] if wanted else models
    if not re.fullmatch(r"\w[\w .:/@+-]*", model):  # settings of some agents are JSON or TOML
        raise UserError(f"an agent cannot be given a model with the name {model!r}", remedy="rename its directory")
    return model
