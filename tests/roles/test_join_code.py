"""Joining with a code of six digits: at an honest seed, by strangers who guess, and with somebody in between."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cluster.access import Caller, CodeNeeded, reach
from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused, Unreachable
from roles.seed import join_codes
from roles.seed.join_codes import MAX_ATTEMPTS
from roles.seed_link import is_transient
from tests.roles.in_process import DEADLINE_S, Cluster
from tests.wire.doubles import Owner, run
from wire.address import NONCE_BYTES, Ticket
from wire.connection import Connection, last_word
from wire.credentials import der_of, unverified_context
from wire.enrol import ticket_for_code, verified_seed
from wire.handshake import dial
from wire.join_code import CodeAgreement
from wire.messages import CodeProof, CodeShare, EnrolOffer, Hello, Message, RefusalCode
from wire.tls import TlsDialler, TlsNetwork
from wire.transport import TcpNetwork


@pytest.fixture
async def seed(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path / "seed", TcpNetwork(), encrypted=True)
    await made.start_seed()
    yield made
    await made.close()


async def new_code(seed: Cluster, role: str = "worker") -> str:
    return str((await seed.ask("tickets.code", role=role))["code"])


def wrong(code: str) -> str:
    return f"{(int(code) + 1) % 10**6:06}"


async def ticket(seed: Cluster, code: str, role: str = "worker", place: tuple[str, int] | None = None) -> Ticket:
    place = place or seed.address
    return await ticket_for_code(TcpNetwork(), place, code, role=role, peer_id="new", timeout_s=DEADLINE_S)


async def refused(seed: Cluster, code: str, **more: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        await ticket(seed, code, **more)
    assert caught.value.remedy
    assert not is_transient(caught.value) or caught.value.code == RefusalCode.BUSY, "it is not tried again"
    return caught.value


async def events(seed: Cluster) -> list[tuple[str, str]]:
    found = (await seed.ask("events.list", after_id=-100))["events"]
    return [(event["level"], event["text"]) for event in found if event["kind"] == "code"]


async def test_a_code_gives_one_machine_a_ticket_and_saved_access(seed: Cluster, tmp_path: Path) -> None:
    def who(code: str | None = "") -> Caller:
        return Caller("worker", tmp_path / "kept", [], "p1", code)

    with pytest.raises(CodeNeeded) as needed:
        await reach(seed.address, who(), TcpNetwork())
    assert needed.value.place == seed.address
    assert "p2ptrain ticket code" in needed.value.remedy
    code = await new_code(seed)
    access = await reach(seed.address, who(code), TcpNetwork())
    assert access.peer_id == "p1"
    assert (await reach(seed.address, who(), TcpNetwork())).peer_id == "p1", "it is not asked for again"
    assert (await refused(seed, code)).code == RefusalCode.CODE_UNKNOWN, "a code is for one machine"
    made = (await seed.ask("tickets.list"))["tickets"][-1]
    assert (made["uses"], made["used"], made["state"]) == (1, 1, "used")


async def test_nobody_is_asked_for_the_code_of_a_seed_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free_port = server.getsockname()[1]
    with pytest.raises(Unreachable):
        await reach(("127.0.0.1", free_port), Caller("worker", tmp_path, [], "p1", ""), TcpNetwork())


async def test_a_wrong_guess_costs_the_code_and_is_noted(seed: Cluster) -> None:
    code = await new_code(seed)
    refusal = await refused(seed, wrong(code))
    assert refusal.code == RefusalCode.CODE_WRONG
    assert (await refused(seed, code)).code == RefusalCode.CODE_UNKNOWN
    warned = [text for level, text in await events(seed) if level == "warning"]
    assert len(warned) == 1
    assert "127.0.0.1 typed a wrong one" in warned[0]
    assert code not in str(await events(seed))


async def test_a_code_ends_with_its_time_its_successor_and_all_tickets(
    seed: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await new_code(seed), await new_code(seed)
    if first != second:
        assert (await refused(seed, first)).code == RefusalCode.CODE_WRONG
    third = await new_code(seed)
    await seed.ask("tickets.rotate")
    assert (await refused(seed, third)).code == RefusalCode.CODE_UNKNOWN
    monkeypatch.setattr(join_codes, "CODE_LIFETIME_S", 0.0)
    assert (await refused(seed, await new_code(seed))).code == RefusalCode.CODE_UNKNOWN


async def test_a_code_is_for_one_role_and_for_no_operator(seed: Cluster) -> None:
    code = await new_code(seed, "drafter")
    refusal = await refused(seed, code)
    assert (refusal.code, "--role drafter" in refusal.remedy) == (RefusalCode.CODE_UNKNOWN, True)
    assert (await ticket(seed, code, "drafter")).role == "drafter"
    with pytest.raises(Refused, match="role must be worker"):
        await new_code(seed, "operator")


async def begun(seed: Cluster, stack: AsyncExitStack, code: str) -> tuple[Connection, bytes]:
    """A newcomer that has yet to send the returned proof."""
    calling = verified_seed(TcpNetwork(), seed.address, "worker", "new", DEADLINE_S)
    connection, offer, _ = await stack.enter_async_context(calling)
    agreement = CodeAgreement(code, hashlib.sha256(offer.ca_der).digest(), newcomer=True)
    connection.send(CodeShare(agreement.share))
    agreement.finish_untrusted((await connection.expect(CodeShare, timeout_s=DEADLINE_S)).share)
    return connection, agreement.newcomer_proof


async def test_who_leaves_before_the_proof_costs_nothing_and_learns_nothing(seed: Cluster) -> None:
    code = await new_code(seed)
    for guess in (code, wrong(code)):
        async with AsyncExitStack() as stack:
            await begun(seed, stack, guess)
    assert (await ticket(seed, code)).role == "worker"


async def test_many_exchanges_at_once_have_one_guess_together(seed: Cluster) -> None:
    code = await new_code(seed)
    codes = []
    async with AsyncExitStack() as stack:
        callers = [await begun(seed, stack, guess) for guess in (wrong(code), code)]
        for connection, proof in callers:
            connection.send(CodeProof(proof))
            with pytest.raises(Refused) as caught:
                await connection.expect(CodeProof, timeout_s=DEADLINE_S)
            codes.append(caught.value.code)
    assert codes == [RefusalCode.CODE_WRONG, RefusalCode.CODE_UNKNOWN]


async def test_the_seed_computes_for_few_strangers_in_a_minute(seed: Cluster) -> None:
    code = await new_code(seed)
    for _ in range(MAX_ATTEMPTS):
        async with AsyncExitStack() as stack:
            await begun(seed, stack, wrong(code))
    assert (await refused(seed, code)).code == RefusalCode.BUSY


@pytest.mark.parametrize("share", [b"B" + bytes(32), b"A" + bytes(32), b"A\1" + bytes(31), b"A" + b"\xff" * 32])
def test_what_is_no_share_is_refused(share: bytes) -> None:
    with pytest.raises(ProtocolError, match="share of a join code"):
        CodeAgreement("123456", bytes(32), newcomer=False).finish_untrusted(share)


class Between(Owner):
    """A machine between a newcomer and the seed. It shows a certificate of its own, and passes on what both say."""

    def __init__(self, seed: Cluster) -> None:
        super().__init__()
        self._seed = seed
        self.seen: list[Message] = []

    def listening(self, network: Any, host: str = "127.0.0.1") -> Any:
        own = run("between").member("seed", "seed")
        return super().listening(TlsNetwork(network, own, require_client_certificate=False), host)

    def on_problem(self, error: P2PTrainError, remote: tuple[str, int]) -> None:
        pass  # it breaks what it likes

    async def serve(self, connection: Connection, hello: Hello) -> None:
        connection.send(EnrolOffer(der_of(run("between").ca_pem), bytes(NONCE_BYTES)))
        behind, _ = await dial(TlsDialler(TcpNetwork(), unverified_context()), *self._seed.address, hello, timeout_s=5)
        await behind.expect(EnrolOffer, timeout_s=DEADLINE_S)
        try:
            while True:
                self.seen.append((await connection.receive(timeout_s=DEADLINE_S)).message)
                behind.send(self.seen[-1])
                self.seen.append((await behind.receive(timeout_s=DEADLINE_S)).message)
                connection.send(self.seen[-1])
        finally:
            await behind.close()


async def test_somebody_in_between_with_a_certificate_of_their_own_gets_nothing(seed: Cluster) -> None:
    code = await new_code(seed)
    async with Between(seed).listening(TcpNetwork()) as between:
        refusal = await refused(seed, code, place=between.address)
        assert refusal.code == RefusalCode.CODE_WRONG
        assert "intercept" in refusal.remedy
        assert [type(message).__name__ for message in between.seen] == ["CodeShare", "CodeShare", "CodeProof", "Refuse"]
    assert [level for level, _ in await events(seed)] == ["info", "warning"]
    assert not [item for item in (await seed.ask("tickets.list"))["tickets"] if item["uses"] == 1]


class Impostor(Owner):
    """A stranger in the place of the seed, who guesses a code. It stalls after the proof, or sends what it likes."""

    def __init__(self, guess: str, sends: Message | None) -> None:
        super().__init__()
        self._guess, self._sends = guess, sends
        self.is_right = False

    def listening(self, network: Any, host: str = "127.0.0.1") -> Any:
        own = run("impostor").member("seed", "seed")
        return super().listening(TlsNetwork(network, own, require_client_certificate=False), host)

    def on_problem(self, error: P2PTrainError, remote: tuple[str, int]) -> None:
        assert isinstance(error, ConnectionLost)

    async def serve(self, connection: Connection, hello: Hello) -> None:
        ca_der = der_of(run("impostor").ca_pem)
        connection.send(EnrolOffer(ca_der, bytes(NONCE_BYTES)))
        share = await connection.expect(CodeShare, timeout_s=DEADLINE_S)
        agreement = CodeAgreement(self._guess, hashlib.sha256(ca_der).digest(), newcomer=False)
        agreement.finish_untrusted(share.share)
        connection.send(CodeShare(agreement.share))
        proof = (await connection.expect(CodeProof, timeout_s=DEADLINE_S)).proof
        self.is_right = proof == agreement.newcomer_proof
        if self._sends is None:
            await connection.closed.wait()
        else:
            connection.send(self._sends)


@pytest.mark.parametrize("sends", [None, CodeProof(bytes(32)), last_word(Refused("busy", "no", remedy="again"))])
async def test_a_stranger_in_the_seeds_place_has_one_guess(sends: Message | None) -> None:
    async with Impostor("000001", sends).listening(TcpNetwork()) as impostor:
        with pytest.raises(Refused) as caught:
            await ticket_for_code(TcpNetwork(), impostor.address, "000002", role="worker", peer_id="new", timeout_s=1.0)
        assert caught.value.code == RefusalCode.CODE_WRONG, "else the newcomer would try again by itself"
        assert not impostor.is_right


async def test_a_plain_seed_has_no_codes(tmp_path: Path) -> None:
    plain = Cluster(tmp_path, TcpNetwork())
    await plain.start_seed()
    with pytest.raises(Refused) as caught:
        await new_code(plain)
    assert caught.value.code == RefusalCode.NOT_ENCRYPTED
    await plain.close()
