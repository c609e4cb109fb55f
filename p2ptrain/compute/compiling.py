"""Compiles the blocks of a model with ``torch.compile`` while steps go on without.

A *block* is a layer that transformers can compute again in the backward pass. Hooks on parameters, and FSDP2, stay
outside of what is compiled. A thread compiles a copy of one block of each kind. torch keeps compiled code by the
function, so the model's own blocks can use it. They never compile: a call that no code fits runs without, such as one
of a validation, which needs no gradients, and on a CPU one with another number of threads.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers.modeling_layers import GradientCheckpointingLayer

from p2ptrain.compute.device import ComputeDevice
from p2ptrain.compute.model import first_line

BACKEND: Any = "inductor"
LEAST_REST_S, LEAST_SPEEDUP = 300.0, 1.1
"""'auto' compiles if a run is to last so long, because it takes about a minute and slows steps meanwhile; it uses what
was compiled if blocks are so many times as fast."""
TIMED_STEPS, TIMED_PASSES = 3, 5
"""Steps that 'auto' times before it compiles, and passes of a block, each way, after that. The shortest counts."""
MOST_KINDS, MOST_CODES = 8, 256
"""Kinds of blocks that are compiled, and compiled codes of a function in a process, also those of earlier jobs."""


@dataclass(slots=True)
class _Sample:
    """A copy of a block, and the inputs of a call."""

    block: Any
    args: Any
    kwargs: Any
    autocast: torch.autocast

    def run(self, forward: Callable[..., Any]) -> None:
        """A forward and a backward pass."""
        with self.autocast:
            leaves = tree_leaves(forward(*self.args, **self.kwargs))
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        self.block.zero_grad()


_Samples = dict[tuple[str, str], _Sample]  # by kind of block and form of inputs


class BlockCompiler:
    """Has a model's blocks compiled, and use it.

    Args:
        always: compile at once, and use it whatever it gains (``device.compile = "on"``).

    Attributes:
        notices: see ``roles.engine.Engine``.
        thread: compiles; the first step that begins after its end uses what it compiled.
    """

    def __init__(
        self, model: nn.Module, device: ComputeDevice, *, always: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._blocks: list[Any] = [block for block in model.modules() if isinstance(block, GradientCheckpointingLayer)]
        self._device, self._always, self._clock = device, always, clock
        self._step, self._steps, self._failed = 0, 0, False
        self._work = self._between_steps()
        self.thread, self.notices = threading.Thread(), list[tuple[str, str]]()

    def begin_step(self, step: int, steps: int) -> None:
        """Call before step ``step`` of a run of ``steps``, on the thread that computes it."""
        self._step, self._steps = step, steps
        with self._catching():
            next(self._work, None)

    @contextmanager
    def _catching(self) -> Iterator[None]:
        """Steps go on without what fails inside the block."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever torch.compile meets
            self._failed = True
            reason = first_line(getattr(error, "inner_exception", error))
            self.notices.append(("warning", f"the model's blocks are not compiled: {reason}"))

    def _between_steps(self) -> Iterator[None]:
        """Yields for each step."""
        step_s, timed = math.inf, 0
        while not self._always and (timed < TIMED_STEPS or (self._steps - self._step) * step_s < LEAST_REST_S):
            step, began_s = self._step, self._clock()
            yield
            if self._step == step + 1:
                step_s, timed = min(step_s, self._clock() - began_s), timed + 1
        if not self._blocks:
            raise ValueError("it has none")
        samples: _Samples = {}
        sample = partial(self._sample, samples)
        hooks = [block.register_forward_pre_hook(sample, with_kwargs=True) for block in self._blocks]
        while not (samples or self._failed):
            yield
        for hook in hooks:
            hook.remove()
        self._device.wait()  # for the copies
        if self._failed:
            return
        outcome: list[float | Exception] = []
        work = list(samples.values()), self._device, torch.get_num_threads(), self._clock, outcome
        self.thread = threading.Thread(target=_compile, args=work, name="compile", daemon=True)
        self.thread.start()
        while self.thread.is_alive():
            yield
        if isinstance(compile_s := outcome[0], Exception):
            raise compile_s
        times_s = [[self._passes_s(samples, run) for run in (False, True)] for _ in range(TIMED_PASSES)]
        plain_s, compiled_s = map(min, zip(*times_s, strict=True))
        is_used = self._always or plain_s >= LEAST_SPEEDUP * compiled_s
        for block in self._blocks if is_used else []:
            block.forward = torch._dynamo.run(block.forward)
        use = f"used from step {self._step + 1}" if is_used else "not used"
        text = f"compiled the model's blocks in {compile_s:.0f} s, a block is {plain_s / compiled_s:.2f} times as"
        self.notices.append(("info", f"{text} fast: {use}"))

    def _sample(self, samples: _Samples, block: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a call of a block: copy it, if it is the first one of its kind."""
        if not torch.is_grad_enabled() or self._failed:
            return
        with self._catching():
            kind, form = repr(_describe(block)), repr(tree_map(_describe, (args, kwargs)))
            if (kind, form) in samples or len(samples) >= MOST_KINDS:
                return
            twins = (sample.block for known, sample in samples.items() if known[0] == kind)
            args, kwargs = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), (args, kwargs))
            device = self._device.kind
            autocast = torch.autocast(device, enabled=torch.is_autocast_enabled(device))  # as the call's
            samples[kind, form] = _Sample(next(twins, None) or _copy_block(block), args, kwargs, autocast)

    def _passes_s(self, samples: _Samples, run: bool) -> float:
        """Seconds of a pass of each sample, without or with what was compiled."""
        began_s = self._clock()
        for sample in samples.values():
            sample.run(torch._dynamo.run(sample.block.forward) if run else sample.block.forward)
        self._device.wait()
        return self._clock() - began_s


def _compile(
    samples: list[_Sample],
    device: ComputeDevice,
    threads: int,
    clock: Callable[[], float],
    outcome: list[float | Exception],
) -> None:
    """On a thread that holds no model: its job may end before, and the next one needs the memory. ``outcome``: gets the
    seconds that it took, or what it met."""
    began_s = clock()
    torch.set_num_threads(threads)
    try:
        device.enter_thread()
        # Else a backward pass is compiled where it first runs: on a GPU, on the one thread of all backward passes.
        with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
            for sample in samples:
                sample.run(cast(Any, torch.compile)(sample.block.forward, backend=BACKEND, recompile_limit=MOST_CODES))
        device.wait()
        outcome.append(clock() - began_s)
    except Exception as error:  # noqa: BLE001 - ``BlockCompiler`` tells it
        outcome.append(error)


def _copy_block(block: nn.Module) -> nn.Module:
    """A block with parameters of its own, which FSDP2 does not know of. Call it where the block's are whole."""
    twin: Any = object.__new__(type(block))  # FSDP2's blocks refuse ``deepcopy``
    own = {key: vars(block)[key] for key in ("_parameters", "_buffers", "_modules")}
    twin.__dict__ = {key: value for key, value in vars(block).items() if key != "forward"} | copy.deepcopy(own)
    for module in twin.modules():
        vars(module).pop("_is_fsdp_managed_module", None)  # else code of another kind would seem to fit
    return cast(nn.Module, twin)


def _describe(value: Any) -> Any:
    """Equal for blocks, or inputs, that differ in nothing but the values of tensors."""
    if isinstance(value, nn.Module):
        own = {key: kept for key, kept in vars(value).items() if key != "layer_idx" and "hooks" not in key}
        return type(value), tree_map(_describe, own)
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return value if isinstance(value, bool | int | float | str | None) else type(value)
