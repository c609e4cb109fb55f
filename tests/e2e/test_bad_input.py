"""A hostile, careless or unlucky user, with real processes: the exit code, the cause, the remedy, and what lives on.

Nothing here may ever show a traceback, and nothing may be left running.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import re
import shlex
import signal
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from configs.loader import load
from p2ptrain.core.errors import P2PTrainError, Refused
from wire.connection import Connection
from wire.handshake import SOFTWARE, dial, local_hello, local_welcome, serve
from wire.messages import PROTOCOL_VERSION, Hello, Welcome
from wire.transport import TcpNetwork

DEADLINE_S = 60.0
LONG = 100_000  # steps: never done within a test
OTHER_VERSION = PROTOCOL_VERSION + 1
CLIENT_HELLO = bytes.fromhex("16030100f1010000ed0303") + random.Random(0).randbytes(240)
GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: seed\r\n\r\n",
    "TLS": CLIENT_HELLO,
    "a frame that says it has 4294967299 bytes": struct.pack("!I", 0xFFFFFFFF),
    "a frame that says it has": random.Random(1).randbytes(100_000),
}


async def refused(machine: Any, *arguments: str, code: int, cause: str, remedy: str, **environment: str) -> None:
    """Run a command that must fail in exactly this way, with nothing on standard output."""
    process = await machine.start(*arguments, **environment)
    outcome = await process.end(), process.text
    assert outcome[0] == code, outcome
    assert "Traceback" not in process.text
    assert process.out == []
    assert process.lines[-2:] == [f"error: {cause}", f"  → {remedy}"], outcome


async def clean(process: Any) -> str:
    """What an ended process said, without a traceback."""
    assert "Traceback" not in process.text, process.text
    assert "a mistake in this program" not in process.text, process.text
    return str(process.text)


@asynccontextmanager
async def answering(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """A port on which something else than a seed answers."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says nothing until the caller hangs up."""
    await reader.read()
    writer.close()


async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    writer.close()


@pytest.fixture
async def taken() -> AsyncIterator[int]:
    """A port that another program has."""
    async with answering(silence) as port:
        yield port


@pytest.fixture
async def nobody() -> int:
    """A port on which nobody listens."""
    async with answering(silence) as port:
        pass
    return int(port)


# ---------------------------------------------------------------------------------------------------- wrong settings

MINE = 'base = "tiny"\n\n[optimizer]\nlearning_rate = 1e-3\n'
OPTIMIZER = "[optimizer] has lr, min_lr_ratio, warmup_steps, weight_decay, beta1, beta2, eps, clip_norm"
TABLES = (
    "job, model, data, batch, pipeline, optimizer, validation, checkpoint, device, ring, guard, link, membership, "
    "drafter"
)
LR = "optimizer.lr: Highest learning rate, reached after the warm-up."
STEPS = "job.steps: Optimizer steps of the whole run."
SHIPPED = "example, pair, small, tiny, wan"
WRONG: list[tuple[str, str, str]] = [
    (f"--profile {name}", cause, remedy)
    for name, cause, remedy in (
        ("./key.toml", "key.toml:4: unknown key optimizer.learning_rate", OPTIMIZER),
        ("./type.toml", 'type.toml:2: optimizer.lr = "fast" must be a number', LR),
        ("./toml.toml", "toml.toml:1: not TOML: Invalid value", "see https://toml.io for the syntax"),
        ("./bytes.toml", "bytes.toml is not UTF-8 text", "is this the right file?"),
        (
            "./none.toml",
            "cannot read the profile none.toml: No such file or directory",
            f"check the path, or name a profile that ships: {SHIPPED}",
        ),
        (
            "tinny",
            "no profile named 'tinny' ships with p2ptrain",
            f"did you mean tiny? these ship: {SHIPPED}; a file of your own is given as a path, such as ./my.toml",
        ),
    )
] + [
    ("--set foo=1", "--set foo=1: unknown key foo", f"the tables are {TABLES}"),
    ("--set optimizer.lr=", '--set optimizer.lr=: optimizer.lr = "" must be a number', LR),
    ("--set optimizer.lr=nan", "--set optimizer.lr=nan: optimizer.lr = nan must be a finite number", LR),
    ("--set job.steps=1.5", "--set job.steps=1.5: job.steps = 1.5 must be a whole number", STEPS),
    (
        "--set optimizer.lr",
        "--set optimizer.lr: no value",
        "write --set table.key=value, such as --set optimizer.lr=3e-3",
    ),
]
ELSEWHERE: list[tuple[str, str, str]] = [
    (
        "seed --port 99999",
        "Invalid value for '--port': Input should be less than or equal to 65535",
        "`p2ptrain seed --help` says what there is",
    ),
    (
        "join a:b",
        "'a:b' is not an address: it is no host with or without a port",
        "write host, host:port or [IPv6]:port, such as 192.168.1.20:7337 or [fe80::1]:7337",
    ),
    ("join --device gpu", "--device gpu is not a device", "use auto, cpu, cuda, cuda:1, ... or mps"),
    ("join --memory much", "'much' is no size", "write bytes, or 64K, 1.5M, 4GiB"),
    (
        "join --advertise box",
        "--advertise box names no port",
        "write HOST:PORT, the address that others shall dial",
    ),
    (
        f"join --name {'n' * 65}",
        "Invalid value for '--name': it has 65 bytes, a name may have 64",
        "`p2ptrain join --help` says what there is",
    ),
    (
        "jobs create --name \udcff",
        "Invalid value for '--name': it is not UTF-8 text",
        "`p2ptrain jobs create --help` says what there is",
    ),
    ("jobs show ''", "Invalid value for 'JOB': it is empty", "`p2ptrain jobs show --help` says what there is"),
    (
        "up --link dsl",
        "there is no link preset 'dsl'",
        "choose one of lan, wifi, metro, wan, transcontinental, satellite, lossy, or a round trip: 20ms",
    ),
    (
        "tui",
        "the full-screen view needs a terminal, and this is none",
        "for scripts there are `p2ptrain jobs list --json` and `p2ptrain peers --json`",
    ),
    (
        "up --workers 2 --set job.workers=3",
        "--set job.workers=3: the job begins with 3 workers, and 2 would be started",
        "give --workers 3, or --set job.workers=2",
    ),
    ("generate hi --split", "generate needs one checkpoint", "give either --checkpoint DIR or --job JOB"),
]


@pytest.mark.parametrize(("arguments", "cause", "remedy"), WRONG)
async def test_a_wrong_setting_is_refused_with_its_place(machine: Any, arguments: str, cause: str, remedy: str) -> None:
    (machine.root / "key.toml").write_text(MINE)
    (machine.root / "type.toml").write_text('[optimizer]\nlr = "fast"\n')
    (machine.root / "toml.toml").write_text("x = \n")
    (machine.root / "bytes.toml").write_bytes(b"\xff\xfe\n")
    before = sorted(machine.root.iterdir())
    words = ["up", "--state", "state", *arguments.split()]
    await refused(machine, *words, code=2, cause=cause, remedy=remedy)
    assert sorted(machine.root.iterdir()) == before, "nothing was begun"


@pytest.mark.parametrize(("arguments", "cause", "remedy"), ELSEWHERE)
async def test_a_wrong_argument_is_refused_with_what_would_be_right(
    machine: Any, arguments: str, cause: str, remedy: str
) -> None:
    await refused(machine, *shlex.split(arguments), code=2, cause=cause, remedy=remedy, HOME=str(machine.root))


async def test_a_wrong_variable_is_refused_by_its_name(machine: Any) -> None:
    cause = "P2PTRAIN__OPTIMIZER__LRR: unknown key optimizer.lrr"
    remedy = f"did you mean P2PTRAIN__OPTIMIZER__LR? {OPTIMIZER}"
    words = ["seed", "--port", "0", "--state", "state"]
    await refused(machine, *words, code=2, cause=cause, remedy=remedy, P2PTRAIN__OPTIMIZER__LRR="1")


# ---------------------------------------------------------------------------------- ports, directories, wrong machines


async def test_a_port_in_use(machine: Any, taken: int) -> None:
    seed = await machine.seed("--no-job")
    cause = f"cannot listen on 127.0.0.1:{taken}: port {taken} is in use"
    remedy = "stop the program that has it, or choose another port with --port"
    where = ["--port", str(taken), "--state", str(machine.root / "other")]
    await refused(machine, "seed", *where, code=2, cause=cause, remedy=remedy)
    await refused(machine, "join", f"127.0.0.1:{machine.port}", *where, code=2, cause=cause, remedy=remedy)
    remedy += f"; its log is {machine.root}/other/logs/seed.log"
    await refused(machine, "up", *where, code=5, cause=f"the seed did not start: {cause}", remedy=remedy)
    assert await seed.interrupt() == 0


async def test_nobody_there(machine: Any, nobody: int) -> None:
    address = f"127.0.0.1:{nobody}"
    for arguments in (
        ["join", address, "--state", "state"],
        ["peers", "--seed", address],
        ["jobs", "list", "--seed", address],
        ["checkpoints", "list", "--seed", address],
        ["generate", "hi", "--job", "tiny", "--seed", address],
    ):
        cause = f"cannot reach {address}: connection refused"
        await refused(machine, *arguments, code=3, cause=cause, remedy="is the seed running there, and on this port?")


async def test_a_directory_that_cannot_hold_state(machine: Any) -> None:
    (machine.root / "file").write_text("in the way")
    elsewhere = "choose another place with --state"
    await refused(
        machine,
        *("seed", "--port", "0", "--state", "file"),
        code=6,
        cause=f"cannot make the directory {machine.root}/file/seed: Not a directory",
        remedy=elsewhere,
    )
    await refused(
        machine,
        *("join", "--state", "file"),
        code=6,
        cause=f"cannot make the directory {machine.root}/file/worker-1: Not a directory",
        remedy=elsewhere,
    )
    path = machine.root / "file" / "logs" / "seed.log"
    cause = f"cannot write {path}: Not a directory"
    await refused(machine, "up", "--state", "file", code=6, cause=cause, remedy="choose another --state")


async def test_a_record_that_is_damaged(machine: Any) -> None:
    record = machine.root / "seed" / "seed.sqlite3"
    record.parent.mkdir()
    record.write_bytes(random.Random(2).randbytes(5000))
    cause = f"cannot use {record}: file is not a database"
    remedy = "the file is damaged: move seed.sqlite3 away and start again, or restore it from a backup"
    where = ["--port", "0", "--state", str(machine.root)]
    await refused(machine, "seed", *where, code=6, cause=cause, remedy=remedy)
    log = machine.root / "logs" / "seed.log"
    cause, remedy = f"the seed did not start: {cause}", f"{remedy}; its log is {log}"
    await refused(machine, "up", *where, code=5, cause=cause, remedy=remedy)


@pytest.mark.slow
async def test_two_of_a_kind_in_one_directory(machine: Any) -> None:
    up = ["up", "--plain", "--state", str(machine.root), *machine.settings(job__steps=LONG)]
    first = await machine.start(*up)
    await first.until("workers start")
    cause = f"another seed is running on {machine.root}/seed"
    remedy = "stop it, or give this one another place with --state"
    where = ["--port", "0", "--state", str(machine.root)]
    await refused(machine, "seed", *where, code=2, cause=cause, remedy=remedy)
    cause, remedy = f"the seed did not start: {cause}", f"{remedy}; its log is {machine.root}/logs/seed.log"
    await refused(machine, *up, code=5, cause=cause, remedy=remedy)
    slot = ["join", "--state", str(machine.root), "--slot", "1"]
    cause, remedy = f"worker-1 in {machine.root} is in use by another process", "stop it, or use another --state"
    await first.until("step")
    await refused(machine, *slot, code=2, cause=cause, remedy=remedy)
    assert await first.interrupt() == 130
    await clean(first)


# ------------------------------------------------------------------------------------------- other versions, other talk


async def test_a_seed_of_another_version(machine: Any) -> None:
    async def decide(hello: Hello, connection: Connection) -> Welcome:
        welcome = local_welcome(peer_id="a1", name="elder", wall=0.0)
        return dataclasses.replace(welcome, version=OTHER_VERSION, software="p2ptrain 99")

    async def nothing(connection: Connection, hello: Hello) -> None:
        return

    def problem(error: P2PTrainError, address: tuple[str, int]) -> None:
        return

    elder = await serve(TcpNetwork(), "127.0.0.1", 0, decide=decide, serve=nothing, on_problem=problem)
    address = "{}:{}".format(*elder.address)
    cause = (
        f"{address} refuses: the calling side speaks protocol {PROTOCOL_VERSION} ({SOFTWARE}), "
        f"the answering side speaks protocol {OTHER_VERSION} (p2ptrain 99)"
    )
    remedy = f"upgrade p2ptrain on the calling side to a release that speaks protocol {OTHER_VERSION}"
    for arguments in (["join", address, "--state", "state"], ["peers", "--seed", address]):
        await refused(machine, *arguments, code=4, cause=cause, remedy=remedy)
    await elder.close()


@pytest.mark.slow
async def test_a_worker_of_another_version_and_garbage_are_refused_and_training_goes_on(machine: Any) -> None:
    seed = await machine.seed(*machine.settings(job__steps=LONG, job__workers=1))
    worker = await machine.join()
    await worker.until("step")
    (peer,) = (await machine.ask("peers.list"))["peers"]
    doors = {"seed": machine.port, "worker": int(peer["address"].rpartition(":")[2])}
    hello = local_hello(peer_id="b2", name="elder", roles=["worker"], purpose="peer", port=doors["worker"])
    elder = dataclasses.replace(hello, version=OTHER_VERSION)
    for port in doors.values():
        with pytest.raises(Refused) as refusal:
            await dial(TcpNetwork(), "127.0.0.1", port, elder, timeout_s=DEADLINE_S)
        assert refusal.value.code == "version-mismatch"
        assert refusal.value.remedy.startswith("upgrade p2ptrain on the answering side")
        for garbage in GARBAGE.values():
            await knock(port, garbage)
    for said in GARBAGE:  # the worker tells its person, the seed its diary
        await worker.until(said)
        events = (await machine.ask("events.list"))["events"]
        assert any(said in event["text"] for event in events if event["kind"] == "refused"), events
    now = await machine.job_until(lambda item: True)
    await machine.job_until(lambda item: item["step"] > now["step"] + 1)
    for process in (worker, seed):
        assert await process.interrupt() == 0
        await clean(process)


async def knock(port: int, data: bytes) -> None:
    """Send raw bytes, and wait until the other side hangs up."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            await reader.read()
        except ConnectionResetError:
            pass  # it left with some of our bytes unread
        finally:
            writer.transport.abort()


async def test_check_names_what_is_wrong(machine: Any, nobody: int) -> None:
    seed = await machine.seed("--no-job")
    names = ["DNS", "TCP", "handshake", "clock", "round trip", "dial-back", "join"]
    async with answering(web) as other:
        for address, code, failed in (
            (f"127.0.0.1:{machine.port}", 0, None),
            (f"127.0.0.1:{nobody}", 3, ("TCP", "connection refused", "is the seed running there")),
            (f"127.0.0.1:{other}", 4, ("handshake", "speaks HTTP", "check the address and the port")),
            ("no-such-host.invalid", 3, ("DNS", "'no-such-host.invalid' is not known", "check the spelling")),
        ):
            process = await machine.start("check", address, "--once", "--json")
            assert await process.end() == code, process.text
            document = json.loads("\n".join(process.out))
            assert [line["name"] for line in document["checks"]] == names
            assert document["ok"] is (failed is None)
            broken = [line for line in document["checks"] if line["ok"] is False]
            assert len(broken) == (failed is not None), document
            for line in broken:
                assert failed is not None
                assert line["name"] == failed[0]
                assert failed[1] in line["detail"]
                assert failed[2] in line["remedy"]
    assert await seed.interrupt() == 0


# --------------------------------------------------------------------------------------------- jobs that cannot be done

HUGE = {"device__kind": "cpu", "model__hidden_size": 8192, "model__layers": 64, "model__intermediate_size": 32768}
ASK_SHOW = "see p2ptrain jobs show"


@pytest.mark.slow
async def test_a_job_that_cannot_be_done_fails_with_its_reason_and_the_worker_does_the_next_one(machine: Any) -> None:
    seed, worker = await machine.seed("--no-job"), await machine.join()
    data = machine.root / "data"
    (data / "nothing").mkdir(parents=True)
    (data / "empty.txt").touch()
    (data / "short.txt").write_text("short\n")
    (data / "bytes.txt").write_bytes(b"\xff" * 1000)
    few = "tokens, too few for windows of 32; give at least 65 tokens of text, or a smaller data.sequence_tokens"
    bad: list[tuple[dict[str, Any], str]] = [
        ({"data__path": data / "none.txt"}, f"data.path = '{data}/none.txt' does not exist; give stdlib, a file"),
        ({"data__path": data / "nothing"}, f"data.path = '{data}/nothing' has no text files; a directory is searched"),
        ({"data__path": data / "empty.txt"}, f"data.path = '{data}/empty.txt' has 0 {few}"),
        ({"data__path": data / "short.txt"}, f"data.path = '{data}/short.txt' has 6 {few}"),
        ({"data__path": data / "bytes.txt"}, f"{data}/bytes.txt is not UTF-8 text (byte 0); convert it with iconv"),
        ({"model__path": data}, f"cannot read the tokenizer {data}/tokenizer.json: No such file"),
        (HUGE, "training 68722.63 M parameters with micro-batches of 64 tokens needs 1283.56 GiB and cpu (1 thread)"),
        ({"device__kind": "mps" if sys.platform != "darwin" else "cuda"}, "this machine has no "),
    ]
    for number, (changes, reason) in enumerate(bad):
        settings = machine.settings(job__workers=1, **changes)
        code, text = await machine.run(
            "jobs", "create", "--seed", address(machine), "--name", f"bad{number}", *settings
        )
        assert code == 0, text
        failed = await ended(machine, text.split()[-1])
        assert failed["state"] == "failed"
        assert reason in failed["reason"]
        assert "; " in failed["reason"], "and a remedy"
        await worker.until(re.escape(f"✗ {failed['reason'].rstrip('…')}"))
    code, text = await machine.run(
        "jobs", "create", "--seed", address(machine), *machine.settings(job__workers=1, job__steps=2)
    )
    assert (await ended(machine, text.split()[-1]))["state"] == "done"
    for process in (worker, seed):
        assert await process.interrupt() == 0
        await clean(process)


async def ended(machine: Any, job: str) -> dict[str, Any]:
    """The record of a job as soon as it is over."""
    result: dict[str, Any] = await machine.job_until(
        lambda item: item["id"] == job and item["state"] in ("done", "failed", "cancelled"), job=job
    )
    return result


def address(machine: Any) -> str:
    return f"127.0.0.1:{machine.port}"


@pytest.mark.slow
async def test_requests_that_cannot_be_granted(machine: Any) -> None:
    seed, worker = await machine.seed("--no-job"), await machine.join()
    where = ["--seed", address(machine)]
    create = ["jobs", "create", *where, "--name"]
    code, text = await machine.run(*create, "short", *machine.settings(job__steps=1, job__workers=1))
    assert code == 0
    await ended(machine, text.strip())
    jobs, checkpoints = "see p2ptrain jobs list", "see p2ptrain checkpoints list"
    over = "job short is done and cannot be"
    for words, cause, remedy in (
        ("jobs show nope", "there is no job 'nope'", jobs),
        ("jobs pause short", f"{over} paused: only a job that goes on can be", ASK_SHOW),
        ("jobs resume short", f"{over} resumed: only a paused job can be", ASK_SHOW),
        ("jobs save short", f"{over} saved: its members save at step boundaries, while it runs", ASK_SHOW),
        ("jobs cancel short --yes", f"{over} cancelled: it is over", ASK_SHOW),
        ("checkpoints restore nope --yes", "there is no checkpoint 'nope'", checkpoints),
        ("checkpoints delete nope --yes", "there is no checkpoint 'nope'", checkpoints),
        ("checkpoints list --job nope", "there is no job 'nope'", jobs),
        ("generate hi --job nope", "there is no job 'nope'", jobs),
    ):
        await refused(machine, *words.split(), *where, code=4, cause=cause, remedy=remedy)
    # From here on the worker trains, at the cost of all that is asked meanwhile.
    code, text = await machine.run(*create, "long", *machine.settings(job__steps=LONG, job__workers=1))
    await machine.job_until(lambda item: item["id"] == text.strip() and item["state"] == "running", job=text.strip())
    for words, cause, remedy in (
        ("jobs pause lon", "there is no job 'lon'; did you mean 'long'?", jobs),
        ("jobs resume long", "job long is running and cannot be resumed: only a paused job can be", ASK_SHOW),
    ):
        await refused(machine, *words.split(), *where, code=4, cause=cause, remedy=remedy)
    for words in ("jobs list", "jobs show long", "peers", "checkpoints list", "jobs save long"):
        process = await machine.start(*words.split(), *where, "--json")
        assert await process.end() == 0, process.text
        assert process.out == process.lines, "nothing beside it"
        assert isinstance(json.loads("\n".join(process.out)), dict)
    for process in (worker, seed):
        assert await process.interrupt() == 0
        await clean(process)


async def test_an_ambiguous_job_is_not_guessed(machine: Any) -> None:
    seed = await machine.seed("--no-job")
    spec, jobs = load("tiny", {}, []).profile.to_spec(), list[str]()
    while len({job[0] for job in jobs}) == len(jobs):  # of 17 hexadecimal ids two begin alike
        jobs.append((await machine.ask("jobs.create", name="x", profile="tiny", spec=spec))["job"])
    same = [job for job in jobs if job[0] == jobs[-1][0]]
    cause = f"several jobs begin with '{same[0][0]}': {same[0]}, {same[1]}"
    where = ["--seed", address(machine)]
    await refused(machine, "jobs", "pause", same[0][0], *where, code=4, cause=cause, remedy="give more of the id")
    assert await seed.interrupt() == 0


async def test_generate_from_what_is_no_checkpoint(machine: Any) -> None:
    (machine.root / "dir").mkdir()
    (machine.root / "model").mkdir()
    (machine.root / "model" / "config.json").write_text("{}")
    lists = "name a model as save_pretrained writes it; `p2ptrain checkpoints list` shows where those of jobs lie"
    saved = "save the fast tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    for name, cause, remedy in (
        ("none", "none is not a directory", lists),
        ("dir", "dir holds no checkpoint", lists),
        ("model", "cannot read the tokenizer model/tokenizer.json: No such file or directory", saved),
    ):
        await refused(machine, "generate", "hi", "--checkpoint", name, code=2, cause=cause, remedy=remedy)


# ---------------------------------------------------------------------------------------------- leaving, at any moment


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["dialling", "building", "training"])
async def test_a_worker_leaves_at_any_moment(machine: Any, moment: str, number: signal.Signals) -> None:
    async with answering(silence) as port:
        if moment != "training":
            machine.warm = None  # while libraries load, too
        if moment == "dialling":
            machine.port = port
        else:
            await machine.seed(*machine.settings(job__steps=LONG, job__workers=1))
        worker = await machine.join()
        await worker.until({"dialling": " joins ", "building": "building the model", "training": "step"}[moment])
        worker.process.send_signal(number)
        assert await worker.end() == 0
    assert (await clean(worker)).endswith("· left")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_seed_leaves(machine: Any, number: signal.Signals) -> None:
    seed = await machine.seed("--no-job")
    seed.process.send_signal(number)
    assert await seed.end() == 0
    assert "leaving" in await clean(seed)


@pytest.mark.slow
async def test_a_second_ctrl_c_does_not_wait_for_the_step(machine: Any) -> None:
    slow = {"batch__micro_batches": 4096, "job__workers": 1, "job__steps": LONG}  # a step of minutes
    await machine.seed(*machine.settings(**slow))
    worker = await machine.join()
    await machine.job_until(lambda item: item["state"] == "running")
    worker.process.send_signal(signal.SIGINT)
    await worker.until("press Ctrl.C again")
    assert await worker.interrupt() == 130
    await clean(worker)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["created job", "step"])
async def test_up_leaves_nobody_behind(machine: Any, moment: str) -> None:
    alone = ["--workers", "1"]  # the shipped profile begins with two: it shall not wait for the second
    up = await machine.start("up", "--json", *alone, "--state", str(machine.root), *machine.settings(job__steps=LONG))
    await up.until(moment)
    children = psutil.Process(up.process.pid).children(recursive=True)
    assert await up.interrupt() == 130, up.text
    await clean(up)
    assert json.loads("\n".join(up.out))["state"] == "interrupted", "one document, and nothing else"
    assert await gone(children)


@pytest.mark.slow
async def test_children_leave_when_their_parent_is_killed(machine: Any) -> None:
    up = await machine.start("up", "--plain", "--state", str(machine.root), *machine.settings(job__steps=LONG))
    await up.until("step")
    children = psutil.Process(up.process.pid).children(recursive=True)
    assert len(children) == 3
    await up.kill()
    assert await gone(children)
    for log in (machine.root / "logs").iterdir():
        assert "Traceback" not in log.read_text()


@pytest.mark.slow
async def test_up_says_which_child_died_and_of_what(machine: Any) -> None:
    settings = machine.settings(job__steps=LONG)
    up = await machine.start("up", "--workers", "1", "--state", str(machine.root), *settings)
    await up.until("step")
    children = psutil.Process(up.process.pid).children(recursive=True)
    (victim,) = [child for child in children if "seed" in child.cmdline()]
    victim.kill()
    remedy = f"the machine may have run out of memory; its log is {machine.root}/logs/seed.log"
    assert await up.end() == 5
    assert up.lines[-2:] == ["error: seed ended: it was killed by SIGKILL", f"  → {remedy}"]
    assert await gone(children)


async def gone(processes: list[psutil.Process]) -> bool:
    """Whether all end by themselves."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=DEADLINE_S)
    for process in alive:
        process.kill()
    return not alive


# ------------------------------------------------------------------------------------------------------- odd terminals


async def shell(machine: Any, command: str) -> tuple[int, str]:
    """Exit code and output of a line of shell, where ``p2ptrain`` is the program."""
    program = f"{shlex.quote(sys.executable)} -m p2ptrain"
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", f'p2ptrain() {{ {program} "$@"; }}; {command}'),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=machine.root,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    async with asyncio.timeout(DEADLINE_S):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_a_reader_that_has_seen_enough(machine: Any) -> None:
    code, text = await shell(machine, "{ p2ptrain profiles show example; echo $? >code; } | head -1; cat code")
    assert code == 0
    assert len(text.splitlines()) == 2, text
    assert text.splitlines()[1] in ("0", "1")  # 0 where it had written all before the reader left


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
async def test_closed_standard_streams(machine: Any, closed: str) -> None:
    seed = await machine.seed("--no-job")
    code, text = await shell(machine, f"p2ptrain peers --seed {address(machine)} {closed}")
    assert code == 0, text
    assert "error" not in text
    assert await seed.interrupt() == 0
