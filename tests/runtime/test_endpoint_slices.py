"""Peers from EndpointSlices: what counts as a worker, and list/watch against a server that does what API
servers do: ends watches, forgets versions, refuses, goes away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from tandem_crds import names
from tandem_runtime.endpoint_slices import ClusterAccess, EndpointSliceSource, Slice, merged, workers_of
from tandem_runtime.peer_source import peer_source

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SELECTOR = f"{names.LABEL_MODEL}=m"
LIMIT_S = 10.0


def endpoint(uid: str, address: str = "10.0.0.1", **conditions: bool) -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "name": f"pod-{uid}", "uid": uid},
        "zone": "a",
    }


def endpoint_slice(
    name: str, *endpoints: dict[str, Any], role: str = "decode", version: int = 1
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "resourceVersion": str(version),
            "labels": {names.LABEL_MODEL: "m", names.LABEL_ROLE: role},
        },
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": [{"name": "server", "port": 8000}, {"name": "worker", "port": 8001}],
    }


def read(document: dict[str, Any]) -> Slice:
    return msgspec.convert(document, Slice)


@pytest.mark.parametrize(
    ("conditions", "listed", "draining"),
    [
        ({"ready": True, "serving": True, "terminating": False}, True, False),
        ({"ready": False, "serving": True, "terminating": True}, True, True),
        ({"ready": False, "serving": False, "terminating": True}, False, False),
        ({"ready": False, "serving": False, "terminating": False}, False, False),
        ({"ready": True}, True, False),
        ({"ready": False}, False, False),
        ({}, True, False),
    ],
    ids=str,
)
def test_a_worker_is_listed_while_it_serves(
    conditions: dict[str, bool], listed: bool, draining: bool
) -> None:
    found = workers_of(read(endpoint_slice("s", endpoint("u", **conditions))))
    assert [worker.draining for worker in found] == ([draining] if listed else [])


def test_addresses_are_those_of_the_named_ports() -> None:
    (decode,) = workers_of(read(endpoint_slice("s", endpoint("u"))))
    assert (decode.pod, decode.uid, decode.zone) == ("pod-u", "u", "a")
    assert (decode.worker, decode.server, decode.role) == ("10.0.0.1:8001", "10.0.0.1:8000", "decode")
    (prefill,) = workers_of(read(endpoint_slice("s", endpoint("u", "fd00::1"), role="prefill")))
    assert (prefill.worker, prefill.server) == ("[fd00::1]:8001", "")


@pytest.mark.parametrize(
    "change",
    [
        {"targetRef": None},
        {"targetRef": {"kind": "Node", "name": "n", "uid": "u"}},
        {"targetRef": {"kind": "Pod", "name": "p", "uid": ""}},
        {"addresses": []},
    ],
    ids=str,
)
def test_what_is_no_pod_is_no_worker(change: dict[str, Any]) -> None:
    assert workers_of(read(endpoint_slice("s", endpoint("u") | change))) == []
    without_ports = endpoint_slice("s", endpoint("u")) | {"ports": None}
    assert workers_of(read(without_ports)) == []


def test_a_pod_in_two_slices_is_one_worker_and_draining_if_either_says_so() -> None:
    old = read(endpoint_slice("a", endpoint("u", serving=True)))
    new = read(endpoint_slice("b", endpoint("u", serving=True, terminating=True)))
    for slices in ({"a": old, "b": new}, {"b": old, "a": new}):
        (worker,) = merged(slices)
        assert worker.draining


class ApiServer:
    """EndpointSlices, listed and watched. `script` holds the answers to come before the usual ones."""

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 1
        self.lists, self.watches = 0, 0
        self.tokens: list[str] = []
        self.script: list[int] = []  # statuses
        self.page = 500
        self._watchers: list[asyncio.Queue[dict[str, Any] | None]] = []

    def put(self, name: str, *endpoints: dict[str, Any], role: str = "decode") -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = endpoint_slice(name, *endpoints, role=role, version=self.version)
        self._tell({"type": kind, "object": self.slices[name]})

    def remove(self, name: str) -> None:
        self.version += 1
        gone = self.slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._tell({"type": "DELETED", "object": gone})

    def error(self, code: int) -> None:
        self._tell({"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "too old"}})

    def end_watches(self) -> None:
        self._tell(None)

    def _tell(self, event: dict[str, Any] | None) -> None:
        for queue in self._watchers:
            queue.put_nowait(event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization", ""))
        assert request.query["labelSelector"] == SELECTOR
        if self.script:
            status = self.script.pop(0)
            return web.json_response({"kind": "Status", "code": status, "message": "no"}, status=status)
        if "watch" not in request.query:
            self.lists += 1
            return self._list(request)
        self.watches += 1
        return await self._watch(request)

    def _list(self, request: web.Request) -> web.Response:
        begin = int(request.query["continue"] or 0)
        items = [self.slices[name] for name in sorted(self.slices)][begin : begin + self.page]
        metadata = {"resourceVersion": str(self.version)}
        if begin + self.page < len(self.slices):
            metadata["continue"] = str(begin + self.page)
        return web.json_response({"metadata": metadata, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        since = int(request.query["resourceVersion"])
        for one in self.slices.values():
            if int(one["metadata"]["resourceVersion"]) > since:
                queue.put_nowait({"type": "MODIFIED", "object": one})
        self._watchers.append(queue)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while (event := await queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self._watchers.remove(queue)
        return response


@contextlib.asynccontextmanager
async def listening(server: ApiServer, port: int = 0) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices", server.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        server.end_watches()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def following(port: int, token: Path) -> AsyncIterator[EndpointSliceSource]:
    source = EndpointSliceSource(ClusterAccess(f"http://127.0.0.1:{port}", "ns", token), SELECTOR)
    task = asyncio.create_task(source.follow())
    try:
        async with asyncio.timeout(LIMIT_S):
            yield source
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(source: EndpointSliceSource, *uids: str) -> None:
    while [worker.uid for worker in source.read() or []] != list(uids) or source.read() is None:
        await asyncio.sleep(0.01)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("first\n")
    return file


async def test_slices_come_change_and_go(token: Path) -> None:
    server = ApiServer()
    server.put("a", endpoint("1"))
    async with listening(server) as port, following(port, token) as source:
        await until(source, "1")
        server.put("b", endpoint("2"), role="prefill")
        await until(source, "1", "2")
        server.put("a")
        await until(source, "2")
        server.remove("b")
        await until(source)
        assert server.lists == 1


async def test_a_list_comes_in_pages(token: Path) -> None:
    server = ApiServer()
    server.page = 2
    for number in range(5):
        server.put(str(number), endpoint(str(number)))
    async with listening(server) as port, following(port, token) as source:
        await until(source, *map(str, range(5)))
        assert server.lists == 3


async def test_a_watch_that_ends_goes_on_from_its_last_version_with_the_token_of_then(token: Path) -> None:
    server = ApiServer()
    async with listening(server) as port, following(port, token) as source:
        await until(source)
        server.put("a", endpoint("1"))
        await until(source, "1")
        token.write_text("second")
        server.end_watches()
        while server.watches < 2:
            await asyncio.sleep(0.01)
        server.put("a", endpoint("2"))
        await until(source, "2")
        assert server.lists == 1
        assert server.tokens[-1] == "Bearer second"


@pytest.mark.parametrize("how", ["event", "status"])
async def test_a_version_that_is_forgotten_lists_anew(token: Path, how: str) -> None:
    server = ApiServer()
    server.put("a", endpoint("1"))
    async with listening(server) as port, following(port, token) as source:
        await until(source, "1")
        while not server.watches:
            await asyncio.sleep(0.01)
        del server.slices["a"]  # unseen
        server.version += 1
        if how == "event":
            server.error(410)
        else:
            server.script.append(410)
            server.end_watches()
        await until(source)
        assert server.lists == 2


async def test_the_last_answer_stands_while_the_server_is_away(token: Path) -> None:
    server = ApiServer()
    server.put("a", endpoint("1"))
    async with contextlib.AsyncExitStack() as stack:
        async with listening(server) as port:
            source = await stack.enter_async_context(following(port, token))
            await until(source, "1")
        while not source.fault:
            await asyncio.sleep(0.01)
        assert [worker.uid for worker in source.read() or []] == ["1"]
        server.put("a", endpoint("2"))
        async with listening(server, port):
            await until(source, "2")
            assert source.fault == ""


async def test_a_refusal_is_told_and_tried_again(token: Path) -> None:
    server = ApiServer()
    server.script = [403, 500, 429]
    async with listening(server) as port, following(port, token) as source:
        while "HTTP 403: no" not in source.fault:
            await asyncio.sleep(0.005)
        assert source.read() is None
        await until(source)
        assert source.fault == ""


async def test_a_proxy_in_the_environment_is_not_asked(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server = ApiServer()
    server.put("a", endpoint("1"))
    async with listening(server) as port, following(port, token) as source:
        await until(source, "1")


def test_a_pod_knows_its_api_server(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("ns")
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = ClusterAccess.of_pod(tmp_path, environment)
    assert (access.server, access.namespace) == ("https://[fd00::1]:6443", "ns")
    with pytest.raises(ValueError, match="needs a pod"):
        ClusterAccess.of_pod(tmp_path, {})
    with pytest.raises(ValueError, match="no account of this pod"):
        ClusterAccess.of_pod(tmp_path / "absent", environment)


def test_a_process_without_a_source_of_peers_says_what_is_needed() -> None:
    with pytest.raises(ValueError, match="TANDEM_PEER_SELECTOR is needed"):
        peer_source("", "")
