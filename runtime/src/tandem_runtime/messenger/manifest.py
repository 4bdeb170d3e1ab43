"""The compatibility manifest: what prefill and decode must agree on before one byte of KV may move.

Knows: the fields, which must be equal, and the first that differs. Does not know: links, keys.

Sent whole in HELLO and HELLO_ACK, compared by both sides. Unknown fields are ignored, so that a later
version may add some; a missing field is a difference. Only equal layouts pair for now: unequal tensor
parallelism is refused here by name although counts and segments are written for it (`plan.py`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from . import wire

if TYPE_CHECKING:
    from tandem_crds.role_config import RoleConfig

    from ..kv import KVLayout

Manifest = dict[str, object]

LAYOUT = "layer,page,head,kv,token,dim"

# In the order in which a difference is reported: the cause before its consequences.
MUST_EQUAL = (
    "wire_version",
    "byte_order",
    "architecture",
    "weights_id",
    "layers",
    "kv_heads",
    "head_dim",
    "kv_dtype",
    "page_tokens",
    "layout",
    "tensor_parallel",
    "rank_kv_heads",
    "vocab_size",
    "tail",
    "kv_key",
)


class Difference(NamedTuple):
    field: str
    mine: str
    yours: str


def manifest_of(config: RoleConfig, layout: KVLayout) -> Manifest:
    model = config.model
    return {
        "wire_version": wire.VERSION,
        "byte_order": sys.byteorder,
        "architecture": model.architecture,
        "weights_id": model.weights_id,
        "layers": layout.layers,
        "kv_heads": model.kv_heads,
        "head_dim": layout.head_dim,
        "kv_dtype": layout.dtype,
        "page_tokens": layout.page_tokens,
        "layout": LAYOUT,
        "tensor_parallel": config.tensor_parallel,
        "rank_kv_heads": layout.kv_heads,
        "vocab_size": model.vocab_size,
        "tail": [],
        "kv_key": config.kv_key,
        "pages": layout.pages,  # may differ: the pool's stride, for whoever writes into it
    }


def difference(mine: Manifest, yours: Manifest) -> Difference | None:
    """The first field that must be equal and is not, with both values as text."""
    for field in MUST_EQUAL:
        if field not in yours or mine[field] != yours[field]:
            return Difference(field, _text(mine[field]), _text(yours.get(field, "absent")))
    return None


def pool_pages(manifest: Manifest) -> int:
    """Pages of a peer's pool. Raises WireError when the manifest does not say."""
    pages = manifest.get("pages")
    if not isinstance(pages, int) or isinstance(pages, bool) or not 0 < pages < 1 << 32:
        raise wire.WireError(f"manifest: pages is {pages!r}; it must be a positive number")
    return pages


def _text(value: object) -> str:
    return str(value)[:200]
