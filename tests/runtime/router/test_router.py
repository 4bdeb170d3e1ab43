"""The router between real clients and real workers on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import pytest
from loopback_worker import HALF_EVENT, LoopbackWorker
from yarl import URL

from tandem_runtime.router.api_keys import ApiKeysError
from tandem_runtime.router.app import Router
from tandem_runtime.router.config import RouterConfig
from tandem_runtime.router.run import listen, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SOON_S = 5.0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.01)


@dataclass
class Deployment:
    """A router, its peer file, and a client of it."""

    path: Path
    session: aiohttp.ClientSession
    router: Router
    url: str
    workers: list[LoopbackWorker] = field(default_factory=list)

    def list_peers(self, *workers: dict[str, str]) -> None:
        """Replace the peer file the way its writer does."""
        partial = self.path.with_name("peers.partial")
        partial.write_text(json.dumps({"workers": list(workers)}))
        partial.replace(self.path)

    async def add(self, *pods: str, **state: bool) -> list[LoopbackWorker]:
        """Start workers, list them all, and wait until the router knows what they say."""
        added = [LoopbackWorker(pod, **state) for pod in pods]
        for worker in added:
            await worker.start()
        self.workers += added
        self.list_peers(*(worker.addresses for worker in self.workers))
        if all(worker.ready and worker.paired and not worker.draining for worker in added):
            await self.usable(*pods)
        return added

    async def usable(self, *pods: str, usable: bool = True) -> None:
        workers = self.router.workers
        await until(lambda: {w.addresses.pod for w in workers if w.usable is usable}.issuperset(pods))

    async def status(self, path: str) -> int:
        async with self.session.get(self.url + path) as response:
            return response.status

    async def metric(self, name: str) -> float:
        async with self.session.get(self.url + "/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith(name + " "):
                    return float(line.rpartition(" ")[2])
        return 0.0


@contextlib.asynccontextmanager
async def deployed(path: Path, **settings: object) -> AsyncIterator[Deployment]:
    config = RouterConfig(peers=path, poll_s=0.05, poll_unready_s=0.02, **settings)  # type: ignore[arg-type]
    router = Router(config)
    sock = listen(config)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with serving(router, sock), aiohttp.ClientSession() as session:
        deployment = Deployment(path, session, router, url)
        try:
            yield deployment
        finally:
            for worker in deployment.workers:
                await worker.stop()


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    async with deployed(tmp_path / "peers.json") as deployment:
        yield deployment


@contextlib.asynccontextmanager
async def worker_process(*pieces: bytes) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, str]]]:
    program = Path(__file__).with_name("loopback_worker.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), *(piece.decode() for piece in pieces), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# --- Bytes pass as they are and as they come.


async def test_events_reach_the_client_one_by_one_in_order(deployment: Deployment) -> None:
    (worker,) = await deployment.add("a")
    async with asyncio.timeout(SOON_S):
        worker.pieces.put_nowait(b"data: 0\n\n")
        async with deployment.session.post(deployment.url + "/v1/stream", data=b"{}") as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            for index in range(1, 20):  # the next event is not even made before the last was read
                assert await response.content.readany() == f"data: {index - 1}\n\n".encode()
                worker.pieces.put_nowait(f"data: {index}\n\n".encode())
            worker.pieces.put_nowait(None)
            assert await response.content.read() == b"data: 19\n\n"


async def test_request_and_answer_pass_unchanged_but_for_headers_of_one_hop(deployment: Deployment) -> None:
    (worker,) = await deployment.add("a")
    headers = {"X-Request-Id": "7", "Authorization": "Bearer theirs", "Connection": "X-Gone", "X-Gone": "1"}
    body = bytes(range(256)) * 300
    url = URL(deployment.url + "/v1/teapot?a=%2F&b=1", encoded=True)
    async with deployment.session.post(url, data=body, headers=headers) as response:
        assert response.status == 418
        assert await response.read() == b"\x00\x01teapot"
        assert response.headers["X-Mood"] == "short"
        assert response.headers["Retry-After"] == "7"
        assert "X-Hop" not in response.headers
    ((method, path, seen, got),) = worker.seen
    assert (method, path, got) == ("POST", "/v1/teapot?a=%2F&b=1", body)
    assert seen["x-request-id"] == "7"
    assert seen["authorization"] == "Bearer theirs"
    assert seen["host"] == worker.address
    assert "x-gone" not in seen


async def test_an_encoded_answer_is_not_decoded_on_the_way(deployment: Deployment) -> None:
    await deployment.add("a")
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.get(deployment.url + "/v1/compressed") as response,
    ):
        assert response.headers["Content-Encoding"] == "gzip"
        assert await response.read() == b"not really gzip"


async def test_an_answer_without_a_body_passes(deployment: Deployment) -> None:
    await deployment.add("a")
    async with deployment.session.delete(deployment.url + "/v1/empty") as response:
        assert (response.status, await response.read()) == (204, b"")


# --- Workers that die.


async def test_a_worker_killed_before_its_headers_is_a_502(deployment: Deployment) -> None:
    async with worker_process() as (process, addresses):
        deployment.list_peers(addresses)
        await deployment.usable("process")
        asking = asyncio.create_task(deployment.session.post(deployment.url + "/v1/stream", data=b"{}"))
        await until(lambda: deployment.router.open)
        await asyncio.sleep(0.1)  # the request is with the worker, which will never answer
        process.kill()
        async with asyncio.timeout(SOON_S), await asking as response:
            assert response.status == 502
            assert (await response.json())["error"]["code"] == "worker_lost"
    assert await deployment.metric('tandem_router_upstream_errors_total{when="before_first_byte"}') == 1
    assert await deployment.metric('tandem_router_requests_total{code="502"}') == 1


async def test_a_worker_killed_between_headers_and_first_byte_is_a_502(deployment: Deployment) -> None:
    async with worker_process() as (process, addresses):
        deployment.list_peers(addresses)
        await deployment.usable("process")
        asking = asyncio.create_task(deployment.session.post(deployment.url + "/v1/headers", data=b"{}"))
        await until(lambda: deployment.router.open)
        await asyncio.sleep(0.2)
        assert not asking.done()
        process.kill()
        async with asyncio.timeout(SOON_S), await asking as response:
            assert response.status == 502


@pytest.mark.parametrize("piece", [b"data: 0\n\n", HALF_EVENT])
async def test_a_worker_killed_in_an_event_stream_ends_it_with_an_error_event(
    deployment: Deployment, piece: bytes
) -> None:
    async with worker_process(piece) as (process, addresses):
        deployment.list_peers(addresses)
        await deployment.usable("process")
        async with asyncio.timeout(SOON_S):
            async with deployment.session.post(deployment.url + "/v1/stream", data=b"{}") as response:
                assert response.status == 200
                assert await response.content.readany() == piece
                process.kill()
                rest = await response.content.read()
    events = [event for event in (piece + rest).split(b"\n\n") if event]
    assert len(events) == 2
    error = json.loads(events[1].removeprefix(b"data: "))
    assert error["error"]["code"] == "worker_lost"
    assert b"[DONE]" not in rest
    assert await deployment.metric('tandem_router_upstream_errors_total{when="after_first_byte"}') == 1


async def test_a_worker_killed_in_a_plain_answer_breaks_the_clients_connection(
    deployment: Deployment,
) -> None:
    async with worker_process(b'{"half":') as (process, addresses):
        deployment.list_peers(addresses)
        await deployment.usable("process")
        async with asyncio.timeout(SOON_S):
            async with deployment.session.post(deployment.url + "/v1/json", data=b"{}") as response:
                assert await response.content.readany() == b'{"half":'
                process.kill()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.content.read()
    assert await deployment.status("/health") == 200


async def test_a_refused_connection_moves_the_request_to_another_worker(deployment: Deployment) -> None:
    first, second = await deployment.add("a", "b")
    for worker in deployment.router.workers:
        assert worker.poller is not None
        worker.poller.cancel()  # the router must find out by itself
    await first.stop()
    for _ in range(4):
        async with deployment.session.post(deployment.url + "/v1/echo", data=b"{}") as response:
            assert (response.status, await response.json()) == (200, {"pod": "b"})
    assert len(second.seen) == 4
    assert await deployment.metric('tandem_router_upstream_errors_total{when="connect"}') == 1


async def test_a_stopped_worker_gets_no_new_requests(tmp_path: Path) -> None:
    async with (
        deployed(tmp_path / "peers.json", poll_timeout_s=0.3) as deployment,
        worker_process() as (process, addresses),
    ):
        deployment.list_peers(addresses)
        await deployment.usable("process")
        process.send_signal(signal.SIGSTOP)
        await deployment.usable("process", usable=False)
        assert await deployment.status("/v1/echo") == 503
        process.send_signal(signal.SIGCONT)
        await deployment.usable("process")
        assert await deployment.status("/v1/echo") == 200


# --- Which worker.


@pytest.mark.parametrize("state", [{"ready": False}, {"paired": False}, {"draining": True}])
async def test_no_worker_to_send_to_is_a_503_that_says_so(
    deployment: Deployment, state: dict[str, bool]
) -> None:
    (worker,) = await deployment.add("a", **state)
    await until(lambda: list(deployment.router.workers))
    async with deployment.session.post(deployment.url + "/v1/chat/completions", data=b"{}") as response:
        assert response.status == 503
        assert response.headers["Retry-After"]
        error = (await response.json())["error"]
        assert (error["type"], error["code"], error["param"]) == ("server_error", "no_worker", None)
    assert worker.seen == []
    assert await deployment.metric('tandem_router_requests_total{code="503"}') == 1
    assert await deployment.metric("tandem_router_arrivals_total") == 1
    worker.ready, worker.paired, worker.draining = True, True, False
    await deployment.usable("a")
    assert await deployment.status("/v1/echo") == 200


async def test_ready_comes_with_the_first_list_and_serving_with_the_first_paired_worker(
    deployment: Deployment,
) -> None:
    assert await deployment.status("/health") == 200
    assert await deployment.status("/ready") == 503
    assert await deployment.status("/serving") == 503
    deployment.list_peers()
    await until(lambda: deployment.router.workers.listed)
    assert await deployment.status("/ready") == 200
    assert await deployment.status("/serving") == 503
    await deployment.add("a")
    assert await deployment.status("/serving") == 200


async def test_a_broken_peer_file_changes_nothing(deployment: Deployment) -> None:
    await deployment.add("a")
    deployment.path.write_text("{")
    await asyncio.sleep(0.6)
    assert await deployment.status("/v1/echo") == 200


async def test_prefill_workers_get_no_requests(deployment: Deployment) -> None:
    (worker,) = await deployment.add("a")
    prefill = {**worker.addresses, "pod": "p", "uid": "p", "role": "prefill", "server": ""}
    deployment.list_peers(prefill, worker.addresses)
    await asyncio.sleep(0.6)
    for _ in range(4):
        assert await deployment.status("/v1/echo") == 200
    assert len(worker.seen) == 4


async def test_idle_workers_take_turns(deployment: Deployment) -> None:
    workers = await deployment.add("a", "b", "c")
    for _ in range(9):
        assert await deployment.status("/v1/echo") == 200
    assert [len(worker.seen) for worker in workers] == [3, 3, 3]


async def test_the_worker_with_the_fewest_open_requests_is_next(deployment: Deployment) -> None:
    a, b = await deployment.add("a", "b")
    streams = []
    for _ in range(2):
        streams.append(asyncio.create_task(deployment.session.get(deployment.url + "/v1/stream")))
        await until(lambda: len(a.seen) + len(b.seen) == len(streams))
    assert (len(a.seen), len(b.seen)) == (1, 1)
    busy, free = a, b
    free.pieces.put_nowait(b"data: 0\n\n")
    free.pieces.put_nowait(None)
    await until(lambda: any(stream.done() for stream in streams))
    for stream in streams:
        if stream.done():
            (await stream).release()
    for _ in range(3):
        assert await deployment.status("/v1/echo") == 200
    assert (len(busy.seen), len(free.seen)) == (1, 4)
    assert await deployment.metric('tandem_router_outstanding{worker="a"}') == 1
    busy.pieces.put_nowait(None)
    await asyncio.gather(*streams)


async def test_requests_that_came_by_other_routers_count_too(deployment: Deployment) -> None:
    a, b = await deployment.add("a", "b")
    a.outstanding = 5
    await until(lambda: any(worker.elsewhere == 5 for worker in deployment.router.workers))
    for _ in range(4):
        assert await deployment.status("/v1/echo") == 200
    assert (len(a.seen), len(b.seen)) == (0, 4)


async def test_a_worker_about_to_end_is_asked_only_where_it_is_the_last(deployment: Deployment) -> None:
    """Between its pod's deletion and its own word that it drains, it answers as ever."""
    await deployment.add("staying", "leaving")
    workers = deployment.router.workers
    for worker in workers:
        if worker.addresses.pod == "leaving":
            worker.addresses = msgspec.structs.replace(worker.addresses, draining=True)
    staying = workers.choose(())
    assert staying is not None
    assert staying.addresses.pod == "staying"
    assert workers.choose(()) is staying, "it does not take turns with one that leaves"
    leaving = workers.choose((staying,))
    assert leaving is not None
    assert leaving.addresses.pod == "leaving"
    staying.usable = False
    assert workers.serving


async def test_a_worker_that_left_the_list_gets_nothing_more(deployment: Deployment) -> None:
    a, b = await deployment.add("a", "b")
    deployment.list_peers(b.addresses)
    await until(lambda: len(list(deployment.router.workers)) == 1)
    for _ in range(3):
        assert await deployment.status("/v1/echo") == 200
    assert (len(a.seen), len(b.seen)) == (0, 3)


# --- Clients.


@pytest.mark.parametrize("first", [None, b"data: 0\n\n"], ids=["before the first byte", "in the stream"])
async def test_a_client_that_leaves_takes_its_request_with_it(
    deployment: Deployment, first: bytes | None
) -> None:
    (worker,) = await deployment.add("a")
    if first is not None:
        worker.pieces.put_nowait(first)
    asking = asyncio.create_task(deployment.session.post(deployment.url + "/v1/stream", data=b"{}"))
    await until(lambda: worker.seen)
    if first is not None:
        response = await asking
        assert await response.content.readany() == first
        response.close()
    else:
        asking.cancel()
    async with asyncio.timeout(SOON_S):
        await worker.left.wait()
    await until(lambda: deployment.router.idle.is_set())
    assert await deployment.metric('tandem_router_requests_total{code="499"}') == 1
    assert await deployment.metric('tandem_router_outstanding{worker="a"}') == 0
    assert await deployment.status("/v1/echo") == 200


async def test_a_body_over_the_limit_is_a_413(tmp_path: Path) -> None:
    async with deployed(tmp_path / "peers.json", max_body_nbytes=1000) as deployment:
        (worker,) = await deployment.add("a")
        for size, status in ((1000, 200), (1001, 413)):
            async with deployment.session.post(deployment.url + "/v1/echo", data=b"x" * size) as response:
                assert response.status == status
                answer = await response.json()
        assert answer["error"]["code"] == "body_too_large"
        assert len(worker.seen) == 1


async def test_other_paths_are_a_404_in_the_same_shape(deployment: Deployment) -> None:
    async with deployment.session.get(deployment.url + "/admin") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"


async def test_only_who_has_a_key_gets_through_and_the_key_stays_here(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\n\nsecond-key\n")
    async with deployed(tmp_path / "peers.json", api_keys=keys) as deployment:
        (worker,) = await deployment.add("a")

        async def ask(authorization: str | None) -> int:
            headers = {} if authorization is None else {"Authorization": authorization}
            async with deployment.session.get(deployment.url + "/v1/models", headers=headers) as response:
                if response.status == 401:
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
                return response.status

        for wrong in (
            None,
            "",
            "Bearer",
            "Bearer ",
            "Bearer first-ke",
            "Basic first-key",
            "Bearer first-key2",
        ):
            assert await ask(wrong) == 401
        assert worker.seen == []
        assert await deployment.metric("tandem_router_arrivals_total") == 0
        assert [await ask(f"Bearer {key}") for key in ("first-key", "second-key")] == [200, 200]
        assert all("authorization" not in headers for _, _, headers, _ in worker.seen)
        for path in ("/health", "/ready", "/serving", "/metrics"):
            assert await deployment.status(path) == 200

        keys.write_text("third-key\n")
        assert [await ask(f"Bearer {key}") for key in ("first-key", "third-key")] == [401, 200]
        keys.unlink()
        assert await ask("Bearer third-key") == 200


def test_a_file_without_a_key_is_refused_at_the_start(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    with pytest.raises(ApiKeysError, match="No such file"):
        Router(RouterConfig(peers=tmp_path / "peers.json", api_keys=keys))
    keys.write_text("\n \n")
    with pytest.raises(ApiKeysError, match="no key in it"):
        Router(RouterConfig(peers=tmp_path / "peers.json", api_keys=keys))
