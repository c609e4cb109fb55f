"""The client of a split model: plans a chain of stages over workers, has them load their parts, and generates with it.

``plan`` finds the workers and decides which one holds which layers. ``client.Chain`` loads and mends the chain.
``generation`` computes, ``session`` is the core behind it, and ``peer`` is a connection to a worker. Usage::

    pool = await WorkerPool.connect(context, await workers_of(seed.request))
    model = await local_model(context, directory)            # or await pool.model_at(path)
    found = await pool.measured(model.config, dtype)
    plan = await pool.plan(model, found.sizes, positions=4096, activation_bytes=4 * found.width)
    chain = await Chain.load(pool, model, plan, on_progress=show)
    async with await chain.open(positions=200, sampling=Sampling(seed=7)) as session:
        done = await session.run(Submit(prompt, keep=0, samples=1, sample_index=0, prefill=True))
    await chain.close()
    await pool.close()
"""
