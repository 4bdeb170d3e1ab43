"""The API's arithmetic and the runtime's layout count the same bytes."""

from __future__ import annotations

import pytest

from tandem_crds import sizing
from tandem_crds.role_config import ModelFacts
from tandem_runtime import kv


def test_both_know_the_same_types() -> None:
    assert sizing.DTYPE_NBYTES == kv.DTYPE_NBYTES


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", kv.DTYPE_NBYTES)
def test_a_page_has_as_many_bytes_as_its_tokens(ranks: int, dtype: str) -> None:
    facts = ModelFacts.model_construct(layers=3, kv_heads=4, head_dim=16)
    layout = kv.KVLayout(3, 5, sizing.rank_kv_heads(facts, ranks), 32, 16, dtype)
    assert layout.pool_nbytes == 5 * 32 * sizing.kv_token_nbytes(facts, dtype, ranks)
