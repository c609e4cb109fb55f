"""Plugins: what installed packages add to p2ptrain by entry points. docs/plugins.md has the interface of each kind.

A job's profile names the plugins that it needs, and their packages. Code comes from this machine's packages only, never
from a peer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, distributions
from typing import Any

from p2ptrain.core.errors import ConfigError, P2PTrainError, UserError
from p2ptrain.core.texts import install_command

NAME = "[a-z0-9][a-z0-9_-]{0,31}"
PACKAGE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(==[A-Za-z0-9][A-Za-z0-9.+!_-]{0,31})?"
"""A distribution, and perhaps its version: no option of pip, because people copy the command that has it."""
MOST_OFFERED = 32
_KEY = f"(strategies|codecs|readers|models|trackers):{NAME}"
OFFER = re.compile(f"({_KEY}(,{_KEY}){{0,{MOST_OFFERED - 1}}})?")
"""What a worker says that it has: the keys of ``installed``, with commas between."""


@cache
def installed() -> Mapping[str, tuple[EntryPoint, str]]:
    """The plugins of this machine by ``kind:name``, of the group ``p2ptrain.kind``, each with its package and version.
    None is imported."""
    found = dict[str, tuple[EntryPoint, str]]()
    for package in distributions():
        for point in package.entry_points:
            key = f"{point.group.removeprefix('p2ptrain.')}:{point.name}"
            if point.group.startswith("p2ptrain.") and re.fullmatch(_KEY, key):
                found.setdefault(key, (point, f"{package.name} {package.version}"))  # the first in the path wins
    return found


def lacking(needs: Mapping[str, str], offer: str) -> str:
    """What a worker with ``offer`` must install for a job that ``needs`` (``kind:name`` → package); empty: nothing."""
    missing = {key: package for key, package in needs.items() if key not in offer.split(",")}
    packages = " ".join(dict.fromkeys(missing.values()))
    return f"needs {', '.join(missing)}: run pip install {packages}, then start again" if missing else ""


def load(key: str, of: type = object, package: str = "") -> Any:
    """Import a plugin; ``of``: its base, if it is a class. Raises ``ConfigError``: it is not installed, or not of
    ``package``; and as ``blamed``."""
    point, here = installed().get(key, (None, "no package"))
    name, _, version = package.partition("==")
    wanted = f"{re.sub('[-_.]+', '[-_.]+', name)} {re.escape(version) or '.*'}"  # - _ and . are the same in names
    if point is None or (package and not re.fullmatch(wanted, here, re.IGNORECASE)):
        remedy = f"run: {install_command('', package or 'PACKAGE')}"
        raise ConfigError(f"the plugin {key} is of {here} here, and the job needs that of {package}", remedy=remedy)
    with blamed(key):
        found = point.load()
        if of is not object and not issubclass(found, of):
            raise TypeError(f"it is no {of.__name__}")
    return found


def make(key: str, of: type, settings: Mapping[str, object], *arguments: object) -> Any:
    """Call a plugin with its settings as keyword arguments. Raises as ``load``."""
    plugin = load(key, of)
    with blamed(key):
        return plugin(*arguments, **settings)


@contextmanager
def blamed(key: str, doing: str = "") -> Iterator[None]:
    """Run a plugin's code. Raises ``UserError``, which names its package, for whatever that raises."""
    try:
        yield
    except P2PTrainError:
        raise
    except Exception as error:
        remedy = f"check [plugins.{key.partition(':')[2]}], update the package, or tell its author"
        text = f"the plugin {key} of {installed()[key][1]} failed{doing}: {type(error).__name__}: {error}"
        raise UserError(text, remedy=remedy) from error
