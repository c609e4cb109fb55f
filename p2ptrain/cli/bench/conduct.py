"""What the benchmarks with members have in common: from starting them to what holds them together."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.cli.bench.members import START_S, Interrupted, Members, started
from p2ptrain.cli.bench.plan import peer_id
from p2ptrain.cli.stopping import stoppable

Progress = Callable[[str], None]
Work = Callable[[Members, Progress], Awaitable[None]]


async def conduct(count: int, threads: int, work: Work) -> bool:
    """Start members, do the ``work``, end them. Whether it came to its end; Ctrl+C is the other way.

    Raises ``P2PTrainError``.
    """
    console, stop = stoppable()
    try:
        console.progress(f"starting {count} members")
        async with started(count, stop, threads=threads) as members:
            await work(members, console.progress)
    except Interrupted:
        return False
    finally:
        console.finish()
    return True


@dataclass(frozen=True, slots=True)
class Ring:
    """How the members' ring is made.

    Attributes:
        link: preset of an emulated link; empty for the loopback as it is.
        sub_chunk_bytes: 0 where the session chooses.
        codec: how elements travel; see ``ring.codecs``.
    """

    link: str = ""
    tls: bool = False
    streams: int = 1
    sub_chunk_bytes: int = 0
    codec: str = "fp32"

    @property
    def described(self) -> str:
        """For a title."""
        place = f"the emulated link {self.link}" if self.link else "the loopback"
        streams = f" · {self.streams} streams" if self.streams > 1 else ""
        return f"{place} · {'TLS 1.3' if self.tls else 'plain TCP'} · {self.codec}{streams}"

    @property
    def lossy(self) -> bool:
        """Whether elements travel in fewer bits than they have."""
        return self.codec != "fp32"


class Stage:
    """The members, their ring, and what stands beside it. Made before the first order; ``close`` removes its files."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self._secrets: tempfile.TemporaryDirectory[str] | None = None
        self._directories: list[Path] = []

    def close(self) -> None:
        if self._secrets is not None:
            self._secrets.cleanup()

    async def form(self, ring: Ring) -> None:
        """Bring the members together in a ring."""
        each = [{"credentials": path} for path in self._credentials(ring.tls)]
        answers = await self.members.all("listen", link=ring.link, each=each)
        ports = [answer["port"] for answer in answers]
        await self.members.all(
            "form", ports=ports, sub_chunk_bytes=ring.sub_chunk_bytes, streams=ring.streams, codec=ring.codec
        )

    async def sockets(self, name: str, *, tls: bool) -> list[str]:
        """Plain sockets of this name round the ring; the programs that can use them."""
        each = [{"credentials": path} for path in self._credentials(tls)]
        answers = await self.members.all("listen plainly", name=name, each=each)
        ports = [answer["port"] for answer in answers]
        methods: list[str] = (await self.members.all("connect plainly", name=name, ports=ports))[0]["methods"]
        return methods

    async def gloo(self, timeout_s: float) -> tuple[str, str]:
        """Open a Gloo group: torch's version, and why there is none (empty where there is)."""
        first, *_ = await self.members.all("open gloo", timeout_s=timeout_s, seconds=START_S / 20)
        if first["missing"]:
            return first["torch"], first["missing"]
        await self.members.all("join gloo", store_port=first["store_port"], timeout_s=timeout_s)
        return first["torch"], ""

    def _credentials(self, tls: bool) -> list[str]:
        """Each member's directory, made once; empty names without TLS."""
        if not tls:
            return [""] * len(self.members)
        if self._secrets is None:
            from p2ptrain.cli.bench.secure import make_credentials

            self._secrets = tempfile.TemporaryDirectory(prefix="p2ptrain-bench-")
            names = [peer_id(rank) for rank in range(len(self.members))]
            self._directories = make_credentials(Path(self._secrets.name), names)
        return [str(path) for path in self._directories]
