"""An API server in memory, for tests of what is above the port: the contract of `Kube`, and nothing more.

It has what the operator relies on: UIDs, resource versions, generations, server-side apply by ownership of
fields by one manager, conflicts, UID preconditions, label selectors, a status that only `/status` changes,
garbage collection by owner. `kube_contract.py` holds it and the real one against the same tests.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any, Literal

from tandem_operator.kube import Conflict, KubeError, NotFound
from tandem_operator.objects import KINDS, kind_of, labels_of, name_of, namespace_of, uid_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tandem_operator.objects import Kind, Obj

Call = tuple[str, str, str]  # verb, kind (and subresource), name


class MemoryKube:
    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Obj] = {}  # kind, namespace, name
        self.calls: list[Call] = []
        self.fails: Callable[[str, str, str], KubeError | None] = lambda verb, kind, name: None
        self.denied: set[tuple[str, str]] = set()  # verb, plural
        self._applied: dict[tuple[str, str, str], Obj] = {}
        self._serial = itertools.count(1)

    def writes(self) -> list[Call]:
        return [call for call in self.calls if call[0] not in ("get", "list", "allowed")]

    def named(self, kind: Kind, name: str, namespace: str = "default") -> Obj | None:
        return self.objects.get((kind.kind, namespace, name))

    def put(self, obj: Obj) -> Obj:
        """As another client would create or change it, status included."""
        return self._store(copy.deepcopy(obj))

    async def get(self, kind: Kind, namespace: str, name: str) -> Obj:
        self._called("get", kind.kind, name)
        return copy.deepcopy(self._found(kind, namespace, name))

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Obj]:
        self._called("list", kind.kind, selector)
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        return [
            copy.deepcopy(obj)
            for (of, within, _), obj in self.objects.items()
            if of == kind.kind and namespace in (None, within) and wanted.items() <= labels_of(obj).items()
        ]

    async def apply(self, obj: Obj) -> Obj:
        self._called("apply", obj["kind"], name_of(obj))
        key = (obj["kind"], namespace_of(obj), name_of(obj))
        found = self.objects.get(key)
        wanted_uid = obj["metadata"].get("uid")
        if wanted_uid is not None and (found is None or uid_of(found) != wanted_uid):
            raise Conflict(f"uid mismatch: {wanted_uid}")
        without = _without(found or {}, self._applied.get(key, {}), obj)
        self._applied[key] = copy.deepcopy(obj)
        return copy.deepcopy(self._store(_over(without, copy.deepcopy(obj))))

    async def create(self, obj: Obj) -> Obj:
        self._called("create", obj["kind"], name_of(obj))
        if (obj["kind"], namespace_of(obj), name_of(obj)) in self.objects:
            raise Conflict(f"{obj['kind']} {name_of(obj)} already exists")
        return copy.deepcopy(self._store(copy.deepcopy(obj)))

    async def replace(self, obj: Obj) -> Obj:
        self._called("replace", obj["kind"], name_of(obj))
        found = self._found(kind_of(obj), namespace_of(obj), name_of(obj))
        if obj["metadata"].get("resourceVersion") != found["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified")
        return copy.deepcopy(self._store(copy.deepcopy(obj)))

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
        self._called("merge", f"{kind.kind}/{subresource}".rstrip("/"), name)
        found = self._found(kind, namespace, name)
        version = (patch.get("metadata") or {}).get("resourceVersion")
        if version is not None and version != found["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified")
        changed = copy.deepcopy(found)
        if subresource == "scale":
            changed["spec"].setdefault("decode", {})["replicas"] = patch["spec"]["replicas"]
        elif subresource == "status":
            changed["status"] = _merged(changed.get("status") or {}, patch["status"])
        else:
            status = changed.get("status")
            changed = _merged(changed, patch)
            if status is not None:
                changed["status"] = status
        return copy.deepcopy(self._store(changed))

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        self._called("delete", kind.kind, name)
        found = self.objects.get((kind.kind, namespace, name))
        if found is None:
            return
        if uid_of(found) != uid:
            raise Conflict(f"uid mismatch: {uid}")
        self.remove(kind, name, namespace)

    async def allowed(self, verb: str, kind: Kind, namespace: str | None, subresource: str = "") -> bool:
        self._called("allowed", kind.kind, verb)
        return (verb, kind.plural) not in self.denied

    def remove(self, kind: Kind, name: str, namespace: str = "default") -> None:
        """With all that it owns."""
        gone = self.objects.pop((kind.kind, namespace, name))
        for owned in list(self.objects.values()):
            owners = owned["metadata"].get("ownerReferences") or ()
            if any(one["uid"] == uid_of(gone) for one in owners):
                self.remove(KINDS[owned["kind"]], name_of(owned), namespace)

    def _called(self, verb: str, kind: str, name: str) -> None:
        self.calls.append((verb, kind, name))
        if (error := self.fails(verb, kind, name)) is not None:
            raise error

    def _found(self, kind: Kind, namespace: str, name: str) -> Obj:
        try:
            return self.objects[kind.kind, namespace, name]
        except KeyError:
            raise NotFound(f"{kind.plural} {name!r} not found") from None

    def _store(self, obj: Obj) -> Obj:
        """A write that changes nothing keeps the resource version."""
        key = (obj["kind"], namespace_of(obj), name_of(obj))
        before = self.objects.get(key)
        metadata = obj["metadata"]
        if before is None:
            metadata |= {"uid": f"uid-{next(self._serial)}", "generation": 1}
        else:
            for field in ("uid", "generation", "resourceVersion"):
                metadata[field] = before["metadata"][field]
            if obj == before:
                return before
            if obj.get("spec") != before.get("spec"):
                metadata["generation"] += 1
        metadata["resourceVersion"] = str(next(self._serial))
        self.objects[key] = obj
        return obj


def _over(found: Any, wanted: Any) -> Any:
    """Maps by key, lists of named maps by name, all else as a whole."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return {**found, **{key: _over(found.get(key), value) for key, value in wanted.items()}}
    if _named(found) and _named(wanted):
        by_name = {one["name"]: one for one in found}
        by_name |= {one["name"]: _over(by_name.get(one["name"]), one) for one in wanted}
        return list(by_name.values())
    return wanted


def _without(found: Any, before: Any, wanted: Any) -> Any:
    """What was applied before and is not any more, taken out."""
    if not isinstance(found, dict) or not isinstance(before, dict):
        return found
    wanted = wanted if isinstance(wanted, dict) else {}
    kept = {}
    for key, value in found.items():
        if key in before and key not in wanted and not isinstance(value, dict):
            continue
        kept[key] = _without(value, before.get(key), wanted.get(key))
    return kept


def _named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and "name" in one for one in value)


def _merged(found: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(found) if isinstance(found, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged
