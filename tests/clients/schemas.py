"""Random JSON schemas, and texts that a verifier's grammar allows for them: each text must match its schema.

The kinds of schemas are those of JSONSchemaBench: arguments of functions, resources of Kubernetes, configuration files
of GitHub, events of Snowplow, articles; and the keywords of the JSON Schema Test Suite. ``python -m
tests.clients.schemas`` prints how many of each kind are refused because llguidance does not know a keyword, and how
many texts match.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema
import jsonschema_rs

from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import JobFailed, UserError
from roles.serving.constraints import Constraint, TokenTable
from roles.serving.tool_calls import json_grammar

Schema = dict[str, Any]
SEEDS = 200
MOST_TOKENS = 4000
LONG = 60
"""Tokens after which a text prefers those that end something."""
_WORDS = ("name", "size", "kind", "spec", "labels", "city", "url", "tags", "a b", "größe", 'q"t', "x-1")
_PATTERNS = ("^[a-z]{2,8}$", "^v[0-9]+\\.[0-9]+$", "^(on|off)$", "[0-9]{3}", "^#[0-9a-fA-F]{6}$")
_LEAP_SECOND = re.compile(r"(:\d\d):60")
_FORMATS = ("date", "date-time", "time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration")


# ------------------------------------------------------------------------------------------------------------- schemas


def _string(draw: random.Random) -> Schema:
    match draw.randrange(6):
        case 0:
            return {"type": "string", "minLength": draw.randrange(4), "maxLength": draw.randrange(4, 20)}
        case 1:
            return {"type": "string", "pattern": draw.choice(_PATTERNS)}
        case 2:
            return {"type": "string", "format": draw.choice(_FORMATS)}
        case 3:
            return {"enum": draw.sample([*_WORDS, "é", "\n", ""], draw.randrange(1, 5))}
        case 4:
            return {"const": draw.choice(_WORDS)}
    return {"type": "string"}


def _number(draw: random.Random) -> Schema:
    low = draw.randrange(-1000, 1000)
    high = low + draw.randrange(1, 500)
    match draw.randrange(6):
        case 0:
            return {"type": "integer", "minimum": low, "maximum": high}
        case 1:
            return {"type": "number", "minimum": low / 8, "exclusiveMaximum": high / 8}
        case 2:
            return {"type": "integer", "exclusiveMinimum": low}
        case 3:
            return {"type": "integer", "multipleOf": draw.choice((2, 5, 10, 25)), "minimum": 0}
        case 4:
            return {"type": "number", "multipleOf": draw.choice((0.5, 0.01))}
    return {"type": draw.choice(("number", "integer"))}


def _list(draw: random.Random, depth: int) -> Schema:
    least = draw.randrange(3)
    match draw.randrange(4):
        case 0:
            return {"type": "array", "prefixItems": [_value(draw, depth), _value(draw, depth)], "items": False}
        case 1:
            return {"type": "array", "items": _value(draw, depth), "minItems": least, "maxItems": least + 3}
        case 2:
            return {"type": "array", "items": _value(draw, depth), "maxItems": 4}
    return {"type": "array", "items": _value(draw, depth)}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_WORDS, draw.randrange(1, 6))
    schema: Schema = {"type": "object", "properties": {name: _value(draw, depth) for name in names}}
    schema["required"] = draw.sample(names, draw.randrange(len(names) + 1))
    extra = draw.randrange(4)
    if extra < 2:
        schema["additionalProperties"] = False
    elif extra == 2:
        schema["additionalProperties"] = _value(draw, depth)
    return schema


def _combined(draw: random.Random, depth: int) -> Schema:
    match draw.randrange(4):
        case 0:
            return {"anyOf": [_value(draw, depth), {"type": "null"}]}
        case 1:
            kinds = [
                {"type": "object", "properties": {"kind": {"const": word}, word: _value(draw, depth)}} for word in "ab"
            ]
            return {"oneOf": [{**kind, "required": ["kind"], "additionalProperties": False} for kind in kinds]}
        case 2:
            return {"allOf": [{"type": "integer", "minimum": draw.randrange(9)}, {"maximum": draw.randrange(20, 90)}]}
    return {"type": draw.sample(["string", "number", "boolean", "null"], 2)}


def _value(draw: random.Random, depth: int) -> Schema:
    if depth <= 0 or draw.random() < 0.5:
        return draw.choice((_string, _string, _number, lambda _: {"type": "boolean"}))(draw)
    return draw.choice((_list, _object, _combined))(draw, depth - 1)


def _function(draw: random.Random) -> Schema:
    """Arguments of a function: a flat object, each member explained."""
    schema = _object(draw, 1)
    for each in schema["properties"].values():
        each["description"] = "what it is"
    return schema | {"additionalProperties": False}


def _resource(draw: random.Random) -> Schema:
    """A resource of Kubernetes: definitions, references, maps, nothing that forbids other members."""
    labels = {"type": ["object", "null"], "additionalProperties": {"type": ["string", "null"]}}
    inner = _object(draw, 2) | {"description": "spec"}
    members = {"apiVersion": {"enum": ["v1"]}, "labels": labels, "spec": {"$ref": "#/$defs/spec"}}
    return {"$defs": {"spec": inner}, "type": "object", "properties": members, "required": ["apiVersion", "spec"]}


def _configuration(draw: random.Random) -> Schema:
    """A configuration file: patterns of names, alternatives, and values that contain each other."""
    tree = {"type": "object", "properties": {"value": _value(draw, 1), "next": {"$ref": "#/definitions/tree"}}}
    tree |= {"required": ["value"], "additionalProperties": False}
    members = {"tree": {"$ref": "#/definitions/tree"}, "more": _value(draw, 2), "default": _value(draw, 1)}
    schema: Schema = {"definitions": {"tree": tree}, "type": "object", "properties": members, "required": ["tree"]}
    if draw.random() < 0.5:
        schema |= {"patternProperties": {"^x-[a-z]{1,5}$": _value(draw, 1)}, "additionalProperties": False}
    return schema


def _event(draw: random.Random) -> Schema:
    """An event of Snowplow: bounded strings and numbers that may be null."""
    names = draw.sample(_WORDS, 4)
    kinds = [
        {"type": ["string", "null"], "maxLength": 32},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 32767},
    ]
    members: Schema = {name: dict(draw.choice(kinds)) for name in names}
    members["when"] = {"type": "string", "format": "date-time"}
    return {"type": "object", "properties": members, "required": ["when"], "additionalProperties": False}


def _article(draw: random.Random) -> Schema:
    """A document: lists of alternatives, told apart by a constant."""
    parts = [
        {"type": "object", "properties": {"type": {"const": kind}, "content": _value(draw, 2)}, "required": ["type"]}
        for kind in ("text", "image", "list")
    ]
    body = {"type": "array", "items": {"anyOf": parts}, "minItems": 1, "maxItems": 4}
    return {"type": "object", "properties": {"title": _string(draw), "body": body}, "required": ["title", "body"]}


def _keyword(draw: random.Random) -> Schema:
    """A keyword that few schemas have; llguidance knows some of them."""
    plain = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    rare: list[Schema] = [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"type": "array", "contains": {"const": 5}, "items": {"type": "integer"}},
        {"type": "integer", "not": {"const": 3}},
        plain | {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        plain | {"dependentRequired": {"a": ["b"]}},
        plain | {"minProperties": 1, "maxProperties": 2},
        plain | {"propertyNames": {"pattern": "^[a-z]$"}},
        plain | {"unevaluatedProperties": False},
        {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2},
        {"oneOf": [{"type": "integer", "minimum": 5}, {"type": "number", "maximum": 9}]},
        {"enum": [1, "1", None, {"a": [1, 2]}, 1.5, True]},
        {"type": "string", "pattern": "^(?!x)[a-z]+$"},
        {"type": "string", "format": draw.choice(("uri", "json-pointer", "regex", "idn-email"))},
    ]
    return draw.choice(rare)


KINDS: dict[str, Callable[[random.Random], Schema]] = {
    "function": _function,
    "resource": _resource,
    "configuration": _configuration,
    "event": _event,
    "article": _article,
    "keyword": _keyword,
}


def schema_of(seed: int) -> tuple[str, Schema]:
    """The name of a kind, and a schema of it."""
    draw = random.Random(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    return kind, KINDS[kind](draw)


# --------------------------------------------------------------------------------------------------------------- texts


class Refused(Exception):
    """The schema has a keyword that the grammar does not know."""


class TextMaker:
    """Writes texts with random tokens of those that the grammar allows, as a model without knowledge would."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.table = TokenTable(tokenizer, tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self._ends = frozenset(tokenizer.end)
        self._closing = {
            token
            for token in range(tokenizer.vocab_size)
            if self.table.bytes_of(token).strip() in (b'"', b"}", b"]", b",")
        }

    def write(self, schema: Schema, seed: int, *, is_strict: bool = True) -> str | None:
        """A text; None: it did not end. Raises ``Refused``."""
        draw = random.Random(seed)
        try:
            constraint = Constraint(self.table, json_grammar(schema, is_strict=is_strict), self._ends)
        except UserError as error:
            raise Refused(error.message) from error
        data = bytearray()
        for count in range(MOST_TOKENS):
            if constraint.is_over:
                return data.decode()
            mask = int.from_bytes(constraint.masks((), 1), "little")
            allowed = [token for token in range(self._tokenizer.vocab_size) if mask >> token & 1]
            if count > LONG:
                ending = [token for token in allowed if token in self._closing or token in self._ends]
                allowed = ending if ending and draw.random() < 0.8 else allowed
            token = draw.choice(allowed)
            constraint.accept([token])
            if token not in self._ends:
                data += self.table.bytes_of(token)
        return None


def problem_of(schema: Schema, text: str) -> str:
    """Why a text does not match its schema, by two validators; empty: it does. Only the second one knows all formats.
    The second 60 counts as 59: llguidance allows it in any minute, as the grammar of RFC 3339 does."""
    try:
        value = json.loads(_LEAP_SECOND.sub(r"\1:59", text))
    except ValueError as error:
        return f"no JSON: {error}"
    found = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    if found is not None:
        return f"{found.json_path}: {found.message}"
    formats = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    return next(
        (f"{'/'.join(map(str, each.instance_path))}: {each.message}" for each in formats.iter_errors(value)), ""
    )


@dataclass
class SchemaFigures:
    """What became of the schemas of a kind."""

    tally: Counter[str]
    notes: list[str]


def measure(seeds: range, texts: int, maker: TextMaker, *, is_strict: bool = True) -> dict[str, SchemaFigures]:
    figures = {kind: SchemaFigures(Counter(), []) for kind in KINDS}
    for seed in seeds:
        kind, schema = schema_of(seed)
        of_kind = figures[kind]
        of_kind.tally["schemas"] += 1
        for number in range(texts):
            try:
                text = maker.write(schema, seed * 1000 + number, is_strict=is_strict)
            except Refused as refusal:
                of_kind.tally["refused"] += 1
                of_kind.notes.append(f"{seed}: refused: {str(refusal)[:160]}")
                break
            except JobFailed as failure:
                of_kind.tally["failed"] += 1
                of_kind.notes.append(f"{seed}: failed: {failure.message[:160]}")
                continue
            problem = "unended" if text is None else problem_of(schema, text)
            of_kind.tally["unended" if text is None else "invalid" if problem else "valid"] += 1
            if problem:
                of_kind.notes.append(f"{seed}/{number}: {problem[:160]}: {(text or '')[:80]}")
    return figures


def main() -> int:
    """0 where each text matches its schema, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.schemas", description=__doc__)
    parser.add_argument("--schemas", type=int, default=SEEDS)
    parser.add_argument("--texts", type=int, default=3, help="of each schema")
    parser.add_argument("--seed", type=int, default=0, help="of the first schema")
    parser.add_argument("--lenient", action="store_true", help="ignore unknown keywords, as without strict: true")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.schemas)
    figures = measure(seeds, arguments.texts, TextMaker(Tokenizer.of_bytes()), is_strict=not arguments.lenient)
    columns = ("schemas", "refused", "valid", "invalid", "failed", "unended")
    print(f"{'kind':<16}" + "".join(f"{column:>9}" for column in columns))
    total = Counter[str]()
    for kind, of_kind in figures.items():
        total += of_kind.tally
        print(f"{kind:<16}" + "".join(f"{of_kind.tally[column]:>9}" for column in columns))
    print(f"{'all':<16}" + "".join(f"{total[column]:>9}" for column in columns))
    for of_kind in figures.values():
        print(*of_kind.notes, sep="\n", end="\n" if of_kind.notes else "")
    return int(total["invalid"] + total["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
