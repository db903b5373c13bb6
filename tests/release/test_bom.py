"""A bill of materials is valid CycloneDX, the same for the same facts, and any edit of it is found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from onnxtool.errors import InputError
from onnxtool.model_file.metadata import License
from onnxtool.release.bom import bom_text, check_bom
from onnxtool.release.facts import ReleaseFacts, first_difference
from tests.release.samples import FACTS


def test_it_says_what_the_release_consists_of() -> None:
    """Models with their licenses, files with their digests, the toolchain, the figures and the command."""
    text = bom_text(FACTS)
    check_bom(text)
    bom = json.loads(text)
    components = {one["name"]: one for one in bom["components"]}
    assert {name: one["type"] for name, one in components.items()} == {
        **dict.fromkeys(("model.onnx", "model_int8.onnx"), "machine-learning-model"),
        "tokenizer.json": "file",
        **dict.fromkeys(FACTS.versions, "library"),
    }
    assert components["model.onnx"]["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    assert components["model.onnx"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    made_by = next(one for one in bom["dependencies"] if one["ref"] == "file:model.onnx")
    assert "pkg:pypi/torch@2.13.0" in made_by["dependsOn"]
    card = bom["metadata"]["component"]["modelCard"]
    assert card["quantitativeAnalysis"]["performanceMetrics"][0]["value"] == "0.8125"
    (step,) = bom["formulation"][0]["workflows"][0]["steps"]
    assert step["commands"] == [{"executed": FACTS.command}]


def test_the_same_facts_give_the_same_bytes() -> None:
    """The serial number is of the facts, and the time is that of the record or none."""
    bom = json.loads(bom_text(FACTS))
    assert bom_text(replace(FACTS)) == bom_text(FACTS)
    assert bom["metadata"]["timestamp"] == "2026-11-23T00:00:00+00:00"
    other = json.loads(bom_text(replace(FACTS, provenance=replace(FACTS.provenance, date=""))))
    assert "timestamp" not in other["metadata"]
    assert other["serialNumber"] != bom["serialNumber"]


def test_any_changed_character_is_found() -> None:
    """Also where the document stays valid."""
    text = bom_text(FACTS)
    assert first_difference(text, bom_text(FACTS)) == ""
    assert "0.8126" in first_difference(text.replace("0.8125", "0.8126"), bom_text(FACTS))
    assert first_difference(text + "\n", bom_text(FACTS))


@pytest.mark.parametrize(
    ("license_", "licenses"),
    [
        (License("bsd-3-clause"), [{"license": {"id": "BSD-3-Clause"}}]),
        (License(), None),
        (
            License("other", "Mine", "https://example.org/a?b"),
            [{"license": {"name": "Mine", "url": "https://example.org/a?b"}}],
        ),
        (License("other", "Mine", "see [here] <x>"), [{"license": {"name": "Mine"}}]),
        (License("openrail++"), [{"license": {"name": "openrail++"}}]),
    ],
)
def test_a_license_is_an_id_of_spdx_or_a_name(license_: License, licenses: list[Any] | None) -> None:
    """What is unknown is no license, and a property says it."""
    text = bom_text(replace(FACTS, license=license_))
    check_bom(text)
    release = json.loads(text)["metadata"]["component"]
    assert release.get("licenses") == licenses
    assert {"name": "onnxtool:license", "value": str(license_)} in release["properties"]


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda bom: bom.update(bomFormat="x"), "bomFormat"),
        (lambda bom: bom["components"][0].update(type="model"), r"components\.0\.type"),
        (lambda bom: bom["formulation"][0]["workflows"][0].pop("uid"), r"formulation\.0\.workflows\.0"),
        (lambda bom: bom["metadata"]["component"]["modelCard"].update(x=1), "modelCard"),
    ],
)
def test_what_the_schema_refuses_is_named(edit: Callable[[dict[str, Any]], object], place: str) -> None:
    """Also in the parts that the library does not write."""
    bom = json.loads(bom_text(FACTS))
    edit(bom)
    with pytest.raises(InputError, match=f"not valid: .*{place}"):
        check_bom(json.dumps(bom))


@pytest.mark.parametrize("text", ["", "[" * 100_000, "{", "\x00"])
def test_what_is_no_json_is_no_bill(text: str) -> None:
    """An error of ours, whatever it is."""
    with pytest.raises(InputError, match="not JSON"):
        check_bom(text)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both where a bill is written and where it is validated."""
    monkeypatch.setitem(sys.modules, "cyclonedx.validation.json", None)
    calls: tuple[Callable[[], object], ...] = (lambda: bom_text(FACTS), lambda: check_bom("{}"))
    for call in calls:
        with pytest.raises(InputError) as raised:
            call()
        assert raised.value.hint == "pip install 'onnxtool-cli[release]'"


def test_any_facts_give_a_valid_bill() -> None:
    """Names and commands come from checkpoints and people."""
    facts: ReleaseFacts = replace(FACTS, name="a`b|<script>", command="make\n'\"", models=(), files=FACTS.files[2:])
    check_bom(bom_text(facts))
