"""Verifiers and their drafters: who belongs to whom, and how it is drawn."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.tui.demo_serving import drafters, verifier
from tui.format import SPENT_LOOKS, Look, Row, percent
from tui.serving import drafters_of, draw_verifier, unused_drafters, verifiers_of
from wire.records import ServingInfo
from wire.text_messages import DrafterFigures


def by_id(*infos: ServingInfo) -> dict[str, ServingInfo]:
    return {info.id: info for info in infos}


def no_way(origin: str, target: str) -> str:
    return ""


def look_of(peer: str) -> Look:
    return Look("◆", "good")


def texts(rows: list[Row]) -> list[str]:
    return ["".join(span.text for span in row) for row in rows]


def test_a_verifier_has_its_drafters_the_best_first():
    drafts = [DrafterFigures("nils", None, 41.0), DrafterFigures("dora", 0.9, 0.6)]
    info = dataclasses.replace(verifier(1), drafters=drafts)
    serving = by_id(info, *drafters(1))
    assert verifiers_of(serving) == [info]
    dora, nils = found = drafters_of(info, serving)
    assert [each.name for each in found] == ["dora", "nils"]
    assert (nils.figures, dora.figures, dora.model) == (*drafts, "code-40m")
    known = {("verifier", "nils"): "relayed by desk"}
    rows = texts(draw_verifier(info, found, look_of, [], 100, lambda *ends: known.get(ends, "")))
    assert [row.split()[1] for row in rows if "relayed by desk" in row] == ["nils"]
    spent = {name: info.stats[f"{name}_ms"] for name in SPENT_LOOKS}
    words = [f"{name} {percent(ms / sum(spent.values()))}" for name, ms in spent.items()]
    assert any(all(word in row for word in words) for row in rows)


def test_those_that_write_come_first_and_drafters_without_a_verifier_are_named():
    busy, idle = dataclasses.replace(verifier(1), id="b", name="z"), verifier(1, idle=True)
    serving = by_id(idle, busy, *drafters(1), dataclasses.replace(drafters(1)[0], id="lost", peer="lost"))
    assert [each.id for each in verifiers_of(serving)] == ["b", "verifier/code-400m"]
    assert [info.id for info in unused_drafters(serving)] == ["lost"]


FIGURES = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1.5, 1e6, 1e15])
NAMES = ["alpha", "token_ms", "verify_ms", "speed_up", "alone_ms", "tokens", "waiting", "tokens_per_s"]
NAMES += ["accepted_length", "wasted_share", "bytes_per_token", "alone_share"]


@given(
    stats=st.dictionaries(st.sampled_from(NAMES), FIGURES),
    figures=st.lists(st.tuples(FIGURES, FIGURES), max_size=5),
    name=st.text(max_size=30),
    width=st.integers(0, 200),
    paces=st.lists(st.none() | FIGURES, max_size=200),
)
def test_no_figure_and_no_width_breaks_it(
    stats: dict[str, float],
    figures: list[tuple[float, float]],
    name: str,
    width: int,
    paces: list[float | None],
):
    info = dataclasses.replace(
        verifier(1),
        name="".join(char for char in name if char.isprintable()),
        stats=stats,
        drafters=[DrafterFigures(f"d{index}", *each) for index, each in enumerate(figures)],
    )
    for line in texts(draw_verifier(info, drafters_of(info, by_id(info)), look_of, paces, width, no_way)):
        assert cell_len(line) <= width
