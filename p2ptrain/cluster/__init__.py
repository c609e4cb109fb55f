"""What commands run and hold: processes of this machine, observed jobs, models of a person, and ways to a seed.

Begin with ``local_cluster`` (processes), ``jobs`` (one job, observed) and ``access`` (ways to a seed).
"""
