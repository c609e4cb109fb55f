"""Settings of a profile that are possible each, and cannot all hold: what is wrong, and what would be right."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import Profile


class Conflict(ValueError):
    """Settings that cannot all hold.

    Args:
        keys: the dotted keys that take part, such as ``model.heads``.
        problem: what is wrong, naming keys and values.
        remedy: what would be right.
    """

    def __init__(self, *keys: str, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.keys, self.problem, self.remedy = keys, problem, remedy


def check(profile: Profile) -> None:
    """Raise ``Conflict`` where settings of a profile, each of them possible, cannot all hold."""
    if not profile.model.path:  # a directory brings its own sizes; compute checks those
        _check_divides(profile, "model.hidden_size", "model.heads")
        _check_divides(profile, "model.heads", "model.kv_heads")
        _check_at_most(profile, "data.sequence_tokens", "model.context")
    _check_workers(profile)
    _check_beats(profile)
    _check_pipeline(profile)
    _check_exact(profile)
    _check_drafter(profile)


def _check_exact(profile: Profile) -> None:
    if profile.job.exact and profile.ring.codec not in ("fp32", "auto"):
        problem = f"job.exact = true and ring.codec = {profile.ring.codec!r}: a codec rounds what exact sums keep"
        remedy = "ring.codec = 'fp32', or job.exact = false"
        raise Conflict("job.exact", "ring.codec", problem=problem, remedy=remedy)


def _check_workers(profile: Profile) -> None:
    if profile.stages == 1:
        _check_at_most(profile, "job.workers", "batch.micro_batches", why=": some would have nothing to do")
    elif profile.job.workers // profile.stages > profile.batch.micro_batches:
        keys = ("job.workers", "pipeline.stages", "batch.micro_batches")
        problem = f"{_said(profile, *keys)}: more crews than micro-batches, and some would have nothing to do"
        most = profile.batch.micro_batches * profile.stages
        raise Conflict(*keys, problem=problem, remedy=f"job.workers at most {most}")


def _check_pipeline(profile: Profile) -> None:
    split, stages = profile.job.strategy == "pipeline", profile.pipeline.stages
    if split != (stages >= 2):
        keys = ("job.strategy", "pipeline.stages")
        remedy = "strategy 'pipeline' with pipeline.stages of 2 or more, or strategy 'sync' with 0"
        raise Conflict(*keys, problem=f"{_said(profile, *keys)}: they belong together", remedy=remedy)
    if not split:
        return
    _check_at_most(profile, "pipeline.stages", "job.workers", why=": each part needs a worker")
    if profile.job.exact:
        problem = "job.exact = true and job.strategy = 'pipeline': exact sums are not made of a model in parts yet"
        raise Conflict("job.exact", "job.strategy", problem=problem, remedy="job.exact = false")
    if not profile.model.path:
        _check_at_most(profile, "pipeline.stages", "model.layers", why=": a part without a layer")
    _check_cuts(profile)


def _check_cuts(profile: Profile) -> None:
    cuts, stages = profile.pipeline.cuts, profile.pipeline.stages
    if not cuts:
        return
    if len(cuts) != stages - 1:
        keys: tuple[str, ...] = ("pipeline.cuts", "pipeline.stages")
        problem = f"{_said(profile, *keys)}: {len(cuts)} cuts make {len(cuts) + 1} parts"
        raise Conflict(*keys, problem=problem, remedy=f"{stages - 1} cuts, or none")
    if any(before >= after for before, after in pairwise(cuts)):
        problem = f"{_said(profile, 'pipeline.cuts')}: they must grow, for each begins the next part"
        raise Conflict("pipeline.cuts", problem=problem, remedy=f"such as {sorted(set(cuts))}")
    if not profile.model.path and cuts[-1] >= profile.model.layers:
        keys = ("pipeline.cuts", "model.layers")
        problem = f"{_said(profile, *keys)}: the last part would have no layer"
        raise Conflict(*keys, problem=problem, remedy=f"the last cut at most {profile.model.layers - 1}")


def _check_drafter(profile: Profile) -> None:
    if not profile.drafter.layers:
        return
    if profile.model.path:
        keys = ("drafter.layers", "model.path")
        problem = f"{_said(profile, *keys)}: a drafter is a new model of bytes, and knows other tokens than that one"
        raise Conflict(*keys, problem=problem, remedy="drafter.layers = 0, or a new model")
    _check_at_most(profile, "drafter.layers", "model.layers", why=": it would draft no sooner than the model writes")
    _check_divides(profile, "drafter.hidden_size", "drafter.heads")
    _check_divides(profile, "drafter.heads", "drafter.kv_heads")


def _check_divides(profile: Profile, key: str, by_key: str) -> None:
    value, by = profile.value(key), profile.value(by_key)
    if value % by:
        below = value // by * by or by
        problem = f"{key} = {value} is not a multiple of {by_key} = {by}"
        raise Conflict(key, by_key, problem=problem, remedy=f"{key} could be {below} or {below + by}")


def _check_at_most(profile: Profile, key: str, most_key: str, *, why: str = "") -> None:
    value, most = profile.value(key), profile.value(most_key)
    if value > most:
        problem = f"{key} = {value} is more than {most_key} = {most}{why}"
        raise Conflict(key, most_key, problem=problem, remedy=f"{key} at most {most}, or {most_key} at least {value}")


def _check_beats(profile: Profile) -> None:
    keys = ("membership.heartbeat_s", "membership.death_s")
    beat, death = profile.membership.heartbeat_s, profile.membership.death_s
    both = f"{keys[0]} = {beat} and {keys[1]} = {death}"
    if (beat == 0) != (death == 0):
        raise Conflict(*keys, problem=f"{both}: one is measured, one is set", remedy="set both, or neither")
    if death < 2 * beat:
        remedy = f"{keys[1]} at least {2 * beat}, so that one late beat is no death"
        raise Conflict(*keys, problem=f"{both}: death comes within two beats", remedy=remedy)


def _said(profile: Profile, *keys: str) -> str:
    """What the profile says of some settings, for people."""
    return ", ".join(f"{key} = {profile.value(key)!r}" for key in keys)
