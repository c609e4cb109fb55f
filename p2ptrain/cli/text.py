"""Chooses the ``TextService`` of ``generate`` and ``chat``: a verifier of the cluster, or a model that is loaded here,
whole or split over workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from p2ptrain.cli.placement import placement_map, print_split_facts, show_split_plan, split_facts
from p2ptrain.cli.text_options import TextOptions, newest_in, newest_of_job
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.split_model import LEAVE_S, plan_split, within
from p2ptrain.cluster.verifiers import find_verifier
from p2ptrain.compute.text import ChatFormat, ModelText
from p2ptrain.core.errors import Unreachable
from p2ptrain.core.texts import printable
from p2ptrain.core.world import real_world
from roles.compute_thread import ComputeThread
from roles.serving.local_model import LocalModel, load_local_engine
from roles.serving.model import ServedModel
from roles.serving.texts import TextPiece, TextRequest, TextService
from roles.verifier.client import RemoteText, VerifierClient
from wire.transport import TcpNetwork


@dataclass(slots=True)
class Answer:
    """A text that a model writes. ``first_s``: seconds until its first piece; ``seconds``: until its newest. ``ended``:
    as in ``Writing``; before it, what it counts as if it breaks off."""

    prompt: str
    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    first_s: float = 0.0
    ended: str = "failed"

    def take(self, piece: TextPiece, seconds: float) -> None:
        self.text += piece.text
        self.tokens += len(piece.tokens)
        self.seconds, self.first_s = seconds, self.first_s or seconds


@dataclass(frozen=True, slots=True)
class TextSource:
    """A text service and its descriptions.

    Attributes:
        label: its name, for people. about: further information for people.
        identity: its name, for programs. facts: where and how it computed, for programs.
    """

    service: TextService
    label: str
    about: str
    identity: dict[str, Any]
    facts: Callable[[], dict[str, Any]] = field(default=dict)

    def show_stats(self, stats: Sequence[dict[str, Any]]) -> None:
        """Print where a token's time went. ``stats``: ``Writing.stats`` of each text."""
        if (split := self.facts().get("split")) is not None:
            typer.echo()
            print_split_facts(split)
            return
        for number, figures in enumerate(stats, 1):
            typer.echo(f"\ntext {number}" if len(stats) > 1 else "")
            print_text_stats(figures)


def local_directory(options: TextOptions) -> Path | None:
    """Directory of the whole model to load here; None if a verifier or workers compute. Raises ``UserError``."""
    if options.by_verifier or options.split is not None:
        return None
    if options.checkpoint is None:
        return newest_of_job(options.seed, options.job)
    return newest_in(options.checkpoint, download=options.download)


@asynccontextmanager
async def text_source(
    options: TextOptions,
    directory: Path | None,
    check: Callable[[ModelText], int],
    console: Console,
    *,
    chats: bool = False,
) -> AsyncIterator[TextSource | None]:
    """Open the service that the options choose, for the body. Yields None for ``--dry-run``, which only shows the plan.

    Args:
        directory: result of ``local_directory``.
        check: refuses invalid requests before anything is loaded; returns the positions of all sessions together.
        chats: the requests are conversations.

    Raises:
        P2PTrainError: the service is missing or ambiguous, or its model cannot be loaded.
    """
    async with AsyncExitStack() as stack:
        if options.by_verifier:
            yield await _of_verifier(options)
        elif directory is None:
            yield await _of_workers(stack, options, check, console, chats)
        else:
            yield await _of_this_machine(stack, directory, options, check, console, chats)


# ------------------------------------------------------------------------------------------------ models loaded here


async def _of_this_machine(
    stack: AsyncExitStack,
    directory: Path,
    options: TextOptions,
    check: Callable[[ModelText], int],
    console: Console,
    chats: bool,
) -> TextSource:
    with console.during(lambda: f"reading {directory}"):
        text = ModelText(directory)
    check(text)
    show_unused_settings(text)
    world, compute = real_world(TcpNetwork()), ComputeThread()
    stack.callback(compute.close)
    try:
        engine, context = await load_local_engine(
            directory,
            compute,
            device=options.device,
            dtype=options.dtype,
            weights=options.weights,
            on_bytes=console.loading,
        )
    finally:
        console.clear()
    model = LocalModel(engine, compute, world.clock, context=context)
    return _model_source(stack, model, text, chats, str(directory), str(directory))


async def _of_workers(
    stack: AsyncExitStack, options: TextOptions, check: Callable[[ModelText], int], console: Console, chats: bool
) -> TextSource | None:
    checkpoint = options.checkpoint and newest_in(options.checkpoint, download=options.download)
    found = plan_split(options.split_options, checkpoint, options.job, options.seed, check, console)
    plan = await stack.enter_async_context(found)
    if options.dry_run:
        show_split_plan(plan, as_json=options.as_json)
        return None
    show_unused_settings(plan.text)
    chain = await plan.load()

    def facts() -> dict[str, Any]:
        split = split_facts(chain)
        return {"split": split, "plan": placement_map(chain.plan.placement)}

    stages, positions = len(chain.plan.stages), plan.plan.positions
    label = f"{stages} stage{'s' if stages != 1 else ''}, {plan.label}"
    return _model_source(stack, chain, plan.text, chats, plan.label, label, positions, facts)


def _model_source(
    stack: AsyncExitStack,
    model: ServedModel,
    text: ModelText,
    chats: bool,
    checkpoint: str,
    label: str,
    positions: int = 0,
    facts: Callable[[], dict[str, Any]] = dict,
) -> TextSource:
    from roles.verifier.service import ModelTextService

    form = ChatFormat(text.tokenizer) if chats else None
    world = real_world(TcpNetwork())
    service = ModelTextService(world, model, text, form=form, name=label, positions=positions)
    stack.push_async_callback(lambda: within(LEAVE_S, model.close()))
    stack.push_async_callback(lambda: within(LEAVE_S, service.close()))
    about = "no chat template: plain turns" if form is None or form.is_plain else "its own chat template"
    about += "" if service.context is None else f", {service.context} tokens of context"
    return TextSource(service, label, about, {"checkpoint": checkpoint}, facts)


def show_unused_settings(text: ModelText) -> None:
    if unused := text.unused_settings():
        typer.echo(f"({printable(unused)})", err=True)


# --------------------------------------------------------------------------------------------- verifiers of a cluster


async def _of_verifier(options: TextOptions) -> TextSource:
    wanted = options.seed, options.model_name
    verifier = ChosenVerifier(*wanted, await find_verifier(*wanted, options.verifier))
    at = verifier.client.verifier
    context = "" if verifier.context is None else f"{verifier.context} tokens of context, "
    count = len(at.drafters)
    drafters = f"{count} drafter{'s' if count != 1 else ''}" if count else "no drafter is connected"
    identity = {"verifier": at.name, "model": at.model}
    return TextSource(verifier, f"{at.model} of the verifier {at.name}", context + drafters, identity)


class ChosenVerifier:
    """A ``TextService``: a verifier. If it is not reached, the seed is asked where it is now."""

    def __init__(self, seed: str, model: str, client: VerifierClient) -> None:
        self.client, self._wanted = client, (seed, model)
        self.model, self.context = client.model, client.context

    async def write(self, request: TextRequest) -> RemoteText:
        """As ``TextService.write``, and as ``find_verifier``."""
        try:
            return await self.client.write(request)
        except Unreachable:
            self.client = await find_verifier(*self._wanted, self.client.verifier.name)
            return await self.client.write(request)


# ------------------------------------------------------------------------------------------------------------ figures


def print_text_stats(stats: dict[str, Any]) -> None:
    """Print where a token's time went, and how useful drafts were. ``stats`` may lack any field."""
    known = {name: value for name, value in stats.items() if isinstance(value, int | float)}
    if "token_ms" in known:
        labels = {"verify": "verifying", "draft": "waiting for drafts", "wait": "waiting for other texts or the reader"}
        spent = [f"{ms:.1f} {label}" for name, label in labels.items() if (ms := known.get(f"{name}_ms", 0)) >= 0.05]
        rest = f"{known.get('rest_ms', 0):.1f} the rest"
        typer.echo(f"a token took {known['token_ms']:.1f} ms: {' + '.join([*spent, rest])}")
    if "first_s" in known:
        cached = f", {known['cached_tokens']:.0f} of them from before" if known.get("cached_tokens") else ""
        prompt = f"{known.get('prompt_tokens', 0):.0f} tokens of prompt{cached}"
        typer.echo(f"the first token came after {1e3 * known['first_s']:.0f} ms ({prompt})")
    if known.get("alpha") is not None:
        typer.echo(
            f"drafts: {known['alpha']:.2f} of them right, {known.get('accepted_length', 0):.2f} tokens a pass"
            f" ({known.get('passes', 0):.0f} passes, {known.get('self_steps', 0):.0f} without drafts)"
        )
    if known.get("drafted"):
        carried = f"; {known['bytes_per_token']:.1f} bytes of messages a token" if "bytes_per_token" in known else ""
        wrong = f"{known.get('wasted', 0):.0f} of them wrong, or after a wrong one"
        typer.echo(f"{known['drafted']:.0f} drafts came, {wrong}{carried}")
    drafters = (facts for facts in stats.get("drafters") or [] if isinstance(facts, dict))
    names = (printable(f"{facts.get('name')} ({facts.get('model')})") for facts in drafters)
    typer.echo(f"drafters: {', '.join(names) or 'none'}")
