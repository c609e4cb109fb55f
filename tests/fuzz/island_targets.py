"""Islands: the commands that their leader sends to the other processes."""

from __future__ import annotations

import msgpack
from hypothesis import strategies as st

from p2ptrain.compute.island import COMMANDS, command_untrusted
from p2ptrain.core.errors import ProtocolError

from .engine import Target
from .strategies import TEXT, mutated

_VALUES = {int: 7, float: 0.5, str: "{}"}
_VALID = [msgpack.packb([name, *(_VALUES[kind] for kind in kinds)]) for name, kinds in COMMANDS.items()]


def _check(body: bytes) -> None:
    try:
        name, *arguments = command_untrusted(body)
    except ProtocolError:
        return
    assert tuple(map(type, arguments)) == COMMANDS[name]


TARGETS = (
    Target(
        "island-commands",
        mutated(st.sampled_from(_VALID))
        | st.lists(TEXT, max_size=5).map(msgpack.packb)
        | st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"\x91\xdb\xff\xff\xff\xff"]),
        _check,
        ("p2ptrain.compute.island.command_untrusted",),
        peak_bytes=1 << 20,
    ),
)
