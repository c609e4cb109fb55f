"""The predicted time of a step beside that of a simulated cluster, and in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring.planning.measurements import LinkQuality
from tests.ring.planning.test_prediction import step_s
from tests.sim.step_times import over_preset_s, predicted_and_simulated_s

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
LAN, FAR = LinkQuality(1e-4, 10e9), LinkQuality(0.04, 1e8)
GRADIENTS_BYTES, COMPUTE_S = 500e6, 0.5
"""What the table of predictions is about: 125 M parameters, half a second for an update."""


@pytest.mark.parametrize("workers", [2, 8])
def test_a_step_takes_what_is_predicted(workers: int) -> None:
    predicted_s, simulated_s = predicted_and_simulated_s(workers)
    assert simulated_s == pytest.approx(predicted_s, rel=0.05)


def test_with_local_the_exchange_is_divided_by_the_inner_steps() -> None:
    predicted_s, simulated_s = predicted_and_simulated_s(8, updates=10, job={"strategy": "local"})
    # All wait for the slowest of the ten sums of computing times.
    assert simulated_s == pytest.approx(predicted_s, rel=0.07)


@pytest.mark.parametrize(("preset", "codec"), [("wan", "int8"), ("wifi", "fp32")])
def test_pieces_buckets_streams_and_bursts_of_emulated_links_are_predicted(preset: str, codec: str) -> None:
    predicted_s, simulated_s = over_preset_s(2, preset, numel=800_000, codec=codec)
    assert simulated_s == pytest.approx(
        predicted_s, rel=0.2
    )  # five steps meet the link's jitter differently by the seed


def table(header: str) -> list[list[str]]:
    """Cells of the rows of the page's table whose header begins so."""
    lines = PAGE.read_text("utf-8").partition(header)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_these_predictions() -> None:
    found = {int(members.replace(",", "")): cells for members, *cells in table("| members | `sync`")}
    assert len(found) >= 5
    for members, cells in found.items():
        link_s = [
            step_s(members, LAN, GRADIENTS_BYTES, COMPUTE_S),
            step_s(members, FAR, GRADIENTS_BYTES, COMPUTE_S),
            step_s(members, FAR, GRADIENTS_BYTES / 8, COMPUTE_S, updates=500),
        ]
        assert cells[:3] == [f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s" for seconds in link_s]
