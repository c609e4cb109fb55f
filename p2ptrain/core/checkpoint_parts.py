"""The checkpoints of a split model's stages, put together: one directory that holds the whole model.

Each stage saves a directory of its own. Their files have names of their own, and those that describe the whole model
are the first stage's, so together they are a checkpoint as one process writes it, in several files.
"""

from __future__ import annotations

import re

from p2ptrain.core.checkpoints import CheckpointEntry, Meta
from p2ptrain.core.errors import StorageError

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
    return {key: value for key, value in meta.items() if key not in (STAGE, STAGES)}


def is_part(entry: CheckpointEntry) -> bool:
    return entry.meta.get(STAGES) is not None
