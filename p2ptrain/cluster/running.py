"""The seeds that this user runs on this machine. Each keeps a small file, by which commands find it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.core.disk import RealDisk, write_atomic
from p2ptrain.core.errors import StorageError, UserError

SEED_VARIABLE = "P2PTRAIN_SEED"
"""Variable with the seed that commands and programs use by default."""
MAX_FILE_BYTES = 8192


@dataclass(frozen=True, slots=True)
class RunningSeed:
    """A seed that runs here. ``address``: for commands on this machine. ``state``: its ``--state``, absolute."""

    address: tuple[str, int]
    state: Path


def default_state_dir() -> Path:
    """Where this operating system keeps the state of a program."""
    from platformdirs import user_state_path

    return user_state_path("p2ptrain", appauthor=False)


@contextmanager
def announce_seed(address: tuple[str, int], state: Path) -> Iterator[None]:
    """Let commands of this user find the seed of this process, within the block."""
    from wire.address import format_address

    path = _directory() / f"{_host_prefix()}{os.getpid()}"
    content = {"address": format_address(*address), "state": str(state.resolve())}
    with suppress(StorageError):  # then commands need --seed
        RealDisk().make_dir(path.parent)
        write_atomic(RealDisk(), path, json.dumps(content).encode(), private=True)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def running_seeds() -> list[RunningSeed]:
    """The seeds whose processes live. Files of dead ones are removed."""
    import psutil

    from wire.address import parse_address

    disk, found = RealDisk(), list[RunningSeed]()
    with suppress(StorageError):
        for name in disk.list_dir(_directory()):
            path, pid = _directory() / name, name.removeprefix(_host_prefix())
            if not pid.isdecimal():
                continue  # of another machine that shares this directory
            try:
                # Another process may have the number of a dead one.
                if psutil.Process(int(pid)).create_time() > path.stat().st_mtime:
                    continue
                content = json.loads(disk.read(path, max_bytes=MAX_FILE_BYTES))
                found.append(RunningSeed(parse_address(content["address"]), Path(content["state"])))
            except psutil.NoSuchProcess:
                path.unlink(missing_ok=True)
            except (psutil.Error, OSError, StorageError, UserError, ValueError, KeyError, TypeError):
                continue  # damaged, or removed meanwhile
    return found


def the_running_seed(state: Path | None = None) -> tuple[str, int]:
    """The address of the one seed that runs here, or of the one with this ``--state``.

    Without any: the default port of this machine, where another user's seed may be.

    Raises:
        UserError: several run here, or none with this ``state``.
    """
    from wire.address import DEFAULT_PORT

    found = running_seeds()
    if state is not None:
        for seed in found:
            if seed.state == state.resolve():
                return seed.address
        remedy = f"start it: p2ptrain seed --state {state}" + (f"; running: {_list_seeds(found)}" if found else "")
        raise UserError(f"no seed of yours runs with --state {state}", remedy=remedy)
    if len(found) > 1:
        text = f"{len(found)} seeds of yours run on this machine: {_list_seeds(found)}"
        raise UserError(text, remedy="name one of them: --seed @DIR, its --state, or --seed ADDRESS")
    return found[0].address if found else ("127.0.0.1", DEFAULT_PORT)


def _list_seeds(seeds: list[RunningSeed]) -> str:
    from wire.address import format_address

    return ", ".join(f"{format_address(*seed.address)} (--state {seed.state})" for seed in seeds)


def _directory() -> Path:
    return default_state_dir() / "running"


def _host_prefix() -> str:
    return f"{socket.gethostname()}-"
