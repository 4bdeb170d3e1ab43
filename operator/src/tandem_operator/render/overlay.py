"""Lay one pod template over another, as `spec.<role>.podTemplate` promises.

Knows: how maps and lists of a pod merge. Does not know: what may be overlaid (`tandem_crds.pod_template`).

Maps merge, scalars of the overlay win, null removes. A list whose items have a `name` (or, for mounts, a
`mountPath`, and for ports a `containerPort`) merges by it; any other list is appended to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..objects import Obj

ALL = "*"
_KEY_OF = {"volumeMounts": "mountPath", "ports": "containerPort"}


def merge(template: Obj, overlay: Obj) -> Obj:
    """A new template; neither argument is changed."""
    merged = dict(template)
    for key, value in overlay.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(key, template.get(key), value)
    return merged


def installed(template: Obj, overlay: Obj) -> Obj:
    """`merge` with an installation's overlay. It holds for pods of every kind, whose containers' names
    differ: one named `*` in it stands for every container of ours.
    """
    spec = dict(overlay.get("spec") or {})
    below = dict(template.get("spec") or {})
    for key in ("containers", "initContainers"):
        given = spec.get(key)
        if not isinstance(given, list):
            continue
        spec[key] = [one for one in given if one.get("name") != ALL]
        for every in (one for one in given if one.get("name") == ALL):
            below[key] = [
                merge(container, {**every, "name": container["name"]}) for container in below.get(key, [])
            ]
        if not spec[key]:
            del spec[key]
    return merge({**template, "spec": below}, {**overlay, "spec": spec})


def _merged(key: str, below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return merge(below, above)
    if isinstance(below, list) and isinstance(above, list):
        return _list(_KEY_OF.get(key, "name"), below, above)
    return above


def _list(key: str, below: list[Any], above: list[Any]) -> list[Any]:
    if not all(isinstance(one, dict) and key in one for one in (*below, *above)):
        return below + [one for one in above if one not in below]
    merged = {one[key]: one for one in below}
    for one in above:
        merged[one[key]] = merge(merged[one[key]], one) if one[key] in merged else one
    return list(merged.values())
