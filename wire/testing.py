"""A CA of a run and its members, for the tests of all that is encrypted. Keys cost milliseconds, so they are kept."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from p2ptrain.core.disk import RealDisk
from wire.credentials import (
    Credentials,
    new_authority,
    new_key_and_request,
    pem_of,
    request_of_untrusted,
    sign_certificate,
)


@dataclass(frozen=True)
class Run:
    """A CA, and where its members keep their credentials."""

    key_pem: bytes
    ca_pem: bytes
    directory: Path

    def sign(self, csr_der: bytes, *, roles: tuple[str, ...], age_s: float = 0.0, lifetime_s: float = 3600.0) -> bytes:
        peer_id, key = request_of_untrusted(csr_der)
        now = time.time() - age_s
        return sign_certificate(
            self.key_pem, self.ca_pem, key, peer_id=peer_id, roles=roles, now=now, lifetime_s=lifetime_s
        )

    def member(
        self, peer_id: str, *roles: str, age_s: float = 0.0, lifetime_s: float = 3600.0, ca_pem: bytes = b""
    ) -> Credentials:
        """Credentials of a peer, saved; ``ca_pem`` is whom it trusts where that is not this run."""
        key_pem, csr_der = new_key_and_request(peer_id)
        certificate = pem_of(self.sign(csr_der, roles=roles, age_s=age_s, lifetime_s=lifetime_s))
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        credentials = Credentials(directory, ca_pem or self.ca_pem, certificate, key_pem)
        credentials.save(RealDisk())
        return credentials


def run(name: str = "run") -> Run:
    """The run of this name: the same whenever it is asked for."""
    return _made(name)


@cache
def _made(name: str) -> Run:
    directory = Path(tempfile.mkdtemp(prefix="p2ptrain-test-"))
    atexit.register(shutil.rmtree, directory)
    return Run(*new_authority(name, now=time.time()), directory)


@cache
def credentials(peer_id: str = "peer", role: str = "worker", name: str = "run") -> Credentials:
    return run(name).member(peer_id, role)
