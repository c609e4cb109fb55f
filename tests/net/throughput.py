"""Measures what a connection carries: dialled, through routers, and over a relay. Needs root and nft.

    python -m tests.net.throughput --mbit 100 --megabytes 40

Each machine sends through a link of so many Mbit/s; 0: no limit.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

from tests.net.namespaces import Internet, why_not
from tests.net.test_circuits import Meeting
from tests.wire.doubles import Recorder


async def exchange(nbytes: int, end: Recorder) -> str:
    """The caller sends, and the answerer answers with one byte when it has all. Returns the way, and Mbit/s."""
    chunk = bytes(1 << 20)
    is_caller = end.transport.get_extra_info("sockname")[0] == "a1.peer"
    end.transport.write(b"0")
    await end.until_received(1)
    began = time.monotonic()
    if is_caller:
        for _ in range(nbytes // len(chunk)):
            end.transport.write(chunk)
            await end.until(lambda: not end.writing_paused, timeout_s=60)
        await end.until_received(2, timeout_s=60)
    else:
        await end.until_received(1 + nbytes // len(chunk) * len(chunk), timeout_s=60)
        end.transport.write(b"1")
    took_s = time.monotonic() - began
    way = end.transport.get_extra_info("way")
    if is_caller:
        end.transport.close()
    await end.until_lost()
    return f"{way:9} {nbytes * 8 / took_s / 1e6:8.1f} Mbit/s"


def measure(kind: str, options: argparse.Namespace) -> str:
    with Internet() as net:
        relay = net.machine("relay")
        router = {"dialled": "", "punched": "keeps ports", "relayed": "symmetric"}[kind]
        ends = net.machine("a", router=router), net.machine("b", router=router)
        for machine in (relay, *ends):
            if options.mbit:
                machine.limit(options.mbit)
        meeting = Meeting(*ends, relay, exchange=partial(exchange, options.megabytes * 1_000_000))
        return meeting.ways()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    for _ in range(options.rounds):
        for kind in ("dialled", "punched", "relayed"):
            print(f"{kind:9} {measure(kind, options)}", flush=True)


if __name__ == "__main__":
    main()
