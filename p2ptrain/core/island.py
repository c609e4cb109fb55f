"""The place of a process in an island: one worker that is several processes, on one machine or on several.

``torchrun`` and SLURM tell it in environment variables. An island on one machine has the same ones, from its leader.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from p2ptrain.core.errors import UserError

MOST_PROCESSES = 4096


@dataclass(frozen=True, slots=True)
class IslandPlace:
    """One of ``size`` processes. Number 0 leads: it is the worker that the seed knows.

    Attributes:
        local_rank, local_size: the same, of the processes on this machine.
        address, port: where the leader, or torchrun, has the store by which they find each other.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def environment(self, rank: int) -> dict[str, str]:
        """The variables of process ``rank`` of an island on one machine."""
        values = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": self.size}
        numbers = {name: str(value) for name, value in values.items()}
        return numbers | {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}


def place_in(environment: Mapping[str, str] = os.environ) -> IslandPlace | None:
    """The place that torchrun or SLURM gave to this process; None if it is the only one.

    Raises ``UserError`` if the variables contradict each other.
    """
    of_torchrun = "RANK" in environment and "WORLD_SIZE" in environment
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not of_torchrun:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    rank, size = _number(environment, names[0], 0), _number(environment, names[1], 1)
    if size == 1:
        return None
    local_rank = _number(environment, names[2], 0)
    local_size = _number(environment, names[3], local_rank + 1)
    if not (rank < size <= MOST_PROCESSES and local_rank < local_size <= size):
        text = ", ".join(f"{name}={environment.get(name, '')}" for name in names)
        raise UserError(
            f"this process does not know its place among those of its worker: {text}",
            remedy="start all its processes with torchrun or srun",
        )
    address = environment.get("MASTER_ADDR") or _first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if not address:
        raise UserError("the address of this worker's first process is not known", remedy="set MASTER_ADDR to it")
    # Jobs of the same user on one machine have different ports.
    port = _number(environment, "MASTER_PORT", 15_000 + _number(environment, "SLURM_JOB_ID", 0) % 10_000)
    if not 0 < port < 1 << 16:
        raise UserError(f"the variable MASTER_PORT is {port}, not a port", remedy="set it to one from 1 to 65535")
    return IslandPlace(rank, size, local_rank, local_size, address, port)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if text and not (text.isascii() and text.isdecimal()):
        raise UserError(
            f"the variable {name} is {text[:40]!r}, not a number", remedy="unset it, or use torchrun or srun"
        )
    return int(text) if text else default


def _first_host(nodes: str) -> str:
    """``gpu[07-09,12],cpu1`` begins with gpu07."""
    found = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?", nodes)
    return found[1] + (found[2] or "") if found else ""
