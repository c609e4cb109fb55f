"""The table of the ways to train: the work, the exchange and the rings of parts of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from configs.schema import Profile
from p2ptrain.core.plugins import make as make_plugin
from roles.compute_thread import ComputeThread
from roles.engine import Engine
from roles.strategies import federated
from roles.strategies.interface import Exchange, Progress, Work
from roles.strategies.parts import PartRings
from roles.strategies.pipeline import PipelinePasses
from roles.strategies.robust import GatheredVectors
from roles.strategies.secure import MaskedSum
from roles.strategies.sharded import LockstepShards
from roles.strategies.strategy import Factory, Strategy
from roles.strategies.sync import GradientSum, MicroBatches

_Composition = tuple[Work, Exchange, PartRings | None]
"""The last is the rings of a split model; None: each member holds the whole model."""


def _whole(profile: Profile, engine: Engine, compute: ComputeThread, progress: Progress) -> _Composition:
    exchange: Exchange
    if profile.federated.secure:
        exchange = MaskedSum(engine, compute)
    elif profile.robust.rule:
        exchange = GatheredVectors(engine, compute, profile.robust, profile.batch.micro_batches)
    else:
        exchange = GradientSum(engine, profile.plugins)
    return MicroBatches(engine, compute, progress), exchange, None


def _pipeline(profile: Profile, engine: Engine, compute: ComputeThread, progress: Progress) -> _Composition:
    stage = engine.pipeline
    assert stage is not None
    ahead, tokens = profile.batch.micro_batches, engine.data.tokens_per_micro_batch
    work = PipelinePasses(stage, compute, progress, ahead=ahead, tokens_per_micro_batch=tokens)
    return work, GradientSum(engine, profile.plugins), PartRings(engine, stage.tied_gradient)


def _sharded(profile: Profile, engine: Engine, compute: ComputeThread, progress: Progress) -> _Composition:
    assert engine.shards is not None
    work = LockstepShards(engine, engine.shards, compute, progress)
    return work, GradientSum(engine, profile.plugins), PartRings(engine)


# DiLoCo (arXiv 2311.08105) and FedAvg (arXiv 1602.05629) differ from ``sync`` in what the engine computes and
# contributes: it takes an inner step for each micro-batch, and contributes how far its copy came (``compute.local``).
STRATEGIES: dict[str, Callable[[Profile, Engine, ComputeThread, Progress], _Composition]] = {
    "sync": _whole,
    "local": _whole,
    "federated": _whole,
    "pipeline": _pipeline,
    "sharded": _sharded,
}


def factory_of(profile: Profile) -> Factory:
    name, settings = profile.job.strategy, profile.plugins.settings_of(profile.job.strategy)
    compose = STRATEGIES.get(name) or partial(make_plugin, f"strategies:{name}", object, settings)

    def make(engine: Engine, compute: ComputeThread, progress: Progress, bucket_bytes: int) -> Strategy:
        work, exchange, parts = compose(profile, engine, compute, progress)
        before_step = None if engine.slots is None else federated.slot_chooser(profile, engine.slots, compute)
        return Strategy(
            engine, compute, bucket_bytes, work=work, exchange=exchange, parts=parts, before_step=before_step
        )

    return make
