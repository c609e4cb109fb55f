"""``p2ptrain profiles`` and the start of ``p2ptrain tui``."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.loader import load, shipped

from .conftest import Command


def test_list_for_people_and_programs(command: Command) -> None:
    outcome = command("profiles", "list")
    assert [line.split()[0] for line in outcome.out.splitlines()] == ["NAME", *shipped(), "plugins:"]
    listed = command("profiles", "list", "--json").json["profiles"]
    assert {item["name"]: Path(item["path"]) for item in listed} == shipped()
    assert all(item["description"] for item in listed)


def test_show_names_every_value_and_its_source(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("P2PTRAIN__JOB__SEED", "7")
    path = tmp_path / "mine.toml"
    path.write_text('base = "tiny"\n[job]\nsteps = 5\n')
    arguments = ("profiles", "show", str(path), "--set", "optimizer.lr=0.5")
    document = command(*arguments, "--json").json
    expected = load(str(path), {"P2PTRAIN__JOB__SEED": "7"}, ["optimizer.lr=0.5"])
    assert document == {"profile": expected.profile.model_dump(mode="json"), "sources": expected.sources}
    rows = [line.split(maxsplit=2) for line in command(*arguments).out.splitlines()]
    shown = {row[0]: (row[1], row[2].strip()) for row in rows[1:]}
    assert list(shown) == list(expected.sources)
    assert shown["job.steps"] == ("5", f"{path}:3")
    assert shown["job.seed"] == ("7", "P2PTRAIN__JOB__SEED")
    assert shown["optimizer.lr"] == ("0.5", "--set optimizer.lr=0.5")
    assert shown["job.workers"][1] == "profile tiny"
    assert shown["device.kind"] == ('"auto"', "default")


def test_show_refuses_like_a_run_would(command: Command) -> None:
    outcome = command("profiles", "show", "tinny")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: no profile named 'tinny' ships with p2ptrain\n  → did you mean tiny? ")
