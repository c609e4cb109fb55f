"""One stage of a pipeline that is measured: a part that only takes time, in a real chain over an emulated link."""

from __future__ import annotations

from typing import Any

from p2ptrain.cli.bench.plan import peer_id
from p2ptrain.core.world import Network
from ring.chain import Chain
from ring.local import LocalMember, local_view
from ring.schedule import Schedule
from roles.compute_thread import ComputeThread
from roles.part_stand_in import TimedPart
from roles.strategies.stage_runner import StageRunner
from wire.emulate import EmulatedNetwork, LinkPreset
from wire.transport import TcpNetwork

BEAT_S, DEATH_S = 0.5, 30.0
PATIENCE_S = 120.0
FORM_S = 60.0

Answer = dict[str, Any]


class Piped:
    """The stage of one member, from ``listen`` to ``leave``; then it may listen anew, over another link."""

    def __init__(self, stage: int, stages: int) -> None:
        self._stage, self._stages = stage, stages
        self._compute = ComputeThread()
        self._local: LocalMember | None = None
        self._runner: StageRunner | None = None
        self._step = 0

    async def listen(self, rtt_ms: float) -> Answer:
        """Listen for the stage before, over a link of this round trip; 0: over the loopback as it is."""
        network: Network = TcpNetwork()
        if rtt_ms:
            network = EmulatedNetwork(network, LinkPreset("emulated", rtt_ms / 2), seed=self._stage)
        self._local = LocalMember(peer_id(self._stage), network, seed=self._stage)
        return {"port": await self._local.listen()}

    async def form(self, ports: list[int], forward_s: float, backward_s: float, payload_bytes: int) -> Answer:
        """Form the chain: the round trip of each hop, with payloads, as it was measured."""
        assert self._local is not None
        part = TimedPart(
            self._stage,
            self._stages,
            forward_s=forward_s,
            backward_s=backward_s,
            activation_bytes=payload_bytes,
            gradient_bytes=payload_bytes,
        )
        chain: Chain = await self._local.form_chain(
            local_view({peer_id(stage): port for stage, port in enumerate(ports)}),
            activation_bytes=part.activation_bytes,
            gradient_bytes=part.gradient_bytes,
            heartbeat_s=BEAT_S,
            death_s=DEATH_S,
            timeout_s=FORM_S,
        )
        self._runner = StageRunner(part, chain, self._compute)
        return {"round_trips_s": list(chain.round_trips_s)}

    async def run(self, name: str, micro_batches: int, warm_ups: list[int]) -> Answer:
        """One step: where its time went, in seconds."""
        assert self._runner is not None, "no chain was formed"
        self._step += 1
        schedule = Schedule(name, micro_batches, tuple(warm_ups))
        spent = await self._runner.run(self._step, schedule, patience_s=PATIENCE_S)
        return {
            "seconds": spent.step_s,
            "computed_s": spent.forward_s + spent.backward_s,
            "waited_s": spent.waited_s,
        }

    async def leave(self) -> Answer:
        """Every step is over on all stages: let go of the chain."""
        assert self._local is not None
        await self._local.stop()
        self._local = self._runner = None
        return {}
