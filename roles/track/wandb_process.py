"""The process that speaks with W&B for one job. It reads lines of JSON: the arguments of ``wandb.init``, then lists of
[step, wall, values], then perhaps "done". It answers each with "" or the problem. At the end of its input it finishes
the run, within ``FINISH_S``."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

FINISH_S = 60.0


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what wandb prints goes to the log
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    run: Any = None
    exit_code = 1
    for line in sys.stdin:
        problem = ""
        try:
            message = json.loads(line)
            if isinstance(message, dict):
                run = _begun(message)
            elif isinstance(message, list):
                for step, wall, values in message:
                    run.log({**values, "_timestamp": wall}, step=step)
            else:
                exit_code = 0
        except Exception as error:  # noqa: BLE001 - told to the seed
            problem = f"{type(error).__name__}: {error}"
        try:
            print(json.dumps(problem), file=answers, flush=True)
        except OSError:
            break  # the seed is gone
    late = threading.Timer(FINISH_S + 5, os._exit, [1])
    late.daemon = True
    late.start()
    if run is not None:
        run.finish(exit_code=exit_code)


def _begun(wanted: dict[str, Any]) -> Any:
    import wandb

    quiet = wandb.Settings(
        console="off", silent=True, init_timeout=45, finish_timeout=FINISH_S, disable_git=True, save_code=False,
        x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
    )  # fmt: skip
    return wandb.init(**wanted, resume="allow", settings=quiet)


if __name__ == "__main__":
    main()
