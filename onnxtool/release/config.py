"""The configuration of a release: `release.toml`, read strictly."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any

from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.checkpoint.folder import path_parts
from onnxtool.errors import InputError
from onnxtool.evaluation.options import EvaluateOptions
from onnxtool.export.options import ExportOptions
from onnxtool.export.targets import TARGET_NAMES
from onnxtool.optimize.options import PRECISION_NAMES, OptimizeOptions
from onnxtool.options import Option, Options, StrPath, check, checked, field_hints, not_a_choice
from onnxtool.reading import MOST_CONFIG_BYTES, parse_toml, read_text
from onnxtool.runtime.providers import parse_provider

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
# Options that the release sets itself.
_OWN = {
    "export": ("model_name", "revision", "output", "target", "precisions", "max_error", "force", "verify"),
    "optimize": (
        *("model_path", "output", "precision", "provider", "force", "verify", "timing"),
        *("provider_options", "provider_library", "allow_fallback"),  # part of the text of the provider
    ),
    "evaluate": ("model_name", "cache", "against", "prune"),  # what is released is measured as it is
    "benchmark": ("model_name", "compare", "fail_if", "texts"),
}
_CLASSES = {
    "export": ExportOptions,
    "optimize": OptimizeOptions,
    "evaluate": EvaluateOptions,
    "benchmark": BenchmarkOptions,
}
_PRECISIONS = tuple(name for name in PRECISION_NAMES if name != "auto")
_TARGETS = tuple(name for name in TARGET_NAMES if name != "plain")


class ReleaseConfig(Options):
    """The configuration of a release.

    Attributes:
        path: the configuration file; paths in it are relative to its folder.
        name: the name of the release and its files; by default, the last part of the checkpoint's name.
        checkpoint: a folder, or an id on the hub.
        revision: a commit on the hub.
        output: the folder of the release.
        precisions: precisions of the plain files; the others are compared with the first.
        provider: the execution provider that the files are for.
        targets: consumers that each get a folder: the exported file, and one in each of `precisions` that they open.
        allowed_licenses: if not empty, the checkpoint's license must be one of these.
        last: the folder of the previous release, to compare with; None for none.
        data: the test collection; None for no evaluation.
        key: the private key to sign with; None for no signature, or for a signature by an identity.
        key_password: the environment variable with the password of this key, if it has one.
        identity_token: the environment variable with an OpenID Connect token, to sign with Sigstore instead.
        export: options of `export_model`; and so on for the other steps.
        benchmark: None if latencies are not measured.
    """

    path: Path
    name: str
    checkpoint: Annotated[str, Option(is_checkpoint=True)]
    revision: str | None
    output: Annotated[Path, Option(writes="folder")]
    precisions: Annotated[tuple[str, ...], Option(choices=_PRECISIONS)] = ("fp32",)
    provider: Annotated[str, Option(parse=parse_provider)] = "cpu"
    targets: Annotated[tuple[str, ...], Option(choices=_TARGETS)] = ()
    allowed_licenses: tuple[str, ...] = ()
    last: Path | None = None
    data: Path | None = None
    key: Path | None = None
    key_password: str | None = None
    identity_token: str | None = None
    export: Mapping[str, Any] = field(default_factory=dict)
    optimize: Mapping[str, Any] = field(default_factory=dict)
    evaluate: Mapping[str, Any] = field(default_factory=dict)
    benchmark: Mapping[str, Any] | None = None

    @property
    def is_signed(self) -> bool:
        """Whether a key or an identity for signing is set."""
        return self.key is not None or self.identity_token is not None


@checked
def read_config(path: StrPath) -> ReleaseConfig:
    """Read the file at `path`.

    Raises:
        InputError: it cannot be read, is not TOML, or has unknown entries.
    """
    path = Path(path)
    tables = _read_tables(path)
    folder = path.parent
    kinds = {name: kind for name, kind in field_hints(ReleaseConfig).items() if name not in ("path", *_CLASSES)}
    _refuse_unknown(path, "", tables, (*kinds, *_CLASSES))
    steps = {step: _options(path, step, tables.pop(step)) for step in _CLASSES if step in tables}
    values = _values(path, "", tables, kinds)
    if empty := [name for name in values if not tables[name]]:
        raise InputError(f"{path}: {empty[0]} is empty", "leave it out")
    if "checkpoint" not in tables:
        raise InputError(f"{path} names no checkpoint", 'add checkpoint = "ID_OR_DIR" at its top')
    checkpoint = values["checkpoint"]
    if (folder / checkpoint).is_dir() or checkpoint.startswith((".", "/", "~")):
        checkpoint = str(folder / Path(checkpoint).expanduser())
    name = values.get("name", path_parts(checkpoint)[-1])
    if not _NAME.fullmatch(name):
        raise InputError(f"{path}: {name!r} is no name for files", "add name, of letters, digits, dots and dashes")
    precisions, targets = (tuple(dict.fromkeys(values.get(key, ()))) for key in ("precisions", "targets"))
    if name in targets:
        raise InputError(f"{path}: {name!r} is the name of a target's folder", "add another name")
    if "data" not in tables and "evaluate" in steps:
        raise InputError(f"{path} has [evaluate] and no data", 'add data = "DIR", the test collection, at its top')
    if "key" in tables and "identity_token" in tables:
        raise InputError(f"{path} has a key and an identity to sign with", "leave out key, or identity_token")
    if "key_password" in tables and "key" not in tables:
        raise InputError(f"{path} has a key_password and no key", 'add key = "FILE"')
    own = {"path": path, "name": name, "checkpoint": checkpoint, "targets": targets}
    own |= {"precisions": precisions or ("fp32",)}
    return ReleaseConfig(**{"revision": None, "output": folder / f"{name}-release", **values, **own, **steps})


def _read_tables(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise InputError(f"no such file: {path}", "pass the release.toml to --config")
        return parse_toml(read_text(path, MOST_CONFIG_BYTES))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "check its permissions") from error
    except ValueError as error:
        raise InputError(f"{path} is not valid TOML: {error}", "correct the file") from error


def _options(path: Path, step: str, table: Any) -> dict[str, Any]:
    """Return the options of a step.

    Raises:
        InputError: one is unknown, not allowed in a release, or of the wrong type.
    """
    if not isinstance(table, dict):
        raise InputError(f"{path}: {step} is not a table", f"write [{step}]")
    hints = field_hints(_CLASSES[step])
    known = [field_.name for field_ in fields(_CLASSES[step]) if field_.name not in _OWN[step]]
    if own := sorted(set(table) & set(_OWN[step])):
        raise InputError(f"{path}: [{step}] has {own[0]}, which the release decides", "leave it out, or see the top")
    _refuse_unknown(path, f"[{step}] ", table, known)
    return _values(path, f"[{step}] ", table, hints)


def _values(path: Path, place: str, table: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of a table to the types of their fields; paths are relative to the file."""
    typed = {name: check(f"{path}: {place}{name}", value, hints[name]) for name, value in table.items()}
    return {name: _relative_to(path, value) for name, value in typed.items()}


def _relative_to(path: Path, value: Any) -> Any:
    """Return a value whose paths are relative to the folder of the file `path`."""
    if isinstance(value, tuple):
        return tuple(_relative_to(path, item) for item in value)
    return path.parent / value if isinstance(value, Path) else value


def _refuse_unknown(path: Path, place: str, table: Mapping[str, Any], keys: Collection[str]) -> None:
    for name in table:
        if name not in keys:
            raise InputError(f"{path}: {place}{not_a_choice(name, tuple(keys))}", "correct the name, or leave it out")
