"""What differs between the processes of one role: where this worker listens, who it is, how it finds peers.

It comes from environment variables (`TANDEM_` + the field's name in capitals); everything that replicas share
is in `tandem_crds.role_config.RoleConfig`.
"""

from __future__ import annotations

import msgspec

PREFIX = "TANDEM_"


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One worker."""

    pod: str  # the pod's name, shown to people
    uid: str  # the pod's UID: what a peer is known by
    zone: str = ""
    host: str = "127.0.0.1"  # the address that peers and the router can reach; the fabric binds to it
    worker_port: int = 0  # health, ready, peer, state, metrics; 0: any, written to `address_file`
    server_port: int = 0  # the OpenAI API, decode and mixed only
    peer_key_dir: str = ""  # files `current` and, while a key is being changed, `previous`
    peers: str = ""  # path of a `PeerFile`, replaced atomically as peers come and go
    peer_selector: str = ""  # instead, in a cluster: labels of the EndpointSlices of prefill and decode
    address_file: str = ""  # where `Addresses` are written once both listeners are up
    run_dir: str = ""  # private directory for unix sockets
    threads_per_rank: int = 1
    provider: str = ""  # overrides RoleConfig.fabric.providers

    @classmethod
    def from_environment(cls, environment: dict[str, str]) -> Instance:
        """Raises ValueError naming the variable that is missing or malformed."""
        given = {
            name: environment[PREFIX + name.upper()]
            for name in cls.__struct_fields__
            if PREFIX + name.upper() in environment
        }
        for name in ("pod", "uid"):
            if not given.get(name):
                raise ValueError(f"{PREFIX}{name.upper()} is not set; a worker needs to know who it is")
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"environment: {error} (variables {PREFIX}…)") from None

    def environment(self) -> dict[str, str]:
        return {PREFIX + name.upper(): str(value) for name, value in msgspec.structs.asdict(self).items()}


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """`host:port` of a worker's two listeners; `server` is empty on prefill workers."""

    pod: str
    uid: str
    role: str
    worker: str
    server: str = ""
    zone: str = ""
    draining: bool = False  # on its way out: it finishes what it has, and takes nothing new


class PeerFile(msgspec.Struct, frozen=True, kw_only=True):
    """Every worker of the deployment, as `tandem up` lists them."""

    workers: list[Addresses]
