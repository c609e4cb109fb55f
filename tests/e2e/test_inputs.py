"""A text that is on one machine only."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Machine


@pytest.mark.slow
async def test_a_worker_without_the_text_fetches_its_tokens(machine: Machine) -> None:
    (machine.root / "home-one" / "mine").mkdir(parents=True)
    (machine.root / "home-one" / "mine" / "text.txt").write_text("The quick brown fox. " * 20_000)
    text = {"data__path": "~/mine/*.txt", "job__steps": 10, "job__workers": 2}
    await machine.seed(*machine.settings(**text))
    workers = []
    for name in ("two", "one"):  # the one that lacks the text comes first
        home = str(machine.root / f"home-{name}")
        join = ["join", f"127.0.0.1:{machine.port}", "--state", str(machine.root), "--name", name]
        workers.append(await machine.start(*join, HOME=home, XDG_CACHE_HOME=f"{home}/cache"))
    await workers[0].until(r"matches no file; .*waiting for another worker")
    await workers[0].until(r"fetched data\.path: 293\.\d KiB from one in")
    await machine.job_until(lambda item: item["state"] == "done")
    assert all("Traceback" not in worker.text for worker in workers)
