"""Generator of the example profile: ``python -m configs.example > configs/profiles/example.toml``."""

from __future__ import annotations

import json
import textwrap

from configs.schema import tables

_HEAD = """\
# Every setting with its default: copy what you change into a file of your own
#
#   p2ptrain up --profile ./my.toml
#
# A file may extend a shipped profile (base = "tiny", above the first table). Every file is overridden by the
# environment (P2PTRAIN__OPTIMIZER__LR=1e-3) and the command line (--set optimizer.lr=1e-3).
# Made from configs/schema.py by `python -m configs.example`.
"""


def render() -> str:
    parts = [_HEAD]
    for table, model in tables():
        parts.append("\n" + _comment(model.__doc__ or "") + f"[{table}]\n")
        for name, field in model.model_fields.items():
            parts.append(_comment(field.description or "") + f"{name} = {_toml(field.default)}\n")
    return "".join(parts)


def _comment(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 110, initial_indent="# ", subsequent_indent="# ") + "\n"


def _toml(value: object) -> str:
    return json.dumps(value)  # the scalars of the schema are written alike in JSON and TOML


if __name__ == "__main__":
    print(render(), end="")
