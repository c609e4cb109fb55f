"""The verifiers of a cluster, which write text for whoever asks: one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from p2ptrain.cluster.access import open_operator, operator_name
from p2ptrain.core.errors import Unreachable, UserError
from p2ptrain.core.ids import new_id
from p2ptrain.core.world import real_world
from roles.serving.worker_peer import ClientContext
from roles.verifier.client import VERIFIER, VerifierClient
from wire.records import ABSENT_STATES, ServingInfo

_OTHER_WAYS = "or use a checkpoint of this machine: --checkpoint DIR, or --job JOB"


async def find_verifier(seed: str, model: str, name: str, state: Path | None = None) -> VerifierClient:
    """Choose a verifier that the seed lists. ``name``, ``model``: as of ``choose_verifier``. ``state``: of
    ``open_operator``.

    Raises:
        UserError: there is none, or the choice is ambiguous.
        NetworkError, Refused: the seed does not answer.
    """
    try:
        access, client = await open_operator(seed, state=state)
    except Unreachable as problem:
        between = " " if problem.remedy.endswith("?") else "; "
        remedy = f"{problem.remedy}{between}{_OTHER_WAYS}" if problem.remedy else f"start a cluster, {_OTHER_WAYS}"
        raise Unreachable(problem.message, remedy=remedy) from problem
    try:
        verifiers = [info for info in await client.serving() if info.role == VERIFIER and info.is_ready]
        peers = await client.peers() if not verifiers else []
    finally:
        await client.close()
    if loading := [peer.name for peer in peers if VERIFIER in peer.roles and peer.state not in ABSENT_STATES]:
        text = f"no verifier is ready yet: {', '.join(loading)} still loads its model, or waits for workers"
        raise UserError(text, remedy=f"ask again in a moment; its terminal shows its progress; {_OTHER_WAYS}")
    context = ClientContext(real_world(access.network), access.peer_id or new_id(), operator_name(), access.host)
    return VerifierClient(context, choose_verifier(verifiers, name, model))


def choose_verifier(verifiers: Sequence[ServingInfo], name: str, model: str = "") -> ServingInfo:
    """The verifier with this name or id that has this model; the least busy one if there are several.

    ``name``, ``model``: empty: any, if all that are left have the same model. Raises ``UserError``.
    """
    if not verifiers:
        remedy = f"start one: p2ptrain join SEED --role verifier --model DIR, {_OTHER_WAYS}"
        raise UserError("no verifier is connected to write text", remedy=remedy)
    named = [info for info in verifiers if info.peer == name] or [info for info in verifiers if name in ("", info.name)]
    having = [info for info in named if model in ("", info.model)]
    shown = having or named or verifiers
    listed = ", ".join(f"{info.name} ({info.model}, weights {info.weights[:8]}, id {info.peer})" for info in shown)
    called = f" called {name}" if name else ""
    if not having:
        what = f"no verifier{called} has the model {model}" if named else f"no verifier is called {name}"
        raise UserError(what, remedy=f"there {'is' if len(shown) == 1 else 'are'} {listed}")
    if not (writing := [info for info in having if not info.upstream]):
        text = f"{shown[0].name} passes HTTP requests on to another server, and writes no text for this command"
        raise UserError(text, remedy="send requests to /v1 of the seed's --http address, or name another verifier")
    having = writing
    if len({(info.model, info.weights) for info in having}) > 1:
        text = f"verifiers{called} have different models"
        if len({info.peer for info in having}) == 1:
            text = f"the verifier {having[0].name} has several models"
        raise UserError(text, remedy=f"name one with --model-name, or a verifier or its id with --verifier: {listed}")
    return min(having, key=lambda info: (info.sessions, info.name))
