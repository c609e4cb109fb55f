"""Memory: what a container leaves, and an estimate for training a part of a model, from sizes alone.

Workers check the estimate before they build a part, and the seed uses it for placement.

The compute device holds, per parameter, in fp32 (``compute.flat``): the weight, the gradient and what the optimizer
keeps, such as two moments. On a CPU the gradient is also the reduce buffer, and clipping makes a copy of it. An
accelerator needs no such copy; there the reduce buffer is on the host. Each micro-batch in flight needs memory for what
its backward pass uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HOST_COPIES = 3
DEVICE_COPIES = 2
"""Arrays of the size of the weights that train on the compute device, beside the optimizer's: on a CPU, on an
accelerator."""
LOCAL_FACTOR = 1.75
"""Memory for what trains with ``local``, beside that of summed gradients: with AdamW 7 arrays instead of 4 or 5."""
MOMENTS = 2.0
"""Arrays that AdamW keeps."""
ROUNDED_COPIES = {"bf16-weights": 0.5}
"""The copy of weights that the model computes with, by ``device.precision``, as a share of fp32. Else there is none."""
BASE_COPIES = {"fp32": 1.0, "bf16": 0.5, "nf4": 0.14}
"""What a frozen weight takes, by ``lora.base``, as a share of fp32. NF4 has 4 bits, and a scale for each 64 weights."""
GATHERED = 5
"""Arrays of the size of the largest unit that FSDP2 holds at a time: gathered, in use, gathered in advance, its
gradient, and that for the members."""


def memory_left_bytes(available: int) -> int:
    """The part of a machine's ``available`` bytes that this process's control group (cgroup v2) may allocate."""
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            return max(0, min(available, int(limit.read()) - int(used.read())))
    except (OSError, ValueError):  # no container, or "max": no limit
        return available


def layers_kept_bytes(
    layers: int, tokens: int, *, width: int, inner: int, vocab: int = 0, layers_kept: bool = True
) -> int:
    """Bytes kept from a micro-batch's forward pass to its backward pass, in fp32. A lower bound: attention adds to it.

    A layer keeps per token about 16 times its width and 3 times that of its feed-forward layer. Without
    ``layers_kept`` only one does at a time, and each keeps its input. ``vocab``: of the head, which keeps the logits,
    their softmax and its gradient; 0: there is none.
    """
    layer_bytes, input_bytes = 4 * tokens * (16 * width + 3 * inner), 4 * tokens * width
    return (layers * layer_bytes if layers_kept else layers * input_bytes + layer_bytes) + 12 * tokens * vocab


def kept_moments(optimizer: str, hidden: float) -> float:
    """Arrays of the size of what trains that an optimizer keeps. ``hidden``: share of the matrices of hidden layers in
    what trains: Muon keeps one array for these, and AdamW's two for the rest."""
    return {"adamw": MOMENTS, "muon": MOMENTS - hidden, "sgd": 0.0}[optimizer]


def held_copies(base: str, precision: str) -> float:
    """What a frozen weight takes, as a share of fp32: by ``lora.base``, or rounded to compute with."""
    return min(BASE_COPIES[base], ROUNDED_COPIES.get(precision, 1.0))


def copies(
    *, on_host: bool, trained: float = 1.0, held: float = 0.0, moments: float = MOMENTS, precision: str = "fp32"
) -> float:
    """Copies of the weights, in fp32, on the compute device. ``on_host``: it is a CPU. ``trained``, ``held``: sizes of
    what trains and of what is frozen, as shares of the weights. ``moments``: see ``kept_moments``."""
    arrays = (HOST_COPIES if on_host else DEVICE_COPIES) + moments + ROUNDED_COPIES.get(precision, 0.0)
    return trained * arrays + held


def part_training_bytes(held_bytes: int, kept_bytes: int, inputs_bytes: int, *, in_flight: int, recompute: bool) -> int:
    """Bytes on the compute device for training a part.

    Args:
        held_bytes: size of all copies of the weights, see ``copies``.
        kept_bytes: bytes kept for one micro-batch by the part's layers, and by the head on the last stage.
        inputs_bytes: encoded inputs of one micro-batch; 0 on the first stage.
        in_flight: micro-batches between forward and backward pass. With ``recompute`` the part keeps the inputs of
            all, and ``kept_bytes`` of one.
    """
    return held_bytes + (kept_bytes + in_flight * inputs_bytes if recompute else in_flight * kept_bytes)


def shard_training_bytes(
    sizes: ModelSizes, kept_bytes: int, *, shards: int, accumulate: bool, on_host: bool, moments: float = MOMENTS
) -> tuple[int, int]:
    """Bytes for training one of ``shards`` shards: of its rows, and beside them. ``kept_bytes``: for one micro-batch,
    by all layers and the head. ``accumulate``: whole gradients are kept."""
    whole = sizes.weights_bytes(0, sizes.layers)
    largest = max(*sizes.layers_bytes, whole - sum(sizes.layers_bytes))
    return (
        int(copies(on_host=on_host, moments=moments) * whole / shards),
        GATHERED * largest + (whole if accumulate else 0) + kept_bytes,
    )


def in_flight_that_fit(memory_bytes: int, kept_bytes: int, inputs_bytes: int, *, recompute: bool, most: int) -> int:
    """Micro-batches, from 1 to ``most``, that fit into ``memory_bytes``, the memory left beside the weights. Other
    arguments are as in ``part_training_bytes``."""
    each_bytes = inputs_bytes if recompute else kept_bytes
    return max(1, min(most, (memory_bytes - (kept_bytes if recompute else 0)) // each_bytes)) if each_bytes else most


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model's weights and KV cache.

    Attributes:
        layers_bytes: weights of each layer.
        cache_bytes: KV cache of one position in each layer.
        first_bytes: weights of the first stage besides layers: the embedding.
        last_bytes: weights of the last stage besides layers: norm and head, including a tied head's matrix.
        tied_bytes: share of ``last_bytes`` that the first stage also holds. A single stage holds it once.
    """

    layers_bytes: tuple[int, ...]
    cache_bytes: tuple[int, ...]
    first_bytes: int = 0
    last_bytes: int = 0
    tied_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.layers_bytes or len(self.cache_bytes) != len(self.layers_bytes):
            raise ValueError("a model needs at least one layer, and a cache size for each layer")
        if min(*self.layers_bytes, *self.cache_bytes, self.first_bytes, self.last_bytes, self.tied_bytes) < 0:
            raise ValueError("sizes must not be negative")
        if self.tied_bytes > min(self.first_bytes, self.last_bytes):
            raise ValueError("tied_bytes must not exceed first_bytes or last_bytes")

    @property
    def layers(self) -> int:
        return len(self.layers_bytes)

    def weights_bytes(self, start: int, stop: int) -> int:
        """Bytes of the weights of a stage with layers [start, stop)."""
        size_bytes = sum(self.layers_bytes[start:stop])
        if start == 0:
            size_bytes += self.first_bytes
        if stop == self.layers:
            size_bytes += self.last_bytes - (self.tied_bytes if start == 0 else 0)
        return size_bytes

    def streamed_bytes(self, start: int, stop: int) -> int:
        """Bytes of weights that such a stage reads to compute one token."""
        return sum(self.layers_bytes[start:stop]) + (self.last_bytes if stop == self.layers else 0)


LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose sizes ``llama_sizes`` knows."""


def llama_sizes(model: Any, vocab: int) -> ModelSizes:
    """The sizes in fp32, without a cache, of a new model of one of ``LLAMAS``. ``model``: the table of a profile."""
    width, inner = model.hidden_size, model.intermediate_size
    head, keys = width // model.heads, model.kv_heads * (width // model.heads)
    layer = 2 * width * width + 2 * width * keys + 3 * width * inner + 2 * width
    if model.architecture == "qwen2":
        layer += width + 2 * keys  # biases of queries, keys and values
    if model.architecture == "qwen3":
        layer += 2 * head  # norms of queries and keys
    matrix = 4 * vocab * width
    tied = matrix if model.tie_embeddings else 0
    return ModelSizes((4 * layer,) * model.layers, (0,) * model.layers, matrix, matrix + 4 * width, tied)
