"""Plugins of installed packages: found, loaded, and blamed for what they raise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.loader import load_settings
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.plugins import MOST_OFFERED, OFFER, installed, lacking, load, make
from p2ptrain.core.text_files import find_files
from ring.codecs import codec_named
from roles.worker.build import capabilities

MODULE = """
from ring.codecs import Codec
class Sizeless(Codec): ...
class Good(dict): ...
def refuse(): raise KeyError("x")
"""
POINTS = """
[p2ptrain.codecs]
good = mine_tested:Good
gone = mine_tested:Gone
sizeless = mine_tested:Sizeless
refuse = mine_tested:refuse
Bad-Name = mine_tested:Good
[p2ptrain.readers]
bare = mine_tested:Good
[p2ptrain.others]
good = mine_tested:Good
"""


@pytest.fixture(autouse=True)
def mine_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    info = tmp_path / "mine_tested-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Mine.Tested\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(POINTS)
    (tmp_path / "mine_tested.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    yield
    installed.cache_clear()


def test_plugins_are_found_without_an_import() -> None:
    found = {key: package for key, (_, package) in installed().items() if package == "Mine.Tested 1.2"}
    assert list(found) == ["codecs:good", "codecs:gone", "codecs:sizeless", "codecs:refuse", "readers:bare"]


@pytest.mark.parametrize("package", ["", "mine-tested", "Mine_Tested==1.2"])
def test_a_plugin_of_the_package_is_loaded_and_made_with_its_settings(package: str) -> None:
    assert load("codecs:good", dict, package).__name__ == "Good"
    assert make("codecs:good", dict, {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("key", "package", "here"),
    [
        ("codecs:other", "mine-other", "no package"),
        ("codecs:good", "mine-other", "Mine.Tested 1.2"),
        ("codecs:good", "mine-tested==1.20", "Mine.Tested 1.2"),
        ("codecs:good", "mine-tested==1.+", "Mine.Tested 1.2"),
    ],
)
def test_what_is_not_installed_is_answered_with_the_command(key: str, package: str, here: str) -> None:
    with pytest.raises(ConfigError, match=f"the plugin {key} is of {here} here") as caught:
        load(key, package=package)
    assert caught.value.remedy.endswith(f"pip install {package}")


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("codecs:gone", "AttributeError: module 'mine_tested' has no attribute 'Gone'"),
        ("codecs:good", "TypeError: it is no list"),
        ("codecs:refuse", "TypeError: "),
    ],
)
def test_a_broken_plugin_is_named_with_its_package(key: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"the plugin {key} of Mine.Tested 1.2 failed: {problem}"):
        load(key, list)


def test_what_a_plugin_raises_is_its_own() -> None:
    with pytest.raises(UserError, match=r"the plugin codecs:refuse of Mine.Tested 1\.2 failed: KeyError: 'x'"):
        make("codecs:refuse", object, {})


def test_a_codec_is_tried_before_a_step_needs_it() -> None:
    with pytest.raises(UserError, match=r"sizeless of Mine.Tested 1\.2 failed when it was tried: NotImplemented"):
        codec_named("sizeless")


def test_a_reader_without_suffixes_is_named_with_its_package(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the plugin readers:bare of Mine.Tested 1\.2 failed: AttributeError"):
        find_files(str(tmp_path), "bare")


@pytest.mark.parametrize(
    ("name", "remedy"), [("goood", "did you mean good?"), ("good", r"plugins\.good\.package = 'Mine\.Tested'")]
)
def test_an_unknown_name_is_compared_with_the_plugins_of_this_machine(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings("tiny", {"ring.codec": name})
    assert re.search(remedy, caught.value.remedy)


def test_a_worker_must_install_what_it_lacks() -> None:
    needs = {"codecs:a": "one", "readers:b": "one", "models:c": "two==1"}
    assert lacking(needs, "codecs:a,readers:b,models:c,models:d") == ""
    assert lacking(needs, "").endswith("run pip install one two==1, then start again")
    assert lacking({"codecs:a": "one"}, "codecs:ab")
    assert lacking(needs, "models:c").startswith("needs codecs:a, readers:b: run pip install one,")


@pytest.mark.parametrize("offer", ["codecs:", "others:a", "codecs:a,", "codecs:a\n", ",".join(["codecs:a"] * 33)])
def test_an_offer_is_bounded(offer: str) -> None:
    assert OFFER.fullmatch(offer) is None
    assert OFFER.fullmatch(",".join(["strategies:" + "a" * 32] * MOST_OFFERED))


def test_a_worker_with_more_plugins_offers_the_first(tmp_path: Path) -> None:
    points = "[p2ptrain.readers]\n" + "".join(f"reader{number} = mine_tested:Good\n" for number in range(200))
    (tmp_path / "mine_tested-1.2.dist-info" / "entry_points.txt").write_text(points)
    assert OFFER.fullmatch(str(capabilities("cpu")["plugins"]))
