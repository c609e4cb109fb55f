"""The entry point: help, errors as lines, and exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import p2ptrain
from p2ptrain.cli import runtime
from p2ptrain.cli.commands import CommandEntry, Commands, app
from p2ptrain.core import errors
from wire.address import MEMBER_PORT

from .conftest import Command


def _fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make ``p2ptrain profiles list`` raise."""

    def shipped() -> dict[str, Any]:
        raise error

    monkeypatch.setattr("configs.loader.shipped", shipped)


def test_help_names_every_command(command: Command) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        outcome = command(*arguments)
        assert (outcome.code, outcome.err) == (0, "")
        for entry in Commands.entries:
            assert f"  {entry.name} " in outcome.out
            assert entry.help in outcome.out


@pytest.mark.parametrize("entry", Commands.entries, ids=lambda entry: entry.name)
def test_every_command_explains_itself_with_an_example(command: Command, entry: CommandEntry) -> None:
    outcome = command(entry.name, "--help")
    assert outcome.code == 0
    names = [line.split()[0] for line in outcome.out.partition("Commands:")[2].splitlines() if line.strip()]
    if names:
        assert command(entry.name) == outcome, "a group alone shows its help"
    for page in [command(entry.name, name, "-h") for name in names] or [outcome]:
        assert page.code == 0
        assert "Example" in page.out
        assert f"p2ptrain {entry.name}" in page.out.partition("Example")[2]
        said = page.out.partition("Usage:")[2].partition("Example")[0]
        assert not re.search(r"\w   \w", said), "a line of the docstring stands further left than the others"


def test_what_fails_is_one_document_where_json_is_wanted(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_with(monkeypatch, errors.Refused("busy", "it is busy", remedy="ask again"))
    outcome = command("profiles", "list", "--json")
    said = {"message": "it is busy", "remedy": "ask again", "exit_code": 4, "code": "busy"}
    assert (outcome.code, outcome.json) == (4, {"error": said})
    assert outcome.err == "error: it is busy\n  → ask again\n", "people read the same"
    assert command("profiles", "list").out == "", "of another command before it nothing is left"
    _fail_with(monkeypatch, RuntimeError("oh"))
    assert command("profiles", "list", "--json").json["error"]["exit_code"] == 70


@pytest.mark.parametrize(
    "arguments",
    [
        ("profiles", "list", "--json", "--nonsense"),
        ("profiles", "list", "--nonsense", "--json"),
        ("jobs", "show", "--json"),
        ("generate", "--json", "x", "--tokens", "none"),
        ("generate", "x", "--temperature", "warm", "--json"),
        ("jobs", "lst", "--json"),
        ("--nonsense", "--json"),
        ("seed", "--port", "none", "--json"),
        ("tui", "--json"),
    ],
)
def test_a_wrong_argument_too_is_a_document(command: Command, arguments: tuple[str, ...]) -> None:
    outcome = command(*arguments)
    assert (outcome.code, outcome.json["error"]["exit_code"]) == (2, 2)
    assert outcome.json["error"]["message"] in outcome.err


def test_version(command: Command) -> None:
    assert command("--version").out == command("-V").out == f"p2ptrain {p2ptrain.__version__}\n"


def test_an_unknown_command_names_the_one_that_was_meant(command: Command) -> None:
    outcome = command("job")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: no such command: job\n  → did you mean jobs? `p2ptrain --help` lists the commands\n"
    assert command("zzz").err == "error: no such command: zzz\n  → `p2ptrain --help` lists the commands\n"
    outcome = command("jobs", "lst")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        "error: no such command: lst\n  → did you mean list? `p2ptrain jobs --help` lists the commands\n"
    )


def test_an_unknown_option_names_the_one_that_was_meant(command: Command) -> None:
    outcome = command("profiles", "list", "--jsn")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        "error: no such option: --jsn\n  → did you mean --json? `p2ptrain profiles list --help` lists the options\n"
    )
    assert "did you mean --version?" in command("--verson").err
    assert "→ `p2ptrain ticket new --seed @DIR` asks" in command("ticket", "new", "--state", "run").err


def test_a_shell_completes_commands_and_options(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("_P2PTRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("COMP_WORDS", "p2ptrain ch")
    assert command().out.split() == ["checkpoints", "chaos", "check", "chat"]
    monkeypatch.setenv("_P2PTRAIN_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "p2ptrain jobs list --")
    names = [line.partition("\t")[0] for line in command().out.splitlines()]
    assert names == ["--seed", "--json", "--help"], "one line for each, however long its help is"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.P2PTrainError("m", remedy="r"), 1),
        (errors.UserError("m", remedy="r"), 2),
        (errors.ConfigError("m", remedy="r"), 2),
        (errors.Unreachable("m", remedy="r"), 3),
        (errors.ProtocolError("m", remedy="r"), 4),
        (errors.Refused("code", "m", remedy="r"), 4),
        (errors.Refused("unknown-job", "m", remedy="r"), 2),
        (errors.Refused("unreachable", "m", remedy="r"), 3),
        (errors.Refused("does-not-fit", "m", remedy="r"), 6),
        (errors.JobFailed("m", remedy="r"), 5),
        (errors.StorageError("m", remedy="r"), 6),
    ],
)
def test_an_error_is_two_lines_and_its_exit_code(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: errors.P2PTrainError, code: int
) -> None:
    _fail_with(monkeypatch, error)
    outcome = command("profiles", "list")
    assert (outcome.code, outcome.out, outcome.err) == (code, "", "error: m\n  → r\n")


def test_what_a_peer_wrote_cannot_drive_the_terminal(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_with(monkeypatch, errors.Refused("code", "no\x1b[2J\nerror: yes", remedy="\x07"))
    assert command("profiles", "list").err == "error: no�[2J�error: yes\n  → �\n"


def test_a_path_that_the_system_refuses_is_no_mistake_of_the_program(command: Command) -> None:
    outcome = command("up", "--set", f"data.path={'a' * 300}", "--dry-run")
    assert (outcome.code, "cannot use aaa" in outcome.err, "File name too long" in outcome.err) == (6, True, True)
    assert command("up", "--set", "data.path=~nobody-of-this-name/x", "--dry-run").code == 2


def test_a_mistake_in_the_program_is_no_traceback_either(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("P2PTRAIN_DEBUG", raising=False)
    _fail_with(monkeypatch, KeyError("x"))
    outcome = command("profiles", "list")
    assert outcome.code == 70
    assert outcome.err.startswith("error: a mistake in this program: KeyError: 'x'\n  → set P2PTRAIN_DEBUG=1")


def test_the_debug_variable_lets_the_traceback_through(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PTRAIN_DEBUG", "1")
    _fail_with(monkeypatch, errors.UserError("m"))
    with pytest.raises(errors.UserError):
        command("profiles", "list")


def test_an_interrupt_is_130(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_with(monkeypatch, KeyboardInterrupt())
    assert command("profiles", "list").code == 128 + signal.SIGINT


def test_a_reader_that_has_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed_pipe:
        process = subprocess.run(
            [sys.executable, "-m", "p2ptrain", "profiles", "show", "tiny"],
            stdout=closed_pipe,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    assert (process.returncode, process.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_full_disk_is_an_error() -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-m", "p2ptrain", "profiles", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    assert (process.returncode, b"the disk is full" in process.stderr) == (6, True)


def test_the_port_of_members_is_that_of_the_wire() -> None:
    assert runtime.MEMBER_PORT == MEMBER_PORT


# --------------------------------------------------------------------------------------------------------- all options


FLAG = "a flag"
MEANINGS = {
    "--seed": "SEED",
    "--random-seed": "N",
    "--job": "JOB",
    "--profile": "NAME|PATH",
    "--workers": "N",
    "--json": FLAG,
    "--yes": FLAG,
    "--output": "FILE",
}
"""What must follow the most common options."""


def options() -> Iterator[tuple[str, Any]]:
    """Every option of every command, with the command's name."""
    waiting: list[tuple[str, Any]] = [("p2ptrain", typer.main.get_command(app))]
    while waiting:
        path, command = waiting.pop()
        if hasattr(command, "list_commands"):
            waiting += [(f"{path} {name}", command.get_command(None, name)) for name in command.list_commands(None)]
        yield from ((path, option) for option in command.params if option.param_type_name == "option")


def test_an_option_has_one_meaning_and_a_short_name_one_option() -> None:
    found, full = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for path, option in options():
        name, *short = sorted(option.opts, key=len, reverse=True)
        assert option.hidden or option.help, f"{path} {name} has no help"
        assert option.hidden or option.is_flag or option.metavar, f"{path} {name} does not say what follows it"
        found[name].add(FLAG if option.is_flag else str(option.metavar).strip("[]"))
        for letter in short:
            full[letter].add(name)
    assert {name: kinds for name, kinds in found.items() if len(kinds) > 1} == {}
    assert {name: found[name] for name in MEANINGS} == {name: {kind} for name, kind in MEANINGS.items()}
    assert {letter: names for letter, names in full.items() if len(names) > 1} == {}
