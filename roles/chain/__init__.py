"""The client of a split model: plans a chain of stages over workers, has them load their parts, and generates with it.

``plan`` finds who is there and who holds which layers, ``client.Chain`` loads and mends, ``client.GenerationSession``
gives tokens; ``session`` and ``decode`` are the cores behind it. Used by a command line as::

    crew = await Crew.meet(around, await workers_of(seed.request))
    model = await local_model(around, directory)            # or await crew.model_at(path)
    plan = await crew.plan(model, sizes, positions=4096)
    chain = await Chain.load(crew, model, plan, on_progress=show)
    async with await chain.generate(ids, max_new_tokens=200, sampling=Sampling(seed=7), stop_ids={2}) as session:
        async for token in session:
            ...
    await chain.close()
    await crew.close()
"""

from __future__ import annotations
