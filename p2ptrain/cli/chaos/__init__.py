"""``p2ptrain chaos``: a real cluster on this machine, hurt on a schedule.

``schedule`` (what, whom, when: pure), ``proxy`` (links that can be cut, slowed and damaged from outside), ``cluster``
(the processes), ``observer`` (what the seed tells), ``faults`` (carrying a schedule out), ``judge`` (what must have
held: pure), ``proof`` (checkpoints and the audit), ``conduct`` (the order of it all), ``report`` (what is told).
"""
