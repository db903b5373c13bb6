"""Compare pinned versions with security advisories in a file; nothing is fetched.

Run `python scripts/check_advisories.py FILE`. FILE is the zip that osv.dev publishes for PyPI, a JSON file with one
advisory or a list of them. Versions are compared as https://ossf.github.io/osv-schema/ describes. Exit code 1: a
pinned version is affected, or an advisory cannot be judged.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from onnxtool import reading

Pins = dict[str, list[Version]]
T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
_BROKEN = (OSError, ValueError, RuntimeError, zipfile.BadZipFile, EOFError, zlib.error)  # RuntimeError: encrypted
_LOWEST = Version("0.dev0")
# Events at one version: a fix ends what came before, and a range may begin and end with the same version.
_ORDER = ("fixed", "introduced", "last_affected")
_LONGEST_SUMMARY = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the advisories that affect a pin, one a line; the errors go to stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="advisories in the format of OSV: .zip or .json")
    parser.add_argument("--pins", type=Path, default=ROOT / "requirements.txt", help="the pinned versions")
    options = parser.parse_args(arguments)
    num_judged = num_found = num_errors = 0
    try:
        pins = read_pins(options.pins)
        for name, load in _sources(options.file):
            num_judged += 1
            try:
                advisory = _as(dict, load(), "the advisory")
                name = advisory.get("id", name)
                for line in judge(advisory, pins):
                    print(line)
                    num_found += 1
            except _BROKEN as error:
                num_errors += _report(name, error)
        if not num_judged:
            raise ValueError("it has no advisory")
    except _BROKEN as error:
        num_errors += _report(options.file, error)
    print(f"{num_judged} advisories: {num_found} pinned versions affected, {num_errors} errors", file=sys.stderr)
    return 1 if num_found or num_errors else 0


def read_pins(path: Path) -> Pins:
    """Read `NAME==VERSION` lines with or without markers and hashes; all platforms count.

    Raises:
        ValueError: a line is no pin.
    """
    pins: Pins = {}
    for line in reading.read_text(path).splitlines():
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


def judge(advisory: dict[str, Any], pins: Pins) -> Iterator[str]:
    """Yield a line for each pin that an advisory affects.

    Raises:
        ValueError: the advisory cannot be judged.
    """
    name = _as(str, advisory.get("id"), "its id")
    if advisory.get("withdrawn"):
        return
    # An entry without a package is about a source repository.
    entries = [_as(dict, entry, "affected") for entry in _as(list, advisory.get("affected"), "affected")]
    packages = [(entry, _as(dict, entry["package"], "package")) for entry in entries if "package" in entry]
    if not packages:
        raise ValueError("it names no package")
    summary = _line(advisory.get("summary") or "no summary", _LONGEST_SUMMARY)
    for entry, package in packages:
        if _as(str, package.get("ecosystem"), "ecosystem").partition(":")[0] != "PyPI":
            continue
        project = canonicalize_name(_as(str, package.get("name"), "the name of a package"))
        for version in pins.get(project, ()):
            fixes = _fixes(entry, version)
            if fixes is not None:
                fixed = f"fixed in {', '.join(map(str, fixes))}" if fixes else "not fixed"
                yield f"{_line(name)}  {project} {version}  {fixed}  {summary}"


def _fixes(entry: dict[str, Any], version: Version) -> list[Version] | None:
    """Return the later versions that `entry` says are fixed; None if it does not affect `version`."""
    listed = _as(list, entry.get("versions", []), "versions")
    ranges = [_as(dict, one, "a range") for one in _as(list, entry.get("ranges", []), "ranges")]
    types = {str(one.get("type")) for one in ranges} - {"GIT"}  # commits, beside the versions
    if types - {"ECOSYSTEM"}:
        raise ValueError(f"a range has the type {min(types - {'ECOSYSTEM'})}")
    if not types and not listed:
        raise ValueError("it has neither versions nor a range of them")
    orders = [_events(one) for one in ranges if one.get("type") == "ECOSYSTEM"]
    affected = [_equal(one, version) for one in listed] + [_is_inside(version, events) for events in orders]
    fixes = {at for events in orders for at, kind in events if kind == "fixed" and at > version}
    return sorted(fixes) if any(affected) else None


def _events(one: dict[str, Any]) -> list[tuple[Version, str]]:
    """Return the events of a range, in order."""
    events = []
    for event in _as(list, one.get("events"), "events"):
        for kind, text in _as(dict, event, "an event").items():
            if kind not in _ORDER:
                raise ValueError(f"an event is called {_line(kind)}")
            events.append((_LOWEST if text == "0" else Version(_as(str, text, "a version")), kind))
    if "introduced" not in {kind for _, kind in events}:
        raise ValueError("a range begins nowhere")
    return sorted(events, key=lambda event: (event[0], _ORDER.index(event[1])))


def _is_inside(version: Version, events: list[tuple[Version, str]]) -> bool:
    """Return whether the last event up to a version begins the range; the last affected version is in it as well."""
    past = [kind for at, kind in events if at < version or (at == version and kind != "last_affected")]
    return past[-1:] == ["introduced"]


def _equal(listed: object, version: Version) -> bool:
    try:
        return Version(_as(str, listed, "a version")) == version
    except InvalidVersion:  # of before PEP 440; no pin has one
        return False


def _sources(path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the advisories of a file, each with where it stands and a function that reads it."""
    if path.suffix == ".zip":
        with reading.open_regular(path) as file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                yield member.filename, partial(_unpack, archive, member)
    else:
        content = reading.read_json(path)
        advisories = content if isinstance(content, list) else [content]
        for place in range(len(advisories)):
            yield f"{path}[{place}]", partial(advisories.__getitem__, place)


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    reading.require_size(member.file_size, member.filename, reading.MOST_LINE_BYTES)
    with archive.open(member) as file:
        return reading.parse_json(file.read(member.file_size))  # without a size, all is unpacked before it is cut


def _as(kind: type[T], value: object, what: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{what}: {kind.__name__} expected, not {type(value).__name__}")
    return value


def _line(text: object, most: int = 80) -> str:
    """Return text of strangers as a part of one line, which cannot steer a terminal."""
    line = "".join(char if char.isprintable() else " " for char in str(text))
    return line if len(line) <= most else f"{line[:most]}…"


def _report(name: object, error: Exception) -> int:
    print(f"error: {_line(name)} cannot be judged: {_line(error, 300)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
