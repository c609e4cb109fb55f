"""The process that speaks with W&B for one job. It reads lines of JSON: the arguments of ``wandb.init``, then lists of
[step, wall, values]; an empty one says that the job is done. It answers each with a line: the problem, if there is one.
At the end of its input it finishes the run. It dies if it waits for W&B for longer than ``STUCK_S``."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from contextlib import suppress
from typing import Any

STUCK_S, FINISH_S = 120, 60


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what wandb prints goes to the log
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    run: Any = None
    exit_code = 1
    for line in sys.stdin:
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        problem, message = "", json.loads(line)
        try:
            if run is None:
                run = _begun(message)
            else:
                exit_code = 1 if message else 0
                for step, wall, values in message:
                    run.log({**values, "_timestamp": wall}, step=step)
        except Exception as error:  # noqa: BLE001 - told to the seed
            problem = " ".join(f"{type(error).__name__}: {error}".split())
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError):  # the seed may be gone
            print(problem, file=answers, flush=True)
    faulthandler.dump_traceback_later(FINISH_S + 5, exit=True)
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
