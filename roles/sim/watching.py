"""How the simulator looks into the product, and takes the chance out of it: patches of classes, for the time of a run.

The product has no hooks for this, and needs none.
"""

from __future__ import annotations

import hashlib
import random
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.core.checkpoints import CheckpointStore
from ring.transaction import Followed, Phase, Transaction
from roles import gauges
from roles.seed import backup
from roles.seed.store import Records
from roles.seed_link import SeedLink
from roles.sim.engine import bits_of
from roles.sim.loop import PROCESS
from roles.strategies.sync import SyncStrategy
from roles.worker.checkpoint_store import CheckpointFiles
from wire.job_messages import CheckpointSaved

if TYPE_CHECKING:
    from roles.sim.cluster import Machine, Simulation


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``owner.name`` is ``make(what it was)`` within the block."""
    before = owner.__dict__[name]
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def watched(simulation: Simulation, names: random.Random) -> Iterator[None]:
    """Tell the simulation's observer of everything, and make random names, and nothing else, from ``names``."""
    observer = simulation.observer

    def here() -> Machine | None:
        process = PROCESS.get()
        return simulation.machines.get(process.host) if process is not None and process.alive else None

    def stage_of(path: Path) -> int | None:
        """Whose checkpoints lie there; None: those of all stages of a split model."""
        found = re.search(r"/stage-(\d+)-of-", str(path))
        return int(found[1]) if found else None if observer.stages > 1 else 0

    def handle(original: Any) -> Any:
        def call(self: Transaction, event: Any) -> Any:
            before, view, healing = (self.applied, self.lineage), self.view, self.phase is Phase.HEALING
            result = original(self, event)
            if (self.applied, self.lineage) != before:
                machine = here()
                if machine is not None:  # what it is given it did not commit, be it one step that it lacked
                    given = healing or isinstance(event, Followed)
                    observer.moved(machine, self, None if given else view, before)
            return result

        return call

    def add_view(original: Any) -> Any:
        def call(self: Records, view: Any, *rest: Any, restored: bool, **more: Any) -> Any:
            original(self, view, *rest, restored=restored, **more)
            observer.minted(view, restored)

        return call

    def add_checkpoint(original: Any) -> Any:
        def call(self: Records, checkpoint: Any, *rest: Any) -> None:
            original(self, checkpoint, *rest)
            observer.recorded(checkpoint.step, checkpoint.digest)

        return call

    def keep_copy(original: Any) -> Any:
        def call(disk: Any, directory: Any, data: bytes) -> None:
            original(disk, directory, data)
            simulation.copies.append((observer.line.generation, data))

        return call

    def save_job(original: Any) -> Any:
        def call(self: Records, job: Any) -> Any:
            original(self, job)
            if job.state != observer.job_state:
                observer.job_state = job.state
                observer.tell(f"the job is {job.state} ({job.reason})")
                simulation.job_changed.set()

        return call

    def write_manifest(original: Any) -> Any:
        def call(self: Any, directory: Any, step: int, meta: Any, sums: Any) -> bytes:
            encoded: bytes = original(self, directory, step, meta, sums)
            machine = here()
            if machine is not None:
                states = sorted(name for name in sums if name.endswith(".bin"))  # of a whole in parts: by stage
                bits = [bits_of(self._disk.read(directory / name, max_bytes=1 << 20)) for name in states]
                observer.saved(machine, step, hashlib.sha256(encoded).hexdigest(), meta, bits)
            return encoded

        return call

    def remove(original: Any) -> Any:
        def call(self: Any, path: Any) -> None:
            original(self, path)
            machine = here()
            if machine is not None:
                kept = machine.announced if stage_of(path) is not None else machine.wholes
                kept.pop(int(path.name.rpartition("-")[2]), None)

        return call

    def verify(original: Any) -> Any:
        async def call(self: CheckpointFiles, step: int) -> Any:
            found = await original(self, step)
            machine = here()
            stage = stage_of(self._root)
            if machine is not None and stage is not None:  # what stages take of a whole may find no room
                observer.promised(machine, stage, step)
            return found

        return call

    def load(original: Any) -> Any:
        async def call(self: CheckpointFiles, *rest: Any, restore_step: int, **more: Any) -> Any:
            found = await original(self, *rest, restore_step=restore_step, **more)
            machine = here()
            if machine is not None:
                observer.loaded(machine, found[3], restore_step)
            return found

        return call

    def send(original: Any) -> Any:
        def call(self: SeedLink, message: Any) -> None:
            machine = here()
            if isinstance(message, CheckpointSaved) and machine is not None:
                observer.announced(machine, message.step, message.digest)
            original(self, message)

        return call

    def summarize(original: Any) -> Any:
        def call(self: SyncStrategy, rank: int, size: int, *rest: Any) -> Any:
            machine = here()
            if machine is not None and machine.flips and size > 1:  # alone, nobody could notice
                memory = self._engine.reduce_buffer.view("u1")
                memory[machine.flips % memory.size] ^= 1  # of a part there is less
                machine.flips = 0
            return original(self, rank, size, *rest)

        return call

    with ExitStack() as stack:
        for owner, name, make in (
            (Transaction, "handle", handle),
            (Records, "add_view", add_view),
            (Records, "save_job", save_job),
            (Records, "add_checkpoint", add_checkpoint),
            (CheckpointStore, "_write_manifest", write_manifest),
            (CheckpointStore, "_remove", remove),
            (CheckpointFiles, "load", load),
            (CheckpointFiles, "verify", verify),
            (SeedLink, "send", send),
            (backup, "keep_copy", keep_copy),
            (SyncStrategy, "_summarize", summarize),
            (secrets, "token_hex", lambda original: lambda number=32: names.randbytes(number).hex()),
            (secrets, "token_bytes", lambda original: lambda number=32: names.randbytes(number)),
            (gauges.Gauges, "machine", lambda original: lambda self: {"memory_bytes": 1e8, "memory_total_bytes": 1e10}),
            (gauges, "_gpu_reader", lambda original: lambda: None),
        ):
            stack.enter_context(replaced(owner, name, make))
        yield
