"""What ``p2ptrain join --role verifier`` and ``--role drafter`` run.

A verifier loads its models, whole or split over workers, and connects the parts of ``roles.verifier``: for each model
the service and the links to drafters, the answers to clients and, if requested, HTTP. A drafter loads a small model
whole, and drafts for the verifiers that dial it (``roles.drafter``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from math import prod
from pathlib import Path

from p2ptrain.cli.join_options import JoinOptions
from p2ptrain.cli.joining import run_member, serving_member
from p2ptrain.cluster.access import shown_host
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.models import SplitOptions, config_text
from p2ptrain.cluster.split_model import TYPICAL_POSITIONS, conversation_positions, plan_on_workers, within
from p2ptrain.compute.text import ChatFormat, ModelText
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.adapters import file_of, fingerprint, is_adapter, model_name, read_adapter, weights_of
from p2ptrain.core.background import Background
from p2ptrain.core.errors import ConfigError, NetworkError, ResourceError, UserError
from p2ptrain.core.tensor_files import ADAPTER_CONFIG, TensorTable
from p2ptrain.core.texts import human_bytes, printable
from p2ptrain.core.world import Clock, World
from roles.compute_thread import ComputeThread
from roles.drafter.draft_server import MAX_SESSIONS, DraftServer
from roles.engine import StageEngine
from roles.http.access import read_key
from roles.http.passed_requests import answer_request
from roles.member import ServingMember
from roles.seed_link import Notify
from roles.serving.chain import LOOK_S, PoolUpdater, StageChain
from roles.serving.local_model import AdaptedModel, LocalModel, load_local_engine
from roles.serving.model import ServedModel
from roles.serving.worker_peer import ClientContext, WorkerAddress
from roles.serving.worker_pool import workers_of
from roles.verifier.drafters import Drafters
from roles.verifier.http_app import HttpApp, check_place, serving_http
from roles.verifier.server import text_app
from roles.verifier.service import USUAL_SESSIONS, ModelTextService
from wire.address import format_address
from wire.text_messages import MODEL_CHARS, MOST_MODELS, DrafterAddress, Serving

FULL_TEXTS = 4
"""Memory is reserved for so many texts of the usual largest length. Most are shorter, so that more fit."""
LEAVE_S = 0.8
"""Time limit of each clean-up. A member's program has a few of them, one after another (``cli.joining``)."""
_START_WORKERS = "start some: p2ptrain join"
_MORE_MEMORY = "start more of them, or some with more memory: p2ptrain join; or take fewer --sessions"
AGAIN_LOOKS = 15
"""After this many looks the same workers are tried again: they may have freed memory, or be reachable now."""


async def check(options: JoinOptions) -> None:
    """Before joining, refuse HTTP or a model that cannot be served. Raises ``UserError``, ``ResourceError``."""
    if options.http_place is not None:
        await check_place(*options.http_place, options.api_keys)
    for directory in options.adapters:
        if not is_adapter(directory):
            raise UserError(f"{directory} is a whole model, not an adapter", remedy="name it with --model")
        if (base := read_adapter(directory).base).resolve() != (model := options.models[0]).resolve():
            text = f"{directory} is an adapter of {base}, not of {model}"
            raise UserError(text, remedy=f"give its base with --model, or correct its {ADAPTER_CONFIG}")
    names = [_name_of(directory) for directory in options.models + options.adapters]
    if twice := next((name for name in names if names.count(name) > 1), None):
        text = f"two models are called {twice}, but clients choose a model by its name"
        raise UserError(text, remedy="give them directories of different names, or leave one out")
    if len(names) > MOST_MODELS:
        raise UserError(f"a verifier has at most {MOST_MODELS} models", remedy="start another verifier for the others")
    if not options.weights:  # the size of quantized ones is known when they are loaded, and checked then
        cache_bytes(options.memory_bytes, options.models, options.dtype)
    if options.split is not None:
        for directory in options.models:
            config_text(directory, options.split)


async def join_to_serve(options: JoinOptions) -> None:
    """Be a verifier or a drafter until Ctrl+C. Raises ``P2PTrainError``, for invalid options before it joins."""
    await check(options)
    await run_member(
        options,
        lambda context: serving_member(options, partial(serve, options=options, console=context.console), context),
    )


async def serve(member: ServingMember, options: JoinOptions, console: Console) -> None:
    """Be the member's program (``ServingMember``): load the model, and register what the member answers and serves.
    Raises ``P2PTrainError``, which ends the process."""
    await (_verify if options.role == "verifier" else _draft)(member, options, console)


# ---------------------------------------------------------------------------------------------------------- verifier


async def _verify(member: ServingMember, options: JoinOptions, console: Console) -> None:
    directories, sessions = options.models + options.adapters, options.sessions or USUAL_SESSIONS
    whole = options.split is None
    progress = LoadProgress(map(_name_of, directories), member.world.clock)
    member.serves(progress.describe)
    async with AsyncExitStack() as stack:
        compute = ComputeThread(member.world.threads)
        stack.callback(compute.close)
        texts = [await compute.run(_load_text, directory) for directory in directories]
        context = ClientContext(
            world=member.world,
            peer_id=member.peer_id,
            name=member.name,
            seed_host=member.seed_host,
            state=member.identity.directory,
            notify=member.notify,
            role="verifier",
        )
        models: list[ServedModel]
        if whole:
            adapters = {_name_of(directory): directory for directory in options.adapters}
            most = (2 * sessions + 1) * (1 + len(adapters))  # running ones, and ones that are being closed
            opened = _local_models(
                member.world, options, compute, most, console, member.notify, progress.note, adapters
            )
            loaded = await stack.enter_async_context(opened)
            models = [*loaded, *(AdaptedModel(loaded[0], adapter) for adapter in adapters)]
        else:
            models = [
                await stack.enter_async_context(
                    split_model(member, context, options, directory, text, sessions, console)
                )
                for directory, (text, _, _) in zip(directories, texts, strict=True)
            ]
        services, linked = list[ModelTextService](), list[Drafters]()
        for directory, model, (text, form, _) in zip(directories, models, texts, strict=True):
            drafters = Drafters(context, model.vocab_size, text.tokenizer.digest)
            stack.push_async_callback(drafters.close)
            service = ModelTextService(
                member.world,
                model,
                text,
                form=form,
                name=_name_of(directory),
                created=int(file_of(directory, "config.json").stat().st_mtime),
                drafters=drafters,
                sessions=sessions,
                positions=0 if whole else TYPICAL_POSITIONS,
            )
            stack.push_async_callback(lambda each: within(LEAVE_S, each.close()), service)
            services.append(service)
            linked.append(drafters)
        http = await _http(stack, member, options, services)

        def update_drafters(listed: Sequence[DrafterAddress]) -> None:
            for drafters in linked:
                drafters.update_list(listed)

        member.on_drafters(update_drafters)
        member.answer("generate", partial(answer_request, text_app(services)))
        app = HttpApp(services, member.world, key=None, local=False)  # the seed has checked keys and pages
        stack.callback(app.stop)
        member.answer("http", partial(answer_request, app))
        digests = [weights for _, _, weights in texts]
        member.serves(
            lambda: [each.describe(weights, http) for each, weights in zip(services, digests, strict=True)],
            is_waiting=lambda: any(isinstance(model, StageChain) and model.lacking for model in models),
        )
        for service, model, (text, _, _) in zip(services, models, texts, strict=True):
            known = "" if service.context is None else f", {service.context} tokens of context"
            weights = f" with {options.weights} weights" if options.weights else ""
            news = f"{service.model} writes text in {model.dtype}{weights}{known}"
            member.notify("info", "serving", news + (f"; HTTP at {http}" if http else ""))
            if unused := text.unused_settings():
                member.notify("warning", "unused-settings", unused)
        await asyncio.Event().wait()  # until the member leaves


class LoadProgress:
    """How far the models of a verifier are loaded, as the seed lists them meanwhile."""

    def __init__(self, names: Iterable[str], clock: Clock) -> None:
        self._served, self._clock = {name: Serving(name, loaded=0.0) for name in names}, clock
        self._began_at = dict[str, float]()

    def describe(self) -> list[Serving]:
        return list(self._served.values())

    def note(self, name: str, done_bytes: int, total_bytes: int) -> None:
        """Note the progress of a model. The time that is left is estimated from the time so far."""
        loaded = min(round(done_bytes / max(total_bytes, 1), 2), 0.99)  # it writes only after the last byte
        elapsed_s = self._clock.now() - self._began_at.setdefault(name, self._clock.now())
        stats = {"ready_s": round(elapsed_s * (1 / loaded - 1), 1)} if loaded else {}
        self._served[name] = Serving(name, loaded=loaded, stats=stats)


def _name_of(directory: Path) -> str:
    """The name by which clients choose the model in a directory."""
    return printable(model_name(directory), MODEL_CHARS)


def _load_text(directory: Path) -> tuple[ModelText, ChatFormat, str]:
    """Load the text side of a model, its chat format, and the digest of its tensors. Raises ``ConfigError``."""
    text = ModelText(directory)
    return text, ChatFormat(text.tokenizer), fingerprint(directory)


@asynccontextmanager
async def _local_models(
    world: World,
    options: JoinOptions,
    compute: ComputeThread,
    most_sessions: int,
    console: Console,
    notify: Notify,
    on_progress: Callable[[str, int, int], None] = lambda name, done_bytes, total_bytes: None,
    adapters: Mapping[str, Path] | None = None,
) -> AsyncIterator[list[LocalModel]]:
    directories, engines = options.models, list[tuple[StageEngine, int | None]]()

    def show(directory: Path, done_bytes: int, total_bytes: int) -> None:
        console.loading(done_bytes, total_bytes)
        on_progress(_name_of(directory), done_bytes, total_bytes)

    try:
        for directory in directories:
            found = await load_local_engine(
                directory,
                compute,
                threads=options.threads,
                device=options.device or "auto",
                dtype=options.dtype,
                weights=options.weights,
                adapters=adapters,
                on_bytes=partial(show, directory),
            )
            engines.append(found)
    finally:
        console.clear()
    weights_bytes = sum(engine.weights_bytes for engine, _ in engines)
    left_bytes = cache_bytes(options.memory_bytes, directories, engines[0][0].encoding, weights_bytes)
    for directory, (engine, _) in zip(directories, engines, strict=True):
        if not engine.is_batched:
            text = f"{_name_of(directory)} computes one text at a time: batches do not support its architecture"
            notify("warning", "no-batches", text)
    models = [
        LocalModel(
            engine,
            compute,
            world.clock,
            context=context,
            max_sessions=most_sessions,
            cache_bytes=left_bytes // len(engines),
            usual_positions=min(most_sessions, FULL_TEXTS) * min(context or TYPICAL_POSITIONS, TYPICAL_POSITIONS),
        )
        for engine, context in engines
    ]
    try:
        yield models
    finally:
        await within(LEAVE_S, asyncio.gather(*(model.close() for model in models)))


def cache_bytes(memory_bytes: int, directories: Sequence[Path], dtype: str = "", weights_bytes: int = 0) -> int:
    """What ``--memory`` leaves for caches beside the weights of all models; 0: no limit was given. Raises
    ``ResourceError``.

    Args:
        dtype: type of the weights in memory; empty: their type in the files.
        weights_bytes: size of the loaded weights; 0: they are not loaded yet, so their files are read.
    """
    if not memory_bytes:
        return 0

    weights_bytes = weights_bytes or sum(
        (4 if dtype == "fp32" else 2) * prod(entry.shape) if dtype else entry.size_bytes
        for directory in directories
        for name, entry in TensorTable(weights_of(directory)).entries.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))  # buffers in old files
    )
    if weights_bytes >= memory_bytes:
        what = f"the model in {directories[0]} has" if len(directories) == 1 else "the models together have"
        raise ResourceError(
            f"{what} {human_bytes(weights_bytes)}{f' in {dtype}' * bool(dtype)}, but --memory is "
            f"{human_bytes(memory_bytes)}",
            remedy="raise --memory, choose a smaller model, or split a verifier's over workers: --split",
        )
    return memory_bytes - weights_bytes


@asynccontextmanager
async def split_model(
    member: ServingMember,
    context: ClientContext,
    options: JoinOptions,
    directory: Path,
    text: ModelText,
    sessions: int,
    console: Console,
) -> AsyncIterator[ServedModel]:
    """Load the model into workers of the cluster, as soon as there are enough of them with enough memory.

    A verifier may start before its workers. It reports a shortage once, and tries again. Raises ``P2PTrainError``: its
    files cannot be read, it does not split, or workers refuse to load it.
    """

    async def known() -> list[WorkerAddress]:
        while True:
            try:
                return await workers_of(member.ask, wanted)
            except NetworkError:  # the member's link reports this, and reconnects
                await asyncio.sleep(LOOK_S)

    entries = TensorTable(weights_of(directory)).entries.values()
    wanted = {"model": _name_of(directory), "weights_bytes": sum(entry.size_bytes for entry in entries),
              "stages": options.split or 0}  # fmt: skip
    shortage, stages = "", SplitOptions(options.split or None, options.dtype, weights=options.weights)
    positions = min(sessions, FULL_TEXTS) * conversation_positions(text)
    while True:
        workers = await known()
        async with AsyncExitStack() as stack:
            try:
                if not workers:
                    raise UserError("no worker has joined to hold a part of the model", remedy=_START_WORKERS)
                planned = plan_on_workers(context, workers, stages, directory, text, lambda _: positions, console)
                chain = await (await stack.enter_async_context(planned)).load()
            except (NetworkError, ResourceError, UserError) as problem:
                if isinstance(problem, ConfigError):
                    raise  # it is no shortage of workers
                # A plan's own remedy names options that ``join`` does not have.
                remedy = _MORE_MEMORY if isinstance(problem, ResourceError) else problem.remedy
                cause = f"{problem.message}: {remedy}" if remedy else problem.message
                if cause != shortage:
                    shortage = cause
                    member.notify("warning", "waiting", f"waits for workers: {cause}; Ctrl+C leaves")
            else:
                if shortage:
                    member.notify("info", "enough-workers", "there are enough workers")
                pool_updater = Background()
                pool_updater.start(PoolUpdater(chain, member.ask, wanted).run(), "recruiting")
                try:
                    yield chain
                finally:
                    await within(LEAVE_S, pool_updater.stop())
                    await within(LEAVE_S, chain.close())
                return
        for _ in range(AGAIN_LOOKS):
            await asyncio.sleep(LOOK_S)
            if await known() != workers:
                break


async def _http(
    stack: AsyncExitStack, member: ServingMember, options: JoinOptions, services: Sequence[ModelTextService]
) -> str:
    if options.http_place is None:
        return ""
    key = None
    if options.api_keys is not None:
        key = read_key(options.api_keys, lambda text: member.notify("warning", "api-key", text))
    host, port = await stack.enter_async_context(serving_http(services, *options.http_place, key, world=member.world))
    return f"http://{format_address(shown_host(host), port)}/v1"


# ----------------------------------------------------------------------------------------------------------- drafter


async def _draft(member: ServingMember, options: JoinOptions, console: Console) -> None:
    async with open_drafter(member.world, options, console, member.notify) as drafter:
        member.answer("draft", drafter.serve, judge=drafter.decide)
        member.serves(drafter.describe)
        await asyncio.Event().wait()  # until the member leaves


def draft_tokenizer(options: JoinOptions) -> str:
    """The digest of the draft model's tokenizer. Raises ``ConfigError``."""
    return Tokenizer.of_directory(options.models[0]).digest


@asynccontextmanager
async def open_drafter(
    world: World, options: JoinOptions, console: Console, notify: Notify
) -> AsyncIterator[DraftServer]:
    """Load the draft model, and draft with it within the block. Raises ``P2PTrainError``."""
    tokenizer, name = draft_tokenizer(options), model_name(options.models[0])
    async with AsyncExitStack() as stack:
        compute = ComputeThread(world.threads)
        stack.callback(compute.close)
        opened = _local_models(world, options, compute, options.sessions or MAX_SESSIONS, console, notify)
        [model] = await stack.enter_async_context(opened)
        drafter = DraftServer(world, model, name, tokenizer, on_news=partial(console.event, "info"))
        stack.push_async_callback(drafter.close)
        known = f", {model.context} tokens of context" if model.context else ""
        notify("info", "serving", f"{name} drafts on {model.engine.device} in {model.dtype}{known}")
        yield drafter
