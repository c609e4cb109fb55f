"""Programs and notebooks, as their documentation shows them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from .conftest import ROOT

NOTEBOOK = ROOT / "examples" / "train_and_write.ipynb"


@pytest.mark.slow
@pytest.mark.skipif("P2PTRAIN_LONG" not in os.environ, reason="a minute for what the notebook shows: P2PTRAIN_LONG=1")
def test_examples_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text("utf-8"), re.DOTALL):
        exec(example, names)
    result = names["result"]
    assert [row.step for row in result.metrics] == list(range(1, 41))
    assert (result.checkpoint / "config.json").is_file()
    assert (result.state / "logs" / "worker-2.log").is_file()
    assert len(names["losses"]) == 5
    shown = capsys.readouterr().out
    assert shown.count("done") == 2
    assert "unknown key job.step" in shown


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells), "strip its outputs"
    notebook.cells.insert(0, new_code_cell("from tests import fork_server; fork_server.install()"))
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = json.dumps(notebook.cells)
    assert "image/png" in outputs
    assert "text/html" in outputs
