"""Experiments: a grid of settings is trained, one job after another, and its results are compared."""
