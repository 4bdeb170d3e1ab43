"""The lead's end of real rank processes, for tests: starts them, feeds them steps, holds what they lend."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from tandem_crds.role_config import EngineLimits, FabricConfig, KVConfig, Role, RoleConfig
from tandem_runtime.engine.request import SamplingParams
from tandem_runtime.engine.step import (
    AddSlot,
    FromRank,
    Loaded,
    LoadFailed,
    Loading,
    Row,
    Step,
    StepResult,
    ToRank,
)
from tandem_runtime.framing import FrameBuffer, frame
from tandem_runtime.models.facts import local_facts
from tandem_runtime.process import child_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES = 64
PAGE_TOKENS = 16
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def role_config(checkpoint: Path, role: Role, tensor_parallel: int = 1) -> RoleConfig:
    facts = local_facts(checkpoint, f"file://{checkpoint}")
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
