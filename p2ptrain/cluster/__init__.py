"""The processes that a command starts on this machine, and how a command reaches a seed.

Begin with ``local_cluster``.
"""
