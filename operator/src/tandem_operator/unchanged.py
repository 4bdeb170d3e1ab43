"""Whether an object that exists is already as wanted, so that nothing needs to be written.

Knows: how a server defaults, drops and re-orders. Does not know: any field's meaning.

A stamped body carries its own hash as the annotation `tandem.dev/applied`. Contained in the object, it proves
two things: nobody changed what we sent, and we sent nothing else before, which would have to go.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from tandem_crds import names, quantity

if TYPE_CHECKING:
    from .objects import Obj

ANNOTATION_APPLIED = f"{names.RESERVED_PREFIX}applied"


def stamped(body: Obj) -> Obj:
    """The body with its own hash as an annotation."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
    metadata = body["metadata"]
    annotations = {**(metadata.get("annotations") or {}), ANNOTATION_APPLIED: digest}
    return {**body, "metadata": {**metadata, "annotations": annotations}}


def contains(found: Any, wanted: Any) -> bool:
    """Everything in `wanted` is in `found`, which may have more: defaults, and fields of other owners."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return not wanted and found is None
        return all(contains(found.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list | tuple):
        if not isinstance(found, list | tuple):
            return not wanted and found is None
        return len(found) >= len(wanted) and _items(found, wanted)
    if found == wanted and type(found) is type(wanted):
        return True
    return _same_quantity(found, wanted)


def _items(found: Any, wanted: Any) -> bool:
    """Maps by their name, where they have one; anything else by its place, with nothing added."""
    if all(isinstance(one, dict) and "name" in one for one in (*found, *wanted)):
        by_name = {one["name"]: one for one in found}
        return all(one["name"] in by_name and contains(by_name[one["name"]], one) for one in wanted)
    return len(found) == len(wanted) and all(map(contains, found, wanted))


def _same_quantity(found: Any, wanted: Any) -> bool:
    """`1000m` is stored as `1`, `0.5` as `500m`; a number may be stored as a string."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return False
    if not isinstance(found, str | int) or not isinstance(wanted, str | int):
        return False
    try:
        return quantity.parse(str(found)) == quantity.parse(str(wanted))
    except ValueError:
        return False
