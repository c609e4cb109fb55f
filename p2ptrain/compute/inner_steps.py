"""The inner steps of a member with DiLoCo (``compute.local``): which of them the contribution of a step holds. A pure
core: it knows no tensors.

With *fragments* a step exchanges one fragment of the parameters, and the member keeps its own copy of the rest. If
steps *overlap*, a member contributes the inner steps that it has when the step begins. With either, the inner steps of
an aborted step stay in the member's own copy, and count when the step is repeated. Else each step begins with a new
copy of the shared parameters.
"""

from __future__ import annotations

MIXING = 0.5
"""Share of its own copy that a member keeps when the result of an overlapping step arrives (arXiv 2501.18512)."""


class InnerSteps:
    """Counts inner steps by fragment.

    Args:
        numel: of the parameters.
        decayed_numel: elements that are cut into fragments. The last fragment includes the rest, which are few.

    Attributes:
        step: the step that was begun last.
        is_copy_void: the next step begins with a new copy of the shared parameters.
        waits: the member has no inner steps or losses yet. It computes first, and sends only its losses. They count
            again with the inner steps, in the next step.
        sent: inner steps in the contribution.
        kept: share of its own copy that a member keeps when it goes on from the shared parameters.
    """

    def __init__(self, numel: int, decayed_numel: int, *, fragments: int, overlap: bool) -> None:
        self._numel, self._decayed_numel = numel, decayed_numel
        self._fragments, self._overlap = fragments, overlap
        self._taken = [0] * fragments  # since each fragment was exchanged
        self.step, self.sent = -1, 0
        self.is_copy_void, self.waits = True, False
        self.kept = MIXING if overlap else 0.0

    def begin_step(self, step: int, *, has_losses: bool) -> bool:
        """Begin a step. ``has_losses``: of inner steps that were not sent. Returns whether the member begins with a new
        copy."""
        is_new = self.is_copy_void or not (self._overlap or self._fragments > 1)
        if is_new:
            self._taken, self.sent, self.is_copy_void = [0] * self._fragments, 0, False
        self.step = step
        self.waits = self._overlap and not (self._taken[step % self._fragments] and has_losses)
        return is_new

    @property
    def is_ready(self) -> bool:
        """Whether the contribution of the step does not need the inner steps that follow."""
        return self._overlap and not self.waits

    def count(self, micro_batches: int) -> None:
        """Count an inner step, of so many micro-batches."""
        self._taken = [taken + micro_batches for taken in self._taken]

    def send(self) -> int:
        """Put the inner steps into the contribution. Returns their number."""
        self.sent = 0 if self.waits else self._taken[self.step % self._fragments]
        return self.sent

    def take_up(self, step: int) -> bool:
        """The shared parameters of the fragment of ``step`` have changed. Returns whether the member's copy goes on
        from them. Else it took no part, such as after an outlier, and begins with a new copy."""
        self.is_copy_void = self.is_copy_void or step != self.step
        if not self.is_copy_void:
            self._taken[step % self._fragments] -= self.sent
            self.sent = 0
        return not self.is_copy_void

    def fragment(self, step: int) -> slice:
        """The parameters that ``step`` exchanges."""
        index, count = step % self._fragments, self._fragments
        start, stop = (self._decayed_numel * each // count // 16 * 16 for each in (index, index + 1))
        return slice(start, self._numel if index == count - 1 else stop)

    def exchanged(self, step: int, scalars: int) -> list[tuple[int, int]]:
        """``StepUpdate.exchanged``, of a contribution with so many numbers behind the parameters."""
        part, end = self.fragment(step), self._numel + scalars
        return [(part.start, end)] if part.stop == self._numel else [(part.start, part.stop), (self._numel, end)]
