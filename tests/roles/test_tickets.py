"""Who is let in, who no longer, and that the book survives the disk."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.errors import Refused, StorageError
from roles.seed.authority import MAX_EVICTED, MAX_MEMBERS, MAX_TICKETS, AuthorityState, Member, TicketRecord

NOW, DAY = 1_800_000_000.0, 86_400.0
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
