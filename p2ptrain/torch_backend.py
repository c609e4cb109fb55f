"""The backend ``p2p`` of torch.distributed: registers it, and makes its process groups.

``import torch`` calls ``autoload`` by the entry point in ``pyproject.toml``. It must be fast and must not fail, so each
function imports what it needs. All groups of a process share a ``GroupHost``. A ticket in ``P2PTRAIN_TICKET`` encrypts
their connections; without one they stay on this machine.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2ptrain.compute.process_group import RingProcessGroup
    from roles.process_group import GroupHost, GroupNetwork

TICKET_VARIABLE = "P2PTRAIN_TICKET"
_host: GroupHost | None = None


def autoload() -> None:
    """Register the backend ``p2p``. Does nothing if this torch has no torch.distributed."""
    import torch.distributed as dist

    if dist.is_available():
        dist.Backend.register_backend("p2p", _create_group, extended_api=True, devices=["cpu", "cuda"])


def _create_group(options: Any, backend_options: Any) -> RingProcessGroup:
    """Make a process group; torch calls it on every member. Raises ``DistBackendError`` or ``ImportError``."""
    _check_packages_not_hidden()
    from p2ptrain.compute.process_group import group_of

    return group_of(options, _join_group)


def _join_group(store: Any, group: str, rank: int, size: int, names: list[str], timeout_s: float) -> Any:
    """As ``GroupHost.join``. Starts the host; a forked child starts its own, as the thread stays with the parent."""
    global _host
    from p2ptrain.cluster.loops import loop_factory
    from roles.process_group import start_host

    if _host is None or _host.process != os.getpid():
        _host = start_host(loop_factory(), _open_network)
    return _host.join(store, group, rank, size, names, timeout_s)


async def _open_network(peer_id: str) -> GroupNetwork:
    """Open the network of this process's groups. With a ticket, the ticket's seed signs a certificate for it.

    Raises as ``reach_one``. If the variable holds no ticket, the ``UserError`` does not repeat it: it may be a secret.
    """
    from roles.process_group import GroupNetwork
    from wire.transport import TcpNetwork

    network, ticket = TcpNetwork(), os.environ.get(TICKET_VARIABLE, "")
    if not ticket:
        return GroupNetwork(network)
    from p2ptrain.cluster.access import Caller, reach_one, read_targets, shown_host
    from p2ptrain.cluster.running import default_state_dir
    from p2ptrain.core.errors import NetworkError, ProtocolError, UserError
    from wire.address import Ticket

    root = default_state_dir()
    caller = Caller("worker", root / "process-groups", [root], peer_id)
    targets: list[Any] = []
    try:
        targets = read_targets(ticket)
        access = await reach_one(targets, caller, network)
    except (NetworkError, UserError) as problem:
        if any(isinstance(target, Ticket) for target in targets):
            raise
        # Only the parser of tickets leaves the text out of its message.
        why = problem.message if isinstance(problem.__cause__, ProtocolError) else "no seed answers under it"
        remedy = "copy all that `p2ptrain ticket new` prints at the seed, or name a file that holds it: @FILE"
        raise UserError(f"{TICKET_VARIABLE} does not lead to a seed: {why}", remedy=remedy) from None
    return GroupNetwork(
        access.network,
        host=shown_host("0.0.0.0"),  # noqa: S104 - nothing listens there: it stands for every interface
        encrypted=access.member is not None,
        seed=(access.host, access.port),
    )


def _check_packages_not_hidden() -> None:
    """Raise ``ImportError`` if a file of the user hides one of our packages, which have short names."""
    home = Path(__file__).resolve().parent.parent
    for name in ("wire", "ring", "roles"):
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # a module without a specification, such as __main__ under this name
            spec = None
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None or origin.parent.parent != home:
            raise ImportError(
                f"the backend p2p cannot be used: {origin or f'another module {name}'} hides the package {name!r} of "
                f"p2ptrain. Rename that file, or run the script from another directory"
            )
