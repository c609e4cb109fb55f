"""Real members that break the protocol of a ring: the job goes on, the culprit is named, and nobody else is excluded.

Members that withhold bytes are in ``tests/sim/test_mutations.py``, where waiting costs nothing. Those that send invalid
keys for masks are in ``tests/roles/test_secure.py``.
"""

from __future__ import annotations

from typing import Any

from configs.schema import Profile
from ring.token import TOKEN_BYTES
from roles.strategies import strategy_of
from roles.strategies.strategy import Factory
from tests.roles.in_process import Cluster
from tests.roles.test_cluster import LONG, done, small_profile

FROM_STEP = 6


def sending(bad: bytes) -> Any:
    """Strategies of a member that sends ``bad`` round the ring where others send something of that length."""

    def strategies(profile: Profile) -> Factory:
        def make(*common: Any) -> Any:
            strategy = strategy_of(profile)(*common)
            begin = strategy.begin_view

            async def misbehave(session: Any, connect: Any) -> None:
                honest = session.all_gather

                async def all_gather(mine: bytes, **more: Any) -> list[bytes]:
                    return list(await honest(bad if len(mine) == len(bad) else mine, **more))

                if session.view.step >= FROM_STEP:
                    session.all_gather = all_gather
                await begin(session, connect)

            strategy.begin_view = misbehave  # type: ignore[method-assign]
            return strategy

        return make

    return strategies


async def test_member_that_sends_garbage_is_named_and_excluded_alone(cluster: Cluster) -> None:
    profile = small_profile(job={"workers": 3, "steps": LONG})
    job = await cluster.create(profile)
    for _ in range(3):
        cluster.join()
    await cluster.job_until(job, lambda item: item["step"] >= FROM_STEP)
    culprit = cluster.join(strategies=sending(bytes(TOKEN_BYTES)))
    await cluster.job_until(job, done)
    events = (await cluster.ask("events.list", limit=200))["events"]
    excluded = [item["text"] for item in events if item["kind"] in ("link", "flapping", "struck-off")]
    assert excluded, "nobody was excluded"
    assert all(f"{culprit.identity.name} is excluded" in text for text in excluded), excluded
