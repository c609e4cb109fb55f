"""How an endpoint of the HTTP API is declared: once. Its route, the checks of what it is given, and its part of the
OpenAPI document are made from this declaration."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from configs.schema import Profile
from p2ptrain import __version__
from roles.http.answers import Problem, invalid, read_model
from roles.web.feed import Feed
from wire.client import SeedClient
from wire.schema import Record

if TYPE_CHECKING:
    from roles.web.experiments import Experiments

ROOT = "/api/v1"
READ, OPERATE = "read", "operate"
"""What a key permits. GET needs the first one, all other methods the second one."""
MOST_ITEMS = 200

CreateJob = Callable[[SeedClient, str, str, Profile], Awaitable[str]]
"""Creates a job from its name, its label and its profile on a seed, and returns its id."""


class Given(BaseModel):
    """Base of bodies and of query parameters: unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Paging(Given):
    limit: int = Field(default=100, ge=1, le=MOST_ITEMS, description="Longest list in an answer.")
    after: str = Field(default="", max_length=256, description="`next` of the answer before this one.")


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list. ``next``: what names the following part; None: there is none."""

    items: Sequence[Record]
    next: str | int | None = None


@dataclass(slots=True)
class Call:
    """One request. ``path``: the parameters in its path. ``query`` and ``body``: as its endpoint declares them."""

    feed: Feed
    client: SeedClient
    create_job: CreateJob
    path: dict[str, str]
    query: Any
    body: Any
    experiments: Experiments | None = None


Handle = Callable[[Call], Awaitable[Record | Page]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint.

    Attributes:
        path: after ``ROOT``, such as ``training/jobs/{job}``.
        about: one sentence for people, and more after a blank line.
        answer: the record of the answer; of its items, if it is ``listed``.
        errors: statuses that it may answer besides those that every endpoint may answer.
    """

    method: str
    path: str
    about: str
    answer: type[Record]
    handle: Handle
    listed: bool = False
    query: type[Given] = Given
    body: type[Given] | None = None
    status: int = 200
    errors: tuple[int, ...] = ()

    @property
    def permit(self) -> str:
        return READ if self.method == "GET" else OPERATE

    def read_query(self, given: Sequence[tuple[str, str]]) -> Given:
        """Raises ``Problem``."""
        names = [name for name, _ in given]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise Problem(400, f"{twice[:64]} is given twice", code="invalid_value", param=twice[:64])
        try:
            return self.query.model_validate(dict(given))
        except ValidationError as error:
            raise invalid(error) from None

    def read_body(self, body: bytes) -> Given | None:
        """Raises ``Problem``."""
        return None if self.body is None else read_model(self.body, body or b"{}")


@dataclass(frozen=True, slots=True)
class Error(Record):
    """What went wrong, what to do about it, and a stable word for programs. ``param``: the parameter at fault."""

    message: str
    remedy: str
    type: str
    param: str | None
    code: str | None


@dataclass(frozen=True, slots=True)
class _Errors(Record):
    error: Error


_ABOUT_ERRORS = {
    400: "The request is not valid.",
    401: "A key is required: `Authorization: Bearer KEY`. On the loopback none is.",
    403: "This key may only read, or the request comes from a foreign page.",
    404: "There is no such thing.",
    409: "It is in a state in which this cannot be done.",
    422: "The values contradict each other, or the Idempotency-Key was used for another request.",
    502: "A peer that was asked for it could not do it, or gave no answer.",
    503: "The seed does not answer, or too many requests are under way.",
}
_ALWAYS = (400, 401, 403, 503)
_IDEMPOTENCY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[!-~]+$"},
    "description": "The same key with the same request is carried out once, and answered alike for an hour.",
}


@dataclass(slots=True)
class _Schemas:
    """Schemas of the document, by name."""

    named: dict[str, Any] = field(default_factory=dict)

    def of(self, kind: Any, mode: Any = "serialization") -> dict[str, Any]:
        name = kind.__name__.lstrip("_")
        if name not in self.named:
            schema = TypeAdapter(kind).json_schema(mode=mode, ref_template="#/components/schemas/{model}")
            self.named |= schema.pop("$defs", {}) | {name: schema}
        return {"$ref": f"#/components/schemas/{name}"}


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these endpoints."""
    schemas, paths = _Schemas(), dict[str, Any]()
    error = {"content": {"application/json": {"schema": schemas.of(_Errors)}}}
    for endpoint in endpoints:
        answer = schemas.of(endpoint.answer)
        if endpoint.listed:
            items = {"items": {"type": "array", "items": answer}, "next": {"type": ["string", "integer", "null"]}}
            answer = {"type": "object", "properties": items, "required": ["items", "next"]}
        first, _, more = endpoint.about.partition("\n\n")
        operation: dict[str, Any] = {
            "operationId": endpoint.handle.__name__,
            "tags": [endpoint.path.partition("/")[0]],
            "summary": first,
            "description": f"{more}\n\nNeeds a key to {endpoint.permit}.".strip(),
            "parameters": list(_parameters(endpoint)),
            "responses": {
                str(endpoint.status): {"description": "Done.", "content": {"application/json": {"schema": answer}}},
                **{
                    str(status): {"description": _ABOUT_ERRORS[status], **error}
                    for status in sorted({*_ALWAYS, *endpoint.errors})
                },
                "default": {"description": "Any other error.", **error},
            },
            "security": [{"key": []}, {}],
        }
        if endpoint.body is not None:
            content = {"application/json": {"schema": schemas.of(endpoint.body, "validation")}}
            needs = any(item.is_required() for item in endpoint.body.model_fields.values())
            operation["requestBody"] = {"content": content, "required": needs}
        paths.setdefault(f"{ROOT}/{endpoint.path}", {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "p2ptrain", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.named.items())),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _parameters(endpoint: Endpoint) -> Sequence[dict[str, Any]]:
    names = [part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")]
    text = {"type": "string", "minLength": 1}
    found: list[dict[str, Any]] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    query = endpoint.query.model_json_schema()
    for name, schema in query.get("properties", {}).items():
        about = schema.pop("description", "")
        found.append({"name": name, "in": "query", "required": False, "schema": schema, "description": about})
    if endpoint.method == "POST":
        found.append(_IDEMPOTENCY)
    return found


_ABOUT = (
    "Training jobs, workers, checkpoints and metrics of one cluster. A job is named by its id, by the beginning of it, "
    f"or by its name. `GET {ROOT}/metrics/stream/{{job}}?after_step=N` opens a WebSocket: a snapshot, `ready`, updates."
)
