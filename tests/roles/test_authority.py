"""The run's authority: what it signs and remembers, who is let in and who no longer, and who may read its files."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ProtocolError, Refused, StorageError
from roles.seed.authority import (
    MAX_EVICTED,
    MAX_MEMBERS,
    MAX_TICKETS,
    ROLES,
    Authority,
    AuthorityState,
    Member,
    TicketRecord,
    ticket_of,
)
from wire.address import Ticket
from wire.credentials import (
    CERTIFICATE_LIFETIME_S,
    SKEW_S,
    PeerIdentity,
    identity_of_untrusted,
    new_key_and_request,
)

NOW = 1_800_000_000.0


def opened(root: Path) -> Authority:
    return Authority.open(RealDisk(), root / "authority", name="test", now=NOW)


async def test_a_certificate_names_the_peer_its_role_its_ticket_and_a_day(tmp_path):
    authority = opened(tmp_path)
    ticket = await authority.new_ticket("operator", host="h", now=NOW, expires_s=60)
    _, csr = new_key_and_request("p1")
    der = await authority.enrol(ticket.id, "p1", csr, NOW)
    identity = identity_of_untrusted(der)
    assert (identity.peer_id, identity.roles) == ("p1", {"operator"})
    assert identity.not_after == NOW + CERTIFICATE_LIFETIME_S
    assert x509.load_der_x509_certificate(der).not_valid_before_utc.timestamp() == NOW - SKEW_S
    assert ticket_of(identity) == ticket.id
    authority.judge(identity)


async def test_an_authority_that_is_not_valid_yet_says_so(tmp_path):
    opened(tmp_path)
    with pytest.raises(StorageError, match=r"valid only from 2027-01-15 07:[0-9]+ UTC") as caught:
        Authority.open(RealDisk(), tmp_path / "authority", name="test", now=NOW - 2 * 86400)
    assert "clock" in caught.value.remedy
    assert f"move {tmp_path / 'authority'} away" in caught.value.remedy


async def test_all_is_remembered_over_a_restart(tmp_path):
    authority = opened(tmp_path)
    first = await authority.first_ticket(host="h", now=NOW)
    _, csr = new_key_and_request("p1")
    identity = identity_of_untrusted(await authority.enrol(first.id, "p1", csr, NOW))
    await authority.change(lambda records: records.evict("p2", "bob"))
    again = opened(tmp_path)
    assert (again.pin, again.records) == (authority.pin, authority.records)
    assert str(again.ticket(await again.first_ticket(host="h", now=NOW + 1), 7)) == str(authority.ticket(first, 7))
    again.judge(identity)
    await again.change(lambda records: records.revoke(first.id, NOW))
    with pytest.raises(Refused, match="was revoked"):
        opened(tmp_path).judge(identity)
    assert (await again.first_ticket(host="h", now=NOW)).id != first.id


async def test_a_member_renews_with_a_new_key_and_nobody_else_for_it(tmp_path):
    authority = opened(tmp_path)
    ticket = await authority.new_ticket("worker", host="h", now=NOW, expires_s=60, uses=1)
    identity = identity_of_untrusted(await authority.enrol(ticket.id, "p1", new_key_and_request("p1")[1], NOW))
    later = NOW + CERTIFICATE_LIFETIME_S / 2  # the ticket has expired by then, and is used up
    der = await authority.renew(identity, new_key_and_request("p1")[1], later)
    assert identity_of_untrusted(der).not_after == later + CERTIFICATE_LIFETIME_S
    assert authority.records.tickets[ticket.id].used == 1
    with pytest.raises(ProtocolError, match="peer p1 requested a certificate for p2"):
        await authority.renew(identity, new_key_and_request("p2")[1], later)
    await authority.change(lambda records: records.evict("p1", "ann"))
    with pytest.raises(Refused, match="evicted"):
        await authority.renew(identity, new_key_and_request("p1")[1], later)


async def test_one_use_is_one_peer_however_many_come_at_once(tmp_path):
    authority = opened(tmp_path)
    ticket = await authority.new_ticket("worker", host="h", now=NOW, expires_s=60, uses=1)
    tries = [authority.enrol(ticket.id, peer, new_key_and_request(peer)[1], NOW) for peer in ("p1", "p2", "p3")]
    ends = await asyncio.gather(*tries, return_exceptions=True)
    assert [end.code for end in ends if isinstance(end, Refused)] == ["ticket-used", "ticket-used"]
    assert opened(tmp_path).records.tickets[ticket.id].used == 1


async def test_only_the_owner_reads_it(tmp_path):
    (tmp_path / "authority").mkdir(mode=0o755)
    authority = opened(tmp_path)
    await authority.write_local_tickets(host="127.0.0.1", port=7, now=NOW)
    authority.own_credentials("5eed", NOW)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "authority").rglob("*")}
    assert stat.S_IMODE((tmp_path / "authority").stat().st_mode) == 0o700
    assert modes.pop("self") == 0o700
    assert modes.pop("ca.pem") & 0o777 in (0o600, 0o644)
    assert set(modes.values()) == {0o600}, modes
    assert os.sep not in "".join(modes)


async def test_what_leads_to_it_is_the_owners_too(tmp_path):
    """Who may rename a directory on the way may put an authority, or credentials, of his own in its place."""
    before = os.umask(0)
    try:
        Authority.open(RealDisk(), tmp_path / "state/seed/authority", name="test", now=NOW)
    finally:
        os.umask(before)
    for place in ("state", "state/seed", "state/seed/authority"):
        assert stat.S_IMODE((tmp_path / place).stat().st_mode) == 0o700, place


async def test_the_seeds_own_id_is_given_to_nobody(tmp_path):
    authority = opened(tmp_path)
    authority.own_credentials("5eed", NOW)
    ticket = await authority.new_ticket("worker", host="h", now=NOW, expires_s=60.0)
    with pytest.raises(Refused, match="is the seed's own") as refusal:
        await authority.enrol(ticket.id, "5eed", new_key_and_request("5eed")[1], NOW)
    assert (refusal.value.code, bool(refusal.value.remedy)) == ("duplicate-peer", True)


async def test_local_tickets_are_tickets_of_every_role_and_stay(tmp_path):
    authority = opened(tmp_path)
    for port in (7, 8):
        await authority.write_local_tickets(host="127.0.0.1", port=port, now=NOW + port * CERTIFICATE_LIFETIME_S * 99)
    for role in ROLES:
        ticket = Ticket.parse_untrusted((tmp_path / "authority" / f"local-{role}.ticket").read_text())
        assert (ticket.role, ticket.host, ticket.port, ticket.pin) == (role, "127.0.0.1", 8, authority.pin)
        assert ticket.secret == authority.records.ticket(ticket.id).secret
    assert len(authority.records.tickets) == len(ROLES)


def test_a_certificate_of_elsewhere_is_not_honoured(tmp_path):
    authority = opened(tmp_path)
    for serial in (0, 5, 1 << 158, (1 << 112) + 7):
        with pytest.raises(Refused) as refusal:
            authority.judge(PeerIdentity("p1", frozenset({"worker"}), NOW, serial))
        assert refusal.value.code == "ticket-unknown"


@pytest.mark.parametrize("name", ["ca.key", "ca.pem", "tickets.json"])
async def test_a_damaged_authority_says_which_file_and_what_to_do(tmp_path, name):
    await opened(tmp_path).first_ticket(host="h", now=NOW)
    (tmp_path / "authority" / name).write_bytes(b"damaged")
    with pytest.raises(StorageError) as problem:
        opened(tmp_path)
    assert str(tmp_path) in problem.value.message
    assert "every member needs a new ticket" in problem.value.remedy


DAY = 86_400.0
T1, T2 = "aaaaaaaaaaaa", "bbbbbbbbbbbb"
SECRET = bytes(range(200, 216))


def record(ticket_id: str = T1, **changes: object) -> TicketRecord:
    made = TicketRecord(ticket_id, "worker", SECRET, "10.0.0.1", NOW, NOW + 7 * DAY)
    return replace(made, **changes)  # type: ignore[arg-type]


def records(*tickets: TicketRecord) -> AuthorityState:
    made = AuthorityState()
    for ticket in tickets or (record(),):
        made = made.with_ticket(ticket, NOW)
    return made


def enrolled(
    made: AuthorityState, peer_id: str, ticket_id: str = T1, key: str = "k", now: float = NOW
) -> AuthorityState:
    made.judge_enrolment(ticket_id, peer_id, key, now)
    return made.with_member(ticket_id, peer_id, key, now + DAY, now)


def refusal(made: AuthorityState, peer_id: str = "p1", ticket_id: str = T1, key: str = "k", now: float = NOW) -> str:
    with pytest.raises(Refused) as caught:
        made.judge_enrolment(ticket_id, peer_id, key, now)
    assert caught.value.message
    assert caught.value.remedy
    return caught.value.code


def test_every_reason_to_let_nobody_in():
    assert refusal(AuthorityState()) == "ticket-unknown"
    assert refusal(records(), now=NOW + 7 * DAY) == "ticket-expired"
    assert refusal(records().rotate(NOW)) == "ticket-revoked"
    assert refusal(records().revoke(T1, NOW)) == "ticket-revoked"
    assert refusal(enrolled(records(record(uses=1)), "p1"), "p2") == "ticket-used"
    assert refusal(records().evict("p1", "ann")) == "evicted"
    assert refusal(enrolled(records(), "p1"), key="another") == "duplicate-peer"
    records().judge_enrolment(T1, "p1", "k", NOW)


def test_a_use_is_a_peer_and_not_a_try():
    made = enrolled(enrolled(records(record(uses=1)), "p1"), "p1")
    assert made.tickets[T1].used == 1
    assert refusal(made, "p2") == "ticket-used"


def test_members_stay_when_their_ticket_is_over_and_go_when_it_is_revoked():
    made = enrolled(records(record(uses=1)), "p1")
    for over in (made, made.rotate(NOW), made.prune(NOW + 23 * 3600)):
        over.judge_certificate(T1, "p1")
    for gone in (made.revoke(T1, NOW), made.evict("p1", "ann")):
        with pytest.raises(Refused):
            gone.judge_certificate(T1, "p1")


def test_everything_is_bounded():
    many = AuthorityState({f"{n:012x}": record(f"{n:012x}") for n in range(MAX_TICKETS)})
    with pytest.raises(Refused, match=r"the seed keeps .* tickets, the limit"):
        many.with_ticket(record(), NOW)
    full = replace(records(), members={f"p{n}": Member(T1, "k", NOW + DAY) for n in range(MAX_MEMBERS)})
    assert refusal(full, "new") == "full"
    full.judge_enrolment(T1, "p7", "k", NOW)
    with pytest.raises(Refused, match="evicted already"):
        AuthorityState(evicted={f"p{n}": "" for n in range(MAX_EVICTED)}).evict("one-more", "")


def test_nothing_that_is_shown_has_the_secret():
    shown = (repr(record()), repr(records()), json.dumps(record().to_map(NOW)))
    for form in (SECRET.hex(), repr(SECRET), repr(SECRET)[2:-1], "secret="):
        assert not any(form in text for text in shown)


@given(
    st.lists(
        st.builds(
            lambda ids, role, uses, expires, closed: record(
                f"{ids:012x}", role=role, uses=uses, expires_at=expires, closed_at=closed, revoked=closed is not None
            ),
            st.integers(0, 2**48 - 1),
            st.sampled_from(["worker", "operator"]),
            st.none() | st.integers(1, 9),
            st.none() | st.floats(0, 4e9),
            st.none() | st.floats(0, 4e9),
        ),
        max_size=5,
    ),
    st.dictionaries(st.from_regex(r"[0-9a-z][0-9a-z-]{0,9}", fullmatch=True), st.text(max_size=9), max_size=3),
)
def test_the_book_survives_the_disk(tickets, evicted):
    made = AuthorityState({ticket.id: ticket for ticket in tickets}, {"p1": Member(T1, "k", NOW)}, evicted)
    assert AuthorityState.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version": 2}',
        b'{"version": 1, "tickets": [{}], "members": {}, "evicted": {}}',
        b'{"version": 1, "tickets": [], "evicted": {}, "members": {"/": {"ticket": "a", "key": "b", "not_after": 1}}}',
        records().to_json().replace(b'"worker"', b'"nobody"'),
        records().to_json()[:-9],
        b"\xff\xfe",
    ],
)
def test_a_damaged_book_is_no_book(data):
    with pytest.raises(StorageError, match=r"damaged|another release"):
        AuthorityState.from_json(data)
