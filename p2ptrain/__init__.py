"""p2ptrain: a few ordinary machines, made one model trainer and one model server."""

__version__ = "0.1.0"
