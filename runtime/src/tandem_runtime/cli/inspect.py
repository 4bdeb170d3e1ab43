"""`tandem inspect URI`: print what a model's files say about it, as JSON. Reads headers only; no weight is
loaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ..engine.model_config import CheckpointError
from ..models.facts import local_facts
from ..models.hub import hub_facts

if TYPE_CHECKING:
    from tandem_crds.role_config import ModelFacts


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("inspect", help="print a model's facts as JSON", description=__doc__)
    parser.add_argument("uri", help="hf://ORG/NAME, pvc://CLAIM/PATH, file:///PATH or oci://IMAGE")
    parser.add_argument("--revision", help="branch, tag or commit of an hf:// model (default: main)")
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        type=_volume,
        metavar="CLAIM=DIR",
        help="the directory that stands for a claim; may be repeated",
    )
    parser.add_argument(
        "--image-at", type=Path, metavar="DIR", help="where the image of an oci:// model is mounted"
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
        facts = model_facts(
            arguments.uri,
            dict(arguments.volume),
            revision=arguments.revision,
            image_at=arguments.image_at,
        )
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


def model_facts(
    uri: str,
    volumes: dict[str, Path],
    *,
    revision: str | None = None,
    image_at: Path | None = None,
) -> ModelFacts:
    """The facts of the model at `uri`; `volumes` maps claims to directories. Raises CheckpointError."""
    if uri.startswith("hf://"):
        return hub_facts(uri, revision)
    if revision is not None:
        raise CheckpointError(f"{uri}: --revision has a meaning only for hf:// models")
    return local_facts(resolve(uri, volumes, image_at), uri)


def resolve(uri: str, volumes: dict[str, Path], image_at: Path | None = None) -> Path:
    """The directory that `uri` names on this machine. Raises CheckpointError."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in ("pvc", "file", "oci"):
        raise CheckpointError(
            f"{uri}: not a model URI; supported: hf://ORG/NAME, pvc://CLAIM/PATH, file:///PATH, oci://IMAGE"
        )
    if scheme == "oci":
        if image_at is None:
            raise CheckpointError(f"{uri}: an image is mounted by Kubernetes; --image-at DIR says where")
        return image_at
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
