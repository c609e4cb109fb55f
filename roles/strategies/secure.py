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

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2ptrain.compute.gradients import KEY_BYTES, keystream, to_fixed, to_float
from p2ptrain.core.errors import JobFailed, ProtocolError
from ring.session import RingSession
from roles.compute_thread import ComputeThread
from roles.engine import Engine
from roles.strategies.federated import LEAST_MASKED
from roles.strategies.interface import Bounds, Exchange, RingPiece


def pair_keys_untrusted(
    secret: X25519PrivateKey, public_keys: Sequence[bytes], rank: int, label: str
) -> dict[int, bytes]:
    """This member's key with each other rank. ``public_keys``: of all, in rank order. ``label``: of the view.

    Raises:
        ProtocolError: a public key is not valid.
    """
    keys = {}
    for other, public in enumerate(public_keys):
        if other != rank:
            shared = _shared_secret_untrusted(secret, public)
            pair = b"".join(sorted((public, public_keys[rank])))
            keys[other] = HKDF(SHA256(), KEY_BYTES, None, b"p2ptrain mask " + label.encode() + pair).derive(shared)
    return keys


def _shared_secret_untrusted(secret: X25519PrivateKey, public: bytes) -> bytes:
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


class MaskedSum(Exchange):
    """The members' contributions are summed in fixed point, each under its masks."""

    def __init__(self, engine: Engine, compute: ComputeThread) -> None:
        self._engine, self._compute = engine, compute
        # The contribution in fixed point, with masks; afterwards the sum.
        self._sealed = np.zeros(engine.reduce_buffer.size, np.int64)
        self._masks, self._members = Masks(0, {}), 1  # of the view
        self._step = -1
        self._fits = True
        self.scores = {}

    async def begin_view(self, ring: RingSession) -> None:
        if ring.size < LEAST_MASKED:
            text = f"federated.secure with {ring.size} workers would show each what the other contributes"
            raise JobFailed(text, remedy=f"start more, {LEAST_MASKED} at least: p2ptrain join")
        secret = X25519PrivateKey.from_private_bytes(ring.world.entropy(KEY_BYTES))
        own, check = secret.public_key().public_bytes_raw(), partial(_shared_secret_untrusted, secret)
        public_keys = await ring.all_gather(own, patience_s=ring.patience_s, check=check)
        label = f"{ring.view.job} {ring.view.generation} "
        keys = pair_keys_untrusted(secret, public_keys, ring.rank, label)
        ring.world.probe.event("masks-made", rank=ring.rank, keys=keys)
        self._masks = Masks(ring.rank, keys)
        self._members = ring.size

    def begin_step(self, step: int, count: int, bounds: Bounds) -> list[RingPiece]:
        self._step = step
        return [RingPiece(self._sealed[start:stop]) for start, stop in bounds]

    def complete(self) -> None:
        values, self._fits = to_fixed(self._engine.reduce_buffer, self._members)
        self._masks.add(values, self._step)
        self._sealed[:] = values  # only masked numbers are ever in memory from which the ring sends

    def prepare(self, start: int, stop: int) -> float:
        """Returns the norm of what is not masked; NaN also if it is too large for fixed point."""
        return self._engine.contributed_square_sum(start, stop) if self._fits else float("nan")

    async def finish(self) -> None:
        await self._compute.run(self._open_sum)

    def _open_sum(self) -> None:
        self._engine.reduce_buffer[:] = to_float(self._sealed)
