"""Text to token ids: off the loop when long, never when it cannot fit, and bytes for logprobs."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

import pytest
import tokenizers
from serving import CORPUS, train_byte_level
from tokenizers import AddedToken, normalizers

from tandem_runtime.server.tokenizer import INLINE_CHARS, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("length", [0, 1, INLINE_CHARS, INLINE_CHARS + 1, 20_000])
async def test_short_and_long_texts_have_the_same_tokens_as_in_the_library(
    tokenizer: Tokenizer, vocabulary: tokenizers.Tokenizer, length: int
) -> None:
    text = ("".join(CORPUS) * 100)[:length]
    assert await tokenizer.encode(text, add_special_tokens=True) == vocabulary.encode(text).ids


async def test_a_long_text_does_not_hold_the_loop(tokenizer: Tokenizer) -> None:
    """The loop turns many times while it is encoded; were the GIL held, not once."""
    encoding = asyncio.create_task(tokenizer.encode("lorem ipsum " * 40_000, add_special_tokens=True))
    begin_s = last_s = time.monotonic()
    longest_s = 0.0
    while not encoding.done():
        await asyncio.sleep(0.001)
        longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
    assert longest_s < (last_s - begin_s) / 2


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_the_bound_on_tokens_is_never_above_their_number(normalizer: normalizers.Normalizer | None) -> None:
    model = train_byte_level()
    if normalizer is not None:
        model.normalizer = normalizer
    tokenizer, draw = Tokenizer(model, None), random.Random(0)
    pieces = [model.decode([token], skip_special_tokens=False) for token in range(model.get_vocab_size())]
    longest = max(pieces, key=len)
    composed = "\u03b1\u0313\u0300\u0345"  # four characters that NFC makes one
    for text in (longest * 500, composed * 500, "".join(draw.choices(pieces, k=500))):
        fewest = tokenizer.fewest_tokens(text)
        assert 0 < fewest <= len(model.encode(text).ids)


def _swallowing(model: tokenizers.Tokenizer) -> None:
    model.add_special_tokens([AddedToken("<mask>", lstrip=True)])


def _stripping(model: tokenizers.Tokenizer) -> None:
    model.normalizer = normalizers.Strip()


@pytest.mark.parametrize("rule", [_swallowing, _stripping])
def test_there_is_no_bound_where_a_rule_may_drop_any_number_of_characters(
    rule: Callable[[tokenizers.Tokenizer], None],
) -> None:
    model = train_byte_level()
    rule(model)
    assert Tokenizer(model, None).fewest_tokens(" " * 10_000) == 0


def test_logprobs_show_a_tokens_exact_bytes(tokenizer: Tokenizer) -> None:
    model = train_byte_level()
    for token in range(model.get_vocab_size()):
        text, raw = tokenizer.token_text(token)
        assert raw.decode(errors="replace") == text
    for text in ("Paris", " 世界 😀"):
        raw = b"".join(tokenizer.token_text(token)[1] for token in model.encode(text).ids)
        assert raw == text.encode()


def test_ids_the_tokenizer_lacks_have_no_text(tokenizer: Tokenizer) -> None:
    """Checkpoints pad their vocabulary beyond the tokenizer's."""
    assert tokenizer.token_text(100_000) == ("", b"")
    assert tokenizer.decode([100_000]) == ""
