"""`tandem inspect URI`: print what a model's files say about it, as JSON. Reads headers only; no weight is
loaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ..engine import checkpoint
from ..engine.checkpoint import CheckpointError
from ..messenger import wire

if TYPE_CHECKING:
    from tandem_crds.role_config import ModelFacts


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("inspect", help="print a model's facts as JSON", description=__doc__)
    parser.add_argument("uri", help="pvc://CLAIM/PATH or file:///PATH")
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        type=_volume,
        metavar="CLAIM=DIR",
        help="the directory that stands for a claim; may be repeated",
    )
    parser.add_argument(
        "--termination-log",
        type=Path,
        metavar="FILE",
        help="where a pod's facts or error go as well, in one line",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        facts, _ = model_facts(arguments.uri, dict(arguments.volume))
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        _tell(arguments.termination_log, str(error))
        return 2
    print(facts.model_dump_json(indent=2))
    _tell(arguments.termination_log, facts.model_dump_json())
    return 0


def _tell(file: Path | None, line: str) -> None:
    if file is not None:
        file.write_text(line)


def model_facts(uri: str, volumes: dict[str, Path]) -> tuple[ModelFacts, Path]:
    """The facts of the model at `uri` and its directory; `volumes` maps claims to directories. Raises
    CheckpointError.
    """
    path = resolve(uri, volumes)
    return checkpoint.model_facts(path, uri, wire.VERSION), path


def resolve(uri: str, volumes: dict[str, Path]) -> Path:
    """The directory that `uri` names on this machine. Raises CheckpointError."""
    scheme, separator, rest = uri.partition("://")
    if scheme in ("hf", "oci"):
        raise CheckpointError(f"{uri}: {scheme}:// is not supported yet here; supported: pvc://, file://")
    if not separator or scheme not in ("pvc", "file"):
        raise CheckpointError(f"{uri}: not a model URI; supported: pvc://CLAIM/PATH, file:///PATH")
    if ".." in PurePosixPath(rest).parts:
        raise CheckpointError(f"{uri}: a path must not contain ..")
    if scheme == "file":
        if not rest.startswith("/"):
            raise CheckpointError(f"{uri}: the path must be absolute, as in file:///models/name")
        return Path(rest)
    claim, _, path = rest.partition("/")
    if not claim or not path:
        raise CheckpointError(f"{uri}: claim and path are expected, as in pvc://models/name")
    if claim not in volumes:
        raise CheckpointError(f"{uri}: no directory stands for the claim {claim}; add --volume {claim}=DIR")
    return volumes[claim] / path


def _volume(text: str) -> tuple[str, Path]:
    claim, equals, directory = text.partition("=")
    if not (claim and equals and directory):
        raise argparse.ArgumentTypeError(f"{text!r}: CLAIM=DIR is expected")
    return claim, Path(directory).expanduser().resolve()
