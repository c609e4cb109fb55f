"""What a target is, and how its cases are run: seeded, minimised by Hypothesis, each one's memory measured."""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from p2ptrain.core.errors import P2PTrainError, ProtocolError
from p2ptrain.lab.memory import run_virtual
from wire.connection import Connection
from wire.messages import Message

SUFFIX = "_untrusted"
MEASUREMENTS = 5
"""Attempts to stay below a target's bound of memory: a parser that needs more exceeds it each time."""


@dataclass(frozen=True)
class Target:
    """One way into the program for bytes of a peer.

    Attributes:
        cases: what is tried.
        check: gives one case to the parser, and asserts what must hold of the result. ``ProtocolError`` is the
            parser's refusal; what it must not refuse stands in ``accepted``.
        parsers: the functions named ``..._untrusted`` that it reaches, as ``module.qualified_name``.
        peak_bytes: what one case may allocate at most, the case itself not counted.
        weight: cases in a round; less where a case takes long.
    """

    name: str
    cases: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    parsers: tuple[str, ...]
    peak_bytes: int
    weight: int


TARGETS: list[Target] = []
"""Those of all modules that were imported."""
Check = Callable[[Any], None] | Callable[[Any], Coroutine[Any, Any, None]]


def target(
    name: str, cases: st.SearchStrategy[Any], *parsers: str, peak_bytes: int = 256 << 10, weight: int = 200
) -> Callable[[Check], Check]:
    """Make a target of a check. A coroutine runs on virtual time, and no task and no callback of it may fail."""

    def register(check: Check) -> Check:
        run_check: Any = _played(check) if inspect.iscoroutinefunction(check) else check
        TARGETS.append(Target(name, cases, run_check, parsers, peak_bytes, weight))
        return check

    return register


@dataclass
class Tally:
    """How one target fares. ``first`` and ``minimal`` are the first and the smallest case that failed."""

    cases: int = 0
    elapsed_s: float = 0.0
    slowest_s: float = 0.0
    peak_bytes: int = 0
    failure: BaseException | None = None
    minimal: Any = None
    called: set[str] = field(default_factory=set)


def run(target: Target, *, examples: int, seed_number: int, tally: Tally, watch: bool = False) -> bool:
    """Try ``examples`` cases; whether all went well. Where one did not, ``tally`` holds the minimal one.

    Args:
        watch: note in ``tally.called`` which parsers were called, until all of the target's were: this is slow.
    """

    @seed(seed_number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(target.cases)
    def tried(case: Any) -> None:
        tally.cases += 1
        began = time.perf_counter()
        try:
            watched = watch and not tally.called.issuperset(target.parsers)
            with _calls_noted(tally.called) if watched else nullcontext():
                for _ in range(MEASUREMENTS):  # tables of the interpreter grow in any call, and other threads allocate
                    if (peak_bytes := _measured(target, case)) <= target.peak_bytes:
                        break
            assert peak_bytes <= target.peak_bytes, f"{peak_bytes} bytes allocated, {target.peak_bytes} are allowed"
        except Exception:
            tally.minimal = case  # the last one to fail is the one that could not be made smaller
            raise
        tally.peak_bytes = max(tally.peak_bytes, peak_bytes)
        tally.slowest_s = max(tally.slowest_s, time.perf_counter() - began)

    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cryptography, of odd certificates: shown, never raised
            tried()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        tally.failure = error
    tally.elapsed_s += time.perf_counter() - began
    return tally.failure is None


def _measured(target: Target, case: Any) -> int:
    """Check one case; the most that was allocated meanwhile, in bytes."""
    tracemalloc.start()  # for each case anew: to trace what makes the cases would cost ten times their own time
    try:
        with suppress(ProtocolError):
            target.check(case)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _played(scene: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    async def run_scene(case: Any) -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        await scene(case)
        assert not failures, failures

    return lambda case: run_virtual(run_scene(case))


def send_if_valid(connection: Connection, message: Message, **more: int) -> bool:
    """Send a message unless it cannot be encoded, so that no peer can send it. Returns whether it was sent."""
    try:
        connection.send(message, **more)
    except (P2PTrainError, ValueError, TypeError):
        return False
    return True


@contextmanager
def accepted() -> Iterator[None]:
    """Fail if a parser refuses what is in the block."""
    try:
        yield
    except ProtocolError as error:
        raise AssertionError("a valid value is refused") from error


@contextmanager
def _calls_noted(called: set[str]) -> Iterator[None]:
    """Collect ``module.qualified_name`` of every parser that is called."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name.endswith(SUFFIX) and code not in seen:
            seen.add(code)
            called.add(f"{frame.f_globals['__name__']}.{code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
