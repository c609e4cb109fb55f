"""Attention in training: the conversations of a window are kept apart by their bounds, or by a mask made here.

transformers makes its mask of the positions. To find out whether they begin again inside a window, it reads a value
from the device in every pass, also of running text, and so the host waits for the device. A model whose layers are all
plainly causal does without: running text needs no mask, and ``attend`` takes the bounds of conversations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "p2ptrain"
"""Of ``attend`` among transformers' implementations of attention. It has no masks there, so transformers makes none."""
LEAST_CPU_WINDOW = 512
"""Tokens of a window from which a CPU takes bounds. At 1024 tokens they save a fifth of a step, at 256 nothing."""


class TrainingAttention:
    """How the layers of ``module``, transformers' model or a part of it, attend to a micro-batch.

    Args:
        by_bounds: pass the bounds of conversations to ``attend``; False: a mask.

    Attributes:
        is_plain: whether all layers are plainly causal, so that they use ``attend``. If not, transformers decides.
    """

    def __init__(self, module: Any, *, by_bounds: bool) -> None:
        self._by_bounds, config = by_bounds, module.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        # Doge, whose configuration has ``keep_window_size``, makes its own mask of transformers' one.
        keys = ("sliding_window", "attention_chunk_size", "keep_window_size")
        limits = [getattr(config, key, None) for key in keys]
        self.is_plain = kinds == {"full_attention"} and not any(limits) and module._supports_attention_backend
        self.is_plain &= config._attn_implementation in ("sdpa", NAME)  # else its layers need more than SDPA has
        if self.is_plain:
            AttentionInterface.register(NAME, attend)
            for part in (part for part in module.modules() if hasattr(part, "config")):
                part.config._attn_implementation = NAME  # the layers of a part have the configuration of the whole

    def arguments(self, positions: Tensor | None, bounds: Tensor | None) -> dict[str, Any]:
        """What a forward pass needs beside the positions. See ``passes.DeviceBatch``."""
        if positions is None or not self.is_plain:
            return {}
        if self._by_bounds:
            return {"cu_seq_lens_q": bounds}
        texts = (positions == 0).cumsum(1)
        return {"attention_mask": (texts[:, None, :, None] == texts[:, None, None, :]).tril()}


def takes_bounds(device: torch.device, window: int, *, bf16: bool) -> bool:
    """Whether bounds are faster than a mask, for windows of so many tokens."""
    if device.type == "cuda":
        return bf16 and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and window >= LEAST_CPU_WINDOW


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention of queries (B, heads, T, width), keys and values (B, key heads, T, width); (B, T, heads, width).
    ``cu_seq_lens_q``: bounds, in B T positions, of texts that are kept apart; without it a window is one text."""
    bounds: Tensor | None = options.pop("cu_seq_lens_q", None)
    if bounds is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    has_kernel = q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    call = BY_DEVICE.get(q.device.type, each_text) if has_kernel else each_text
    attended = call(q, k, v, bounds, query.shape[2], scale=options.get("scaling"))
    return attended.view(len(query), -1, *attended.shape[1:]), None


def each_text(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, *, scale: float | None) -> Tensor:
    """Attention of the texts, of at most ``longest`` positions, one after another, whose bounds a device is asked for.
    ``q``, ``k``, ``v``, result: (B T, heads, width)."""
    lengths, grouped = list(filter(None, bounds.diff().tolist())), q.shape[1] != k.shape[1]
    texts = zip(*(torch.split(x.transpose(0, 1)[None], lengths, 2) for x in (q, k, v)), strict=True)
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=grouped)
    return torch.cat([sdpa(*text)[0].transpose(0, 1) for text in texts])


def by_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    scale: float | None,
    kernel: Callable[..., Any] = varlen_attn,
) -> Tensor:
    """The same by one call of a kernel for 16-bit numbers, to which autocast does not cast by itself."""
    kind = q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v.dtype
    q, k, v = (x.to(dtype) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    attended: Tensor = kernel(
        q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=grouped
    )
    return attended


BY_DEVICE: dict[str, Callable[..., Tensor]] = {"cuda": by_kernel}
"""Device → what computes the texts of a micro-batch faster than ``each_text``."""
