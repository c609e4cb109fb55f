"""Encodes messages to msgpack maps, and decodes and checks them (``wire.schema``).

``decode_untrusted`` returns a message whose every field has the annotated type and is within the annotated bounds, or
raises ``ProtocolError``.

A long map of a ``LONG`` message travels compressed (zlib): most of a view of 1,000 members repeats itself. It begins
with a byte with which no msgpack value begins. Such a message goes to many at once, so it is encoded once.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from functools import cache
from typing import Any, TypeVar

import msgpack

from p2ptrain.core.errors import ProtocolError
from wire import chain_messages, http_messages, job_messages, messages, text_messages
from wire.frame import CONTROL_FRAME_BYTES, LAST_HANDSHAKE_KIND
from wire.messages import PROTOCOL_VERSION, Hello, Message, Welcome
from wire.schema import instance_untrusted

MAX_LIST_ITEMS = 4096
MAX_MAP_ITEMS = 4096
MAX_CONTAINERS = 1 << 16
"""Lists and maps in a body: an empty one takes a byte, and 64 bytes of memory."""
MAX_HANDSHAKE_ITEMS = 64
"""Both limits for handshake messages: nested lists cost memory before they prove to be shorter than claimed."""

_Container = TypeVar("_Container")

COMPRESSED = b"\xc1"
COMPRESS_FROM_BYTES = 16 << 10
"""Shorter bodies are not compressed."""
MAX_BODY_BYTES = 256 << 10
"""Longest body of a control frame after it was decompressed."""

MODULES = (messages, job_messages, chain_messages, text_messages, http_messages)
MESSAGE_TYPES: dict[int, type[Message]] = {
    item.KIND: item
    for module in MODULES
    for item in vars(module).values()
    if isinstance(item, type) and issubclass(item, Message) and item is not Message
}
"""Frame kind → class, for every message."""


def encode(message: Message) -> bytes:
    """Encode the body of ``message``'s control frame. It is decoded once, so that no invalid message is sent.

    Raises ``ValueError`` or ``TypeError`` if a field violates its annotated type or bound, or the body is too long.
    """
    global _newest
    if message is _newest[0]:
        return _newest[1]
    body = _encode(message)
    if message.LONG and len(body) >= COMPRESS_FROM_BYTES:
        body = COMPRESSED + zlib.compress(body, 1)
        _newest = message, body
    return body


_newest: tuple[Message | None, bytes] = None, b""
"""The long message that was encoded last."""


def _encode(message: Message) -> bytes:
    body: bytes = msgpack.packb(_fields_of(message), use_bin_type=True, default=_fields_of)
    try:
        if len(body) > MAX_BODY_BYTES:
            raise ProtocolError(f"a body of {len(body)} bytes, {MAX_BODY_BYTES} are allowed")
        decode_untrusted(message.KIND, body)
    except ProtocolError as error:
        raise ValueError(f"cannot be sent: {error.message}") from error
    return body


def _fields_of(item: Any) -> dict[str, Any]:
    """Convert to a map without the deep copies of ``dataclasses.asdict``: ten times as fast."""
    cls: Any = type(item)
    return {name: getattr(item, name) for name in _names_of(cls)}


@cache
def _names_of(cls: Any) -> tuple[str, ...]:
    return tuple(item.name for item in dataclasses.fields(cls))


def decode_untrusted(kind: int, body: bytes | bytearray | memoryview) -> Message:
    """Decode the body of a control frame. Raises ``ProtocolError`` unless it is exactly one message of this kind.

    Of a ``Hello`` or ``Welcome`` of another protocol version only ``version`` and ``software`` are decoded; the other
    fields are empty. The handshake refuses it and can say why. Handshake messages may have unknown fields.
    """
    cls = MESSAGE_TYPES.get(kind)
    if cls is None:
        raise ProtocolError(f"a message of unknown kind {kind}")
    if cls.LONG and body[:1] == COMPRESSED:
        body = _decompressed_untrusted(body)
    source = unpack_untrusted(body, handshake=kind <= LAST_HANDSHAKE_KIND)
    if cls in (Hello, Welcome) and isinstance(source, dict):
        version = source.get("version")
        if type(version) is int and version != PROTOCOL_VERSION:
            return _foreign(cls, version, source.get("software"))
    return instance_untrusted(cls, source, lenient=kind <= LAST_HANDSHAKE_KIND)


def _decompressed_untrusted(body: bytes | bytearray | memoryview) -> bytes:
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(body[1:], MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise ProtocolError(f"a body that cannot be decompressed: {error}") from error
    if len(plain) > MAX_BODY_BYTES or not inflater.eof or inflater.unused_data:
        raise ProtocolError(f"a compressed body that is not one stream of at most {MAX_BODY_BYTES} bytes")
    return plain


def unpack_untrusted(
    body: bytes | bytearray | memoryview, *, handshake: bool = False, most_bytes: int = CONTROL_FRAME_BYTES
) -> object:
    """Decode msgpack. ``most_bytes``: of a text. Raises ``ProtocolError``."""
    limit, numbers = MAX_HANDSHAKE_ITEMS if handshake else None, itertools.count(1)

    def counted(container: _Container) -> _Container:
        if next(numbers) > MAX_CONTAINERS:
            raise ProtocolError(f"more than {MAX_CONTAINERS} lists and maps")
        return container

    try:
        return msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=lambda pairs: _strict_map(counted(pairs)),
            list_hook=counted,
            max_str_len=most_bytes,
            max_bin_len=most_bytes,
            max_array_len=limit or MAX_LIST_ITEMS,
            max_map_len=limit or MAX_MAP_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:  # StackError and FormatError are both
        raise ProtocolError(f"not a msgpack map: {error or type(error).__name__}") from error


def _strict_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ProtocolError("a map has a key twice")
    if not all(type(key) is str for key in result):
        raise ProtocolError("a map has a key that is not text")
    return result


def _foreign(cls: type[Message], version: int, software: object) -> Message:
    text = software if isinstance(software, str) else "an unknown release"
    if cls is Hello:
        return Hello(version, text, "", "", [], "")
    return Welcome(version, text, "", "", 0.0)
