"""Imports all targets, and finds every parser of the packages by reading their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from .engine import SUFFIX

ROOT = Path(__file__).parents[2]
PACKAGES = ("p2ptrain", "wire", "ring", "roles", "tui", "configs")
for path in sorted(Path(__file__).parent.glob("*_targets.py")):
    import_module(f"{__package__}.{path.stem}")


def parsers() -> set[str]:
    """``module.qualified_name`` of every function named ``..._untrusted`` that does something."""
    found: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.update(f"{module}.{name}" for name in _named(ast.parse(path.read_bytes()), ""))
    return found


def _named(node: ast.AST, outside: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _named(child, outside)
            continue
        name = f"{outside}{child.name}"
        if isinstance(child, ast.ClassDef):
            yield from _named(child, f"{name}.")
            continue
        if child.name.endswith(SUFFIX) and not _is_abstract(child):
            yield name
        yield from _named(child, f"{name}.<locals>.")


def _is_abstract(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether all that it does is to raise ``NotImplementedError``."""
    last = function.body[-1]
    return len(function.body) == 1 and isinstance(last, ast.Raise) and ast.unparse(last) == "raise NotImplementedError"
