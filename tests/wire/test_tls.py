"""TLS: who is let through, who is not and why, in words on both sides; bytes, bounds and time."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, ProtocolError, Refused
from p2ptrain.core.world import Network
from p2ptrain.lab.memory import MemoryNetwork
from tests.wire.doubles import HOST, Owner, Recorder, credentials, in_memory, on_every_plain_stage, run
from wire.address import ROLES
from wire.connection import Connection
from wire.credentials import Credentials, PeerIdentity, authority_context
from wire.handshake import PERMITTED, Dialler, dial, judge_answerer, judge_caller, local_hello, local_welcome
from wire.messages import EventNotice, Hello
from wire.tls import HANDSHAKE_TIMEOUT_S, TlsDialler, TlsNetwork
from wire.transport import MAX_HALF_OPEN_PER_MACHINE

HOUR_S = 3600.0


def hello(peer_id: str = "a1", purpose: str = "peer") -> Hello:
    return local_hello(peer_id=peer_id, name="anna", roles=["worker"], purpose=purpose)


def tls(network: Network, held: Credentials, **options: Any) -> TlsNetwork:
    return TlsNetwork(network, held, **{"require_client_certificate": True, **options})


async def knock(network: Dialler, seed: Owner, said: Hello | None = None, **options: Any) -> Connection:
    connection, _ = await dial(network, *seed.address, said or hello(), timeout_s=5, **options)
    return connection


async def refused(network: Dialler, seed: Owner, said: Hello | None = None, **options: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        await knock(network, seed, said, **options)
    assert caught.value.remedy
    return caught.value


async def exchange(there: Network, here: Dialler, code: str, *, said: Hello | None = None, **options: Any) -> Owner:
    """A caller on ``here`` is refused by the seed on ``there``, or refuses it: ``code`` is told on both sides."""
    async with Owner().listening(there) as seed:
        error = await refused(here, seed, said, **options)
        assert error.code == code
        problem = await seed.problem()
        assert isinstance(problem, Refused), problem
        assert problem.code == code
        assert not seed.served
        return seed


# ------------------------------------------------------------------------------------------------------- who is who


@on_every_plain_stage
async def test_both_sides_know_whom_they_talk_to(network: Network) -> None:
    async with Owner().listening(tls(network, credentials("seed", "seed"))) as seed:
        near = await knock(tls(network, credentials("a1")), seed, expect_peer="seed", expect_role="seed")
        (far,) = seed.served
        assert near.ends.encrypted
        assert far.ends.encrypted
        assert near.ends.identity == credentials("seed", "seed").identity
        assert far.ends.identity == credentials("a1").identity
        await near.close()
    assert not seed.problems


@on_every_plain_stage
async def test_a_renewed_certificate_is_presented_from_the_next_connection_on(network: Network) -> None:
    before, after = run().member("a1", "worker"), run().member("a1", "worker")
    mine = tls(network, before)
    async with Owner().listening(tls(network, credentials("seed", "seed"))) as seed:
        first = await knock(mine, seed)
        mine.present(after)
        second = await knock(mine, seed)
        assert [far.ends.identity for far in seed.served] == [before.identity, after.identity]
        assert not first.closed.is_set()
        await first.close()
        await second.close()


# ------------------------------------------------------------------------------------------------ certificates refused


CALLER, SEED = credentials("a1"), credentials("seed", "seed")
OLD = {"age_s": 2 * HOUR_S, "lifetime_s": HOUR_S}


@pytest.mark.parametrize(
    ("answerer", "caller", "code", "options"),
    [
        (SEED, run().member("a1", "worker", **OLD), "certificate-expired", {}),
        (run().member("seed", "seed", **OLD), CALLER, "certificate-expired", {}),
        # A caller of another run who trusts this one all the same, and an answerer with a CA of its own.
        (SEED, run("another").member("a1", "worker", ca_pem=run().ca_pem), "certificate-untrusted", {}),
        (run("another").member("seed", "seed"), CALLER, "certificate-untrusted", {}),
        (credentials("b2"), None, "not-permitted", {}),
        (SEED, CALLER, "wrong-identity", {"expect_peer": "c3"}),
        (SEED, CALLER, "wrong-identity", {"expect_role": "operator"}),
        (SEED, CALLER, "wrong-identity", {"said": hello("b2")}),
    ],
)
@on_every_plain_stage
async def test_invalid_certificate_or_identity_is_refused_with_one_code_on_both_sides(
    network: Network, answerer: Credentials, caller: Credentials | None, code: str, options: dict[str, Any]
) -> None:
    here = TlsDialler(network, authority_context(run().ca_pem)) if caller is None else tls(network, caller)
    await exchange(tls(network, answerer), here, code, **options)


@on_every_plain_stage
async def test_clocks_may_be_off_by_less_than_an_hour_but_not_more(network: Network) -> None:
    early, far_too_early = (
        run().member("a1", "worker", age_s=-minutes * 60, lifetime_s=HOUR_S) for minutes in (50, 90)
    )
    there = tls(network, credentials("seed", "seed"))
    async with Owner().listening(there) as seed:
        await (await knock(tls(network, early), seed)).close()
    async with Owner().listening(there) as seed:
        error = await refused(tls(network, far_too_early), seed)
        assert "not valid yet" in error.message
        assert "date and time" in error.remedy
        assert (await seed.problem()).code == "certificate-not-yet-valid"  # type: ignore[attr-defined]


@on_every_plain_stage
async def test_a_caller_without_a_certificate_may_enrol_and_nothing_else(network: Network) -> None:
    there = tls(network, credentials("seed", "seed"), require_client_certificate=False)
    newcomer = TlsDialler(network, authority_context(run().ca_pem))
    for purpose in ("peer", "operator", "ring", "heal", "probe", ""):
        await exchange(there, newcomer, "not-permitted", said=hello(purpose=purpose))
    async with Owner().listening(there) as seed:
        near = await knock(newcomer, seed, hello(purpose="enrol"), expect_role="seed")
        assert seed.served[0].ends.encrypted
        assert seed.served[0].ends.identity is None
        near.allow_large()
        near.send(EventNotice("info", "loud", "x" * 30_000))  # it stays in the doorway: small frames only
        assert isinstance(await seed.problem(), ProtocolError)
        await near.close()


# ---------------------------------------------------------------------------------------------- identities refused


@on_every_plain_stage
async def test_who_answers_calls_itself_something_else_than_its_certificate(network: Network) -> None:
    liar = Owner(local_welcome(peer_id="somebody", name="seed", wall=1.0))
    async with liar.listening(tls(network, credentials("seed", "seed"))) as seed:
        assert (await refused(tls(network, credentials("a1")), seed)).code == "wrong-identity"


def test_who_claims_more_roles_than_its_certificate_has() -> None:
    identity = PeerIdentity("a1", frozenset({"worker"}), 0.0, 1)
    for roles, permitted in ((["worker"], True), ([], True), (["seed"], False), (["worker", "seed"], False)):
        said = dataclasses.replace(hello(purpose="probe"), roles=roles)
        refusal = judge_caller(said, identity)
        assert (refusal is None) == permitted
        assert refusal is None or (refusal.code, bool(refusal.remedy)) == ("not-permitted", True)


@pytest.mark.parametrize("purpose", [*PERMITTED, "enrol", "", "something new"])
def test_certificate_permits_a_purpose_to_its_roles_only(purpose: str) -> None:
    for role in (*ROLES, "other"):
        permitted = purpose == "enrol" or role in PERMITTED.get(purpose, ())
        claim = dataclasses.replace(hello(purpose=purpose), roles=[role])
        silent = dataclasses.replace(claim, roles=[])  # who claims no role has those of its certificate
        cases = (claim, {role}), (silent, {role}), (claim, {*ROLES, "other"})
        for caller, roles in cases:
            assert (judge_caller(caller, PeerIdentity("a1", frozenset(roles), 0.0, 1)) is None) == permitted
    assert (judge_caller(hello(purpose=purpose), None) is None) == (purpose == "enrol")


def test_nobody_is_taken_for_somebody() -> None:
    known = PeerIdentity("a1", frozenset({"worker"}), 0.0, 1)
    assert judge_answerer(None, peer_id="", role="") is None
    assert judge_answerer(known, peer_id="a1", role="worker") is None
    for identity, peer_id, role in [(None, "a1", ""), (None, "", "worker"), (known, "a2", ""), (known, "a1", "seed")]:
        refusal = judge_answerer(identity, peer_id=peer_id, role=role)
        assert refusal is not None
        assert refusal.code == "wrong-identity"


# ------------------------------------------------------------------------------------------------ who speaks no TLS


@pytest.mark.parametrize(("caller", "codes"), [("good", []), ("hostile", ["tls-required"])])
async def test_a_plain_command_of_the_seeds_machine_is_no_problem_whatever_address_it_dials(
    caller: str, codes: list[str]
) -> None:
    network = MemoryNetwork()
    async with Owner().listening(tls(network.at("good"), credentials("seed", "seed")), host="good") as seed:
        assert (await refused(network.at(caller), seed)).code == "tls-required"
        assert [problem.code for problem in seed.problems if isinstance(problem, Refused)] == codes


@on_every_plain_stage
async def test_a_plain_caller_is_told_that_the_cluster_is_encrypted(network: Network) -> None:
    async with Owner().listening(tls(network, credentials("seed", "seed"))) as seed:
        error = await refused(network, seed)
        assert error.code == "tls-required"
        assert "ticket" in error.remedy
        assert not seed.problems, "a command of this machine asks so"
        other = Recorder()
        await network.connect(*seed.address, lambda: other, timeout_s=5)
        other.transport.write(b"GET / HTTP/1.1\r\n\r\n")
        assert "does not speak TLS: it began with b'GET '" in (await seed.problem()).message


@pytest.mark.parametrize("play_plain", ["tcp-asyncio", "tcp-uvloop"], indirect=True)
@on_every_plain_stage
async def test_a_caller_of_a_plain_seed_is_told_that_it_is_plain(network: Network) -> None:
    async with Owner().listening(network) as seed:
        error = await refused(tls(network, credentials("a1")), seed)
        assert error.code == "not-encrypted"
        assert "speaks TLS" in (await seed.problem()).message


@on_every_plain_stage
async def test_what_was_changed_on_the_way_ends_the_connection(network: Network) -> None:
    async with Owner().listening(tls(network, credentials("seed", "seed"))) as seed:
        near = await knock(tls(network, credentials("a1")), seed)
        near._transport._below.write(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that no key of ours made
        await near.closed.wait()
        await seed.served[0].closed.wait()
        assert isinstance(seed.served[0].close_cause, ProtocolError)
        assert isinstance(near.close_cause, ConnectionLost)  # by the alert
        assert "bad record mac" in near.close_cause.message


# ----------------------------------------------------------------------------------------------------- bounds and time


@in_memory
async def test_a_silent_caller_has_five_seconds(network: Network) -> None:
    loop = asyncio.get_running_loop()
    for words in (b"", b"\x16\x03\x01"):
        async with Owner().listening(tls(network, credentials("seed", "seed"))) as seed:
            began, silent = loop.time(), Recorder()
            await network.connect(*seed.address, lambda caller=silent: caller, timeout_s=5)
            silent.transport.write(words)
            assert getattr(await seed.problem(), "code", "") == "too-slow"
            assert loop.time() - began == pytest.approx(HANDSHAKE_TIMEOUT_S)
            await silent.until(lambda caller=silent: "eof" in caller.events)
            assert (b"too-slow" in silent.received) == (not words)
            await silent.until_lost()


@in_memory
async def test_who_never_answers_is_given_up_in_time(network: Network) -> None:
    loop = asyncio.get_running_loop()
    listener = await network.listen(HOST, 0, Recorder)
    began = loop.time()
    with pytest.raises(DeadlineExceeded, match=r"did not answer within 3 s: .* loses large packets"):
        await dial(tls(network, credentials("a1")), *listener.address, hello(), timeout_s=3)
    assert loop.time() - began == pytest.approx(3)
    await listener.close()


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


@in_memory
async def test_who_stands_in_the_doorway_without_a_word_costs_little(network: Network, traced: None) -> None:
    async with Owner().listening(tls(network, credentials("seed", "seed"))) as seed:
        quiet = [Recorder(buffer_bytes=1) for _ in range(MAX_HALF_OPEN_PER_MACHINE)]
        before, _ = tracemalloc.get_traced_memory()
        for each in quiet:
            await network.connect(*seed.address, lambda caller=each: caller, timeout_s=5)
        after, _ = tracemalloc.get_traced_memory()
        assert (after - before) / len(quiet) < 16 << 10  # both ends of the memory network's pipe counted
        for each in quiet:
            each.transport.abort()
            await each.until_lost()
