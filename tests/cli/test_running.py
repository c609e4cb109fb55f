"""A seed that runs here is found without an address: by commands of its user, and while its process lives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cluster.access import read_target
from p2ptrain.cluster.running import announce_seed, running_seeds
from p2ptrain.core.errors import UserError

from .conftest import Command

HERE = ("127.0.0.1", 9000)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("P2PTRAIN_SEED", "")
    return tmp_path / "home" / "p2ptrain" / "running"


def test_it_is_found_while_it_runs_and_by_this_user_alone(home: Path, tmp_path: Path) -> None:
    assert read_target("") == ("127.0.0.1", 7337)
    with announce_seed(HERE, tmp_path):
        (file,) = home.iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        assert read_target("") == read_target(f"@{tmp_path}") == HERE
        with pytest.raises(UserError, match=r"no seed of yours runs with --state .*home") as refused:
            read_target(f"@{home}")
        assert f"127.0.0.1:9000 (--state {tmp_path})" in refused.value.remedy
    assert list(home.iterdir()) == []


def test_files_of_processes_that_died_are_ignored_and_removed(home: Path, tmp_path: Path) -> None:
    with announce_seed(HERE, tmp_path):
        (file,) = home.iterdir()
        host = file.name.removesuffix(str(os.getpid()))
        for pid in ("1", f"{2**22 + 1}"):  # one that began after the file was written, and none
            (home / f"{host}{pid}").write_bytes(file.read_bytes())
            os.utime(home / f"{host}{pid}", (0, 0))
        (home / f"{host}{os.getppid()}").write_text("no JSON")
        (home / "elsewhere-1").write_bytes(file.read_bytes())
        assert [seed.address for seed in running_seeds()] == [HERE]
        kept = {file.name, f"{host}1", f"{host}{os.getppid()}", "elsewhere-1"}
        assert {each.name for each in home.iterdir()} == kept, "what a process may still have is kept"


def test_of_several_one_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with announce_seed(HERE, tmp_path):
        monkeypatch.setattr("os.getpid", os.getppid)
        with announce_seed(("127.0.0.1", 9001), tmp_path / "other"), pytest.raises(UserError) as refused:
            read_target("")
    assert refused.value.message.startswith("2 seeds of yours run on this machine: ")
    assert f"127.0.0.1:9000 (--state {tmp_path})" in refused.value.message
    assert f"127.0.0.1:9001 (--state {tmp_path / 'other'})" in refused.value.message


def test_commands_ask_it(command: Command, fake_seed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_seed.answers["jobs.list"] = {"jobs": []}
    host, _, port = fake_seed.address.rpartition(":")
    monkeypatch.setenv("P2PTRAIN_SEED", "127.0.0.1:1")  # a typed --seed wins
    with announce_seed((host, int(port)), tmp_path):
        assert command("jobs", "list", "--seed", f"@{tmp_path}", "--json").json == {"jobs": []}
        monkeypatch.setenv("P2PTRAIN_SEED", "")
        assert command("jobs", "list", "--json").json == {"jobs": []}
    outcome = command("jobs", "list", "--seed", f"@{tmp_path}", "--json")
    assert (outcome.code, "no seed of yours" in outcome.err, list(outcome.json)) == (2, True, ["error"])


def test_without_peers_the_hint_names_the_address_and_the_code(command: Command, fake_seed: Any) -> None:
    from wire.records import ClusterInfo

    fake_seed.answers["peers.list"] = {"peers": []}
    for address, hint in (
        ("127.0.0.1:7337", "join 127.0.0.1:7337\n"),
        ("192.168.1.20:7337", "join 192.168.1.20:7337   (`p2ptrain ticket code`"),
    ):
        cluster = ClusterInfo("c", "attic", "0", address, 0.0, 0, 0)
        fake_seed.answers["cluster.info"] = {"cluster": cluster.to_map()}
        assert hint in command("peers", "list", "--seed", fake_seed.address).err
