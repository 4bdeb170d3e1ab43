"""Who exists, from the EndpointSlices of the pod's own namespace, listed and watched with the pod's own
account.

Knows: the API server's list/watch protocol, what of an endpoint counts. Does not know: health, fabric
addresses (each worker's `/peer` tells its own), what peers are for.

    LIST ──► slices, resourceVersion ──► WATCH ──event──► slices
      ▲                                    │
      └── 410 Gone, anything not understood┘   cut or silent: WATCH again, from the last version seen

A worker is listed while its endpoint is `serving`. One that is `terminating` as well is on its way out: it
finishes what it has, and is `draining` here. Workers are known by pod UID, so a pod that is replaced behind
the same address is another worker. While the API server cannot be asked, the last answer stands: nothing that
serves stops serving.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from tandem_crds import names

from .instance import Addresses

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("tandem.peers")

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE = 500
ANSWER_S = 10.0  # for a list
WATCH_S = (
    60  # the server ends a watch after so long; a connection that died silently is noticed a little later
)
SILENCE_S = WATCH_S + 15.0
RETRY_S, RETRY_MAX_S = 0.25, 5.0
LINE_MAX_NBYTES = 8 << 20  # of one event: a slice has up to 1000 endpoints

_NOT_A_LIST = (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, msgspec.ValidationError)


class Unanswered(Exception):
    """The API server answered, but not with what was asked for."""


class Gone(Exception):
    """The version that a watch was to start from is no longer kept: list anew."""


# --- what of the API's objects is read ---------------------------------------------------------------


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct):
    kind: str = ""
    name: str = ""
    uid: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] = []
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)
    target_ref: _Target | None = None
    zone: str = ""


class _Port(msgspec.Struct):
    name: str = ""
    port: int = 0


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    continue_: str = msgspec.field(default="", name="continue")


class Slice(msgspec.Struct):
    """An EndpointSlice; null and absent lists are the same to it."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct):
    metadata: _Metadata
    items: list[Slice] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


def workers_of(one: Slice) -> list[Addresses]:
    """The pods behind a slice that serve. What lacks a pod, an address or the port `worker` is no worker."""
    ports = {port.name: port.port for port in one.ports or []}
    role = one.metadata.labels.get(names.LABEL_ROLE, "")
    found = []
    for endpoint in one.endpoints or []:
        target, conditions = endpoint.target_ref, endpoint.conditions
        # Absent means unknown, which clients are to take for ready.
        serving = conditions.serving if conditions.serving is not None else conditions.ready is not False
        if target is None or target.kind != "Pod" or not target.uid or not endpoint.addresses:
            continue
        if not serving or "worker" not in ports:
            continue
        host = endpoint.addresses[0]
        host = f"[{host}]" if ":" in host else host
        serves_clients = role != "prefill" and "server" in ports
        found.append(
            Addresses(
                pod=target.name,
                uid=target.uid,
                role=role,
                worker=f"{host}:{ports['worker']}",
                server=f"{host}:{ports['server']}" if serves_clients else "",
                zone=endpoint.zone,
                draining=bool(conditions.terminating),
            )
        )
    return found


def merged(slices: Mapping[str, Slice]) -> list[Addresses]:
    """All workers, by UID. While a pod moves from one slice to another it is in both: the entry that does not
    say draining is the older one.
    """
    by_uid: dict[str, Addresses] = {}
    for name in sorted(slices):
        for worker in workers_of(slices[name]):
            known = by_uid.get(worker.uid)
            if known is None or worker.draining:
                by_uid[worker.uid] = worker
    return sorted(by_uid.values(), key=lambda worker: (worker.pod, worker.uid))


# --- asking ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """How to reach the API server. The token is read anew for every request: the kubelet replaces it."""

    server: str
    namespace: str
    token: Path | None = None
    certificate_authority: Path | None = None

    @classmethod
    def of_pod(cls, account: Path = ACCOUNT, environment: Mapping[str, str] = os.environ) -> ClusterAccess:
        """Raises ValueError outside a pod, or in one without a token."""
        host = environment.get("KUBERNETES_SERVICE_HOST")
        port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ValueError("TANDEM_PEER_SELECTOR needs a pod: KUBERNETES_SERVICE_HOST is not set")
        try:
            namespace = (account / "namespace").read_text().strip()
        except OSError as error:
            raise ValueError(f"no account of this pod in {account}: {error.strerror}") from error
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", namespace, account / "token", account / "ca.crt")

    def headers(self) -> dict[str, str]:
        """Raises OSError."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token.read_text().strip()}"}

    def ssl(self) -> ssl.SSLContext | bool:
        if self.certificate_authority is None:
            return True
        return ssl.create_default_context(cafile=str(self.certificate_authority))


class EndpointSliceSource:
    def __init__(self, access: ClusterAccess, selector: str) -> None:
        self._access = access
        self._selector = selector
        self._url = f"{access.server}/apis/discovery.k8s.io/v1/namespaces/{access.namespace}/endpointslices"
        self._slices: dict[str, Slice] = {}
        self._version = ""  # of the last event; empty: list anew
        self._workers: list[Addresses] | None = None
        self.fault = ""

    def read(self) -> list[Addresses] | None:
        return self._workers

    async def follow(self) -> None:
        retry_s = RETRY_S
        # The API server is asked directly, whatever HTTP_PROXY says.
        async with aiohttp.ClientSession(
            trust_env=False,
            read_bufsize=LINE_MAX_NBYTES,
            connector=aiohttp.TCPConnector(ssl=self._access.ssl()),
        ) as session:
            while True:
                try:
                    if not self._version:
                        await self._list(session)
                    self._reached()
                    retry_s = RETRY_S
                    await self._watch(session)
                    continue
                except Gone:
                    self._version = ""
                except (Unanswered, *_NOT_A_LIST, ValueError) as error:
                    self._unreached(error)
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.5))
                retry_s = min(RETRY_MAX_S, 2 * retry_s)

    async def _list(self, session: aiohttp.ClientSession) -> None:
        slices: dict[str, Slice] = {}
        token = ""
        while True:
            asked = {"labelSelector": self._selector, "limit": str(PAGE), "continue": token}
            timeout = aiohttp.ClientTimeout(total=ANSWER_S)
            async with session.get(
                self._url, params=asked, headers=self._access.headers(), timeout=timeout
            ) as answer:
                if answer.status == 410:
                    raise Gone
                listed = msgspec.json.decode(await _body(answer), type=_List)
            slices.update((one.metadata.name, one) for one in listed.items or [])
            token = listed.metadata.continue_
            if not token:
                break
        self._slices, self._version = slices, listed.metadata.resource_version
        self._changed()

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        """Until the server ends it, which it does every `WATCH_S`."""
        asked = {
            "labelSelector": self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=SILENCE_S)
        async with session.get(
            self._url, params=asked, headers=self._access.headers(), timeout=timeout
        ) as answer:
            if answer.status == 410:
                raise Gone
            if answer.status != 200:
                await _body(answer)
            async for line in answer.content:
                self._event(msgspec.json.decode(line, type=_Event))

    def _event(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            if status.code == 410:
                raise Gone
            self._version = ""
            raise Unanswered(status.message or "an error without a message")
        one = msgspec.json.decode(event.object, type=Slice)
        self._version = one.metadata.resource_version
        match event.type:
            case "ADDED" | "MODIFIED":
                self._slices[one.metadata.name] = one
            case "DELETED":
                self._slices.pop(one.metadata.name, None)
            case _:
                return  # a bookmark
        self._changed()

    def _changed(self) -> None:
        self._workers = merged(self._slices)

    def _reached(self) -> None:
        if self.fault:
            log.info("the API server answers again")
        self.fault = ""

    def _unreached(self, error: Exception) -> None:
        fault = f"{type(error).__name__}: {error}"
        if not self.fault:
            stands = (
                "no list yet" if self._workers is None else f"the last {len(self._workers)} workers stand"
            )
            log.warning("EndpointSlices of %s: %s; %s", self._access.namespace, fault, stands)
        self.fault = fault


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    """Raises Unanswered with the server's message."""
    body = await answer.read()
    if answer.status == 200:
        return body
    try:
        message: Any = msgspec.json.decode(body, type=_Status).message
    except (msgspec.DecodeError, msgspec.ValidationError):
        message = body[:200].decode(errors="replace")
    raise Unanswered(f"HTTP {answer.status}: {message}")
