"""The training state of a member's part, in memory and in the files of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from p2ptrain.compute.checkpoint_files import PARAMETERS, CheckpointPlanner, CheckpointReader
from p2ptrain.compute.fedex import ExactAverage
from p2ptrain.compute.recipe import BuiltPart, ModelRecipe
from p2ptrain.compute.update import StepUpdate
from p2ptrain.core.training import Blob, FilePlan


class TrainingState:
    """Implements ``roles.engine.EngineState``, which documents the methods.

    Args:
        corpus: digest of the corpus; empty if the text is private.

    Attributes:
        changes: how often the state has changed.
    """

    def __init__(self, recipe: ModelRecipe, built: BuiltPart, update: StepUpdate, corpus: str) -> None:
        self._recipe, self._built, self._update = recipe, built, update
        merged = update.places if isinstance(update, ExactAverage) else {}
        self._planner = CheckpointPlanner(recipe, built, corpus, merged)
        self._reader = CheckpointReader(recipe, built)
        self._mirrors: list[tuple[Tensor, Tensor]] = []  # (array on a GPU, its copy from blobs())
        self._is_initial = True
        self.changes = 0

    def arrays(self) -> dict[str, Tensor]:
        """The parameters that train, and what else the update shares, such as AdamW's moments."""
        return {PARAMETERS: self._built.flat.parameters, **self._update.shared}

    def blobs(self) -> list[Blob]:
        """On a GPU these are fresh host copies; ``refresh`` copies them back."""
        arrays = self.arrays()
        if self._recipe.is_on_host:
            return [blob_of(name, array) for name, array in arrays.items()]
        self._mirrors = [(array, array.to("cpu", copy=True)) for array in arrays.values()]
        return [blob_of(name, host) for name, (_, host) in zip(arrays, self._mirrors, strict=True)]

    def refresh(self, step: int) -> None:
        for array, host in self._mirrors:
            array.copy_(host)
        self._forget_derived()

    def load_initial(self) -> None:
        if not self._is_initial:
            self._built.flat.copy_tensors(self._recipe.initial_tensors(self._built.flat.shapes))
            if isinstance(self._update, ExactAverage):
                self._update.begin_again(self._recipe.initial_module())
            self._update.reset()
            self._forget_derived()
            self._is_initial = True

    def initial_digest(self) -> bytes:
        return self._recipe.initial_digest

    def checkpoint_files(self, step: int) -> list[FilePlan]:
        """Plan a Hugging Face model directory, or this part's files of it, and the optimizer's file, from ranges of the
        blobs. Raises ``StorageError`` if there is no room for temporary files."""
        return self._planner.files_of(step, {name: array.numel() for name, array in self._update.shared.items()})

    def load(self, directory: Path) -> None:
        """Restore this part from its own files in ``directory``; a shard also from those of a whole model. Other files
        are ignored.

        Raises:
            StorageError: the checkpoint does not fit this part, or cannot be read. The state is unchanged.
        """
        self._reader.read(directory, self.arrays())
        self._forget_derived()

    def changed(self) -> None:
        """Note that an update has changed the arrays."""
        self._is_initial, self._mirrors = False, []
        self.changes += 1

    def _forget_derived(self) -> None:
        self._update.on_state_replaced()
        self.changed()


def blob_of(name: str, array: Tensor) -> Blob:
    return Blob(name, array.numpy().data.cast("B"))
