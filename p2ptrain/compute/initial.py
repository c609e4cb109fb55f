"""The random weights of a few tensors of a model, the same bits as in the whole, without the memory of the whole.

What a whole model draws follows from what its constructors and transformers' ``_init_weights`` do, in their order, with
one generator. So the model is built once with parameters that have no memory (on torch's meta device), and every
operation that would write into them is recorded: a tape. It is played with the real generator: into memory for tensors
that are wanted, into one scratch array for the others, which are drawn and forgotten, and nothing at all is done for
those where nothing is drawn. The idea is that of torchdistX' deferred initialization.

A model that does something else than write into its parameters one by one (an orthogonal matrix, say) has no tape. It
is built whole, where there is memory for it, and cut.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig

from p2ptrain.compute.device import HOST, check_memory
from p2ptrain.compute.model import ATTENTION, first_line
from p2ptrain.core.errors import ConfigError

_Auto: Any = AutoModelForCausalLM  # its annotations are partial
_ANY: Any = torch.ops.aten
_AS_ON_CPU = {
    torch.Tensor.is_meta.__get__: lambda result: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda result: True,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: lambda result: torch.device("cpu"),
}
_DRAWING = Lock()  # there is one generator for all threads of a process
_WHOLLY = {_ANY.normal_.default, _ANY.uniform_.default, _ANY.zero_.default, _ANY.fill_.Scalar}
_EMPTY = {_ANY.empty.memory_format, _ANY.empty_strided.default}


class Unrecordable(Exception):
    """The model is not made by writes into its parameters alone."""


@dataclass(frozen=True, slots=True)
class _Write:
    """An operation in place on elements of the memory ``storage``."""

    function: Any
    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    others: tuple[Any, ...]
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def draws(self) -> bool:
        return _draws(self.function)

    @property
    def stop(self) -> int:
        """Elements from the memory's start to the last one that is written."""
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def covers(self, numel: int) -> bool:
        """Whether all of a memory of ``numel`` elements is written, whatever was in it."""
        return self.function in _WHOLLY and self.stop - self.offset == math.prod(self.shape) == numel

    def play(self, memory: Tensor) -> None:
        self.function(memory.as_strided(self.shape, self.stride, self.offset), *self.others, **self.keywords)


class _Disguise(TorchFunctionMode):
    """Tensors without memory say that they are on the CPU: torch's own initializers leave them alone otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return _AS_ON_CPU[func](result) if func in _AS_ON_CPU else result  # type: ignore[no-untyped-call]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whatever is allocated without values gets no memory; writes into it are recorded instead of done."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: list[_Write] = []
        self._alive: list[Tensor] = []  # so that no memory's number is given out twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._operate(func, args, kwargs or {})

    def _operate(self, func: Any, args: Any, keywords: dict[str, Any]) -> Any:
        if func in _EMPTY:
            made = func(*args, **{**keywords, "device": "meta", "pin_memory": None})
            self._alive.append(made)
            return made
        recorded = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, Tensor) and leaf.is_meta]
        if not recorded:
            if _draws(func):
                raise Unrecordable(f"{func} draws numbers that are no parameter's")
            return func(*args, **keywords)
        if func.is_view:
            return func(*args, **keywords)
        target = args[0]
        alone = len(recorded) == 1 and recorded[0] is target
        if not (alone and torch.Tag.inplace in func.tags and target.dtype == torch.float32):
            raise Unrecordable(f"{func} takes a parameter")
        where = (tuple(target.shape), target.stride(), target.storage_offset())
        self.writes.append(_Write(func, _storage(target), *where, tuple(args[1:]), dict(keywords)))
        return target


class InitialWeights:
    """How a whole model of ``config`` gets its first weights, in fp32.

    Attributes:
        names: of all tensors in the model's ``state_dict``.
        is_recorded: whether there is a tape; else ``draw`` takes the memory of the whole model.

    Raises:
        ConfigError: the architecture cannot be built with these sizes.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config
        recorder = _Recorder()
        try:
            with recorder, _Disguise():
                model = _built(config)
        except (Unrecordable, ConfigError):  # what cannot be built at all says so in the other way, too
            with torch.device("meta"):
                model = _built(config)
            self.is_recorded = False
        else:
            self.is_recorded = True
        self._recorder = recorder  # it keeps alive what the writes name
        self._tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self.names = tuple(self._tensors)
        self._numel = sum(parameter.numel() for parameter in model.parameters())

    def draw(self, seed: int, names: Collection[str]) -> dict[str, Tensor]:
        """The tensors of these names as ``build_model`` draws them from ``seed``; those that are tied share memory.

        The global random state is left as it was.

        Raises:
            ResourceError: there is no room for them, or for the whole where the model must be built whole.
        """
        with _seeded(seed):
            return self._played(names) if self.is_recorded else self._cut(names)

    def digests(self, seed: int) -> dict[str, bytes]:
        """Of all tensors that ``draw`` would give from ``seed``, by name: 16 bytes each. They are drawn one after the
        other, so it takes the time of the whole model, and the memory of its largest tensors. Raises as ``draw``."""
        with _seeded(seed):
            if not self.is_recorded:
                return {name: _digest(tensor) for name, tensor in self._cut(self.names).items()}
            return self._told_one_by_one()

    def _told_one_by_one(self) -> dict[str, bytes]:
        writes = self._recorder.writes
        sizes = {_storage(tensor): _storage_numel(tensor) for tensor in self._tensors.values()}
        first, last = {}, {}
        for number, write in enumerate(writes):  # what is written all over later need not be kept until then
            last[write.storage] = number
            if write.storage not in first or write.covers(sizes.get(write.storage, 0)):
                first[write.storage] = number
        scratch = torch.empty(max((write.stop for write in writes if write.draws), default=0))
        memories: dict[int, Tensor] = {}
        told: dict[str, bytes] = {name: _digest(value) for name, value in self._tensors.items() if not value.is_meta}
        for number, write in enumerate(writes):
            storage = write.storage
            if storage in sizes and number >= first[storage]:
                memory = memories.setdefault(storage, torch.empty(sizes[storage]))
                write.play(memory)
                if number == last[storage]:
                    del memories[storage]
                    places = {name: value for name, value in self._tensors.items() if _storage(value) == storage}
                    told |= {name: _digest(_within({storage: memory}, value)) for name, value in places.items()}
            elif write.draws:
                write.play(scratch)
        return told

    def _played(self, names: Collection[str]) -> dict[str, Tensor]:
        wanted = {name: self._tensors[name] for name in names}
        scratch_numel = self._scratch_numel(wanted)
        numel = scratch_numel + sum(tensor.numel() for tensor in wanted.values())
        check_memory(4 * numel, HOST, f"drawing {len(wanted)} tensors of a {self._config.model_type!r}")
        memories = _memories(wanted)
        scratch = torch.empty(scratch_numel)
        for write in self._recorder.writes:
            if write.storage in memories:
                write.play(memories[write.storage])
            elif write.draws:
                write.play(scratch)
        return {name: _within(memories, tensor) for name, tensor in wanted.items()}

    def _scratch_numel(self, wanted: Mapping[str, Tensor]) -> int:
        """Room for the largest of the tensors that are drawn and forgotten."""
        kept = {_storage(tensor) for tensor in wanted.values()}
        return max(
            (write.stop for write in self._recorder.writes if write.draws and write.storage not in kept), default=0
        )

    def _cut(self, names: Collection[str]) -> dict[str, Tensor]:
        check_memory(
            self._numel * 4, HOST, f"drawing the weights of a {self._config.model_type!r}, which must be whole for that"
        )
        weights = _built(self._config).state_dict()
        return {name: weights[name].clone() for name in names}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global generator begins at ``seed``, for this thread alone, and is left as it was."""
    with _DRAWING, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        yield


def _built(config: PretrainedConfig) -> nn.Module:
    try:
        model: nn.Module = _Auto.from_config(copy.deepcopy(config), attn_implementation=ATTENTION, dtype=torch.float32)
    except Unrecordable:
        raise
    except Exception as error:  # each architecture validates in its own way and with its own exceptions
        raise ConfigError(f"the [model] table does not make a {config.model_type!r}: {first_line(error)}") from error
    return model


def _draws(function: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in function.tags


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storage_numel(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _digest(tensor: Tensor) -> bytes:
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(values.data, digest_size=16).digest()


def _memories(wanted: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Real memory for each that has none as yet."""
    memories: dict[int, Tensor] = {}
    for tensor in wanted.values():
        if tensor.is_meta and _storage(tensor) not in memories:
            memories[_storage(tensor)] = torch.empty(_storage_numel(tensor), dtype=tensor.dtype)
    return memories


def _within(memories: Mapping[int, Tensor], tensor: Tensor) -> Tensor:
    if not tensor.is_meta:  # made from values, such as a norm's ones
        return tensor.detach().clone()
    return memories[_storage(tensor)].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
