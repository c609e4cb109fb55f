"""``p2ptrain bench``: its arithmetic, its pictures, its sockets, and what it refuses before anything starts."""

from __future__ import annotations

import csv
import json
import re
import statistics
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli.bench import plan
from p2ptrain.cli.bench.allreduce import GLOO, LIMIT, PLAIN, RING, AllReduce, Plan, Sized
from p2ptrain.cli.bench.conduct import Ring
from p2ptrain.cli.bench.drawing import FILLS, MARK, Bar, Line, Point, bars, chart_svg
from p2ptrain.cli.bench.machine import origin
from p2ptrain.cli.bench.plan import Samples
from p2ptrain.cli.bench.report import Targets, human_duration, human_rate, human_size, human_spread, publish
from p2ptrain.cli.bench.secure import contexts_of, make_credentials
from p2ptrain.cli.bench.sockets import SocketRing, Traffic
from p2ptrain.cli.bench.step import DDP, USUAL, Steps, Trained
from p2ptrain.cli.bench.step import Plan as StepPlan
from p2ptrain.core.errors import ConnectionLost, JobFailed, ResourceError, UserError
from ring import dtypes, session

Command = Callable[..., Any]

# ------------------------------------------------------------------------------------------------------- arithmetic


def test_sizes_are_sorted_and_told_apart() -> None:
    assert plan.sizes_of("1M,4K, 1024K,", 4) == [4096, 1 << 20]
    with pytest.raises(UserError, match="whole number of elements"):
        plan.sizes_of("4K,10", 4)


def test_what_is_written_again_is_the_same() -> None:
    assert {name: dtypes.storage_dtype(name).itemsize for name in dtypes._STORAGE} == plan.ITEM_BYTES
    assert plan.MAX_SUB_CHUNK_BYTES == session.MAX_SUB_CHUNK_BYTES


def test_samples() -> None:
    samples = Samples("", seconds=[5.0, 1.0, 2.0, 4.0, 3.0])
    assert samples.median_s == 3.0
    assert [samples.quantile_s(part) for part in (0.0, 0.1, 0.9, 1.0)] == pytest.approx([1.0, 1.4, 4.6, 5.0])
    cuts = statistics.quantiles(samples.seconds, n=10, method="inclusive")
    assert [samples.quantile_s(0.1), samples.quantile_s(0.9)] == pytest.approx([cuts[0], cuts[-1]])
    document = samples.to_json(30.0, "bytes_per_s")
    assert document["bytes_per_s"] == 10.0
    assert "median_s" not in Samples("").to_json(1.0, "bytes_per_s")


def test_rounds_fit_the_time() -> None:
    assert plan.rounds_for(1.0, 20.0) == 20
    assert plan.rounds_for(100.0, 20.0) == plan.LEAST_ROUNDS
    assert plan.rounds_for(1e-6, 20.0) == plan.MOST_ROUNDS
    assert plan.rounds_for(1.0, -5.0) == plan.LEAST_ROUNDS
    assert plan.repeats_for(1.0) == 1
    assert plan.repeats_for(1e-3) == 5
    assert plan.repeats_for(1e-7) == plan.MOST_REPEATS


def test_another_contender_goes_first_in_each_round() -> None:
    assert [plan.rotated(["a", "b", "c"], number)[0] for number in range(4)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (human_duration(61.23e-6), "61.2 µs"),
        (human_duration(0.000_999_9), "1000 µs"),
        (human_duration(1.314), "1.31 s"),
        (human_duration(0.25), "250 ms"),
        (human_spread(55e-6, 80.1e-6), "55.0–80.1 µs"),
        (human_spread(0.2e-3, 2.24), "0.00–2.24 s"),
        (human_size(4096), "4 KiB"),
        (human_size(1000), "1000 B"),
        (human_size(3 << 19), "1.5 MiB"),
        (human_rate(1.934e9), "1.93"),
        (human_rate(4.2e6), "0.0042"),
    ],
)
def test_numbers_for_people(shown: str, text: str) -> None:
    assert shown == text


# ---------------------------------------------------------------------------------------------------------- pictures


def test_bars_are_true_and_fit() -> None:
    groups = [
        ("64 MiB", [Bar("this ring", 2.0, "2.00 GB/s"), Bar("Gloo", 1.0, "1.00 GB/s", FILLS[1])]),
        ("4 KiB", [Bar("this ring", 0.01, "0.01 GB/s"), Bar("Gloo", 0.0, "0 GB/s", FILLS[1])]),
    ]
    lines = bars(groups, width=80)
    assert max(map(len, lines)) <= 80
    assert lines[1].count(FILLS[1]) * 2 == lines[0].count(FILLS[0])
    assert lines[2].count(FILLS[0]) == lines[0].count(FILLS[0]), "each group has a scale of its own"
    assert "▏" in lines[3], "nothing is still seen"
    assert bars(groups, common=True)[2].count(FILLS[0]) == 0
    assert len(set(FILLS)) == len(FILLS)
    inside, at_the_end = bars([("", [Bar("a", 1.0, "1", mark=0.5), Bar("b", 0.5, "0.5", mark=1.0)])], width=30)
    assert inside.index(MARK) == (inside.index("█") + inside.rindex("█") + 1) // 2
    assert at_the_end.index(MARK) == inside.rindex("█"), "a mark is seen beyond the bar, and on the same scale"


def test_the_chart_is_svg_with_a_line_for_each_series() -> None:
    lines = [
        Line("a <b>", [Point(1.0, 0.5, 1.5), Point(2.0, 1.9, 2.2)]),
        Line("c", [None, Point(4.0, 4.0, 4.0)]),
        Line("d", [None, None]),
    ]
    text = chart_svg("Title & co", "sub", ["one", "two"], ["4 KiB", "1 MiB"], lines, unit="GB/s")
    root = ET.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{name}polyline")) == 2
    assert len(root.findall(f"{name}circle")) == 3
    words = {item.text for item in root.iter(f"{name}text")}
    assert {"Title & co", "a <b>", "c", "d", "GB/s", "4 KiB", "1 MiB", "one", "two", "0", "4"} <= words
    higher, lower = (float(item.attrib["cy"]) for item in root.findall(f"{name}circle")[:2])
    assert higher > lower, "more is further up"


def test_series_without_lines_have_marks_of_their_own() -> None:
    lines = [Line(name, [Point(1.0, 1.0, 1.0)] * 2) for name in "abcd"]
    root = ET.fromstring(chart_svg("", "", [], ["int8", "int4"], lines, unit="", joined=False))
    marks = [item for item in root if item.tag.endswith(("circle", "rect")) and "opacity" not in item.attrib][1:]
    kinds = {(item.tag, item.attrib["fill"] == "#ffffff") for item in marks}
    assert len(marks) == 4 * (2 + 1), "one a label, and the legend's"
    assert len(kinds) == 4
    assert not [item for item in root if item.tag.endswith("polyline")]


def test_a_chart_of_nothing() -> None:
    ET.fromstring(chart_svg("", "", [], [], [], unit=""))


# ------------------------------------------------------------------------------------------------------------ sockets


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[SocketRing]]:
    """Two members' sockets, connected in a ring."""
    if request.param == "tls":
        made = [SocketRing(*contexts_of(path)) for path in make_credentials(tmp_path, ["member-0", "member-1"])]
    else:
        made = [SocketRing(), SocketRing()]
    together(lambda: made[0].connect(made[1].port), lambda: made[1].connect(made[0].port))
    yield made
    for end in made:
        end.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that wait for one another."""
    results: list[Any] = [None] * len(calls)

    def call(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("sizes", [(300_001, 300_001), (5_000_000, 0), (0, 1), (1, 700_000)])
@pytest.mark.parametrize("piece_bytes", [1000, 262_144])
def test_every_byte_arrives_both_ways(pair: list[SocketRing], sizes: tuple[int, int], piece_bytes: int) -> None:
    for method in pair[0].methods:
        landed = [bytearray(max(1, size)) for size in reversed(sizes)]
        patterns = [bytes(range(number, 251)) * 400 for number in (0, 7)]
        traffics = [
            Traffic(memoryview(patterns[rank]), memoryview(landed[rank]), sizes[rank], sizes[1 - rank], piece_bytes)
            for rank in (0, 1)
        ]
        together(*(partial(pair[rank].exchange, method, traffics[rank]) for rank in (0, 1)))
        for rank in (0, 1):
            repeated = patterns[rank] * (sizes[rank] // len(patterns[rank]) + 1)
            assert landed[1 - rank][: sizes[rank]] == repeated[: sizes[rank]], method


def test_round_trips_are_measured_by_the_first(pair: list[SocketRing]) -> None:
    first, second = together(lambda: pair[0].ping(True, 20), lambda: pair[1].ping(False, 20))
    assert len(first) == 20
    assert min(first) > 0
    assert second == []


def test_a_socket_that_ends_is_told(pair: list[SocketRing]) -> None:
    pair[1].close()
    memory = memoryview(bytearray(1 << 20))
    with pytest.raises(ConnectionLost):
        pair[0].exchange(pair[0].methods[0], Traffic(memory, memory, len(memory), len(memory), 65536))


# ------------------------------------------------------------------------------------------------- what is made of it


class FakeMembers:
    """Members that answer from a table: seconds for each contender, digests and errors for the check."""

    def __init__(self, seconds: dict[str, Sequence[float]], digests: Sequence[str] = ("d", "d"), error: float = 0.0):
        self.seconds, self.digests, self.error = seconds, digests, error
        self.asked: list[str] = []

    def __len__(self) -> int:
        return 2

    async def all(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        if do == "sample":
            name = arguments["contender"]
            self.asked.append(name)
            return [{"seconds": seconds} for seconds in self.seconds[name]]
        if do == "check":
            return [{"digest": digest, "error": self.error} for digest in self.digests]
        if do == "connect plainly":
            return [{"methods": ["slow", "fast"]}] * 2
        return [{"port": 1, "missing": "", "torch": "2", "store_port": 1}] * 2


SECONDS = {
    RING: (0.010, 0.020),
    GLOO: (0.040, 0.030),
    f"{LIMIT}:slow": (0.1, 0.1),
    f"{LIMIT}:fast": (0.005, 0.010),
}


def a_plan(**changes: Any) -> Plan:
    ring = Ring(**{key: changes.pop(key) for key in ("codec", "link", "tls") if key in changes})
    values = {"peers": 2, "sizes": [1 << 20], "dtype": "float32", "rounds": 4, "piece_bytes": 1 << 18}
    return Plan(**(values | changes), ring=ring)


async def test_ratios_are_those_of_the_slowest_members() -> None:
    work = AllReduce(a_plan())
    members: Any = FakeMembers(SECONDS)
    await work.measure(members, lambda text: None)
    found = work.sized[0]
    assert found.contenders[RING].seconds == [0.020] * 4
    assert (found.to_gloo, found.of_limit) == (2.0, 0.5)
    assert found.contenders[LIMIT].method == "fast"
    last = members.asked[-4 * 3 :]
    assert [last[number] for number in (0, 3, 6)] == [RING, GLOO, f"{LIMIT}:fast"], "they take turns in going first"


async def test_members_that_differ_are_no_result() -> None:
    members: Any = FakeMembers(SECONDS, digests=("d", "e"))
    with pytest.raises(JobFailed, match="results differ"):
        await AllReduce(a_plan()).measure(members, lambda text: None)


async def test_a_wrong_sum_is_no_result() -> None:
    members: Any = FakeMembers(SECONDS, error=1e-3)
    with pytest.raises(JobFailed, match="sum is wrong"):
        await AllReduce(a_plan()).measure(members, lambda text: None)


async def test_a_lossy_codec_may_lose_but_its_rival_may_not() -> None:
    members: Any = FakeMembers(SECONDS | {PLAIN: (0.030, 0.030)}, error=1e-3)
    work = AllReduce(a_plan(codec="int8"))
    with pytest.raises(JobFailed, match="this ring, fp32: the sum is wrong"):
        await work.measure(members, lambda text: None)
    members.error = 1e-8
    work = AllReduce(a_plan(codec="int8"))
    await work.measure(members, lambda text: None)
    assert work.sized[0].to_plain == 1.5


async def test_an_emulated_link_has_a_limit_and_no_gloo() -> None:
    work = AllReduce(a_plan(link="wan", rounds=1))
    members: Any = FakeMembers({RING: (0.2, 0.2)})
    await work.measure(members, lambda text: None)
    assert set(work.sized[0].contenders) == {RING}
    limit_s = ((1 << 20) - (32 << 10)) * 8 / 100e6 + 0.02
    assert work.sized[0].of_limit == pytest.approx(limit_s / 0.2)
    assert any("Gloo is left out" in note for note in work.notes)


def test_reports_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = AllReduce(a_plan())
    work._titles = {RING: "this ring", GLOO: "Gloo"}
    samples = {RING: Samples("this ring", seconds=[0.5, 0.25]), GLOO: Samples("Gloo", seconds=[1.0])}
    work.sized = [Sized(1 << 20, samples, errors={RING: 1e-8})]
    targets = Targets(*(str(tmp_path / name) for name in ("a.json", "a.csv", "a.svg")))
    targets.check()
    publish(work.report(origin(), complete=False), targets)
    said = capsys.readouterr().out
    assert "interrupted" in said
    assert "2.67×" in said
    assert max(len(line) for line in said.splitlines()[4:] if "written" not in line) <= 80
    document = json.loads((tmp_path / "a.json").read_text())
    assert not document["complete"]
    assert document["results"][0]["ring_to_gloo"] == pytest.approx(1.0 / 0.375)
    assert {"cores", "system", "python", "torch", "date", "command"} <= set(document["origin"])
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["contender"], float(row["seconds"])) for row in rows] == [(RING, 0.5), (RING, 0.25), (GLOO, 1.0)]
    assert rows[0]["system"] == document["origin"]["system"]
    ET.parse(tmp_path / "a.svg")


def test_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    publish(AllReduce(a_plan()).report(origin(), complete=True), Targets(json="-"))
    assert json.loads(capsys.readouterr().out)["results"] == []


def test_hidden_communication_and_losses() -> None:
    work = Steps(StepPlan("", "tiny", 2, 1, 2, Ring()))
    work.tokens = 100
    work.trained[DDP] = Trained(Samples("DDP"))
    ours = {"seconds": [1.0, 2.0], "losses": [4.0, 2.0], "exposed_s": [0.1, 0.1], "communicating_s": [0.4, 0.6]}
    other = ours | {"seconds": [1.5, 1.0], "exposed_s": [0.3, 0.3]}
    work.trained[RING].add([ours, other], counted=True)
    work.trained[DDP].add([{"seconds": [3.0, 4.0], "losses": [4.0, 2.002]}] * 2, counted=True)
    assert work.trained[RING].samples.seconds == [1.5, 2.0]
    assert work.faster == pytest.approx(3.5 / 1.75)
    assert work.hidden == pytest.approx(1 - 0.4 / 1.0)
    assert work.loss_difference == pytest.approx(0.001, rel=0.01)
    work.trained[RING].add([ours, other], counted=False)
    assert len(work.trained[RING].samples.seconds) == 2


def test_what_exact_sums_cost_is_told_beside_the_usual_mode() -> None:
    assert set(Steps(StepPlan("", "tiny", 2, 1, 2, Ring())).trained) == {RING}
    work = Steps(StepPlan("", "tiny", 2, 1, 2, Ring(), exact=True))
    for name, seconds in ((RING, 1.5), (USUAL, 1.0)):
        work.trained[name].add([{"seconds": [seconds], "losses": [4.0]}], counted=True)
    assert work.exact_cost == 1.5
    assert (
        "exact sums: a step takes 1.50 times as long as in the usual mode" in work.report(origin(), complete=True).notes
    )


# --------------------------------------------------------------------------------------------- what a person touches


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("allreduce", "--peers", "1"), "rings of 2 to 16"),
        (("allreduce", "--sizes", "4K,nothing"), "'nothing' is no size"),
        (("allreduce", "--sizes", "7"), "whole number of elements"),
        (("allreduce", "--codec", "int9"), "no codec is named 'int9'"),
        (("allreduce", "--codec", "int8", "--dtype", "float64"), "is for float32"),
        (("allreduce", "--dtype", "complex64"), "no sum is known"),
        (("allreduce", "--link", "moon"), "no link preset 'moon'"),
        (("allreduce", "--sub-chunk", "3"), "a sub-chunk of 3 bytes"),
        (("allreduce", "--streams", "0"), "Invalid value"),
        (("allreduce", "--plot", "ring.png"), "only SVG"),
        (("allreduce", "--csv", "/nowhere/a.csv"), "no place for a file"),
        (("step", "--workers", "9"), "9 workers cannot share the 8 micro-batches"),
        (("step", "--profile", "none-such"), "none-such"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_starts(
    command: Command, arguments: tuple[str, ...], words: str
) -> None:
    outcome = command("bench", *arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert outcome.out == ""


def test_memory_that_is_not_there(command: Command) -> None:
    outcome = command("bench", "allreduce", "--sizes", "4K,900G")
    assert outcome.code == ResourceError.exit_code
    assert re.search(r"2 peers with tensors of 921,600 MiB need [\d.]+ GiB, [\d.]+ GiB are free", outcome.err)
