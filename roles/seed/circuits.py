"""Circuits: the seed arranges connections between peers of which one cannot dial the other (``wire.circuits``).

A peer that cannot dial another one asks the seed for a circuit. The seed chooses the *meeting point*:

1. the caller, if the seed has dialled it;
2. the member that relays for the fewest pairs, of those that allow it and that the seed has dialled;
3. the seed.

A meeting point at which the ends did not meet is chosen last for this pair for ``AVOIDED_S``.

The first connection of a pair begins on a relay at once. Then its ends try in the background to connect directly. If
they can, later circuits of this pair try that first, and ``on_direct`` is called. What is known of a pair is forgotten
when one of its ends has a new link to the seed, because it may be in another network. So a member that slept, or that
came to another network, begins anew.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from p2ptrain.core.errors import Refused
from p2ptrain.core.world import World
from roles.circuits import RELAYS
from roles.seed.peers import ConnectedPeer, PeerTable
from wire.circuits import CircuitNetwork
from wire.connection import Connection
from wire.messages import ANSWERER, CALLER, RELAYED, WAYS, Circuit, CircuitOffer, CircuitOrder

LIVES_S = 20.0
"""Time from the order of a circuit until both ends must be at the meeting point."""
AVOIDED_S = 600.0
"""Long: a caller that the seed dials in its own network may be out of the answerer's reach for ever."""
MAX_ORDERS = 512
"""Circuits of one caller within ``LIVES_S``: it measures its links, and a ring forms again more than once."""
MAX_PAIRS = 1 << 14
SEED = ""
"""The seed as a meeting point, beside the ids of peers."""


@dataclass(slots=True)
class PairPath:
    """What the seed knows of the path between two peers.

    Attributes:
        relay: the third peer that is its meeting point; empty: none, or the seed.
        is_direct: whether the ends can connect directly; None: not tried.
        avoided: meeting points at which the ends did not meet → until when all others are preferred.
    """

    relay: str = ""
    is_direct: bool | None = None
    avoided: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class OrderedCircuit:
    """A circuit, until ``LIVES_S`` after its order. ``point``: the meeting point. ``is_made``: its caller has reported
    its way. Later it may report only that it failed."""

    caller: str
    answerer: str
    point: str
    until: float
    trial: bool
    is_made: bool = False


class CircuitBroker:
    """See the module's docstring.

    Args:
        circuits: relays at the seed; None: the seed is no relay.
        on_direct: called with the ids of two peers whose circuits were relayed and need not be.
    """

    def __init__(
        self,
        world: World,
        peers: PeerTable,
        circuits: CircuitNetwork | None,
        on_direct: Callable[[frozenset[str]], None],
    ) -> None:
        self._world, self._peers, self._circuits = world, peers, circuits
        self._on_direct = on_direct
        self._paths: dict[frozenset[str], PairPath] = {}
        self._orders: dict[str, OrderedCircuit] = {}  # by circuit; the oldest first
        self._ordered: Counter[str] = Counter()  # how many of them each caller has

    def forget(self, peer_id: str) -> None:
        """Forget a peer's paths: its link to the seed has ended."""
        for ends in [ends for ends in self._paths if peer_id in ends]:
            del self._paths[ends]

    async def open(self, params: dict[str, Any], connection: Connection) -> dict[str, Any]:
        """Answer ``circuits.open``: the caller wants to reach ``peer``. Raises ``Refused``."""
        caller_id, caller = self._caller_at(connection)
        answerer = self._peers.connected.get(str(params.get("peer")))
        if answerer is None or answerer is caller:
            raise Refused("unknown-peer", "it is not connected to the seed", remedy="see p2ptrain peers list")
        now = self._world.clock.now()
        self._expire(now)
        if self._ordered[caller_id] >= MAX_ORDERS:
            text = f"this peer asked for {MAX_ORDERS} circuits in {LIVES_S:g} s"
            raise Refused("too-many", text, remedy="try again soon")
        path = self._path_of(caller_id, answerer.id)
        origin = str(connection.ends.remote[0])
        points = [caller.id] if caller is not None and _is_dialled_by(caller, answerer.origin) else []
        points += self._relays(caller_id, answerer, origin)
        points += [SEED] * (self._circuits is not None)
        point = min(points, key=lambda point: max(path.avoided.get(point, now), now), default=None)
        if point is None:
            text = "no member that both can reach relays for others, and neither does the seed"
            raise Refused(
                "no-relay", text, remedy="join from a machine with an open port, or start the seed with --relay"
            )
        # An operator has no link over which a trial could be ordered: its circuits try until they fail once.
        tries = path.is_direct is not False if caller is None else bool(path.is_direct)
        circuit = self._order(caller_id, answerer, point, now, tries_direct=tries and point != caller_id)
        return {"circuit": circuit.to_map()}

    async def open_here(self, peer_id: str) -> Circuit:
        """A circuit from the seed to a peer, which dials the seed for it. Raises ``Refused``."""
        answerer = self._peers.connected.get(peer_id)
        if answerer is None:
            raise Refused("unknown-peer", "it is not connected to the seed", remedy="see p2ptrain peers list")
        circuit = Circuit(self._world.entropy(32).hex(), "seed", peer_id, CALLER)
        answerer.send(CircuitOffer(replace(circuit, side=ANSWERER, relay="the seed")))
        return circuit

    async def made(self, params: dict[str, Any], connection: Connection) -> dict[str, Any]:
        """Answer ``circuits.made``: the caller reports the ``way`` of its ``circuit``; empty: the ends did not meet."""
        circuit_id, way = str(params.get("circuit")), params.get("way")
        order = self._orders.get(circuit_id)
        if order is None or order.caller != self._caller_at(connection)[0] or way not in ("", *WAYS):
            return {}
        if not (order.is_made and way):
            order.is_made = True
            self._take_result(order, str(way))
        return {}

    def _take_result(self, order: OrderedCircuit, way: str) -> None:
        ends = frozenset((order.caller, order.answerer))
        path, connected = self._paths.get(ends), self._peers.connected
        if path is None:
            return
        if order.trial:
            path.is_direct = way not in ("", RELAYED)
            if path.is_direct:
                self._on_direct(ends)
            return
        if not way:
            path.avoided[order.point] = self._world.clock.now() + AVOIDED_S
            return
        if way != RELAYED:
            path.relay = ""
            return
        path.relay = order.point
        is_first, path.is_direct = path.is_direct is None, False  # until a trial shows that it is
        caller, answerer = connected.get(order.caller), connected.get(order.answerer)
        if is_first and caller is not None and answerer is not None:
            now = self._world.clock.now()
            trial = self._order(caller.id, answerer, order.point, now, tries_direct=True, trial=True)
            caller.send(CircuitOffer(trial, trial=True))

    def _order(
        self,
        caller_id: str,
        answerer: ConnectedPeer,
        point: str,
        now: float,
        *,
        tries_direct: bool,
        trial: bool = False,
    ) -> Circuit:
        """Order a circuit of the answerer and of the relay. Returns the caller's side of it."""
        circuit_id, ends = self._world.entropy(32).hex(), [caller_id, answerer.id]
        relay, name = self._peers.connected.get(point), ""
        if point == SEED and self._circuits is not None:
            name = "the seed"
            self._circuits.expect_circuit(circuit_id, lives_s=LIVES_S, peers=ends)
        elif relay is not None and point != caller_id:
            name = relay.name
            relay.send(CircuitOrder(circuit_id, LIVES_S, ends))
        self._ordered[caller_id] += 1
        self._orders[circuit_id] = OrderedCircuit(caller_id, answerer.id, point, now + LIVES_S, trial)
        circuit = Circuit(circuit_id, caller_id, answerer.id, CALLER, relay=name, tries_direct=tries_direct)

        located = circuit if relay is None else replace(circuit, host=relay.host, port=relay.port)
        answerer.send(CircuitOffer(replace(located, side=ANSWERER), trial=trial))
        return circuit if point == caller_id else located

    def _relays(self, caller_id: str, answerer: ConnectedPeer, origin: str) -> list[str]:
        """Members that both ends can dial, as far as the seed knows, with the fewest pairs first."""
        pairs = Counter(path.relay for path in self._paths.values())
        able = [
            peer
            for peer in self._peers.connected.values()
            if peer.hello.capabilities.get(RELAYS) is True and peer.id not in (caller_id, answerer.id)
            if _is_dialled_by(peer, origin) and _is_dialled_by(peer, answerer.origin)
        ]
        return [peer.id for peer in sorted(able, key=lambda peer: (pairs[peer.id], peer.joined_at))]

    def _path_of(self, caller_id: str, answerer_id: str) -> PairPath:
        path = self._paths.setdefault(frozenset((caller_id, answerer_id)), PairPath())
        if len(self._paths) > MAX_PAIRS:
            del self._paths[next(iter(self._paths))]
        return path

    def _expire(self, now: float) -> None:
        while self._orders and (order := self._orders[next(iter(self._orders))]).until <= now:
            del self._orders[next(iter(self._orders))]
            self._ordered[order.caller] -= 1
            if not self._ordered[order.caller]:
                del self._ordered[order.caller]

    def _caller_at(self, connection: Connection) -> tuple[str, ConnectedPeer | None]:
        """The id of who asks over this connection, and the peer; None: it is an operator, whom nobody dials."""
        peer = next((peer for peer in self._peers.connected.values() if peer.connection is connection), None)
        identity = connection.ends.identity
        return (peer.id if peer is not None else identity.peer_id if identity is not None else "operator"), peer


def _is_dialled_by(peer: ConnectedPeer, origin: str) -> bool:
    """Whether a peer can be dialled, as far as the seed knows, by one that the seed sees at ``origin``."""
    here, there = _family(peer.host), _family(origin)
    return peer.is_dialled and (here == there or not (here and there))


def _family(host: str) -> int:
    """4 or 6; 0 of a name and of the loopback, where the seed is: they may be reached by both."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return 0
    return 0 if address.is_loopback else address.version
