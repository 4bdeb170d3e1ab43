"""What a kubelet and a container would say of a pod that is not there.

Knows: the status that kubelets write; a worker's `/state` and a router's `/metrics`, served at the pod's own
address of the loopback range. Does not know: kwok, which answers for all other pods.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kubectl import Document, Kubectl

WORKER_PORT, ROUTER_PORT = 8001, 8000


@dataclass
class FakeContainer:
    """Answers at one pod's address until `close`. Without an answer set it refuses with 503."""

    address: str
    port: int
    state: dict[str, Any] | None = None
    arrivals: float | None = None
    _server: ThreadingHTTPServer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *words: object) -> None:
                pass

            def do_GET(self) -> None:
                text = owner.answer(self.path)
                self.send_response(200 if text else 503)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        self._server = ThreadingHTTPServer((self.address, self.port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}).start()

    def answer(self, path: str) -> str:
        if path == "/state" and self.state is not None:
            return json.dumps(self.state)
        if path == "/metrics" and self.arrivals is not None:
            name = "tandem_router_arrivals_total"
            return f'# TYPE tandem_router_arrivals counter\n{name}{{model="m"}} {self.arrivals}\n'
        return ""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def worker_state(role: str, **changes: Any) -> dict[str, Any]:
    requests = {"running": 0, "waiting": 0, "blocked": 0}
    document = {"version": 1, "role": role, "load_progress": 1.0, "provider": "tcp", "requests": requests}
    return {**document, "paired": True, "incompatible": {}, **changes}


def write_status(kubectl: Kubectl, pod: str, **status: Any) -> None:
    kubectl("patch", "pod", pod, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))


def running(pod: Document, address: str, *, ready: bool = True) -> dict[str, Any]:
    """The status of a pod whose containers run; `write_status` takes it."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    truth = "True" if ready else "False"
    # As written before it stands, since a merge patch replaces lists.
    kept = [one for one in pod["status"].get("conditions", []) if one["type"] == "PodScheduled"]
    types = ("Initialized", "ContainersReady", "Ready")
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": kept + [{"type": one, "status": truth, "lastTransitionTime": now} for one in types],
        "containerStatuses": [
            container_status(one["name"], one["image"], running={"startedAt": now}, ready=ready)
            for one in pod["spec"]["containers"]
        ],
    }


def container_status(name: str, image: str = "i", *, ready: bool = False, **state: Any) -> dict[str, Any]:
    """`state` is one of waiting, running and terminated."""
    return {"name": name, "image": image, "imageID": "", "ready": ready, "restartCount": 0, "state": state}
