"""A seed's client for programs and notebooks: ``AsyncClient``, and ``Client``, which has the same methods and blocks.

Both send the requests of the command line (``wire.client.SeedRequests``). A verifier of the cluster writes texts, so
this process needs no torch. A job is named by its id, the beginning of its id, or its name.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeAlias, TypedDict, TypeVar, Unpack

from p2ptrain.cluster.access import operator
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.jobs import JobObserver, send_job
from p2ptrain.cluster.loops import ServiceThread
from p2ptrain.cluster.models import resolve_inputs
from p2ptrain.cluster.running import SEED_VARIABLE
from p2ptrain.core.errors import DeadlineExceeded, UserError
from p2ptrain.core.texts import install_command
from wire.address import is_loopback
from wire.client import PAGE, SeedClient, SeedRequests
from wire.records import CheckpointInfo, JobInfo, MetricRow, PeerInfo

if TYPE_CHECKING:
    from configs.schema import Profile

P = ParamSpec("P")
T = TypeVar("T")
ProfileSource: TypeAlias = "str | Path | Mapping[str, Any]"
"""A profile of a program: the name of a shipped one, the path of a TOML file, or settings by table."""
Messages: TypeAlias = "Sequence[Mapping[str, str]]"
"""A conversation: each message has a ``role`` (``system``, ``user``, ``assistant``) and a ``content``."""


class TextSettings(TypedDict, total=False):
    """How a text is written, as the options of ``p2ptrain generate``. ``model``, ``verifier``: names, to choose one."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: Sequence[str]
    model: str
    verifier: str


class AsyncClient:
    """A connection to a seed, within ``async with``. All methods raise ``P2PTrainError``. If the seed goes away, only
    ``wait`` and ``follow_metrics`` dial it again.

    Args:
        seed: as commands take it; empty: ``P2PTRAIN_SEED``, or the seed that this user runs on this machine.
        state: directory of this operator's credentials; None: that of the command line.
    """

    def __init__(self, seed: str = "", *, state: Path | None = None) -> None:
        self._seed, self._state = seed or os.environ.get(SEED_VARIABLE, ""), state
        self._connect = partial(operator, self._seed, state=state)
        self._stack = AsyncExitStack()
        self._client: SeedClient | None = None

    async def __aenter__(self) -> Self:
        self._client = await self._stack.enter_async_context(self._connect())
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._client = None
        await self._stack.aclose()

    @property
    def requests(self) -> SeedRequests:
        """All requests to a seed, also those that have no method here."""
        if self._client is None:
            raise UserError("the client is not connected", remedy="use it inside `async with AsyncClient() as client:`")
        return self._client

    async def peers(self) -> list[PeerInfo]:
        return await self.requests.peers()

    async def jobs(self) -> list[JobInfo]:
        return await self.requests.jobs()

    async def job(self, job: str) -> JobInfo:
        return (await self.requests.job(job))[0]

    async def create_job(
        self, profile: ProfileSource = "tiny", settings: Mapping[str, Any] | None = None, *, name: str = ""
    ) -> str:
        """Create a job and return its id. ``settings``: overrides by dotted key, such as ``{"job.steps": 100}``."""
        label, loaded = load_program_profile(profile, settings or {})
        if is_loopback((await self.requests.cluster()).address.rpartition(":")[0].strip("[]")):
            loaded = await asyncio.to_thread(resolve_inputs, loaded, quiet=True)  # else each worker reads its own disk
        return await send_job(self.requests, name or label, label, loaded, Console(quiet=True))

    async def pause(self, job: str) -> None:
        await self.requests.tell_job(job, "pause")

    async def resume(self, job: str) -> None:
        await self.requests.tell_job(job, "resume")

    async def save(self, job: str) -> None:
        await self.requests.tell_job(job, "save")

    async def cancel(self, job: str) -> None:
        await self.requests.tell_job(job, "cancel")

    async def restore(self, checkpoint: str) -> str:
        """Return a job to a checkpoint, by the checkpoint's id. Return the job's id."""
        return await self.requests.restore(checkpoint)

    async def checkpoints(self, job: str = "") -> list[CheckpointInfo]:
        return await self.requests.checkpoints(job)

    async def wait(self, job: str, timeout_s: float | None = None) -> JobInfo:
        """Wait until a job is done, cancelled or failed. Raises ``DeadlineExceeded``."""
        observer = JobObserver(job)
        try:
            async with asyncio.timeout(timeout_s), aclosing(observer.run(self._connect)) as updates:
                async for _ in updates:
                    if observer.is_finished:
                        break
        except TimeoutError:
            raise DeadlineExceeded(f"job {job} has not ended after {timeout_s:g} s", remedy="wait longer") from None
        assert observer.info is not None
        return observer.info

    async def metrics(self, job: str) -> list[MetricRow]:
        """All steps of a job that are on record, in order."""
        found = await self.job(job)
        return [row async for row in self.requests.all_metrics(found.id)]

    async def metrics_frame(self, job: str) -> Any:
        """As ``metrics``, as a data frame of pandas, by step."""
        return frame_of(await self.metrics(job))

    async def follow_metrics(self, job: str) -> AsyncGenerator[MetricRow, None]:
        """The steps of a job in order, each once: those on record, then each new one, until the job ends."""
        observer, after_step = JobObserver(job), -1
        async with aclosing(observer.run(self._connect)) as updates:
            async for client in updates:
                has_news = observer.step > after_step or observer.is_finished
                while has_news and (page := await client.metrics(observer.job, after_step, PAGE)):
                    for row in page:
                        yield row
                    after_step = page[-1].step
                if observer.is_finished:
                    return

    async def generate(self, prompt: str, **settings: Unpack[TextSettings]) -> str:
        """Continue a text. A verifier of the cluster writes it, as for ``p2ptrain generate``."""
        return "".join([piece async for piece in self.stream(prompt, **settings)])

    async def chat(self, messages: Messages, **settings: Unpack[TextSettings]) -> str:
        """Answer a conversation."""
        return "".join([piece async for piece in self.stream(messages, **settings)])

    async def stream(self, text: str | Messages, **settings: Unpack[TextSettings]) -> AsyncGenerator[str, None]:
        """As ``generate``, or for messages as ``chat``, in pieces as they are written."""
        from p2ptrain.cluster.verifiers import find_verifier
        from p2ptrain.compute.text import Turn
        from p2ptrain.core.serving import SamplingOptions
        from roles.serving.texts import TextRequest

        if unknown := settings.keys() - TextSettings.__annotations__.keys():
            raise UserError(f"{min(unknown)} is no setting of a text", remedy="use those of docs/python.md")
        stop = settings.get("stop", ())
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        options = (settings.get("temperature"), settings.get("top_k"), settings.get("top_p"), settings.get("seed", 0))
        prompt, messages = (text, ()) if isinstance(text, str) else ("", text)
        turns = tuple(Turn(message.get("role", ""), message.get("content", "")) for message in messages)
        limit = settings.get("max_new_tokens", 200)
        request = TextRequest(prompt, turns, limit, SamplingOptions(*options), stop=stops)
        chosen = settings.get("model", ""), settings.get("verifier", "")
        writing = await (await find_verifier(self._seed, *chosen, self._state)).write(request)
        try:
            async for piece in writing:
                yield piece.text
        finally:
            await writing.close()


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.call(method(self._client, *args, **kwargs))

    return call


def _streaming(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Generator[T, None, None]]:
    async def next_item(source: AsyncGenerator[T, None]) -> tuple[T, ...]:
        async for item in source:
            return (item,)
        return ()

    @wraps(method)
    def items(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        source = method(self._client, *args, **kwargs)
        try:
            while item := self._thread.call(next_item(source)):
                yield item[0]
        except GeneratorExit:  # the reader has left; any other end has ended the source, too
            if self._thread.is_open:
                self._thread.call(source.aclose())
            raise

    return items


class Client:
    """``AsyncClient`` without asyncio, also where an event loop runs already, as in notebooks. It is connected at once;
    ``close`` or the end of ``with`` disconnects."""

    def __init__(self, seed: str = "", *, state: Path | None = None) -> None:
        self._thread = ServiceThread("p2ptrain client")
        try:
            self._client = self._thread.enter(AsyncClient(seed, state=state))
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        self._thread.close()

    peers = _blocking(AsyncClient.peers)
    jobs = _blocking(AsyncClient.jobs)
    job = _blocking(AsyncClient.job)
    create_job = _blocking(AsyncClient.create_job)
    pause = _blocking(AsyncClient.pause)
    resume = _blocking(AsyncClient.resume)
    save = _blocking(AsyncClient.save)
    cancel = _blocking(AsyncClient.cancel)
    restore = _blocking(AsyncClient.restore)
    checkpoints = _blocking(AsyncClient.checkpoints)
    wait = _blocking(AsyncClient.wait)
    metrics = _blocking(AsyncClient.metrics)
    metrics_frame = _blocking(AsyncClient.metrics_frame)
    follow_metrics = _streaming(AsyncClient.follow_metrics)
    generate = _blocking(AsyncClient.generate)
    chat = _blocking(AsyncClient.chat)
    stream = _streaming(AsyncClient.stream)


def load_program_profile(profile: ProfileSource, settings: Mapping[str, Any]) -> tuple[str, Profile]:
    """The label and the profile of a job for one model. Variables of the environment do not count. Raises
    ``ConfigError``."""
    from configs.loader import load_settings, read_toml, shipped

    label = "custom" if isinstance(profile, Mapping) else Path(profile).stem
    if not isinstance(profile, Mapping):
        profile = str(profile) if str(profile) in shipped() else read_toml(Path(profile))[1]
    return label, load_settings(profile, settings).alone()


def frame_of(rows: Sequence[MetricRow]) -> Any:
    """Steps as a data frame of pandas. Raises ``UserError`` if pandas is not installed."""
    table = optional_package("pandas").DataFrame([row.to_map() for row in rows])
    return table if table.empty else table.drop(columns="job").set_index("step")


def optional_package(name: str) -> Any:
    """Import a package of the extra ``notebook``. Raises ``UserError`` if it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"this needs {name.partition('.')[0]}", remedy=install_command("notebook")) from None
