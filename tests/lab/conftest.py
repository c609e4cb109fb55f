"""Fixtures of the folders ``cli`` and ``roles`` that tests of the laboratory share."""

from __future__ import annotations

from tests.cli.conftest import command, fake_seed, free_port, measured_at_once
from tests.roles.conftest import cluster, never_hung

__all__ = ["cluster", "command", "fake_seed", "free_port", "measured_at_once", "never_hung"]
