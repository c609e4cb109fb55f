"""What engines have in common, whether they train a model or a part of one: weights, gradients and optimizer in flat
memory, the reduce buffer that the ring has of it, and the arithmetic.

On a CPU the reduce buffer *is* the gradient memory: nothing is copied between backward and the ring. On a GPU the
gradients live there and are copied to a (pinned, for CUDA) host buffer, and back once it is reduced. With CUDA the
copies run on a stream of their own, piece by piece while backward still computes.

In the last micro-batch of a share a hook on each parameter tells how far the gradients are final (``compute.buckets``),
so that the ring may begin with the front of the buffer. The hooks run on autograd's thread, inside backward.

In *exact* mode the reduce buffer holds the sum of the micro-batches' gradients in fixed point (``compute.exact``),
beside the gradients; the rest is the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from p2ptrain.compute.buckets import Ferry, OnFinal, Watch, bucket_bounds
from p2ptrain.compute.checkpoint_files import PARAMETERS
from p2ptrain.compute.data import Corpus
from p2ptrain.compute.device import Device, flushed_denormals, share_cores
from p2ptrain.compute.exact import FixedSum, constant_arithmetic, prepare_device
from p2ptrain.compute.fixed import UNIT
from p2ptrain.compute.flat import FlatAdamW, FlatModel, OptimizerSpec, square_sum
from p2ptrain.core.errors import ConfigError, JobFailed, P2PTrainError, ResourceError, StorageError
from p2ptrain.core.training import Applied, Blob

MAX_NOTES_BYTES = 1 << 20
"""What a checkpoint's training file may take: it may have come from another worker."""
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


class FlatEngine:
    """See ``roles.engine.Engine`` for the methods. All block; call them on one thread.

    Args:
        build: makes the module with its first weights, on the CPU; asked again by ``load_initial``.
        steps: of the whole run; the learning rate's schedule ends there.
        micro_batches: in a global batch, M, whoever computes them.
        tokens_per_micro_batch: targets in one micro-batch.
        precision: ``fp32``, or ``bf16`` for autocast (weights, gradients and moments stay fp32).
        exact: the same bits whoever computes which micro-batch.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        optimizer: OptimizerSpec,
        *,
        steps: int,
        micro_batches: int,
        tokens_per_micro_batch: int,
        device: Device,
        precision: str,
        exact: bool,
    ) -> None:
        self._build = build
        self.exact = exact
        self._threads = (device.threads or 1) if exact else 0
        if exact:
            prepare_device(device.kind)
        with self._arithmetic():  # the kernels' threads start here, and inherit that denormals are flushed
            self._flat = FlatModel(self._build(), device.torch_device)
        self._model = self._flat.model
        self._optimizer_spec, self._optimizer = optimizer, FlatAdamW(self._flat, optimizer)
        self._steps, self._micro_batches = steps, micro_batches
        self._device, self._chosen = device.torch_device, device
        self._autocast_dtype = PRECISIONS[precision]
        self._is_host = device.kind == "cpu"
        self._fixed = FixedSum(self._flat.gradients, device.kind, micro_batches) if exact else None
        self._unit = UNIT if exact else 1.0
        self._summed = self._fixed.total if self._fixed else self._flat.gradients  # the ring's buffer is it, or a copy
        on_host = self._fixed.on_host if self._fixed else self._is_host
        self._host = self._summed if on_host else _host_buffer(self._summed)
        self._ferry = _ferry(self._summed, self._host, device.kind)
        self._watch = Watch(self._flat.stops, self._ferry, self._fixed.add if self._fixed else None)
        for index, segment in enumerate(self._flat.segments):
            parameter = self._model.get_parameter(segment.name)
            hook = partial(self._watch.gradient_final, index)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._mirrors: list[tuple[Tensor, Tensor]] = []  # (on the device, what state() gave out) on a GPU
        self._is_initial = True
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.device = device.label
        self.reduce_buffer: npt.NDArray[Any] = self._host.numpy()
        self.exact_from = self._flat.decayed_numel

    def share_cores(self, workers: int) -> None:
        """Take a part of the cores: so many members compute on this machine."""
        share_cores(self._chosen, workers)

    # ---------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int) -> None:
        """Zero the gradients and the loss slot."""
        if self._fixed is not None:
            self._fixed.begin()
        else:
            self._flat.gradients.zero_()
        self._watch.begin()

    def finish_gradients(self, on_final: OnFinal | None = None) -> None:
        """Bring what is left of the gradients, and the loss, into ``reduce_buffer``."""
        if self._ferry is not None:
            self._ferry.finish(on_final or (lambda numel: None))
        elif self._host is not self._summed:
            self._host.copy_(self._summed)  # blocks until the device is done

    def partial_square_sum(self, start: int, stop: int) -> float:
        """Sum of squares, in fp64, of ``reduce_buffer[start:stop]`` without the loss slot.

        NaN where one of them is not finite. Where the loss slot is among them, also where the loss is not, or, in exact
        mode, where something that this member has added in this step did not fit.
        """
        if stop > self._flat.numel and not self._is_sound():
            return math.nan
        return square_sum(self.reduce_buffer[start : min(stop, self._flat.numel)]) * self._unit**2

    def apply(self, step: int, square_sum: float) -> Applied:
        """Clip, then one optimizer step.

        Raises:
            JobFailed: the loss or the norm is not finite: a last guard, for such a step is not committed.
        """
        norm = math.sqrt(square_sum) if square_sum >= 0 else math.nan
        loss = float(self._host[-1]) * UNIT if self.exact else float(self._host[-1]) / self._micro_batches
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise JobFailed(
                f"step {step + 1} is not finite: loss {loss}, gradient norm {norm}",
                remedy="lower optimizer.lr, raise optimizer.warmup_steps, or use device.precision = 'fp32'",
            )
        clip = self._optimizer_spec.clip_norm
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0  # as torch.nn.utils.clip_grad_norm_
        lr = self._optimizer_spec.lr_at(step, self._steps)
        if self._host is not self._flat.gradients:
            self._flat.gradients.copy_(self._host)
        gradients = self._flat.gradients[: self._flat.numel]
        self._optimizer.apply(gradients, step=step, lr=lr, scale=scale * self._unit)
        self._moved_to()
        return Applied(step + 1, loss, lr, norm)

    # ----------------------------------------------------------------------------------------------------------- state

    def state(self) -> list[Blob]:
        """The parameters and the two moments. On a GPU these are host copies of now, brought back by
        ``state_loaded``."""
        arrays = self._state_arrays()
        if self._is_host:
            return [_blob(name, array) for name, array in arrays.items()]
        self._mirrors = [(array, array.to("cpu", copy=True)) for array in arrays.values()]
        return [_blob(name, host) for name, (_, host) in zip(arrays, self._mirrors, strict=True)]

    def load_initial(self) -> None:
        """The state of step 0."""
        if not self._is_initial:
            with self._arithmetic():
                self._flat.copy_weights(self._build())
            self._optimizer.reset()
            self._moved_to()
            self._is_initial = True

    def state_loaded(self, step: int) -> None:
        """The bytes of ``state()`` are those of ``step`` now."""
        for array, host in self._mirrors:
            array.copy_(host)
        self._moved_to()

    def _restore(
        self, directory: Path, training_file: str, optimizer_file: str, weights: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """Take over a checkpoint's moments, and the parameters that ``weights`` reads, by name; it may raise what
        that raises.

        Raises:
            StorageError: it does not fit, or cannot be read; nothing is changed then.
        """
        moments = {name: array for name, array in self._state_arrays().items() if name != PARAMETERS}
        try:
            if (directory / training_file).stat().st_size > MAX_NOTES_BYTES:
                raise ValueError(f"{training_file} is too large")
            notes = json.loads((directory / training_file).read_bytes())
            places = self._flat.segments
            if notes["layout"] != self._flat.layout:
                places = self._flat.former_layouts().get(notes["layout"], [])
            if not places:
                raise StorageError(
                    f"the checkpoint {directory} is of another model",
                    remedy="restore it into a job with its [model] table",
                )
            with safe_open(directory / optimizer_file, "pt") as file:
                loaded = {name: file.get_tensor(name) for name in moments}
            source = weights()
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise StorageError(f"cannot read the checkpoint {directory}: {error}") from error
        except StorageError:
            raise
        except P2PTrainError as error:
            raise StorageError(f"cannot read the checkpoint {directory}: {error.message}") from error
        if any(array.shape != loaded[name].shape for name, array in moments.items()):
            raise StorageError(f"the optimizer's moments in {directory} are of another size")
        self._flat.copy_tensors(source)
        for name, array in moments.items():
            self._flat.rearrange(loaded[name], places, array)
        self._moved_to()

    # ---------------------------------------------------------------------------------------------------------- inside

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Whatever runs kernels that decide bits runs inside."""
        with flushed_denormals(), constant_arithmetic(self._threads) if self.exact else nullcontext():
            yield

    def _is_sound(self) -> bool:
        """Whether the loss is finite and, in exact mode, all that was added here did fit."""
        return self._fixed.fits if self._fixed is not None else math.isfinite(float(self._host[-1]))

    def _autocast(self) -> AbstractContextManager[object]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast_dtype)

    def _moved_to(self) -> None:
        """The state is another one now; host copies of an earlier one are worth nothing any more."""
        self._is_initial, self._mirrors = False, []

    def _state_arrays(self) -> dict[str, Tensor]:
        return {
            PARAMETERS: self._flat.parameters,
            "exp_avg": self._optimizer.exp_avg,
            "exp_avg_sq": self._optimizer.exp_avg_sq,
        }


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """In nats, over ``targets`` (B, T), of ``logits`` (B, T, vocabulary): their mean or their sum."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


@contextmanager
def out_of_memory_told() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(
            f"a micro-batch does not fit into memory: {str(error).splitlines()[0]}",
            remedy="lower batch.micro_batch_sequences (raise batch.micro_batches), or use device.precision = 'bf16'",
        ) from error


def check_run(
    *, steps: int, micro_batches: int, micro_batch_sequences: int, validation_batches: int, precision: str
) -> None:
    """Raises ``ConfigError``, which names the key of the profile."""
    if precision not in PRECISIONS:
        raise ConfigError(f"device.precision = {precision!r} is not known", remedy=f"use {' or '.join(PRECISIONS)}")
    _check_at_least(1, "job.steps", steps)
    _check_at_least(1, "batch.micro_batches", micro_batches)
    _check_at_least(1, "batch.micro_batch_sequences", micro_batch_sequences)
    _check_at_least(0, "validation.batches", validation_batches)


def held_out_batches(corpus: Corpus, wanted: int, sequences: int) -> int:
    """How many validation micro-batches of so many sequences there are, up to ``wanted``.

    Raises:
        ConfigError: some are wanted and there is not one.
    """
    held_out = min(wanted, len(corpus.validation) // sequences)
    if wanted and not held_out:
        raise ConfigError(
            f"{len(corpus.validation)} windows are held out, a micro-batch takes {sequences}",
            remedy="raise data.validation_fraction, give more text, or lower batch.micro_batch_sequences",
        )
    return held_out


def check_context(config: PretrainedConfig, sequence_tokens: int) -> None:
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and sequence_tokens > context:
        raise ConfigError(
            f"data.sequence_tokens = {sequence_tokens} is more than model.context = {context}",
            remedy="make the context at least as long as a sequence",
        )


def _check_at_least(least: int, key: str, value: int) -> None:
    if value < least:
        raise ConfigError(f"{key} = {value} is less than {least}")


def _blob(name: str, array: Tensor) -> Blob:
    return Blob(name, array.numpy().data.cast("B"))


def _host_buffer(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


def _ferry(gradients: Tensor, host: Tensor, kind: str) -> Ferry | None:
    """Copies gradients to the host while backward runs, where the device can do that: with CUDA."""
    if kind != "cuda":
        return None
    stops = [stop for _, stop in bucket_bounds(len(gradients), gradients.element_size())]
    return Ferry(_SideStream(gradients, host).copy, stops)


class _SideStream:
    """Copies from the device into pinned memory, beside what it computes."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = source, target
        self._stream = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]

    def copy(self, start: int, stop: int) -> torch.cuda.Event:
        """See ``Ferry``. In a hook, the current stream is the one that backward computes this gradient on."""
        self._stream.wait_stream(torch.cuda.current_stream(self._source.device))
        with torch.cuda.stream(self._stream):
            self._target[start:stop].copy_(self._source[start:stop], non_blocking=True)
            landing = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landing.record(self._stream)
        return landing
