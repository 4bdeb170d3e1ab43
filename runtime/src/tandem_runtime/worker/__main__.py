"""A pod's main process: starts lead, ranks and server, and ends when one of them does.

    python -m tandem_runtime.worker --config role.json        (who this worker is: TANDEM_* variables, see
    `instance.py`)

It loads neither torch nor the fabric. Its exit status tells why it ended: 0 drained after SIGTERM, 2 the
configuration or the model cannot work, 1 a process died. SIGTERM drains (the lead decides when it is done);
SIGINT stops at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
from pydantic import ValidationError

from tandem_crds.role_config import Role, RoleConfig

from ..instance import Instance
from ..process import child_environment, command, die_with_parent, last_words

log = logging.getLogger("tandem.pod")
FAREWELL_S = 1.0
EXIT_CONFIGURATION = 2


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the pod."""

    name: str
    arguments: list[str]
    environment: dict[str, str]


def parts(config: RoleConfig, config_path: Path, instance: Instance) -> list[Part]:
    """The processes of this worker: lead, ranks, and a server where clients are served."""
    run_dir = Path(instance.run_dir)
    lead = Part(
        "lead", command("tandem_runtime.worker.lead", "--config", str(config_path)), instance.environment()
    )
    # OpenMP threads that spin between steps would take the cores from the progress threads and from the other
    # ranks.
    threads = {
        "OMP_NUM_THREADS": str(instance.threads_per_rank),
        "OMP_WAIT_POLICY": "PASSIVE",
        "MKL_NUM_THREADS": str(instance.threads_per_rank),
    }
    ranks = [
        Part(
            f"rank {index}",
            command(
                "tandem_runtime.engine.rank", "--config", str(config_path), "--rank", str(index),
                "--socket", str(run_dir / "rank.sock"), "--store", str(run_dir / "store"),
                "--threads", str(instance.threads_per_rank),
            ),
            threads,
        )
        for index in range(config.tensor_parallel)
    ]  # fmt: skip
    if config.role is Role.PREFILL:
        return [lead, *ranks]
    server = Part(
        "server",
        command(
            "tandem_runtime.server", "--lead-socket", str(run_dir / "lead.sock"),
            "--model-dir", config.model_path, "--host", instance.host, "--port", str(instance.server_port),
            "--port-file", str(run_dir / "server-port"), "--served-name", config.served_name,
        ),
        {},
    )  # fmt: skip
    return [lead, *ranks, server]


async def run(config: RoleConfig, config_path: Path, instance: Instance) -> int:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    signals: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        signals.append(number)
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    stop = asyncio.create_task(stopped.wait())
    children: dict[asyncio.Task[int], tuple[Part, asyncio.subprocess.Process]] = {}
    for part in parts(config, config_path, instance):
        process = await asyncio.create_subprocess_exec(
            *part.arguments, env=child_environment(part.environment), stdin=asyncio.subprocess.DEVNULL
        )
        children[asyncio.create_task(process.wait())] = (part, process)
    lead = next(process for part, process in children.values() if part.name == "lead")
    try:
        await asyncio.wait([stop, *children], return_when=asyncio.FIRST_COMPLETED)
        if signals == [signal.SIGTERM]:
            log.info("draining")
            lead.send_signal(signal.SIGTERM)
            await asyncio.wait(children, return_when=asyncio.FIRST_COMPLETED)
        ended = [(*children[task], task.result()) for task in children if task.done()]
        if not ended or (signals and all(code == 0 for _, _, code in ended)):
            return 0
        # Several may have ended together; a configuration error is the cause, the rest its echo.
        part, _, code = min(ended, key=lambda item: (item[2] != EXIT_CONFIGURATION, item[0].name))
        if code == EXIT_CONFIGURATION:
            return EXIT_CONFIGURATION
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        last_words(f"the {part.name} process ended {how}")
        return 1
    finally:
        stop.cancel()
        await _stop([process for _, process in children.values()], lead)


async def _stop(processes: list[asyncio.subprocess.Process], lead: asyncio.subprocess.Process) -> None:
    """Ends what still runs. The lead may say goodbye; the ranks and the server follow it, and nobody may
    linger: clients that wait for a pod that is gone should know at once.
    """
    alive = [process for process in processes if process.returncode is None]
    if lead.returncode is None:
        lead.send_signal(signal.SIGINT)
    if alive:
        await asyncio.wait([asyncio.create_task(process.wait()) for process in alive], timeout=FAREWELL_S)
    for process in alive:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main() -> int:
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    parser = argparse.ArgumentParser(
        prog="tandem worker", description="Run one prefill, decode or mixed worker."
    )
    parser.add_argument("--config", required=True, type=Path, help="RoleConfig as JSON")
    arguments = parser.parse_args()
    try:
        config = RoleConfig.model_validate_json(arguments.config.read_bytes())
        instance = Instance.from_environment(dict(os.environ))
    except (OSError, ValidationError, ValueError) as error:
        last_words(f"{arguments.config}: {error}")
        return EXIT_CONFIGURATION
    # Always a fresh one: sockets and the port of a former run in the same place would be taken for ours.
    with tempfile.TemporaryDirectory(prefix="pod-", dir=instance.run_dir or None) as run_dir:
        instance = msgspec.structs.replace(instance, run_dir=run_dir)
        return asyncio.run(run(config, arguments.config, instance))


if __name__ == "__main__":
    sys.exit(main())
