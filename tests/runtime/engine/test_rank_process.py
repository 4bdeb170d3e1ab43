"""A rank as the lead sees it: a process behind a unix socket that lends its memory."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from rank_processes import PAGE_TOKENS, PAGES, Rank, answer, open_slot, role_config, start_ranks
from tiny_checkpoints import greedy, oracle, random_prompt

from tandem_crds.role_config import Role
from tandem_runtime.engine.checkpoint import read_config
from tandem_runtime.engine.step import Loaded, LoadFailed, Row, Shutdown, Step
from tandem_runtime.kv import KVLayout

if TYPE_CHECKING:
    from pathlib import Path


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
        # Nobody waits for the layers of a decode rank: its counter does not move, and wakes nobody.
        assert mmap.mmap(rank.fds[1], 8)[:8] == bytes(8)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(rank.fds[2])
        rank.send(Shutdown())
        assert rank.process.wait(timeout=60) == 0


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


def test_a_checkpoint_that_cannot_be_loaded_is_one_line_and_exit_status_2(
    tiny_llama: Path, tmp_path: Path
) -> None:
    config = role_config(tiny_llama, Role.DECODE)
    broken = config.model_copy(update={"model_path": str(tmp_path / "nothing")})
    with start_ranks(broken, tmp_path) as [rank]:
        failed = rank.loaded()
        assert failed == LoadFailed(f"{tmp_path / 'nothing'}: no such directory")
        assert rank.process.wait(timeout=60) == 2


def test_a_rank_ends_when_the_lead_hangs_up(tiny_llama: Path, tmp_path: Path) -> None:
    with start_ranks(role_config(tiny_llama, Role.DECODE), tmp_path) as [rank]:
        rank.loaded()
        rank.connection.shutdown(socket.SHUT_RDWR)
        assert rank.process.wait(timeout=60) == 0


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
