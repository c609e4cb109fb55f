"""Bytes, texts and values as a broken or hostile peer makes them: valid ones, changed in a few places."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
from hypothesis import strategies as st

from p2ptrain.core.serving import Sampling
from wire.codec import MAX_HANDSHAKE_ITEMS, MAX_LIST_ITEMS, MAX_MAP_ITEMS
from wire.schema import Bound, list_alternatives

WHOLE = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0, 1, -1, 65535, 65536, 2**31, 2**53, 2**63, 2**64 - 1])
REAL = st.floats() | st.sampled_from([0.0, 1.0, -0.0, 1e308, 5e-324])
TEXT = st.text(max_size=20) | st.sampled_from(["", "\x00", "a", "x" * 300, "\u202e", "0" * 32, "f" * 32])
ANY_TEXT = st.text(st.characters(), max_size=40)  # lone surrogates, too: an argument of the command line may hold them
SCALAR = st.none() | st.booleans() | WHOLE | REAL | TEXT
FREE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=8
)
"""Any value that JSON has."""
PACKABLE = st.recursive(
    SCALAR | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | st.binary(max_size=4), inner, max_size=4),
    max_leaves=8,
)
"""Any value that msgpack has: keys may be bytes."""

_INTERESTING = (0x00, 0x01, 0x7F, 0x80, 0xFF, 0x30, 0x86, 0xC1, 0xDD, 0xDF)


@st.composite
def mutated(draw: st.DrawFn, valid: st.SearchStrategy[bytes], *, most: int = 4) -> bytes:
    """Valid bytes after up to ``most`` changes: flipped, set, cut, extended, repeated, spliced, lengths made huge."""
    data = bytearray(draw(valid))
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 7)):
            case 0 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1 if at < len(data):
                data[at] = draw(st.sampled_from(_INTERESTING))
            case 2:
                del data[at:]
            case 3:
                data[at:at] = draw(st.binary(max_size=16))
            case 4:
                del data[at : at + draw(st.integers(1, 8))]
            case 5:
                stop = draw(st.integers(at, len(data)))
                data[stop:stop] = data[at:stop]
            case 6:
                data[at:] = draw(valid)[at:]
            case 7:
                width = draw(st.sampled_from([1, 2, 4, 8]))
                huge = draw(st.sampled_from([0, 1, 1 << (8 * width - 1), (1 << 8 * width) - 1]))
                data[at : at + width] = huge.to_bytes(width, "big")
    return bytes(data)


@st.composite
def mutated_text(draw: st.DrawFn, valid: Sequence[str], pieces: Sequence[str]) -> str:
    """A valid text with some of it cut, replaced or doubled."""
    text = draw(st.sampled_from(valid))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        stop = min(len(text), at + draw(st.integers(0, 6)))
        text = text[:at] + draw(st.sampled_from(pieces) | ANY_TEXT) + text[stop:]
    return text


@st.composite
def chunked(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes as a network delivers them: cut anywhere."""
    whole = draw(data)
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(whole) - 1)), max_size=6)))
    return [whole[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


# -------------------------------------------------------------------------------------------------- from annotations

_BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: WHOLE,
    float: REAL,
    str: TEXT,
    bool: st.booleans(),
    bytes: st.binary(max_size=64),
    types.NoneType: st.none(),
    Any: FREE,
    Sampling: st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 1.0]),
        top_k=st.integers(0, 5),
        top_p=st.sampled_from([1.0, 0.9]),
        seed=st.integers(0, 9),
        min_p=st.sampled_from([0.0, 0.1]),
        repetition_penalty=st.sampled_from([1.0, 1.2]),
        presence_penalty=st.just(0.0),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        logit_bias=st.lists(st.tuples(st.integers(0, 9), st.just(1.0)), max_size=1).map(tuple),
    ),
}


def of(hint: Any, *, valid: bool = False) -> st.SearchStrategy[Any]:
    """Values of an annotation; where it has a bound nearly always within it, and always where ``valid``."""
    return st.one_of([_of_alternative(alternative, bound, valid) for alternative, bound in list_alternatives(hint)])


def _of_alternative(alternative: Any, bound: Bound | None, valid: bool) -> st.SearchStrategy[Any]:
    if alternative in _BY_TYPE:
        if bound is None:
            return _BY_TYPE[alternative]
        return _within(alternative, bound) if valid else mostly(_within(alternative, bound), _BY_TYPE[alternative])
    if dataclasses.is_dataclass(alternative):
        return made(alternative, valid=valid)
    origin, args = typing.get_origin(alternative), typing.get_args(alternative)
    if origin is tuple and args[-1] is not Ellipsis:
        return st.tuples(*(of(item, valid=valid) for item in args))
    if origin is tuple:
        return _of_alternative(list[args[0]], bound, valid).map(tuple)  # type: ignore[valid-type]
    items = [of(item, valid=valid) for item in args]
    make: Any = st.lists if origin is list else st.dictionaries
    few = make(*items, max_size=3)
    return (
        few
        if valid or bound is None or math.isinf(bound.most)
        else mostly(few, make(*items, max_size=int(bound.most) + 1))
    )


def _within(alternative: Any, bound: Bound) -> st.SearchStrategy[Any]:
    if bound.pattern:
        return st.from_regex(re.compile(bound.pattern, re.ASCII), fullmatch=True)
    least, most = max(bound.least, -(2.0**53)), min(bound.most, 2.0**53)
    if alternative is int:
        return st.integers(int(least), min(int(most), int(least) + 9)) | st.integers(int(least), int(most))
    if alternative is float:
        return st.floats(least, most)
    text = st.text if alternative is str else st.binary
    return text(min_size=int(max(least, 0)), max_size=int(min(most, max(least, 0) + 20)))


def made(kind: Any, *, valid: bool = False, **likely: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Instances of a dataclass; ``likely`` are values for some fields, which are drawn nearly always, as bounds are
    kept; always where ``valid``."""
    known = typing.get_type_hints(kind, include_extras=True)
    hints = {item.name: known[item.name] for item in dataclasses.fields(kind)}
    values = {name: of(hint, valid=valid) for name, hint in hints.items()}
    values |= {name: value if valid else mostly(value, values[name]) for name, value in likely.items()}
    return st.builds(kind, **values)


def mostly(likely: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Eleven of twelve times ``likely``: where all of many must fit, each one must nearly always."""
    return st.integers(0, 11).flatmap(lambda dice: likely if dice else odd)


def conforms(value: Any, hint: Any) -> bool:
    """Whether a value has its annotation's type and bound, all the way down. Written apart from what it judges."""
    if hint is Any:
        return conforms(value, list[Any] | dict[str, Any] | str | int | float | bool | None)
    return any(
        _conforms(value, alternative) and _is_within(value, bound) for alternative, bound in list_alternatives(hint)
    )


def _is_within(value: Any, bound: Bound | None) -> bool:
    if bound is None:
        return True
    if bound.pattern:
        return re.fullmatch(bound.pattern, value) is not None
    number = value if isinstance(value, int | float) else len(value)
    return math.isfinite(number) and bound.least <= number <= bound.most


def _conforms(value: Any, alternative: Any) -> bool:
    if dataclasses.is_dataclass(alternative):
        assert isinstance(alternative, type)
        hints = typing.get_type_hints(alternative, include_extras=True)
        fields = dataclasses.fields(alternative)
        return type(value) is alternative and all(
            conforms(getattr(value, item.name), hints[item.name]) for item in fields
        )
    origin, args = typing.get_origin(alternative), typing.get_args(alternative)
    if origin is tuple and args[-1] is not Ellipsis:
        return type(value) is tuple and all(map(conforms, value, args))
    if origin in (list, tuple):
        return type(value) is origin and all(conforms(each, args[0]) for each in value)
    if origin is dict:
        return type(value) is dict and all(
            conforms(key, args[0]) and conforms(each, args[1]) for key, each in value.items()
        )
    return type(value) is alternative


# ----------------------------------------------------------------------------------------------------------- msgpack


@st.composite
def packed(draw: st.DrawFn, value: st.SearchStrategy[Any], odd: st.SearchStrategy[Any] = PACKABLE) -> bytes:
    """A map as msgpack, some of it replaced, missing, added, or then changed byte by byte."""
    fields = dict(draw(value))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(fields)) if fields else TEXT)
        match draw(st.integers(0, 3)):
            case 0:
                fields.pop(name, None)
            case 1:
                fields[name] = draw(odd)
            case 2:
                fields[draw(TEXT)] = draw(odd)
            case 3 if maps := [value for value in fields.values() if isinstance(value, dict)]:
                draw(st.sampled_from(maps))[draw(st.binary(max_size=4) | TEXT)] = draw(SCALAR)
    body: bytes = msgpack.packb(fields)
    return draw(mutated(st.just(body), most=2))


@st.composite
def nested(draw: st.DrawFn, most_bytes: int) -> bytes:
    """Lists and maps, one in the other, each claiming as many items as it may: the dearest bytes to unpack."""
    limits = (MAX_LIST_ITEMS, MAX_MAP_ITEMS, MAX_HANDSHAKE_ITEMS)
    count = draw(st.sampled_from([limit + more for limit in limits for more in (-1, 0, 1)]))
    make: Callable[[int], bytes] = draw(st.sampled_from([_list_head, _map_head]))
    head = make(count)
    return (head * (most_bytes // len(head)))[: draw(st.sampled_from([most_bytes, 3 * 1024, 100]))]


def _list_head(count: int) -> bytes:
    return b"\xdc" + count.to_bytes(2, "big")


def _map_head(count: int) -> bytes:
    return b"\xde" + count.to_bytes(2, "big") + b"\xa1a"
