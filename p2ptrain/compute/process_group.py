"""A process group of torch.distributed over operations on arrays.

The operations (``Operations``) come from the owner: the backend ``p2p`` (``p2ptrain.torch_backend``), or a worker whose
replica is sharded. This module translates: tensors to arrays that share their memory, torch's options to arguments, and
pending operations to torch's ``Work``. A tensor that is not contiguous, or on a GPU, travels as a copy.

``ProcessGroup`` calls some methods from C++ and finds others as attributes, under old and new names. So both exist.
"""

# mypy: disable-error-code="override,assignment"
# torch declares a second signature of each operation, which only its C++ classes have, and other parameter names.

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError, ProtocolError

Array = npt.NDArray[Any]
Done = Callable[[], None]
NAME = "p2p"
DEFAULT_TIMEOUT_S = 1800.0
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}
_NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
_REDUCTIONS = {getattr(dist.ReduceOp.RedOpType, name.upper()): name for name in _NAMES}
MAX_CALLBACKS = 1024
# Completes torch's futures. Their callbacks may begin operations and wait for the futures of those, as PowerSGD's do
# for each bucket. So each has a thread: the pool starts one whenever none is idle.
_completing = ThreadPoolExecutor(MAX_CALLBACKS, thread_name_prefix="p2p callbacks")


@dataclass(frozen=True, slots=True)
class GroupMessage:
    """An array, shape (numel,), to send to ``peer`` or to receive from it; None: from any. ``tag``: equal at both."""

    array: Array
    peer: int | None
    tag: int


class Operations(Protocol):
    """Operations of a group of members on contiguous arrays, shape (numel,), of plain memory.

    Every member begins the same collective operations in the same order; no method blocks. The arrays belong to the
    operation until the future is done. ``done`` is called just before that, on the thread of the operations. Futures
    fail with ``P2PTrainError``, which names the lost member, or with ``ValueError``. ``dtype`` is torch's name.
    ``reduction``: ``sum``, ``avg``, ``product``, ``min``, ``max``, ``band``, ``bor`` or ``bxor``.
    """

    def all_reduce(self, array: Array, dtype: str, reduction: str, timeout_s: float, done: Done) -> Future[int]:
        """Replace ``array`` by the reduction of all members' arrays."""

    def reduce_scatter(
        self, source: Array, into: Array, dtype: str, reduction: str, timeout_s: float, done: Done
    ) -> Future[int]:
        """Set ``into`` to part ``rank`` of the reduction of all members' ``source``, which has ``size`` parts."""

    def all_gather(self, array: Array, timeout_s: float, done: Done) -> Future[int]:
        """Replace each part of ``array`` by that of its member."""

    def broadcast(self, array: Array, root: int, timeout_s: float, done: Done) -> Future[int]: ...

    def exchange(
        self, sends: Sequence[GroupMessage], receives: Sequence[GroupMessage], timeout_s: float, done: Done
    ) -> Future[int]:
        """Send and receive; the result is the source of the last receive, or -1."""

    def close(self) -> None:
        """Leave the group. What is not finished fails."""


class RingWork(dist.Work):
    """Operations under way. ``tensors`` is the result, in torch's order."""

    def __init__(self, pending: Sequence[Future[int]], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._pending, self._tensors = tuple(pending), tensors
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end; a timeout of 0 is none. Raises ``DistBackendError``, or ``ValueError``."""
        seconds = timeout.total_seconds() or None
        try:
            for item in self._pending:
                item.exception(seconds)
        except TimeoutError:
            raise dist.DistBackendError(f"the operation is not finished after {seconds:g} s: timed out") from None
        error = self._error()
        if error is not None:
            raise error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(item.done() for item in self._pending)

    def is_success(self) -> bool:
        return self.is_completed() and self._error() is None

    def exception(self) -> Exception | None:
        return self._error() if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self._pending[-1].result()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if self._future is None:
            self._done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            # ``then`` makes an error of a Python exception. DDP in C++ would take the exception for tensors, and crash.
            self._future = self._done.then(lambda done: done.value())
            self._left = itertools.count(len(self._pending) - 1, -1)
            for item in self._pending:
                item.add_done_callback(self._one_done)
        return self._future

    def _one_done(self, pending: Future[int]) -> None:
        if not next(self._left):
            with suppress(RuntimeError):  # the interpreter ends
                _completing.submit(self._complete)

    def _complete(self) -> None:
        error = self._error()
        if error is None:
            self._done.set_result(self._tensors)
        else:
            self._done.set_exception(error)  # type: ignore[arg-type]  # torch declares T

    def _error(self) -> Exception | None:
        error = next((problem for item in self._pending if (problem := item.exception()) is not None), None)
        if isinstance(error, P2PTrainError):
            return _translate(error)
        return error if error is None or isinstance(error, Exception) else RuntimeError(str(error))


class RingProcessGroup(dist.ProcessGroup):
    """The process group of one member. ``operations`` may change what they run on between operations.

    Args:
        rank, size: of this member in the group.
        timeout: of operations that give none.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(
        self,
        rank: int,
        size: int,
        operations: Operations,
        *,
        timeout: timedelta = timedelta(seconds=DEFAULT_TIMEOUT_S),
        group_name: str = "",
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch does not declare it
        self._own_rank, self._own_size = rank, size
        self.operations, self._timeout, self._name = operations, timeout, group_name
        self._exchanges = itertools.count(1)  # collective operations that consist of messages

    # ------------------------------------------------------------------------------------------------- what torch asks

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    _set_group_name = setGroupName

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, device: torch.device) -> RingProcessGroup:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        self.operations.close()

    abort = shutdown

    # ------------------------------------------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> RingWork:
        return self.allreduce_coalesced([_single(tensors)], opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> RingWork:
        reduction, timeout_s = _reduction(opts), self._seconds(opts)
        if any(tensor.is_sparse for tensor in tensors):
            return _join([self._sparse_sum(tensor, reduction, timeout_s) for tensor in tensors])
        pending = []
        for tensor in tensors:
            array, put_back = _flat(tensor)
            pending.append(self.operations.all_reduce(array, _dtype(tensor), reduction, timeout_s, put_back))
        return RingWork(pending, tensors)

    def _sparse_sum(self, tensor: torch.Tensor, reduction: str, timeout_s: float) -> RingWork:
        """Sum tensors that hold a few rows each, such as gradients of an embedding: gather all rows. It waits once, for
        their numbers."""
        if reduction != "sum":
            raise ValueError(f"the backend {NAME} only sums sparse tensors, it has no {reduction} of them")
        own, size = tensor.coalesce(), self._own_size
        counts = np.zeros(size, np.int64)
        counts[self._own_rank] = own._nnz()
        RingWork([self.operations.all_gather(counts, timeout_s, _nothing)], []).wait()
        most, limit = int(counts.max()), math.prod(tensor.shape[: tensor.sparse_dim()])
        if counts.min() < 0 or most > limit:
            raise ValueError(f"a member has {most} rows of a sparse tensor that has {limit} at most")
        indices = torch.zeros(size, tensor.sparse_dim(), most, dtype=torch.int64)
        values = torch.zeros(size, most, *own.values().shape[1:], dtype=own.dtype)
        indices[self._own_rank, :, : own._nnz()] = own.indices()
        values[self._own_rank, : own._nnz()] = own.values()

        def add_up() -> None:
            parts = (
                torch.sparse_coo_tensor(
                    indices[rank, :, :count], values[rank, :count], tensor.shape, check_invariants=True
                )
                for rank, count in enumerate(counts.tolist())
            )
            tensor.copy_(sum(parts, start=torch.zeros_like(tensor)).coalesce())

        pending = [
            self.operations.all_gather(_flat(part)[0], timeout_s, done)
            for part, done in ((indices, _nothing), (values, add_up))
        ]
        return RingWork(pending, [tensor])

    def reduce(self, tensors: Any, opts: Any = None) -> RingWork:
        tensor = _single(tensors)
        array, put_back = _flat(tensor)
        if self._own_rank != _root(opts):
            array, put_back = array.copy(), _nothing  # only the root's tensor changes
        reduction, timeout_s = _reduction(opts), self._seconds(opts)
        pending = self.operations.all_reduce(array, _dtype(tensor), reduction, timeout_s, put_back)
        return RingWork([pending], [tensor])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        output = _single(outputs)
        parts = inputs[0]
        _check_parts(parts, self._own_size, output)
        source = np.concatenate([_flat(part)[0] for part in parts])
        return self._scatter_sum(output, source, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> RingWork:
        _check_whole(source, self._own_size, output)
        return self._scatter_sum(output, _flat(source)[0], opts)

    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base

    def _scatter_sum(self, output: torch.Tensor, source: Array, opts: Any) -> RingWork:
        reduction, timeout_s = _reduction(opts), self._seconds(opts)
        into, put_back = _flat(output, read=False)
        pending = self.operations.reduce_scatter(source, into, _dtype(output), reduction, timeout_s, put_back)
        return RingWork([pending], [output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> RingWork:
        return _join([self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, sources, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ------------------------------------------------------------------------------------------------ copies

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        tensor = _single(inputs)
        parts = outputs[0]
        _check_parts(parts, self._own_size, tensor)
        own = _flat(tensor)[0]
        gathered = np.empty((self._own_size, own.size), own.dtype)
        gathered[self._own_rank] = own
        targets = [_flat(part, read=False) for part in parts]

        def done() -> None:
            for (target, put_back), row in zip(targets, gathered, strict=True):
                target[:] = row
                put_back()

        pending = self.operations.all_gather(gathered.reshape(-1), self._seconds(opts), done)
        return RingWork([pending], list(parts))

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """``outputs[r]`` has rank r's tensor for each of ``inputs``."""
        return _join([self.allgather([[*parts]], [own], opts) for *parts, own in zip(*outputs, inputs, strict=True)])

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> RingWork:
        _check_whole(output, self._own_size, source)
        array, put_back = _flat(output, read=False)
        own, start = _flat(source)[0], self._own_rank * source.numel()
        place = array[self._own_rank * own.size : (self._own_rank + 1) * own.size]
        on_host = output.device.type == "cpu"
        if not on_host or output.data_ptr() + start * output.element_size() != source.data_ptr():
            place[:] = own
        pending = self.operations.all_gather(array, self._seconds(opts), put_back)
        return RingWork([pending], [output])

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> RingWork:
        return _join([self._allgather_base(*pair, opts) for pair in zip(outputs, sources, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def broadcast(self, tensors: Any, opts: Any = None) -> RingWork:
        tensor = _single(tensors)
        array, put_back = _flat(tensor)
        pending = self.operations.broadcast(array, _root(opts), self._seconds(opts), put_back)
        return RingWork([pending], [tensor])

    def barrier(self, opts: Any = None) -> RingWork:
        timeout_s = self._seconds(opts)
        return RingWork([self.operations.all_gather(np.zeros(self._own_size, np.uint8), timeout_s, _nothing)], [])

    # ---------------------------------------------------------------------------------------------------- messages

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> RingWork:
        [tensor] = tensors
        message = GroupMessage(_flat(tensor)[0], dst, tag)
        return RingWork([self.operations.exchange([message], [], self._timeout.total_seconds(), _nothing)], tensors)

    def recv(self, tensors: list[torch.Tensor], src: int | None, tag: int = 0) -> RingWork:
        [tensor] = tensors
        array, put_back = _flat(tensor, read=False)
        message = GroupMessage(array, src, tag)
        return RingWork([self.operations.exchange([], [message], self._timeout.total_seconds(), put_back)], tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> RingWork:
        return self.recv(tensors, None, tag)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        return self._exchanged(self._at_root(outputs, _single(inputs), opts), self._only(inputs, opts), opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        return self._exchanged(self._only(outputs, opts), self._at_root(inputs, _single(outputs), opts), opts)

    def _at_root(self, lists: Any, like: torch.Tensor, opts: Any) -> list[torch.Tensor]:
        """The tensors of all ranks, which only the root has."""
        parts = list(lists[0]) if self._own_rank == _root(opts) else []
        if parts:
            _check_parts(parts, self._own_size, like)
        return parts

    def _only(self, tensors: Any, opts: Any) -> list[torch.Tensor | None]:
        return [_single(tensors) if rank == _root(opts) else None for rank in range(self._own_size)]

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> RingWork:
        if not len(outputs) == len(inputs) == self._own_size:
            raise ValueError(f"all_to_all: {len(inputs)} inputs and {len(outputs)} outputs for {self._own_size} ranks")
        return self._exchanged(outputs, inputs, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> RingWork:
        parts, sends = (
            _split(tensor, sizes, self._own_size) for tensor, sizes in ((output, output_sizes), (source, input_sizes))
        )
        work = self._exchanged(parts, sends, opts)
        return RingWork(work._pending, [output])

    all_to_all_single = alltoall_base

    def _exchanged(
        self, outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None], opts: Any
    ) -> RingWork:
        """Send ``inputs[r]`` to rank r, and receive ``outputs[r]`` from it; None: nothing."""
        own, tag = self._own_rank, -next(self._exchanges)
        targets = {rank: _flat(each, read=False) for rank, each in enumerate(outputs) if each is not None}
        sources = {rank: _flat(each)[0] for rank, each in enumerate(inputs) if each is not None}

        def done() -> None:
            for _, put_back in targets.values():
                put_back()

        if own in targets and own in sources:
            targets[own][0][:] = sources[own]
        receives = [GroupMessage(array, peer, tag) for peer, (array, _) in targets.items() if peer != own]
        sends = [GroupMessage(array, peer, tag) for peer, array in sources.items() if peer != own]
        pending = self.operations.exchange(sends, receives, self._seconds(opts), done)
        return RingWork([pending], [output for output in outputs if output is not None])

    def _seconds(self, opts: Any) -> float:
        return (opts.timeout if opts is not None and opts.timeout > timedelta(0) else self._timeout).total_seconds()


def group_of(options: Any, join: Callable[..., Operations]) -> RingProcessGroup:
    """Make the group that torch asks for.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        join: called with store, name of the group, rank, size, names of the members, and seconds.

    Raises ``DistBackendError``.
    """
    _replace_builtin_fp16_hook()
    rank, size = options.group_rank, options.group_size
    names = [f"rank {member}" for member in options.global_ranks_in_group or range(size)]
    try:
        operations = join(options.store, options.group_id, rank, size, names, options.timeout.total_seconds())
    except P2PTrainError as error:
        raise _translate(error) from error
    return RingProcessGroup(rank, size, operations, timeout=options.timeout, group_name=options.group_id)


@functools.cache
def _replace_builtin_fp16_hook() -> None:
    """Let DDP's ``_register_builtin_comm_hook(FP16_COMPRESS)`` use the hook of that name in Python, in groups of this
    backend only. The one in C++ reads a list of tensors of C++ from the future, which Python cannot make; both send the
    same bytes."""
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    register_builtin = ddp._register_builtin_comm_hook

    def register(model: Any, kind: BuiltinCommHookType) -> None:
        if kind == BuiltinCommHookType.FP16_COMPRESS and NAME in dist.get_backend_config(model.process_group):
            model.register_comm_hook(model.process_group, fp16_compress_hook)
        else:
            register_builtin(model, kind)

    ddp._register_builtin_comm_hook = register


def _translate(error: P2PTrainError) -> Exception:
    remedy = f" ({error.remedy})" if error.remedy else ""
    if isinstance(error, ProtocolError):
        remedy = " (do all members call the same operations in the same order, with equal shapes and types?)"
    late = "timeout of an operation: " if isinstance(error, DeadlineExceeded) else ""
    return dist.DistBackendError(f"backend {NAME}: {late}{error.message}{remedy}")


def _single(tensors: Any) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{len(tensors)} tensors where one is expected: the backend {NAME} has one device per process")
    return cast(torch.Tensor, tensors[0])


def _join(operations: Sequence[RingWork]) -> RingWork:
    return RingWork(
        [item for work in operations for item in work._pending],
        [tensor for work in operations for tensor in work._tensors],
    )


def _root(opts: Any) -> int:
    return 0 if opts is None else int(opts.rootRank)


def _reduction(opts: Any) -> str:
    """Read torch's option now: it is freed when the call returns."""
    operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    kind = operation if isinstance(operation, dist.ReduceOp.RedOpType) else operation.op
    if kind not in _REDUCTIONS:
        raise ValueError(f"the backend {NAME} has no reduction {kind}; it has {', '.join(_NAMES)}")
    return _REDUCTIONS[kind]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _stored(tensor: torch.Tensor) -> Array:
    """The memory of a tensor on the CPU, as an array of its shape, of integers of the elements' size."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # ``Tensor.numpy`` would forbid for good that the tensor's memory is resized, which FSDP1 and others do.
    array: Array = np.from_dlpack(tensor.view(_BITS[tensor.element_size()]))
    return array


def _flat(tensor: torch.Tensor, *, read: bool = True) -> tuple[Array, Done]:
    """A contiguous array, shape (numel,), and what copies it back into the tensor if it is a copy, as for a GPU's.

    ``read``: False if the old elements do not count.
    """
    if tensor.layout != torch.strided:
        raise ValueError(f"the backend {NAME} takes dense tensors, not {tensor.layout}")
    if tensor.device.type != "cpu":
        return _on_host(tensor, read=read)
    stored = _stored(tensor)
    if stored.flags.c_contiguous:
        return stored.reshape(-1), _nothing
    flat = stored.flatten()

    def put_back() -> None:
        stored[...] = flat.reshape(stored.shape)

    return flat, put_back


def _on_host(tensor: torch.Tensor, *, read: bool) -> tuple[Array, Done]:
    own = tensor.detach()
    host = torch.empty(own.shape, dtype=own.dtype)
    if read:
        host.copy_(own)  # waits for what the current stream computes

    def put_back() -> None:
        own.copy_(host)
        torch.accelerator.synchronize(own.device)  # the reader's stream does not know this thread's

    return _stored(host).reshape(-1), put_back


def _check_parts(parts: Sequence[torch.Tensor], size: int, like: torch.Tensor) -> None:
    if len(parts) != size or any(part.numel() != like.numel() or part.dtype != like.dtype for part in parts):
        raise ValueError(f"{size} tensors of {like.numel()} elements of {like.dtype} are expected, one for each rank")


def _check_whole(whole: torch.Tensor, size: int, part: torch.Tensor) -> None:
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        text = f"{whole.numel()} elements of {whole.dtype} are not those of {size} ranks"
        raise ValueError(f"{text}, of which each has {part.numel()} of {part.dtype}")


def _split(tensor: torch.Tensor, sizes: Sequence[int], size: int) -> Sequence[torch.Tensor]:
    """Cut along the first dimension: by ``sizes``, or evenly if it is empty."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes and rows % size:
        raise ValueError(f"{rows} rows cannot be split evenly over {size} ranks: give the sizes")
    sizes = list(sizes) or [rows // size] * size
    if len(sizes) != size or sum(sizes) != rows:
        raise ValueError(f"the sizes {sizes} do not split {rows} rows over {size} ranks")
    return torch.split(tensor.detach() if tensor.dim() else tensor.detach()[None], sizes)


def _nothing() -> None:
    """Stands for no action."""
