"""A worker's lead process: engine loop, page pool, messenger and worker port on one event loop. No torch.

    python -m tandem_runtime.worker.lead --config role.json

Only this loop touches the page pool and the messenger's state, so there are no locks. The order of start:
worker port (live, not ready) → ranks load → fabric, registration of their KV pools → messenger → ready →
server greeted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from tandem_crds.role_config import Role, RoleConfig

from ..engine.pages import PagePool
from ..engine.scheduler import Scheduler, SchedulerConfig
from ..fabric import topology
from ..fabric.fabric import Fabric, FabricError
from ..fabric.providers import ProviderError, choose_provider
from ..instance import Addresses, Instance
from ..ipc import Limits
from ..kv import KVLayout
from ..messenger.authentication import PeerKeys
from ..messenger.decode_messenger import DecodeMessenger
from ..messenger.manifest import manifest_of
from ..messenger.ports import Identity
from ..messenger.prefill_messenger import PrefillMessenger
from ..messenger.wire import Region
from ..peer_source import PeerSource, peer_source
from ..process import boot_id, die_with_parent, last_words, start_time
from .decode_side import DecodeSide
from .discovery import Discovery, PeerInfo
from .engine_loop import EngineLoop
from .metrics import Metrics
from .port import WorkerPort
from .prefill_side import PrefillSide
from .ranks import LoadError, RankError, RankGroup
from .server_link import ServerLink

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("tandem.lead")
EXIT_CONFIGURATION = 2
STATE_VERSION = 1
PORT_FILE_POLL_S = 0.05
FABRIC_POLL_S = 0.5


class ConfigurationError(RuntimeError):
    """This worker can never work as configured; the message is one line."""


class Lead:
    """One worker's lead. `run` returns when drained after `drain()`, and raises when it cannot go on."""

    def __init__(self, config: RoleConfig, instance: Instance) -> None:
        self.config = config
        self.instance = instance
        self.incarnation = secrets.randbits(32) | 1
        self.ready = False
        self.fault: str | None = None
        self._draining = asyncio.Event()
        self._run_dir = Path(instance.run_dir)
        self._metrics = Metrics(config.served_name, config.role.value)
        self._keys: PeerKeys | None = None
        if config.role is not Role.MIXED:
            self._keys = PeerKeys.load(Path(instance.peer_key_dir))
        self._port = WorkerPort(self, instance.host, instance.worker_port)
        self._ranks = RankGroup(self._run_dir / "rank.sock", config.tensor_parallel)
        self._pool = PagePool(config.kv.pages, config.kv.page_tokens)
        facts = config.model
        self._scheduler = Scheduler(
            SchedulerConfig(
                role=config.role,
                page_tokens=config.kv.page_tokens,
                pages=config.kv.pages,
                layers=facts.layers,
                max_batched_tokens=config.engine.max_batched_tokens,
                max_sequences=config.engine.max_sequences,
                max_model_len=config.engine.max_model_len,
                eos_token_ids=frozenset(facts.eos_token_ids),
                vocab_size=facts.vocab_size,
            ),
            self._pool,
        )
        self._layout = KVLayout(
            layers=facts.layers,
            pages=config.kv.pages,
            kv_heads=max(1, facts.kv_heads // config.tensor_parallel),
            page_tokens=config.kv.page_tokens,
            head_dim=facts.head_dim,
            dtype=config.kv.dtype,
        )
        self._loop = EngineLoop(
            self._scheduler,
            self._ranks,
            self._metrics,
            instance.pod,
            lambda output: self._server.send(output),
        )
        self._server = ServerLink(self._loop)
        self._fabric: Fabric | None = None
        self._decode: DecodeMessenger | None = None
        self._prefill: PrefillMessenger | None = None
        self._discovery: Discovery | None = None
        self._source: PeerSource | None = None
        if config.role is Role.DECODE:
            self._source = peer_source(instance.peers, instance.peer_selector)

    def drain(self) -> None:
        """Take nothing new, finish what runs, then `run` returns; after `drain_seconds` it gives up on the
        rest.
        """
        self._draining.set()

    async def run(self) -> None:
        await self._port.start()
        if self.config.role is not Role.PREFILL:
            await self._server.listen(self._run_dir / "lead.sock")
        publication = asyncio.create_task(self._publish_addresses())
        tasks: list[asyncio.Task[None]] = [publication]
        try:
            await self._ranks.load(lambda progress: log.info("loading: %d %%", progress * 100))
            self._open_fabric()
            tasks.append(asyncio.create_task(self._loop.run()))
            tasks.append(asyncio.create_task(self._watch_fabric()))
            if self._discovery is not None and self._source is not None:
                tasks.append(asyncio.create_task(self._source.follow()))
                tasks.append(asyncio.create_task(self._discovery.run()))
            self.ready = True
            self._server.greet(self._limits())
            log.info(
                "%s %s is ready; http://%s/state",
                self.config.role.value,
                self.instance.pod,
                self._port.address,
            )
            drained = asyncio.create_task(self._drained())
            tasks.append(drained)
            pending = set(tasks)
            while drained in pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # what ends the loop or the discovery ends the worker
        except (RankError, FabricError) as error:
            self.fault = str(error)
            raise
        finally:
            self.ready = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close()

    # --- WorkerFacts --------------------

    def peer(self, headers: Mapping[str, str]) -> tuple[bytes, dict[str, str]] | None:
        if self._keys is None or self._fabric is None:
            return None
        info = PeerInfo(
            uid=self.instance.uid,
            pod=self.instance.pod,
            incarnation=self.incarnation,
            kv_key=self.config.kv_key,
            provider=self._fabric.info.provider,
            control_address=self._fabric.bootstrap_address,
        )
        return self._keys.peer_answer(headers, msgspec.json.encode(info))

    def state(self) -> dict[str, object]:
        counts = self._scheduler.counts()
        messenger = self._decode or self._prefill
        return {
            "version": STATE_VERSION,
            "pod": self.instance.pod,
            "uid": self.instance.uid,
            "role": self.config.role.value,
            "kv_key": self.config.kv_key,
            "provider": self._fabric.info.provider if self._fabric is not None else "",
            "load_progress": round(self._ranks.progress, 3),
            "ready": self.ready,
            "draining": self._draining.is_set(),
            "paired": self._paired(),
            "fault": self.fault,
            "requests": {
                "running": counts.running,
                "waiting": counts.waiting,
                "blocked": counts.blocked,
                "outstanding": self._loop.waiting_for,
            },
            "steps": self._loop.steps,
            "pages": self._pages(),
            "peer_source_fault": self._source.fault if self._source is not None else "",
            "incompatible": self._discovery.incompatible if self._discovery is not None else {},
            **(
                messenger.snapshot()
                if messenger is not None
                else {"transfers": {}, "peers": {}, "counters": {}}
            ),
        }

    def metrics(self) -> bytes:
        pages = self._pages()
        for name, value in pages.items():
            self._metrics.pages.labels(state=name).set(value)
        unused = pages["free"] + pages["cached"]
        self._metrics.kv_usage.set(1 - unused / pages["total"])
        if self._fabric is not None:
            for name, value in msgspec.to_builtins(self._fabric.stats()).items():
                self._metrics.fabric.labels(name=name).set(value)
        return self._metrics.render()

    # ------------------------------------------------------------------------

    def _pages(self) -> dict[str, int]:
        counts = self._pool.counts()
        return {"total": counts.total, "free": counts.free, "cached": counts.cached, "pinned": counts.pinned}

    def _paired(self) -> bool:
        """Whether a request sent here now could be answered."""
        if not self.ready or self._draining.is_set():
            return False
        if self._decode is None:
            return self.config.role is Role.MIXED
        return self._decode.has_peer or self.config.prefill_fallback == "Local"

    def _limits(self) -> Limits:
        return Limits(
            served_name=self.config.served_name,
            model_path=self.config.model_path,
            role=self.config.role.value,
            vocab_size=self.config.model.vocab_size,
            max_model_len=self.config.engine.max_model_len,
            pool_tokens=self.config.kv.pages * self.config.kv.page_tokens,
            eos_token_ids=self.config.model.eos_token_ids,
        )

    def _open_fabric(self) -> None:
        """Fabric and messenger over the ranks' KV pools. Role mixed moves nothing."""
        config, instance = self.config, self.instance
        if config.role is Role.MIXED:
            self._metrics.info.labels(role=config.role.value, provider="", libfabric="").set(1)
            return
        assert self._keys is not None
        port_range = (config.fabric.port_low, config.fabric.port_high)
        wanted = [instance.provider] if instance.provider else config.fabric.providers
        provider = choose_provider(wanted, instance.host, port_range)
        # One group so far: the NICs nearest to the GPUs, or the whole host where there are none.
        group = topology.groups()[0]
        node_id = zlib.crc32(instance.uid.encode()) << 32 | secrets.randbits(32)
        self._fabric = fabric = Fabric(
            provider=provider,
            bind_address=instance.host,
            port_range=port_range,
            cpus=group.cpus,
            node_id=node_id,
            incarnation=self.incarnation,
            spin_us=config.fabric.spin_us,
            name="tandem-fabric",
        )
        regions = []
        for rank, (fd, nbytes) in enumerate(self._ranks.pool_fds()):
            key, base = fabric.register_fd(rank, fd, nbytes)
            regions.append(Region(key, base, nbytes))
        log.info(
            "fabric %s, libfabric %s, %d regions", fabric.info.provider, fabric.info.version, len(regions)
        )
        self._metrics.info.labels(
            role=config.role.value, provider=fabric.info.provider, libfabric=fabric.info.version
        ).set(1)
        identity = Identity(
            pod=instance.pod,
            node_id=node_id,
            incarnation=self.incarnation,
            pid=os.getpid(),
            start_time=start_time(os.getpid()),
            boot_id=boot_id(),
        )
        manifest = manifest_of(config, self._layout)
        if config.role is Role.PREFILL:
            fabric.watch_counter(*self._ranks.counter_fds())
            prefill_side = PrefillSide(self._loop, self._scheduler, self._pool)
            self._prefill = PrefillMessenger(
                fabric=fabric,
                identity=identity,
                manifest=manifest,
                keys=self._keys,
                layout=self._layout,
                ranks=config.tensor_parallel,
                regions=regions,
                listener=prefill_side,
                max_transfers=2 * config.engine.max_sequences,
            )
            prefill_side.attach(self._prefill)
            self._loop.side = prefill_side
            self._prefill.start()
            return
        decode_side = DecodeSide(
            self._loop,
            self._scheduler,
            self._pool,
            self._metrics,
            instance.pod,
            fallback_local=config.prefill_fallback == "Local",
        )
        self._decode = DecodeMessenger(
            fabric=fabric,
            identity=identity,
            manifest=manifest,
            keys=self._keys,
            layout=self._layout,
            ranks=config.tensor_parallel,
            regions=regions,
            listener=decode_side,
            zone=instance.zone,
        )
        decode_side.attach(self._decode)
        self._loop.side = decode_side
        self._decode.start()
        assert self._source is not None
        self._discovery = Discovery(
            self._source,
            self._keys,
            config.kv_key,
            fabric.info.provider,
            self._decode.set_peers,
            self._decode.attached,
        )

    async def _publish_addresses(self) -> None:
        """Writes where this worker listens, once the server process has said its port."""
        server = ""
        if self.config.role is not Role.PREFILL:
            port_file = self._run_dir / "server-port"
            while not port_file.exists():
                await asyncio.sleep(PORT_FILE_POLL_S)
            server = f"{self.instance.host}:{int(port_file.read_text())}"
        addresses = Addresses(
            pod=self.instance.pod,
            uid=self.instance.uid,
            role=self.config.role.value,
            worker=self._port.address,
            server=server,
            zone=self.instance.zone,
        )
        if self.instance.address_file:
            path = Path(self.instance.address_file)
            temporary = path.with_suffix(".new")
            temporary.write_bytes(msgspec.json.encode(addresses))
            temporary.replace(path)
        await asyncio.Event().wait()

    async def _watch_fabric(self) -> None:
        """Raises FabricError once the fabric cannot be used any more: nothing can arrive, so the pod must
        end.
        """
        while True:
            for messenger in (self._decode, self._prefill):
                if messenger is not None and messenger.fault is not None:
                    assert self._fabric is not None
                    raise FabricError(self._fabric.info.provider, "progress", messenger.fault)
            await asyncio.sleep(FABRIC_POLL_S)

    async def _drained(self) -> None:
        await self._draining.wait()
        log.info("draining, for at most %d s", self.config.drain_seconds)
        self._loop.draining = True
        for messenger in (self._decode, self._prefill):
            if messenger is not None:
                messenger.drain()
        deadline = time.monotonic() + self.config.drain_seconds
        while time.monotonic() < deadline:
            live = self._prefill.live() if self._prefill is not None else 0
            if self._scheduler.idle and not live and not self._loop.waiting_for:
                log.info("drained")
                return
            await asyncio.sleep(0.1)
        log.warning("giving up on what still runs after %d s", self.config.drain_seconds)

    async def _close(self) -> None:
        for messenger in (self._decode, self._prefill):
            if messenger is not None:
                await messenger.close()
        if self._fabric is not None:
            self._fabric.close()
        await self._server.close()
        await self._ranks.close()
        await self._port.close()


async def _serve(config: RoleConfig, instance: Instance) -> None:
    try:
        lead = Lead(config, instance)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {instance.host}:{instance.worker_port}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lead.drain)
    await lead.run()


def main() -> int:
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="tandem-lead")
    parser.add_argument("--config", required=True, type=Path)
    arguments = parser.parse_args()
    config = RoleConfig.model_validate_json(arguments.config.read_bytes())
    instance = Instance.from_environment(dict(os.environ))
    gc.freeze()  # what the imports made lives as long as the process: no collection need visit it again
    try:
        uvloop.run(_serve(config, instance))
    except (ConfigurationError, LoadError, ProviderError) as error:
        last_words(error)
        return EXIT_CONFIGURATION
    except (RankError, FabricError) as error:
        last_words(error)
        return 1
    except KeyboardInterrupt:
        log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
