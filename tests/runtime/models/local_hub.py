"""A model hub on loopback that speaks the hub's HTTP API as far as its client needs it, without Xet.

Files are bytes, or `Weights`: a safetensors file of any size whose header is real and whose numbers are all
zero and never stored, so that a model of 700 GB can be looked at.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_PIECE = 2**16


@dataclass(frozen=True)
class Weights:
    """`tensors` maps names to dtype and shape."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]

    @property
    def head(self) -> bytes:
        header, offset = {}, 0
        for name, (dtype, shape) in self.tensors.items():
            nbytes = {"F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
            for length in shape:
                nbytes *= length
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text

    @property
    def nbytes(self) -> int:
        header = json.loads(self.head[8:])
        return len(self.head) + max((one["data_offsets"][1] for one in header.values()), default=0)


File = bytes | Weights


def size(file: File) -> int:
    return file.nbytes if isinstance(file, Weights) else len(file)


def part(file: File, begin: int, end: int) -> bytes:
    if isinstance(file, bytes):
        return file[begin:end]
    head = file.head[begin:end]
    return head + bytes(end - begin - len(head))


@dataclass
class Repository:
    files: dict[str, File]
    commit: str = COMMIT
    branches: tuple[str, ...] = ("main",)
    token: str = ""  # asked for where it is not empty
    gated: bool = False


@dataclass
class Hub:
    """`repositories` by ORG/NAME. `cut` maps file names to the byte after which a connection is cut, once."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range

    def served(self, name: str) -> list[str]:
        """The ranges of all GETs of that file."""
        return [rang for method, path, rang in self.asked if method == "GET" and path.endswith(f"/{name}")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *words: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"]:
            name, rest = "/".join(words[2:4]), words[4:]
        else:
            name, rest = "/".join(words[:2]), words[2:]
        repository = self.hub.repositories.get(name)
        if repository is None or repository.token not in ("", self._token()):
            if repository is not None and repository.gated:
                return self._error(403, "GatedRepo", f"access to {name} is restricted")
            return self._error(401, "RepoNotFound", "repository not found")
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in (repository.commit, *repository.branches):
            return self._error(404, "RevisionNotFound", f"invalid rev id: {revision}")
        match rest[:1]:
            case [] | ["revision"]:
                siblings = [{"rfilename": one} for one in repository.files]
                return self._json({"id": name, "sha": repository.commit, "siblings": siblings})
            case ["tree"]:
                return self._json([_entry(*one) for one in repository.files.items()])
            case ["resolve"]:
                return self._file(repository, "/".join(rest[2:]))
        return self._error(404, "EntryNotFound", path)

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _file(self, repository: Repository, name: str) -> None:
        file = repository.files.get(name)
        if file is None:
            return self._error(404, "EntryNotFound", f"no {name}")
        begin, end, whole = 0, size(file), size(file)
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1 if last else whole, whole)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{whole}")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("ETag", f'"{_digest(file)}"')
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "HEAD":
            return None
        stop = self.hub.cut.pop(name, None)
        last = end if stop is None else min(end, stop)
        for at in range(begin, last, _PIECE):
            self.wfile.write(part(file, at, min(at + _PIECE, last)))
        if stop is not None:
            self.close_connection = True
        return None

    def _json(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _error(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _digest(file: File) -> str:
    return hashlib.sha256(file.head if isinstance(file, Weights) else file).hexdigest()[:40]


def _entry(name: str, file: File) -> dict[str, object]:
    return {"type": "file", "path": name, "size": size(file), "oid": _digest(file)}


@contextlib.contextmanager
def local_hub(host: str = "127.0.0.1") -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer((host, 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://{host}:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
