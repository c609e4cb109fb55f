"""Injects faults into real processes and judges what became of the job. Begin with ``conduct``."""
