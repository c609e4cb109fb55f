"""What every member has beside its work: its link to the seed, its certificate, and where the seeds are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from p2ptrain.core.disk import Disk, write_atomic
from p2ptrain.core.errors import P2PTrainError, StorageError
from p2ptrain.core.threads import Thread
from p2ptrain.core.world import World
from roles.known_seeds import FILE_NAME, Known, begun, clusters_in, text_of
from roles.seed_link import Pulse, SeedLink
from wire.enrol import LOOK_S, Member
from wire.messages import Hello, Message, Welcome

RENEWAL_S = 10.0
"""For the seed's answer: it writes the certificate down first, on a disk that may be busy."""

Notify = Callable[[str, str, str], None]
"""(level, kind, text)"""


class Membership:
    """One member's link to its seed, and what keeps it a member: the certificate is renewed in time, and where the
    seeds are is kept, so that the member finds its cluster when it is started again, whoever leads then.

    Args:
        directory: of this member's state.
        seeds: host and port of the seed to join, and of those to try when it stays away.
        certificate: over which the world's network speaks; None in a plain cluster.
        tasks: where what it does beside runs; it is entered before the link's ``run``.
        thread: on which the disk is written.
        hello, pulse, on_message: as of ``SeedLink``.
        going_on: what goes on without the seed, for people; empty where nothing does.
        notify: of the person and the seed. tell: of the person alone.
        on_up: the link is there. on_known: more is known of the seeds, or another leads.

    Attributes:
        link: whose ``run`` is to be run.
    """

    def __init__(
        self,
        world: World,
        directory: Path,
        seeds: Sequence[tuple[str, int]],
        certificate: Member | None,
        *,
        tasks: asyncio.TaskGroup,
        thread: Thread,
        hello: Callable[[], Hello],
        pulse: Callable[[], Pulse],
        on_message: Callable[[Message], None],
        going_on: Callable[[], str],
        notify: Notify,
        tell: Notify,
        on_up: Callable[[Welcome], None],
        on_known: Callable[[], None] = lambda: None,
    ) -> None:
        self._world, self._directory, self._certificate = world, directory, certificate
        self._tasks, self._thread = tasks, thread
        self._going_on, self._notify, self._tell = going_on, notify, tell
        self._on_up, self._on_known = on_up, on_known
        self._renewing: asyncio.Task[NoReturn] | None = None
        self._clusters = clusters_in(world.disk, directory)
        self.link = SeedLink(
            world=world,
            known=begun(seeds, self._clusters),
            given=seeds,
            plain=certificate is None,
            hello=hello,
            pulse=pulse,
            on_message=on_message,
            on_up=self._up,
            on_down=self._down,
            on_known=self._known,
        )

    def end(self) -> None:
        """The member leaves: nothing is renewed any more."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    def _up(self, welcome: Welcome) -> None:
        if self._certificate is not None:
            staying = stay_a_member(self._certificate, self.link, self._notify)
            self._renewing = self._tasks.create_task(staying, name="certificate")
        self._tell("info", "joined", f"joined {welcome.name} ({welcome.cluster_id})")
        self._on_up(welcome)

    def _down(self, problem: P2PTrainError) -> None:
        self.end()
        going_on = self._going_on()
        text = f"lost the seed: {problem.message}; trying to find it again"
        self._notify("warning", "seed-lost", f"{text}; {going_on}" if going_on else text)

    def _known(self, known: Known) -> None:
        self._on_known()
        keeping = keep_seeds(
            known, self._clusters, self._directory, disk=self._world.disk, thread=self._thread, notify=self._notify
        )
        self._tasks.create_task(keeping, name="keep seeds")


async def stay_a_member(member: Member, link: SeedLink, notify: Notify) -> NoReturn:
    """Renew the certificate in time, while the link is up, until cancelled. There are hours to try again."""
    while True:
        try:
            await member.keep_fresh(partial(link.ask, timeout_s=RENEWAL_S))
        except P2PTrainError as problem:
            notify("warning", "certificate", f"the certificate is not renewed yet: {problem.message}")
            await asyncio.sleep(LOOK_S)


async def keep_seeds(
    known: Known, others: Iterable[Known], directory: Path, *, disk: Disk, thread: Thread, notify: Notify
) -> None:
    """Write them down in ``directory``, so that this member finds its cluster when it is started again."""
    data = text_of(known, others)
    try:
        await thread.submit(partial(write_atomic, disk, directory / FILE_NAME, data))
    except StorageError as problem:
        notify("warning", "seeds", f"where the seeds are is not kept: {problem.message}")
