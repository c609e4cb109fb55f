"""A real pair of models for ``bench speculate``: with and without its drafter, beside transformers' own way.

Transformers has both models in one process, without any distance: that is its assisted generation. Greedily all three
must write the same text; drawn, transformers' assisted one is another text of the same chances.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.bench.members import Interrupted, Members, started
from p2ptrain.cli.bench.report import Report, Table, times
from p2ptrain.cli.bench.speculate import opened
from p2ptrain.cli.bench.speculate_parted import Parted, check, look_at, parted, told_of
from p2ptrain.cli.bench.speculate_rows import AUTO, Texts
from p2ptrain.cli.bench.trial import Scene
from p2ptrain.cli.stopping import unless_stopped
from p2ptrain.core.errors import UserError
from roles.speculation.policy import MOST_DRAFTS

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_k": 50, "seed": 7},
}
TEXT_S, LOAD_S = 5.0, 6.0
PROMPTS = (
    "import os\nimport sys\n\ndef main(",
    "class Node:\n    def __init__(self, ",
    "def read_file(path):\n    with open(",
    "    for key, value in self.items():\n        ",
    "    if not isinstance(other, ",
    "try:\n    import json\nexcept ",
    '    """Return the number of ',
    "    raise ValueError(",
    "    return self._",
    "def test_simple(self):\n        self.assertEqual(",
    "from collections import ",
    "while True:\n    line = ",
    "    def __repr__(self):\n        return ",
    "# This module provides ",
    "    @property\n    def name(self):\n        ",
    "if __name__ == ",
    "    parser.add_argument(",
    "        else:\n            result = ",
    "async def connect(host, port):\n    ",
    "    except KeyError:\n        ",
)


At = tuple[float, int]
"""Round trip in milliseconds, and depth."""


@dataclass(frozen=True, slots=True)
class PairPlan:
    """What to measure. ``threads``: of each model's kernels. ``depths``: as of ``Where``."""

    verifier: str
    drafter: str
    prompts: list[str]
    tokens: int
    round_trips_ms: list[float]
    jitter_ms: float = 0.0
    threads: int = 1
    depths: list[int] = field(default_factory=lambda: [AUTO])


@dataclass(slots=True)
class Drawn:
    """One way to draw. ``plain``, ``assisted``: transformers', with ids and seconds; the others: by distance and depth.
    ``assisted`` is empty where vocabularies are padded to different sizes: transformers does not take such a pair."""

    name: str
    alpha: float = 0.0
    plain: list[dict[str, Any]] = field(default_factory=list)
    assisted: list[dict[str, Any]] = field(default_factory=list)
    alone: dict[At, Texts] = field(default_factory=dict)
    ahead: dict[At, Texts] = field(default_factory=dict)

    def rate(self, texts: list[dict[str, Any]]) -> float:
        """Tokens a second, the prompt's pass included: transformers tells no other."""
        seconds = float(sum(text["seconds"] for text in texts))
        return sum(len(text["tokens"]) for text in texts) / max(1e-9, seconds)


def rate(texts: Texts) -> float:
    """Tokens a second, from asking to the last token, as of transformers."""
    return texts.total("tokens") / max(1e-9, texts.total("seconds"))


def prompts_of(file: Path | None) -> list[str]:
    """One a line; some of Python without a file. Raises ``UserError``."""
    if file is None:
        return list(PROMPTS)
    try:
        found = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}", remedy="name a text file with one prompt a line") from error
    if not found:
        raise UserError(f"{file} has no prompts", remedy="write one a line")
    return found


class PairBench:
    """One run; ``drawn`` and ``parted`` grow while it measures."""

    def __init__(self, plan: PairPlan) -> None:
        self.plan = plan
        self.drawn: list[Drawn] = []
        self.parted: list[Parted] = []

    def check(self) -> None:
        """Raises ``JobFailed``: a text is not the verifier's own, and not by rounding."""
        check(self.parted)

    async def measure(self, scene: Scene) -> None:
        """Raises ``P2PTrainError``, ``Interrupted``."""
        if await unless_stopped(scene.stop, self._measure(scene)) is None:
            raise Interrupted

    async def _measure(self, scene: Scene) -> bool:
        plan, say = self.plan, scene.console.progress
        self.drawn = [Drawn(name) for name in SAMPLINGS]
        say("transformers, both models in one process")
        async with started(1, scene.stop, threads=plan.threads) as rival:
            for drawn in self.drawn:
                say(f"transformers, {drawn.name}")
                await self._assisted(rival, drawn)
        async with started(1, scene.stop, threads=plan.threads) as verifier:
            for at in product(plan.round_trips_ms, plan.depths):
                async with started(1, scene.stop, threads=plan.threads) as drafter:
                    await self._at(scene, verifier, drafter, at)
        if self.parted:
            say(f"{len(self.parted)} texts part from transformers': is it rounding?")
            async with started(1, scene.stop, threads=plan.threads) as members:
                models: dict[str, Any] = {"verifier": plan.verifier, "drafter": plan.drafter, "threads": plan.threads}
                await members.all("speculate", part="be exact", seconds=LOAD_S, **models)
                await look_at(members, self.parted, plan.prompts, SAMPLINGS, None)
        return True

    async def _assisted(self, rival: Members, drawn: Drawn) -> None:
        plan = self.plan
        order: dict[str, Any] = {"verifier": plan.verifier, "drafter": plan.drafter, "threads": plan.threads}
        sizes: dict[str, Any] = {"prompts": plan.prompts, "tokens": plan.tokens, "sampling": SAMPLINGS[drawn.name]}
        seconds = TEXT_S * len(plan.prompts)
        (answer,) = await rival.all("speculate", part="assisted", seconds=seconds, **order, **sizes)
        drawn.plain, drawn.assisted = answer["plain"], answer["assisted"]
        drawn.alpha = answer["alpha"]

    async def _at(self, scene: Scene, verifier: Members, drafter: Members, at: At) -> None:
        plan, (round_trip_ms, depth) = self.plan, at
        link = {"rtt_ms": round_trip_ms, "jitter_ms": plan.jitter_ms, "threads": plan.threads}
        for_drafter = {"draft_s": 0.0, "alpha": 1.0, "model": plan.drafter} | link
        for_verifier = {"pass_s": 0.0, "row_s": 0.0, "model": plan.verifier, "texts": ""} | link
        for_verifier["most_drafts"] = depth or MOST_DRAFTS
        async with opened(verifier, drafter, for_drafter, for_verifier, plan.prompts[0], plan.tokens):
            for drawn in self.drawn:
                scene.console.progress(f"{round_trip_ms:g} ms, {drawn.name}" + (f", depth {depth}" if depth else ""))
                alone, ahead = Texts(), Texts()
                for number, (prompt, plain) in enumerate(zip(plan.prompts, drawn.plain, strict=True)):
                    for speculate, texts in ((False, alone), (True, ahead)):  # in turn, for the machine's sake
                        order: dict[str, Any] = {"prompts": [prompt], "tokens": plan.tokens, "speculate": speculate}
                        order["sampling"] = SAMPLINGS[drawn.name]
                        (answer,) = await verifier.all("speculate", part="write", seconds=TEXT_S, **order)
                        texts.add(Texts.told(answer["texts"]))
                        writer = f"{'ahead' if speculate else 'alone'} at {round_trip_ms:g} ms"
                        (written,) = answer["texts"]
                        if other := parted(drawn.name, writer, number, plain["ended"], written["ids"]):
                            self.parted.append(other)
                drawn.alone[at], drawn.ahead[at] = alone, ahead

    # ------------------------------------------------------------------------------------------------------ the report

    def report(self, origin: Origin, *, complete: bool) -> Report:
        plan = self.plan
        names = f"{Path(plan.verifier).name} and {Path(plan.drafter).name}"
        title = f"speculate · {names} · {len(plan.prompts)} texts of {plan.tokens} tokens"
        report = Report("speculate", title, origin, asdict(plan), complete=complete)
        results = [self._result(drawn, at) for drawn in self.drawn for at in drawn.ahead]
        report.results = {"rows": results, "differences": [asdict(each) for each in self.parted]}
        columns = ["DRAWN", "ROUND TRIP", "DEPTH", "ALPHA", "A PASS", "ALONE", "AHEAD", "FASTER"]
        columns += ["HF ALONE", "HF ASSISTED"]
        rows = []
        for row in results:
            found = [
                row["name"],
                f"{row['round_trip_ms']:g} ms",
                str(row["most_drafts"] or "auto"),
                f"{row['alpha']:.2f}",
                f"{row['accepted_length']:.1f}",
            ]
            found += [f"{row[name]:.1f}/s" for name in ("alone_per_s", "ahead_per_s")]
            found += [times(row["faster"])]
            rates = (row[name] for name in ("plain_per_s", "assisted_per_s"))
            rows.append([*found, *("-" if rate is None else f"{rate:.1f}/s" for rate in rates)])
        report.tables = [Table(columns, rows, columns[1:])]
        report.notes = [
            "tokens a second, each text's prompt included. HF: transformers' generate by itself, and with its assisted "
            "generation, both models in one process, without any distance",
            "alone and ahead wrote the text of transformers' generate, token for token, greedily and drawn, but for "
            f"{len(self.parted)}; alpha: how "
            "often the drafter's next token is the verifier's where all before are, over these texts; "
            "a pass: tokens that one gives, ahead; "
            "depth: the most drafts that a pass may take, auto: as many as the program finds of use",
            f"verifier and drafter have {plan.threads} threads each; on few cores they take them from each other",
        ]
        report.notes += told_of(self.parted)
        report.samples = [
            {
                "drawn": drawn.name,
                "round_trip_ms": round_trip_ms,
                "most_drafts": depth or "auto",
                "text": number,
                "token_s": at_s[-1] / max(1, len(at_s) - 1),
            }
            for drawn in self.drawn
            for (round_trip_ms, depth), texts in drawn.ahead.items()
            for number, at_s in enumerate(texts.at_s)
        ]
        return report

    def _result(self, drawn: Drawn, at: At) -> dict[str, Any]:
        alone, ahead = drawn.alone[at], drawn.ahead[at]
        return {
            "name": drawn.name,
            "round_trip_ms": at[0],
            "most_drafts": at[1] or None,
            "alpha": drawn.alpha,
            "accepted_length": ahead.total("tokens") / max(1.0, ahead.total("passes")),
            "alone_per_s": rate(alone),
            "ahead_per_s": rate(ahead),
            "faster": rate(ahead) / max(1e-9, rate(alone)),
            "alone_token_s": alone.token_s,
            "ahead_token_s": ahead.token_s,
            "plain_per_s": drawn.rate(drawn.plain),
            "assisted_per_s": drawn.rate(drawn.assisted) if drawn.assisted else None,
            "assisted_alike": sum(
                one["tokens"] == other["tokens"] for one, other in zip(drawn.plain, drawn.assisted, strict=False)
            ),
            "wasted": ahead.each("wasted", "drafted"),
            "bytes_per_token": (ahead.total("bytes_in") + ahead.total("bytes_out")) / max(1.0, ahead.total("tokens")),
        }
