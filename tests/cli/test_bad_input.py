"""What a careless user types: the exit code, the cause and a remedy, before anything is begun."""

from __future__ import annotations

import random
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CASES = {
    "up --profile ./key.toml": (2, "./key.toml:4: unknown key optimizer.learning_rate"),
    "up --profile ./none.toml": (2, "cannot read the profile none.toml"),
    "up --profile tinny": (2, "no profile named 'tinny'"),
    "up --set foo=1": (2, "--set foo=1: unknown key foo"),
    "up --link dsl": (2, "there is no link preset 'dsl'"),
    "up --workers 2 --set job.workers=3": (2, "--set job.workers=3: the job needs 3 workers to begin"),
    "up --state bytes.toml": (6, "cannot make the directory bytes.toml/logs: Not a directory"),
    "seed --port 99999": (2, "--port: 99999 must be less than or equal to 65535"),
    "seed --port TAKEN --state state": (2, "cannot listen on 127.0.0.1:TAKEN: port TAKEN is in use"),
    "seed --port 0 --state bytes.toml": (6, "cannot make the directory"),
    "seed --port 0 --state broken": (6, "cannot use broken/seed/seed.sqlite3: file is not a database"),
    "up --plain --state broken": (
        6,
        "the seed did not start: cannot use broken/seed/seed.sqlite3: file is not a database",
    ),
    "join a:b": (2, "'a:b' is not an address"),
    "join --device gpu": (2, "--device gpu is not a device"),
    "join --threads 5000": (2, "--threads: 5000 must be less than or equal to 1024"),
    "join --memory much": (2, "--memory 'much' is not a size"),
    "join --advertise box": (2, "--advertise box has no port"),
    f"join --name {'n' * 65}": (2, "--name: it has 65 bytes, a name may have 64"),
    "join --no-discovery --state bytes.toml": (6, "cannot make the directory"),
    "join 127.0.0.1:1 --state state --wait 0": (3, "cannot reach 127.0.0.1:1: connection refused"),
    "checkpoints list --seed 127.0.0.1:1": (3, "cannot reach 127.0.0.1:1: connection refused"),
    "generate hi --job tiny --seed 127.0.0.1:1": (3, "cannot reach 127.0.0.1:1: connection refused"),
    "generate hi --split": (2, "generate needs one checkpoint"),
    "generate hi --checkpoint none": (2, "none is not a directory"),
    "jobs create --name \udcff": (2, "--name: it is not UTF-8 text"),
    "jobs show": (2, "JOB is missing"),
    "jobs show a b": (2, "too many arguments: (b)"),
    "jobs list --seed": (2, "--seed needs a value"),
    "jobs list --json=3": (2, "--json takes no value"),
    "jobs recoveries x --limit many": (2, "--limit: many must be a whole number"),
    "generate x --top-p some": (2, "--top-p: some must be a number"),
    "jobs show ''": (2, "JOB: it is empty"),
    "tui": (2, "the full-screen view needs a terminal"),
}


@pytest.mark.parametrize("typed", CASES)
def test_it_is_refused_with_its_cause_and_a_remedy(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key.toml").write_text('base = "tiny"\n\n[optimizer]\nlearning_rate = 1e-3\n')
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\n")
    (tmp_path / "broken" / "seed").mkdir(parents=True)
    (tmp_path / "broken" / "seed" / "seed.sqlite3").write_bytes(random.Random(2).randbytes(5000))
    before = sorted(tmp_path.iterdir())
    code, cause = CASES[typed]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        outcome = command(*shlex.split(typed.replace("TAKEN", port)))
    assert (outcome.code, outcome.out) == (code, ""), outcome.err
    assert f"error: {cause.replace('TAKEN', port)}" in outcome.err.replace(f"{tmp_path}/", "")
    assert outcome.err.rpartition("\n  → ")[2].strip(), "a remedy"
    assert "--state state" in typed or sorted(tmp_path.iterdir()) == before, "nothing was begun"
