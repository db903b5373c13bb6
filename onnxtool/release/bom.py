"""The bill of materials of a release: CycloneDX with the model, its files, its licenses and its origin.

The CycloneDX library writes and validates the document. It has no classes for `modelCard` and `formulation` of the
schema: these are added afterwards, and validated with the rest.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from onnxtool.errors import InputError, imported
from onnxtool.release.facts import FACTS_NAME, MODEL, WEIGHTS, ReleasedFile, ReleaseFacts, facts_text
from onnxtool.reports import Json
from onnxtool.version import DISTRIBUTION

if TYPE_CHECKING:
    from cyclonedx.model import Property
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import DisjunctiveLicense

BOM_NAME = "bom.cdx.json"

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "onnxtool:release")
_RELEASE = "release"
# Other URLs are not valid references in the schema, or are relative to the checkpoint.
_WEB_ADDRESS = re.compile(r"https?://[\w.~:/?#@!$&'()*+,;=%-]+", re.ASCII)


def bom_text(facts: ReleaseFacts) -> str:
    """Write the bill of materials; equal facts produce the same text.

    Its serial number is derived from the facts. Its time is the day of SOURCE_DATE_EPOCH, or missing.

    Raises:
        InputError: cyclonedx-python-lib is not installed.
    """
    require_library()
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6

    release = Component(
        name=facts.name,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=_RELEASE,
        version=facts.provenance.revision or facts.provenance.weights_sha256[:12] or None,
        description=f"ONNX files of {facts.provenance.source}",
        licenses=_licenses(facts),
        properties=_properties(
            {
                "checkpoint": facts.provenance.source,
                "revision": facts.provenance.revision,
                "weights_sha256": facts.provenance.weights_sha256,
                "license": str(facts.license),
                "license_link": facts.license.link,
            }
        ),
    )
    bom = Bom(serial_number=uuid.uuid5(_NAMESPACE, facts_text(facts)))
    bom.metadata.component = release
    files = [_file_component(file, facts) for file in facts.files]
    tools = [_package(name, version) for name, version in sorted(facts.versions.items())]
    bom.components.update((*files, *tools))
    bom.register_dependency(release, files)
    for file in files:
        if file.type is ComponentType.MACHINE_LEARNING_MODEL:
            bom.register_dependency(file, tools)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    document["metadata"].pop("timestamp", None)  # the time of this run
    document["metadata"].update(_time(facts.provenance.date))
    document["metadata"]["component"]["modelCard"] = _model_card(facts)
    document["formulation"] = [_formula(facts)]
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def check_bom(text: str) -> None:
    """Validate a bill of materials against the schema of CycloneDX 1.6, with the library's own validator.

    Raises:
        InputError: it is not valid, and at which place; or the library is not installed.
    """
    require_library()
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    try:
        error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    except (ValueError, RecursionError) as broken:
        raise _invalid(f"it is not JSON: {broken}") from broken
    if error is not None:
        path = ".".join(map(str, getattr(error.data, "absolute_path", ())))
        raise _invalid(f"{path or 'the document'}: {getattr(error.data, 'message', error)!s:.300}")


def require_library() -> None:
    """Require cyclonedx-python-lib and its validator.

    Raises:
        InputError: it is not installed.
    """
    for name in ("cyclonedx.validation.json", "jsonschema"):
        imported(name, "a bill of materials needs cyclonedx-python-lib", "pip install 'onnxtool-cli[release]'")


def _invalid(reason: str) -> InputError:
    return InputError(
        f"the bill of materials ({BOM_NAME}) is not valid: {reason}",
        "make the release again: onnxtool release --config release.toml",
    )


def _file_component(file: ReleasedFile, facts: ReleaseFacts) -> Component:
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component, ComponentType

    is_model = file.role == MODEL
    entries = {
        "role": file.role,
        "size_bytes": str(file.size_bytes),
        "precision": file.precision,
        "target": file.target,
    }
    return Component(
        name=file.path,
        type=ComponentType.MACHINE_LEARNING_MODEL if is_model else ComponentType.FILE,
        bom_ref=f"file:{file.path}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=file.sha256)],
        licenses=_licenses(facts) if file.role in (MODEL, WEIGHTS) else (),
        properties=_properties(entries),
    )


def _package(name: str, version: str) -> Component:
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    package = DISTRIBUTION if name == "onnxtool" else name.lower().replace("_", "-")
    purl = PackageURL("pypi", None, package, version)
    return Component(name=name, type=ComponentType.LIBRARY, bom_ref=str(purl), version=version, purl=purl)


def _licenses(facts: ReleaseFacts) -> Iterator[DisjunctiveLicense]:
    """Yield the license; nothing if it is unknown, which the properties state."""
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model import XsUri
    from cyclonedx.model.license import DisjunctiveLicense
    from cyclonedx.spdx import fixup_id

    if not facts.license.is_known:
        return
    link = XsUri(facts.license.link) if _WEB_ADDRESS.fullmatch(facts.license.link) else None
    known = fixup_id(facts.license.id)
    if known is not None:
        yield LicenseFactory().make_with_id(known, url=link)
    else:
        yield DisjunctiveLicense(name=facts.license.name or facts.license.id, url=link)


def _properties(entries: dict[str, str]) -> Iterable[Property]:
    from cyclonedx.model import Property

    return [Property(name=f"onnxtool:{name}", value=value) for name, value in entries.items() if value]


def _time(date: str) -> dict[str, str]:
    """Return the time for the metadata, if the facts have a day."""
    if not date:
        return {}
    return {"timestamp": datetime.strptime(date, "%Y-%m-%d").replace(tzinfo=UTC).isoformat()}


def _model_card(facts: ReleaseFacts) -> dict[str, Json]:
    """Return the model card of the schema: architecture, task, and the means of the measures of each file."""
    origin = facts.provenance
    parameters = {
        "task": origin.task,
        "architectureFamily": origin.model_type,
        "modelArchitecture": origin.architecture,
    }
    metrics: list[Json] = [
        {
            "type": name,
            "value": f"{measure.mean!r}",
            "slice": f"{model.path} on {result.collection}, {result.split}",
            "confidenceInterval": {"lowerBound": f"{measure.low!r}", "upperBound": f"{measure.high!r}"},
        }
        for model in facts.models
        for result in model.evaluations
        for name, measure in result.measures.items()
    ]
    card: dict[str, Json] = {"modelParameters": {name: value for name, value in parameters.items() if value}}
    if metrics:
        card["quantitativeAnalysis"] = {"performanceMetrics": metrics}
    return card


def _formula(facts: ReleaseFacts) -> dict[str, Any]:
    """Return how the release was made: the command, the tools, and the results."""
    return {
        "bom-ref": "formula",
        "workflows": [
            {
                "bom-ref": "workflow",
                "uid": str(uuid.uuid5(_NAMESPACE, facts.command)),
                "name": "onnxtool release",
                "taskTypes": ["build"],
                "steps": [{"name": _RELEASE, "commands": [{"executed": facts.command}]}],
                "outputs": [{"type": "artifact", "resource": {"ref": _RELEASE}}],
                "properties": [{"name": "onnxtool:record", "value": FACTS_NAME}],
            }
        ],
    }
