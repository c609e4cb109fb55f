"""``python -m tests.clients.harness``: three tasks by a verifier and by the harness's backend ``hf``, compared."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
TASKS = Path(__file__).parent / "tasks"
MOST_DIFFERENCE = 1e-4
WINDOW_TOKENS = 510
"""Long texts are cut into windows of so many tokens, with the same borders for both backends."""


def responses(backend: str, options: dict[str, Any], tasks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Of each task: what the model answered to each of its requests, in order."""
    import lm_eval

    made = lm_eval.simple_evaluate(
        model=backend, model_args=options, tasks=tasks, log_samples=True, bootstrap_iters=0, batch_size=4
    )
    print(backend, json.dumps({name: _numbers(result) for name, result in made["results"].items()}), flush=True)
    found = dict[str, list[Any]]()
    for name, samples in made["samples"].items():
        ordered = sorted(samples, key=lambda sample: sample["doc_id"])
        found[name] = [response[0] for sample in ordered for response in sample["resps"]]
    return found


def _numbers(result: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in result.items() if isinstance(value, float)}


def difference(mine: Any, theirs: Any) -> float:
    """Of two log-likelihoods; of texts and of "is greedy": 0 if they are equal, else 1."""
    if isinstance(mine, tuple | list):
        return max(difference(*pair) for pair in zip(mine, theirs, strict=True))
    if isinstance(mine, float) and isinstance(theirs, float):
        return abs(mine - theirs)
    return float(mine != theirs)


def task_list(directory: Path) -> list[dict[str, Any]]:
    """The tasks, with their data where the files are; ``directory`` is for a copy in the form that datasets reads."""
    common = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
    found = []
    for path in sorted(TASKS.glob("*.json")):
        task = json.loads(path.read_text())
        rows = directory / f"{path.stem}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in task.pop("rows")))
        found.append(common | {"task": path.stem, "dataset_kwargs": {"data_files": {"test": str(rows)}}} | task)
    return found


def main() -> int:
    """0 where all log-likelihoods and texts are equal, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.harness", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the verifier")
    parser.add_argument("--model", required=True, help="its name there")
    parser.add_argument("--directory", required=True, type=Path, help="the model's files")
    arguments = parser.parse_args()
    served = {
        "model": arguments.model,
        "base_url": f"{arguments.url}/v1/completions",
        "tokenizer": str(arguments.directory),
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "num_concurrent": 4,
        "max_retries": 1,
        "max_length": WINDOW_TOKENS + 2,  # the harness leaves one token for a text, and one for the first context
    }
    local = {"pretrained": str(arguments.directory), "dtype": "float64", "device": "cpu", "max_length": WINDOW_TOKENS}
    with tempfile.TemporaryDirectory() as place:
        tasks = task_list(Path(place))
        theirs = responses("hf", local, tasks)
        mine = responses("local-completions", served, tasks)
    worst = {name: max(map(difference, mine[name], theirs[name])) for name in mine}
    for name, value in worst.items():
        print(f"{name:<12} {len(mine[name]):>4} requests  largest difference {value:.3g}")
    return int(max(worst.values()) > MOST_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
