"""The model's tokenizer and chat template, read from its directory without transformers.

Knows: tokenizer.json, tokenizer_config.json, chat_template.jinja. Does not know: requests, limits of the
engine.

Long texts are encoded in a thread, so that one client's book does not stall another's stream; texts that
cannot fit whatever their tokens are need not be encoded at all (`fewest_tokens`).
"""

from __future__ import annotations

import asyncio
import datetime
import json
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jinja2.parser import Parser

INLINE_CHARS = 4096  # about a millisecond of encoding
REPLACEMENT = "\ufffd"


class TokenizerError(Exception):
    """The model directory's tokenizer cannot be used; the message names the file."""


class TemplateError(Exception):
    """The chat template is missing or refuses these messages; the message is for the client."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant tokens for training; when serving it is just its
    body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance's)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML characters, which models have never seen in their prompts."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A Hugging Face chat template. The template comes with the weights, so it runs in a sandbox that cannot
    change its arguments."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> str:
        """`extra` are the client's own template arguments; they cannot replace ours. Raises TemplateError."""
        arguments = {
            **extra,
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(arguments)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            # A template is a program: what it raises on odd messages is its way of refusing them.
            raise TemplateError(f"The model's chat template refused the messages: {error}") from error


def _unicode_bytes() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character (GPT-2's table); this reads them back."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}


class Tokenizer:
    def __init__(self, model: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        model.no_truncation()
        model.no_padding()
        self._model = model
        self._template = template
        self._added = {token: entry.content for token, entry in model.get_added_tokens_decoder().items()}
        self._special = frozenset(
            token for token, entry in model.get_added_tokens_decoder().items() if entry.special
        )
        self._byte_level = b'"ByteLevel"' in model.decoder.__getstate__() if model.decoder else False
        self._unicode_bytes = _unicode_bytes()
        self._anchor = model.encode("a", add_special_tokens=False).ids[:1]
        self._max_chars = _max_chars(model)
        self._texts: dict[int, tuple[str, bytes]] = {}

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: not found; the model directory must hold tokenizer.json")
        try:
            model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
            raise TokenizerError(f"{path}: {error}") from error
        return cls(model, _load_template(directory))

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= INLINE_CHARS:
            ids: list[int] = self._model.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return await asyncio.to_thread(self._encode_long, text, add_special_tokens)

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        """The library's `encode` holds the GIL (0.23); its batch calls do not."""
        ids: list[int] = self._model.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A bound from below that costs nothing; 0 where no bound is known."""
        return len(text) // self._max_chars if self._max_chars else 0

    def render_chat(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> str:
        """The prompt's text, special tokens included. Raises TemplateError."""
        if self._template is None:
            raise TemplateError("This model has no chat template; use /v1/completions.")
        return self._template.render(messages, extra)

    def is_special(self, token: int) -> bool:
        """Special tokens have no text in answers."""
        return token in self._special

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._model.decode(tokens, skip_special_tokens=True)
        return text

    def token_text(self, token: int) -> tuple[str, bytes]:
        """One token as logprobs show it: text, where bytes that are no whole character read U+FFFD, and its
        exact bytes."""
        if token not in self._texts:
            self._texts[token] = self._token_text(token)
        return self._texts[token]

    def _token_text(self, token: int) -> tuple[str, bytes]:
        if token in self._added:
            return self._added[token], self._added[token].encode()
        piece = self._model.id_to_token(token)
        if piece is None:  # inside the model's padded vocabulary, unknown to the tokenizer
            return "", b""
        if self._byte_level and all(char in self._unicode_bytes for char in piece):
            raw = bytes(self._unicode_bytes[char] for char in piece)
            return raw.decode(errors="replace"), raw
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # byte fallback
            raw = bytes([int(piece[3:5], 16)])
            return raw.decode(errors="replace"), raw
        # After a letter, so that a decoder which strips the first token's leading space leaves this one's.
        text = self.decode([*self._anchor, token])[len(self.decode(self._anchor)) :]
        return text, text.encode()


def _max_chars(model: tokenizers.Tokenizer) -> int | None:
    """The most characters of a text that one token can stand for; None where a rule of the tokenizer may drop
    any number.

    A byte-level piece has one character per byte, so no fewer than its text has.
    """
    if any(entry.lstrip or entry.rstrip for entry in model.get_added_tokens_decoder().values()):
        return None  # such a token swallows the spaces beside it
    longest = max(map(len, model.get_vocab()), default=0)
    if model.normalizer is None:
        return longest
    return (
        4 * longest if model.normalizer.__getstate__() == b'{"type":"NFC"}' else None
    )  # NFC composes up to 4


def _load_template(directory: Path) -> ChatTemplate | None:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    config_path = directory / "tokenizer_config.json"
    config = _read_json(config_path) if config_path.is_file() else {}
    source = config.get("chat_template")
    if isinstance(source, list):  # several, named
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    origin = config_path
    jinja_path = directory / "chat_template.jinja"
    if jinja_path.is_file():
        source, origin = jinja_path.read_text(encoding="utf-8"), jinja_path
    if source is None:
        return None
    try:
        return ChatTemplate(source, _special_tokens(config))
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"{origin}: the chat template does not compile: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its kind, each a string or an object with `content`."""
    out = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            out[key] = text
    return out


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: must be a JSON object")
    return content
