"""The networks on which rings and chains are tested."""

from __future__ import annotations

import pytest

from p2ptrain.core.world import Network
from p2ptrain.lab.memory import MemoryNetwork
from wire.transport import TcpNetwork


@pytest.fixture(params=[MemoryNetwork, TcpNetwork])
def network(request: pytest.FixtureRequest) -> Network:
    made: Network = request.param()
    return made
