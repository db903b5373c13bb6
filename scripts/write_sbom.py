"""Write dist/onnxtool.cdx.json, the software bill of materials of the packages in dist/: CycloneDX 1.6.

Run by `make dist`. It has the SHA-256 of the packages, and all that they need with the extra `export` on this platform,
in the versions of requirements.txt, with licenses and who needs what. The same packages give the same file.
"""

from __future__ import annotations

import hashlib
import os
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import Distribution, distribution
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from onnxtool.release.bom import check_bom
from onnxtool.version import DISTRIBUTION

ROOT = Path(__file__).resolve().parent.parent
_LONGEST_LICENSE = 80  # longer ones are the text itself


def sbom_text(folder: Path) -> str:
    """Describe the packages in `folder`, and what is installed for them.

    Raises:
        ValueError: a version is not the pinned one.
    """
    packages = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted([*folder.glob("*.tar.gz"), *folder.glob("*.whl")])
    }
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"onnxtool:{packages}"))
    bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    components: dict[str, Component] = {}
    seen: set[tuple[str, ...]] = set()

    def add(requirement: Requirement) -> Component:
        name = canonicalize_name(requirement.name)
        installed = distribution(name)
        component = components.setdefault(name, _component(installed))
        key = (name, *sorted(requirement.extras))
        if key not in seen:
            seen.add(key)
            bom.register_dependency(component, [add(needed) for needed in _needed(installed, requirement.extras)])
        return component

    product = add(Requirement(f"{DISTRIBUTION}[export]"))
    product.components.update(
        Component(
            name=name,
            type=ComponentType.FILE,
            bom_ref=name,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        )
        for name, digest in packages.items()
    )
    bom.metadata.component = product
    bom.components.update(component for component in components.values() if component is not product)
    pins = read_pins(ROOT / "requirements.txt")
    for name, component in components.items():
        # A local part names the build, as that of torch for processors alone.
        if component is not product and Version(Version(component.version or "").public) not in pins.get(name, ()):
            raise ValueError(f"{name} {component.version} is not the version of requirements.txt: run make setup")
    return f"{JsonV1Dot6(bom).output_as_string(indent=1)}\n"


def read_pins(path: Path) -> dict[str, list[Version]]:
    """Read `NAME==VERSION` lines with or without markers and hashes; all platforms count.

    Raises:
        ValueError: a line is no pin.
    """
    pins: dict[str, list[Version]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.partition("--hash=")[0].rstrip(" \\")
        if not text or text.startswith("#"):
            continue
        try:
            requirement = Requirement(text)
            (pin,) = requirement.specifier
            if pin.operator != "==":
                raise ValueError(pin.operator)
            pins.setdefault(canonicalize_name(requirement.name), []).append(Version(pin.version))
        except (InvalidRequirement, ValueError):
            raise ValueError(f"{path}: {text!r} pins no version") from None
    return pins


def _component(installed: Distribution) -> Component:
    name, version = canonicalize_name(installed.name), installed.version
    purl = PackageURL("pypi", None, name, version)
    fields = installed.metadata.json
    text = str(fields.get("license_expression") or fields.get("license") or "")
    licenses = [LicenseFactory().make_from_string(text)] if 0 < len(text) <= _LONGEST_LICENSE else []
    return Component(
        name=name, version=version, type=ComponentType.LIBRARY, purl=purl, bom_ref=str(purl), licenses=licenses
    )


def _needed(installed: Distribution, extras: set[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, installed.requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield requirement


if __name__ == "__main__":
    text = sbom_text(Path(sys.argv[1]))
    check_bom(text)
    (Path(sys.argv[1]) / "onnxtool.cdx.json").write_text(text, encoding="utf-8")
