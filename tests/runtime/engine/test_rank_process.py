"""A rank as the lead sees it: a process behind a unix socket that lends its memory."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from tiny_checkpoints import greedy, oracle, random_prompt

from tandem_crds.role_config import EngineLimits, FabricConfig, KVConfig, Role, RoleConfig
from tandem_runtime.engine.checkpoint import model_facts, read_config
from tandem_runtime.engine.request import SamplingParams
from tandem_runtime.engine.step import (
    AddSlot,
    FromRank,
    Loaded,
    LoadFailed,
    Loading,
    Row,
    Shutdown,
    Step,
    StepResult,
    ToRank,
)
from tandem_runtime.framing import FrameBuffer, frame
from tandem_runtime.kv import KVLayout
from tandem_runtime.process import child_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES = 64
PAGE_TOKENS = 16
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def role_config(checkpoint: Path, role: Role, tensor_parallel: int = 1) -> RoleConfig:
    facts = model_facts(checkpoint, f"file://{checkpoint}", wire_version=1)
    return RoleConfig(
        name="tiny",
        served_name="tiny",
        role=role,
        device="cpu",
        model=facts,
        model_path=str(checkpoint),
        tensor_parallel=tensor_parallel,
        engine=EngineLimits(dtype="float32", max_model_len=1024, max_batched_tokens=512, max_sequences=16),
        kv=KVConfig(dtype="float32", page_tokens=PAGE_TOKENS, pages=PAGES),
        kv_key="test",
        fabric=FabricConfig(providers=["net"]),
    )


@dataclass
class Rank:
    """The lead's end of one rank."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    buffer: FrameBuffer = field(default_factory=FrameBuffer)
    inbox: list[FromRank] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    loading: list[Loading] = field(default_factory=list)

    def send(self, message: ToRank) -> None:
        self.connection.sendall(frame(msgspec.msgpack.encode(message)))

    def receive(self) -> FromRank:
        while not self.inbox:
            data, fds, _, _ = socket.recv_fds(self.connection, 1 << 16, 3)
            assert data, "the rank closed the connection"
            self.fds += fds
            self.inbox += [
                msgspec.msgpack.decode(payload, type=FromRank) for payload in self.buffer.feed(data)
            ]
        return self.inbox.pop(0)

    def loaded(self) -> Loaded | LoadFailed:
        while isinstance(message := self.receive(), Loading):
            self.loading.append(message)
        assert isinstance(message, (Loaded, LoadFailed))
        return message

    def step(self, step: Step) -> StepResult:
        self.send(step)
        return self.result()

    def result(self) -> StepResult:
        message = self.receive()
        assert isinstance(message, StepResult)
        return message


@contextmanager
def start_ranks(config: RoleConfig, directory: Path) -> Iterator[list[Rank]]:
    """All ranks of a replica, connected; killed and reaped at the end if they still run."""
    directory.mkdir(exist_ok=True)
    path = directory / "role.json"
    path.write_text(config.model_dump_json())
    environment = child_environment({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
    processes = []
    ranks = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(directory / "rank.sock"))
        listener.listen()
        listener.settimeout(60)
        for index in range(config.tensor_parallel):
            command = [sys.executable, "-m", "tandem_runtime.engine.rank", "--config", str(path)]
            command += ["--rank", str(index), "--socket", str(directory / "rank.sock")]
            command += ["--store", str(directory / "store"), "--threads", "1"]
            processes.append(subprocess.Popen(command, env=environment))
        try:
            for process in processes:
                connection, _ = listener.accept()
                connection.settimeout(60)
                ranks.append(Rank(process, connection))
            yield ranks
        finally:
            for rank in ranks:
                rank.connection.close()
                for fd in rank.fds:
                    os.close(fd)
            for process in processes:
                process.kill()
                process.wait()


def open_slot(slot: int, prompt: list[int], params: SamplingParams | None = GREEDY) -> AddSlot:
    return AddSlot(slot, params, prompt, len(prompt))


def answer(ranks: list[Rank], prompt: list[int], tokens: int) -> list[int]:
    """Greedy ids from a replica, fed as a lead feeds them; a new page is given when one is needed."""
    pages = list(range(-(-(len(prompt) + tokens) // PAGE_TOKENS)))
    output: list[int] = []
    start, given = 0, 0
    while len(output) < tokens:
        row_tokens = (prompt + output)[start:]
        need = -(-(start + len(row_tokens)) // PAGE_TOKENS)
        step = Step(
            step_id=len(output),
            counter_base=0,
            drops=[],
            adds=[] if output else [open_slot(3, prompt)],
            rows=[Row(3, start, row_tokens, pages[given:need], True)],
        )
        for rank in ranks:
            rank.send(step)
        results = [rank.result() for rank in ranks]
        assert [result.error for result in results] == [None] * len(ranks)
        output += results[0].tokens
        start += len(row_tokens)
        given = need
    return output


def test_a_rank_answers_as_transformers_does_and_exits_when_told(tiny_llama: Path, tmp_path: Path) -> None:
    with start_ranks(role_config(tiny_llama, Role.DECODE), tmp_path) as [rank]:
        loaded = rank.loaded()
        assert isinstance(loaded, Loaded)
        assert (loaded.rank, loaded.pid) == (0, rank.process.pid)
        assert rank.loading[-1].done_nbytes == rank.loading[-1].total_nbytes
        assert 2 <= len(rank.loading) <= 26
        assert len(rank.fds) == 3
        prompt = random_prompt(33)
        assert answer([rank], prompt, 20) == greedy(oracle(tiny_llama), prompt, 20)
        rank.send(Shutdown())
        assert rank.process.wait(timeout=20) == 0


def test_the_keys_and_values_of_a_prefill_are_in_the_memory_that_the_lead_got(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    prompt = random_prompt(40)
    with start_ranks(role_config(tiny_qwen3, Role.PREFILL), tmp_path) as [rank]:
        loaded = rank.loaded()
        assert isinstance(loaded, Loaded)
        model = read_config(tiny_qwen3)
        layout = KVLayout(model.layers, PAGES, model.kv_heads, PAGE_TOKENS, model.head_dim, "float32")
        assert loaded.pool_nbytes == layout.pool_nbytes == os.fstat(rank.fds[0]).st_size
        memory = mmap.mmap(rank.fds[0], layout.pool_nbytes)
        counter = mmap.mmap(rank.fds[1], 8)
        pages = [9, 2, 30]
        base = 10 * layout.layers
        rows = [Row(0, 0, prompt[:39], pages, False)]
        result = rank.step(Step(0, base, [], [open_slot(0, prompt, None)], rows))
        assert (result.error, result.tokens) == (None, [])
        assert int.from_bytes(counter[:8], "little") == base + layout.layers
        assert os.eventfd_read(rank.fds[2]) == 1 + layout.layers

    cache = oracle(tiny_qwen3)(torch.tensor([prompt[:39]]), use_cache=True).past_key_values
    # Read page by page at the byte offsets that a peer computes, not through our own view of the pool.
    for layer in range(layout.layers):
        for head in range(layout.kv_heads):
            for index, page in enumerate(pages):
                offset = layout.page_offset(layer, page, head)
                run = torch.frombuffer(
                    memory, dtype=torch.float32, offset=offset, count=2 * PAGE_TOKENS * layout.head_dim
                )
                k, v = run.view(2, PAGE_TOKENS, layout.head_dim)
                tokens = slice(index * PAGE_TOKENS, min(39, (index + 1) * PAGE_TOKENS))
                expected_k = cache.layers[layer].keys[0, head, tokens]
                expected_v = cache.layers[layer].values[0, head, tokens]
                torch.testing.assert_close(k[: len(expected_k)], expected_k)
                torch.testing.assert_close(v[: len(expected_v)], expected_v)


def test_a_decode_rank_leaves_the_layer_counter_alone(tiny_llama: Path, tmp_path: Path) -> None:
    with start_ranks(role_config(tiny_llama, Role.DECODE), tmp_path) as [rank]:
        rank.loaded()
        prompt = random_prompt(5)
        rank.step(Step(0, 0, [], [open_slot(0, prompt)], [Row(0, 0, prompt, [0], True)]))
        assert mmap.mmap(rank.fds[1], 8)[:8] == bytes(8)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(rank.fds[2])


def test_two_ranks_answer_as_one(tiny_llama: Path, tmp_path: Path) -> None:
    config = role_config(tiny_llama, Role.DECODE, tensor_parallel=2)
    with start_ranks(config, tmp_path) as ranks:
        by_rank = {}
        for rank in ranks:
            loaded = rank.loaded()
            assert isinstance(loaded, Loaded)
            by_rank[loaded.rank] = rank
            assert len(rank.fds) == (3 if loaded.rank == 0 else 1)
        prompt = random_prompt(17)
        assert answer([by_rank[0], by_rank[1]], prompt, 12) == greedy(oracle(tiny_llama), prompt, 12)


def test_a_checkpoint_that_cannot_be_loaded_is_one_line_and_exit_status_2(
    tiny_llama: Path, tmp_path: Path
) -> None:
    config = role_config(tiny_llama, Role.DECODE)
    broken = config.model_copy(update={"model_path": str(tmp_path / "nothing")})
    with start_ranks(broken, tmp_path) as [rank]:
        failed = rank.loaded()
        assert failed == LoadFailed(f"{tmp_path / 'nothing'}: no such directory")
        assert rank.process.wait(timeout=20) == 2


def test_a_rank_ends_when_the_lead_hangs_up(tiny_llama: Path, tmp_path: Path) -> None:
    with start_ranks(role_config(tiny_llama, Role.DECODE), tmp_path) as [rank]:
        rank.loaded()
        rank.connection.shutdown(socket.SHUT_RDWR)
        assert rank.process.wait(timeout=20) == 0


def test_a_rank_is_killed_when_its_parent_dies(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "role.json"
    path.write_text(role_config(tiny_llama, Role.DECODE).model_dump_json())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "rank.sock"))
        listener.listen()
        listener.settimeout(60)
        # The connection stays open, so the death of the parent is the only reason to end.
        script = (
            "import subprocess, sys, time\n"
            "from tandem_runtime.process import child_environment\n"
            "subprocess.Popen(sys.argv[1:], env=child_environment())\n"
            "time.sleep(60)\n"
        )
        command = [sys.executable, "-m", "tandem_runtime.engine.rank", "--config", str(path), "--rank", "0"]
        command += [
            "--socket",
            str(tmp_path / "rank.sock"),
            "--store",
            str(tmp_path / "store"),
            "--threads",
            "1",
        ]
        parent = subprocess.Popen([sys.executable, "-c", script, *command])
        try:
            connection, _ = listener.accept()
            connection.settimeout(60)
            rank = Rank(parent, connection)
            loaded = rank.loaded()
            assert isinstance(loaded, Loaded)
            parent.send_signal(signal.SIGKILL)
            assert connection.recv(1) == b""
            for fd in rank.fds:
                os.close(fd)
            connection.close()
        finally:
            parent.kill()
            parent.wait()
