"""The seeds of a cluster, as one member knows them: where they are, and the highest term that one of them led in.

A member learns of them from the seed that leads, and keeps them on its disk: so one that is started again with the
address of a seed that is gone finds the one that leads now. Whoever has seen a term takes orders in no lower one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import ProtocolError, UserError
from p2ptrain.core.ids import is_id
from wire.address import format_address, is_loopback, parse_address
from wire.messages import MAX_TERM

MAX_SEEDS = 16
MAX_CLUSTERS = 8
MAX_FILE_BYTES = 64 << 10
FILE_NAME = "seeds.json"

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one cluster. ``cluster``: empty before a seed was met. ``seeds``: whom to try, in this order."""

    seeds: tuple[Address, ...]
    cluster: str = ""
    term: int = 0

    def stale(self, cluster: str, term: int) -> bool:
        """Whether a seed that leads in ``term`` was succeeded by another one."""
        return cluster == self.cluster and term < self.term

    def met(self, at: Address, cluster: str, term: int, seeds: Iterable[str], *, plain: bool) -> Known:
        """After the seed at ``at`` said which come after it. A peer's word: what is no address is left out.

        Args:
            plain: nobody vouches for what is not on this machine.

        Raises:
            ProtocolError: no seed leads in such a term.
        """
        if not 0 <= term < MAX_TERM:
            raise ProtocolError(f"a seed of term {term}")
        told = [at, *addresses_untrusted(seeds, at[0], plain=plain)]
        return Known(tuple(dict.fromkeys([*told, *self.seeds]))[:MAX_SEEDS], cluster, term)

    def hinted(self, addresses: Iterable[str], via: str, *, plain: bool) -> Known:
        """After a standby said who leads."""
        told = addresses_untrusted(addresses, via, plain=plain)
        return replace(self, seeds=tuple(dict.fromkeys([*self.seeds, *told]))[:MAX_SEEDS])


def addresses_untrusted(texts: Iterable[str], via: str, *, plain: bool) -> list[Address]:
    """Those that are addresses; one without a host is at ``via``. Never raises."""
    found = []
    for text in list(texts)[:MAX_SEEDS]:
        try:
            host, port = parse_address(
                f"{format_address(via, 1).rpartition(':')[0]}{text}" if text[:1] == ":" else text
            )
        except UserError:
            continue
        if not plain or not is_loopback(via) or is_loopback(host):
            found.append((host, port))
    return found


def kept(data: bytes) -> list[Known]:
    """What was kept, the newest cluster first. Raises ``ProtocolError``: it is damaged."""
    try:
        found = [
            Known(tuple(parse_address(text) for text in item["seeds"]), item["cluster"], item["term"])
            for item in json.loads(data)
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError) as error:
        raise ProtocolError(f"this is no list of seeds: {type(error).__name__}") from error
    for known in found:
        if not isinstance(known.cluster, str) or not is_id(known.cluster) or type(known.term) is not int:
            raise ProtocolError("this is no list of seeds: a cluster that is none")
        if not 0 <= known.term < MAX_TERM or not 0 < len(known.seeds) <= MAX_SEEDS:
            raise ProtocolError("this is no list of seeds: a cluster that is none")
    return found[:MAX_CLUSTERS]


def clusters_in(disk: Disk, directory: Path) -> list[Known]:
    """The seeds that a member with this directory has met. Raises ``StorageError``."""
    if FILE_NAME not in disk.list_dir(directory):
        return []
    try:
        return kept(disk.read(directory / FILE_NAME, max_bytes=MAX_FILE_BYTES))
    except ProtocolError:  # damaged: it is written anew when the seed that the person named is met
        return []


def text_of(known: Known, others: Iterable[Known]) -> bytes:
    """To be kept: ``known`` first."""
    all_of_them = [known, *(item for item in others if item.cluster != known.cluster)][:MAX_CLUSTERS]
    return json.dumps(
        [
            {"cluster": item.cluster, "term": item.term, "seeds": [format_address(*seed) for seed in item.seeds]}
            for item in all_of_them
        ]
    ).encode()


def begun(given: Iterable[Address], clusters: Iterable[Known]) -> Known:
    """What to begin with: the addresses that a person gave, and those of the clusters that they belong to."""
    first = list(dict.fromkeys(given))
    for known in clusters:
        if set(first) & set(known.seeds):
            return replace(known, seeds=tuple(dict.fromkeys([*first, *known.seeds]))[:MAX_SEEDS])
    return Known(tuple(first))
