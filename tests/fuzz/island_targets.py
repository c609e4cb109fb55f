"""Islands: the commands that their leader sends to the other processes."""

from __future__ import annotations

import msgpack
from hypothesis import strategies as st

from p2ptrain.compute.island import COMMANDS, command_untrusted

from .engine import Target
from .strategies import TEXT, mutated

WRONG = st.none() | st.booleans() | TEXT | st.binary(max_size=8) | st.floats() | st.integers(-(2**63), 2**63)

_VALUES = {int: 7, float: 0.5, str: "{}"}
_VALID = [msgpack.packb([name, *(_VALUES[kind] for kind in kinds)]) for name, kinds in COMMANDS.items()]


def _check(body: bytes) -> None:
    name, *arguments = command_untrusted(body)
    assert tuple(map(type, arguments)) == COMMANDS[name]


TARGETS = (
    Target(
        "island-commands",
        mutated(st.sampled_from(_VALID))
        | st.tuples(st.sampled_from(sorted(COMMANDS)), st.lists(WRONG, max_size=4)).map(
            lambda it: msgpack.packb([it[0], *it[1]])
        )
        | st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"\x91\xdb\xff\xff\xff\xff"]),
        _check,
        ("p2ptrain.compute.island.command_untrusted",),
        peak_bytes=1 << 20,
    ),
)
