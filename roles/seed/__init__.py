"""The seed: knows who is there, keeps the record, coordinates jobs, answers operators. Never imports torch."""

from roles.seed.backup import Restored, restore
from roles.seed.run import Encryption, run_seed
from roles.seed.standby import TAKEOVER_S, Marker, run_standby

__all__ = ["TAKEOVER_S", "Encryption", "Marker", "Restored", "restore", "run_seed", "run_standby"]
