"""``python -m tests.fuzz``: all targets in turn, for a time, with a fresh seed; stops at the first failure."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
import traceback

from . import targets  # noqa: F401 - registers them
from .engine import TARGETS, Tally, Target, run


def main() -> int:
    """0 where nothing was found, 1 where something was."""
    names = {target.name: target for target in TARGETS}
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long")
    parser.add_argument("--target", action="append", choices=sorted(names), help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, help="of the first round, as a failure names it; else a fresh one")
    arguments = parser.parse_args()
    chosen = [names[name] for name in arguments.target or names]
    first_seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {first_seed}, {len(chosen)} targets, {arguments.minutes:g} min", flush=True)
    tallies = {target.name: Tally() for target in chosen}
    failed = _rounds(chosen, tallies, first_seed, time.monotonic() + 60 * arguments.minutes)
    print(f"{'target':<22}{'cases':>10}{'cases/s':>10}{'slowest ms':>12}{'peak KiB':>10}")
    for name, tally in tallies.items():
        rate = tally.cases / max(tally.elapsed_s, 1e-9)
        print(f"{name:<22}{tally.cases:>10}{rate:>10.0f}{1e3 * tally.slowest_s:>12.1f}{tally.peak_bytes // 1024:>10}")
    return int(failed)


def _rounds(chosen: list[Target], tallies: dict[str, Tally], seed_number: int, end: float) -> bool:
    """Whether something was found before the time was up."""
    while time.monotonic() < end:
        for target in chosen:
            if time.monotonic() >= end:
                break
            tally = tallies[target.name]
            if not run(target, examples=target.weight, seed_number=seed_number, tally=tally):
                assert tally.failure is not None
                traceback.print_exception(tally.failure)
                print(f"\nfailed: python -m tests.fuzz --target {target.name} --seed {seed_number}")
                print(f"minimal case: {tally.minimal!r}")
                return True
        seed_number += 1
    return False


if __name__ == "__main__":
    sys.exit(main())
