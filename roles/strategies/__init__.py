"""The ways to train. Each is composed of a work, an exchange and a share rule (``STRATEGIES``).

Begin with ``strategy.py``, which runs their steps, and ``interface.py``. The exception is ``server``: its members apply
no steps together, so it has classes of its own in ``server.py``, and a runner of its own (``roles.worker``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.schema import Profile
from ring.token import ShareRule
from roles.strategies import federated, local

if TYPE_CHECKING:
    from roles.compute_thread import ComputeThread
    from roles.engine import Engine
    from roles.strategies.interface import Exchange, Progress, Work
    from roles.strategies.parts import PartRings
    from roles.strategies.strategy import Factory, Strategy

# A row's functions import what they make: the seed reads only the share rules, and stays small.


@dataclass(frozen=True, slots=True)
class _Job:
    profile: Profile
    engine: Engine
    compute: ComputeThread
    progress: Progress


def _micro_batches(job: _Job) -> Work:
    from roles.strategies.sync import MicroBatches

    return MicroBatches(job.engine, job.compute, job.progress)


def _pipeline_passes(job: _Job) -> Work:
    from roles.strategies.pipeline import PipelinePasses

    assert job.engine.pipeline is not None
    return PipelinePasses(
        job.engine.pipeline,
        job.compute,
        job.progress,
        job.profile.pipeline,
        ahead=job.profile.batch.micro_batches,
        tokens_per_micro_batch=job.engine.data.tokens_per_micro_batch,
    )


def _lockstep_shards(job: _Job) -> Work:
    from roles.strategies.sharded import LockstepShards

    assert job.engine.shards is not None
    return LockstepShards(job.engine, job.engine.shards, job.compute, job.progress)


def _sum(job: _Job) -> Exchange:
    from roles.strategies.sync import GradientSum

    return GradientSum(job.engine)


def _sum_of_stage(job: _Job) -> Exchange:
    from roles.strategies.sync import GradientSum

    assert job.engine.pipeline is not None
    return GradientSum(job.engine, job.engine.pipeline.contributed_square_sum)


def _sum_or_rule(job: _Job) -> Exchange:
    if not job.profile.robust.rule:
        return _sum(job)
    from roles.strategies.robust import GatheredVectors

    return GatheredVectors(job.engine, job.compute, job.profile.robust, job.profile.batch.micro_batches)


def _masked_or_open(job: _Job) -> Exchange:
    if not job.profile.federated.secure:
        return _sum_or_rule(job)
    from roles.strategies.secure import MaskedSum

    return MaskedSum(job.engine, job.compute)


def _parts(engine: Engine) -> PartRings:
    from roles.strategies.parts import PartRings

    return PartRings(engine)


def _tied_parts(engine: Engine) -> PartRings:
    from roles.strategies.parts import PartRings

    assert engine.pipeline is not None
    return PartRings(engine, engine.pipeline.tied_gradient)


def _by_speed(profile: Profile) -> ShareRule:
    return ShareRule(equal=bool(profile.robust.rule))


@dataclass(frozen=True, slots=True)
class _Composition:
    """``parts``: makes the rings of a split model; None: each member holds the whole model."""

    work: Callable[[_Job], Work]
    exchange: Callable[[_Job], Exchange]
    share_rule: Callable[[Profile], ShareRule]
    parts: Callable[[Engine], PartRings] | None = None


STRATEGIES = {
    "sync": _Composition(_micro_batches, _sum_or_rule, _by_speed),
    "local": _Composition(_micro_batches, _sum_or_rule, local.shares),
    "federated": _Composition(_micro_batches, _masked_or_open, federated.by_text),
    "pipeline": _Composition(_pipeline_passes, _sum_of_stage, _by_speed, _tied_parts),
    "sharded": _Composition(_lockstep_shards, _sum, _by_speed, _parts),
}


def strategy_of(profile: Profile) -> Factory:
    from roles.strategies.strategy import Strategy

    row = STRATEGIES[profile.job.strategy]

    def make(engine: Engine, compute: ComputeThread, progress: Progress, bucket_bytes: int) -> Strategy:
        job = _Job(profile, engine, compute, progress)
        choose_slot = None if engine.slots is None else federated.slot_chooser(profile, engine.slots, compute)
        return Strategy(
            engine,
            compute,
            bucket_bytes,
            work=row.work(job),
            exchange=row.exchange(job),
            parts=row.parts(engine) if row.parts is not None else None,
            before_step=choose_slot,
        )

    return make


def share_rule_of(profile: Profile) -> ShareRule:
    if profile.job.strategy == "server":
        return ShareRule(equal=True)
    return STRATEGIES[profile.job.strategy].share_rule(profile)


def least_members(profile: Profile) -> int:
    """Members without which no step begins. The server of strategy 'server' contributes nothing."""
    if profile.job.strategy == "server":
        return 1 + profile.server.buffer
    return federated.LEAST_MASKED if profile.federated.secure else profile.robust.least
