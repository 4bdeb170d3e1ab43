"""An immutable ConfigMap: what a revision or an inspection froze."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..objects import CONFIG_MAP

if TYPE_CHECKING:
    from ..objects import Obj


def config_map(name: str, labels: dict[str, str], data: dict[str, str]) -> Obj:
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {"name": name, "labels": labels},
        "immutable": True,
        "data": data,
    }
