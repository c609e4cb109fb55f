"""``p2ptrain bench speculate --exact``: a pair whose drafter is killed all the time, and what is told of it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.cli.bench.machine import origin
from p2ptrain.cli.bench.members import Interrupted
from p2ptrain.cli.bench.speculate_exact import SAMPLINGS, ExactBench, ExactPlan, Row, exact_prompts
from p2ptrain.cli.bench.speculated import assisted
from p2ptrain.cli.bench.speculated_exact import Exactly
from p2ptrain.compute.model import build_model
from p2ptrain.compute.picking import Picker
from p2ptrain.compute.testing import tiny
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import JobFailed

Command = Callable[..., Any]
PROMPTS = exact_prompts(3)
TOKENS = 32
TIMES: dict[str, Any] = {"pass_s": 0.05, "draft_s": 0.005}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and one that is like it by half."""
    root = tmp_path_factory.mktemp("pair")
    for name, noise in (("verifier", 0.0), ("drafter", 0.02)):
        model = build_model(tiny(layers=2, context=256), 256, seed=1)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(root / name)
        Tokenizer.of_bytes().save(root / name)
    return root / "verifier", root / "drafter"


@pytest.fixture(scope="module")
def models(pair: tuple[Path, Path]) -> Exactly:
    made = Exactly()
    asyncio.run(made.open(verifier=str(pair[0]), drafter=str(pair[1]), threads=1))
    return made


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_texts_are_the_verifiers_own_whenever_its_drafter_dies(models: Exactly, sampling: str) -> None:
    order: dict[str, Any] = {"prompts": PROMPTS, "tokens": TOKENS, "sampling": SAMPLINGS[sampling], "seed": 3}
    plain = await models.plain(**order)
    assert plain["generated"] == plain["alone"], "transformers' generate and the verifier alone"
    assert len({tuple(text) for text in plain["alone"]}) == len(PROMPTS)
    rows = [Row(sampling, round_trip_ms) for round_trip_ms in (0.0, 20.0, 80.0, 200.0)]
    for row in rows:
        answer = await models.write(**order, rtt_ms=row.round_trip_ms, jitter_ms=row.round_trip_ms / 10, **TIMES)
        assert [text["ids"] for text in answer["texts"]] == plain["alone"]
        row.add(answer)
    assert all(row.killed for row in rows)
    near = rows[0]
    assert near.tokens == len(PROMPTS) * TOKENS
    assert 0 < near.accepted < near.drafted, "drafts are right and wrong, or nothing was tried"
    assert near.passes < 0.9 * near.tokens


async def test_a_drafter_that_changes_the_text_is_seen(models: Exactly, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would if going back in draws were wrong: drafts that are thrown away would leave a trace."""
    order: dict[str, Any] = {"prompts": PROMPTS[:1], "tokens": TOKENS, "sampling": SAMPLINGS["drawn"], "seed": 3}
    plain = await models.plain(**order)
    monkeypatch.setattr(Picker, "_go_to", lambda *_: None)
    monkeypatch.setattr(Picker, "_noise_of", lambda self, draw, entries: _drawn(self, draw, entries))
    answer = await models.write(**order, rtt_ms=0.0, jitter_ms=0.0, **TIMES)
    assert [text["ids"] for text in answer["texts"]] != plain["alone"]


def _drawn(picker: Any, draw: int, entries: int) -> torch.Tensor:
    return torch.empty(entries).exponential_(1, generator=picker._at(draw, entries))


class Says:
    """Members, of whom one is asked: rounding decides where the verifier picked an even token."""

    async def all(self, do: str, *, places: list[dict[str, Any]], **how: Any) -> list[dict[str, Any]]:
        assert (do, how["part"]) == ("speculate", "rounding")
        return [{"places": [{"most": 2e-6, "decides": place["tokens"][0] % 2 == 0} for place in places]}]


async def test_what_is_told_of_texts_that_differ() -> None:
    work = ExactBench(ExactPlan("big", "small", ["a", "b"] * 6, 3, [80.0]))
    work.check()
    row = Row("greedy", 80.0)
    told = {"passes": 2, "drafted": 4, "accepted": 1, "wasted": 3}
    row.add({"kills": 2, "texts": [{"ids": [1, 2, 3], "kills": 1, **told}, {"ids": [4, 5, 7], "kills": 0, **told}]})
    work.rows = [row]
    says: Any = Says()
    others = await work._compare(says, "greedy", "at 80 ms", 10, [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 8]])
    assert [(each.text, each.at, each.by_rounding) for each in others] == [(11, 2, True)]
    work.check()
    assert work.report(origin(), complete=True).results["different"] == 0
    assert "1 texts part where two tokens are as good as equally likely: logits there differ by up to 2e-06" in str(
        work.report(origin(), complete=True).notes
    )
    row.rounded = 1
    await work._compare(says, "greedy", "at 80 ms", 10, [[1, 3, 3], [4, 6]], [[1, 4, 3], [4, 6, 8]])
    row.different = 2
    report = work.report(origin(), complete=True)
    assert report.tables[0].rows[0][2:] == ["2", "6", "1.50", "2 of 8", "2", "1", "1", "2"]
    assert (report.results["different"], report.results["rounded"]) == (2, 1)
    assert [each["at"] for each in report.results["differences"]] == [2, 1, 2]
    assert any("2 texts with a drafter that was killed 2 times" in note for note in report.notes)
    assert any("3 differ, 1 of them by rounding" in note for note in report.notes)
    assert any("up to 10% of a round trip" in note for note in report.notes)
    with pytest.raises(JobFailed, match=r"2 texts .* text 11, greedy, at 80 ms, from its token 2 on"):
        work.check()


class Stops:
    """Members, and a person who asks to stop while one is asked."""

    async def all(self, do: str, **how: Any) -> list[dict[str, Any]]:
        raise Interrupted


async def test_who_stops_before_that_is_asked_hears_of_no_mistake() -> None:
    work = ExactBench(ExactPlan("big", "small", ["a", "b"], 3, [80.0]))
    says: Any = Stops()
    with pytest.raises(Interrupted):
        await work._compare(says, "greedy", "at 80 ms", 0, [[1, 2, 3]], [[1, 2, 4]])
    work.check()
    report = work.report(origin(), complete=False)
    assert (report.results["different"], report.results["rounded"]) == (0, 0)
    assert [each["by_rounding"] for each in report.results["differences"]] == [None]
    assert (
        "text 1, greedy, at 80 ms, from its token 3 on: another one; nobody looked whether by rounding" in report.notes
    )
    with pytest.raises(Interrupted):
        await work._compare(says, "greedy", "at 80 ms", 1, [[1, 2, 3], [1]], [[1, 3, 3], [1, 2]])
    with pytest.raises(JobFailed, match=r"1 texts .* text 3, "):
        work.check()


async def test_it_asks_transformers_model_what_rounding_does(models: Exactly) -> None:
    sampling = SAMPLINGS["drawn"] | {"seed": 3}
    order: dict[str, Any] = {"prompts": PROMPTS[:1], "tokens": TOKENS, "sampling": SAMPLINGS["drawn"], "seed": 3}
    (text,) = (await models.plain(**order))["alone"]
    at = TOKENS // 2
    place = {"prompt": PROMPTS[0], "sampling": sampling, "before": text[:at]}
    tokens = [[text[at], text[at]], [text[at], (text[at] + 1) % 256]]
    same, other = (await models.rounding(places=[place | {"tokens": each} for each in tokens]))["places"]
    assert same["decides"]
    assert not other["decides"]
    assert 0 < same["most"] < 1e-4


async def test_texts_that_end_are_compared_up_to_their_end(
    pair: tuple[Path, Path], models: Exactly, tmp_path: Path
) -> None:
    """Transformers goes on behind it, for its time is measured."""
    greedy: dict[str, Any] = {"prompts": PROMPTS[:1], "tokens": TOKENS, "sampling": SAMPLINGS["greedy"]}
    (text,) = (await models.plain(**greedy, seed=3))["alone"]
    verifier = tmp_path / "verifier"
    shutil.copytree(pair[0], verifier)
    (verifier / "generation_config.json").write_text(json.dumps({"eos_token_id": text[TOKENS // 2]}))
    both: dict[str, Any] = {"verifier": str(verifier), "drafter": str(pair[1]), "threads": 1}
    ends = Exactly()
    await ends.open(**both)
    (alone,) = (await ends.plain(**greedy, seed=3))["alone"]
    assert alone == text[: text.index(text[TOKENS // 2]) + 1]
    (plain,) = (await assisted(**both, **greedy))["plain"]
    assert plain["ended"] == alone
    assert list(plain["tokens"]) == text


def test_prompts() -> None:
    assert len(set(exact_prompts(100))) == 100
    assert exact_prompts(3, ["a", "b"]) == ["a", "b", "a"]
    assert ExactPlan("", "", [], 1, []).jitter_at_ms(80.0) == 8.0
    assert ExactPlan("", "", [], 1, [], 3.0).jitter_at_ms(80.0) == 3.0


def test_it_is_of_a_real_pair(command: Command) -> None:
    outcome = command("bench", "speculate", "--exact")
    assert outcome.code == 2
    assert "--exact is for a real pair" in outcome.err


def test_the_command(command: Command, pair: tuple[Path, Path]) -> None:
    models = ["--verifier", str(pair[0]), "--drafter", str(pair[1])]
    outcome = command(
        "bench", "speculate", *models, "--exact", "--texts", "2", "-t", "20", "--rtt", "20", "--json", "-"
    )
    assert outcome.code == 0, outcome.err
    assert outcome.json["results"]["different"] == 0
    assert outcome.json["results"]["texts"] == 6
    assert outcome.json["results"]["generated"] == 6
