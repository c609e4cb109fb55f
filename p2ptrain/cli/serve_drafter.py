"""What a drafter does: see ``p2ptrain.cli.joining`` for when this is run.

It loads a small model whole, and drafts for the verifiers that dial it (``roles.drafter``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.core.errors import ResourceError
from p2ptrain.core.texts import human_bytes

if TYPE_CHECKING:
    from p2ptrain.cli.joining import ServeWish
    from p2ptrain.cli.output import Console
    from roles.compute_thread import ComputeThread
    from roles.drafter.drafter import Serves
    from roles.member import ServingMember


async def serve(member: ServingMember, wish: ServeWish, console: Console) -> None:
    """Serve until cancelled. Raises ``P2PTrainError``."""
    from roles.compute_thread import ComputeThread
    from roles.drafter.drafter import MAX_SESSIONS, Drafter

    compute = ComputeThread(member.world.threads)
    try:
        assert wish.model is not None
        serves = await _loaded(wish.model, wish, compute, console)
        drafter = Drafter(
            member.world,
            compute,
            serves,
            most_sessions=wish.sessions or MAX_SESSIONS,
            tell=lambda text: console.event("info", text),
        )
        member.answer("draft", drafter.serve, judge=drafter.decide)
        member.serves(drafter.serving)
        known = f", {serves.context} tokens of context" if serves.context else ""
        where = f" on {serves.engine.device} in {serves.engine.encoding}"
        member.notify("info", "serving", f"{serves.model} drafts{where}{known}")
        await drafter.run()
    finally:
        console.clear()
        compute.close()


async def _loaded(directory: Path, wish: ServeWish, compute: ComputeThread, console: Console) -> Serves:
    """The model, ready. Raises as ``load_whole_engine``, ``ConfigError`` where there is no tokenizer."""
    from p2ptrain.cli.serve_verifier import model_name
    from p2ptrain.compute.tokenizer import Tokenizer
    from roles.drafter.drafter import Serves
    from roles.verifier.whole_target import load_whole_engine

    tokenizer = Tokenizer.of_directory(directory)  # refused before anything is loaded

    def show(done_bytes: int, total_bytes: int) -> None:
        console.progress(f"loading  {human_bytes(done_bytes)} of {human_bytes(total_bytes)}")

    await compute.run(_prepare, wish.threads)
    engine, context = await load_whole_engine(
        directory, compute, device=wish.device or "auto", dtype=wish.dtype, on_bytes=show
    )
    limit_bytes = wish.memory_bytes - engine.weights_bytes if wish.memory_bytes else 0
    if wish.memory_bytes and limit_bytes <= 0:
        text = (
            f"{directory} takes {human_bytes(engine.weights_bytes)}, and --memory says {human_bytes(wish.memory_bytes)}"
        )
        raise ResourceError(text, remedy="give it more, or draft with a smaller model")
    return Serves(engine, model_name(directory), context or 0, tokenizer.digest, limit_bytes)


def _prepare(threads: int) -> None:
    """On the compute thread: what loading would otherwise be held up by, and how many threads kernels take."""
    import p2ptrain.compute.served_part  # noqa: F401 - for its cost
    from p2ptrain.compute.device import pick_device

    pick_device("cpu", threads)
