import sys
import tomllib
from pathlib import Path

import pytest

from p2ptrain.core import extras
from p2ptrain.core.extras import install_command

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("extra", [*tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]])
def test_the_command_installs_the_packages_of_an_extra_for_this_interpreter(extra: str) -> None:
    command = install_command(extra)
    assert command.startswith(f"{sys.executable} -m pip install "), command
    packages = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"][extra]
    assert [word.strip("'") for word in command.split()[4:]] == packages


def test_pipx_and_uv_install_in_their_own_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pipx_metadata.json").touch()
    assert install_command("experiments", tmp_path) == "pipx inject p2ptrain 'seaborn>=0.13'"
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    assert install_command("wandb") == f"uv pip install --python {sys.executable} 'wandb>=0.22'"
