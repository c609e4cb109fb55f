"""Errors, the injected world, ids, checkpoints and shared types. Standard library only."""
