"""The seed's HTTP server over real sockets: its address, keys and certificate, and its document."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from configs.loader import load_settings
from p2ptrain.cli import seed as command
from p2ptrain.core.errors import UserError
from p2ptrain.lab.experiments.endpoints import Experiments
from roles.web.serving import Web, WebOptions, serving_web
from tests.roles.in_process import DEADLINE_S, Cluster

from .conftest import create


@asynccontextmanager
async def served(cluster: Cluster, options: WebOptions) -> AsyncIterator[tuple[Web, str]]:
    names, seed = ("127.0.0.1", "localhost"), cluster.seeds[-1]
    experiments = Experiments(cluster.root / "seed" / "experiments", cluster.operator).endpoints()
    async with serving_web(options, names, cluster.root / "seed", seed, create, experiments, warn=print) as web:
        yield web, web.url


async def fetched(url: str, path: str, *headers: str, tls: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    host, _, port = url.partition("://")[2].partition(":")
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}:{port}", "Connection: close", *headers, "", ""]
        writer.write("\r\n".join(lines).encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    return int(head.split()[1]), body


async def test_elsewhere_it_has_a_certificate_and_two_keys(cluster: Cluster) -> None:
    async with served(cluster, WebOptions("0.0.0.0", 0)) as (web, url):
        read, operate = (path.read_text().strip() for path in web.key_files)
        assert {stat.S_IMODE(path.stat().st_mode) for path in web.key_files} == {0o600}
        assert read != operate
        trusted = ssl.create_default_context(cafile=str(cluster.root / "seed" / "authority" / "ca.pem"))
        jobs = "/api/v1/training/jobs"
        status, answer = await fetched(url, jobs, tls=trusted)
        where = "locked: paste the key from http-operate.key on the seed's machine (http-read.key to look only)"
        assert (status, json.loads(answer)["error"]["message"]) == (401, where)
        assert (await fetched(url, jobs, f"Authorization: Bearer {read}", tls=trusted))[0] == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await fetched(url, jobs, tls=ssl.create_default_context())
        link = f"{url}/#key={read}"  # never the operator's
        shown = await fetched(url, "/api/v1/cluster/watch-link", f"Authorization: Bearer {operate}", tls=trusted)
        assert json.loads(shown[1]) == {"link": link, "rows": json.loads(shown[1])["rows"]}
        assert await cluster.ask("cluster.watch_link") == {"link": link}
        stream = f"{url}/api/v1/metrics/stream/none".replace("https", "wss")
        for keys, status in (([], 401), ([f"bearer.{read}"], 404), (["bearer.wrong"], 401)):
            with pytest.raises(InvalidStatus) as caught:
                async with connect(stream, ssl=trusted, subprotocols=["p2ptrain.v1", *keys]):
                    pass
            assert caught.value.response.status_code == status
    async with served(cluster, WebOptions("0.0.0.0", 0)) as (again, _):
        assert [path.read_text().strip() for path in again.key_files] == [read, operate]  # they are made once


async def test_a_page_for_this_machine_only_has_no_link_for_phones(cluster: Cluster) -> None:
    async with served(cluster, WebOptions("127.0.0.1", 0)) as (_, url):
        status, answer = await fetched(url, "/api/v1/cluster/watch-link")
        error = json.loads(answer)["error"]
        assert (status, error["remedy"]) == (409, "start it with --http 0.0.0.0:8443")


async def test_what_cannot_be_used_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a-key-of-a-person-who-gives-it-twice")
    key.chmod(0o600)
    base64 = tmp_path / "base64"
    base64.write_text("q83vEjRWeJCrze8SNFZ4kKvN7/g=")
    base64.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for options, part in (
            (WebOptions("127.0.0.1", taken.getsockname()[1]), "in use"),
            (WebOptions("127.0.0.1", 0, certificate=key), "cannot use the certificate"),
            (WebOptions("127.0.0.1", 0, read_key=key, operator_key=key), "are the same"),
            (WebOptions("127.0.0.1", 0, read_key=tmp_path / "none", operator_key=key), "cannot read the API key"),
            (WebOptions("127.0.0.1", 0, read_key=base64, operator_key=key), "a browser cannot send"),
        ):
            with pytest.raises(UserError, match=part):
                async with served(cluster, options):
                    pass


@pytest.mark.parametrize(("bound", "refused"), [("127.0.0.1", True), ("0.0.0.0", False)])
async def test_paths_are_checked_unless_workers_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch, bound: str, refused: bool
) -> None:
    async def created(*given: Any) -> str:
        return "job"

    monkeypatch.setattr(command, "create_job", created)
    nothing, profile = cast(Any, None), load_settings("tiny", {"data.path": "/only/on/workers"})
    with pytest.raises(UserError, match="does not exist") if refused else nullcontext():
        assert await command._create_checked(bound, nothing, nothing, "mine", "tiny", profile) == "job"


async def test_its_document_says_what_it_does(cluster: Cluster) -> None:
    """Requests of all kinds, valid and not, as the document allows and forbids them: no answer contradicts it."""
    async with served(cluster, WebOptions("127.0.0.1", 0)) as (_, url):
        await asyncio.to_thread(_checked, url)


def _checked(url: str) -> None:
    import schemathesis  # not for other tests: it takes seconds

    accepted = ["2xx", "404", "409", "422"]  # whether the settings of a job fit together is more than a schema can say
    config = schemathesis.Config.from_dict({"checks": {"positive_data_acceptance": {"expected-statuses": accepted}}})
    schema = schemathesis.openapi.from_url(f"{url}/api/v1/openapi.json", config=config)
    bounded = settings(
        max_examples=2, phases=[Phase.generate], deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
    )
    endpoints = 0
    for result in schema.get_all_operations():
        operation, endpoints = result.ok(), endpoints + 1

        @bounded
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            case.call_and_validate()

        check()
    assert endpoints > 20
