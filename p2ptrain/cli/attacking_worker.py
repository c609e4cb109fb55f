"""A worker that attacks its jobs: ``python -m p2ptrain.cli.attacking_worker ATTACK join ...``.

Only ``p2ptrain chaos --attack`` starts it. The worker is that of ``p2ptrain join``, with another builder of engines.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from p2ptrain.cli.main import main

if TYPE_CHECKING:
    from configs.schema import Profile
    from roles.engine import Engine, Stage
    from roles.worker.context import BuildEngine


def attack_with(attack: str) -> None:
    """Make all engines of this process attack."""
    from p2ptrain.lab.attacker import attacking
    from roles.worker import build

    honest = build.engine_builder

    def engine_builder(**options: Any) -> BuildEngine:
        make = honest(**options)

        def made(profile: Profile, stage: Stage) -> Engine:
            return attacking(make(profile, stage), attack, micro_batches=profile.batch.micro_batches, seed=os.getpid())

        return made

    build.engine_builder = engine_builder


if __name__ == "__main__":
    attack_with(sys.argv.pop(1))
    main()
