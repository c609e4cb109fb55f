"""The memory limit of a container."""

from __future__ import annotations


def memory_left_bytes() -> int | None:
    """Bytes that this process's control group (cgroup v2) may still allocate; None without a limit."""
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            return max(0, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):  # no container, or "max": no limit
        return None
