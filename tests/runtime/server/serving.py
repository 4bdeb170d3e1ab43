"""A tiny real tokenizer, and a real server process in front of a scripted lead."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tokenizers
from scripted_lead import ScriptedLead, steps
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem_runtime.ipc import Limits
from tandem_runtime.process import child_environment

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "Stop strings end an answer; a stop may straddle tokens. Stop here, stop there.",
    "你好,世界。日本語のテキスト。한국어 문장입니다. 😀😃🎉👩‍👩‍👧 Zażółć gęślą jaźń. наука",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% if messages[-1].role == 'assistant' %}"
    '{{ raise_exception("The last message must not be the assistant\'s") }}{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SERVED = "tiny/model"
MAX_MODEL_LEN = 128
POOL_TOKENS = 160
SETTLE_TOKENS = 101  # no test has such a prompt


def train_byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
        ),
    )
    return tokenizer


def write_model(directory: Path) -> None:
    train_byte_level().save(str(directory / "tokenizer.json"))
    config = {"chat_template": CHATML, "eos_token": "<|im_end|>", "bos_token": {"content": "<|endoftext|>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def make_limits(vocab_size: int, eos: int) -> Limits:
    return Limits(SERVED, "", "decode", vocab_size, MAX_MODEL_LEN, POOL_TOKENS, [eos])


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The body of an error, exactly in OpenAI's shape."""
        content = json.loads(self.body)
        assert list(content) == ["error"], content
        assert set(content["error"]) == {"message", "type", "param", "code"}, content
        return dict(content["error"])

    @property
    def events(self) -> list[str]:
        """The data of a stream's events, whose framing is checked to the byte."""
        *events, rest = self.body.decode().split("\n\n")
        assert rest == ""
        assert all(event.startswith("data: ") and "\n" not in event for event in events), events
        return [event.removeprefix("data: ") for event in events]


class Server:
    """A server process in front of a scripted lead."""

    def __init__(self, run_dir: Path, model_dir: Path, limits: Limits) -> None:
        self.lead = ScriptedLead(str(run_dir / "lead.sock"), limits)
        port_file = run_dir / "port"
        self.log = run_dir / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-W", "error", "-m", "tandem_runtime.server"),
                    *("--lead-socket", str(run_dir / "lead.sock"), "--model-dir", str(model_dir)),
                    *("--served-name", SERVED, "--port-file", str(port_file)),
                ],
                env=child_environment({"OMP_NUM_THREADS": "1"}),
                stdout=log,
                stderr=log,
            )
        deadline_s = time.monotonic() + 30
        while not port_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                self.process.kill()
                self.process.wait()
                self.lead.close()
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()}")
            time.sleep(0.02)
        self.port = int(port_file.read_text())
        self.url = f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def request(self, method: str, path: str, body: bytes | dict[str, Any] | None = None) -> Reply:
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body)
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())

    def settle(self) -> None:
        """Forget what came before: reports precede the end of their answer and arrive in order, so after this
        one's report no older one is under way."""
        self.lead.reset()
        self.lead.script = lambda submit: steps(submit, [65])
        self.request("POST", "/v1/completions", {"model": SERVED, "prompt": [65] * SETTLE_TOKENS})
        while self.lead.report().prompt_tokens != SETTLE_TOKENS:
            pass
        self.lead.reset()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self.lead.close()
