"""Real members that break the protocol of a ring: the job goes on, the culprit is named, and nobody else is excluded.

Members that withhold bytes are in ``tests/sim/test_mutations.py``, where waiting costs nothing. Those that send invalid
keys for masks are in ``tests/roles/test_secure.py``.
"""

from __future__ import annotations

from ring.token import TOKEN_BYTES
from tests.roles.in_process import Cluster, ScriptedProbe
from tests.roles.test_cluster import LONG, done, small_profile

FROM_STEP = 6


async def test_member_that_sends_garbage_is_named_and_excluded_alone(cluster: Cluster) -> None:
    profile = small_profile(job={"workers": 3, "steps": LONG})
    job = await cluster.create(profile)
    for _ in range(3):
        cluster.join()
    await cluster.job_until(job, lambda item: item["step"] >= FROM_STEP)
    culprit = cluster.join(probe=ScriptedProbe({"vote": lambda vote: (bytes(TOKEN_BYTES), vote[1])}))
    await cluster.job_until(job, done)
    events = (await cluster.ask("events.list", limit=200))["events"]
    excluded = [item["text"] for item in events if item["kind"] in ("link", "flapping", "struck-off")]
    assert excluded, "nobody was excluded"
    assert all(f"{culprit.identity.name} is excluded" in text for text in excluded), excluded
