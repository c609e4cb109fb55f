"""Generates ``docs/protocol.md`` from the message schema: ``python -m wire.protocol > docs/protocol.md``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from typing import Any

from wire import codec, frame, records
from wire.handshake import HANDSHAKE_TIMEOUT_S, PERMITTED
from wire.messages import BULK_KIND, PROTOCOL_VERSION, Message
from wire.schema import MAX_DEPTH, Bound, Record, list_alternatives

_NAMES = {int: "whole number", float: "number", str: "text", types.NoneType: "nothing"}

_HEAD = f"""# The protocol

Version {PROTOCOL_VERSION}. This page is made from the declarations in `wire/`; `python -m wire.protocol` writes it.

A frame is its length (4 bytes, big-endian; of all that follows), kind (1), flags (1, which is 0), length of the msgpack
part (2), generation (8), stream (4), then a msgpack map of a message's fields, or a raw payload (kind {BULK_KIND}) as
long as its receiver planned. Frames of an old generation are dropped. A view of {codec.COMPRESS_FROM_BYTES} bytes or
more travels as the byte c1 and its map, compressed by zlib.

| bound | |
|---|---|
| a frame before the handshake ended | {frame.HANDSHAKE_FRAME_BYTES} bytes, lists of {codec.MAX_HANDSHAKE_ITEMS} items |
| the handshake | {HANDSHAKE_TIMEOUT_S:g} s |
| a control frame | {frame.CONTROL_FRAME_BYTES} bytes, lists of {codec.MAX_LIST_ITEMS} items |
| a view's map | {codec.MAX_BODY_BYTES} bytes |
| a payload | {frame.MAX_BULK_BYTES} bytes |
| a free-form value | JSON's types, {MAX_DEPTH} levels |

A field that is missing, unknown, of another type or out of its bound ends the connection. In messages of the handshake
(kinds up to {frame.LAST_HANDSHAKE_KIND}) fields with a default may be missing, and unknown ones are ignored.

Over TLS the caller's certificate must name a role that permits its purpose:

| purpose | roles |
|---|---|
"""


def document() -> str:
    purposes = "".join(f"| `{purpose}` | {', '.join(sorted(roles))} |\n" for purpose, roles in PERMITTED.items())
    parts, described = [_HEAD + purposes], set[type]()
    for module in (*codec.MODULES, records):
        parts.append(f"\n## {module.__name__}\n\n{_markdown(inspect.cleandoc(module.__doc__ or ''))}\n")
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, Message | Record) and cls not in (Message, Record):
                new = [kind for kind in (cls, *_find_inner(cls)) if kind not in described]
                described.update(new)
                parts.extend(map(_section, new))
    return "".join(parts)


def _section(cls: Any) -> str:
    kind = f" (kind {cls.KIND})" if issubclass(cls, Message) else ""
    docs = [inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n") for base in cls.__mro__[:-1]]
    described = {
        name: text for _, _, attributes in reversed(docs) for name, text in _read_attributes(attributes).items()
    }
    text = f"\n### {cls.__name__}{kind}\n\n{_markdown(docs[0][0].rstrip())}\n"
    hints = typing.get_type_hints(cls, include_extras=True)
    rows = [
        f"| `{item.name}` | {_type(hints[item.name])}{_default(item)} | {described.get(item.name, '')} |\n"
        for item in dataclasses.fields(cls)
    ]
    return text + ("\n| field | type | |\n|---|---|---|\n" + "".join(rows) if rows else "")


def _read_attributes(attributes: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in re.split(r"\n    (?=\w)", f"\n{attributes.rstrip()}"):
        names, _, text = entry.partition(": ")
        found |= dict.fromkeys(names.strip().split(", "), _markdown(" ".join(text.split()).replace("|", "\\|")))
    return found


def _markdown(text: str) -> str:
    return text.replace("``", "`").replace("::\n", ":\n")


def _type(hint: Any) -> str:
    return " or ".join(
        _describe_alternative(alternative, bound) for alternative, bound in list_alternatives(hint)
    ).replace("|", "\\|")


def _describe_alternative(alternative: Any, bound: Bound | None) -> str:
    origin, args = typing.get_origin(alternative), typing.get_args(alternative)
    if alternative is Any:
        name = "free-form value"
    elif origin in (list, tuple):
        name = f"list of {' and '.join(_type(arg) for arg in args if arg is not Ellipsis)}"
    elif origin is dict:
        name = f"map of {_type(args[1])}"
    else:
        name = _NAMES.get(alternative, alternative.__name__)
    if bound is None:
        return name
    return f"{name} (`{bound.pattern}`)" if bound.pattern else f"{name} ({bound})"


def _default(item: dataclasses.Field[Any]) -> str:
    if item.default is not dataclasses.MISSING:
        return f", default `{item.default!r}`"
    return ", default empty" if item.default_factory is not dataclasses.MISSING else ""


def _find_inner(cls: Any) -> list[type]:
    found: list[type] = []
    hints = list(typing.get_type_hints(cls).values())
    while hints:
        hint = hints.pop()
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            found.append(hint)
        hints.extend(typing.get_args(hint))
    return found


if __name__ == "__main__":
    sys.stdout.write(document())
