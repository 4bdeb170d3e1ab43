"""`tandem up FILE.yaml`: serve a manifest on this machine, no cluster, no root, no GPU."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_crds.model import DisaggregatedModel, ManifestError, load_manifest, unsupported_by_embedded
from tandem_crds.role_config import RoleConfigError

from ..engine.model_config import CheckpointError
from ..fabric.providers import ProviderError, choose_provider
from ..models.fetch import fetch
from ..models.hub import repository
from ..process import die_with_parent, rss_nbytes
from ..up.ask import AskError, ask
from ..up.demo_model import default_cache_dir
from ..up.deployment import WorkerPlan, plan_workers
from ..up.progress import Progress
from ..up.run_directory import run_directory
from ..up.supervisor import DeploymentError, Supervisor
from .ask import print_answer
from .inspect import model_facts, resolve

if TYPE_CHECKING:
    import argparse

    from tandem_crds.role_config import ModelFacts

EXIT_CONFIGURATION = 2


class UsageError(ValueError):
    """Something the user gave cannot work; the message says what, and what to do."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("up", help="serve a manifest on this machine", description=__doc__)
    parser.add_argument("file", type=Path, help="a DisaggregatedModel manifest")
    parser.add_argument("--port", type=int, default=8000, help="the router's port (default 8000; 0: any)")
    parser.add_argument(
        "--log-dir", type=Path, help="where the processes' logs go (default: a temporary directory)"
    )
    parser.add_argument(
        "--provider", help="libfabric provider instead of the fabric profile's: net, tcp, shm"
    )
    parser.add_argument("--mixed", action="store_true", help="the same number of mixed workers: the baseline")
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM=DIR",
        help="the directory that stands for a claim",
    )
    parser.add_argument("--ask", metavar="QUESTION", help="ask once, print answer and timing, and exit")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    die_with_parent()
    try:
        model, plans = _plan(arguments)
        port = _free_port(arguments.port)
        if arguments.log_dir is not None:
            _make_directory(arguments.log_dir)
    except (ManifestError, RoleConfigError, CheckpointError, ProviderError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    with contextlib.ExitStack() as stack:
        run_dir = stack.enter_context(run_directory())
        log_dir = arguments.log_dir or run_dir / "logs"
        return asyncio.run(_serve(model, plans, run_dir, log_dir, port, arguments.ask))


def _plan(arguments: argparse.Namespace) -> tuple[DisaggregatedModel, list[WorkerPlan]]:
    try:
        text = arguments.file.read_text()
    except OSError as error:
        raise UsageError(f"{arguments.file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{arguments.file}: not a text in UTF-8: {error.reason}") from None
    model = load_manifest(text, str(arguments.file))
    if missing := unsupported_by_embedded(model):
        raise UsageError(f"{arguments.file}: {'; '.join(missing)}")
    facts, model_path = _model_files(model, _volumes(arguments.volume))
    providers = [arguments.provider] if arguments.provider else None
    plans = plan_workers(model, facts, model_path, mixed=arguments.mixed, providers=providers)
    if not arguments.mixed:
        choose_provider(plans[0].config.fabric.providers)
    return model, plans


def _model_files(model: DisaggregatedModel, volumes: dict[str, Path]) -> tuple[ModelFacts, Path]:
    """The facts and the directory; what a hub has is fetched into the cache first. Raises CheckpointError."""
    uri = model.spec.model.uri
    facts = model_facts(uri, volumes, revision=model.spec.model.revision)
    if not uri.startswith("hf://") or facts.engine_refuses:
        return facts, Path() if facts.engine_refuses else resolve(uri, volumes)
    path = default_cache_dir() / "hub" / repository(uri) / facts.weights_id
    logging.basicConfig(level=logging.WARNING, format="tandem: %(message)s")
    logging.getLogger("tandem_runtime.models.fetch").setLevel(logging.INFO)
    fetch(uri, facts.weights_id, path)
    return facts, path


def _volumes(given: list[str]) -> dict[str, Path]:
    volumes = {}
    for item in given:
        claim, equals, directory = item.partition("=")
        if not (claim and equals and directory):
            raise UsageError(f"--volume {item!r}: expected CLAIM=DIRECTORY")
        if not Path(directory).is_dir():
            raise UsageError(f"--volume {item}: {directory} is not a directory")
        volumes[claim] = Path(directory).resolve()
    return volumes


def _free_port(port: int) -> int:
    """`port`, or any if 0. Raises UsageError when it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
            raise UsageError(f"port {port} cannot be used ({reason}); choose another with --port") from None
        return int(probe.getsockname()[1])


def _make_directory(path: Path) -> None:
    """Raises UsageError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir {path}: {error.strerror}") from None


async def _serve(
    model: DisaggregatedModel,
    plans: list[WorkerPlan],
    run_dir: Path,
    log_dir: Path,
    port: int,
    question: str | None,
) -> int:
    progress = Progress()
    supervisor = Supervisor(plans, run_dir, log_dir, port=port)
    supervisor.on_change = lambda: progress.workers(supervisor.workers)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    waits: list[asyncio.Task[object]] = [
        asyncio.create_task(stopped.wait()),
        asyncio.create_task(supervisor.failed()),
    ]
    stop, failed = waits
    try:
        progress.note(f"starting {', '.join(plan.name for plan in plans)} and a router; logs in {log_dir}")
        await supervisor.start()
        job = asyncio.create_task(_work(supervisor, progress, plans[0].config.served_name, question))
        waits.append(job)
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            error = failed.result()
            assert isinstance(error, DeploymentError)
            progress.note("stopping")
            print(f"error: {error}", file=sys.stderr)
            return error.status
        if job.done():
            return await job
        assert stop.done()
        progress.note("stopping")
        return 0
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await supervisor.stop()


async def _work(supervisor: Supervisor, progress: Progress, served_name: str, question: str | None) -> int:
    """Until serving; then one question, or for ever."""
    await supervisor.serving()
    progress.note(f"serving {served_name} on {supervisor.url}/v1")
    if question is None:
        await asyncio.Event().wait()
    try:
        answer = await ask(supervisor.url, served_name, question or "")
    except AskError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_answer(question or "", answer, _memory(supervisor))
    return 0


def _memory(supervisor: Supervisor) -> list[tuple[str, str]]:
    """Resident memory of each process."""
    rows = []
    for worker in supervisor.workers:
        if worker.process is None:
            continue
        pids = {"main": worker.process.pid, **_children(worker.process.pid)}
        sizes = ", ".join(f"{name} {rss_nbytes(pid) / 1e6:.0f}" for name, pid in pids.items())
        rows.append((f"RSS {worker.plan.name}", f"{sizes} MB"))
    return rows


def _children(pid: int) -> dict[str, int]:
    """Names and pids of a pod main's children, as their command lines tell them."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        module = words[words.index("tandem_runtime.process") + 1]
        found[module.rpartition(".")[2]] = int(child)
    return found
