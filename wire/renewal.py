"""Certificates of a day, renewed at half their life: early enough for a machine that was off, or whose clock is."""

from __future__ import annotations

import asyncio

from p2ptrain.core.disk import Disk
from p2ptrain.core.world import Clock, Network
from wire.credentials import CERTIFICATE_LIFETIME_S, Credentials
from wire.enrol import Ask, renew
from wire.tls import TlsNetwork

HALF_LIFE_S = CERTIFICATE_LIFETIME_S / 2
LOOK_S = HALF_LIFE_S / 144
"""Between two looks at the wall clock, five minutes: a loop's own clock stands still while a machine sleeps."""


async def until_half_life(issued_at: float, clock: Clock) -> None:
    """Wait until a certificate has lived half its life. ``issued_at``: Unix seconds of this machine."""
    while (left_s := issued_at + HALF_LIFE_S - clock.wall()) > 0:  # noqa: ASYNC110 - a clock is waited for
        await asyncio.sleep(min(left_s, LOOK_S))


class Member:
    """A peer of an encrypted cluster: its credentials, and the network that presents them."""

    def __init__(self, base: Network, credentials: Credentials, disk: Disk, clock: Clock) -> None:
        self.credentials = credentials
        self.network = TlsNetwork(base, credentials, require_client_certificate=True)
        self._disk, self._clock = disk, clock

    @property
    def peer_id(self) -> str:
        return self.credentials.identity.peer_id

    @property
    def _issued_at(self) -> float:
        return self.credentials.identity.not_after - CERTIFICATE_LIFETIME_S

    @property
    def due(self) -> bool:
        """Whether the certificate has lived half its life."""
        return self._clock.wall() >= self._issued_at + HALF_LIFE_S

    async def renew(self, ask: Ask) -> None:
        """Fetch the next certificate from the seed, keep it, and present it from the next connection on.

        Raises:
            P2PTrainError: what ``ask`` raises; or the seed answered with something else; or it could not be kept.
        """
        self.credentials = await renew(self.credentials, ask, disk=self._disk)
        self.network.use(self.credentials)

    async def keep_fresh(self, ask: Ask) -> None:
        """Renew at every half life, until cancelled. Raises as ``renew``."""
        while True:
            await until_half_life(self._issued_at, self._clock)
            await self.renew(ask)
