"""What lies on disk at the end: are the checkpoints whole, do all hold the same state, does one load?"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.cli.chaos.judge import Verdict
from p2ptrain.core.checkpoints import CheckpointEntry, CheckpointStore
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import StorageError

KEEP = 1000  # nothing is pruned by looking
STATE_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoints of a cluster that has ended.

    Attributes:
        states: worker's name → hash of the state of ``step``.
        damaged: those that are not what was written.
    """

    step: int
    states: dict[str, str]
    damaged: list[str]
    count: int
    newest: Path | None


def saved(root: Path, job: str, step: int, names: list[str]) -> Saved:
    """Read every byte. Blocks."""
    states, damaged, count = dict[str, str](), list[str](), 0
    newest: Path | None = None
    for name in names:
        directory = root / name / "jobs" / job / "checkpoints"
        if not directory.is_dir():
            continue
        store = CheckpointStore(RealDisk(), directory, KEEP)
        found = {path.name for path in directory.glob("step-*")}
        for entry in store.entries():
            count += 1
            found.discard(entry.path.name)
            try:
                store.verify(entry)
            except StorageError as problem:
                damaged.append(problem.message)
                continue
            if entry.step == step:
                states[name] = state_hash(entry)
                newest = entry.path
        damaged += [f"{directory / name} has no manifest that can be read" for name in sorted(found)]
    return Saved(step, states, damaged, count, newest)


def state_hash(entry: CheckpointEntry) -> str:
    """SHA-256 over the sums of the files that hold parameters and optimizer state."""
    digest = hashlib.sha256()
    for name, (size_bytes, file_digest) in sorted(entry.files.items()):
        if name.endswith(STATE_SUFFIX):
            digest.update(f"{name} {size_bytes} {file_digest}\n".encode())
    return digest.hexdigest()


async def loads(path: Path, timeout_s: float) -> Verdict:
    """Whether the checkpoint opens and writes a byte of text, in a process as a person would start it."""
    name = "a checkpoint loads"
    code, _, error = await _command(["generate", "def ", "--checkpoint", str(path), "--tokens", "1"], timeout_s)
    return Verdict(name, code == 0, str(path) if code == 0 else f"{path}: {error}")


async def audited(address: str, job: str, timeout_s: float) -> Verdict:
    """What ``p2ptrain jobs audit`` says, where this version has it."""
    name = "the ledger covers every sample once"
    code, _, _ = await _command(["jobs", "audit", "--help"], timeout_s)
    if code:
        return Verdict(name, None, "this version keeps no ledger")
    code, output, error = await _command(["jobs", "audit", job, "--seed", address, "--json"], timeout_s)
    try:
        document = json.loads(output)
    except ValueError:
        document = None
    found = isinstance(document, dict) and "error" not in document
    return Verdict(name, code == 0, _short(document) if found else error or f"exit code {code}")


def _short(document: object) -> str:
    """The single values of a JSON map, as one line."""
    if not isinstance(document, dict):
        return ""
    return ", ".join(f"{key} {value}" for key, value in document.items() if isinstance(value, str | int | float))[:300]


async def _command(arguments: list[str], timeout_s: float) -> tuple[int, str, str]:
    """Exit code, standard output and the last line of standard error of a ``p2ptrain`` of its own; 124: out of time."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "p2ptrain",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, error = await process.communicate()
    except TimeoutError:
        return 124, "", f"no answer within {timeout_s:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = error.decode(errors="replace").strip().splitlines()
    return process.returncode or 0, output.decode(errors="replace"), next(reversed(lines), "")
