"""In an encrypted cluster only who may draft is dialled, and only who may write is let in."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.core.errors import Refused
from p2ptrain.core.serving import Sampling
from roles.verifier.drafter_link import Tokens
from roles.verifier.drafters import Drafters
from tests.roles.drafter_hosts import (
    CONFIG,
    PORT,
    TOKENIZER,
    VOCAB,
    DrafterHost,
    Wobbly,
    around_of,
    drafter_hosts,
    model_serves,
    write,
)
from tests.roles.in_process import DEADLINE_S, HOST, Cluster
from tests.roles.stage_stand_in import tokens_of
from wire.handshake import dial, local_hello
from wire.memory import MemoryNetwork


async def test_each_side_has_a_ticket_of_its_role(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, MemoryNetwork(), encrypted=True)
    await cluster.start_seed()
    drafter, verifier = [await cluster.member(cluster.ticket(role)) for role in ("drafter", "verifier")]
    operator = await cluster.member(cluster.ticket("operator"))
    host = DrafterHost(drafter.peer_id, drafter.network, model_serves(Wobbly(1.0)), step_s=0.0)
    there = asyncio.Event()
    around = around_of(verifier.network, lambda level, kind, text: there.set() if kind == "drafter" else None)
    source = Drafters(replace(around, peer_id=verifier.peer_id), Tokens(VOCAB, TOKENIZER))
    async with drafter_hosts([host]):
        hello = local_hello(peer_id=operator.peer_id, name="o", roles=["operator"], purpose="draft")
        with pytest.raises(Refused, match="does not permit 'draft'"):
            await dial(operator.network, HOST, PORT, hello, timeout_s=DEADLINE_S)
        source.here([replace(host.at, host=HOST)])
        async with asyncio.timeout(DEADLINE_S):
            await there.wait()
        written = await write(source, [5, 80, 11], 30, Sampling(temperature=0), pass_s=0.002)
        assert written.tokens == tokens_of(CONFIG, [5, 80, 11], 30, Sampling(temperature=0))
        assert written.facts[0].peer_id == drafter.peer_id
        await source.close()
    await cluster.close()
