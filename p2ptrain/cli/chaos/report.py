"""What came of it: for people lines, for programs one JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import typer

from p2ptrain.cli.chaos.cluster import Usage
from p2ptrain.cli.chaos.judge import Injury, Verdict, quantile
from p2ptrain.cli.chaos.schedule import DONOR
from roles.worker.given import CHUNK_BYTES

SHARES = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))


@dataclass(slots=True)
class Report:
    """Everything that is told.

    Attributes:
        replay: the command line that gives the same schedule.
        baseline_steps_per_s, steps_per_s: without faults, and under them.
        tokens_per_step: of the job.
        begin, end: what each process held before the faults and after them.
        complete: it was not interrupted.
    """

    replay: str
    workers: int
    tls: bool
    seconds: float = 0.0
    steps: int = 0
    baseline_steps_per_s: float = 0.0
    steps_per_s: float = 0.0
    tokens_per_step: int = 0
    injuries: list[Injury] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    begin: Mapping[str, Usage] = field(default_factory=dict)
    end: Mapping[str, Usage] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def broken(self) -> bool:
        return any(verdict.held is False for verdict in self.verdicts)

    @property
    def goodput(self) -> float | None:
        """Share of the undisturbed steps per second that were left."""
        return self.steps_per_s / self.baseline_steps_per_s if self.baseline_steps_per_s else None

    def recoveries(self) -> dict[str, list[float]]:
        """Kind → seconds to the next committed step."""
        found: dict[str, list[float]] = {}
        for injury in self.injuries:
            if injury.recovery_s is not None:
                found.setdefault(injury.kind, []).append(injury.recovery_s)
        return dict(sorted(found.items()))

    def figures(self) -> dict[str, list[float]]:
        """``kind: name`` → what else was measured of faults of that kind."""
        found: dict[str, list[float]] = {}
        for injury in self.injuries:
            for name, value in injury.figures.items():
                if name != "restarted_s":
                    found.setdefault(f"{injury.kind}: {name}", []).append(value)
        return dict(sorted(found.items()))

    def fetches(self) -> dict[str, int]:
        """Sums over the donors that were killed while newcomers fetched from them; empty where none was."""
        killed = [injury for injury in self.injuries if injury.kind == DONOR]
        hits = [injury.fetch for injury in killed if injury.fetch is not None and injury.fetch.hit]
        if not killed:
            return {}
        return {
            "killed": len(killed),
            "killed_in_the_middle": len(hits),
            "state_bytes": sum(fetch.state_bytes for fetch in hits),
            "received_bytes": sum(fetch.received_bytes for fetch in hits),
            "twice_bytes": sum(fetch.twice_bytes for fetch in hits),
            "allowed_bytes": sum(fetch.allowed_bytes(CHUNK_BYTES) for fetch in hits),
        }

    def to_json(self) -> dict[str, object]:
        return {
            "replay": self.replay,
            "complete": self.complete,
            "broken": self.broken,
            "workers": self.workers,
            "tls": self.tls,
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
            "steps_per_s": {"undisturbed": self.baseline_steps_per_s, "under faults": self.steps_per_s},
            "tokens_per_s": {
                "undisturbed": self.baseline_steps_per_s * self.tokens_per_step,
                "under faults": self.steps_per_s * self.tokens_per_step,
            },
            "goodput": self.goodput,
            "recovery_s": {kind: _summary(values) for kind, values in self.recoveries().items()},
            "figures": {name: _summary(values) for name, values in self.figures().items()},
            "donors": self.fetches(),
            "faults": [_fault(injury) for injury in self.injuries],
            "invariants": [
                {"name": verdict.name, "held": verdict.held, "text": verdict.text} for verdict in self.verdicts
            ],
            "usage": {name: {"begin": _usage(self.begin.get(name)), "end": _usage(self.end.get(name))}
                      for name in sorted({*self.begin, *self.end})},
            "notes": self.notes,
        }  # fmt: skip

    def print(self) -> None:
        """For a person, on standard output."""
        from p2ptrain.cli.output import human_seconds, print_pairs, print_table, printable
        from p2ptrain.core.units import human_bytes

        under = f"{len(self.injuries)} faults in {human_seconds(self.seconds)}"
        pairs = [("faults", under if self.complete else f"{under}, interrupted"), ("steps", str(self.steps))]
        if (goodput := self.goodput) is not None:
            text = f"{100 * goodput:.0f} %: {self.steps_per_s:.2f} of {self.baseline_steps_per_s:.2f} steps/s"
            tokens = self.steps_per_s * self.tokens_per_step
            pairs.append(("goodput", f"{text}, {tokens:,.0f} tokens/s"))
        if fetches := self.fetches():
            text = f"{fetches['killed_in_the_middle']} of {fetches['killed']} killed in the middle of a transfer"
            pairs.append(("donors", text))
            twice, allowed = human_bytes(fetches["twice_bytes"]), human_bytes(fetches["allowed_bytes"])
            text = f"{human_bytes(fetches['received_bytes'])} for {human_bytes(fetches['state_bytes'])} of states"
            pairs.append(("fetched", f"{text}; {twice} came twice, {allowed} may"))
        print_pairs(pairs)
        for title, table in (("to the next step", self.recoveries()), ("beside it", self.figures())):
            if table:
                typer.echo()
                rows = [[name, str(len(values)), *_spread(values)] for name, values in table.items()]
                print_table([title, "n", *(name for name, _ in SHARES)], rows, right=["n", "p50", "p99", "max"])
        typer.echo()
        rows = []
        for name in sorted({*self.begin, *self.end}):
            before, after = self.begin.get(name), self.end.get(name)
            rows.append([
                name,
                *(f"{human_bytes(side.memory_bytes)}, {side.descriptors}, {side.threads}" if side else "-"
                  for side in (before, after)),
            ])  # fmt: skip
        print_table(["memory, descriptors, threads", "before", "after"], rows)
        typer.echo()
        for verdict in self.verdicts:
            mark = {True: "held", False: "BROKEN", None: "not seen"}[verdict.held]
            typer.echo(printable(f"{mark:<8}  {verdict.name}" + (f": {verdict.text}" if verdict.text else "")))
        for note in self.notes:
            typer.echo(printable(f"note      {note}"))
        typer.echo(f"\nthe same schedule again:  {self.replay}")


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"n": len(values)} | {name: round(quantile(values, share), 3) for name, share in SHARES}


def _spread(values: Sequence[float]) -> list[str]:
    return [f"{quantile(values, share):.2f}" for _, share in SHARES]


def _usage(usage: Usage | None) -> dict[str, int] | None:
    if usage is None:
        return None
    return {"memory_bytes": usage.memory_bytes, "descriptors": usage.descriptors, "threads": usage.threads}


def _fault(injury: Injury) -> dict[str, object]:
    return {
        "number": injury.number,
        "kind": injury.kind,
        "peers": list(injury.peers),
        "detail": injury.detail,
        "step": injury.step,
        "generation": injury.generation,
        "recovery_s": injury.recovery_s,
        "figures": injury.figures,
        "fetch": asdict(injury.fetch) | {"twice_bytes": injury.fetch.twice_bytes} if injury.fetch else None,
    }
