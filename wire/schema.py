"""The message schema: compiles a dataclass's annotations into a converter from a peer's map to an instance.

A dataclass is the only declaration of a message, of a record in a message, or of a request's parameters. The type of a
field is its annotation; ``Annotated[int, Bound(0, 64)]`` adds a bound. If the dataclass has a method ``check``, it
tests conditions on several fields. ``instance_untrusted`` converts, or raises ``ProtocolError``; no converter raises
anything else. The fuzz targets (``tests.fuzz``) and ``docs/protocol.md`` (``wire.protocol``) use the declarations, too.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

from p2ptrain.core.errors import ProtocolError, UserError
from p2ptrain.core.ids import ID_PATTERN

T = TypeVar("T")
Converter = Callable[[Any], Any]
"""Returns a peer's value as the declared type. Raises ``ProtocolError`` if it has another type or is out of bounds."""

MAX_DEPTH = 8
"""Levels of lists and maps in a free-form value (``Any``)."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Restricts a field's values beyond its type.

    Attributes:
        least, most: of a number, which is then finite; or of the length of a text, bytes, a list or a map.
        pattern: regular expression that the whole text must match.
    """

    least: float = -math.inf
    most: float = math.inf
    pattern: str = ""

    def check(self, value: Any, where: str) -> None:
        """Raise ``ProtocolError`` if ``value``, whose type is right, is out of bounds."""
        sized = isinstance(value, str | bytes | list | tuple | dict)
        if not self.least <= (len(value) if sized else value) <= self.most:  # false for NaN
            what = f"{len(value)} long" if sized else f"{value}"
            raise ProtocolError(f"{where} is {what}, expected {self}")
        if self.pattern and not re.fullmatch(self.pattern, value, re.ASCII):
            raise ProtocolError(f"{where} is {value[:40]!r}, which does not match {self.pattern}")

    def __str__(self) -> str:
        least, most = (f"{end:.0f}" if abs(end) < 1e6 else f"{end:.3g}" for end in (self.least, self.most))
        return " to ".join(end for end in (least, most) if "inf" not in end)


# 2**53: the largest integer up to which JSON readers hold all integers exactly.
Count = Annotated[int, Bound(0, 2**53)]
Figure = Annotated[float, Bound(-(2**53), 2**53)]
Amount = Annotated[float, Bound(0, 2**53)]
Share = Annotated[float, Bound(0, 1)]
Port = Annotated[int, Bound(1, 65535)]
Host = Annotated[str, Bound(0, 255)]
Digest = Annotated[bytes, Bound(16, 16)]
Id = Annotated[str, Bound(pattern=ID_PATTERN)]
IdOrNone = Annotated[str, Bound(pattern=f"({ID_PATTERN})?")]
ContentId = Annotated[str, Bound(pattern=r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")]
"""Id of a model, a part of one or its tokenizer: a digest in hex, or a job's id."""
ContentIdOrNone = Annotated[str, Bound(pattern=r"[0-9A-Za-z._-]{0,128}")]
Lineage = Annotated[str, Bound(pattern="[0-9a-f]{32}")]


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Declared:
    """Base of all that is sent, and of the events and instructions of cores: each subclass becomes a frozen dataclass
    when it is declared."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        dataclass(frozen=True, kw_only=kw_only)(cls)


class Record(Declared):
    """Base of what travels as maps in requests, answers and updates."""

    def to_map(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_map_untrusted(cls, source: object) -> Self:
        """Make the record from a peer's map. Raises ``ProtocolError``.

        Unknown keys are ignored, so that an older viewer can watch a newer seed.
        """
        return instance_untrusted(cls, source, lenient=True)


def instance_untrusted(cls: type[T], source: object, *, lenient: bool = False) -> T:
    """Make an instance of dataclass ``cls`` from a map that a peer sent. Raises ``ProtocolError`` if it is invalid.

    If ``lenient``, defaults replace missing fields and unknown keys are ignored.
    """
    if not isinstance(source, dict):
        raise ProtocolError(f"{cls.__name__} is not a map")
    result: T = _compile_dataclass(cast(Any, cls), lenient)(source)
    return result


@cache
def _compile_dataclass(cls: Any, lenient: bool) -> Converter:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    converters = {
        item.name: compile_converter(hints[item.name], f"{cls.__name__}.{item.name}", lenient=lenient)
        for item in fields
    }
    optional = {
        item.name
        for item in fields
        if item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING
    }
    check_instance = getattr(cls, "check", None)

    def convert(source: dict[str, Any]) -> Any:
        if missing := converters.keys() - source.keys() - (optional if lenient else set()):
            raise ProtocolError(f"{cls.__name__} lacks {min(missing)!r}")
        if not lenient and (unknown := source.keys() - converters.keys()):
            raise ProtocolError(f"{cls.__name__} has an unknown field {min(unknown)[:40]!r}")
        values = {name: to_field(source[name]) for name, to_field in converters.items() if name in source}
        try:
            instance = cls(**values)
        except UserError as error:  # of a type that also people make
            raise ProtocolError(f"{cls.__name__}: {error.message}") from error
        if check_instance is not None:
            check_instance(instance)
        return instance

    return convert


def list_alternatives(hint: Any) -> list[tuple[Any, Bound | None]]:
    """Return each type that an annotation allows, with its bound: ``int`` and ``str`` of ``int | str``."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return [pair for member in typing.get_args(hint) for pair in list_alternatives(member)]
    if typing.get_origin(hint) is Annotated:
        inner, *extras = typing.get_args(hint)
        bound = next((extra for extra in extras if isinstance(extra, Bound)), None)
        return [
            (alternative, bound if alternative is not types.NoneType else None)
            for alternative, _ in list_alternatives(inner)
        ]
    return [(hint, None)]


def compile_converter(hint: Any, where: str, *, lenient: bool = False) -> Converter:
    """Compile the converter of a value with annotation ``hint``; ``where`` names the value in errors."""
    if hint is Any:
        return lambda value: _check_free_form(value, where, MAX_DEPTH)
    by_type: dict[type, Converter] = {}  # keys: types as msgpack and JSON decode them
    for alternative, bound in list_alternatives(hint):
        converter = _add_bound(_compile_alternative(alternative, where, lenient), bound, where)
        if alternative is float:  # encoders may write 1.0 as 1; an int alternative takes precedence
            by_type.setdefault(int, converter)
        received_type = dict if dataclasses.is_dataclass(alternative) else typing.get_origin(alternative) or alternative
        by_type[received_type] = converter
    if tuple in by_type:  # it travels as a list
        by_type[list] = by_type[tuple]

    def convert(value: Any) -> Any:
        converter = by_type.get(type(value))
        if converter is None:
            raise ProtocolError(f"{where} has type {type(value).__name__}")
        return converter(value)

    return convert


def _add_bound(converter: Converter, bound: Bound | None, where: str) -> Converter:
    if bound is None:
        return converter

    def convert(value: Any, bound: Bound = bound) -> Any:
        bound.check(value, where)
        return converter(value)

    return convert


def _compile_alternative(alternative: Any, where: str, lenient: bool) -> Converter:
    if dataclasses.is_dataclass(alternative):
        return _compile_dataclass(cast(Any, alternative), lenient)
    origin, args = typing.get_origin(alternative), typing.get_args(alternative)
    if origin is tuple and args[-1] is not Ellipsis:
        to_each = [compile_converter(arg, where, lenient=lenient) for arg in args]

        def convert(value: Any) -> Any:
            if len(value) != len(to_each):
                raise ProtocolError(f"{where} has {len(value)} items, expected {len(to_each)}")
            return tuple(to_item(item) for to_item, item in zip(to_each, value, strict=True))

        return convert
    if origin in (list, tuple):
        to_element = compile_converter(args[0], where, lenient=lenient)
        return lambda value: origin(to_element(element) for element in value)
    if origin is dict:
        to_key, to_value = compile_converter(args[0], where), compile_converter(args[1], where, lenient=lenient)
        return lambda value: {to_key(key): to_value(element) for key, element in value.items()}
    assert alternative in (int, float, str, bytes, bool, types.NoneType), f"{where}: no converter for {alternative}"
    return float if alternative is float else lambda value: value


def _check_free_form(value: Any, where: str, depth: int) -> Any:
    if type(value) in (str, int, float, bool, types.NoneType):
        return value
    if depth == 0:
        raise ProtocolError(f"{where} is more than {MAX_DEPTH} levels deep")
    if type(value) is list:
        return [_check_free_form(element, where, depth - 1) for element in value]
    if type(value) is dict:
        return {key: _check_free_form(element, where, depth - 1) for key, element in value.items()}
    raise ProtocolError(f"{where} holds a {type(value).__name__}")
