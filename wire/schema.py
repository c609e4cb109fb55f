"""The message schema: compiles the annotations of a dataclass into a check of a peer's values.

A dataclass is the only declaration of a message, of a record in a message, or of a request's parameters. The type of a
field is its annotation; ``Annotated[int, Bound(0, 64)]`` adds a bound. ``instance_untrusted`` makes an instance from a
peer's value, or raises ``ProtocolError``. The dataclass's method ``check`` holds conditions on several fields. The fuzz
targets (``tests.fuzz``) and ``docs/protocol.md`` (``wire.protocol``) use the same declarations.
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

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.ids import ID_PATTERN

T = TypeVar("T")
Check = Callable[[Any], Any]

MAX_DEPTH = 8
"""Levels of lists and maps in a free-form value (``Any``)."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Restricts a field's values beyond its type.

    Attributes:
        least, most: of a number, which is then finite; or of the length of a text, bytes, a list or a map.
        pattern: regular expression that the whole text must match.
        one_of: the allowed values.
    """

    least: float = -math.inf
    most: float = math.inf
    pattern: str = ""
    one_of: tuple[Any, ...] = ()

    def check(self, value: Any, where: str) -> None:
        """Raise ``ProtocolError`` if ``value``, whose type is right, is out of bounds."""
        sized = isinstance(value, str | bytes | list | tuple | dict)
        if not self.least <= (len(value) if sized else value) <= self.most:  # false for NaN
            what = f"{len(value)} long" if sized else f"{value}"
            raise ProtocolError(f"{where} is {what}, expected {self}")
        if self.pattern and not re.fullmatch(self.pattern, value, re.ASCII):
            raise ProtocolError(f"{where} is {value[:40]!r}, which does not match {self.pattern}")
        if self.one_of and value not in self.one_of:
            raise ProtocolError(f"{where} is {str(value)[:40]!r}, expected one of {self}")

    def __str__(self) -> str:
        if self.one_of:
            return ", ".join(map(str, self.one_of))
        least, most = (f"{end:.0f}" if abs(end) < 1e6 else f"{end:.3g}" for end in (self.least, self.most))
        return " to ".join(end for end in (least, most) if "inf" not in end)


Count = Annotated[int, Bound(0, 2**53)]
"""Up to the largest integer that JSON readers hold exactly."""
Figure = Annotated[float, Bound(-(2**53), 2**53)]
Amount = Annotated[float, Bound(0, 2**53)]
Share = Annotated[float, Bound(0, 1)]
Port = Annotated[int, Bound(1, 65535)]
Host = Annotated[str, Bound(0, 255)]
Digest = Annotated[bytes, Bound(16, 16)]
Id = Annotated[str, Bound(pattern=ID_PATTERN)]
IdOrNone = Annotated[str, Bound(pattern=f"({ID_PATTERN})?")]
Token = Annotated[str, Bound(pattern=r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")]
"""Id of a part or of a model: a digest in hex, or a job's id."""
Lineage = Annotated[str, Bound(pattern="[0-9a-f]{32}")]
TokenOrNone = Annotated[str, Bound(pattern=r"[0-9A-Za-z._-]{0,128}")]


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Declared:
    """Base of all that is sent: each subclass becomes a frozen dataclass when it is declared."""

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
    result: T = _dataclass_check(cast(Any, cls), lenient)(source)
    return result


@cache
def _dataclass_check(cls: Any, lenient: bool) -> Check:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    checks = {item.name: check_of(hints[item.name], f"{cls.__name__}.{item.name}", lenient=lenient) for item in fields}
    optional = {
        item.name
        for item in fields
        if item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING
    }
    together = getattr(cls, "check", None)

    def check(source: dict[str, Any]) -> Any:
        if missing := checks.keys() - source.keys() - (optional if lenient else set()):
            raise ProtocolError(f"{cls.__name__} lacks {min(missing)!r}")
        if not lenient and (unknown := source.keys() - checks.keys()):
            raise ProtocolError(f"{cls.__name__} has an unknown field {min(unknown)[:40]!r}")
        item = cls(**{name: check_field(source[name]) for name, check_field in checks.items() if name in source})
        if together is not None:
            together(item)
        return item

    return check


def arms_of(hint: Any) -> list[tuple[Any, Bound | None]]:
    """The alternatives of an annotation, each with its bound."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return [arm for alternative in typing.get_args(hint) for arm in arms_of(alternative)]
    if typing.get_origin(hint) is Annotated:
        inner, *extras = typing.get_args(hint)
        bound = next((extra for extra in extras if isinstance(extra, Bound)), None)
        return [(arm, bound if arm is not types.NoneType else None) for arm, _ in arms_of(inner)]
    return [(hint, None)]


def check_of(hint: Any, where: str, *, lenient: bool = False) -> Check:
    """Compile the check of one value; ``where`` names it in errors."""
    if hint is Any:
        return lambda value: _json_like(value, where, MAX_DEPTH)
    arms: dict[type, Check] = {}
    for arm, bound in arms_of(hint):
        check = _bounded(_arm_check(arm, where, lenient), bound, where)
        if arm is float:  # encoders may write 1.0 as 1; an int arm of the same union takes precedence
            arms.setdefault(int, check)
        arms[dict if dataclasses.is_dataclass(arm) else typing.get_origin(arm) or arm] = check
    if tuple in arms:  # it travels as a list
        arms[list] = arms[tuple]

    def check_value(value: Any) -> Any:
        arm = arms.get(type(value))
        if arm is None:
            raise ProtocolError(f"{where} has type {type(value).__name__}")
        return arm(value)

    return check_value


def _bounded(check: Check, bound: Bound | None, where: str) -> Check:
    if bound is None:
        return check

    def check_bound(value: Any, bound: Bound = bound) -> Any:
        bound.check(value, where)
        return check(value)

    return check_bound


def _arm_check(arm: Any, where: str, lenient: bool) -> Check:
    if dataclasses.is_dataclass(arm):
        return _dataclass_check(cast(Any, arm), lenient)
    origin, args = typing.get_origin(arm), typing.get_args(arm)
    if origin in (list, tuple):
        item = check_of(args[0], where, lenient=lenient)
        return lambda value: origin(item(element) for element in value)
    if origin is dict:
        key, item = check_of(args[0], where), check_of(args[1], where, lenient=lenient)
        return lambda value: {key(name): item(element) for name, element in value.items()}
    assert arm in (int, float, str, bytes, bool, types.NoneType), f"{where}: no check for {arm}"
    return float if arm is float else lambda value: value


def _json_like(value: Any, where: str, depth: int) -> Any:
    if type(value) in (str, int, float, bool, types.NoneType):
        return value
    if depth == 0:
        raise ProtocolError(f"{where} is more than {MAX_DEPTH} levels deep")
    if type(value) is list:
        return [_json_like(element, where, depth - 1) for element in value]
    if type(value) is dict:
        return {key: _json_like(element, where, depth - 1) for key, element in value.items()}
    raise ProtocolError(f"{where} holds a {type(value).__name__}")
