"""Which block belongs to which session, checked after random requests against the texts that the blocks must hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.compute.blocks import SessionTables
from p2ptrain.core.serving import BLOCK_POSITIONS, Preempted, blocks_of, hash_blocks


class Memory:
    """The ids of the positions that a pass would write into each block, and the tables."""

    def __init__(self, blocks: int) -> None:
        self.tables = SessionTables()
        self.tables.pool.grow(blocks)
        self.content = [[-1] * BLOCK_POSITIONS for _ in range(blocks)]
        self.texts: dict[str, list[int]] = {}

    def open(self, name: str, positions: int, prompt: list[int], order: float = 0.0) -> None:
        self.texts[name] = prompt[: self.tables.open(name, positions, hash_blocks(prompt), order)]

    def close(self, name: str) -> None:
        self.tables.close(name)
        del self.texts[name]

    def run(self, name: str, keep: int, ids: list[int]) -> bool:
        """Whether the session was not preempted."""
        try:
            made = self.tables.extend(name, keep, keep + len(ids))
        except Preempted:
            self.texts[name] = []
            return False
        for new in made:
            self.content[new.block] = self.content[new.source][: new.count] + [-1] * (BLOCK_POSITIONS - new.count)
        table = self.tables[name]
        for position, token in enumerate(ids, keep):
            block = table.blocks[position // BLOCK_POSITIONS]
            assert self.tables.pool.is_writable(block)
            self.content[block][position % BLOCK_POSITIONS] = token
        self.texts[name] = self.texts[name][:keep] + ids
        self.tables.finish(name, keep + len(ids), hash_blocks(self.texts[name]))
        return True

    def check(self) -> None:
        pool = self.tables.pool
        had: list[int] = []
        for name in self.tables:
            table = self.tables[name]
            if table.was_preempted:
                self.texts[name] = []
            assert table.length == len(self.texts[name])
            assert len(table.blocks) == blocks_of(table.length)
            held = [token for block in table.blocks for token in self.content[block]]
            assert held[: table.length] == self.texts[name]
            had += table.blocks
        for block in range(pool.count):
            assert pool._sharers[block] == had.count(block)
            assert (block in pool._free) + (block in pool._remembered) + (block in had) == 1
            if block in pool._hashes:
                assert hash_blocks(self._text_up_to(block))[-1:] in ((pool._hashes[block],), ())
                assert pool._blocks[pool._hashes[block]] == block
        assert len(pool._blocks) == len(pool._hashes)

    def _text_up_to(self, block: int) -> list[int]:
        """Of a session that has it, or none."""
        for name in self.tables:
            if block in self.tables[name].blocks:
                return self.texts[name][: (self.tables[name].blocks.index(block) + 1) * BLOCK_POSITIONS]
        return []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(4, 14))
def test_sessions_have_their_own_texts_whatever_others_do(seed: int, blocks: int) -> None:
    rng, memory, opened = random.Random(seed), Memory(blocks), 0
    prompts = [[random.Random(number // 2).randrange(9) for _ in range(200)] + [number] * 60 for number in range(4)]
    for _ in range(60):
        names = list(memory.tables)
        if names and rng.random() < 0.15:
            memory.close(rng.choice(names))
        elif len(names) < 5 and rng.random() < 0.4:
            opened += 1
            memory.open(f"s{opened}", rng.randrange(1, 4 * BLOCK_POSITIONS), rng.choice(prompts))
        elif names:
            name = rng.choice(names)
            length, most = len(memory.texts[name]), memory.tables[name].positions
            keep = min(rng.choice([0, length, length, max(0, length - 3), length // 2]), most - 1)
            ids = rng.choice(prompts)[keep:] if rng.random() < 0.5 else [rng.randrange(9)]
            is_oldest = name == names[0]
            assert memory.run(name, keep, (ids or [1])[: most - keep]) or not is_oldest
        memory.check()


@pytest.mark.parametrize("opened", [("old", "middle", "new"), ("new", "old", "middle")])
def test_last_session_is_preempted_for_an_older_one_and_never_the_other_way(opened: tuple[str, ...]) -> None:
    memory = Memory(4)
    for name in opened:
        memory.open(name, 300, [], order=("old", "middle", "new").index(name))
        assert memory.run(name, 0, [1] * 60)
    assert memory.run("old", 60, [1] * 100)
    assert memory.tables["new"].was_preempted
    assert not memory.tables["middle"].was_preempted
    for _ in range(2):
        with pytest.raises(Preempted, match="were dropped"):
            memory.tables.extend("new", 60, 61)
    with pytest.raises(Preempted, match="no memory"):
        memory.tables.extend("new", 0, 61)
    memory.close("middle")
    assert memory.run("new", 0, [1] * 60)


def test_session_that_begins_alike_gets_the_blocks_of_one_that_is_closed() -> None:
    memory, prompt = Memory(9), [*range(150)]
    memory.open("first", 200, prompt)
    assert memory.texts["first"] == []
    memory.run("first", 0, prompt)
    memory.close("first")
    memory.open("second", 200, [*prompt[:100], *prompt[:50]])
    assert len(memory.texts["second"]) == BLOCK_POSITIONS
    assert memory.run("second", 30, [5] * 10)  # the shared block stays as it was
    memory.check()
    memory.open("third", 200, prompt)
    assert len(memory.texts["third"]) == 2 * BLOCK_POSITIONS


def test_least_recently_used_block_is_forgotten_first() -> None:
    memory = Memory(3)
    for name in ("a", "b", "c"):
        memory.open(name, 64, [])
        memory.run(name, 0, [ord(name)] * 64)
        memory.close(name)
    memory.open("again", 64, [ord("a")] * 64)  # the oldest one is used
    memory.close("again")
    memory.open("d", 64, [])
    memory.run("d", 0, [1])
    memory.close("d")
    assert [len(memory.tables.pool._blocks), memory.tables.pool.available] == [2, 3]
    memory.open("b", 64, [ord("b")] * 64)
    assert memory.texts["b"] == []


def test_blocks_of_sessions_that_grow_in_turns_are_adjacent() -> None:
    memory, names = Memory(16), [f"s{number}" for number in range(4)]
    for name in names:
        memory.open(name, 4 * BLOCK_POSITIONS, [])
    for _ in range(4):
        for name in names:
            memory.run(name, len(memory.texts[name]), [1] * BLOCK_POSITIONS)
    for name in names:
        blocks = memory.tables[name].blocks
        assert blocks == [*range(blocks[0], blocks[0] + 4)]
