"""The privacy budget of a job: what its steps have spent of it, and when it is spent.

A *release* is a step for which the members may have sent contributions, whether or not it was committed: a step that
was aborted and is repeated gets new noise, so it counts twice. The job counts them: each member writes the count to its
disk before it contributes, and when a view begins all go on from the largest count of its members. So neither
newcomers, nor restarts, nor a return to an older checkpoint lower it. A checkpoint has the count, too, for workers that
go on from a copy of it.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache

from configs.schema import Privacy
from p2ptrain.core.checkpoints import Meta
from p2ptrain.core.disk import write_atomic
from p2ptrain.core.errors import ConfigError, StorageError
from p2ptrain.core.texts import install_command
from ring.session import RingSession
from roles.worker.checkpoint_store import CheckpointFiles

COUNT_FILE = "releases"
LEAST_NOISE = 1e-3  # with less the library does not converge; epsilon would be 500,000
_COUNT = struct.Struct("!Q")


@lru_cache(maxsize=64)
def epsilon_of(releases: int, noise: float, delta: float) -> float:
    """Epsilon at ``delta`` of so many releases: sums in which the part of one member, or one sequence, has L2 norm 1 at
    most, and Gaussian noise the standard deviation ``noise``.

    Nothing is gained by sampling: all members, or sequences, count as taking part in every step. Gaussian mechanisms
    compose to one whose noise is less by the root of their number, and for that the figure is exact (arXiv 1805.06530).
    """
    from dp_accounting import get_epsilon_gaussian  # brings scipy: only private jobs pay for it

    noise /= math.sqrt(max(releases, 1))
    if noise < LEAST_NOISE:
        return math.inf
    return float(get_epsilon_gaussian(noise, delta)) if releases else 0.0


class Budget:
    """``files``: the job's checkpoints; the count, ``releases``, is a file beside their directory.

    Attributes:
        epsilon, delta: what the releases have spent.
        noise_std: of the noise in the members' sum.
    """

    def __init__(self, settings: Privacy, files: CheckpointFiles) -> None:
        self._limit, self._noise, self.delta = settings.epsilon, settings.noise, settings.delta
        self.noise_std = settings.noise * settings.clip_norm
        self._files, self._path = files, files.root.parent / COUNT_FILE
        self.releases = 0
        self._lone_count = ""  # names the member that alone counts so many releases that the budget is spent

    @property
    def epsilon(self) -> float:
        return self._epsilon_after(self.releases)

    @property
    def is_due(self) -> bool:
        """Whether the budget allows at most one more release."""
        return self._epsilon_after(self.releases + 2) > self._limit

    @property
    def reason(self) -> str:
        return (
            f"stopped early: another step would spend more than privacy.epsilon = {self._limit:g}; the steps spent "
            f"{self.epsilon:.4g} at delta {self.delta:g}{self._lone_count}"
        )

    async def load(self) -> None:
        """Read the count. Raises ``ConfigError`` if the accountant is missing or the budget allows no step, and
        ``StorageError``."""
        self.releases = max(self.releases, await self._files.at_disk(self._read))

    def meta(self) -> Meta:
        return {COUNT_FILE: self.releases}

    def resume_from(self, meta: Meta) -> None:
        """Go on from a checkpoint's ``meta``, or from nothing."""
        count = meta.get(COUNT_FILE)
        if isinstance(count, int) and 0 < count < 2**63:  # another worker may have written it
            self.releases = max(self.releases, count)

    async def agree(self, session: RingSession, *, patience_s: float) -> None:
        """Agree with the other members. Raises as ``RingSession.all_gather``."""
        messages = await session.all_gather(_COUNT.pack(self.releases), patience_s=patience_s)
        counts = [_COUNT.unpack(message)[0] for message in messages]
        self.releases = max(session.view.step, *counts)
        *_, second, _ = sorted([0, session.view.step, *counts])
        self._lone_count = ""
        # Nobody can disprove what one member alone counts. The job stops all the same: to go on could reveal data.
        if self.is_due and self.releases in counts and self._epsilon_after(second + 2) <= self._limit:
            name = session.view.members[counts.index(self.releases)].name
            self._lone_count = (
                f". {name} alone counts {self.releases:,} steps, the others at most {second:,}: ask who runs it"
            )

    async def spend(self) -> bool:
        """Count a release before it is made. Returns whether the budget allows it; if not, it is not counted."""
        if self._epsilon_after(self.releases + 1) > self._limit:
            return False
        self.releases += 1
        await self._files.at_disk(self._write)
        return True

    def _epsilon_after(self, releases: int) -> float:
        return epsilon_of(releases, self._noise, self.delta)

    def _read(self) -> int:
        disk, path = self._files.disk, self._path
        try:
            least = self._epsilon_after(1)
        except ImportError as error:
            remedy = f"run: {install_command('privacy')}"
            raise ConfigError("privacy.epsilon needs the package dp-accounting", remedy=remedy) from error
        if least > self._limit:
            raise ConfigError(
                f"privacy.epsilon = {self._limit:g} allows no step: one spends {least:.4g} at delta {self.delta:g}",
                remedy="raise privacy.noise or privacy.epsilon",
            )
        if not disk.is_dir(path.parent) or path.name not in disk.list_dir(path.parent):
            return 0
        encoded = disk.read(path, max_bytes=_COUNT.size)
        if len(encoded) != _COUNT.size:
            raise StorageError(f"{path}, which counts what the job has spent of its privacy, is damaged")
        return int(_COUNT.unpack(encoded)[0])

    def _write(self) -> None:
        self._files.disk.make_dir(self._path.parent)
        write_atomic(self._files.disk, self._path, _COUNT.pack(self.releases))
