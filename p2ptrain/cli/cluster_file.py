"""Reads a cluster from a TOML file, for ``p2ptrain explain --cluster``. docs/explain.md has an example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from configs.loader import complaint, read_toml
from configs.schema import Table
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.texts import size_of
from ring.order import LinkQuality
from ring.prediction import Cluster, quality_of
from ring.training_costs import CandidateWorker
from wire.emulate import preset_named

REMEDY = "docs/explain.md has an example of such a file"


class Way(Table):
    preset: str = ""
    rtt_ms: float = Field(default=0.0, ge=0, le=60_000)
    mbit: float = Field(default=0.0, ge=0, le=1e7)

    def quality(self) -> LinkQuality:
        if self.preset:
            return quality_of(preset_named(self.preset))
        return LinkQuality(self.rtt_ms / 2e3, 1e6 * self.mbit or None)


class Between(Way):
    members: list[str] = Field(min_length=2, max_length=2)


class Member(Table):
    name: str = Field(min_length=1, max_length=64)
    gflops: float = Field(gt=0, le=1e9)
    memory: str = ""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda|mps)$")
    count: int = Field(default=1, ge=1, le=256)


class File(Table):
    link: Way = Way()
    member: list[Member] = Field(min_length=1, max_length=256)
    between: list[Between] = Field(default=[], max_length=4096)


def read(path: Path) -> Cluster:
    """Raises ``ConfigError``, which names the place in the file."""
    _, document = read_toml(path, "cluster")
    try:
        return _cluster(File.model_validate(document))
    except ValidationError as error:
        details: Any = error.errors(include_url=False)[0]
        place = ".".join(str(part + 1) if isinstance(part, int) else part for part in details["loc"])
        raise ConfigError(f"{path}: {place} {complaint(details)}", remedy=REMEDY) from None
    except UserError as error:
        raise ConfigError(f"{path}: {error.message}", remedy=error.remedy or REMEDY) from None


def _cluster(file: File) -> Cluster:
    members = [
        CandidateWorker(name, name, size_of(one.memory) if one.memory else 0, 1e9 * one.gflops, one.device == "cpu")
        for one in file.member
        for name in ([one.name] if one.count == 1 else [f"{one.name}-{number + 1}" for number in range(one.count)])
    ]
    names = [one.id for one in members]
    if len(set(names)) < len(names):
        raise UserError(f"there are two members {next(name for name in names if names.count(name) > 1)}")
    links = {(one, other): file.link.quality() for one in names for other in names if one != other}
    for way in file.between:
        one, other = way.members
        if (one, other) not in links:
            raise UserError(f"{one} and {other} are not two members", remedy=f"members are {', '.join(names[:8])}")
        links = links | dict.fromkeys([(one, other), (other, one)], way.quality())
    return Cluster(tuple(members), links)
