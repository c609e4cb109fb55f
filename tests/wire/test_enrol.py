"""Enrolment: with a good seed, and with everybody who might stand in its place."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import secrets
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    P2PTrainError,
    ProtocolError,
    Refused,
    Unreachable,
)
from p2ptrain.core.world import LoopClock, Network
from p2ptrain.lab.memory import DEFAULT_HOST, MemoryNetwork
from tests.wire.doubles import HOST, Owner, Run, credentials, in_memory, on_every_plain_stage, run
from wire.address import NONCE_BYTES, Ticket, verify_proof
from wire.connection import Connection, last_word
from wire.credentials import Credentials, der_of, new_key_and_request
from wire.enrol import RENEW, RunMembership, enrol
from wire.handshake import dial, local_hello
from wire.messages import (
    EnrolGranted,
    EnrolOffer,
    EnrolRequest,
    Hello,
    Message,
    Refuse,
)
from wire.tls import TlsNetwork

SECRET = bytes(range(50, 66))


class Seed(Owner):
    """A seed with one ticket, that does as it should where it is not told otherwise.

    Args:
        presents: its credentials. ca_der: what it offers.
        instead: message to answer with, per message asked with; ``None`` is silence.
    """

    def __init__(
        self,
        presents: Credentials | None = None,
        ca_der: bytes = b"",
        instead: dict[type[Message], Message | None] | None = None,
        signs: Run | None = None,
        roles: Collection[str] = ("worker",),
        nonce: bytes = b"",
    ) -> None:
        super().__init__()
        self._presents = presents or credentials("seed", "seed")
        self._ca_der = ca_der or der_of(run().ca_pem)
        self._instead = instead or {}
        self._signs, self._roles, self._nonce = signs or run(), roles, nonce
        self.heard: list[Message] = []

    def listening(self, network: Network, host: str = HOST) -> Any:
        return super().listening(TlsNetwork(network, self._presents, require_client_certificate=False), host)

    @property
    def ticket(self) -> Ticket:
        host, port = self.server.address
        pin = hashlib.sha256(der_of(run().ca_pem)).digest()
        return Ticket(host, port, "worker", "0" * 12, SECRET, pin)

    async def serve(self, connection: Connection, hello: Hello) -> None:
        nonce = self._nonce or secrets.token_bytes(NONCE_BYTES)
        offer = self._instead.get(EnrolOffer, EnrolOffer(self._ca_der, nonce))
        try:
            while True:
                if offer is not None:
                    connection.send(offer)
                message = (await connection.receive(timeout_s=60)).message
                self.heard.append(message)
                offer = self._instead.get(type(message), self._answer(message, nonce))
                if offer is None:
                    await connection.closed.wait()
        except Refused as error:
            connection.send(last_word(error))
            raise

    def _answer(self, message: Message, nonce: bytes) -> Message:
        if isinstance(message, Refuse):
            raise Refused(message.code, message.message)
        assert isinstance(message, EnrolRequest)
        if not verify_proof(message.mac, secret=SECRET, nonce=nonce, csr_der=message.csr_der):
            raise Refused("bad-proof", "the proof is wrong", remedy="copy the whole ticket")
        return EnrolGranted(self._signs.sign(message.csr_der, roles=self._roles))

    def on_problem(self, error: P2PTrainError, remote: tuple[str, int]) -> None:
        if not isinstance(error, ConnectionLost):  # which is how each of these conversations ends
            super().on_problem(error, remote)


async def enrolled(network: Network, ticket: Ticket, directory: Path, *, timeout_s: float = 5.0) -> Credentials:
    return await enrol(network, ticket, peer_id="a1", directory=directory, disk=RealDisk(), timeout_s=timeout_s)


def nothing_of_the_secret_in(*things: object) -> None:
    shown = " ".join(map(repr, things)) + " ".join(
        f"{thing.message} {thing.remedy}" for thing in things if isinstance(thing, P2PTrainError)
    )
    assert SECRET.hex() not in shown
    assert repr(SECRET)[2:-1] not in shown
    assert base64.b64encode(SECRET).decode().rstrip("=") not in shown


@on_every_plain_stage
async def test_a_ticket_becomes_credentials(network: Network, tmp_path: Path) -> None:
    async with Seed().listening(network) as seed:
        held = await enrolled(network, seed.ticket, tmp_path / "mine")
        assert (held.identity.peer_id, held.identity.roles) == ("a1", {"worker"})
        assert Credentials.load(RealDisk(), tmp_path / "mine") == held
        assert [type(message) for message in seed.heard] == [EnrolRequest]
        nothing_of_the_secret_in(*seed.heard)
        mine = TlsNetwork(network, held, require_client_certificate=True)
        hello = local_hello(peer_id="a1", name="anna", roles=["worker"], purpose="peer")
        connection, _ = await dial(mine, *seed.server.address, hello, timeout_s=5, expect_role="seed")
        await connection.close()
        assert not seed.problems


@on_every_plain_stage
async def test_a_wrong_pin_ends_it_before_anything_is_said(network: Network, tmp_path: Path) -> None:
    async with Seed().listening(network) as seed:
        with pytest.raises(Refused) as caught:
            await enrolled(network, replace(seed.ticket, pin=bytes(32)), tmp_path)
        assert caught.value.code == "wrong-pin"
        assert "may be intercepted" in caught.value.remedy
        told = await seed.problem()
        assert isinstance(told, Refused)
        assert told.code == "wrong-pin"
        assert not any(isinstance(message, EnrolRequest) for message in seed.heard)
        nothing_of_the_secret_in(caught.value, told)
        assert not os.listdir(tmp_path)


@on_every_plain_stage
async def test_somebody_in_between_who_shows_the_true_ca_cannot_speak_under_it(
    network: Network, tmp_path: Path
) -> None:
    proxy = Seed(presents=run("proxy").member("seed", "seed"))
    async with proxy.listening(network):
        with pytest.raises(Refused) as caught:
            await enrolled(network, proxy.ticket, tmp_path)
        assert caught.value.code == "certificate-untrusted"
        assert (await proxy.problem()).code == "certificate-untrusted"  # type: ignore[attr-defined]
        assert not proxy.heard


@on_every_plain_stage
async def test_a_member_that_plays_the_seed_is_refused(network: Network, tmp_path: Path) -> None:
    member = Seed(presents=credentials("b2", "worker"))
    async with member.listening(network):
        with pytest.raises(Refused) as caught:
            await enrolled(network, member.ticket, tmp_path)
        assert caught.value.code == "wrong-identity"
        assert (await member.problem()).code == "wrong-identity"  # type: ignore[attr-defined]
        assert not [message for message in member.heard if not isinstance(message, Refuse)]


@on_every_plain_stage
async def test_a_wrong_secret_is_told(network: Network, tmp_path: Path) -> None:
    async with Seed().listening(network) as seed:
        with pytest.raises(Refused, match="proof is wrong") as caught:
            await enrolled(network, replace(seed.ticket, secret=bytes(16)), tmp_path)
        assert (caught.value.code, caught.value.remedy) == ("bad-proof", "copy the whole ticket")
        nothing_of_the_secret_in(caught.value, await seed.problem(), *seed.heard)


@on_every_plain_stage
async def test_reason_of_the_seed_is_told(network: Network, tmp_path: Path) -> None:
    async with Seed(instead={EnrolRequest: Refuse("ticket-expired", "no", "ask again")}).listening(network) as seed:
        with pytest.raises(Refused) as caught:
            await enrolled(network, seed.ticket, tmp_path)
        assert (caught.value.code, caught.value.remedy) == ("ticket-expired", "ask again")


@in_memory
async def test_a_seed_that_falls_silent_is_given_up_in_time(network: Network, tmp_path: Path) -> None:
    async with Seed(instead={EnrolRequest: None}).listening(network) as seed:
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await enrolled(network, seed.ticket, tmp_path, timeout_s=3)
        assert asyncio.get_running_loop().time() - began == pytest.approx(3)
        assert not os.listdir(tmp_path)


@in_memory
async def test_a_seed_that_never_accepts_is_not_said_to_have_accepted(network: Network, tmp_path: Path) -> None:
    """Its firewall drops the packets: the MTU is not at fault."""
    assert isinstance(network, MemoryNetwork)
    async with Seed().listening(network) as seed:
        network.deaf.add((DEFAULT_HOST, DEFAULT_HOST))
        with pytest.raises(Unreachable, match="no answer within 5 s") as caught:
            await enrolled(network, seed.ticket, tmp_path)
        assert "firewall" in caught.value.remedy


@pytest.mark.parametrize(
    "seed",
    [
        {"instead": {EnrolOffer: EnrolGranted(b"?")}},
        {"instead": {EnrolRequest: EnrolOffer(b"?", bytes(NONCE_BYTES))}},
        {"instead": {EnrolRequest: EnrolGranted(b"not a certificate")}},
        {"signs": run("another")},
        {"roles": ("operator",)},
        {"roles": ("verifier",)},
        {"roles": ("worker", "verifier")},
        {"instead": {EnrolRequest: EnrolGranted(run().sign(new_key_and_request("a1")[1], roles=("worker",)))}},
    ],
)
@on_every_plain_stage
async def test_a_seed_that_answers_wrongly(network: Network, tmp_path: Path, seed: dict[str, Any]) -> None:
    async with Seed(**seed).listening(network) as wrong:
        with pytest.raises(ProtocolError) as caught:
            await enrolled(network, wrong.ticket, tmp_path)
        nothing_of_the_secret_in(caught.value)
        assert not os.listdir(tmp_path)


# -------------------------------------------------------------------------------------------------------------- renewal


def renewed(held: Credentials, answer: Callable[[bytes], dict[str, Any]]) -> Credentials:
    async def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
        assert method == RENEW
        return answer(base64.b64decode(params["csr"]))

    member = RunMembership(MemoryNetwork(), held, RealDisk(), LoopClock())
    asyncio.run(member.renew(ask))
    return member.credentials


def test_a_renewal_has_a_new_key_and_takes_the_old_ones_place() -> None:
    held = run().member("a1", "worker")
    sign = partial(run().sign, roles=("worker",))
    after = renewed(held, lambda csr: {"certificate": base64.b64encode(sign(csr)).decode()})
    assert after.identity.roles == {"worker"}
    assert after.key_pem != held.key_pem
    assert after.identity.peer_id == "a1"
    assert Credentials.load(RealDisk(), held.directory) == after


@pytest.mark.parametrize(
    "answer",
    [
        lambda csr: {},
        lambda csr: {"certificate": 7},
        lambda csr: {"certificate": "no base64!"},
        lambda csr: {"certificate": "AAAA"},
        lambda csr: {"certificate": base64.b64encode(run().sign(csr, roles=("operator",))).decode()},
        lambda csr: {"certificate": base64.b64encode(run("another").sign(csr, roles=("worker",))).decode()},
    ],
)
def test_a_renewal_that_is_none_leaves_what_was(answer: Callable[[bytes], dict[str, Any]]) -> None:
    held = run().member("a1", "worker")
    with pytest.raises(ProtocolError):
        renewed(held, answer)
    assert Credentials.load(RealDisk(), held.directory) == held
