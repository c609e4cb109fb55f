"""Homes, their routers and the Internet between them, in network namespaces of this machine. Needs root and nft.

    with Internet() as net:
        seed = net.machine("seed")                                  # has a public address
        home = net.machine("home", router="keeps ports")            # 192.168.1.2 behind a router that masquerades
        shut = net.machine("shut", firewall=True)                   # public, lets in only what answers
        six = net.machine("six", ipv4=False, ipv6=True)
        future = home.run(lambda: main(seed.address))               # in a thread with a loop of its own
        subprocess.Popen(home.command("p2ptrain", "join", ...))     # a process there

Routers: ``keeps ports`` maps each connection to its own port; ``symmetric`` to a random one for each destination;
``double`` is two of the first kind, one behind the other. All drop what comes in unasked, as home routers do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import itertools
import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

MASQUERADES = {"keeps ports": "masquerade", "symmetric": "masquerade fully-random", "double": "masquerade"}
_CLONE_NEWNET = 0x40000000
_NUMBERS = itertools.count(1)


def why_not() -> str:
    """Why this machine cannot make namespaces with routers; empty if it can."""
    if not hasattr(os, "geteuid") or os.geteuid():
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (Debian: apt install iproute2 nftables)"
    try:
        with Internet() as net:
            net.machine("probe", router="keeps ports")
    except subprocess.CalledProcessError as error:
        return f"this kernel or container does not allow it: {error.stderr.strip()[-200:]}"
    return ""


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where ``Internet`` cannot be made."""
    if reason := why_not():
        pytest.skip(reason)


@dataclass(eq=False)
class Machine:
    """A host with a network namespace of its own.

    Attributes:
        address: its own number, to be dialled on its network. public: the number that others see.
        gateways: namespaces of its routers, the nearest first.
    """

    name: str
    namespace: str
    address: str
    public: str
    address6: str = ""
    gateways: list[str] = field(default_factory=list)

    def command(self, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *argv]

    def do(self, command: str) -> str:
        return _do(f"ip netns exec {self.namespace} {command}")

    def run(self, main: Callable[[], Coroutine[Any, Any, Any]], *, timeout_s: float = 60.0) -> Any:
        """Run ``main`` on a new loop, in a thread that is on this machine. Returns a ``concurrent.futures.Future``."""
        result: concurrent.futures.Future[Any] = concurrent.futures.Future()

        async def bounded() -> Any:
            async with asyncio.timeout(timeout_s):
                return await main()

        def work() -> None:
            try:
                with Path("/run/netns", self.namespace).open() as file:
                    if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")
                result.set_result(asyncio.run(bounded()))
            except BaseException as error:  # noqa: BLE001 - for the thread that waits for the result
                result.set_exception(error)

        threading.Thread(target=work, name=self.name, daemon=True).start()
        return result

    def limit(self, mbit: float) -> None:
        """Limit what it sends; packets wait up to 100 ms."""
        self.do(f"tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 64kb latency 100ms")


class Internet:
    """A bridge with public addresses, 203.0.113.0/24 and 2001:db8:113::/64, and the machines on it."""

    def __init__(self) -> None:
        self._prefix = f"p2p{os.getpid()}-{next(_NUMBERS)}"
        self._namespaces: list[str] = []
        self._numbers = itertools.count(1)
        self._homes, self._mates = itertools.count(1), itertools.count(3)
        self._bridge = ""

    def __enter__(self) -> Internet:
        try:
            self._bridge = self._namespace("net")
            self._do(self._bridge, "ip link add name br0 type bridge", "ip link set br0 up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in self._namespaces:
            with suppress(subprocess.CalledProcessError):
                _do(f"ip netns del {namespace}")

    def machine(
        self,
        name: str,
        *,
        router: str = "",
        firewall: bool = False,
        rejects: bool = False,
        ipv4: bool = True,
        ipv6: bool = False,
        home: Machine | None = None,
    ) -> Machine:
        """Add a machine.

        Args:
            router: a kind of ``MASQUERADES``; empty: it is on the Internet itself.
            firewall: lets in only what answers, on its own addresses.
            rejects: its router or firewall answers what it does not let in with a reset, instead of dropping it.
            home: share this machine's network behind its router.
        """
        namespace = self._namespace(name)
        if home is not None:
            network, number = home.address.rpartition(".")[0], next(self._mates)
            address, public = f"{network}.{number}", home.public
            self._link(home.gateways[0], f"lan{number}", namespace, "eth0")
            self._do(home.gateways[0], f"ip link set lan{number} master lan up")
            self._do(namespace, f"ip addr add {address}/24 dev eth0", f"ip route add default via {network}.1")
            return Machine(name, namespace, address, public, gateways=home.gateways)
        made = Machine(name, namespace, "", "")
        if router:
            outer, made.public = self._router(f"{name}-r", router, self._attach, rejects)
            made.gateways = [outer]
            if router == "double":
                inner, _ = self._router(f"{name}-r2", router, partial(self._behind, outer), rejects)
                made.gateways = [inner, outer]
            made.address = self._behind(made.gateways[0], namespace, "eth0")
        elif ipv4:
            made.address = made.public = self._attach(namespace, "eth0")
        if ipv6:
            made.address6 = self._attach(namespace, "eth6", ipv6=True)
            made.address, made.public = made.address or made.address6, made.public or made.address6
        if firewall:
            self._shut(namespace, "iifname != lo", rejects)
        return made

    def _router(self, name: str, kind: str, attach: Callable[[str, str], str], rejects: bool) -> tuple[str, str]:
        gateway = self._namespace(name)
        public = attach(gateway, "wan")
        self._do(gateway, "sysctl -qw net.ipv4.ip_forward=1", "ip link add name lan type bridge", "ip link set lan up")
        self._do(gateway, f"ip addr add 192.168.{next(self._homes)}.1/24 dev lan")
        chain = "'add chain ip nat out { type nat hook postrouting priority srcnat ; }'"
        rule = f"add rule ip nat out oifname wan {MASQUERADES[kind]}"
        self._do(gateway, "nft add table ip nat", f"nft {chain}", f"nft {rule}")
        self._shut(gateway, "iifname wan", rejects)
        return gateway, public

    def _behind(self, gateway: str, namespace: str, link: str) -> str:
        """Connect to a router's home network. Returns the address there."""
        shown = self._do(gateway, "ip -4 -o addr show dev lan").split()
        network = shown[3].rpartition(".")[0]
        self._link(gateway, "lan2", namespace, link)
        self._do(gateway, "ip link set lan2 master lan up")
        self._do(namespace, f"ip addr add {network}.2/24 dev {link}", f"ip route add default via {network}.1")
        return f"{network}.2"

    def _attach(self, namespace: str, link: str, *, ipv6: bool = False) -> str:
        """Connect to the Internet. Returns the public address."""
        number = next(self._numbers)
        self._link(self._bridge, f"port{number}", namespace, link)
        self._do(self._bridge, f"ip link set port{number} master br0 up")
        if ipv6:
            address = f"2001:db8:113::{number:x}"
            self._do(namespace, f"ip -6 addr add {address}/64 dev {link} nodad", f"ip -6 route add default dev {link}")
        else:
            address = f"203.0.113.{number}"
            self._do(namespace, f"ip addr add {address}/24 dev {link}", f"ip route add default dev {link}")
        return address

    def _link(self, one: str, its_name: str, other: str, other_name: str) -> None:
        _do(f"ip link add name {its_name} netns {one} type veth peer name {other_name} netns {other}")
        self._do(other, f"ip link set {other_name} up")

    def _shut(self, namespace: str, match: str, rejects: bool) -> None:
        """Keep out what matches and comes in unasked."""
        verdict = "reject with tcp reset" if rejects else "drop"
        self._do(namespace, "nft add table inet shut")
        for hook in ("input", "forward"):
            chain = f"'add chain inet shut {hook} {{ type filter hook {hook} priority filter ; }}'"
            self._do(
                namespace,
                f"nft {chain}",
                f"nft add rule inet shut {hook} ct state established,related accept",
                f"nft add rule inet shut {hook} meta l4proto ipv6-icmp accept",
                f"nft add rule inet shut {hook} ct state invalid drop",
                f"nft add rule inet shut {hook} {match} meta l4proto tcp {verdict}",
                f"nft add rule inet shut {hook} {match} drop",
            )

    def _namespace(self, name: str) -> str:
        namespace = f"{self._prefix}-{name}"
        _do(f"ip netns add {namespace}")
        self._namespaces.append(namespace)
        self._do(namespace, "ip link set lo up", "sysctl -qw net.ipv6.conf.default.accept_dad=0")
        return namespace

    def _do(self, namespace: str, *commands: str) -> str:
        said = ""
        for command in commands:
            said = _do(f"ip netns exec {namespace} {command}")
        return said


def _do(command: str) -> str:
    """Run ``command``. Raises ``CalledProcessError``."""
    return subprocess.run(shlex.split(command), check=True, capture_output=True, text=True).stdout
