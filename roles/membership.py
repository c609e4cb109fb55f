"""What every member does beside its work: its certificate is renewed in time, and where the seeds are is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NoReturn

from p2ptrain.core.disk import Disk, write_atomic
from p2ptrain.core.errors import P2PTrainError, StorageError
from p2ptrain.core.threads import Thread
from roles.known_seeds import FILE_NAME, Known, text_of
from roles.seed_link import SeedLink
from wire.renewal import LOOK_S, Member

RENEWAL_S = 10.0
"""For the seed's answer: it writes the certificate down first, on a disk that may be busy."""

Notify = Callable[[str, str, str], None]
"""(level, kind, text)"""


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
