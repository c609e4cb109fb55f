"""p2ptrain: train and serve a model with a few ordinary machines."""

__version__ = "0.1.0"
