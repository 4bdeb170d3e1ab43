"""A rank process: load this rank's part of the model, lend the KV pool to the lead, run the lead's steps.

Knows: the order of messages on the socket. Does not know: what a step is for.

    connect ─► 25 Loading ─► Loaded + descriptors ─► Step ─► StepResult ─► Step ... ─► Shutdown

The lead listens; a rank connects, and ends when the connection does. The layer counter moves only on rank 0
of a prefill worker: elsewhere nobody sends layers while they are computed, and the counter, lent all the
same, stays 0.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import sys
import time
from pathlib import Path

import msgspec
import torch

from tandem_crds.role_config import Role, RoleConfig

from ..framing import LENGTH, frame
from ..kv import KVLayout
from ..layer_counter import LayerCounter
from ..process import die_with_parent
from . import parallel, weights
from .attention.cpu import CPUAttention
from .checkpoint import CheckpointError, read_config
from .kv_cache import KVCache, PoolTooLarge
from .models import build
from .models.llama import kv_share
from .runner import Runner
from .sampler import Sampler
from .step import FromRank, Loaded, LoadFailed, Loading, Step, ToRank

CONNECT_S = 60  # how long the lead may take to listen
LOADING_STEPS = 25

log = logging.getLogger(__name__)


class LeadGone(Exception):
    """The lead closed the connection or died. There is nobody left to work for."""


class Link:
    """The connection to the lead, blocking. Both directions raise LeadGone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: FromRank, fds: tuple[int, ...] = ()) -> None:
        data = frame(self._encoder.encode(message))
        try:
            # Descriptors ride on the first byte that is sent; the rest may need more calls.
            sent = socket.send_fds(self._socket, [data], fds) if fds else 0
            self._socket.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError):
            raise LeadGone from None

    def close(self) -> None:
        self._socket.close()

    def receive(self) -> ToRank:
        (nbytes,) = LENGTH.unpack(self._read(LENGTH.size))
        return self._decoder.decode(self._read(nbytes))

    def _read(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            try:
                received = self._socket.recv_into(view)
            except ConnectionResetError:
                received = 0
            if received == 0:
                raise LeadGone
            view = view[received:]
        return bytes(data)


def connect(path: Path) -> Link:
    """Waits for the lead to listen, for at most CONNECT_S."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return Link(connection)


class DeviceUnsupported(Exception):
    """The RoleConfig asks for a device on which this rank cannot serve."""


def load(config: RoleConfig, rank: int, store: Path, link: Link) -> Runner:
    """Load, and lend the pool to the lead. Raises CheckpointError, PoolTooLarge and DeviceUnsupported."""
    if config.device != "cpu":
        # Attention on a GPU is written (attention/flashinfer.py); a pool there that the lead can register is
        # not.
        raise DeviceUnsupported(f"device is {config.device!r}; this version serves on 'cpu' only")
    directory = Path(config.model_path)
    model_config = read_config(directory)
    device = torch.device(config.device)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
        config.engine.dtype
    ]
    group = parallel.join(rank, config.tensor_parallel, store, config.device)
    model = build(model_config, group, dtype, device)

    reported = 0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        if done == total or (done - reported) * LOADING_STEPS >= total:
            reported = done
            link.send(Loading(done, total))

    weights.load(model.parts(), directory, progress)
    weights_nbytes = sum(parameter.nbytes for parameter in model.parameters())
    model.finish_loading()

    kv = kv_share(model_config, group)
    layout = KVLayout(
        layers=model_config.layers,
        pages=config.kv.pages,
        kv_heads=kv.stop - kv.start,
        page_tokens=config.kv.page_tokens,
        head_dim=model_config.head_dim,
        dtype=config.kv.dtype,
    )
    cache = KVCache(layout)
    counter = LayerCounter() if rank == 0 else None
    runner = Runner(
        model,
        CPUAttention(cache, dtype),
        layout,
        group,
        Sampler(list(config.model.eos_token_ids)),
        device,
        counter if config.role is Role.PREFILL else None,
    )
    fds = (cache.memfd, counter.memfd, counter.eventfd) if counter else (cache.memfd,)
    link.send(Loaded(rank, layout.pool_nbytes, weights_nbytes, os.getpid()), fds)
    return runner


def serve(runner: Runner, link: Link) -> None:
    """Until Shutdown. Raises LeadGone."""
    while isinstance(message := link.receive(), Step):
        link.send(runner.run(message))


def main(arguments: list[str] | None = None) -> int:
    die_with_parent()
    parser = argparse.ArgumentParser(prog="tandem_runtime.engine.rank", description="One rank of a worker.")
    parser.add_argument("--config", type=Path, required=True, help="RoleConfig, JSON")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--socket", type=Path, required=True, help="where the lead listens")
    parser.add_argument("--store", type=Path, required=True, help="where the ranks of this replica meet")
    parser.add_argument("--threads", type=int, required=True, help="compute threads of this rank")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s rank {options.rank} %(levelname)s %(message)s",
    )
    torch.set_num_threads(options.threads)
    torch.set_num_interop_threads(1)
    config = RoleConfig.model_validate_json(options.config.read_bytes())
    link = connect(options.socket)
    try:
        try:
            runner = load(config, options.rank, options.store, link)
        except (CheckpointError, PoolTooLarge, DeviceUnsupported) as error:
            log.error("%s", error)
            link.send(LoadFailed(str(error)))
            return 2
        log.info("ready")
        # A full collection over the 200,000 objects that torch and loading leave behind would stall every
        # answer for a tenth of a second.
        gc.collect()
        gc.freeze()
        serve(runner, link)
    except LeadGone:
        log.info("the lead is gone")
    finally:
        link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
