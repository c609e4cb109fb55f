"""What a job's runner needs of its worker, and of the world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from configs.schema import Profile
from p2ptrain.core.threads import Thread
from p2ptrain.core.world import World
from ring.links import Inbound
from roles.compute_thread import ComputeThread
from roles.engine import Engine, Stage
from roles.strategies.interface import Factory
from wire.messages import Message

Notify = Callable[[str, str, str], None]  # level, kind, text


@dataclass(frozen=True, slots=True)
class Context:
    """What a runner needs of its worker.

    Attributes:
        seed_at: the host that the seed was dialled at, for members on its own machine.
        say: sends to the seed, now or when it is back.
        notify: tells the person, here and at the seed.
        tell: tells the person here only: the seed knows it already.
        beats: (heartbeat_s, death_s) between neighbours.
        disk: the thread of everything that touches the job's directory.
        build_engine: blocking; called on the compute thread. ``build_part``: the same of a ``Engine``.
        strategies: of a job's profile (``roles.strategies.pipeline.strategy_of``).
        on_step: called after every commit with the metrics of the step.
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
