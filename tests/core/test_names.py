"""Names of the product: a public class name exists once, and no identifier needs its author."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("p2ptrain", "wire", "ring", "roles", "tui", "configs")
RIDDLE = re.compile(
    r"(^|_)(told|said|say|beside|wish|works|alike|seen|brought|meant|kin|stay|gone|wants|given|told_of)(_|$)"
)
ALLOWED = {
    "beside": "a field of the messages Report and MemberLost, and of the events that carry it: a name on the wire",
}
"""Identifier that matches → why it may."""


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8")) for path in paths}


def identifiers(tree: ast.Module) -> Iterator[str]:
    """The names that a module gives: of functions, classes, arguments, attributes and variables."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name) | ast.arg(name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name


def test_public_class_name_exists_once(modules: dict[str, ast.Module]) -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_identifiers_need_no_author(modules: dict[str, ast.Module]) -> None:
    found = {
        (path, name) for path, tree in modules.items() for name in identifiers(tree) if RIDDLE.search(name.lower())
    }
    assert not {(path, name) for path, name in found if name not in ALLOWED}
    assert {name for _, name in found} >= set(ALLOWED), "an exception that nothing needs"
