"""What differs between the processes of one role: where this worker listens, who it is, how it finds peers.

From environment and flags; everything that replicas share is in `tandem_crds.role_config.RoleConfig`.
"""

from __future__ import annotations

import msgspec


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. `peers` is the path of a JSON file (`PeerFile`), rewritten in place as peers come and go."""

    pod: str  # the pod's name, shown to people
    uid: str  # the pod's UID: what a peer is known by
    zone: str = ""
    host: str = "127.0.0.1"  # the address that peers and the router can reach; the fabric binds to it
    worker_port: int = 0  # health, ready, peer, state, metrics; 0: any, written to `address_file`
    server_port: int = 0  # the OpenAI API, decode and mixed only
    peer_key_path: str = ""
    peers: str = ""
    address_file: str = ""  # where the chosen ports are written, JSON `Addresses`, once both listen
    run_dir: str = ""  # private directory for unix sockets
    log_dir: str = ""
    threads_per_rank: int = 1
    provider: str = ""  # overrides RoleConfig.fabric.providers


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """`host:port` of a worker's two listeners; `server` is empty on prefill workers."""

    pod: str
    uid: str
    role: str
    worker: str
    server: str = ""


class PeerFile(msgspec.Struct, frozen=True, kw_only=True):
    """Every worker of the deployment, as `tandem up` lists them."""

    workers: list[Addresses]
