"""The seed: tracks members, stores records, coordinates jobs, and answers operators. Never imports torch."""

from roles.seed.run import Restored, restore, run_seed

__all__ = ["Restored", "restore", "run_seed"]
