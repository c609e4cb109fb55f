"""The example package of plugins, installed as a person installs it."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import ROOT, Machine

NAMES = {
    "job__strategy": "clipped",
    "ring__codec": "fp24",
    "data__format": "fortune",
    "model__architecture": "convlm",
    "track__to": "csv",
}
SETTINGS = {"clipped__limit": 0.01, "convlm__kernel": 3, "csv__columns": "train/loss", "fp24__nearest": "false"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the installed package."""
    place = tmp_path_factory.mktemp("plugins")
    shutil.copytree(ROOT / "examples" / "plugin", place / "source")  # pip builds in it
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(place / "site"), str(place / "source")]
    subprocess.run(command, check=True)
    return place / "site"


def test_the_codec_of_the_example_rounds_and_keeps_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "plugin")
    from p2ptrain_example.codec import Fp24

    largest = np.finfo(np.float32).max
    all_ones = np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0]  # a NaN that rounding would make -0
    values = np.array([1 + 2**-16, 1 + 2**-17, -1e-30, np.inf, -np.inf, all_ones, largest], np.float32)
    for nearest in (True, False):
        codec = Fp24(nearest=nearest)
        encoded, decoded = np.zeros(codec.encoded_bytes(values.size), np.uint8), np.zeros_like(values)
        codec.encode(values, encoded)
        codec.decode(encoded, decoded)
        assert list(np.isfinite(decoded)) == [True, True, True, False, False, False, not nearest]
        assert abs(decoded[2] / values[2] - 1) <= 2 ** -(16 if nearest else 15)
    assert decoded[0] == decoded[1] == 1  # towards zero


@pytest.mark.slow
async def test_a_job_trains_with_plugins_of_every_kind(
    machine: Machine, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = "\n%\n".join(f"Saying number {number}: do not repeat yourself." for number in range(3000))
    (machine.root / "sayings.fortune").write_text(texts)
    packages = {f"plugins__{name}__package": "p2ptrain-example==1.0" for name in NAMES.values()}
    settings = {f"plugins__{key}": value for key, value in SETTINGS.items()}
    data = {"data__path": "sayings.fortune", "data__share": "false", "job__steps": 10, "job__workers": 2}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(site)]))
    seed = await machine.seed(*machine.settings(**NAMES, **packages, **settings, **data))
    without = await machine.start(
        "join", f"127.0.0.1:{machine.port}", "--state", str(machine.root), "--name", "plain", PYTHONPATH=str(ROOT)
    )
    needs = r"needs strategies:clipped, readers:fortune, codecs:fp24, models:convlm: "
    await without.until(needs + r"run pip install p2ptrain-example==1\.0, then start again")
    waiting = await machine.job_until(lambda item: "pip install" in item["reason"])
    assert "plain needs strategies:clipped" in waiting["reason"]
    for name in ("one", "two"):
        await machine.join("--name", name)
    done = await machine.job_until(lambda item: item["state"] == "done")
    assert (done["strategy"], done["step"]) == ("clipped", 10)
    events = (await machine.ask("events.list", after_id=-200, limit=200))["events"]
    assert any("codec fp24, as the profile says" in event["text"] for event in events)
    (config,) = {path.read_text() for path in machine.root.rglob("step-*10/config.json")}
    assert json.loads(config)["model_type"] == "convlm"
    assert json.loads(config)["kernel"] == 3
    assert await seed.interrupt() == 0  # it writes what is left
    (table,) = machine.root.rglob("metrics.csv")
    rows = list(csv.reader(table.read_text().splitlines()))
    assert rows[0] == ["step", "train/loss"]
    assert [int(row[0]) for row in rows[1:]] == list(range(1, 11))
    assert all("Traceback" not in process.text for process in machine.processes)
