"""`tandem inspect`: facts as JSON on stdout, or one line on stderr and status 2."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tandem_crds.role_config import ModelFacts
from tandem_runtime.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("scheme", ["file", "pvc"])
def test_the_facts_are_printed_as_json(
    tiny_qwen3: Path, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"file://{tiny_qwen3}" if scheme == "file" else f"pvc://models/{tiny_qwen3.name}"
    assert main(["inspect", uri, "--volume", f"models={tiny_qwen3.parent}"]) == 0
    output = capsys.readouterr().out
    facts = ModelFacts.model_validate_json(output)
    assert (facts.uri, facts.architecture, facts.layers) == (uri, "Qwen3ForCausalLM", 2)
    assert json.loads(output).keys() == ModelFacts.model_fields.keys()


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("oci://registry/image", "an image is mounted by Kubernetes; --image-at DIR says where"),
        (
            "/models/x",
            "not a model URI; supported: hf://ORG/NAME, pvc://CLAIM/PATH, file:///PATH, oci://IMAGE",
        ),
        (
            "s3://bucket/x",
            "not a model URI; supported: hf://ORG/NAME, pvc://CLAIM/PATH, file:///PATH, oci://IMAGE",
        ),
        ("file://relative/x", "the path must be absolute, as in file:///models/name"),
        ("pvc://models", "claim and path are expected, as in pvc://models/name"),
        ("pvc://other/x", "no directory stands for the claim other; add --volume other=DIR"),
        ("pvc://models/../secret", "a path must not contain .."),
    ],
)
def test_a_uri_that_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, uri: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", uri, "--volume", f"models={tmp_path}"]) == 2
    assert capsys.readouterr().err == f"error: {uri}: {says}\n"


def test_an_image_is_read_where_it_is_mounted(tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "oci://registry/image", "--image-at", str(tiny_qwen3)]) == 0
    assert ModelFacts.model_validate_json(capsys.readouterr().out).uri == "oci://registry/image"


def test_a_revision_is_a_hubs(tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"file://{tiny_qwen3}", "--revision", "main"]) == 2
    assert "--revision has a meaning only for hf:// models" in capsys.readouterr().err


def test_a_missing_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "pvc://models/x", "--volume", f"models={tmp_path}"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'x'}: no such directory\n"


def test_a_volume_needs_a_claim_and_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", "pvc://models/x", "--volume", "models"])
    assert caught.value.code == 2
    assert "'models': CLAIM=DIR is expected" in capsys.readouterr().err
