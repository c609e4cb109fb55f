"""What a verifier does: see ``p2ptrain.cli.joining`` for when this is run.

It loads its model, whole or split over workers, and puts together what ``roles.verifier`` has: the service, its door,
the links to drafters, and HTTP where that is wanted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.core.errors import ResourceError
from p2ptrain.core.texts import human_bytes

if TYPE_CHECKING:
    from p2ptrain.cli.joining import ServeWish
    from p2ptrain.cli.output import Console
    from p2ptrain.compute.text import ChatFormat, ModelText
    from roles.compute_thread import ComputeThread
    from roles.member import ServingMember
    from roles.verifier.http import Place
    from roles.verifier.service import VerifierService
    from roles.verifier.target import Target

USUAL_SESSIONS = 4
LEAVE_S = 0.8
"""A program of a member has a second to end (``cli.joining``)."""
TYPICAL_POSITIONS = 4096
"""Of a session, where a split model's caches are planned: those for a whole context may be larger than its weights."""


@dataclass(frozen=True, slots=True)
class _Texts:
    """What is known of a model without its weights."""

    text: ModelText
    form: ChatFormat
    digest: str
    weights: str


async def serve(member: ServingMember, wish: ServeWish, console: Console) -> None:
    """Serve until cancelled. Raises ``P2PTrainError``."""
    import asyncio

    from roles.compute_thread import ComputeThread

    directory = wish.model
    assert directory is not None, "only a drafter has no model"
    async with AsyncExitStack() as stack:
        compute = ComputeThread(member.world.threads)
        stack.callback(compute.close)
        place = await _place(stack, member, wish)
        texts = await compute.run(_prepared, directory, wish.threads, whole=wish.split is None)

        from roles.chain.peer import Context
        from roles.verifier.door import Door
        from roles.verifier.drafter_link import Tokens
        from roles.verifier.drafters import Drafters
        from roles.verifier.service import ServiceOptions, VerifierService

        around = Context(
            world=member.world,
            peer_id=member.peer_id,
            name=member.name,
            seed_host=member.seed_host,
            state=member.identity.directory,
            notify=member.notify,
            role="verifier",
        )
        name, sessions = model_name(directory), wish.sessions or USUAL_SESSIONS
        opened = _whole(member, wish, directory, compute, sessions, console)
        async with AsyncExitStack() as waiting:
            if wish.split is not None:
                from p2ptrain.cli.serve_split import split_target

                on_wait = partial(_told_to_wait, waiting, place)
                opened = split_target(member, around, wish, texts.text, sessions, console, on_wait)
            target = await stack.enter_async_context(opened)
        drafters = Drafters(around, Tokens(target.vocab_size, texts.digest))
        stack.push_async_callback(drafters.close)
        service = VerifierService(
            member.world,
            target,
            texts.text,
            form=texts.form,
            model=name,
            created=int((directory / "config.json").stat().st_mtime),
            drafters=drafters,
            options=ServiceOptions(sessions=sessions, positions=0 if wish.split is None else TYPICAL_POSITIONS),
            on_change=member.changed,
        )
        stack.push_async_callback(_ended, service)
        await service.warm_up()
        http = await _http(stack, member, place, service)
        member.on_drafters(drafters.here)
        member.answer("generate", Door(service).serve)
        _tell(member, service, target, texts, http)
        known = "" if service.context is None else f", {service.context} tokens of context"
        text = f"{name} writes text in {service.facts()['dtype']}{known}"
        member.notify("info", "serving", text + (f"; HTTP at {http}" if http else ""))
        await asyncio.Event().wait()  # until the member leaves


def _prepared(directory: Path, threads: int, *, whole: bool) -> _Texts:
    """On a thread: what takes long to load would hold up the loop, and the seed takes a member for dead that says
    nothing. Raises ``ConfigError`` before the weights are looked at."""
    import p2ptrain.cli.model_sizes
    import roles.verifier.service  # noqa: F401 - for its cost
    from p2ptrain.compute.text import ChatFormat, ModelText
    from p2ptrain.core.tensor_files import TensorTable

    text = ModelText(directory)
    texts = _Texts(text, ChatFormat(text), text.tokenizer.digest, TensorTable(directory).fingerprint())
    if whole:
        import p2ptrain.compute.served_part  # noqa: F401 - for its cost
        from p2ptrain.compute.device import pick_device

        pick_device("cpu", threads)
    return texts


def model_name(directory: Path) -> str:
    """What people call the model in a directory: its name; of a job's checkpoint the job's and the step's."""
    resolved = directory.resolve()
    if resolved.name.startswith("step-") and resolved.parent.name == "checkpoints":
        return f"{resolved.parent.parent.name}@{resolved.name.removeprefix('step-').lstrip('0') or '0'}"
    return resolved.name


@asynccontextmanager
async def _whole(
    member: ServingMember, wish: ServeWish, directory: Path, compute: ComputeThread, sessions: int, console: Console
) -> AsyncIterator[Target]:
    """The model in this process. Raises as ``load_whole_target``."""
    from roles.verifier.whole_target import load_whole_target

    def show(done_bytes: int, total_bytes: int) -> None:
        console.progress(f"loading  {human_bytes(done_bytes)} of {human_bytes(total_bytes)}")

    target = await load_whole_target(
        directory,
        compute,
        member.world.clock,
        device=wish.device or "auto",
        dtype=wish.dtype,
        on_bytes=show,
        max_sessions=2 * sessions + 1,  # those that write, and those that are kept for the next question
        cache_bytes=cache_bytes(wish.memory_bytes, directory, wish.dtype),
    )
    console.clear()
    try:
        yield target
    finally:
        await _within(target.close())


def cache_bytes(memory_bytes: int, directory: Path, dtype: str = "") -> int:
    """What ``--memory`` leaves for caches beside the weights; 0: as much as is free. Raises ``ResourceError``.

    Args:
        dtype: that the weights are computed in; empty: as they are in the files.
    """
    if not memory_bytes:
        return 0
    from p2ptrain.cli.model_sizes import weights_in
    from p2ptrain.core.tensor_files import TensorTable  # which knows them from an optimizer's state beside them

    entries = TensorTable(directory).entries
    each = weights_in(dtype, entries).values() if dtype else (entry.size_bytes for entry in entries.values())
    weights_bytes = sum(each)
    if weights_bytes >= memory_bytes:
        has = f"has {human_bytes(weights_bytes)}" + f" in {dtype}" * bool(dtype)
        raise ResourceError(
            f"the model in {directory} {has}, and --memory says {human_bytes(memory_bytes)}",
            remedy="give it more, or split the model over workers: --split",
        )
    return memory_bytes - weights_bytes


async def _place(stack: AsyncExitStack, member: ServingMember, wish: ServeWish) -> Place | None:
    """Where HTTP is wanted: a port in use, or a key that is none, is told before a model is loaded. Raises
    ``UserError``."""
    if wish.http is None:
        return None
    from roles.verifier.http import place_at, read_key

    key = None
    if wish.api_keys is not None:
        key = read_key(wish.api_keys, lambda text: member.notify("warning", "api-key", text))
    place = await place_at(*wish.http, key)
    stack.callback(place.close)
    return place


async def _told_to_wait(waiting: AsyncExitStack, place: Place | None) -> None:
    """Programs hear at once that the model may be long in coming; a model that is being loaded is waited for."""
    if place is not None:
        from roles.verifier.http import not_yet_at

        await waiting.enter_async_context(not_yet_at(place))


async def _http(stack: AsyncExitStack, member: ServingMember, place: Place | None, service: VerifierService) -> str:
    """The endpoint's address as others use it, where there is one."""
    if place is None:
        return ""
    from p2ptrain.cli.access import shown_host
    from roles.verifier.http import serving_at
    from wire.address import format_address

    await stack.enter_async_context(serving_at(service, place, world=member.world))
    host, port = place.address
    return f"http://{format_address(shown_host(host), port)}/v1"


def _tell(member: ServingMember, service: VerifierService, target: Target, texts: _Texts, http: str) -> None:
    from wire.speculation_messages import Serving

    def serving() -> Serving:
        stats, drafters = service.figures(), service.drafters()
        return Serving(
            model=service.model,
            vocab_size=target.vocab_size,
            context=service.context or 0,
            tokenizer=texts.digest,
            http=http,
            sessions=service.sessions,
            stats=stats,
            drafters=[each.peer_id for each, _ in drafters],
            drafter_alpha=[-1.0 if each.alpha is None else each.alpha for each, _ in drafters],
            drafter_latency_ms=[round(1e3 * each.latency_s, 1) for each, _ in drafters],
            drafter_share=[-1.0 if share is None else share for _, share in drafters],
            weights=texts.weights,
        )

    member.serves(serving)


async def _ended(service: VerifierService) -> None:
    await _within(service.close())


async def _within(farewell: object) -> None:
    from p2ptrain.cli.split import within

    await within(LEAVE_S, farewell)
