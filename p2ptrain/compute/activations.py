"""Encoders and decoders of hidden states and token ids. ``p2ptrain.core.activations`` defines the encodings.

fp32, bf16 and fp16 are lossless if the model computes in the same dtype. int8 is symmetric, with one scale per position
that maps the position's largest magnitude to 127. Each element errs by at most half a scale (0.4 % of the largest), and
positions do not affect one another. If an element is not finite, its whole position becomes NaN.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from p2ptrain.core.activations import ENCODINGS, IDS, activation_bytes
from p2ptrain.core.errors import ProtocolError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Encodings that are a plain dtype. A part computes in one of these."""
_LARGEST = 127


def encode(hidden: Tensor, encoding: str) -> memoryview:
    """Encode hidden states (rows, width) to bytes on the host. The result may share memory with ``hidden``. Raises
    ``ProtocolError``: the encoding is unknown."""
    activation_bytes(encoding, *hidden.shape)
    hidden = hidden.detach()
    if encoding in DTYPES:
        return bytes_of(hidden.to("cpu", DTYPES[encoding]))
    exact = hidden.to("cpu", torch.float32)
    scales = exact.abs().amax(dim=1, keepdim=True) / _LARGEST
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    # A scale of 0 (all elements are zero or tiny) or NaN (an element is not finite) gives zeros. A NaN scale then makes
    # the decoded position NaN.
    quotients = torch.where(scales > 0, exact / scales, torch.zeros(()))
    values = quotients.round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return memoryview(b"".join((bytes_of(scales), bytes_of(values))))


def decode_untrusted(
    payload: memoryview | bytes, encoding: str, rows: int, width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Decode hidden states (rows, width) to ``dtype`` on the host. The result does not share memory with ``payload``.
    Raises ``ProtocolError``: the encoding is unknown, or the payload has the wrong size."""
    if encoding not in ENCODINGS:
        raise ProtocolError(f"unknown encoding of hidden states {encoding[:32]!r}; known are {', '.join(ENCODINGS)}")
    data = _checked_untrusted(payload, encoding, rows, width)
    if encoding in DTYPES:
        return tensor_of(data, DTYPES[encoding], (rows, width)).to(dtype)
    scales = tensor_of(data[: 4 * rows], torch.float32, (rows, 1))
    return (tensor_of(data[4 * rows :], torch.int8, (rows, width)).to(torch.float32) * scales).to(dtype)


def ids_untrusted(payload: memoryview | bytes, rows: int, vocab_size: int) -> Tensor:
    """Decode token ids (rows,), int64, each below ``vocab_size``. Raises ``ProtocolError``."""
    ids = tensor_of(_checked_untrusted(payload, IDS, rows, 0), torch.int32, (rows,)).to(torch.int64)
    if rows and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ProtocolError(f"token ids from {int(ids.min())} to {int(ids.max())} for a vocabulary of {vocab_size}")
    return ids


def _checked_untrusted(payload: memoryview | bytes, encoding: str, rows: int, width: int) -> memoryview:
    data = memoryview(payload).cast("B")
    expected = activation_bytes(encoding, rows, width)
    if rows < 0 or len(data) != expected:
        raise ProtocolError(f"{rows} positions as {encoding} are {expected} bytes, not {len(data)}")
    return data


def tensor_of(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor with a copy of ``data``, which may be unaligned and belongs to the connection."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the host, which may share its memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
