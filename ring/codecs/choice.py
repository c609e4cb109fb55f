"""Which codec an edge needs: the least lossy one that is fast enough. Pure."""

from __future__ import annotations

import math
from typing import Final

from ring.codecs import codec_named

CANDIDATES: Final[tuple[str, ...]] = ("fp32", "bf16", "int8", "int4", "topk")
"""The least lossy first. Not fp16: at the size of bf16 it loses small gradients altogether. A person may choose it."""

STATED_ERROR: Final[dict[str, float]] = {
    "fp32": 1e-7,
    "bf16": 0.004,
    "fp16": 0.0005,
    "int8": 0.025,
    "int4": 0.25,
    "topk": 1.0,
}
"""The relative error of one exchange of 8 members without feedback, for either distribution, at most; a test holds the
table to it. It grows with the root of the members: a partial sum is encoded again at each hop.
"""

NEARLY_BEST: Final = 1.1
"""A codec that takes a tenth longer than the fastest is as good, and less lossy."""


def choose_codec(
    edge_bps: float,
    rtt_s: float,
    total_bytes: int,
    compute_s: float,
    error_budget: float,
) -> tuple[str, str]:
    """The name of the codec for a ring whose slowest edge is this one, and why.

    It is the least lossy whose exchange stays below ``compute_s`` (it is hidden behind it), or is within a tenth of the
    fastest. A codec whose ``STATED_ERROR`` is above the budget is never chosen, but for fp32, below which nothing is.

    Args:
        edge_bps: what the edge carries, bits per second.
        rtt_s: how long an exchange waits for round trips, whatever its bytes.
        total_bytes: what the edge has to carry in one exchange as float32; 2 (n - 1) / n of the array in a ring of n.
        compute_s: how long a step computes while the exchange may go on.
        error_budget: the largest relative error that one exchange may have.

    Raises:
        ValueError: where an argument is negative or not finite, or a rate is not positive.
    """
    if not (math.isfinite(edge_bps) and edge_bps > 0):
        raise ValueError(f"a rate is positive, not {edge_bps}")
    if not all(math.isfinite(value) and value >= 0 for value in (rtt_s, total_bytes, compute_s, error_budget)):
        raise ValueError(f"not a time, size or error: {(rtt_s, total_bytes, compute_s, error_budget)}")

    def exchange_s(name: str) -> float:
        share = codec_named(name).encoded_bytes(1 << 20) / (4 * (1 << 20))
        return rtt_s + 8 * total_bytes * share / edge_bps

    allowed = [name for name in CANDIDATES if name == CANDIDATES[0] or STATED_ERROR[name] <= error_budget]
    needed_s = {name: exchange_s(name) for name in allowed}
    best_s = min(needed_s.values())
    limit_s = max(compute_s, NEARLY_BEST * best_s)
    chosen = next(name for name in allowed if needed_s[name] <= limit_s)
    rate = f"{edge_bps / 1e6:,.{0 if edge_bps >= 1e7 else 2}f} Mbit/s"
    return chosen, f"{chosen} takes {_time(needed_s[chosen])} at {rate}, computing takes {_time(compute_s)}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
