"""What commands and programs run and hold: processes of this machine, observed jobs, a person's models, ways to a seed.

Begin with ``local_cluster`` (processes), ``jobs`` (one job, observed), ``access`` (ways to a seed) and ``client`` (the
clients of programs).
"""
