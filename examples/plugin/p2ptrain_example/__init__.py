"""Plugins for p2ptrain, one of each kind."""
