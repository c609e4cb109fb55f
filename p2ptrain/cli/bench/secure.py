"""Throw-away credentials: a CA that lives as long as the benchmark, and a certificate for each member."""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from pathlib import Path

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.world import Network
from wire import credentials
from wire.credentials import Credentials
from wire.transport import TcpNetwork


def make_credentials(root: Path, peer_ids: Sequence[str]) -> list[Path]:
    """A directory with credentials for each peer, under one new CA whose key is not kept. Raises ``StorageError``."""
    disk, now = RealDisk(), time.time()
    ca_key, ca_pem = credentials.new_authority("p2ptrain bench", now=now)
    made: list[Path] = []
    for peer_id in peer_ids:
        key_pem, csr_der = credentials.new_key_and_request(peer_id)
        _, key = credentials.request_of_untrusted(csr_der)
        der = credentials.sign_certificate(ca_key, ca_pem, key, peer_id=peer_id, roles=["worker"], now=now)
        Credentials(root / peer_id, ca_pem, credentials.pem_of(der), key_pem).save(disk)
        made.append(root / peer_id)
    return made


def contexts_of(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For accepting and for dialling. Raises ``StorageError``."""
    own = Credentials.load(RealDisk(), directory)
    return own.server_context(), own.client_context()


def tls_network(tcp: TcpNetwork, directory: Path) -> Network:
    """The network that workers use off the loopback. Raises ``StorageError``."""
    from wire.tls import TlsNetwork

    return TlsNetwork(tcp, Credentials.load(RealDisk(), directory), require_client_certificate=True)
