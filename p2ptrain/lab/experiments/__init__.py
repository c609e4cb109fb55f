"""Experiments: a grid of settings is trained, one job after another, and its results are compared.

``grid`` makes the runs of a grid and validates them all. ``run.carry_out`` takes those without a result, one after the
other. Their workers come from three places: ``executors`` starts processes or has virtual ones, and ``endpoints`` has
those of its seed. ``run.measure`` creates the job, follows it, and makes its result, which
``results`` writes to disk. ``analysis`` compares the rows of all runs.
"""
