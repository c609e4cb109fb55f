"""Which block of a part's memory belongs to which session: no torch, so that it can be read and tested alone.

A block has the keys and values of ``BLOCK_POSITIONS`` positions. A session has a list of blocks, its table. A full
block may be remembered by the hash of the text up to its end (``core.serving.hash_blocks``). Sessions that begin alike
then have the same block, which no session writes any more. A remembered block that no session has stays, until its
memory is needed: least recently used first out.

Attention reads adjacent blocks in place, and others by a copy. So a new session is placed where all of its blocks are
adjacent, if there is such a place, and others take from there only what is left.

When sessions need more than there is, the last ones lose all of their blocks, in the order of ``SessionTables``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from p2ptrain.core.serving import BLOCK_POSITIONS, Preempted, blocks_of


class BlockPool:
    """Blocks 0 to ``count`` - 1. Each is free, or remembered, or sessions have it. An owner is a session's name."""

    def __init__(self) -> None:
        self._sharers: list[int] = []  # by block: number of sessions that have it
        self._free: set[int] = set()
        self._remembered: OrderedDict[int, None] = OrderedDict()  # that no session has; least recently used first
        self._hashes: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        self._places: dict[int, str] = {}  # block → the owner that it is next for

    @property
    def count(self) -> int:
        return len(self._sharers)

    @property
    def available(self) -> int:
        """Blocks that no session has."""
        return len(self._free) + len(self._remembered)

    def grow(self, count: int) -> None:
        """Let there be ``count`` blocks, if there are fewer."""
        self._free.update(range(self.count, count))
        self._sharers += [0] * (count - self.count)

    def share(self, hashes: Iterable[bytes]) -> list[int]:
        """Give another session the blocks of these hashes, up to the first hash that is not known."""
        table: list[int] = []
        for hashed in hashes:
            block = self._blocks.get(hashed)
            if block is None:
                break
            self._remembered.pop(block, None)
            self._sharers[block] += 1
            table.append(block)
        return table

    def place(self, owner: str, count: int) -> None:
        """Keep ``count`` adjacent blocks for ``owner``, of those that were not used for longest."""
        ages = dict.fromkeys(self._free, 0) | {block: age for age, block in enumerate(self._remembered, 1)}
        usable = [block in ages and block not in self._places for block in range(self.count)]
        runs = accumulate(usable, lambda run, is_usable: run + 1 if is_usable else 0)  # usable blocks up to each one
        sums = [0, *accumulate(ages.get(block, 0) for block in range(self.count))]
        ends = [end for end, run in enumerate(runs, 1) if run >= count]
        if ends and count:
            end = min(ends, key=lambda end: sums[end] - sums[end - count])
            self._places.update(dict.fromkeys(range(end - count, end), owner))

    def take(self, owner: str, before: int | None) -> int | None:
        """A block for ``owner`` alone, adjacent to ``before``, its last one, if possible; None: sessions have all."""
        block = self._choose(owner, None if before is None else before + 1)
        if block is None:
            return None
        self._free.discard(block)
        self._remembered.pop(block, None)
        self._forget(block)
        self._sharers[block] = 1
        return block

    def _choose(self, owner: str, adjacent: int | None) -> int | None:
        own = (block for block, name in self._places.items() if name == owner and not self._sharers[block])
        near = [adjacent] if adjacent in self._free else []
        unused = [*near, *self._free, *self._remembered]
        others = (block for block in unused if block not in self._places)
        return next(chain(own, others, unused), None)

    def remember(self, block: int, hashed: bytes) -> None:
        """Remember a full block, unless it or its hash is remembered already."""
        if block not in self._hashes and hashed not in self._blocks:
            self._hashes[block], self._blocks[hashed] = hashed, block

    def _forget(self, block: int) -> None:
        if (hashed := self._hashes.pop(block, None)) is not None:
            del self._blocks[hashed]

    def is_writable(self, block: int) -> bool:
        """Whether the session that has ``block`` may write into it."""
        return self._sharers[block] == 1 and block not in self._hashes

    def release(self, table: Sequence[int]) -> None:
        """Take these blocks from a session. The last ones are the first to be used again."""
        for block in reversed(table):
            self._sharers[block] -= 1
            if not self._sharers[block]:
                if block in self._hashes:
                    self._remembered[block] = None
                else:
                    self._free.add(block)

    def leave(self, owner: str) -> None:
        """Keep no more blocks for ``owner``."""
        self._places = {block: name for block, name in self._places.items() if name != owner}


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block that a session has now. Its first ``count`` positions are to be those of ``source``, and the others 0."""

    block: int
    source: int = 0
    count: int = 0


@dataclass(slots=True)
class BlockTable:
    """The blocks of a session of at most ``positions`` positions, which has the first ``length``.

    Attributes:
        order: see ``SessionTables``.
        was_preempted: whether its positions were dropped, and its owner has not begun again.
    """

    positions: int
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    was_preempted: bool = False
    order: float = 0.0


class SessionTables:
    """The tables of all sessions: those of a lower ``order`` come first, and of equal ones the first comers."""

    def __init__(self) -> None:
        self.pool = BlockPool()
        self._tables: dict[str, BlockTable] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __getitem__(self, name: str) -> BlockTable:
        return self._tables[name]

    def open(self, name: str, positions: int, hashes: Sequence[bytes], order: float = 0.0) -> int:
        """Begin a session with the blocks of these hashes that are remembered. Returns its number of positions."""
        blocks = self.pool.share(hashes[: positions // BLOCK_POSITIONS])
        self._tables[name] = table = BlockTable(positions, blocks, len(blocks) * BLOCK_POSITIONS, order=order)
        self._tables = dict(sorted(self._tables.items(), key=lambda item: item[1].order))
        self.pool.place(name, blocks_of(positions) - len(blocks))
        return table.length

    def close(self, name: str) -> None:
        if (table := self._tables.pop(name, None)) is not None:
            self.pool.release(table.blocks)
            self.pool.leave(name)

    def cut(self, name: str, keep: int) -> None:
        """Keep the first ``keep`` positions, and the blocks that they are in."""
        table = self._tables[name]
        self.pool.release(table.blocks[blocks_of(keep) :])
        del table.blocks[blocks_of(keep) :]
        table.length = min(table.length, keep)

    def extend(self, name: str, keep: int, stop: int) -> list[NewBlock]:
        """Cut a session to ``keep``, and give it blocks that it may write the positions [``keep``, ``stop``) into.
        Raises ``Preempted``: there are not enough, and older sessions have the others; its positions are dropped."""
        table = self._tables[name]
        if table.was_preempted and keep:
            raise Preempted("the positions of a session were dropped, to make room for older sessions")
        table.was_preempted = False
        self.cut(name, keep)
        made = []
        if keep % BLOCK_POSITIONS and not self.pool.is_writable(table.blocks[-1]):
            block, source = self._take(name, table), table.blocks.pop()
            self.pool.release([source])
            table.blocks.append(block)
            made.append(NewBlock(block, source, keep % BLOCK_POSITIONS))
        while len(table.blocks) < blocks_of(stop):
            table.blocks.append(self._take(name, table))
            made.append(NewBlock(table.blocks[-1]))
        return made

    def _take(self, name: str, table: BlockTable) -> int:
        while (block := self.pool.take(name, table.blocks[-1] if table.blocks else None)) is None:
            last = next(reversed([name for name, other in self._tables.items() if other.blocks or other is table]))
            self.cut(last, 0)
            self._tables[last].was_preempted = True
            if last == name:
                raise Preempted("there is no memory for the new positions of a session, beside those of older ones")
        return block

    def finish(self, name: str, length: int, hashes: Sequence[bytes]) -> None:
        """The session has ``length`` positions now. ``hashes``: of its last full blocks."""
        table = self._tables[name]
        table.length = length
        full = table.blocks[: length // BLOCK_POSITIONS]
        for block, hashed in zip(reversed(full), reversed(hashes), strict=False):
            self.pool.remember(block, hashed)
