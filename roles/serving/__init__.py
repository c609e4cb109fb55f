"""Models that write text: their sessions, and texts that are written. Begin with ``model``, the one interface.

``local_model`` computes in this process. ``chain`` is the client of a chain of stages, which it loads and mends:
``worker_pool`` finds the workers and plans, ``chain_session`` and its core ``chain_core`` compute.
"""
