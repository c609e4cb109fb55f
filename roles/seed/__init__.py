"""The seed: knows who is there, keeps the record, coordinates jobs, answers operators. Never imports torch."""

from roles.seed.backup import Restored, restore
from roles.seed.run import Encryption, run_seed

__all__ = ["Encryption", "Restored", "restore", "run_seed"]
