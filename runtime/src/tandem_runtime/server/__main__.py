"""`python -m tandem_runtime.server`: the HTTP process of one decode or mixed pod.

    load the tokenizer ─► bind ─► connect to the lead, read its limits ─► write the port file ─► serve
                                                           the lead hangs up ─► tell the clients, exit 1

Exit codes: 0 after SIGTERM or SIGINT once every open request has ended; 1 when the lead is gone; 2 when it
cannot start as told.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from tandem_runtime.process import die_with_parent

from .app import create_app
from .errors import LeadLost
from .lead import Lead
from .tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger("tandem_runtime.server")

KEEP_ALIVE_S = (
    75  # longer than a proxy in front keeps idle connections, or it would reuse one that is closing
)
FAREWELL_S = 2.0  # for clients to be told that the lead is gone


class HttpServer(uvicorn.Server):
    """Writes the port file once it listens, and leaves signals and exit codes to `serve`."""

    def __init__(self, config: uvicorn.Config, port_file: Path | None) -> None:
        super().__init__(config)
        self._port_file = port_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._port_file is not None and sockets:
            write_port(self._port_file, sockets[0].getsockname()[1])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Bound, not yet listening: a port that is taken is known at once, and nobody connects before there is a
    model."""
    family, kind, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def write_port(path: Path, port: int) -> None:
    """A reader sees no file or the whole number."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(f"{port}\n")
    partial.replace(path)


async def serve(args: argparse.Namespace, tokenizer: Tokenizer, sock: socket.socket) -> int:
    try:
        lead = await Lead.connect(args.lead_socket)
    except LeadLost:
        logger.error("the lead hung up before it had greeted")
        return 1
    config = uvicorn.Config(
        create_app(lead, tokenizer, args.served_name),
        log_config=None,
        access_log=False,
        lifespan="off",
        http="httptools",
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = HttpServer(config, args.port_file)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    serving = asyncio.create_task(server.serve([sock]))
    losing = asyncio.create_task(lead.lost.wait())
    await asyncio.wait((serving, losing), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        losing.cancel()
        lead.close()
        return 0
    logger.error("the lead is gone")
    server.should_exit = True
    await asyncio.wait((serving,), timeout=FAREWELL_S)
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tandem_runtime.server", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--lead-socket", required=True, help="unix socket the lead listens on")
    parser.add_argument("--model-dir", required=True, type=Path, help="where tokenizer.json lies")
    parser.add_argument("--served-name", required=True, help="the model's name in the API")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--port-file", type=Path, help="the port is written here once it is served")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    args = parser.parse_args(argv)
    die_with_parent()
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        tokenizer = Tokenizer.load(args.model_dir)
    except TokenizerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        sock = bind(args.host, args.port)
    except (OSError, OverflowError) as error:
        print(f"error: cannot listen on {args.host} port {args.port}: {error}", file=sys.stderr)
        return 2
    return uvloop.run(serve(args, tokenizer, sock))


if __name__ == "__main__":
    sys.exit(main())
