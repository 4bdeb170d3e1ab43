"""The process: how it starts, what it says when it cannot, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from scripted_lead import ScriptedLead, steps
from serving import SERVED, Server, make_limits

from tandem_runtime.process import child_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VOCABULARY = 400
BODY = {"model": SERVED, "prompt": "x"}


@pytest.fixture
def own(tmp_path: Path, model_dir: Path, eos: int) -> Iterator[Server]:
    """A server that this test may end."""
    server = Server(tmp_path, model_dir, make_limits(VOCABULARY, eos))
    yield server
    if server.process.poll() is None:
        server.process.kill()
    server.process.wait(10)
    server.lead.close()


def command(tmp_path: Path, model_dir: Path, *more: str) -> list[str]:
    return [
        *(
            sys.executable,
            "-W",
            "error",
            "-m",
            "tandem_runtime.server",
            "--lead-socket",
            str(tmp_path / "lead.sock"),
        ),
        *("--model-dir", str(model_dir), "--served-name", SERVED, *more),
    ]


def in_thread(call: Any) -> tuple[threading.Thread, list[Any]]:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    return thread, result


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_lead_is_503_before_the_first_token_and_the_process_exits_1(own: Server, stream: bool) -> None:
    thread, replies = in_thread(lambda: own.request("POST", "/v1/completions", BODY | {"stream": stream}))
    own.lead.submit()
    own.lead.hang_up()
    assert own.process.wait(10) == 1
    thread.join()
    (reply,) = replies
    assert (reply.status, reply.error["code"], reply.error["type"]) == (503, "engine_lost", "server_error")


def test_a_lost_lead_ends_a_stream_with_an_error_event(own: Server) -> None:
    own.lead.script = lambda submit: steps(submit, [65, 66], None)
    connection = own.connect()
    connection.request("POST", "/v1/completions", json.dumps(BODY | {"stream": True}))
    response = connection.getresponse()
    assert response.status == 200
    first = response.readline()
    own.lead.hang_up()
    events = (first + response.read()).decode().strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_lost"
    assert own.process.wait(10) == 1
    connection.close()


def test_sigterm_lets_open_requests_finish_and_takes_no_new_ones(own: Server, eos: int) -> None:
    thread, replies = in_thread(lambda: own.request("POST", "/v1/completions", BODY))
    submit = own.lead.submit()
    own.process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", own.port), timeout=1).close()
        except ConnectionRefusedError:
            break
        time.sleep(0.02)
    else:
        pytest.fail("the server still listens")
    assert own.process.poll() is None
    own.lead.send(*steps(submit, [65, eos]))
    assert own.process.wait(10) == 0
    thread.join()
    assert replies[0].status == 200


def test_the_server_waits_for_a_lead_that_is_not_there_yet(tmp_path: Path, model_dir: Path, eos: int) -> None:
    port_file = tmp_path / "port"
    with subprocess.Popen(
        command(tmp_path, model_dir, "--port-file", str(port_file)), env=child_environment()
    ) as process:
        time.sleep(0.5)  # it may or may not be trying to connect by now; both must work
        assert not port_file.exists()
        lead = ScriptedLead(str(tmp_path / "lead.sock"), make_limits(VOCABULARY, eos))
        deadline_s = time.monotonic() + 20
        while not port_file.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert int(port_file.read_text()) > 0
        assert [path.name for path in tmp_path.glob("port*")] == ["port"]
        process.terminate()
        assert process.wait(10) == 0
    lead.close()


def test_a_taken_port_is_named_and_exits_2(tmp_path: Path, model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            command(tmp_path, model_dir, "--port", str(port)),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode == 2
    assert f"127.0.0.1 port {port}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_model_without_a_tokenizer_is_named_and_exits_2(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, tmp_path), capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert f"{tmp_path / 'tokenizer.json'}: not found" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_server_dies_with_its_parent(tmp_path: Path, model_dir: Path, eos: int) -> None:
    lead = ScriptedLead(str(tmp_path / "lead.sock"), make_limits(VOCABULARY, eos))
    pid_file, port_file = tmp_path / "pid", tmp_path / "port"
    parent = subprocess.Popen(
        [
            sys.executable, "-c",
            "import pathlib, subprocess, sys, time; from tandem_runtime.process import child_environment\n"
            "child = subprocess.Popen(sys.argv[2:], env=child_environment())\n"
            "pathlib.Path(sys.argv[1]).write_text(str(child.pid)); time.sleep(60)",
            str(pid_file), *command(tmp_path, model_dir, "--port-file", str(port_file)),
        ]
    )  # fmt: skip
    deadline_s = time.monotonic() + 30
    while not port_file.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    pid = int(pid_file.read_text())
    while _alive(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    lead.close()


def _alive(pid: int) -> bool:
    """A zombie that nobody has reaped is dead."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
