"""What is told of ``bench speculate``: measured beside simulated, and beside the formulas."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from p2ptrain.cli.bench.drawing import FILLS, MARK, Bar, bars
from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.bench.place import SPREAD
from p2ptrain.cli.bench.report import Report, Table, times
from p2ptrain.cli.bench.speculate_rows import (
    ALONE_TOKENS,
    CHAIN_RING_S,
    CHAIN_STAGES,
    NEVER_SLOWER,
    SETTLED,
    Kill,
    Plan,
    Row,
    pauses,
)

Result = dict[str, Any]


def told(plan: Plan, rows: Sequence[Row], kills: Sequence[Kill], origin: Origin, *, complete: bool) -> Report:
    """All of it."""
    split = f", split: a ring of {1e3 * CHAIN_RING_S:g} ms" if plan.chain else ""
    when = " · virtual time" if plan.virtual else ""
    title = f"speculate · a pass takes {1e3 * plan.pass_s:g} ms{split} · a draft {1e3 * plan.draft_s:g} ms{when}"
    report = Report("speculate", title, origin, asdict(plan), complete=complete)
    results = [_result(plan, row) for row in rows]
    depths = _by_depth(results)
    report.results = {
        "rows": results,
        "depths": depths,
        "kills": [asdict(kill) | {"held": kill.held} for kill in kills],
        "held": all(row["held"] for row in results) if results else None,
    }
    report.tables = [_measured(results), _expected(results), _depths(results, depths), _killed(kills)]
    report.pictures = [_picture(results)]
    report.notes = _notes(plan, results, depths, kills)
    report.samples = [
        {
            "alpha": row.where.alpha,
            "round_trip_ms": row.where.round_trip_ms,
            "most_drafts": row.where.depth or "auto",
            "way": way,
            "text": number,
            "token_s": at_s[-1] / (len(at_s) - 1),
        }
        for row in rows
        for way, texts in (("ahead", row.ahead), ("in turns", row.in_turns), ("alone", row.alone))
        for number, at_s in enumerate(texts.at_s)
    ]
    return report


def _result(plan: Plan, row: Row) -> Result:
    where, ahead = row.where, row.ahead
    token_s, alone_s = ahead.token_s, row.alone.token_s
    goal_s = plan.goal_s(where, alone_s)
    slower = token_s / alone_s
    return {
        "alpha": where.alpha,
        "round_trip_ms": where.round_trip_ms,
        "most_drafts": where.depth or None,
        "token_s": token_s,
        "settled_s": ahead.settled_s,
        "alone_s": alone_s,
        "faster": alone_s / token_s,
        "in_turns_s": row.in_turns.token_s,
        "in_turns_drafts": row.drafts,
        "simulated_s": row.simulated_s,
        "formula_ahead_s": plan.ahead_s(where),
        "formula_in_turns_s": plan.in_turns_s(where, row.drafts),
        "goal_s": goal_s,
        "goal_reached": None if goal_s is None else token_s <= goal_s,
        "never_slower": slower <= NEVER_SLOWER,
        "held": slower <= NEVER_SLOWER and (goal_s is None or token_s <= goal_s),
        "pause_s": max(pauses(at_s, 1) for at_s in ahead.at_s),
        "accepted_length": ahead.total("tokens") / max(1.0, ahead.total("passes")),
        "measured_alpha": statistics.fmean(stats["alpha"] or 0.0 for stats in ahead.stats),
        "wasted": ahead.each("wasted", "drafted"),
        "drafted_per_token": ahead.each("drafted", "tokens"),
        "self_steps": ahead.each("self_steps", "passes"),
        "bytes_per_token": (ahead.total("bytes_in") + ahead.total("bytes_out")) / max(1.0, ahead.total("tokens")),
        "frame_bytes_per_token": statistics.fmean(stats.get("frame_bytes_per_token") or 0.0 for stats in ahead.stats),
    }


def _by_depth(results: Sequence[Result]) -> list[Result]:
    """Where several depths were measured: the best fixed one at each distance, and beside it the program's choice."""
    found = []
    for (round_trip_ms, alpha), group in groupby(results, lambda row: (row["round_trip_ms"], row["alpha"])):
        token_s = {row["most_drafts"]: row["token_s"] for row in group}
        auto_s = token_s.pop(None, None)
        if token_s:
            best = min(token_s, key=lambda depth: token_s[depth])
            share = None if auto_s is None else auto_s / token_s[best]
            at = {"round_trip_ms": round_trip_ms, "alpha": alpha, "token_s": list(token_s.items())}
            found.append(at | {"best": best, "best_s": token_s[best], "auto_s": auto_s, "auto_share": share})
    return found


def _place(row: Result) -> list[str]:
    return [f"{row['round_trip_ms']:g} ms", f"{row['alpha']:g}"]


def _depth(row: Result) -> str:
    return str(row["most_drafts"] or "auto")


def _at_most(row: Result) -> str:
    return f"≤{row['most_drafts']} drafts" if row["most_drafts"] else "auto"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def _table(results: Sequence[Result], columns: Sequence[str], rows: Sequence[list[str]]) -> Table:
    """With the setting of each row before it."""
    deep = any(row["most_drafts"] for row in results)
    heads = ["ROUND TRIP", "ALPHA", "DEPTH"] if deep else ["ROUND TRIP", "ALPHA"]
    places = [[*_place(row), _depth(row)] if deep else _place(row) for row in results]
    columns = [*heads, *columns]
    return Table(columns, [[*place, *row] for place, row in zip(places, rows, strict=True)], columns)


def _measured(results: Sequence[Result]) -> Table:
    columns = ["ALONE", "IN TURNS", "AHEAD", "FASTER", "GOAL", "A PASS", "WASTED", "BYTES", "FRAMES"]
    rows = []
    for row in results:
        goal = "-" if row["goal_s"] is None else f"{_ms(row['goal_s'])} {_yes(row['goal_reached'])}"
        goal = goal if row["never_slower"] else "slower NO"
        times_ms = [_ms(row[name]) for name in ("alone_s", "in_turns_s", "token_s")]
        found = [f"{row['accepted_length']:.1f}", f"{100 * row['wasted']:.0f} %", f"{row['bytes_per_token']:.1f}"]
        found.append(f"{row['frame_bytes_per_token']:.0f}")
        rows.append([*times_ms, times(row["faster"]), goal, *found])
    return _table(results, columns, rows)


def _expected(results: Sequence[Result]) -> Table:
    columns = ["AHEAD", "SETTLED", "SIMULATED", "FORMULA", "IN TURNS", "ITS FORMULA", "ITS DRAFTS"]
    names = ("token_s", "settled_s", "simulated_s", "formula_ahead_s", "in_turns_s", "formula_in_turns_s")
    rows = [[*(_ms(row[name] or None) for name in names), str(row["in_turns_drafts"])] for row in results]
    return _table(results, columns, rows)


def _depths(results: Sequence[Result], depths: Sequence[Result]) -> Table:
    """A column for each depth: what a token takes."""
    names = list(dict.fromkeys(row["most_drafts"] for row in results if row["most_drafts"]))
    columns = ["ROUND TRIP", "ALPHA", *(f"≤{name}" for name in names), "AUTO", "BEST FIXED", "AUTO OF IT"]
    rows = []
    for row in depths:
        token_s = dict(row["token_s"])
        cells = [*(_ms(token_s.get(name)) for name in names), _ms(row["auto_s"])]
        rows.append([*_place(row), *cells, str(row["best"]), times(row["auto_share"])])
    return Table(columns, rows, columns)


def _killed(kills: Sequence[Kill]) -> Table:
    columns = ["ROUND TRIP", "KILLED AT TOKEN", "LONGEST PAUSE", "BEFORE", "GOAL", "TEXT"]
    rows = []
    for kill in kills:
        times_ms = [f"{1e3 * each:.0f} ms" for each in (kill.pause_s, kill.before_s, kill.limit_s)]
        times_ms[-1] += f" {_yes(kill.held)}"
        rows.append([f"{kill.round_trip_ms:g} ms", str(kill.killed_at), *times_ms, "the same"])
    return Table(columns, rows, columns[:-1])


def _picture(results: Sequence[Result]) -> list[str]:
    """What a token takes, measured and by the formula; where there are several depths, by those."""

    def bar(label: str, row: Result, name: str, formula: str, fill: str) -> Bar:
        return Bar(label, row[name], f"{_ms(row[name])} ms · formula {_ms(row[formula])}", fill, row[formula])

    groups = []
    for place, group in groupby(results, _place):
        rows = list(group)
        drawn = [Bar("alone", rows[0]["alone_s"], f"{_ms(rows[0]['alone_s'])} ms", FILLS[2])]
        if rows[1:]:
            fills = [FILLS[1] if row["most_drafts"] else FILLS[0] for row in rows]
            pairs = zip(rows, fills, strict=True)
            drawn += [bar(_at_most(row), row, "token_s", "formula_ahead_s", fill) for row, fill in pairs]
        else:
            drawn.append(bar("in turns", rows[0], "in_turns_s", "formula_in_turns_s", FILLS[1]))
            drawn.append(bar("ahead", rows[0], "token_s", "formula_ahead_s", FILLS[0]))
        groups.append((", ".join(place), drawn))
    return bars(groups, common=True)


def _notes(plan: Plan, results: Sequence[Result], depths: Sequence[Result], kills: Sequence[Kill]) -> list[str]:
    notes = [
        "milliseconds of a token, from a text's first token to its last, what must be learned first included; "
        "what a verifier learns is kept for its next texts, and one short text before them is not counted; "
        f"settled: behind the first {SETTLED} tokens; {MARK}: where the formula is",
        "alone: the same service without a drafter; in turns: draft, send, verify, answer, with the best fixed "
        "number of drafts, or as many as the depth says; ahead: this program; depth: the most drafts that a pass may "
        "take, auto: as many as the program finds of use; a pass: tokens that one gives; wasted: of the drafts, those "
        "that were wrong, or behind a wrong one; bytes: bodies of drafts and verdicts, a token; frames: with the "
        "headers around them",
        f"{plan.texts} texts of {plan.tokens} tokens each, one in turns, and "
        f"the first {ALONE_TOKENS} tokens alone; all were the verifier's "
        "own, token for token. As many drafts are right as alpha says; models that only take time, nothing else",
    ]
    if plan.virtual:
        notes.append(
            "virtual time: the same service, drafter and messages in one process, where passes and drafts take what "
            f"they are said to take, within {SPREAD:.0%}, drawn alike in each run; links take exactly that, and "
            "nothing else takes any time"
        )
    if plan.chain:
        notes.append(
            f"the split verifier: {CHAIN_STAGES} stages {'' if plan.virtual else 'in processes of their own'}, each of "
            f"which takes its part of a pass, and {CHAIN_STAGES + 1} hops of "
            f"{1e3 * CHAIN_RING_S / (CHAIN_STAGES + 1):.1f} ms; alone: the same chain without a drafter"
        )
    if goals := [row for row in results if row["goal_s"] is not None]:
        reached = sum(row["goal_reached"] for row in goals)
        notes.append(f"goals of a token's time: {reached} of {len(goals)} reached")
    if results:
        slowest = max(row["token_s"] / row["alone_s"] for row in results)
        verdict = "kept" if slowest <= NEVER_SLOWER else "not kept"
        notes.append(f"at worst {times(slowest)} of the time alone, to stay within {times(NEVER_SLOWER)}: {verdict}")
    if shares := [row["auto_share"] for row in depths if row["auto_share"] is not None]:
        notes.append(
            f"auto takes {times(min(shares))} to {times(max(shares))} of the time of the best fixed depth, which is "
            "another one from setting to setting, and which nobody knows beforehand; some per cent are chance: more "
            "--texts, less of it"
        )
    if kills:
        held = sum(kill.held for kill in kills)
        notes.append(f"killed with -9: {held} of {len(kills)} texts went on within two passes")
    return notes


def _yes(held: bool) -> str:
    return "yes" if held else "NO"
