"""What the operator relies on of an API server: run on the one in memory and on a real one.

Each test gets `kube` and a namespace of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tandem_operator.kube import Conflict, NotFound
from tandem_operator.objects import CONFIG_MAP, LEASE, SECRET, uid_of

if TYPE_CHECKING:
    from tandem_operator.kube import Kube
    from tandem_operator.objects import Obj


def config_map(namespace: str, name: str = "one", /, **data: str) -> Obj:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, "labels": {"tandem.dev/model": "m"}},
        "data": data,
    }


def secret(namespace: str) -> Obj:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "key", "namespace": namespace},
        "data": {"current": "MTIz"},
    }


class KubeContract:
    async def test_what_is_absent_is_not_found(self, kube: Kube, namespace: str) -> None:
        with pytest.raises(NotFound):
            await kube.get(CONFIG_MAP, namespace, "absent")

    async def test_apply_creates_and_an_equal_apply_keeps_the_version(
        self, kube: Kube, namespace: str
    ) -> None:
        first = await kube.apply(config_map(namespace, a="1"))
        again = await kube.apply(config_map(namespace, a="1"))
        assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]

    async def test_apply_takes_out_what_it_applied_before(self, kube: Kube, namespace: str) -> None:
        await kube.apply(config_map(namespace, a="1", b="2"))
        assert (await kube.apply(config_map(namespace, b="3")))["data"] == {"b": "3"}

    async def test_apply_leaves_what_others_added(self, kube: Kube, namespace: str) -> None:
        await kube.apply(config_map(namespace, a="1"))
        await kube.merge(CONFIG_MAP, namespace, "one", {"data": {"theirs": "x"}}, manager="somebody")
        assert (await kube.apply(config_map(namespace, a="2")))["data"] == {"a": "2", "theirs": "x"}

    async def test_apply_with_a_uid_never_creates(self, kube: Kube, namespace: str) -> None:
        body = config_map(namespace, a="1")
        body["metadata"]["uid"] = "11111111-2222-3333-4444-555555555555"
        with pytest.raises(Conflict):
            await kube.apply(body)

    async def test_create_of_a_taken_name_is_a_conflict(self, kube: Kube, namespace: str) -> None:
        await kube.create(secret(namespace))
        with pytest.raises(Conflict):
            await kube.create(secret(namespace))

    async def test_list_selects_by_label_and_carries_kinds(self, kube: Kube, namespace: str) -> None:
        await kube.apply(config_map(namespace, "one"))
        other = config_map(namespace, "two")
        other["metadata"]["labels"] = {"tandem.dev/model": "other"}
        await kube.apply(other)
        found = await kube.list(CONFIG_MAP, namespace, "tandem.dev/model=m")
        assert [(one["kind"], one["apiVersion"], one["metadata"]["name"]) for one in found] == [
            ("ConfigMap", "v1", "one")
        ]

    async def test_a_merge_at_an_old_version_is_a_conflict(self, kube: Kube, namespace: str) -> None:
        old = await kube.apply(config_map(namespace, a="1"))
        await kube.apply(config_map(namespace, a="2"))
        patch = {"metadata": {"resourceVersion": old["metadata"]["resourceVersion"]}, "data": {"a": "3"}}
        with pytest.raises(Conflict):
            await kube.merge(CONFIG_MAP, namespace, "one", patch)

    async def test_a_merge_with_null_takes_out(self, kube: Kube, namespace: str) -> None:
        await kube.apply(config_map(namespace, a="1", b="2"))
        assert (await kube.merge(CONFIG_MAP, namespace, "one", {"data": {"a": None}}))["data"] == {"b": "2"}

    async def test_delete_takes_only_the_very_object(self, kube: Kube, namespace: str) -> None:
        found = await kube.apply(config_map(namespace, a="1"))
        with pytest.raises(Conflict):
            await kube.delete(CONFIG_MAP, namespace, "one", "11111111-2222-3333-4444-555555555555")
        await kube.delete(CONFIG_MAP, namespace, "one", uid_of(found))
        await kube.delete(CONFIG_MAP, namespace, "one", uid_of(found))
        with pytest.raises(NotFound):
            await kube.get(CONFIG_MAP, namespace, "one")

    async def test_replace_at_an_old_version_is_a_conflict(self, kube: Kube, namespace: str) -> None:
        lease = {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"name": "l", "namespace": namespace},
            "spec": {"holderIdentity": "a", "renewTime": "2026-01-01T00:00:00.000000Z"},
        }
        first = await kube.create(lease)
        first["spec"]["holderIdentity"] = "b"
        second = await kube.replace(first)
        assert second["spec"]["holderIdentity"] == "b"
        with pytest.raises(Conflict):
            await kube.replace(first)

    async def test_what_the_operator_may_do_can_be_asked(self, kube: Kube, namespace: str) -> None:
        assert await kube.allowed("create", SECRET, namespace)
