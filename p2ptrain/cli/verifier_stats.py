"""Where a verifier's token spends its time, and what its drafters were good for."""

from __future__ import annotations

from typing import Any

import typer

from p2ptrain.cli.output import printable

_SPENT = (("verify_ms", "verifying"), ("draft_ms", "waiting for drafts"), ("wait_ms", "waiting"))


def print_verifier_stats(stats: dict[str, Any]) -> None:
    """Some lines of what ``Written.stats`` has. Nothing in it is trusted to be there."""
    known = {name: value for name, value in stats.items() if isinstance(value, int | float)}
    if "token_ms" in known:
        spent = [f"{known[name]:.1f} {label}" for name, label in _SPENT if known.get(name, 0) >= 0.05]
        rest = f"{known.get('rest_ms', 0):.1f} the rest"
        typer.echo(f"a token took {known['token_ms']:.1f} ms: {' + '.join([*spent, rest])}")
    if "first_s" in known:
        cached = f", {known['cached_tokens']:.0f} of them from before" if known.get("cached_tokens") else ""
        prompt = f"{known.get('prompt_tokens', 0):.0f} tokens of prompt{cached}"
        typer.echo(f"the first token came after {1e3 * known['first_s']:.0f} ms ({prompt})")
    if known.get("alpha") is not None:
        by_place = [f"{each:.2f}" for each in stats.get("acceptance_at") or [] if isinstance(each, int | float)]
        typer.echo(
            f"drafts: {known['alpha']:.2f} of them right, {known.get('accepted_length', 0):.2f} tokens a pass"
            f" ({known.get('passes', 0):.0f} passes, {known.get('self_steps', 0):.0f} without drafts)"
        )
        if by_place:
            typer.echo(f"right by place in the pass: {' '.join(by_place)}")
    if known.get("drafted"):
        carried = f"; {known['bytes_per_token']:.1f} bytes of messages a token" if "bytes_per_token" in known else ""
        fate = f"{known.get('wasted', 0):.0f} of them wrong, or behind a wrong one"
        fate = fate if known.get("verified", 1) else "none was used"
        typer.echo(f"{known['drafted']:.0f} drafts came, {fate}{carried}")
    typer.echo(f"drafters: {drafters_text(stats)}{_rested(known) if stats.get('drafters') else ''}")


def _rested(known: dict[str, float]) -> str:
    """Why nothing was made of them; where it is not told nothing is said of it."""
    if not known.get("drafted", 1):
        return "; none drafted: where they are no gain they rest"
    return "" if known.get("verified", 1) else "; where they are no gain the verifier goes on by itself"


def drafters_text(stats: dict[str, Any]) -> str:
    """Who drafted."""
    found = [each for each in stats.get("drafters") or [] if isinstance(each, dict)]
    return ", ".join(_drafter(each) for each in found) or "none"


def _drafter(facts: dict[str, Any]) -> str:
    name, model, latency = facts.get("name"), facts.get("model"), facts.get("latency_ms")
    away = f", {latency:.1f} ms away" if isinstance(latency, int | float) and latency else ""
    right = facts.get("accepted")
    taken = f", {right:.0f} of its drafts taken" if isinstance(right, int | float) else ""
    return printable(f"{name} ({model}{away}{taken})")
