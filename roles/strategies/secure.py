"""Secure aggregation (Bonawitz et al., CCS 2017): nobody sees what one member contributes, only the sum.

Each pair of members shares a key. In each step both make the same random integers of it; one adds them to what it
contributes, the other subtracts them. So one contribution, and a partial sum on its way round the ring, is a uniform
random number in every element, and in the sum of all members the masks cancel. Contributions are fixed-point numbers
(``compute.gradients``), so the sum is exact: integers modulo 2^64 do not round.

The paper recovers the masks of members that drop out from shares of their secrets. Here the transaction does without:
a drop-out aborts the step, and the next view makes new keys. A key pair lives as long as its view, and a view attempts
each step once. So no mask covers two contributions, also if a step is repeated with other ones.

Members send their public keys round the ring, so this protects from members and a seed that follow the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2ptrain.compute.gradients import to_fixed, to_float
from p2ptrain.compute.noise import KEY_BYTES, keystream
from p2ptrain.core.errors import JobFailed, ProtocolError
from ring.session import RingSession
from roles.strategies.federated import LEAST_MASKED
from roles.strategies.interface import ConnectPeers
from roles.strategies.sync import Piece, SyncStrategy


def pair_keys_untrusted(secret: X25519PrivateKey, told: Sequence[bytes], rank: int, label: str) -> dict[int, bytes]:
    """This member's key with each other rank. ``told``: the public keys of all, in rank order. ``label``: of the view.

    Raises:
        ProtocolError: a public key is not valid.
    """
    keys = {}
    for other, public in enumerate(told):
        if other != rank:
            shared = _shared_untrusted(secret, public)
            pair = b"".join(sorted((public, told[rank])))
            keys[other] = HKDF(SHA256(), KEY_BYTES, None, b"p2ptrain mask " + label.encode() + pair).derive(shared)
    return keys


def _shared_untrusted(secret: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return secret.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ProtocolError("an invalid key for masks") from error


class Masks:
    """The masks of one member in one view. ``keys``: ``pair_keys_untrusted``."""

    def __init__(self, rank: int, keys: dict[int, bytes]) -> None:
        self._rank, self._keys = rank, keys
        self._newest = -1

    def add(self, values: npt.NDArray[np.int64], step: int) -> None:
        """Mask ``values``, shape (numel,), in place, modulo 2^64. Steps ascend: each has its own masks, used once."""
        if step <= self._newest:
            raise RuntimeError(f"the masks of step {step} were used before")
        self._newest = step
        for other, key in self._keys.items():
            combine = np.add if self._rank < other else np.subtract
            for start, block in keystream(key, step, len(values)):
                part = values[start : start + len(block)]
                combine(part, block.view(np.int64), out=part)


class SecureStrategy(SyncStrategy):
    """The exchange of ``sync`` with masks. The module's docstring describes it."""

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        # The contribution in fixed point, with masks; afterwards the sum.
        self._sealed = np.zeros(self._engine.reduce_buffer.size, np.int64)
        self._masks, self._members = Masks(0, {}), 1  # of the view
        self._step = -1
        self._fits = True

    async def begin(self, session: RingSession, meet: ConnectPeers) -> None:
        if session.size < LEAST_MASKED:
            text = f"federated.secure with {session.size} workers would show each what the other contributes"
            raise JobFailed(text, remedy=f"start more, {LEAST_MASKED} at least: p2ptrain join")
        secret = X25519PrivateKey.from_private_bytes(session.entropy(KEY_BYTES))
        mine, check = secret.public_key().public_bytes_raw(), partial(_shared_untrusted, secret)
        told = await session.all_gather(mine, patience_s=session.patience_s, check=check)
        label = f"{session.view.job} {session.view.generation} "
        self._masks = Masks(session.rank, pair_keys_untrusted(secret, told, session.rank, label))
        self._members = session.size

    async def compute(self, step: int, first: int, count: int, session: RingSession, *, patience_s: float) -> None:
        self._step = step
        await super().compute(step, first, count, session, patience_s=patience_s)

    def _complete(self) -> None:
        values, self._fits = to_fixed(self._engine.reduce_buffer, self._members)
        self._masks.add(values, self._step)
        self._sealed[:] = values  # only masked numbers are ever in memory from which the ring sends

    def _contributed(self, start: int, stop: int) -> float:
        """Of what is not masked; also NaN if it is too large for fixed point."""
        return super()._contributed(start, stop) if self._fits else float("nan")

    async def _summed(self) -> None:
        await self._compute.run(self._open)

    def _open(self) -> None:
        self._engine.reduce_buffer[:] = to_float(self._sealed)

    def _pieces_of(self, bounds: Sequence[tuple[int, int]]) -> list[Piece]:
        return [Piece(self._sealed[start:stop]) for start, stop in bounds]
