"""Models that write text: their sessions, and the text service over them. Begin with ``model``, the one interface.

``local_model`` computes in this process. ``split_model`` is the client of a chain of stages: ``worker_pool`` finds the
workers and plans, ``chain`` loads and mends, ``chain_session`` and its core ``chain_core`` compute.
"""
