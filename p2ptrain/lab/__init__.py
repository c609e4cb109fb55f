"""Simulates, attacks, measures, predicts and compares what the other packages do. Only ``p2ptrain.cli`` imports it.

Begin with ``sim.run``: whole clusters on virtual time.
"""
