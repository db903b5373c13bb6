"""The plan of an encoded corpus: its shards, where the texts of each begin, and a digest of them.

It lies beside the folder of vectors and is all that machines share: any of them encodes any shard by it, without the
ids of the others. It holds neither times nor absolute paths, so that the same collection gives the same plan.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from onnxtool.encoding.files import create, entry, read_bytes, remove, write
from onnxtool.encoding.job import Job
from onnxtool.encoding.locations import AnyLocation, Location, joined, parse_location, relative
from onnxtool.encoding.manifest import Identity, json_text
from onnxtool.encoding.options import VectorOptions, Workers
from onnxtool.encoding.output import OutputFolder
from onnxtool.encoding.planned_shards import MOST_SHARDS, PlannedShard
from onnxtool.encoding.records import remove_records
from onnxtool.encoding.report import PlanReport
from onnxtool.encoding.scanning import scan_corpus
from onnxtool.errors import InputError, OutputExistsError
from onnxtool.model_file import check_writable, write_text
from onnxtool.options import Option, checked
from onnxtool.runtime.session import available_cores

SUFFIX = ".plan.json"
_FORMAT = 2
_MOST = 1 << 62
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class CorpusPlan:
    """A plan that was read.

    Attributes:
        path: of its file.
        sha256: of its file, by which records of shards tell that they belong to it.
        model_path: the model.
        corpus: the collection.
        identity: what the bytes of the vectors depend on.
    """

    path: Location
    sha256: str
    model_path: Location
    corpus: Location
    options: VectorOptions
    identity: Identity
    shards: tuple[PlannedShard, ...]

    @property
    def folder(self) -> OutputFolder:
        """The folder of vectors, beside which the plan lies."""
        return OutputFolder(self.path.with_name(self.path.name.removesuffix(SUFFIX)))


@checked
def make_plan(
    model_path: AnyLocation,
    corpus: AnyLocation,
    output: AnyLocation,
    options: VectorOptions | None = None,
    *,
    workers: Workers = 0,
    force: bool = False,
) -> PlanReport:
    """Read a corpus once and write the plan of encoding it into the folder `output`, to `NAME.plan.json` beside it.

    Args:
        model_path: as of `encode_corpus`.
        corpus: likewise.
        output: a folder that is empty or not there.
        options: what the vectors are.
        workers: processes that read the corpus; 0 for one a core.
        force: whether to replace a plan that is there, and to forget what was encoded by it.

    Raises:
        OnnxtoolError: as `encode_corpus`.
    """
    start = time.perf_counter()
    folder, model_path, corpus = OutputFolder(output), parse_location(model_path), parse_location(corpus)
    path = folder.beside(SUFFIX.removeprefix("."))
    if isinstance(path, Path):
        check_writable(path, force=force)
    elif not force and entry(path):
        raise _exists(path)
    if folder.require_own(force=force) and not force:
        raise OutputExistsError(f"{folder.path} holds vectors already", "pass --force, or another --output")
    job = Job.open(model_path, corpus, options or VectorOptions())
    shards, reasons = scan_corpus(job.sources, job.options.shard_size, workers or available_cores())
    with folder.writing():
        if force:  # vectors of another plan are replaced shard by shard, or removed when the parts are merged
            remove([folder.manifest_path, folder.rejects_path])
            remove_records(folder)
        text = _to_json(job, model_path, corpus, path.parent, shards)
        if isinstance(path, Path):
            write_text(path, text, force=force)
        elif force:
            write(path, text.encode())
        elif not create(path, text.encode()):
            raise _exists(path)
    return PlanReport(
        plan=str(path),
        output=str(folder.path),
        num_shards=len(shards),
        num_texts=sum(shard.texts for shard in shards),
        rejects=dict(sorted(reasons.items())),
        size_bytes=len(text.encode()),
        seconds=time.perf_counter() - start,
        notes=tuple(job.notes(0)),
    )


def _exists(path: Location) -> OutputExistsError:
    return OutputExistsError(f"{path} exists", "pass --force, or another --output")


def _to_json(
    job: Job, model_path: Location, corpus: Location, folder: Location, shards: tuple[PlannedShard, ...]
) -> str:
    """Write a plan, a shard a line; paths are relative to its folder, which may lie elsewhere on another machine."""
    options = replace(job.options, provider=job.model.session.provider)
    chosen = {field.name: getattr(options, field.name) for field in fields(VectorOptions)}
    # What they said of the vectors, the identity holds.
    del chosen["ranges"], chosen["calibration"]
    if options.model_name and Path(options.model_name).is_dir():
        chosen["model_name"] = relative(Path(options.model_name), folder)
    head = {
        "format": _FORMAT,
        "model": relative(model_path, folder),
        "input": relative(corpus, folder),
        "options": chosen,
        "identity": job.identity,
    }
    lines = ",\n".join(json.dumps(shard._asdict()) for shard in shards)
    return f'{json_text(head, indent=1)[:-2]},\n "shards": [\n{lines}\n]}}\n'


def read_plan(path: AnyLocation) -> CorpusPlan:
    """Return the plan in a file.

    Raises:
        InputError: there is none, or it is no plan.
    """
    path = parse_location(path)
    try:
        if not path.name.endswith(SUFFIX) or path.name == SUFFIX:
            raise InputError(
                f"{path} is not called as a plan is", f"pass the NAME{SUFFIX} beside the folder of vectors"
            )
        content = read_bytes(path)
        data = json.loads(content)
        if data["format"] != _FORMAT:
            raise ValueError(f"its format is {str(data['format'])[:40]}, and this onnxtool reads {_FORMAT}")
        folder = path.parent.resolve() if isinstance(path, Path) else path.parent
        options = _options(data["options"], path, folder)
        entries = _require(data["shards"], list, "shards")
        if len(entries) > MOST_SHARDS:
            raise ValueError(f"it has {len(entries)} shards, of at most {MOST_SHARDS}")
        shards = tuple(_shard(entry, options.shard_size) for entry in entries)
        places = [shard[:3] for shard in shards]
        ordered = all(before[:2] < after[:2] for before, after in itertools.pairwise(places))
        if not places or places[0] != (0, 0, 0) or not ordered:
            raise ValueError("its shards are not in order")
        return CorpusPlan(
            path=path,
            sha256=hashlib.sha256(content).hexdigest(),
            model_path=joined(folder, _path(data["model"], "model")),
            corpus=joined(folder, _path(data["input"], "input")),
            options=options,
            identity=_require(data["identity"], dict, "identity"),
            shards=shards,
        )
    except OSError as error:
        raise InputError(f"cannot read the plan {path}: {error.strerror}", "make one: onnxtool encode plan") from error
    except KeyError as error:
        raise _no_plan(path, f"it has no {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise _no_plan(path, str(error)) from error


def _no_plan(path: Location, reason: str) -> InputError:
    return InputError(f"{path} is not a plan of a corpus: {reason}", "make it again: onnxtool encode plan --force")


def _options(data: Any, path: Location, folder: Location) -> VectorOptions:
    """Check options as the command line would, which has made them."""
    given = dict(_require(data, dict, "options"))
    hints = get_type_hints(VectorOptions, include_extras=True)
    for name, value in given.items():
        if name not in hints or name in ("ranges", "calibration"):
            raise ValueError(f"{name[:40]!r} is none of its options")
        kind, *described = get_args(hints[name])
        option = next(item for item in described if isinstance(item, Option))
        is_choice = not option.choices or value in (None, *option.choices)
        if type(value) not in (get_args(kind) or (kind,)) or not is_choice:
            raise ValueError(f"its option {name} is {str(value)[:40]!r}")
        if type(value) is int and _count(value, name) > (option.maximum or _MOST):
            raise ValueError(f"its option {name} is {value}, of at most {option.maximum:.0f}")
        if isinstance(value, str):
            _require_name(value, f"option {name}")
    if missing := [name for name in hints if name not in given and name not in ("ranges", "calibration")]:
        raise ValueError(f"it has no option {missing[0]}")
    name = given["model_name"]
    if name and isinstance(folder, Path) and (folder / name).is_dir():
        given["model_name"] = str(folder / name)
    # The identity of the plan holds the ranges, as a manifest's does. They are read when the model is loaded.
    has_ranges = given["vectors_as"] in ("int8", "uint8")
    ranges = (path if isinstance(path, Path) else Path(path.name)) if has_ranges else None
    try:
        return VectorOptions(**given, ranges=ranges)
    except InputError as error:
        raise ValueError(error.message) from error


def _shard(entry: Any, shard_size: int) -> PlannedShard:
    shard = PlannedShard(**_require(entry, dict, "shard"))
    for name in ("source", "line", "offset", "texts", "rejects"):
        _count(getattr(shard, name), name)
    if not 1 <= shard.texts <= shard_size:
        raise ValueError(f"its shard has {shard.texts} texts, of at most {shard_size}")
    if not isinstance(shard.digest, str) or not _DIGEST.fullmatch(shard.digest):
        raise ValueError(f"its digest is {str(shard.digest)[:40]!r}")
    repeated = [_range(place) for place in _require(shard.repeated, list, "repeated")]
    if any(before[1] >= after[0] for before, after in itertools.pairwise(repeated)):
        raise ValueError("its repeated places are not in order")
    return shard._replace(repeated=tuple(repeated))


def _range(value: Any) -> tuple[int, int]:
    begin, end = (_count(place, "repeated") for place in _require(value, list, "repeated"))
    if begin >= end:
        raise ValueError(f"its repeated is {str(value)[:40]!r}")
    return begin, end


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"its {name} is {str(value)[:40]!r}")
    return value


def _path(value: Any, name: str) -> str:
    text: str = _require(value, str, name)
    _require_name(text, name)
    if not text:
        raise ValueError(f"its {name} is empty")
    return text


def _require_name(text: str, name: str) -> None:
    """Refuse what no file can be called; the rest of the texts of a plan are no stranger."""
    try:
        is_name = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ValueError(f"its {name} is {text[:40]!r}")


def _require(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"its {name} is {str(value)[:40]!r}")
    return value
