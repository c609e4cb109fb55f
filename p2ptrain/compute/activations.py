"""Hidden states and token ids as bytes. ``p2ptrain.core.activations`` says what each encoding is.

fp32, bf16 and fp16 lose nothing where the model computes in the same. int8 is symmetric, with a scale for each position
such that its largest element is 127: each element errs by at most half a scale (0.4 % of the largest), and the
positions of a chunk do not disturb each other. Where an element is not finite, all of its position becomes NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from p2ptrain.core.activations import ENCODINGS, IDS, activation_bytes
from p2ptrain.core.errors import ProtocolError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Of the encodings that are a dtype: what a part may compute in."""
_LARGEST = 127


def encode(hidden: Tensor, encoding: str) -> memoryview:
    """The bytes of hidden states (rows, width), on the host. They stay as they are as long as ``hidden`` does.

    Raises:
        ProtocolError: there is no such encoding.
    """
    activation_bytes(encoding, *hidden.shape)
    hidden = hidden.detach()
    if encoding in DTYPES:
        return _bytes_of(hidden.to("cpu", DTYPES[encoding]))
    exact = hidden.to("cpu", torch.float32)
    scales = exact.abs().amax(dim=1, keepdim=True) / _LARGEST
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    # A scale of 0 (all zero, or so small that the division gave 0) divides nothing. Numbers that are not finite have no
    # int8: their position is NaN by its scale.
    quotients = torch.where(scales > 0, exact / scales, torch.zeros(()))
    values = quotients.round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return memoryview(b"".join((_bytes_of(scales), _bytes_of(values))))


def decode_untrusted(
    payload: memoryview | bytes, encoding: str, rows: int, width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Hidden states (rows, width) of ``dtype`` on the host; ``payload`` is not used any more when it returns.

    Raises:
        ProtocolError: there is no such encoding, or the payload has another size.
    """
    if encoding not in ENCODINGS:
        raise ProtocolError(f"no hidden states travel as {encoding[:32]!r}; known are {', '.join(ENCODINGS)}")
    data = _checked_untrusted(payload, encoding, rows, width)
    if encoding in DTYPES:
        return _tensor_of(data, DTYPES[encoding], (rows, width)).to(dtype)
    scales = _tensor_of(data[: 4 * rows], torch.float32, (rows, 1))
    return (_tensor_of(data[4 * rows :], torch.int8, (rows, width)).to(torch.float32) * scales).to(dtype)


def ids_untrusted(payload: memoryview | bytes, rows: int, vocab_size: int) -> Tensor:
    """Token ids (rows,), int64, each below ``vocab_size``. Raises ``ProtocolError``."""
    ids = _tensor_of(_checked_untrusted(payload, IDS, rows, 0), torch.int32, (rows,)).to(torch.int64)
    if rows and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ProtocolError(f"token ids from {int(ids.min())} to {int(ids.max())}, of a vocabulary of {vocab_size}")
    return ids


def fill(target: Tensor, data: memoryview | bytes, source: torch.dtype) -> None:
    """Copy little-endian elements of dtype ``source`` to the front of ``target`` (n,), of any dtype and device. Where
    it is of another, a copy of ``data`` is made on the way."""
    view = memoryview(data).cast("B")
    front = target[: len(view) // source.itemsize]
    if front.dtype == source and front.device.type == "cpu":
        if len(view):
            front.view(torch.uint8).numpy()[:] = np.frombuffer(view, np.uint8)
    else:
        front.copy_(_tensor_of(view, source, tuple(front.shape)))


def _checked_untrusted(payload: memoryview | bytes, encoding: str, rows: int, width: int) -> memoryview:
    data = memoryview(payload).cast("B")
    expected = activation_bytes(encoding, rows, width)
    if rows < 0 or len(data) != expected:
        raise ProtocolError(f"{rows} positions as {encoding} are {expected} bytes, not {len(data)}")
    return data


def _tensor_of(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor with a copy of ``data``: it may lie anywhere, and belongs to the connection."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
