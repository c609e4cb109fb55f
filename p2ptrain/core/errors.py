"""All expected errors, under one root, named by whose fault they are: the user (an argument, a file or a request is
invalid), the other peer, the network between two peers, a resource (too little memory or device), the storage (a file
or directory is damaged, missing or cannot be written), or the job itself (every member refused, loss not finite, ...).

Exceptions of other libraries (OSError, msgpack's, torch's) are translated once, where they appear. The command line
prints ``message`` and ``remedy`` and exits with ``exit_code``. It shows no traceback for these errors.
"""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=Exception)

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl+C: 128 + SIGINT, as in shells."""


class P2PTrainError(Exception):
    """Root of all expected failures.

    Args:
        message: what happened and where, one line, without a trailing full stop.
        remedy: what the person can do, one line; may be empty.

    Attributes:
        code, retry_after_s: as of ``Refused``, for programs that are told of the error.
    """

    exit_code: int = 1
    code: str = "failed"
    retry_after_s: int = 0

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        if remedy:
            self.add_note(remedy)  # a traceback in a notebook or a script ends with it

    @property
    def with_remedy(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


def first_error(group: BaseExceptionGroup[_Error]) -> _Error:
    """The error of a task group to show: the first, which caused the others."""
    error: _Error | BaseExceptionGroup[_Error] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class UserError(P2PTrainError):
    exit_code = 2


class ConfigError(UserError):
    """A profile, a setting or an override is wrong. The message names the key."""


class TooLong(UserError):
    """A text and its continuation exceed the model's context."""


class PeerError(P2PTrainError):
    exit_code = 4


class ProtocolError(PeerError):
    """A peer sent bytes that no correct peer sends. Its connection is closed.

    This is the only exception that a parser of a peer's bytes may raise.
    """


class Refused(PeerError):
    """The other peer refused a request.

    Args:
        code: a stable code for programs, such as ``"version-mismatch"`` (see ``wire.messages.RefusalCode``). Some codes
            say that the request, the network or the memory is at fault, and not the peer.
        retry_after_s: time after which another attempt may succeed; 0: unknown.
    """

    def __init__(self, code: str, message: str, *, remedy: str = "", retry_after_s: int = 0) -> None:
        super().__init__(message, remedy=remedy)
        self.code, self.retry_after_s = code, retry_after_s
        self.exit_code = _FAULTS.get(code, PeerError).exit_code


class NetworkError(P2PTrainError):
    exit_code = 3


class Unreachable(NetworkError):
    """Nothing answered at an address."""


class ConnectionLost(NetworkError):
    """An established connection ended unexpectedly."""


class DeadlineExceeded(NetworkError):
    """A peer was silent for too long."""


class Stalled(DeadlineExceeded):
    """A peer lives, but sent nothing of what it owes, or took nothing."""


class NeighbourAway(DeadlineExceeded):
    """The member ``peer_id`` was not reached in time, or the view cannot go on with it. ``cause``: see ``Report``."""

    def __init__(self, message: str, *, peer_id: str, remedy: str = "", cause: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.peer_id, self.cause = peer_id, cause


class ResourceError(P2PTrainError):
    exit_code = 6


class StorageError(P2PTrainError):
    exit_code = 6


class DiskFull(StorageError):
    """The disk has no room, or the user's quota is used up."""


class JobFailed(P2PTrainError):
    exit_code = 5


_FAULTS: dict[str, type[P2PTrainError]] = {
    **dict.fromkeys(
        ("ambiguous", "bad-parameter", "bad-setting", "bad-shape", "bad-spec", "unchanged", "wrong-state"), UserError
    ),
    **dict.fromkeys(("unknown-checkpoint", "unknown-job", "unknown-peer", "unknown-ticket"), UserError),
    "unreachable": NetworkError,
    "does-not-fit": ResourceError,
}
"""Code of a refusal → the error whose exit code it has, if that is not the other peer's fault."""
