"""The seed: knows who is there, keeps the record, coordinates jobs, answers operators. Never imports torch."""

from roles.seed.run import Encryption, Restored, restore, run_seed

__all__ = ["Encryption", "Restored", "restore", "run_seed"]
