"""A stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_READING = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "bincount", "lift_fresh"}
"""Operations that return a value, or a tensor whose size depends on values; ``lift_fresh`` makes a tensor of Python
numbers, which is a copy from the host. A step runs in inference mode, where torch does not take all of them apart."""


class KernelRecorder:
    """Records the operations of a step and repeats them, without the step's Python code. As on a GPU, a step that reads
    a value of a tensor, or copies one from the host, cannot be captured, and each result is in the same memory.

    Attributes:
        captures: number of steps captured; replays: of their repetitions.
    """

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        mode = _Recording()
        with patch("torch.cuda.is_current_stream_capturing", lambda: True), mode:
            out = step()
        self.captures += 1
        slots: dict[int, _Slot] = {}  # by the id of the tensor that a call returned
        calls = []
        for operation, args, kwargs, result in mode.calls:
            inputs = tree_map_only(Tensor, lambda tensor: slots.get(id(tensor), tensor), (args, kwargs))
            outputs = [slots.setdefault(id(tensor), _Slot()) for tensor in _tensors(result)]
            calls.append((operation, *inputs, outputs))
        last = slots[id(out)]

        def replay() -> Tensor:
            self.replays += 1
            made: dict[_Slot, Tensor] = {}
            for operation, args, kwargs, outputs in calls:
                named = {name: _filled(value, made) for name, value in kwargs.items()}
                again = operation(*_filled(args, made), **named)
                made.update(zip(outputs, _tensors(again), strict=True))
            return out.copy_(made[last])

        return replay


class _Slot:
    """The place of a tensor that an earlier call returns."""


def _filled(value: Any, made: dict[_Slot, Tensor]) -> Any:
    if isinstance(value, _Slot):
        return made[value]
    return [_filled(item, made) for item in value] if isinstance(value, list | tuple) else value


def _tensors(result: Any) -> list[Tensor]:
    found = result if isinstance(result, tuple | list) else [result]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []  # with their results, which keeps ids of tensors unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if func is torch.ops.aten.index.Tensor else []
        is_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if func.overloadpacket.__name__ in _READING or is_mask:
            raise RuntimeError(f"{func} waits for the device, which a capture cannot")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result
