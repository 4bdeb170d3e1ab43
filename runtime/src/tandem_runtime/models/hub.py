"""Models of a Hugging Face hub: which commit a revision is, what its facts are, and its files on disk.

Knows: the hub's client (`HF_ENDPOINT`, `HF_TOKEN`), which files a model needs, what goes wrong there and what
to do about it. Does not know: what is in the files (`engine/`), when they are needed.

Facts cost a few hundred kilobytes: the small files, and the headers of the weights by range requests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.model_config import CheckpointError
from .facts import facts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tandem_crds.role_config import ModelFacts

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHTS = "*.safetensors"
# What repositories keep below their root are other formats of the same weights.
_BELOW_ROOT = "*/*"
_MARGIN_NBYTES = 2**28
_WORKERS = 8


def repository(uri: str) -> str:
    """ORG/NAME of hf://ORG/NAME. Raises CheckpointError."""
    scheme, _, name = uri.partition("://")
    if scheme != "hf" or name.count("/") != 1 or not all(name.split("/")):
        raise CheckpointError(f"{uri}: not a model of a hub; expected hf://ORG/NAME")
    return name


def hub_facts(uri: str, revision: str | None) -> ModelFacts:
    """The facts; `weights_id` is the commit that `revision` (None: main) is at this moment. Raises
    CheckpointError.
    """
    name = repository(uri)
    with _told(uri, revision) as hub, tempfile.TemporaryDirectory(prefix="tandem-hub-") as scratch:
        commit = str(hub.HfApi().model_info(name, revision=revision).sha)
        # The index of a large model is megabytes, and the headers say the same.
        unwanted = [_BELOW_ROOT, "*.safetensors.index.json"]
        hub.snapshot_download(
            name,
            revision=commit,
            local_dir=scratch,
            allow_patterns=list(SMALL_FILES),
            ignore_patterns=unwanted,
        )
        weights = hub.HfApi().get_safetensors_metadata(name, revision=commit)
        return facts(Path(scratch), uri, commit, _nbytes(weights))


def missing_nbytes(uri: str, commit: str, into: Path) -> int:
    """How much `download` still has to fetch. Raises CheckpointError."""
    with _told(uri, commit) as hub:
        planned = hub.snapshot_download(
            repository(uri), revision=commit, local_dir=into, dry_run=True, **_wanted()
        )
    return sum(
        file.file_size or 0 for file in planned if not (into / file.filename).is_file() or file.will_download
    )


def download(uri: str, commit: str, into: Path) -> None:
    """All that serving needs, in `into`. What an earlier try left there is gone on with. Raises
    CheckpointError.
    """
    into.mkdir(parents=True, exist_ok=True)
    needed, free = missing_nbytes(uri, commit, into), shutil.disk_usage(into).free
    if needed + _MARGIN_NBYTES > free:
        raise CheckpointError(
            f"{uri}: {needed / 1e9:.1f} GB are still to be fetched and {into} has {free / 1e9:.1f} GB free: "
            "make the cache volume larger (spec.model.cache)"
        )
    with _told(uri, commit) as hub:
        hub.snapshot_download(
            repository(uri), revision=commit, local_dir=into, max_workers=_WORKERS, **_wanted()
        )


def _wanted() -> dict[str, Any]:
    return {"allow_patterns": [*SMALL_FILES, WEIGHTS], "ignore_patterns": [_BELOW_ROOT]}


def _nbytes(metadata: Any) -> int:
    return sum(
        tensor.data_offsets[1] - tensor.data_offsets[0]
        for file in metadata.files_metadata.values()
        for tensor in file.tensors.values()
    )


@contextlib.contextmanager
def _told(uri: str, revision: str | None) -> Iterator[Any]:
    """The client, loaded late because it reads its environment then; its errors in one line each."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # A container's root file system is read-only, and its user's home may not exist.
    os.environ.setdefault("HF_HOME", str(Path(tempfile.gettempdir()) / f"huggingface-{os.getuid()}"))
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    at = f"{uri} at {constants.ENDPOINT}"
    try:
        yield hub
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{at}: gated: ask for access there, and give a token that has it "
            "(spec.model.secretRef, HF_TOKEN)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{at}: no such model, or a private one: check the name; a private one needs a token "
            "(spec.model.secretRef, HF_TOKEN)"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{at}: it has no revision {revision or 'main'}") from None
    except errors.NotASafetensorsRepoError:
        raise CheckpointError(
            f"{at}: no model.safetensors and no model.safetensors.index.json; only safetensors are supported"
        ) from None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        if code == 401:
            raise CheckpointError(f"{at}: HTTP 401: the token is not valid (HF_TOKEN)") from None
        raise CheckpointError(f"{at}: HTTP {code}: {_line(error)}") from None
    except (errors.HFValidationError, errors.SafetensorsParsingError, ValueError) as error:
        raise CheckpointError(f"{at}: {_line(error)}") from None
    except CheckpointError:
        raise
    except OSError as error:  # of the disk, and the network's
        raise CheckpointError(f"{at}: {_line(error)}") from None
    except Exception as error:  # the HTTP library's own, which the client lets through
        raise CheckpointError(f"{at}: {type(error).__name__}: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
