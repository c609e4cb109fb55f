"""Pipeline schedules: who waits for whom, what it costs in time and memory, against independent computations."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.planning.schedule import (
    MAX_SLOWDOWN,
    OperationKind,
    StageCosts,
    StageOperation,
    StageSchedule,
    plan_extended,
    plan_forwards,
    plan_gpipe,
    plan_one_f_one_b,
    simulate_step_s,
)

F, B = OperationKind.FORWARD, OperationKind.BACKWARD
FORWARD_S, BACKWARD_S = 0.04, 0.08
PERIOD_S = FORWARD_S + BACKWARD_S

hop_s = st.sampled_from([0.0, 0.0002, 0.01, 0.05, 0.119, 0.121, 0.24, 0.33])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[StageSchedule, list[float]]:
    """Any of the three, with the round trips that it was made for; some with too little memory for them."""
    micro_batches = draw(st.integers(1, 24))
    round_trips_s = draw(st.lists(hop_s, max_size=5))
    stages = len(round_trips_s) + 1
    most = draw(st.one_of(st.just([]), st.lists(st.integers(1, 12), min_size=stages, max_size=stages)))
    made = [
        plan_gpipe(stages, micro_batches),
        plan_one_f_one_b(stages, micro_batches),
        plan_extended(micro_batches, round_trips_s, PERIOD_S, max_in_flight=most),
    ]
    return draw(st.sampled_from(made)), round_trips_s


def order_text(schedule: StageSchedule, stage: int) -> str:
    return " ".join(f"{item.kind.value}{item.index}" for item in schedule.list_operations(stage))


def longest_path_s(schedule: StageSchedule, costs: StageCosts) -> float:
    """The step by relaxation: every operation ends after whatever it waits for, repeated until nothing moves."""
    stages = range(schedule.stages)
    takes = {F: costs.forward_s, B: costs.backward_s}
    waits: list[
        tuple[tuple[int, StageOperation], tuple[int, StageOperation], float]
    ] = []  # who, for whom, for how long after it
    for stage in stages:
        order = schedule.list_operations(stage)
        waits += [((stage, later), (stage, before), 0.0) for before, later in pairwise(order)]
        for index in range(schedule.micro_batches):
            if stage + 1 in stages:
                hop = costs.activation_hop_s[stage]
                waits.append(((stage + 1, StageOperation(F, index)), (stage, StageOperation(F, index)), hop))
                hop = costs.gradient_hop_s[stage]
                waits.append(((stage, StageOperation(B, index)), (stage + 1, StageOperation(B, index)), hop))
            else:
                waits.append(((stage, StageOperation(B, index)), (stage, StageOperation(F, index)), 0.0))
    ends = {(stage, item): takes[item.kind][stage] for stage in stages for item in schedule.list_operations(stage)}
    for _ in range(len(ends) + 1):
        moved = False
        for who, whom, after_s in waits:
            wanted = ends[whom] + after_s + takes[who[1].kind][who[0]]
            if ends[who] < wanted - 1e-12:
                ends[who], moved = wanted, True
        if not moved:
            return max(ends.values())
    raise AssertionError("a circle: they wait for ever")


# ----------------------------------------------------------------------------------------------------------- the order


def test_orders_are_those_of_the_papers() -> None:
    assert order_text(plan_gpipe(3, 3), 1) == "F0 F1 F2 B0 B1 B2"
    plain = plan_one_f_one_b(3, 4)
    assert [order_text(plain, stage) for stage in range(3)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    longer = plan_extended(5, [0.2], PERIOD_S)
    assert order_text(longer, 0) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert order_text(longer, 1) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


@given(schedules())
def test_schedule_is_whole_and_ends(made: tuple[StageSchedule, list[float]]) -> None:
    schedule, round_trips_s = made
    for stage in range(schedule.stages):
        order = schedule.list_operations(stage)
        assert sorted((item.kind.value, item.index) for item in order) == sorted(
            (kind.value, index) for kind in OperationKind for index in range(schedule.micro_batches)
        )
        assert all(
            order.index(StageOperation(F, item.index)) < place for place, item in enumerate(order) if item.kind is B
        )
        backwards = [item.index for item in order if item.kind is B]
        assert backwards == sorted(backwards), "gradients are summed in the order of one process"
    costs = StageCosts.of_equal_stages(FORWARD_S, BACKWARD_S, round_trips_s)
    assert simulate_step_s(schedule, costs) == pytest.approx(longest_path_s(schedule, costs))


@given(schedules())
def test_stage_is_never_further_ahead_of_the_next_one_than_its_buffers(
    made: tuple[StageSchedule, list[float]],
) -> None:
    """Whatever the speeds: one end of a hop does what it can while the other one does not begin with its next."""
    schedule, _ = made
    for hop in range(schedule.stages - 1):
        before, after = schedule.list_operations(hop), schedule.list_operations(hop + 1)
        count, first = schedule.micro_batches, schedule.warm_ups[hop + 1]
        in_turns = {F: range(first, count), B: range(count - 1 - schedule.warm_ups[hop])}
        for kind, sender, receiver in ((F, before, after), (B, after, before)):
            for used in in_turns[kind]:
                stuck = receiver[: receiver.index(StageOperation(kind, used))]
                reached = {item.index for item in stuck if item.kind is not kind}
                sent = 0
                for item in sender:
                    if item.kind is not kind and item.index not in reached:
                        break
                    sent += item.kind is kind
                assert sent - used <= schedule.count_receive_buffers(hop)


# ------------------------------------------------------------------------------------------------------------ the time


@pytest.mark.parametrize(
    ("round_trip_s", "plain", "longer"), [(0.0, 0.94, 0.94), (0.02, 0.87, 0.93), (0.08, 0.72, 0.91), (0.2, 0.53, 0.86)]
)
def test_two_stages_take_the_known_figures(round_trip_s: float, plain: float, longer: float) -> None:
    costs = StageCosts.of_equal_stages(FORWARD_S, BACKWARD_S, [round_trip_s])
    busy_s = 16 * PERIOD_S
    assert busy_s / simulate_step_s(plan_one_f_one_b(2, 16), costs) == pytest.approx(plain, abs=0.005)
    assert busy_s / simulate_step_s(plan_extended(16, [round_trip_s], PERIOD_S), costs) == pytest.approx(
        longer, abs=0.005
    )
    assert busy_s / simulate_step_s(plan_gpipe(2, 16), costs) == pytest.approx(longer, abs=0.005)
    wanted = 1 + math.ceil(round_trip_s / PERIOD_S)
    assert plan_extended(16, [round_trip_s], PERIOD_S).warm_ups == (wanted, 0)


@given(st.lists(hop_s, min_size=1, max_size=6), st.integers(1, 40), st.sampled_from([0.02, 0.04, 0.06, 0.1]))
def test_extended_hides_every_hop(round_trips_s: list[float], micro_batches: int, forward_s: float) -> None:
    """No schedule is faster than this: the first micro-batch goes there and back, and the rest follow without a gap."""
    costs = StageCosts.of_equal_stages(forward_s, PERIOD_S - forward_s, round_trips_s)
    least_s = (micro_batches + len(round_trips_s)) * PERIOD_S + sum(round_trips_s)
    assert simulate_step_s(plan_gpipe(len(round_trips_s) + 1, micro_batches), costs) == pytest.approx(least_s)
    usual = simulate_step_s(plan_extended(micro_batches, round_trips_s, PERIOD_S), costs)
    assert usual <= least_s * (1 + MAX_SLOWDOWN) + 1e-9


@given(
    st.lists(st.tuples(*[st.floats(0.01, 0.1)] * 2, *[st.floats(0, 0.3)] * 2), min_size=2, max_size=5),
    st.integers(1, 24),
)
def test_extended_keeps_uneven_stages_as_busy_as_all_forwards_first_would(
    stages: list[tuple[float, float, float, float]], micro_batches: int
) -> None:
    forward_s, backward_s, there_s, back_s = zip(*stages, strict=True)
    costs = StageCosts(forward_s, backward_s, there_s[1:], back_s[1:])
    period_s = max(there + back for there, back in zip(forward_s, backward_s, strict=True))
    round_trips_s = [there + back for there, back in zip(costs.activation_hop_s, costs.gradient_hop_s, strict=True)]
    schedule = plan_extended(micro_batches, round_trips_s, period_s)
    most_s = simulate_step_s(plan_gpipe(len(stages), micro_batches), costs)
    assert simulate_step_s(schedule, costs) <= most_s * (1 + MAX_SLOWDOWN) + 1e-9
    assert schedule.count_in_flight(0) <= micro_batches


@given(st.lists(hop_s, min_size=1, max_size=4), st.integers(1, 24), st.data())
def test_limit_in_flight_holds(round_trips_s: list[float], micro_batches: int, data: st.DataObject) -> None:
    stages = len(round_trips_s) + 1
    caps = data.draw(st.lists(st.integers(0, 8), min_size=stages, max_size=stages))
    free = plan_extended(micro_batches, round_trips_s, PERIOD_S)
    capped = plan_extended(micro_batches, round_trips_s, PERIOD_S, max_in_flight=caps)
    assert all(capped.count_in_flight(stage) <= cap for stage, cap in enumerate(caps) if cap)
    costs = StageCosts.of_equal_stages(FORWARD_S, BACKWARD_S, round_trips_s)
    assert simulate_step_s(capped, costs) >= simulate_step_s(free, costs) * (1 - MAX_SLOWDOWN) - 1e-9


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_forwards_alone_run_in_order_and_end(stages: int) -> None:
    made = plan_forwards(stages, 4)
    for stage in range(stages):
        assert order_text(made, stage) == "F0 F1 F2 F3"
    of_equal_stages = simulate_step_s(made, StageCosts.of_equal_stages(1.0, 9.0, [0.0] * (stages - 1)))
    assert of_equal_stages == 4 + stages - 1
