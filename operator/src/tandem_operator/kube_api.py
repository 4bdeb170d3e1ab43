"""The port of `kube.py` over HTTP: one raw call path of the official client, errors told apart.

Knows: HTTP statuses and the server's odd answers. Does not know: what the objects mean.

One path for all kinds, with plain dicts: the client's typed models refuse or re-serialise what the server
accepts. Reads are tried again on 429, 5xx and broken connections; writes are not, since a pass is repeated as
a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
from kubernetes.aio import client, config

from .kube import Conflict, Forbidden, Invalid, KubeError, NotFound, Unavailable
from .objects import FIELD_MANAGER, kind_of, name_of, namespace_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .objects import Kind, Obj

    Told = Callable[[str, str, int], None]

CALL_S = 10.0
READ_TRIES = 3
READ_PAUSE_S = 0.3

_APPLY, _MERGE, _JSON = (
    "application/apply-patch+yaml",
    "application/merge-patch+json",
    "application/json",
)


class KubeApi:
    """Raises KubeError only. `close` when done."""

    def __init__(self, api: client.ApiClient, told: Told = lambda verb, path, code: None) -> None:
        """`told` hears of every call: verb, path, HTTP status (0: no answer)."""
        self._api, self._told = api, told

    @classmethod
    async def connect(
        cls, kubeconfig: str | None = None, told: Told = lambda verb, path, code: None
    ) -> KubeApi:
        """With a kubeconfig file, or as the pod's own account. Raises OSError, ConfigException."""
        configuration = client.Configuration()
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            loading = config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, client_configuration=configuration
            )
            await loading
        configuration.proxy = None  # the API server is never asked through HTTP_PROXY
        api = client.ApiClient(configuration)
        api.user_agent = FIELD_MANAGER
        return cls(api, told)

    async def close(self) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: Kind, namespace: str, name: str) -> Obj:
        return await self._read(kind.path(namespace, name), {})

    async def read(self, path: str) -> Obj:
        """Any JSON document that the server has under `path`."""
        return await self._read(path, {})

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Obj]:
        """Whole: a limit would need a second read at another time."""
        query = {"labelSelector": selector} if selector else {}
        answer = await self._read(kind.path(namespace), query)
        return [{"apiVersion": kind.api_version, "kind": kind.kind, **one} for one in answer["items"]]

    async def apply(self, obj: Obj) -> Obj:
        query = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        path = kind_of(obj).path(namespace_of(obj), name_of(obj))
        return await self._call("PATCH", path, query, obj, _APPLY)

    async def create(self, obj: Obj) -> Obj:
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return await self._call("POST", kind_of(obj).path(namespace_of(obj)), query, obj)

    async def replace(self, obj: Obj) -> Obj:
        path = kind_of(obj).path(namespace_of(obj), name_of(obj))
        return await self._call("PUT", path, {"fieldManager": FIELD_MANAGER}, obj)

    async def merge(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        patch: Obj,
        *,
        subresource: Literal["", "status", "scale"] = "",
        manager: str = "",
    ) -> Obj:
        query = {"fieldManager": manager or FIELD_MANAGER}
        return await self._call("PATCH", kind.path(namespace, name, subresource), query, patch, _MERGE)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        with contextlib.suppress(NotFound):
            await self._call("DELETE", kind.path(namespace, name), {}, body)

    async def allowed(self, verb: str, kind: Kind, namespace: str | None, subresource: str = "") -> bool:
        wanted = {"verb": verb, "group": kind.group, "resource": kind.plural}
        if namespace is not None:
            wanted["namespace"] = namespace
        if subresource:
            wanted["subresource"] = subresource
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": wanted},
        }
        answer = await self._call(
            "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", {}, review
        )
        return bool(answer.get("status", {}).get("allowed"))

    async def _read(self, path: str, query: dict[str, str]) -> Obj:
        for tries in range(READ_TRIES):
            try:
                return await self._call("GET", path, query, None)
            except Unavailable as error:
                if tries == READ_TRIES - 1:
                    raise
                await asyncio.sleep(min(error.after_s or READ_PAUSE_S * 2**tries, CALL_S))
        raise AssertionError("unreachable")

    async def _call(
        self, method: str, path: str, query: dict[str, str], body: Obj | None, content_type: str = _JSON
    ) -> Obj:
        headers = {"Accept": _JSON, "Content-Type": content_type}
        try:
            request = await self._api.param_serialize(
                method,
                path,
                query_params=list(query.items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await self._api.call_api(*request, _request_timeout=CALL_S)
            text = await response.read()  # type: ignore[no-untyped-call]
        except (aiohttp.ClientError, TimeoutError, OSError, config.ConfigException) as error:
            self._told(method, path, 0)
            raise Unavailable(f"{method} {path}: {type(error).__name__}: {error}") from error
        self._told(method, path, response.status)
        answer = _decoded(text)
        if response.status >= 400:
            raise _error(response.status, answer, dict(response.headers or {}))
        return answer


def _decoded(text: bytes | str | None) -> Obj:
    try:
        answer: Any = json.loads(text or b"{}")
    except ValueError:
        answer = {"message": (text or b"")[:200] if isinstance(text, str) else repr((text or b"")[:200])}
    return answer if isinstance(answer, dict) else {"message": str(answer)}


def _error(status: int, answer: Obj, headers: dict[str, str]) -> KubeError:
    message = str(answer.get("message") or f"HTTP {status}")
    match status:
        case 404:
            return NotFound(message)
        case 409:
            return Conflict(message)
        case 401 | 403:
            return Forbidden(message, terminating="because it is being terminated" in message)
        case 400 | 405 | 413 | 415 | 422:
            return Invalid(message)
        case 500 if "failed to create typed patch object" in message:
            return Invalid(message)  # server-side apply of an undeclared field; the same for ever
    after = {name.lower(): value for name, value in headers.items()}.get("retry-after", "")
    return Unavailable(message, after_s=float(after) if after.isdigit() else None)
