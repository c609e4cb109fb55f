"""The cost model: from measured speeds, links and sizes to the time, memory and bytes of a step, and to placements.

Begin with ``ring_plan`` (links and the ring), then ``serving`` and ``pipeline`` (who holds which layers), then
``prediction`` (a step with each strategy)."""
