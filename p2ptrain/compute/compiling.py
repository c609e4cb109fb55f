"""Compiles the blocks of a model with ``torch.compile`` while steps go on without.

A *block* is a layer that transformers can compute again in the backward pass. Hooks on parameters, and FSDP2, stay
outside of what is compiled. A thread compiles a copy of one block of each kind. torch keeps compiled code by the
function, so the model's own blocks can use it. They never compile: a call that no code fits runs without, such as one
of a validation, which needs no gradients.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.modeling_layers import GradientCheckpointingLayer

from p2ptrain.compute.device import ComputeDevice, check_memory
from p2ptrain.compute.model import first_line

LEAST_REST_S, LEAST_SPEEDUP = 300.0, 1.1
"""'auto' compiles if a run is to last so long, because it takes about a minute and slows steps meanwhile; it uses what
was compiled if blocks are so many times as fast."""
TIMED_STEPS, TIMED_PASSES = 3, 5
"""Steps that 'auto' times before it compiles, and passes of a block, each way, after that. The shortest counts."""
MOST_KINDS, MOST_CODES = 8, 256
"""Kinds of blocks that are compiled, and compiled codes of a function in a process, also those of earlier jobs."""


@dataclass(slots=True)
class _Sample:
    """A copy of a block, the inputs of a call, and how many such calls a step has."""

    block: Any
    args: Any
    kwargs: Any
    autocast: torch.autocast
    calls: int = 0

    def run(self, forward: Callable[..., Any]) -> None:
        """A forward and a backward pass."""
        with self.autocast:
            leaves = tree_leaves(forward(*self.args, **self.kwargs))
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        self.block.zero_grad()


class BlockCompiler:
    """Has a model's blocks compiled, and use it.

    Args:
        kept_bytes: memory that a block keeps from its forward to its backward pass, about.
        always: compile at once, and use it whatever it gains (``device.compile = "on"``).

    Attributes:
        notices: see ``roles.engine.Engine``.
        thread: compiles; the first step that begins after its end uses what it compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        device: ComputeDevice,
        *,
        kept_bytes: int,
        always: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._blocks: list[Any] = [block for block in model.modules() if isinstance(block, GradientCheckpointingLayer)]
        self._device, self._always, self._clock = device, always, clock
        weights_bytes = (sum(weight.nbytes for weight in block.parameters()) for block in self._blocks)
        self._need_bytes = 2 * (kept_bytes + 2 * max(weights_bytes, default=0))
        self._samples: dict[tuple[str, str], _Sample] = {}  # by kind of block and form of inputs
        self._problem: Exception | None = None
        self._hooks: list[Any] = []
        self._threads = 0  # of CPU kernels: code is for one number
        self._step, self._began_s, self._timed, self._step_s, self._compile_s = -1, 0.0, 0, math.inf, 0.0
        self._next: Callable[[int, int], None] | None = self._decide
        self.thread, self.notices = threading.Thread(), list[tuple[str, str]]()

    def begin_step(self, step: int, steps: int) -> None:
        """Call before step ``step`` of a run of ``steps``, on the thread that computes it."""
        now_s = self._clock()
        if step == self._step + 1 > 0:
            self._timed, self._step_s = self._timed + 1, min(self._step_s, now_s - self._began_s)
        self._step, self._began_s = step, now_s
        try:
            if self._next is not None:
                self._next(step, steps)
        except Exception as error:  # noqa: BLE001 - whatever torch.compile meets, steps go on without
            self._samples, self._next = {}, None
            reason = first_line(getattr(error, "inner_exception", error))
            self.notices.append(("warning", f"the model's blocks are not compiled: {reason}"))

    def _decide(self, step: int, steps: int) -> None:
        rest_s = (steps - step) * self._step_s
        if self._always or (self._timed >= TIMED_STEPS and rest_s >= LEAST_REST_S):
            check_memory(self._need_bytes, self._device, "compiling a block", "device.compile = 'off'")
            self._hooks = [block.register_forward_pre_hook(self._sample, with_kwargs=True) for block in self._blocks]
            self._threads, self._next = torch.get_num_threads(), self._begin

    def _sample(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a call of a block: copy it, if it is the first one of its kind."""
        if not torch.is_grad_enabled() or self._problem is not None:
            return
        try:
            kind, device = (_kind(block), _form((args, kwargs))), self._device.torch_device.type
            if kind not in self._samples and len(self._samples) < MOST_KINDS:
                dtype, caches = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
                autocast = torch.autocast(device, dtype, torch.is_autocast_enabled(device), caches)
                args, kwargs = tree_map(_detach, (args, kwargs))
                twins = (sample.block for known, sample in self._samples.items() if known[0] == kind[0])
                self._samples[kind] = _Sample(next(twins, None) or _copy_block(block), args, kwargs, autocast)
            if kind in self._samples:
                self._samples[kind].calls += 1
        except Exception as error:  # noqa: BLE001 - this step can go on
            self._problem = error

    def _begin(self, step: int, steps: int) -> None:
        if self._blocks and self._problem is None and not self._samples:
            return  # the step had no micro-batch for this member, or was aborted before
        for hook in self._hooks:
            hook.remove()
        if not self._blocks:
            raise ValueError("it has none")
        self._device.wait()  # for the copies
        self.thread = threading.Thread(target=self._compile, name="compile", daemon=True)
        self.thread.start()
        self._next = self._use

    def _compile(self) -> None:
        began_s = self._clock()
        try:
            self._device.enter_thread()
            torch.set_num_threads(self._threads)
            options: Any = {"backend": self._device.compile_backend, "recompile_limit": MOST_CODES}
            for sample in self._samples.values():
                sample.run(torch.compile(sample.block.forward, **options))
            self._device.wait()
        except Exception as error:  # noqa: BLE001 - ``_use`` tells it
            self._problem = error
        self._compile_s = self._clock() - began_s

    def _use(self, step: int, steps: int) -> None:
        if self.thread.is_alive():
            return
        if self._problem is not None:
            raise self._problem
        speedup = self._speedup()
        is_used, self._samples = self._always or speedup >= LEAST_SPEEDUP, {}
        for block in self._blocks if is_used else []:
            block.forward = torch._dynamo.run(block.forward)
        self._next = self._watch if is_used else None
        text = f"compiled the model's blocks in {self._compile_s:.0f} s, a block is {speedup:.2f} times as fast"
        self.notices.append(("info", f"{text}: {f'used from step {step + 1}' if is_used else 'not used'}"))

    def _speedup(self) -> float:
        """How many times as fast the forward and backward passes of a step's blocks are."""
        taken_s = [0.0, 0.0]
        for sample in self._samples.values():
            ways = sample.block.forward, torch._dynamo.run(sample.block.forward)
            passes_s = [[self._pass_s(sample, way) for way in ways] for _ in range(TIMED_PASSES)]
            for way in (0, 1):
                taken_s[way] += sample.calls * min(each[way] for each in passes_s)
        return taken_s[0] / taken_s[1]

    def _pass_s(self, sample: _Sample, forward: Callable[..., Any]) -> float:
        began_s = self._clock()
        sample.run(forward)
        self._device.wait()
        return self._clock() - began_s

    def _watch(self, step: int, steps: int) -> None:
        if torch.get_num_threads() != self._threads:
            self._next = self._decide


def _copy_block(block: nn.Module) -> nn.Module:
    """A block with parameters of its own, which FSDP2 does not know of. Call it where the block's are whole."""
    twin: Any = object.__new__(type(block))  # FSDP2's blocks refuse ``deepcopy``
    own = {key: vars(block)[key] for key in ("_parameters", "_buffers", "_modules")}
    twin.__dict__ = {key: value for key, value in vars(block).items() if key != "forward"} | copy.deepcopy(own)
    for module in twin.modules():
        vars(module).pop("_is_fsdp_managed_module", None)  # else code of another kind would seem to fit
    return cast(nn.Module, twin)


def _detach(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _kind(block: nn.Module) -> str:
    """Equal for blocks that differ in nothing but the values of tensors."""
    described: list[Any] = []
    for module in block.modules():
        values = {key: value for key, value in vars(module).items() if key != "layer_idx"} | module._parameters
        described += [type(module), *((key, _describe(value)) for key, value in values.items())]
    return repr(described)


def _form(inputs: Any) -> str:
    return repr([_describe(leaf) for leaf in tree_leaves(inputs)])


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return value if isinstance(value, bool | int | float | str | None) else type(value)
