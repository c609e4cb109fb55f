"""All targets, and every parser in the packages, found by reading their source.

=====================  ==================================================================================
target                 what it is given to
=====================  ==================================================================================
frames                 ``wire.frame.FrameDecoder``: cut anywhere, posts, fences, before the handshake and after
messages-handshake     ``decode_untrusted`` of kinds 1 to 15, and msgpack bombs of 4 KiB
messages               ``decode_untrusted`` of all other kinds, and msgpack bombs of 64 KiB
records                ``from_map_untrusted`` of every record
handshake              ``judge_hello``, ``judge_answer``, ``judge_caller``, ``judge_answerer``
tickets, addresses     ``Ticket.parse_untrusted``, ``parse_address``
certificates           ``identity_of_untrusted``, ``certificate_of_untrusted``
certificate-requests   ``request_of_untrusted``
grants                 ``granted_untrusted``, a renewal's answer
views, tokens          ``View.from_message_untrusted``, ``Token.decode_untrusted``
codecs                 ``decode`` and ``decode_add`` of each codec
links                  ``targets_untrusted``, ``measured_untrusted``
model-shapes           ``shape_untrusted``: the model of a job that is to be made
chain-figures          ``figures_untrusted``: what the stages of a chain hand on
stages                 the stage that a request to a worker is about
ledger-rows            ``Ledger.take_untrusted``
profiles               ``Profile.from_spec_untrusted``
doorway                a whole listener, plain and TLS: first bytes, damaged TLS, frames inside
enrolment              a seed's ``Gate``: enrolment, renewal, requests about tickets
healing                both sides of a heal
operators-requests     a whole seed, asked anything
checkpoint-manifests   ``CheckpointStore``
part-manifests         ``manifest_untrusted``, ``offered_untrusted``
tensor-headers, -index ``header_entries_untrusted``, ``index_files_untrusted``
activations            ``decode_untrusted``, ``ids_untrusted``
model-configs          ``config_untrusted``
stage-requests         the parameters of a chain's requests
works                  ``Terms.payload_bytes_untrusted``, and the stand-in's payloads
tensor-tables          ``TableTaker``, and what a part takes of a table
tensor-digests         ``cached_untrusted``
stages                 two whole workers, told anything by a client and by a stage
chain-answers, -works  what workers answer to the client of a chain, and say of its works
chain-clients          a whole client, told anything by the stages of its session
questions, verifiers   what a verifier is asked, and who a seed says is one
verifier-clients       a whole client, told anything by its verifier
verifier-texts         what is said of one text
verifier-refusals      why a verifier writes no more
draft-words            what drafters and verifiers say to each other
drafters               a whole drafter, told anything by a verifier
drafter-links          a whole verifier's session, told anything by a drafter
=====================  ==================================================================================
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from . import (
    chain_targets,
    compute_targets,
    credential_targets,
    door_targets,
    file_targets,
    ledger_targets,
    model_targets,
    part_targets,
    ring_targets,
    serving_targets,
    speculation_targets,
    stage_targets,
    verifier_targets,
    wire_targets,
)
from .engine import SUFFIX, Target

ROOT = Path(__file__).parents[2]
PACKAGES = ("p2ptrain", "wire", "ring", "roles", "tui", "configs")
TARGETS: tuple[Target, ...] = (
    *wire_targets.TARGETS,
    *credential_targets.TARGETS,
    *ring_targets.TARGETS,
    *ledger_targets.TARGETS,
    *part_targets.TARGETS,
    *serving_targets.TARGETS,
    *door_targets.TARGETS,
    *file_targets.TARGETS,
    *model_targets.TARGETS,
    *compute_targets.TARGETS,
    *stage_targets.TARGETS,
    *chain_targets.TARGETS,
    *verifier_targets.TARGETS,
    *speculation_targets.TARGETS,
)


def parsers() -> set[str]:
    """``module.qualified_name`` of every function named ``..._untrusted`` that does something."""
    found: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.update(f"{module}.{name}" for name in _named(ast.parse(path.read_bytes()), ""))
    return found


def _named(node: ast.AST, outside: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _named(child, outside)
            continue
        name = f"{outside}{child.name}"
        if isinstance(child, ast.ClassDef):
            yield from _named(child, f"{name}.")
            continue
        if child.name.endswith(SUFFIX) and not _is_abstract(child):
            yield name
        yield from _named(child, f"{name}.<locals>.")


def _is_abstract(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether all that it does is to raise ``NotImplementedError``."""
    last = function.body[-1]
    return len(function.body) == 1 and isinstance(last, ast.Raise) and ast.unparse(last) == "raise NotImplementedError"
