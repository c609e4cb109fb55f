"""Every error a person can meet, under one root, named by whose fault it is.

    P2PTrainError
    ├── UserError          you: an argument, a file, a state that was asked for and cannot be
    │   ├── ConfigError      a profile: carries the file, the key, and what would be right
    │   └── TooLong          a text and what is to follow it have no room in the model's context
    ├── PeerError          the other side
    │   ├── ProtocolError    it sent bytes that no correct peer sends
    │   └── Refused          it said no, with a typed reason and a remedy
    ├── NetworkError       the wire between
    │   ├── Unreachable      nothing answered
    │   ├── ConnectionLost   an established connection ended
    │   └── DeadlineExceeded the peer was silent for longer than it may be
    │       └── NeighbourAway    the next one in the ring was not reached in time
    ├── ResourceError      memory, disk space, a device
    ├── StorageError       a file or directory is damaged or cannot be written
    └── JobFailed          the work itself ended badly (every member refused, loss not finite, ...)

Foreign exceptions (OSError, msgpack's, torch's) are translated once, at the edge where they appear. The command line
prints ``message`` and ``remedy`` and leaves with ``exit_code``; it never shows a traceback for these.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_INTERRUPTED = 130
"""Of a command that Ctrl+C ended: 128 + SIGINT, as shells count."""


class P2PTrainError(Exception):
    """Root of all expected failures.

    Args:
        message: what happened and where, one line, without a trailing full stop.
        remedy: what the person can do about it, one line; empty when there is nothing to say.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


def first_error(group: BaseExceptionGroup[P2PTrainError]) -> P2PTrainError:
    """The one to show of a task group's errors: the first, which made the others."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, P2PTrainError)
    return error


class UserError(P2PTrainError):
    """The person asked for something that cannot be."""

    exit_code = 2


class ConfigError(UserError):
    """A profile, a setting or an override is wrong."""


class TooLong(UserError):
    """The text, with what is to be written behind it, is longer than the model's context."""


class PeerError(P2PTrainError):
    """The other side is at fault."""

    exit_code = 4


class ProtocolError(PeerError):
    """Bytes that no correct peer sends. The connection that carried them is closed.

    This is the only exception that a parser of peer bytes may raise.
    """


class Refused(PeerError):
    """The other side said no.

    Args:
        code: a stable word for programs, such as ``"version-mismatch"`` (see ``wire.handshake.RefusalCode``).
    """

    def __init__(self, code: str, message: str, *, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


class NetworkError(P2PTrainError):
    """The wire between two peers is at fault."""

    exit_code = 3


class Unreachable(NetworkError):
    """Nothing answered at an address."""


class ConnectionLost(NetworkError):
    """An established connection ended before its time."""


class DeadlineExceeded(NetworkError):
    """A peer was silent for longer than it may be."""


class NeighbourAway(DeadlineExceeded):
    """The next member of the ring was not reached in time.

    Args:
        peer_id: which one.
    """

    def __init__(self, message: str, *, peer_id: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.peer_id = peer_id


class ResourceError(P2PTrainError):
    """Too little memory, disk space or device."""

    exit_code = 6


class StorageError(P2PTrainError):
    """A file or a directory is damaged, missing or cannot be written."""

    exit_code = 6


class JobFailed(P2PTrainError):
    """The job ended badly."""

    exit_code = 5
