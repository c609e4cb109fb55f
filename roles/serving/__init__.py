"""The client of a split model: plans a chain of stages over workers, has them load their parts, and generates with it.

``plan`` finds the workers and decides which one holds which layers. ``client.Chain`` loads and mends the chain.
``generation`` computes, ``session`` is the core behind it, and ``peer`` is a connection to a worker.
"""
