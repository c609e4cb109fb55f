"""What each entry point loads, seen from a fresh interpreter: light commands stay light, and torch has one home."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "tokenizers", "safetensors"}
SCREEN = {"textual"}
WEB = {"starlette", "uvicorn"}
LIGHT = (
    HEAVY
    | SCREEN
    | WEB
    | {"numpy", "pydantic", "rich", "msgpack", "xxhash", "psutil", "asyncio", "uvloop", "wire", "configs"}
)

_PROLOGUE = """
import contextlib, io, json, sys
def command(*arguments):
    from p2ptrain.cli.main import main
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(arguments)
        except SystemExit as left:
            assert left.code == 0, left.code
    assert out.getvalue()
"""
_EPILOGUE = """
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``code``."""
    process = subprocess.run(
        [sys.executable, "-c", _PROLOGUE + code + _EPILOGUE], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr
    return set(json.loads(process.stdout))


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("command('--help'); command('--version')", LIGHT),
        (
            "import os; os.environ.update(_P2PTRAIN_COMPLETE='complete_bash', COMP_WORDS='p2ptrain j', COMP_CWORD='1');"
            "command()",
            LIGHT - {"pydantic"},  # with which Typer converts values
        ),
        (
            "[command(name, '--help') for name in ('seed', 'join', 'up', 'tui', 'generate', 'chat')]",
            HEAVY | SCREEN | WEB,
        ),
        ("import p2ptrain.cli.text, p2ptrain.compute.text", HEAVY - {"tokenizers"} | SCREEN),
        ("command('jobs', 'create', '--help'); command('profiles', 'show', 'tiny')", HEAVY | SCREEN),
        ("command('parts', '--help'); import tui.chains", HEAVY | SCREEN),
        ("import p2ptrain.core.checkpoints, p2ptrain.core.world", LIGHT - {"asyncio"}),
        ("import configs.loader", HEAVY | SCREEN | {"numpy", "rich", "asyncio"}),
        ("command('bench', '--help')", HEAVY | SCREEN | {"numpy", "rich", "wire", "uvloop"}),
        (
            "import ring.collectives, ring.coordinator, ring.session, wire.client, wire.transport, wire.emulate",
            HEAVY | SCREEN | {"pydantic", "rich"},
        ),
        ("import roles.seed.run", HEAVY | SCREEN | WEB | {"numpy"}),
        ("import tui.app", HEAVY | WEB),
        ("import p2ptrain", LIGHT | {"typer", "platformdirs"}),
        ("import p2ptrain; p2ptrain.Client, p2ptrain.LocalCluster, p2ptrain.train", HEAVY | SCREEN | WEB),
        ("import roles.serving.texts", HEAVY | SCREEN | WEB | {"pydantic"}),
        ("import roles.verifier.http_app, roles.web.serving", HEAVY | SCREEN),
    ],
)
def test_what_is_not_loaded(code: str, forbidden: set[str]) -> None:
    assert loaded_by(code) & forbidden == set()


def test_the_check_can_fail() -> None:
    assert loaded_by("import tui.app, configs.loader, roles.verifier.http_app") >= SCREEN | WEB | {"pydantic"}


def test_core_imports_only_the_standard_library() -> None:
    foreign = set[tuple[str, str]]()
    for path in (Path(__file__).parents[2] / "p2ptrain" / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            known = (*sys.stdlib_module_names, "p2ptrain")
            foreign |= {(path.name, name) for name in names if name.partition(".")[0] not in known}
    assert not foreign
