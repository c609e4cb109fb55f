"""The verifiers of a cluster, for a command: which there are, which one is meant, and a connection to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from p2ptrain.cli.runtime import REQUEST_TIMEOUT_S, open_operator, operator_name
from p2ptrain.cli.split import LEAVE_S, within
from p2ptrain.core.errors import Unreachable, UserError
from p2ptrain.core.ids import new_id
from roles.verifier.client import IF_LOST, VERIFIER, VerifierAt, VerifierClient, verifiers_untrusted
from wire.client import SeedClient

_GONE = frozenset({"lost", "away", "leaving", "failed"})
_OTHER_WAYS = "or let a checkpoint of this machine write: --checkpoint DIR, or --job JOB"


async def dialled(
    seed: str, name: str = "", *, like: VerifierAt | None = None, if_lost: str = IF_LOST
) -> VerifierClient:
    """Dial a verifier that the seed knows.

    Args:
        name: which, or its id; empty: there is one, or all have the same model.
        like: one that was used before: it, or another one with its model.
        if_lost: what a person can do where it is lost later.

    Raises:
        UserError: there is none, or it is not clear which.
        NetworkError, Refused: the seed, or it, does not answer.
    """
    try:
        access, client = await open_operator(seed)
    except Unreachable as problem:
        between = " " if problem.remedy.endswith("?") else "; "
        remedy = f"{problem.remedy}{between}{_OTHER_WAYS}" if problem.remedy else f"start a cluster, {_OTHER_WAYS}"
        raise Unreachable(problem.message, remedy=remedy) from problem
    try:
        await access.freshen(client.request)
        found = verifiers_untrusted(await client.request("serving.list", {}, timeout_s=REQUEST_TIMEOUT_S))
        if not found and (coming := await _loading(client)):
            text = f"no verifier writes text yet: {coming} is there, and loads its model, or waits for workers"
            raise UserError(text, remedy=f"ask again in a moment; its terminal says how far it is; {_OTHER_WAYS}")
    finally:
        await client.close()
    meant = again(found, like) if like is not None and not name else chosen(found, name)
    return await VerifierClient.dial(
        access.network,
        meant,
        seed_host=access.host,
        peer_id=access.peer_id or new_id(),
        name=operator_name(),
        if_lost=if_lost,
    )


async def _loading(client: SeedClient) -> str:
    """Verifiers that have joined and serve nothing yet, by name; empty where there are none."""
    peers = await client.peers()
    return ", ".join(sorted(peer.name for peer in peers if VERIFIER in peer.roles and peer.state not in _GONE))


@asynccontextmanager
async def connected(seed: str, name: str) -> AsyncIterator[VerifierClient]:
    """``dialled``, and let go at the end. Raises as it."""
    client = await dialled(seed, name)
    try:
        yield client
    finally:
        await within(LEAVE_S, client.close())


def chosen(found: Sequence[VerifierAt], name: str) -> VerifierAt:
    """The one that is meant; without a name the least busy. Raises ``UserError``."""
    if not found:
        raise UserError(
            "no verifier is there to write text",
            remedy=f"start one: p2ptrain join SEED --role verifier --model DIR, {_OTHER_WAYS}",
        )
    named = [each for each in found if each.id == name] or [each for each in found if name in ("", each.name)]
    if not named:
        raise UserError(f"no verifier is called {name}", remedy=f"there {_is_or_are(found)} {_listed(found)}")
    if len({each.writes for each in named}) > 1:
        called = f" called {name}" if name else ""
        remedy = f"name one with --verifier: {_listed(named)}"
        raise UserError(f"there are verifiers{called} of several models", remedy=remedy)
    return min(named, key=lambda each: (each.sessions, each.name))


def again(found: Sequence[VerifierAt], like: VerifierAt) -> VerifierAt:
    """The same verifier, or another one with the same model. Raises ``UserError``."""
    same = [each for each in found if each.id == like.id] or [each for each in found if each.writes == like.writes]
    if not same:
        raise UserError(f"the verifier {like.name} is not there", remedy="is it still running?")
    return chosen(same, "")


def _listed(found: Sequence[VerifierAt]) -> str:
    """By what each can be named: by its id where another has its name; weights where models are called alike."""
    names, models = Counter(each.name for each in found), Counter(model for model, _ in {each.writes for each in found})
    return ", ".join(
        f"{each.name if names[each.name] == 1 else each.id} "
        f"({each.model}{f', weights {each.weights[:8]}' if models[each.model] > 1 else ''})"
        for each in found
    )


def _is_or_are(found: Sequence[VerifierAt]) -> str:
    return "is" if len(found) == 1 else "are"
