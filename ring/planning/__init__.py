"""The cost model: from measured speeds, links and sizes to the time, memory and bytes of a step, and to placements.

``measurements`` (what links take) and ``workloads`` (what a stage costs) are its base. ``ring_plan``, ``cuts``,
``serving`` and ``pipeline`` choose by it, and ``prediction`` says what a step costs with each strategy."""
