"""Reads a cluster from a TOML file, for ``p2ptrain explain --cluster``. docs/explain.md has an example."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path

from pydantic import Field

from configs.loader import read_toml, validated
from configs.schema import Table
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.texts import size_of
from ring.planning.measurements import CandidateWorker, DescribedCluster, LinkQuality
from wire.emulate import preset_named

MOST = 256


class Between(Table):
    members: list[str] = Field(min_length=2, max_length=2)
    link: str


class DescribedMember(Table):
    name: str = Field(min_length=1, max_length=64)
    gflops: float = Field(ge=1e-3, le=1e9)
    memory: str = ""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda|mps)$")
    count: int = Field(default=1, ge=1, le=MOST)


class File(Table):
    link: str
    member: list[DescribedMember] = Field(min_length=1, max_length=MOST)
    between: list[Between] = Field(default=[], max_length=4096)


def read(path: Path) -> DescribedCluster:
    """Raises ``ConfigError``, which names the place in the file."""
    _, document = read_toml(path, "cluster")
    remedy = "docs/explain.md has an example of such a file"
    file = validated(File, document, str(path), remedy)
    try:
        return _cluster(file)
    except UserError as error:
        raise ConfigError(f"{path}: {error.message}", remedy=error.remedy or remedy) from None


def _cluster(file: File) -> DescribedCluster:
    members = list[CandidateWorker]()
    for described in file.member:
        count, memory_bytes = described.count, size_of(described.memory) if described.memory else math.inf
        flops, on_host = 1e9 * described.gflops, described.device == "cpu"
        names = [f"{described.name}-{number + 1}" for number in range(count)] if count > 1 else [described.name]
        members += [CandidateWorker(name, name, memory_bytes, flops, on_host) for name in names]
    names = [member.id for member in members]
    if len(names) > MOST:
        raise UserError(f"{len(names)} members are more than {MOST}")
    if len(set(names)) < len(names):
        raise UserError(f"there are two members {next(name for name in names if names.count(name) > 1)}")
    links = dict.fromkeys(permutations(names, 2), LinkQuality.of_preset(preset_named(file.link)))
    for number, way in enumerate(file.between, 1):
        if unknown := set(way.members) - set(names):
            remedy = f"members are {', '.join(names[:8])}"
            raise UserError(f"between.{number}.members: there is no member {min(unknown)}", remedy=remedy)
        one, other = way.members
        if one == other:
            raise UserError(f"between.{number}.members: both are {one}", remedy="name two members")
        try:
            links |= dict.fromkeys([(one, other), (other, one)], LinkQuality.of_preset(preset_named(way.link)))
        except UserError as error:
            raise UserError(f"between.{number}.link: {error.message}", remedy=error.remedy) from None
    return DescribedCluster(tuple(members), links)
