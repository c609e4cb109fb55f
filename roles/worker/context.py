"""The worker's services that a job's runner uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from configs.schema import Profile
from p2ptrain.core.threads import Thread
from p2ptrain.core.world import World
from ring.links import Inbound
from roles.compute_thread import ComputeThread
from roles.engine import Engine, Stage
from roles.seed_link import Notify
from roles.strategies.interface import Factory
from wire.messages import Message


@dataclass(frozen=True, slots=True)
class Context:
    """What a runner needs of its worker.

    Attributes:
        seed_at: returns the host at which the seed was dialled; members on the seed's machine are dialled there, too.
        beats: returns (heartbeat_s, death_s) between neighbours.
        disk: thread for all access to the job's directory.
        say: sends a message to the seed, now or when it is back.
        notify: shows a text to the person here and at the seed.
        tell: shows a text to the person here only, because the seed knows it already.
        build_engine, build_part: blocking; called on the compute thread.
        strategies: returns a job's strategy factory (``roles.strategies.pipeline.strategy_of``).
        on_step: called after every commit with (applied, total, the step's metrics).
    """

    world: World
    peer_id: str
    name: str
    seed_at: Callable[[], str]
    beats: Callable[[], tuple[float, float]]
    inbound: Inbound
    compute: ComputeThread
    disk: Thread
    say: Callable[[Message], None]
    notify: Notify
    tell: Notify
    build_engine: Callable[[Profile], Engine]
    build_part: Callable[[Profile, Stage], Engine]
    strategies: Callable[[Profile], Factory]
    on_step: Callable[[int, int, dict[str, float]], None]

    @property
    def seed_host(self) -> str:
        return self.seed_at()
