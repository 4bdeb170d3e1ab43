"""The operator as a process beside a control plane: what a pod of it would run, without a pod.

Knows: its flags, its settings file, its three endpoints. Does not know: what a test wants of it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from .cluster.commands import ClusterError, Wait
from .cluster.fake_nodes import TOLERATION

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

IMAGE = "registry.example/tandem/runtime:1"
# So that a test need not wait minutes for a scale-down.
FAST_SCALING = {"periodSeconds": 1, "rateWindowSeconds": 3, "staleSeconds": 4, "downWindowSeconds": 8}


class OperatorProcess:
    """`with OperatorProcess(kubeconfig, directory, namespaces=("a",)) as operator:`; ready when it begins,
    unless `ready` is False. Further settings are those of the settings file.
    """

    def __init__(
        self,
        kubeconfig: Path,
        directory: Path,
        *,
        namespaces: tuple[str, ...] = (),
        lease: str = "",
        installation: str = "e2e",
        ready: bool = True,
        **settings: Any,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._log, self._wait, self._port = directory / "operator.log", ready, _free_port()
        tolerations = {"spec": {"tolerations": [TOLERATION]}}
        document = {
            "runtime": {"image": IMAGE, "podTemplate": tolerations},
            "namespaces": namespaces,
            "scaling": FAST_SCALING,
            **settings,
        }
        file = directory / "settings.yaml"
        file.write_text(json.dumps(document))
        self._command = [
            *(sys.executable, "-m", "tandem_operator.main", "--settings", str(file)),
            *("--kubeconfig", str(kubeconfig), "--installation", installation),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *(["--lease-namespace", lease] if lease else ["--no-leader-election"]),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> OperatorProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        if self._wait:
            self.until_ready()

    def until_ready(self, seconds: float = 30) -> None:
        wait = Wait(seconds, "the operator ready")
        while (answer := self.get("/readyz")) != "ok":
            if self.exit_code is not None:
                raise ClusterError(f"the operator has ended with {self.exit_code}:\n{self.log()[-2000:]}")
            wait.again(answer)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self._process.wait(timeout=40)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def log(self) -> str:
        return self._log.read_text()

    def get(self, path: str) -> str:
        """The answer's text, whatever its status; why there is none, if there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()
        except OSError as error:
            return str(error)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with those labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics"))
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def rss_nbytes(self) -> int:
        with open(f"/proc/{self.pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
