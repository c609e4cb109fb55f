"""Reads a cluster from a TOML file, for ``p2ptrain explain --cluster``. docs/explain.md has an example."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli
from pydantic import Field, ValidationError

from configs.loader import complaint
from configs.schema import Table
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.texts import size_of
from ring.order import LinkQuality, Links
from ring.prediction import Cluster, quality_of
from ring.training_costs import CandidateWorker
from wire.emulate import preset_named

MAX_BYTES = 1 << 20
REMEDY = "docs/explain.md has an example of such a file"


class Way(Table):
    """A link: a preset, or a round trip (ms) and a rate (Mbit/s)."""

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
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES} bytes", remedy="is this the right file?")
        document: dict[str, Any] = tomli.loads(content.decode())
        return _cluster(File.model_validate(document))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", remedy=REMEDY) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", remedy="is this the right file?") from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not TOML: {error.msg}", remedy="see https://toml.io") from None
    except ValidationError as error:
        details: Mapping[str, Any] = error.errors(include_url=False)[0]
        place = ".".join(str(part + 1) if isinstance(part, int) else part for part in details["loc"])
        raise ConfigError(f"{path}: {place} {complaint(details)}", remedy=REMEDY) from None
    except UserError as error:
        raise ConfigError(f"{path}: {error.message}", remedy=error.remedy or REMEDY) from None


def _cluster(file: File) -> Cluster:
    members = []
    for one in file.member:
        memory_bytes = size_of(one.memory) if one.memory else 0
        for number in range(one.count):
            name = f"{one.name}-{number + 1}" if one.count > 1 else one.name
            members.append(CandidateWorker(name, name, memory_bytes, 1e9 * one.gflops, one.device == "cpu"))
    names = [one.id for one in members]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"there are two members {twice}", remedy="give each its own name")
    usual = file.link.quality()
    links: Links = {(one, other): usual for one in names for other in names if one != other}
    for way in file.between:
        if unknown := set(way.members) - set(names):
            raise UserError(
                f"a link names {unknown.pop()}, which is no member", remedy=f"members are {', '.join(names[:8])}"
            )
        here, there = way.members
        links = {**links, (here, there): way.quality(), (there, here): way.quality()}
    return Cluster(tuple(members), links)
