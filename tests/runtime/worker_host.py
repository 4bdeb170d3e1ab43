"""A second process for workers that must not share one with their peers: `python worker_host.py`, one JSON
command a line.

shm needs it: libfabric maps a peer's memory a second time, except when the peer is in the same process; there
the peer's closing takes the memory away from under whoever still sends to it. The process is kept for the
session, because it imports torch.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from local_worker import LocalWorker

from tandem_crds.role_config import RoleConfig
from tandem_runtime.process import die_with_parent


async def serve() -> None:
    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))

    threading.Thread(target=read, daemon=True).start()
    workers: dict[str, LocalWorker] = {}
    while True:
        command = await commands.get()
        name = command["name"]
        match command["do"]:
            case "start":
                config = RoleConfig.model_validate(command["config"])
                workers[name] = LocalWorker(config, Path(command["directory"]), Path(command["peers"]), name)
                await workers[name].start()
                answer: dict[str, Any] = {}
            case "state":
                answer = workers[name].state()
            case "check":
                workers[name].check()
                answer = {}
            case "stop":
                await workers.pop(name).stop()
                answer = {}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    die_with_parent()
    torch.set_num_threads(1)
    asyncio.run(serve())
