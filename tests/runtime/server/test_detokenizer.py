"""Characters and stop strings that straddle tokens, against the library's decoding of the whole."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest
import tokenizers
from serving import CORPUS
from tokenizers import decoders, models, normalizers

from tandem_runtime.server.detokenizer import MAX_WINDOW, Detokenizer, StopFilter, TextStream
from tandem_runtime.server.tokenizer import REPLACEMENT, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXTS = [
    *CORPUS,
    "plain ascii",
    "混合 mixed テキスト 😀 emoji 👩‍👩‍👧‍👦 family 🏳️‍🌈 flag",
    "\u0301 combining first, e\u0301 combining later, a zero width joiner \u200d alone",
    "  leading spaces\n\n\tand tabs ",
    "\ufffd is a character too \ufffd",
    "ﷺ𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
]


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As Llama 2's: words begin with U+2581, unknown characters fall back to byte tokens, the first space is
    stripped."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -10.0) for byte in range(256))]
    pieces += [
        (piece, -1.0) for piece in ("▁", "▁the", "▁Paris", "▁is", "a", "b", "e", "s", "▁中", "中", "é", "\n")
    ]
    model = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(model, None)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer._encode_long(text, True)


def streamed(tokenizer: Tokenizer, tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*(stream.push(token) for token in tokens), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_the_joined_deltas_of_a_text_are_the_text(
    tokenizer: Tokenizer, vocabulary: tokenizers.Tokenizer, text: str
) -> None:
    assert "".join(streamed(tokenizer, vocabulary.encode(text).ids)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_no_delta_of_a_text_holds_a_broken_character(
    tokenizer: Tokenizer, vocabulary: tokenizers.Tokenizer, text: str
) -> None:
    broken = sum(delta.count(REPLACEMENT) for delta in streamed(tokenizer, vocabulary.encode(text).ids))
    assert broken == text.count(REPLACEMENT)


def test_every_character_is_given_with_the_token_that_completes_it(
    tokenizer: Tokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    """Nothing is held longer than it must be: after each token all whole characters are out."""
    text = "Zażółć 世界 😀 done"
    raw = text.encode()
    stream, given, nbytes = TextStream(tokenizer, []), "", 0
    for token in vocabulary.encode(text).ids:
        given += stream.push(token)
        nbytes += len(tokenizer.token_text(token)[1])
        assert given == raw[:nbytes].decode(errors="ignore")


@pytest.mark.parametrize("seed", range(200))
def test_the_joined_deltas_of_random_tokens_are_their_full_decode(
    tokenizer: Tokenizer, vocabulary: tokenizers.Tokenizer, seed: int
) -> None:
    """Random bytes are invalid UTF-8 most of the time, in runs; special tokens have no text."""
    draw = random.Random(seed)
    size = vocabulary.get_vocab_size() if seed % 2 else 260  # single bytes only, or also merged ones
    tokens = [draw.randrange(size) for _ in range(draw.randrange(1, 120))]
    prompt = [draw.randrange(size) for _ in range(draw.randrange(0, 12))]
    assert "".join(streamed(tokenizer, tokens, prompt)) == vocabulary.decode(tokens, skip_special_tokens=True)


def test_a_byte_that_never_becomes_a_character_neither_stops_the_stream_nor_grows_its_window(
    tokenizer: Tokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    continuation = vocabulary.token_to_id("Ģ")  # byte 0x80 in GPT-2's alphabet
    stream, given = TextStream(tokenizer, []), ""
    for n in range(1, 500):
        given += stream.push(continuation)
        assert len(given) >= n - 4
        assert len(stream._window) <= MAX_WINDOW
    assert given + stream.flush() == REPLACEMENT * 499


def test_a_character_after_a_long_run_of_broken_bytes_is_whole(
    tokenizer: Tokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    broken = [vocabulary.token_to_id("Ģ")] * 50
    emoji = [vocabulary.token_to_id(char) for char in "ðŁĺĢ"]  # the bytes of 😀, one by one
    assert "".join(streamed(tokenizer, [*broken, *emoji])) == REPLACEMENT * 50 + "😀"


def test_a_first_word_keeps_its_space_after_a_prompt(byte_fallback: Tokenizer) -> None:
    prompt = ids(byte_fallback, "the")
    paris = ids(byte_fallback, "Paris")
    assert streamed(byte_fallback, paris, prompt)[0] == " Paris"
    assert streamed(byte_fallback, paris)[0] == "Paris"


@pytest.mark.parametrize("text", ["the Paris 中中 a", "a 世界 😀😀 b", "é世\n世 the"])
def test_byte_fallback_characters_are_whole(byte_fallback: Tokenizer, text: str) -> None:
    tokens = ids(byte_fallback, text)
    deltas = streamed(byte_fallback, tokens)
    assert "".join(deltas) == text
    assert not any(REPLACEMENT in delta for delta in deltas)


def test_a_prompt_that_ends_in_byte_tokens_does_not_spoil_the_first_character(
    byte_fallback: Tokenizer,
) -> None:
    """A decoder reads a run of byte tokens as a whole: half a character before ours would break both."""
    prompt = ids(byte_fallback, "世界世界世界")
    assert "".join(streamed(byte_fallback, ids(byte_fallback, "界")[1:], prompt)) == "界"


@pytest.mark.parametrize("seed", range(50))
def test_random_byte_fallback_tokens_neither_raise_nor_run_away(byte_fallback: Tokenizer, seed: int) -> None:
    """Here a later byte can spoil what was a character, so the full decode is not always reachable without
    taking text back."""
    draw = random.Random(seed)
    tokens = [draw.randrange(1, 269) for _ in range(200)]
    stream = TextStream(byte_fallback, [])
    given = "".join(stream.push(token) for token in tokens) + stream.flush()
    assert len(stream._window) <= MAX_WINDOW
    assert abs(len(given) - len(byte_fallback.decode(tokens))) < len(tokens) / 2


def cut(text: str, borders: Sequence[int]) -> list[str]:
    edges = [0, *sorted(borders), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def through(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], bool]:
    filter_ = StopFilter(stops)
    shown = []
    for piece in pieces:
        text, stopped = filter_.push(piece)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, filter_.flush()], False


STOPS = [
    ["STOP"],
    ["\n\n"],
    ["aab", "ab"],
    ["abc", "b"],
    ["aaaa"],
    ["abab", "bab"],
    ["世界", "界"],
    ["a", "ab", "abc", "b"],
]


@pytest.mark.parametrize("stops", STOPS, ids=repr)
def test_where_a_text_stops_does_not_depend_on_token_borders(stops: list[str]) -> None:
    """Against the definition: the match that ends first, and of those the longest."""
    draw = random.Random(repr(stops))
    alphabet = sorted({*"".join(stops), "x"})
    for _ in range(400):
        text = "".join(draw.choice(alphabet) for _ in range(draw.randrange(0, 16)))
        ends = [
            (end, end - len(stop))
            for stop in stops
            for end in range(len(text) + 1)
            if text[:end].endswith(stop)
        ]
        expected = text[: min(ends)[1]] if ends else text
        pieces = cut(text, [draw.randrange(0, len(text) + 1) for _ in range(draw.randrange(0, 8))])
        shown, stopped = through(stops, pieces)
        assert ("".join(shown), stopped) == (expected, bool(ends)), (text, pieces)


@pytest.mark.parametrize("stops", STOPS, ids=repr)
def test_only_the_beginning_of_a_stop_is_held_back(stops: list[str]) -> None:
    draw = random.Random(repr(stops))
    alphabet = sorted({*"".join(stops), "x"})
    for _ in range(400):
        filter_, seen, shown = StopFilter(stops), "", ""
        for _ in range(12):
            piece = draw.choice(alphabet)
            seen += piece
            text, stopped = filter_.push(piece)
            shown += text
            if stopped:
                break
            tails = [seen[-n:] for n in range(1, len(seen) + 1)]
            held = max((len(t) for t in tails if any(s.startswith(t) and s != t for s in stops)), default=0)
            assert shown == seen[: len(seen) - held], (seen, shown)


def test_a_stop_string_that_came_too_early_is_text_once_and_for_all() -> None:
    filter_ = StopFilter(["ab"])
    assert filter_.push("ab", may_stop=False) == ("ab", False)
    filter_ = StopFilter(["ab", "abc"])
    assert filter_.push("ab", may_stop=False) == ("", False)  # it may still become the other
    assert filter_.push("x") == ("abx", False)


def test_a_stop_string_across_tokens_is_never_shown(
    tokenizer: Tokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    tokens = vocabulary.encode("The answer. Stop here and there").ids
    detokenizer, shown = Detokenizer(tokenizer, [], ["op he"], 0), []
    for token in tokens:
        shown.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    assert "".join(shown) == "The answer. St"
    assert detokenizer.stopped


def test_before_min_tokens_a_stop_string_does_not_count_and_is_shown(
    tokenizer: Tokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    tokens = [vocabulary.token_to_id(char) for char in "abxabx"]
    detokenizer, shown = Detokenizer(tokenizer, [], ["ab"], 3), ""
    for n, token in enumerate(tokens, 1):
        shown += detokenizer.push(token)
        assert detokenizer.stopped == (n == 5)
        if detokenizer.stopped:
            break
    assert shown == "abx"


def test_what_was_held_back_is_given_at_the_end(
    tokenizer: Tokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    detokenizer = Detokenizer(tokenizer, [], ["Stop now"], 0)
    shown = "".join(detokenizer.push(token) for token in vocabulary.encode("Please Stop").ids)
    assert shown == "Please "
    assert shown + detokenizer.flush() == "Please Stop"
    assert not detokenizer.stopped


def test_offsets_count_the_characters_before_a_token(
    tokenizer: Tokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    text = "Stop 世界 😀!"
    detokenizer, offsets = Detokenizer(tokenizer, [], ["never"], 0), []
    tokens = vocabulary.encode(text).ids
    for token in tokens:
        offsets.append(detokenizer.num_chars)
        detokenizer.push(token)
    nbytes = 0
    for token, offset in zip(tokens, offsets, strict=True):
        assert offset == len(text.encode()[:nbytes].decode(errors="ignore"))
        nbytes += len(tokenizer.token_text(token)[1])
    assert detokenizer.num_chars == len(text)
