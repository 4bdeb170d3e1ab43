"""Find the prefill workers of a decode worker: who exists, and where their fabric listens.

Knows: a source of peers and `/peer`. Does not know: HELLO, health (the messenger's).

Who exists comes from a `PeerSource`; endpoints carry ip:port only, and fabric addresses are opaque, so each
worker's `/peer` is asked for its own, authenticated both ways with the peer key. An answer is asked for again
as long as the worker is not attached: it may have been restarted behind the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from tandem_crds.role_config import Role

from ..messenger.ports import PeerAddress

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..instance import Addresses
    from ..messenger.authentication import PeerKeys
    from ..peer_source import PeerSource

log = logging.getLogger("tandem.discovery")
PERIOD_S = 0.5
REFRESH_S = 10.0
TIMEOUT_S = 2.0


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `/peer` answers."""

    uid: str
    pod: str
    incarnation: int
    kv_key: str
    provider: str
    control_address: bytes  # base64 in JSON


class Discovery:
    """Keeps `set_peers` told of the prefill workers with our KV key and provider."""

    def __init__(
        self,
        source: PeerSource,
        keys: PeerKeys,
        kv_key: str,
        provider: str,
        set_peers: Callable[[list[PeerAddress]], None],
        attached: Callable[[str], bool],
    ) -> None:
        self._source = source
        self._keys = keys
        self._kv_key = kv_key
        self._provider = provider
        self._set_peers = set_peers
        self._attached = attached
        self._known: dict[str, PeerAddress] = {}
        self._asked_s: dict[str, float] = {}
        self.incompatible: dict[str, str] = {}  # pod -> why it is not paired with

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
            while True:
                await self._round(session)
                await asyncio.sleep(PERIOD_S)

    async def _round(self, session: aiohttp.ClientSession) -> None:
        workers = {worker.uid: worker for worker in self._source.read() or [] if worker.role == Role.PREFILL}
        for uid in set(self._known) - set(workers):
            del self._known[uid]
            self._asked_s.pop(uid, None)
        now = asyncio.get_running_loop().time()
        due = [
            worker
            for uid, worker in workers.items()
            if not self._attached(uid) or now - self._asked_s.get(uid, 0.0) > REFRESH_S
        ]
        self._asked_s.update((worker.uid, now) for worker in due)
        await asyncio.gather(*(self._ask(session, worker) for worker in due))
        self._set_peers(list(self._known.values()))

    async def _ask(self, session: aiohttp.ClientSession, worker: Addresses) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            headers, nonce = self._keys.peer_request()
            async with session.get(f"http://{worker.worker}/peer", headers=headers) as answer:
                body = await answer.read()
                if answer.status != 200:
                    return
                if not self._keys.verify_peer_answer(nonce, body, answer.headers):
                    log.warning("%s answered /peer without the peer key; ignored", worker.pod)
                    return
            info = msgspec.json.decode(body, type=PeerInfo)
            if info.kv_key != self._kv_key or info.provider != self._provider:
                self.incompatible[info.pod] = (
                    f"KV key {info.kv_key}, ours {self._kv_key}; "
                    f"provider {info.provider}, ours {self._provider}"
                )
                return
            self.incompatible.pop(info.pod, None)
            self._known[worker.uid] = PeerAddress(
                uid=worker.uid,
                pod=info.pod,
                zone=worker.zone,
                control_address=info.control_address,
                incarnation=info.incarnation,
            )
