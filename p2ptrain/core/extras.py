"""Optional packages: the command that installs them where this program is installed."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path


def install_command(extra: str, prefix: Path | None = None) -> str:
    """The command that installs the packages of an extra of ``pyproject.toml`` for this interpreter.

    p2ptrain is on no package index, so ``pip install 'p2ptrain[extra]'`` would find nothing.

    Args:
        prefix: directory of the environment; None: the running one.
    """
    try:
        listed = importlib.metadata.requires("p2ptrain") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        listed = []
    marks = [needed.partition("; extra == ") for needed in listed]
    packages = [name for name, _, mark in marks if mark.strip("\"'") == extra] or [f"PACKAGES-OF-{extra}"]
    if ((prefix or Path(sys.prefix)) / "pipx_metadata.json").exists():
        command = ["pipx", "inject", "p2ptrain"]
    elif find_spec("pip"):
        command = [sys.executable, "-m", "pip", "install"]
    else:  # made by uv
        command = ["uv", "pip", "install", "--python", sys.executable]
    if sys.platform == "win32":
        return " ".join(f'"{word}"' if set(word) & set(" <>=") else word for word in [*command, *packages])
    return shlex.join([*command, *packages])
