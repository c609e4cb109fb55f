"""How an endpoint of the HTTP API is declared: once. Its route, the checks of what it is given, and its part of the
OpenAPI document are made from this declaration."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.datastructures import QueryParams

from configs.schema import Profile
from p2ptrain import __version__
from roles.http.answers import invalid
from roles.seed.overview import Overview
from wire.client import SeedRequests
from wire.schema import Record

ROOT = "/api/v1"
READ, OPERATE = "read", "operate"
"""What a key permits. GET needs the first one, all other methods the second one."""
MOST_ITEMS = 200
IDEMPOTENCY_KEY = "[!-~]{1,128}"

CreateJob = Callable[[SeedRequests, str, str, Profile], Awaitable[str]]
"""Creates a job from its name, its label and its profile on a seed, and returns its id."""


class Fields(BaseModel):
    """Base of bodies and of query parameters: unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Limit(Fields):
    limit: int = Field(default=100, ge=1, le=MOST_ITEMS, description="Longest list in an answer.")


class Paging(Limit):
    after: str = Field(default="", max_length=256, description="`next` of the answer before this one.")


class AfterStep(Fields):
    after_step: int = Field(default=-1, ge=-1, le=2**53, description="Rows after this step; -1: from the first one.")


G = TypeVar("G", bound=Fields)


def read_query(schema: type[G], query: QueryParams) -> G:
    """Raises ``Problem``. A parameter that is given twice is a list, which none may be."""
    lists: dict[str, list[str]] = {}
    for name, value in query.multi_items():
        lists.setdefault(name, []).append(value)
    try:
        return schema.model_validate({name: values if values[1:] else values[0] for name, values in lists.items()})
    except ValidationError as error:
        raise invalid(error) from None


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list. ``next``: what names the following part; None: there is none."""

    items: Sequence[Record]
    next: str | int | None = None

    def to_map(self) -> dict[str, Any]:
        return {"items": [item.to_map() for item in self.items], "next": self.next}


@dataclass(frozen=True, slots=True)
class Call:
    """One request: the parameters in its ``path``, and ``query`` and ``body`` as its endpoint declares them. ``client``
    changes what ``overview`` shows."""

    overview: Overview
    client: SeedRequests
    create_job: CreateJob
    path: dict[str, str]
    query: Any
    body: Any


Handle = Callable[[Call], Awaitable[Record | Page]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint.

    Attributes:
        path: after ``ROOT``, such as ``training/jobs/{job}``.
        about: one sentence for people, and more after a blank line.
        answer: the record of the answer; of its items, if it is ``listed``.
    """

    method: str
    path: str
    about: str
    answer: type[Record]
    handle: Handle
    listed: bool = False
    query: type[Fields] = Fields
    body: type[Fields] | None = None
    status: int = 200


_ERROR = {
    "type": "object",
    "description": "What went wrong, what to do about it, and a stable word for programs.",
    "properties": {name: {"type": ["string", "null"]} for name in ("message", "remedy", "type", "param", "code")},
}
_ABOUT_ERRORS = {
    400: "The request is not valid.",
    401: "A key is required: `Authorization: Bearer KEY`. On the loopback none is.",
    403: "This key may only read, or the request comes from a foreign page.",
    404: "There is no such thing.",
    408: "The body did not arrive in time.",
    409: "It is in a state in which this cannot be done.",
    413: "The body is too large.",
    422: "The values contradict each other, or the Idempotency-Key was used for another request.",
    502: "A peer that was asked for it could not do it, or gave no answer.",
    503: "The seed stops, or too many clients are connected.",
}
_ABOUT = (
    "Training jobs, workers, checkpoints and metrics of one cluster. A job is named by its id, by the beginning of it, "
    f"or by its name. `GET {ROOT}/metrics/stream/{{job}}?after_step=N` opens a WebSocket: a snapshot, `ready`, updates."
)


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these endpoints."""
    kinds: dict[Any, Any] = {endpoint.answer: "serialization" for endpoint in endpoints}
    kinds |= {endpoint.body: "validation" for endpoint in endpoints if endpoint.body is not None}
    adapters = [(kind, mode, TypeAdapter(kind)) for kind, mode in kinds.items()]
    refs, schemas = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    paths = dict[str, Any]()
    for endpoint in endpoints:
        answer = refs[endpoint.answer, "serialization"]
        if endpoint.listed:
            items = {"items": {"type": "array", "items": answer}, "next": {"type": ["string", "integer", "null"]}}
            answer = {"type": "object", "properties": items, "required": ["items", "next"]}
        first, _, more = endpoint.about.partition("\n\n")
        error = {"type": "object", "properties": {"error": _ERROR}}
        operation: dict[str, Any] = {
            "operationId": endpoint.handle.__name__,
            "tags": [endpoint.path.partition("/")[0]],
            "summary": first,
            "description": f"{more}\n\nNeeds a key to {READ if endpoint.method == 'GET' else OPERATE}.".strip(),
            "parameters": list(_parameters(endpoint)),
            "responses": {
                str(endpoint.status): {"description": "Done.", **_json(answer)},
                **{str(status): {"description": about, **_json(error)} for status, about in _ABOUT_ERRORS.items()},
            },
            "security": [{"key": []}, {}],
        }
        if endpoint.body is not None:
            needs = any(item.is_required() for item in endpoint.body.model_fields.values())
            operation["requestBody"] = {"required": needs, **_json(refs[endpoint.body, "validation"])}
        paths.setdefault(f"{ROOT}/{endpoint.path}", {})[endpoint.method.lower()] = operation
    components = {"schemas": schemas["$defs"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    about = {"title": "p2ptrain", "version": __version__, "description": _ABOUT}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": components}


def _json(schema: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", endpoint.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    for name, schema in endpoint.query.model_json_schema().get("properties", {}).items():
        about = schema.pop("description", "")
        yield {"name": name, "in": "query", "schema": schema, "description": about}
    if endpoint.method == "POST":
        about = "The same key with the same request is carried out once, and answered alike."
        schema = {"type": "string", "pattern": f"^{IDEMPOTENCY_KEY}$"}
        yield {"name": "Idempotency-Key", "in": "header", "schema": schema, "description": about}
