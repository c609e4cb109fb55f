"""Tickets there and back, and everything that is not one; proofs."""

from __future__ import annotations

from base64 import urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError, UserError
from wire.address import ROLES, Ticket, advertised_host, dialable_host, is_ticket, parse_address, proof, verify_proof

SECRET = bytes(range(100, 116))
TICKET = Ticket("192.168.1.20", 7337, "worker", "0123456789ab", SECRET, bytes(range(32)))
TICKETS = st.builds(
    Ticket,
    host=st.sampled_from(["seed.example", "10.0.0.1", "::1", "fe80::1%eth0"]),
    port=st.integers(1, 65535),
    role=st.sampled_from(ROLES),
    id=st.binary(min_size=6, max_size=6).map(bytes.hex),
    secret=st.binary(min_size=16, max_size=16),
    pin=st.binary(min_size=32, max_size=32),
)


def hidden_in(secret: bytes) -> list[str]:
    """What would give ``secret`` away in a text."""
    return [secret.hex(), repr(secret), repr(secret)[2:-1], urlsafe_b64encode(secret).decode().rstrip("=")]


@given(TICKETS)
def test_a_ticket_reads_as_it_was_written(ticket: Ticket) -> None:
    assert Ticket.parse_untrusted(str(ticket)) == ticket
    assert is_ticket(str(ticket))


def test_a_ticket_is_one_word_a_terminal_may_wrap() -> None:
    text = str(TICKET)
    assert text.startswith("192.168.1.20:7337/")
    assert len(text) == 94
    assert not set(text) & set("\"'$&;|<>()*?[]{}!~#`\\ ")  # nothing that a shell would take for itself
    assert Ticket.parse_untrusted(f"  {text[:40]}\n  {text[40:]}\r\n") == TICKET


def test_another_address_of_the_same_seed_may_be_written() -> None:
    body = str(TICKET).partition("/")[2]
    moved = Ticket.parse_untrusted(f"seed.example/{body}")
    assert (moved.host, moved.port, moved.secret) == ("seed.example", 7337, TICKET.secret)


@pytest.mark.parametrize("scheme", ["http://", "https://", "tcp://", " HTTP://"])
def test_a_scheme_before_an_address_is_dropped(scheme: str) -> None:
    for text in ("10.0.0.1:9", "10.0.0.1:9/"):
        assert not is_ticket(scheme + text)
        assert parse_address(scheme + text) == ("10.0.0.1", 9)
    assert Ticket.parse_untrusted(f"{scheme}{TICKET}") == TICKET


def test_a_link_local_address_needs_an_interface() -> None:
    assert parse_address("[fe80::1%eth0]:9") == ("fe80::1%eth0", 9)
    with pytest.raises(UserError, match="link-local") as caught:
        parse_address("[fe80::1]:9")
    assert "[fe80::1%eth0]:9" in caught.value.remedy


@pytest.mark.parametrize(
    ("seed", "host", "dialled"),
    [
        ("10.0.0.1", "10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "127.0.0.1", "10.0.0.1"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("fe80::1%eth7", "fe80::2%eth0", "fe80::2%eth7"),
        ("10.0.0.1", "fe80::2%eth0", "fe80::2%eth0"),
        ("fe80::1%eth7", "fd00::2", "fd00::2"),
    ],
)
def test_a_member_is_dialled_as_this_machine_can(seed: str, host: str, dialled: str) -> None:
    assert advertised_host(seed, host) == dialled


def test_who_listens_everywhere_is_dialled_at_an_address_of_that_machine() -> None:
    assert [dialable_host(host, "10.0.0.7") for host in ("0.0.0.0", "::", "10.0.0.9")] == [
        "10.0.0.7",
        "10.0.0.7",
        "10.0.0.9",
    ]
    assert dialable_host("0.0.0.0") == "127.0.0.1"


def test_an_address_is_no_ticket() -> None:
    assert not any(map(is_ticket, ("seed", "seed:7337", "[::1]:7337", "127.0.0.1:1")))


@given(TICKETS, st.data())
def test_a_changed_character_gives_no_secret_away(ticket: Ticket, data: st.DataObject) -> None:
    address, _, body = str(ticket).partition("/")
    at = data.draw(st.integers(0, len(body) - 1))
    other = data.draw(st.sampled_from(sorted(set("AZaz09-_/.= é") - {body[at]})))
    told = ""
    try:
        Ticket.parse_untrusted(f"{address}/{body[:at]}{other}{body[at + 1 :]}")
    except ProtocolError as error:
        told = error.message + error.remedy
    assert not any(hint in told for hint in hidden_in(ticket.secret))


@pytest.mark.parametrize("head", [0x00, 0x20, 0x15, 0x1F, 0xF0])
def test_another_version_or_kind_is_told_so(head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from wire import address as module

    body = bytes([head]) + bytes(54)
    text = f"seed/{urlsafe_b64encode(body + module._checksum(body)).decode()}"
    with pytest.raises(ProtocolError, match=f"version {head >> 4}, role {head & 15}") as caught:
        Ticket.parse_untrusted(text)
    assert "same release" in caught.value.remedy


def test_the_secret_shows_in_the_ticket_itself_only() -> None:
    shown = f"{TICKET!r} {TICKET.pin!r} {TICKET.id}"
    assert not any(hint in shown for hint in hidden_in(SECRET))


# --------------------------------------------------------------------------------------------------------------- proofs


def test_a_proof_convinces_of_its_secret_nonce_and_request_only() -> None:
    mac = proof(SECRET, b"nonce", b"request")
    assert len(mac) == 32
    assert verify_proof(mac, secret=SECRET, nonce=b"nonce", csr_der=b"request")
    assert not verify_proof(mac, secret=bytes(16), nonce=b"nonce", csr_der=b"request")
    assert not verify_proof(mac, secret=SECRET, nonce=b"another", csr_der=b"request")
    assert not verify_proof(mac, secret=SECRET, nonce=b"nonce", csr_der=b"another")
    assert not verify_proof(mac, secret=SECRET, nonce=b"noncer", csr_der=b"equest")  # the parts have their places
    assert not verify_proof(b"", secret=SECRET, nonce=b"nonce", csr_der=b"request")
    assert not verify_proof(mac[:-1], secret=SECRET, nonce=b"nonce", csr_der=b"request")
