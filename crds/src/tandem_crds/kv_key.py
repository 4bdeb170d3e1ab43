"""The KV key: two pods may exchange KV pages only if their keys are equal.

Everything that gives the bytes of a page their meaning goes in, and nothing else: the parallel degree of a
role or its pool's size may differ between peers, weights or types may not.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .role_config import ModelFacts

# Per layer `[page, head, K|V, token, dim]`. Renamed whenever the meaning of a page's bytes changes.
LAYOUT = "page-head-kv-token-dim.1"

# Goes into labels and, shortened, into names.
LENGTH = 16


def kv_key(facts: ModelFacts, dtype: str, page_tokens: int) -> str:
    """16 hexadecimal digits; `dtype` is the KV cache's, resolved."""
    parts = (
        facts.weights_id,
        dtype,
        LAYOUT,
        page_tokens,
        facts.layers,
        facts.kv_heads,
        facts.head_dim,
        *([facts.kv_latent] if facts.kv_latent else []),
        facts.wire_version,
    )
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:LENGTH]
