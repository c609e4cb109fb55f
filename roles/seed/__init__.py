"""The seed: knows who is there, keeps the record, coordinates jobs, answers operators. Never imports torch."""

from roles.seed.run import run_seed

__all__ = ["run_seed"]
