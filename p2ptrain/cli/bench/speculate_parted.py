"""Texts of ``bench speculate`` with real models that are not what they are to be: from where on, and why.

Where two tokens are as good as equally likely, rounding decides: a row of logits differs in its last bits with the rows
that are computed beside it, and a pass with drafts has other ones than a step. So it is asked of transformers' model
(``compute.assisted``) whether the place is such a one. What it is not is a mistake of this program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2ptrain.cli.bench.members import Members
from p2ptrain.core.errors import JobFailed

PLACE_S = 3.0
SHOWN = 5
"""That are told one by one."""


@dataclass(slots=True)
class Parted:
    """A text that is another one than it is to be, from new token ``at`` on.

    Attributes:
        sampling: its name. writer: who wrote it.
        by_rounding: both tokens there are picks of this place, with logits that differ by no more than rounding makes
            them; None: nobody looked yet. rounding: that is so much, as far as it was measured.
    """

    sampling: str
    writer: str
    text: int
    at: int
    wanted: list[int]
    written: list[int]
    by_rounding: bool | None = None
    rounding: float = 0.0

    def __str__(self) -> str:
        return f"text {self.text + 1}, {self.sampling}, {self.writer}, from its token {self.at + 1} on"


def parted(sampling: str, writer: str, text: int, wanted: Sequence[int], written: Sequence[int]) -> Parted | None:
    """None: it is what it is to be."""
    if list(wanted) == list(written):
        return None
    pairs = enumerate(zip(wanted, written, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(wanted), len(written)))
    found = Parted(sampling, writer, text, at, list(wanted), list(written))
    if at == min(len(wanted), len(written)):
        found.by_rounding = False  # one just ends
    return found


async def look_at(
    members: Members, found: Sequence[Parted], prompts: Sequence[str], samplings: Mapping[str, Any], seed: int | None
) -> None:
    """Whether rounding decided.

    Args:
        members: one, that is ``be exact``.
        prompts: by number of the text. samplings: by name. seed: text n is drawn with ``seed + n``; None: the
            sampling says.
    """
    found = [each for each in found if each.by_rounding is None]
    if not found:
        return
    places = [
        {
            "prompt": prompts[each.text],
            "sampling": samplings[each.sampling] | ({} if seed is None else {"seed": seed + each.text}),
            "before": each.wanted[: each.at],
            "tokens": [each.wanted[each.at], each.written[each.at]],
        }
        for each in found
    ]
    (answer,) = await members.all("speculate", part="rounding", seconds=PLACE_S * len(places), places=places)
    for each, told in zip(found, answer["places"], strict=True):
        each.by_rounding, each.rounding = told["decides"], told["most"]


def check(found: Sequence[Parted]) -> None:
    """Raises ``JobFailed``: one of them is another text, and not by rounding."""
    if wrong := [each for each in found if each.by_rounding is False]:
        raise JobFailed(
            f"{len(wrong)} texts are not what they are to be; the first: {wrong[0]}",
            remedy="where transformers' alone differ, its kernels compute otherwise than those of one part; "
            "--json names every difference",
        )


def told_of(found: Sequence[Parted]) -> list[str]:
    """Notes of a report, of some of them."""
    why = {False: "not by rounding", None: "nobody looked whether by rounding", True: "rounding decided there"}
    first = sorted(found, key=lambda each: [*why].index(each.by_rounding))[:SHOWN]
    shown = [f"{each}: another one; {why[each.by_rounding]}" for each in first]
    if rounded := [each.rounding for each in found if each.by_rounding]:
        shown.append(
            f"{len(rounded)} texts part where two tokens are as good as equally likely: logits there differ by up to "
            f"{max(rounded):.1g} with the number of rows in a pass, which is rounding, and decides"
        )
    return shown
