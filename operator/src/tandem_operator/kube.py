"""The operator's port to the API server: eight calls, and what can go wrong with them.

Knows: which calls there are and what their errors mean for the caller. Does not know: HTTP (`kube_api.py`).

    KubeError
    ├── NotFound        the object, or its namespace, is gone
    ├── Conflict        somebody else was faster; look again at once
    ├── Forbidden       RBAC, or the namespace is being terminated (`terminating`)
    ├── Invalid         the object itself is wrong: the same body will be refused for ever
    └── Unavailable     429, 5xx, a broken or hung connection: later; `after_s` if the server said when
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from .objects import Kind, Obj


class KubeError(Exception):
    """`str()` is the server's message."""


class NotFound(KubeError):
    pass


class Conflict(KubeError):
    pass


class Forbidden(KubeError):
    def __init__(self, message: str, *, terminating: bool = False) -> None:
        super().__init__(message)
        self.terminating = terminating


class Invalid(KubeError):
    pass


class Unavailable(KubeError):
    def __init__(self, message: str, *, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class Kube(Protocol):
    """Every call has a deadline of its own and raises KubeError, never anything of the transport."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Obj:
        """Raises NotFound."""
        ...

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Obj]:
        """A consistent read (no `resourceVersion`); items carry apiVersion and kind. None: all namespaces."""
        ...

    async def apply(self, obj: Obj) -> Obj:
        """Server-side apply as FIELD_MANAGER, forced, `fieldValidation=Strict`. Creates what is absent;
        with `metadata.uid` set, Conflict instead.
        """
        ...

    async def create(self, obj: Obj) -> Obj:
        """Raises Conflict if the name is taken."""
        ...

    async def replace(self, obj: Obj) -> Obj:
        """PUT of the whole object at its `resourceVersion`. Raises Conflict."""
        ...

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
        """JSON merge patch. With `metadata.resourceVersion` in the patch, Conflict if the object moved on."""
        ...

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Only the object with that UID, in the background. What is gone already is no error."""
        ...

    async def allowed(self, verb: str, kind: Kind, namespace: str | None, subresource: str = "") -> bool:
        """Asks the server by SelfSubjectAccessReview."""
        ...
