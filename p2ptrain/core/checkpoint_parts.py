"""The checkpoints of a split model's stages, put together: one directory that holds the whole model.

Each stage saves a directory of its own. Their files have names of their own, and those that describe the whole model
are the first stage's, so together they are a checkpoint as one process writes it, in several files.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from p2ptrain.core.checkpoints import MANIFEST, CheckpointEntry, CheckpointStore, Meta, read_checkpoint
from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.core.training import BlobRange, FilePlan

STAGE, STAGES, LINEAGE = "stage", "stages", "lineage"
"""Keys of a part's meta: whose it is, of how many, and of which state of the whole model."""


_OF_STAGE = re.compile(r".*-(\d{5})-of-(\d{5})\.\w+")


def is_of_stage(name: str, stage: int, stages: int) -> bool:
    """Whether a file is that stage's: ``model-00002-of-00003.safetensors`` is the second's, what bears no such mark
    describes the whole model, and is the first stage's."""
    mark = _OF_STAGE.fullmatch(name)
    return (int(mark[1]), int(mark[2])) == (stage + 1, stages) if mark is not None else stage == 0


def part_of(entry: CheckpointEntry, stage: int, stages: int) -> tuple[Meta, dict[str, tuple[int, str]]]:
    """Meta and files of one stage, of its own checkpoint or of one of the whole model. Raises ``StorageError``."""
    if is_part(entry) and (entry.meta.get(STAGE), entry.meta.get(STAGES)) != (stage, stages):
        raise StorageError(f"{entry.path} is not of stage {stage} of {stages}")
    files = {name: facts for name, facts in entry.files.items() if is_of_stage(name, stage, stages)}
    if not files:
        raise StorageError(f"{entry.path} has no files of stage {stage} of {stages}")
    return entry.meta | {STAGE: stage, STAGES: stages}, files


def of_the_whole(meta: Meta) -> Meta:
    """What the first stage's meta says, without that it is of a stage."""
    return {key: value for key, value in meta.items() if key not in (STAGE, STAGES)}


def is_part(entry: CheckpointEntry) -> bool:
    """Whether a checkpoint is that of one stage of several."""
    return entry.meta.get(STAGES) is not None


def parts_below(disk: Disk, places: Sequence[Path]) -> list[CheckpointEntry]:
    """The parts in these directories, and anywhere below them. What cannot be read is passed over."""
    found: dict[Path, CheckpointEntry] = {}
    for place in places:
        for manifest in sorted([*place.rglob(MANIFEST), place / MANIFEST]):
            path = manifest.parent.resolve()
            try:
                entry = read_checkpoint(disk, path)
            except StorageError:
                continue
            if is_part(entry):
                found[path] = entry
    return list(found.values())


def choose(
    parts: Sequence[CheckpointEntry],
    *,
    job: str = "",
    step: int | None = None,
    is_good: Callable[[CheckpointEntry], bool] = lambda part: True,
) -> list[CheckpointEntry]:
    """One part of each stage, all of one state: of ``step``, or of the newest that is whole.

    Args:
        job: only that job's; empty: of whichever.
        is_good: of a part, whether it may be taken; asked of those that would be. Another worker may have the same.

    Raises:
        UserError: there is none; what is missing is named.
    """
    states: dict[tuple[int, object], dict[int, list[CheckpointEntry]]] = {}
    for part in parts:
        index = part.meta.get(STAGE)
        if isinstance(index, int) and step in (None, part.step) and job in ("", part.meta.get("job")):
            states.setdefault((part.step, part.meta.get(LINEAGE)), {}).setdefault(index, []).append(part)
    for _, found in sorted(states.items(), key=lambda item: item[0][0], reverse=True):
        count = next(iter(found.values()))[0].meta.get(STAGES)
        if isinstance(count, int) and set(found) == set(range(count)):
            for index in range(count):
                found[index] = [part for part in found[index] if is_good(part)][:1]
            if all(found.values()):
                return [found[index][0] for index in range(count)]
    which = "" if step is None else f" of step {step}"
    if not states:
        raise UserError(f"no stage's checkpoint{which} lies there", remedy="`p2ptrain checkpoints list` shows them")
    (newest, _), found = max(states.items(), key=lambda item: item[0][0])
    there = ", ".join(str(index) for index in sorted(found) if found[index]) or "none"
    raise UserError(
        f"no step has the checkpoints of all stages{which}: of step {newest} there are those of stage {there} alone",
        remedy="copy the others here first: `p2ptrain checkpoints list` shows on which machines they lie",
    )


def gather(disk: Disk, parts: Sequence[CheckpointEntry], root: Path) -> CheckpointEntry:
    """Write the whole model's checkpoint below ``root``, from one part of each stage. Every byte is verified.

    Raises:
        ResourceError: less is free than the files take.
        StorageError: a part is damaged, or something cannot be written; there is no new checkpoint then.
    """
    names = [name for part in parts for name in part.files]
    if len(set(names)) != len(names):
        raise StorageError(f"{parts[0].path} and another part have files of the same name")
    first = parts[0]
    store = CheckpointStore(disk, root, keep=_ALL)
    for part in parts:
        store.verify(part)
    meta = of_the_whole(first.meta)
    with _contents(parts) as blobs:
        files = [
            FilePlan(name, (BlobRange(name, 0, size),)) for part in parts for name, (size, _) in part.files.items()
        ]
        written = store.write(first.step, files, blobs, meta)
    if written.files != {name: facts for part in parts for name, facts in part.files.items()}:
        store.delete(first.step)
        raise StorageError("a part has changed while it was read", remedy="try again")
    return written


_ALL = 1 << 31
"""Of other steps gathered to the same place none is removed."""


@contextmanager
def _contents(parts: Sequence[CheckpointEntry]) -> Iterator[Mapping[str, memoryview]]:
    with ExitStack() as stack:
        blobs: dict[str, memoryview] = {}
        for part in parts:
            for name, (size, _) in part.files.items():
                try:
                    file = stack.enter_context((part.path / name).open("rb"))
                    whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
                except (OSError, ValueError) as error:
                    raise StorageError(f"cannot read {part.path / name}: {error}") from error
                if isinstance(whole, mmap.mmap):
                    stack.callback(whole.close)
                blobs[name] = memoryview(whole)
                stack.callback(blobs[name].release)  # before that: callbacks run in the reverse order
        yield blobs
