"""p2ptrain: train and serve a model with a few ordinary machines.

Programs and notebooks use what ``_OFFERED`` lists (docs/python.md). It is imported when it is first used;
``__init__.pyi`` declares it for type checkers.
"""

import importlib

__version__ = "0.1.0"
_ERRORS = (
    *("P2PTrainError", "UserError", "ConfigError", "PeerError", "Refused", "ResourceError", "StorageError"),
    *("JobFailed", "NetworkError", "Unreachable", "ConnectionLost", "DeadlineExceeded"),
)
_OFFERED = {
    "train": "p2ptrain.python.training",
    "TrainingResult": "p2ptrain.python.training",
    "LocalCluster": "p2ptrain.cluster.local_cluster",
    "Client": "p2ptrain.cluster.client",
    "AsyncClient": "p2ptrain.cluster.client",
    **dict.fromkeys(_ERRORS, "p2ptrain.core.errors"),
}
"""Name → its module."""


def __getattr__(name: str) -> object:
    if name not in _OFFERED:
        raise AttributeError(f"module 'p2ptrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_OFFERED[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OFFERED})
