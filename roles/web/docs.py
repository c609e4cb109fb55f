"""The OpenAPI document as a page for people."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}code{background:#8882;"
    "padding:.1em .3em;border-radius:.2em}p{white-space:pre-wrap}table{border-collapse:collapse}td,th{text-align:left;vertical-align:top;"
    "padding:.2rem 1rem .2rem 0}details{margin:.4rem 0}summary{cursor:pointer}@media(prefers-color-scheme:dark)"
    "{body{background:#111;color:#ddd}a{color:#8bf}}"
)


def docs_page(document: Mapping[str, Any]) -> str:
    """A page of HTML without scripts."""
    info, parts = document["info"], list[str]()
    tag = ""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                parts.append(f"<h2>{escape(tag)}</h2>")
            parts.append(_operation(method.upper(), path, operation))
    parts.append("<h2>records</h2>")
    parts += [_schema(name, schema) for name, schema in document["components"]["schemas"].items()]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}: API</title><style>{_STYLE}</style><h1>{title}: API</h1><p>{_text(info['description'])}</p>"
        f'<p><a href="openapi.json">openapi.json</a> is the same for programs.</p>{"".join(parts)}</html>'
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{escape(item['name'])}</code><td>{item['in']}<td>{_kind(item['schema'])}"
        f"<td>{_text(item.get('description', ''))}"
        for item in operation["parameters"]
    ]
    if (body := operation.get("requestBody")) is not None:
        rows.append(f"<tr><td>body<td><td>{_kind(_json(body))}<td>")
    for status, answer in operation["responses"].items():
        kind = _kind(_json(answer)) if status.startswith("2") else ""
        rows.append(f"<tr><td>{status}<td><td>{kind}<td>{_text(answer['description'])}")
    return (
        f"<details><summary><b>{method}</b> <code>{escape(path)}</code> {_text(operation['summary'])}</summary>"
        f"<p>{_text(operation['description'])}</p><table>{''.join(rows)}</table></details>"
    )


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{escape(key)}</code><td>{_kind(value)}<td>{_text(value.get('description', ''))}"
        for key, value in schema.get("properties", {}).items()
    ]
    about = _text(schema.get("description", "")).replace("\n\n", "<p>")
    head = f'<details id="{escape(name)}"><summary>{escape(name)}</summary>'
    return f"{head}<p>{about}<table>{''.join(rows)}</table></details>"


def _json(part: Mapping[str, Any]) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = part["content"]["application/json"]["schema"]
    return schema


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(map(escape, map(str, schema["enum"])))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if kind == "object" and "items" in schema.get("properties", {}):
        return f"{_kind(schema['properties']['items'])}, and <code>next</code>"
    return escape(" or ".join(kind) if isinstance(kind, list) else str(kind))


def _text(text: str) -> str:
    """Text with ``code`` in backticks."""
    pieces = escape(text).replace("``", "`").split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
