"""Chooses the codec for a ring: the least lossy one that is fast enough. Pure."""

from __future__ import annotations

from typing import Final

from ring.codecs import codec_named
from ring.planning.measurements import LinkQuality, all_reduce_s

CANDIDATES: Final[tuple[str, ...]] = ("fp32", "bf16", "int8", "int4", "topk")
"""The least lossy first. Without fp16: at the size of bf16 it loses small gradients entirely. A profile may set it."""

STATED_ERROR: Final[dict[str, float]] = {
    "fp32": 1e-7,
    "bf16": 0.004,
    "fp16": 0.0005,
    "int8": 0.025,
    "int4": 0.25,
    "topk": 1.0,
}
"""Upper bound of the relative error of one exchange of 8 members without feedback; a test checks it. The error grows
with the root of the number of members, since each hop encodes a partial sum again."""

NEARLY_BEST: Final = 1.1
"""A less lossy codec is preferred if it takes at most a tenth longer than the fastest."""


def choose_codec(
    edge: LinkQuality, members: int, total_bytes: int, compute_s: float, error_budget: float
) -> tuple[str, str]:
    """Choose the codec for a ring by its slowest edge. Returns its name and the reason.

    It is the least lossy codec whose exchange takes at most ``compute_s``, behind which it is hidden, or is within a
    tenth of the fastest. A codec whose ``STATED_ERROR`` is above the budget is never chosen, except fp32.

    Args:
        edge: with a bandwidth.
        total_bytes: of the array as float32.
        compute_s: computing time of a step during which the exchange may run.
        error_budget: the largest relative error that one exchange may have.
    """
    assert edge.bandwidth_bps is not None
    allowed = [name for name in CANDIDATES if name == CANDIDATES[0] or STATED_ERROR[name] <= error_budget]
    needed_s = {}
    for name in allowed:
        encoded_bytes = total_bytes * codec_named(name).encoded_bytes(1 << 20) / (4 << 20)
        chunk_s = 8 * encoded_bytes / members / edge.bandwidth_bps
        needed_s[name] = all_reduce_s(members, edge.latency_s, chunk_s=chunk_s)
    limit_s = max(compute_s, NEARLY_BEST * min(needed_s.values()))
    chosen = next(name for name in allowed if needed_s[name] <= limit_s)
    rate = f"{edge.bandwidth_bps / 1e6:,.{0 if edge.bandwidth_bps >= 1e7 else 2}f} Mbit/s"
    return chosen, f"{chosen} takes {_time(needed_s[chosen])} at {rate}, computing takes {_time(compute_s)}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
