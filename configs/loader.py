"""The loader of profiles. It merges layers, and each layer overrides those before it::

    defaults < shipped profile < file < environment (P2PTRAIN__OPTIMIZER__LR=3e-3) < --set optimizer.lr=3e-3

A file may name a shipped profile as its base with ``base = "tiny"``. The loader records the source of every value. So
an error names the file and line, the variable or the override, and a correct value.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, get_origin

import tomli
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from configs.schema import Conflict, Profile, fields, tables
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.plugins import NAME
from p2ptrain.core.texts import did_you_mean, shortened

M = TypeVar("M", bound=BaseModel)

PROFILES_DIR = Path(__file__).parent / "profiles"
ENVIRONMENT_PREFIX = "P2PTRAIN__"
DEFAULT_SOURCE = "default"
_SHIPPED_SOURCE = "profile "
_VARIABLE = "the variable "
_FILE_LIMIT_BYTES = 1024 * 1024
_SYNTAX = "see https://toml.io for the syntax"

_FIELDS: dict[str, FieldInfo] = dict(fields())
_TABLES = tuple(name for name, _ in tables())
_PLUGIN_KEY = re.compile(rf"plugins\.{NAME}\.[a-z][a-z0-9_]{{0,63}}")  # the tables of plugins are flat
_TABLE_LINE = re.compile(r"\s*+\[([^\[\]]++)\]")
_KEY_LINE = re.compile(r"""([\w.\s"'-]++)=""")
_MOST_DEPTH = 16
_KEY_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_DEEP_KEY = re.compile(rf"""(?<![\w"'\\-])(?:{_KEY_PART}[ \t]*+\.[ \t]*+){{{_MOST_DEPTH}}}""")
"""A dotted key that is too deep. The parser's time grows with the square of a key's depth."""


@dataclass(frozen=True, slots=True)
class LoadedProfile:
    """An effective profile. ``sources``: source of every dotted key's value: ``default``, ``profile tiny``, a path with
    a line, the name of a variable, or the override."""

    profile: Profile
    sources: dict[str, str]


_Layer = Iterator[tuple[str, object, str]]
"""Settings of one layer: dotted key, value, and its place for error messages, which also tells its source."""


def shipped() -> dict[str, Path]:
    return {path.stem: path for path in sorted(PROFILES_DIR.glob("*.toml"))}


def describe(path: Path) -> str:
    """The purpose of a profile: the comment in its first line."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def load(
    profile: str, environ: Mapping[str, str], sets: Sequence[str], usual: Mapping[str, tuple[object, str]] | None = None
) -> LoadedProfile:
    """Load the effective profile.

    Args:
        profile: name of a shipped profile, or the path of a TOML file (recognised by its suffix or a separator).
        environ: environment variables; only those that begin with ``P2PTRAIN__`` count.
        sets: overrides, ``table.key=value``.
        usual: values by key, each with its place, that override only defaults and shipped profiles.

    Raises:
        ConfigError: unknown profile, unreadable file, unknown key, bad value, or values that contradict each other.
    """
    beneath = ((key, value, place) for key, (value, place) in (usual or {}).items())
    layers = chain(beneath, _profile_layer(profile), _environment_layer(environ), _override_layer(sets))
    return _merge(sorted(layers, key=lambda setting: not setting[2].startswith(_SHIPPED_SOURCE)))  # what ships is first


def load_settings(profile: str | Mapping[str, Any], sets: Mapping[str, Any]) -> Profile:
    """Load a profile that a program gives: the name of a shipped one, or settings by table, and overrides by key.

    No file that the caller names is read. Raises ``ConfigError`` as ``load``.
    """
    if isinstance(profile, str):
        layer = _shipped_layer(profile, "profile")
    else:
        layer = _document_layer(dict(profile), lambda key: "the settings")
    return _merge(chain(layer, _document_layer(dict(sets), lambda key: f"set {key}"))).profile


def read_overrides(sets: Sequence[str]) -> dict[str, object]:
    """The values of overrides, ``table.key=value``, by key; unchecked. Raises ``ConfigError``: unknown key."""
    return {key: value for key, value, _ in _override_layer(sets)}


def _merge(settings: Iterable[tuple[str, object, str]]) -> LoadedProfile:
    values: dict[str, object] = {}
    places: dict[str, str] = {}
    for key, value, place in settings:
        places.pop(key, None)  # reinsert, so that the map stays in order of precedence
        values[key], places[key] = value, place
    keys = [*_FIELDS, *(key for key in places if _PLUGIN_KEY.fullmatch(key))]
    sources = {key: places.get(key, DEFAULT_SOURCE).removeprefix(_VARIABLE) for key in keys}
    return LoadedProfile(_validate(values, places), sources)


# ------------------------------------------------------------------------------------------------------------- layers


def _profile_layer(profile: str) -> _Layer:
    if profile in (names := shipped()):
        yield from _shipped_layer(profile, "")
    elif profile.endswith(".toml") or "/" in profile or "\\" in profile:
        text, document = read_toml(Path(profile))
        lines = _key_lines(text)
        place_of = lambda key: f"{profile}:{lines.get(key, lines.get(key.partition('.')[0], 1))}"  # noqa: E731
        yield from _document_layer(document, place_of)
    else:
        remedy = _remedy(profile, names, "these ship") + "; a file of your own is given as a path, such as ./my.toml"
        raise ConfigError(f"no profile named {profile!r} ships with p2ptrain", remedy=remedy)


def _shipped_layer(base: object, place: str) -> _Layer:
    names = shipped()
    if not isinstance(base, str) or base not in names:
        text = f"{place}: base = {_shown(base)} is not a shipped profile"
        raise ConfigError(text, remedy=_remedy(str(base), names, "these ship"))
    yield from _document_layer(read_toml(names[base])[1], lambda key: f"{_SHIPPED_SOURCE}{base}")


def _document_layer(document: dict[str, Any], place_of: Callable[[str], str]) -> _Layer:
    if "base" in document:
        yield from _shipped_layer(document.pop("base"), place_of("base"))
    for key, value in flatten(document):
        _check_key(key, place_of(key))
        yield key, value, place_of(key)


def _environment_layer(environ: Mapping[str, str]) -> _Layer:
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _check_key(key, name, spell=lambda near: ENVIRONMENT_PREFIX + near.upper().replace(".", "__"))
            yield key, _parse_value(key, environ[name]), f"{_VARIABLE}{name}"


def _override_layer(sets: Sequence[str]) -> _Layer:
    for override in sets:
        key, equals, text = override.partition("=")
        key, place = key.strip(), f"--set {override}"
        if not equals:
            remedy = "write --set table.key=value, such as --set optimizer.lr=3e-3"
            raise ConfigError(f"{place}: no value", remedy=remedy)
        _check_key(key, place)
        yield key, _parse_value(key, text.strip()), place


def read_toml(path: Path, what: str = "profile") -> tuple[str, dict[str, Any]]:
    """The text of a file, and the TOML document that it is. ``what``: for messages. Raises ``ConfigError``."""
    remedy = "is this the right file?"
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_LIMIT_BYTES + 1)  # a pipe or a device has no size to check
        if len(content) > _FILE_LIMIT_BYTES:
            raise ConfigError(f"{path} is larger than a {what} may be ({_FILE_LIMIT_BYTES} bytes)", remedy=remedy)
        text = content.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", remedy=remedy) from None
    except OSError as error:
        ships = f", or name a profile that ships: {', '.join(shipped())}" if what == "profile" else ""
        text = f"cannot read the {what} {path}: {error.strerror or error}"
        raise ConfigError(text, remedy=f"check the path{ships}") from None
    return text, parse_toml(text, str(path))


def parse_toml(text: str, place: str) -> dict[str, Any]:
    """Parse TOML that may be hostile: a megabyte takes a few seconds. ``place``: its path or name, for messages. Raises
    ``ConfigError``: it is not TOML, it is nested too deeply, or a number has more than 64 bits."""
    problem = f"{place}: more than {_MOST_DEPTH} tables or lists are nested"
    if deep := _DEEP_KEY.search(text):
        line = text.count("\n", 0, deep.start()) + 1
        raise ConfigError(f"{place}:{line}: a key has more than {_MOST_DEPTH} parts", remedy=_SYNTAX)
    try:
        document = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{place}:{error.lineno}: not TOML: {error.msg}", remedy=_SYNTAX) from None
    except RecursionError:
        raise ConfigError(problem, remedy=_SYNTAX) from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{place}: not TOML: {error}", remedy=_SYNTAX) from None
    level: list[Any] = [document]
    for _ in range(_MOST_DEPTH):
        if any(isinstance(value, int) and not -(1 << 63) <= value < 1 << 63 for value in level):
            raise ConfigError(f"{place}: a number has more than 64 bits", remedy=_SYNTAX)
        inner = (
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        )
        level = list(chain.from_iterable(inner))
    if level:
        raise ConfigError(problem, remedy=_SYNTAX)
    return document


def flatten(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings by dotted key, whether they are below their tables or not."""
    for table, content in document.items():
        if isinstance(content, dict) and table in _TABLES:
            for name, value in content.items():
                if isinstance(value, dict) and table == "plugins":
                    yield from ((f"{table}.{name}.{key}", item) for key, item in value.items())
                else:
                    yield f"{table}.{name}", value
        else:
            yield table, content


def _key_lines(text: str) -> dict[str, int]:
    """Number of the first line, from 1, of each key or table in a TOML text. The parser keeps no positions. This scan
    handles tables, dotted keys and the first line of inline tables."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE_LINE.match(line):
            table = _bare(header[1])
            found.setdefault(table, number)
        elif key := _KEY_LINE.match(line):
            found.setdefault(f"{table}.{_bare(key[1])}" if table else _bare(key[1]), number)
    return found


def _bare(key: str) -> str:
    return re.sub(r"""[\s"']""", "", key)


def _parse_value(key: str, text: str) -> object:
    """Convert the text of a variable or override to its key's type; return the text if that fails."""
    kind = _FIELDS[key].annotation if key in _FIELDS else int
    if kind is bool or (key not in _FIELDS and text.lower() in ("true", "false")):
        return {"true": True, "false": False}.get(text.lower(), text)
    if get_origin(kind) is list:  # 2,3 or [2, 3]; q_proj,v_proj or ["q_proj", "v_proj"]
        parts = [
            part.strip().strip("\"'")
            for part in text.strip().removeprefix("[").removesuffix("]").split(",")
            if part.strip()
        ]
        return [int(part) if part.isascii() and part.isdigit() else part for part in parts]
    if kind not in (int, float):
        return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'" else text
    for convert in (int, float):  # both for an int key, too: the schema then reports the error
        with suppress(ValueError):
            return convert(text)
    return text


# -------------------------------------------------------------------------------------------------------------- checks


def _check_key(key: str, place: str, spell: Callable[[str], str] = str) -> None:
    """Raise ``ConfigError`` if the schema has no such key. ``spell`` formats a key in the layer's notation."""
    if key in _FIELDS or _PLUGIN_KEY.fullmatch(key):
        return
    key = shortened(key, 100)
    if key in _TABLES:
        example = next((name for name in _FIELDS if name.startswith(f"{key}.")), "plugins.NAME.package")
        raise ConfigError(f"{place}: {key} is a table", remedy=f"set one of its keys, such as {spell(example)}")
    table, _, name = key.partition(".")
    if not name and table in (inside := {field.partition(".")[2]: field for field in reversed(_FIELDS)}):
        raise ConfigError(f"{place}: unknown key {key}", remedy=f"it belongs to a table: {spell(inside[table])}")
    if table in _TABLES:
        candidates = {field.partition(".")[2]: field for field in _FIELDS if field.startswith(f"{table}.")}
        candidates = candidates or {"NAME.package": "plugins.NAME.package"}
        near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
        listed = f"[{table}] has " + ", ".join(candidates)
        remedy = f"did you mean {spell(candidates[near[0]])}? " + listed if near else listed
    else:
        near = difflib.get_close_matches(key, _FIELDS, n=1) or difflib.get_close_matches(table, _TABLES, n=1)
        listed = "the tables are " + ", ".join(_TABLES)
        remedy = f"did you mean {spell(near[0])}? " + listed if near else listed
    raise ConfigError(f"{place}: unknown key {key}", remedy=remedy)


def _validate(values: dict[str, object], places: dict[str, str]) -> Profile:
    document: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        table, _, name = key.partition(".")
        document.setdefault(table, {})[name] = value
    try:
        return Profile.model_validate(document)
    except ValidationError as error:
        details: Any = error.errors(include_url=False)[0]
    conflict = details.get("ctx", {}).get("error")
    if isinstance(conflict, Conflict):
        place = next((places[key] for key in reversed(places) if key in conflict.keys), "the profile")
        raise ConfigError(f"{place}: {conflict.problem}", remedy=conflict.remedy)
    key = ".".join(str(part) for part in details["loc"][:2])
    problem = f"{key} = {_shown(details['input'])} {complaint(details)}"
    description = "a plugin's setting is text, a number, true or false"
    if key in _FIELDS:
        description = " ".join((_FIELDS[key].description or "").split())
    raise ConfigError(f"{places[key]}: {problem}", remedy=f"{key}: {description}")


_COMPLAINTS = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "string_pattern_mismatch": "is not an allowed value",
}


def complaint(details: Mapping[str, Any]) -> str:
    """What is wrong with a value, in words that follow it. ``details``: of one of pydantic's errors."""
    message = re.sub("^(Input|String|List|Value error,) | after validation", "", str(details["msg"]))
    return _COMPLAINTS.get(details["type"], message.replace("should ", "must "))


def validated(kind: type[M], values: Mapping[str, Any], place: str, remedy: str = "") -> M:
    """A model of these values. Raises ``ConfigError``; ``remedy``: empty: the text of the field that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        details: Any = error.errors(include_url=False)[0]
    key = ".".join(str(part + 1) if isinstance(part, int) else part for part in details["loc"])
    field = kind.model_fields.get(key.partition(".")[0])
    about = f"known are {', '.join(kind.model_fields)}" if field is None else field.description or ""
    raise ConfigError(f"{place}: {key}: {complaint(details)}", remedy=remedy or " ".join(about.split()))


def _remedy(text: str, names: Mapping[str, object], listed: str) -> str:
    return f"{did_you_mean(text, names)}{listed}: {', '.join(names)}"


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
