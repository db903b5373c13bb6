"""An ONNX file on disk: opened with its external data checked, and written so that no incomplete file can remain.

Outputs are staged: everything a command writes goes into a hidden folder next to the output, is verified there, and is
moved into place as a whole (`commits`).
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from onnxtool.errors import InputError, ModelFileError, OutputExistsError, OutputWriteError
from onnxtool.interruption import check_interrupted
from onnxtool.model_file.commits import (
    check_free_names,
    commit,
    folder_lock,
    hidden_folder,
    output_exists,
    output_write_error,
    remove_stages,
)
from onnxtool.model_file.commits import disk_failures as disk_failures
from onnxtool.model_file.metadata import (
    ADAPTERS_KEY,
    COMPILED_KEY,
    EMBEDDED_KEY,
    PAIR_KEY,
    PARTNER_KEY,
    PROCESSOR_KEY,
    READS_KEY,
    ROUTE_KEY,
    SIZES_KEY,
    STEPS_KEY,
    TASK_KEY,
    TEXT_KEY,
    AdapterFile,
    Compiled,
    SizedFile,
    TextInput,
    digest_of_blocks,
    digest_of_start,
    is_plain_name,
    parse_adapters,
    parse_compiled,
    parse_sizes,
    parse_steps,
    parse_text_input,
    sizes_entry,
    stamp,
    unpack,
)
from onnxtool.model_file.wire import Structure, check_sound, external_file, read_structure
from onnxtool.options import StrPath, checked, settled
from onnxtool.reading import input_at, note_input
from onnxtool.reports import Json

if TYPE_CHECKING:
    import onnx_ir as ir


T = TypeVar("T")

# Protobuf cannot hold 2 GiB; above this many bytes, weights go to a separate file.
MAX_INLINE_BYTES = 1_900_000_000
NONE_INLINE = -1  # for weights that several graphs read
PIXELS = "pixel_values"  # the input of image models


class ModelFile:
    """An ONNX file with a readable structure, whose external data exists in the file's folder.

    Attributes:
        adapter: the file of the adapter that it runs with; None for the base.
    """

    @checked
    def __init__(self, path: Path, structure: Structure, adapter: Path | None = None) -> None:
        self.path = path
        self.structure = structure
        self.adapter = adapter

    def __repr__(self) -> str:
        return f"ModelFile({str(self.path)!r})"

    @classmethod
    @checked
    def open(cls, path: ModelPath) -> ModelFile:
        """Open the model at `path` without reading its weights; one that is open is returned as it is.

        Raises:
            ModelFileError: the file is missing or malformed, or its external data is missing, too short, or outside the
                folder of the file (`external_file`).
        """
        return path if isinstance(path, ModelFile) else cls._read(Path(path))

    @classmethod
    def _read(cls, path: Path) -> ModelFile:
        model = cls(path, read_structure(path))
        external = {location: external_file(path, location) for location in model.external_locations}
        note_input(path, *external.values())
        sizes = {location: file.stat().st_size for location, file in external.items()}
        for data in model.structure.external:
            available = sizes[data.location]
            if data.offset + (data.length or 0) > available:
                raise ModelFileError(
                    f"the external data {data.location!r} of {path} has {available} bytes; the model refers to bytes "
                    f"up to {data.offset + (data.length or 0)}",
                    "the external data is truncated or belongs to another model; copy it again",
                )
        return model

    @checked
    def stamp(self, entries: Mapping[str, str]) -> None:
        """Add metadata by appending to the file, which must not have any of these keys."""
        stamp(self.path, entries)
        self.structure = self.structure._replace(metadata={**self.structure.metadata, **entries})
        for known in self.__dict__.keys() - {"path", "structure", "adapter"}:
            del self.__dict__[known]

    def check_sound(self) -> None:
        """Refuse a graph that could crash another library; to be called before any library loads it.

        Raises:
            ModelFileError: the fault, by name.
        """
        check_sound(self.path, self.structure)

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The metadata_props of the model, without a tokenizer.json, which is too long for a report."""
        return {key: value for key, value in self.structure.metadata.items() if key != EMBEDDED_KEY}

    @cached_property
    def text_input(self) -> TextInput | None:
        """The record of how the graph reads texts; None for one that reads ids.

        Raises:
            ModelFileError: the metadata is malformed.
        """
        text_input = self._stated(TEXT_KEY, parse_text_input)
        inputs = {info.name for info in self.structure.inputs if info.dtype == "string"}
        if text_input is not None and set(text_input.names) != inputs:
            raise ModelFileError(
                f"the metadata {TEXT_KEY} of {self.path} does not describe its inputs",
                "it was edited by hand, or the graph was; export the model again",
            )
        return text_input

    @cached_property
    def sizes(self) -> tuple[SizedFile, ...]:
        """The files next to it that are this model at fixed sizes; empty for a file alone.

        Raises:
            ModelFileError: the metadata is malformed.
        """
        return self._stated(SIZES_KEY, parse_sizes) or ()

    def _stated(self, key: str, parse: Callable[[str], T | None]) -> T | None:
        """Return the record in the metadata under a key; None if there is none."""
        text = self.metadata.get(key)
        record = None if text is None else parse(text)
        if text is not None and record is None:
            raise ModelFileError(
                f"the metadata {key} of {self.path} cannot be read: {text[:60]!r}",
                "it was edited by hand; make the file again",
            )
        return record

    @checked
    def with_sizes(self, files: Sequence[SizedFile] = ()) -> ModelFile:
        """Return the model with other files of fixed sizes; with none, it runs by itself."""
        metadata = {**self.structure.metadata, **sizes_entry(files)} if files or self.sizes else self.structure.metadata
        return type(self)(self.path, self.structure._replace(metadata=metadata), self.adapter)

    @checked
    def sized(self, entry: SizedFile) -> ModelFile:
        """Open one of the files of fixed sizes.

        Raises:
            ModelFileError: it is missing, or not the file that was written with this one.
        """
        path = self.path.with_name(entry.file)
        if not path.is_file() or digest_of_start(path, path.stat().st_size) != entry.sha256:
            raise ModelFileError(
                f"{path} is {'not the file of its set' if path.is_file() else 'missing'}: {self.path} was written "
                "with it, and states its digest",
                "keep the files of a set together, or run onnxtool optimize --sizes again",
            )
        return type(self).open(path)

    @cached_property
    def adapters(self) -> tuple[AdapterFile, ...]:
        """The adapters next to it; empty for a file alone.

        Raises:
            ModelFileError: the metadata is malformed.
        """
        return self._stated(ADAPTERS_KEY, parse_adapters) or ()

    @checked
    def with_adapter(self, name: str | None, beside: Path | None = None) -> ModelFile:
        """Return the model as it runs with the adapter of this name; for None, as it is.

        The adapter's file is next to the graph, or to the graph at `beside`, or next to what that path links to.

        Raises:
            InputError: it has no adapter of this name.
            ModelFileError: the adapter's file is missing, or not the one that was written with this file.
        """
        if name is None:
            return self
        stated = next((adapter for adapter in self.adapters if adapter.name == name), None)
        if stated is None:
            known = ", ".join(adapter.name for adapter in self.adapters)
            raise InputError(
                f"{self.path} has no adapter {name!r}; it has {known}"
                if known
                else f"{self.path} has no adapters, and {name!r} was passed",
                "pass one of these" if known else "export the checkpoint with --adapter",
            )
        graph = beside or self.path
        path = graph.with_name(stated.file)
        if graph.is_symlink() and not path.is_file():
            path = graph.resolve().with_name(stated.file)
        if not path.is_file() or digest_of_blocks(path) != stated.sha256:
            raise ModelFileError(
                f"{path} is {'another file' if path.is_file() else 'missing'}: {self.path} was written with it, and "
                "states its digest",
                "keep a model and its adapters in one folder, or export them again",
            )
        return type(self)(self.path, self.structure, path)

    @cached_property
    def compiled(self) -> Compiled | None:
        """The record of what a provider has compiled; None for a graph of operators.

        Raises:
            ModelFileError: the metadata is malformed.
        """
        return self._stated(COMPILED_KEY, parse_compiled)

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The graph file, its external data, its files of fixed sizes, its adapters, and what is compiled."""
        members = [self.path.with_name(stated.file) for stated in self.sizes]
        graphs = [self, *(type(self)(path, read_structure(path)) for path in members if path.is_file())]
        contexts = [graph.path.with_name(graph.compiled.context) for graph in graphs if graph.compiled is not None]
        contexts += [self.path.with_name(adapter.file) for adapter in self.adapters]
        return (self.path, *(self.path.parent / location for location in self.external_locations), *members, *contexts)

    @cached_property
    def embedded_tokenizer(self) -> str | None:
        """The tokenizer.json in the metadata; None if there is none.

        Raises:
            ModelFileError: it is malformed.
        """
        packed = self.structure.metadata.get(EMBEDDED_KEY)
        content = None if packed is None else unpack(packed)
        if packed is not None and content is None:
            raise ModelFileError(f"the metadata {EMBEDDED_KEY} of {self.path} is damaged", "export the model again")
        return content

    @property
    def stated_task(self) -> str:
        """The task in the metadata; empty for a file from another exporter."""
        return self.metadata.get(TASK_KEY, "")

    @cached_property
    def input_names(self) -> frozenset[str]:
        """The names of the graph's inputs."""
        return frozenset(info.name for info in self.structure.inputs)

    @property
    def takes_pictures(self) -> bool:
        """Whether the graph takes images and no text, except for page tokens."""
        return PIXELS in self.input_names and ("input_ids" not in self.input_names or PROCESSOR_KEY in self.metadata)

    @cached_property
    def external_locations(self) -> tuple[str, ...]:
        """The external data files, relative to the folder of the graph file, sorted."""
        return tuple(sorted({data.location for data in self.structure.external}))

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.stat().st_size for file in {*self.files} if file.is_file())

    @cached_property
    def leads_elsewhere(self) -> bool:
        """Whether the file or its external data is a link, as in the hub's cache."""
        folder = self.path.parent.resolve()
        files = {self.path.name: self.path.resolve()}
        files |= {location: external_file(self.path, location) for location in self.external_locations}
        return any(file != folder / PurePosixPath(location) for location, file in files.items())

    @checked
    def plain_name(self, key: str, kind: str = "file") -> str | None:
        """Return the name of a companion file in the metadata under `key`; None if there is none.

        Raises:
            ModelFileError: the name leads elsewhere: metadata is untrusted.
        """
        name = self.metadata.get(key)
        if name and not is_plain_name(name):
            raise ModelFileError(
                f"the metadata {key} of {self.path} is {name!r}, which is not the name of a {kind} beside it",
                "do not trust this file, or name the other one yourself",
            )
        return name or None

    @checked
    def for_task(self, task: str | None, partner: Path | None = None) -> ModelFile:
        """Return the file that encodes texts for a task: this one or its partner.

        Args:
            task: `query` or `document`; None for texts without a task, which any file takes.
            partner: the other file of its checkpoint; None for the one named in the file.

        Raises:
            InputError: the file is for other texts, and the one for these is missing or does not belong to it.
            ModelFileError: a file cannot be used, or names a partner that is not next to it.
        """
        reads = self.metadata.get(READS_KEY)
        if task is None or reads is None or task in reads.split(", "):
            return self
        route = self.metadata.get(ROUTE_KEY)
        name = self.plain_name(PARTNER_KEY)
        if partner is None and name is None:
            raise InputError(
                f"{self.path} holds the route {route} of its checkpoint, which is for texts of the task {reads}, and "
                f"not {task}",
                "export the checkpoint without --route, which writes the files of both",
            )
        partner = partner or self.path.with_name(str(name))
        if not partner.is_file():
            raise InputError(
                f"{self.path} is for texts of the task {reads}, and the file for {task} is not there: {partner}",
                "keep both files of the checkpoint in one folder",
            )
        other = type(self).open(partner)
        tasks, pair = (other.metadata.get(key, "") for key in (READS_KEY, PAIR_KEY))
        if task not in tasks.split(", ") or pair != self.metadata.get(PAIR_KEY, ""):
            raise InputError(
                f"{partner} is not the partner of {self.path}: they were written by two runs, of other weights, or it "
                f"is not for texts of the task {task}",
                "run the export again, which writes both",
            )
        return other

    @checked
    def metadata_number(self, key: str) -> int | None:
        """Return the positive number in the metadata under `key`; None if there is none.

        Raises:
            ModelFileError: the value is not a positive number.
        """
        text = self.metadata.get(key)
        if text is None:
            return None
        # Metadata is untrusted: int() reads digits of any script, and fails on thousands of them.
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
            raise ModelFileError(
                f"the metadata {key} of {self.path} is {text[:60]!r}, not a number",
                "it was edited, or another tool means something else by it; export the model again",
            )
        return int(text)

    @cached_property
    def steps(self) -> tuple[dict[str, Json], ...]:
        """The steps recorded by onnxtool, oldest first; empty for models from other tools."""
        return self._stated(STEPS_KEY, parse_steps) or ()


ModelPath = StrPath | ModelFile
"""A file, or one that is open: whoever opens it hands it on."""


class Staging:
    """The hidden folder in which an output is made.

    Attributes:
        folder: where to write; nothing outside it changes before the commit.
        output: the final path of the graph file.
        root: the folder that `folder` is merged into: the graph file's folder, or one above it.
        obsolete: files to remove with the commit, such as sidecar files of the replaced model.
        obsolete_data: external data to remove with the graph that refers to it.
        locations: the external data of graphs, as far as it is known from writing them.
        manifest: a file with the digests of all others, which is there before them and goes after them.
        data_suffix: what a consumer appends to the name of the graph file for its external data; empty for our names.
    """

    def __init__(self, folder: Path, output: Path, root: Path) -> None:
        self.folder = folder
        self.output = output
        self.root = root
        self.obsolete: list[Path] = []
        self.obsolete_data: list[Path] = []
        self.locations: dict[Path, tuple[str, ...]] = {}
        self.manifest: Path | None = None
        self.data_suffix = ""

    def remove(self, graph: Path) -> None:
        """Remove another graph and its external data with the commit."""
        self.obsolete.append(graph)
        self.obsolete_data.extend(_own_data(graph))

    @property
    def model_path(self) -> Path:
        """The graph file while it is staged."""
        return self.folder / self.output.relative_to(self.root)

    @property
    def data_name(self) -> str:
        """A name for external data that does not collide with the data of the existing model, or the consumer's."""
        if self.data_suffix:
            return f"{self.output.name}{self.data_suffix}"
        # A renamed graph refers to its data by the old name, so an existing file may still be in use.
        first = f"{self.output.name}.data"
        names = itertools.chain([first], (f"{first}.{number}" for number in itertools.count(2)))
        return next(name for name in names if not (self.output.parent / name).exists())


@contextmanager
def staged(output: Path, *, force: bool, root: Path | None = None) -> Iterator[Staging]:
    """Provide a folder for a model and its sidecar files, and move them into place if the block succeeds.

    The layout of the folder is the final layout of `root`, which is the folder of `output` or one above it. An existing
    sidecar file with the same content is no conflict. Without a `root`, an `output` that is a symbolic link stays a
    link, and its target is written.

    Raises:
        OutputExistsError: the output, or a sidecar file with other content, exists and `force` is not set.
        OutputWriteError: the disk is full, the folder cannot be written, …
        BaseException: a signal asked to stop, and the block did not.
    """
    check_writable(output, force=force)
    if root is None:
        output = follow_link(output)
        root = output.parent
    with disk_failures(output), hidden_folder(root, output.name) as hidden:
        staging = Staging(hidden / "files", output, root)
        staging.model_path.parent.mkdir(parents=True, exist_ok=True)
        yield staging
        check_interrupted()
        with folder_lock(root, waits=True):
            _commit(staging, hidden, force=force)


def follow_link(output: Path) -> Path:
    """Return the target of `output` if it is a symbolic link, else `output` itself, `settled`.

    Raises:
        OutputWriteError: the links lead in a circle.
    """
    if not output.is_symlink():
        return settled(output)
    target = Path(os.path.realpath(output))
    if target.is_symlink():
        raise OutputWriteError(
            f"cannot write {output}: it is a symbolic link that leads to itself", "remove it, or pass another --output"
        )
    return target


def check_writable(output: Path, *, force: bool) -> None:
    """Refuse an output that `staged` would refuse, before an hour of work goes into it.

    What killed runs left of this output is removed first.

    Raises:
        OutputExistsError: the output is there and `force` is not set.
        OutputWriteError: the output is a folder or a device, or cannot be the name of a file.
    """
    with disk_failures(output):
        remove_stages(follow_link(output))
    _check_free(output, force=force)


def _check_free(output: Path, *, force: bool) -> None:
    target = follow_link(output)
    with disk_failures(output):
        is_file, exists = target.is_file(), target.exists()
    if exists and not is_file:  # a rename would replace /dev/null
        raise OutputWriteError(f"cannot write {output}: it is not a regular file", "pass the path of a file to write")
    if target != output and not exists and not force:
        raise OutputExistsError(
            f"{output} is a symbolic link to {target}, which is not there",
            "pass --force to write that file, or another path",
        )
    check_not_input(output)
    if exists and not force:
        raise output_exists(output)
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    if not os.access(folder, os.W_OK):
        is_fixed = sys.platform != "win32" and os.statvfs(folder).f_flag & os.ST_RDONLY
        reason = errno.EROFS if is_fixed else errno.EACCES
        raise output_write_error(output, OSError(reason, os.strerror(reason), str(folder)))


def check_not_input(output: Path, *, lies_in: bool = True) -> None:
    """Refuse to replace what the running call reads: a file by any name, a file in a folder, or the folder around it.

    Without `lies_in`, a folder that is read may have files of the output, which are known to be its own.

    Raises:
        OutputWriteError: it does.
    """
    if (source := input_at(output, lies_in=lies_in)) is not None:
        relation = "is" if output.samefile(source) else "lies in" if output.is_file() else "holds"
        raise OutputWriteError(
            f"{output} {relation} an input of this command, {source}", "pass another path to write to"
        )


def check_model_output(output: Path, *, force: bool) -> None:
    """Refuse what `check_writable` refuses, and a name that is not NAME.onnx: sidecar files go to the folder NAME.

    Raises:
        OutputExistsError: the output is there and `force` is not set.
        OutputWriteError: the output cannot be the name of a model file.
    """
    if output.suffix != ".onnx" or not output.stem.strip("."):
        raise OutputWriteError(f"the output {output} is not called NAME.onnx", "pass --output PATH/NAME.onnx")
    check_writable(output, force=force)


def check_sidecar_files(folder: Path, existing: Path) -> None:
    """Refuse the files in `folder` if `existing` has others with their names, as `staged` would in the end.

    Raises:
        OutputExistsError: there is one with other content.
    """
    check_free_names([(file, existing / file.relative_to(folder)) for file in _files_in(folder)])


def write_text(output: Path, text: str, *, force: bool) -> None:
    """Write a report to `output` through a staged file.

    Raises:
        OutputExistsError: the output is there and `force` is not set.
        OutputWriteError: the output cannot be written.
    """
    with staged(output, force=force) as staging:
        staging.model_path.write_text(text, encoding="utf-8")


def save_model(model: ir.Model, staging: Staging, *, max_inline_bytes: int = MAX_INLINE_BYTES) -> Path:
    """Write `model` into the staging folder, in one file, or with external data above `max_inline_bytes` of weights.

    Returns:
        The path of the staged graph file.
    """
    import onnx_ir as ir

    from onnxtool.model_file.weights import write_inline

    path = staging.model_path
    weights = [v.const_value for graph in model.graphs() for v in graph.initializers.values()]
    if sum(weight.nbytes for weight in weights if weight is not None) > max_inline_bytes:
        ir.save(model, path, external_data=staging.data_name)
        staging.locations[path] = (staging.data_name,)
    else:
        write_inline(model, path)
        staging.locations[path] = ()
    return path


def save_beside(model: ir.Model, staging: Staging, name: str, *, max_inline_bytes: int = MAX_INLINE_BYTES) -> Path:
    """Write another graph into the staging folder, called `name`, next to the first one, and return its path.

    External data of an existing graph at that path survives until the commit, which removes it.
    """
    output = staging.output.with_name(name)
    staging.obsolete_data.extend(_own_data(output))
    other = Staging(staging.folder, output, staging.root)
    other.locations = staging.locations
    return save_model(model, other, max_inline_bytes=max_inline_bytes)


@contextmanager
def scratch_folder(output: Path) -> Iterator[Path]:
    """Provide a folder for intermediate files of `output`; if this run is killed, the next one removes it.

    Raises:
        OutputWriteError: the disk is full, the folder cannot be written, …
    """
    with disk_failures(output), hidden_folder(output.parent, output.name) as hidden:
        yield hidden / "files"


@contextmanager
def scratch_file(model: ir.Model, folder: Path) -> Iterator[Path]:
    """Write `model`, of any size, to a file in `folder` that exists during the block."""
    import tempfile

    with tempfile.TemporaryDirectory(dir=folder) as name:
        inside = Path(name)
        yield save_model(model, Staging(inside, inside / "model.onnx", inside))


def _locations_of(output: Path) -> tuple[str, ...]:
    if not output.is_file():
        return ()
    try:
        return ModelFile(output, read_structure(output)).external_locations
    except ModelFileError:
        return ()  # a broken file about to be replaced owns no data


def _parts_of(output: Path) -> list[Path]:
    """Return the files of fixed sizes and compiled parts of the graph being replaced whose digests fit.

    They are called after it: a hostile graph may name any file.
    """
    if not output.is_file():
        return []
    try:
        old = ModelFile(output, read_structure(output))
        named = [(size.file, size.sha256) for size in old.sizes]
        named += [(adapter.file, adapter.sha256) for adapter in old.adapters]
        named += [] if old.compiled is None else [(old.compiled.context, old.compiled.context_sha256)]
    except ModelFileError:
        return []
    own = re.compile(re.escape(output.stem) + r"(-[0-9x]+)?(\.onnx|_.+|\..+\.onnx_adapter)")
    candidates = [(output.with_name(name), digest) for name, digest in named if own.fullmatch(name)]
    parts = [part for part, digest in candidates if part.is_file() and _digest(part) == digest]
    return [file for part in parts for file in (part, *(_parts_of(part) if part.suffix == ".onnx" else ()))]


def _digest(part: Path) -> str:
    return digest_of_start(part, part.stat().st_size) if part.suffix == ".onnx" else digest_of_blocks(part)


def _stated_by(staging: Staging) -> set[Path]:
    """Return where the files that the new graph needs lie."""
    try:
        new = ModelFile(staging.model_path, read_structure(staging.model_path))
        return {staging.output.with_name(file.name) for file in new.files}
    except ModelFileError:
        return set()  # a report, say


def _own_data(output: Path, locations: Sequence[str] | None = None) -> list[Path]:
    """Return the external data of the graph at `output` that onnxtool wrote; only from `locations`, if given.

    They are identified by name: a hostile graph may name any file as its data.
    """
    own = re.compile(re.escape(output.name) + r"(\.data(\.[0-9]+)?|_data)")
    named = _locations_of(output) if locations is None else locations
    return [output.parent / location for location in named if own.fullmatch(location)]


def _commit(staging: Staging, hidden: Path, *, force: bool) -> None:
    """Move the staged files into place, and drop data that only the old graph used."""
    _check_free(staging.output, force=force)  # another process may have made it meanwhile
    files = _files_in(staging.folder)
    locations = {
        graph: staging.locations[graph] if graph in staging.locations else _locations_of(graph)
        for graph in files
        if graph.suffix == ".onnx"
    }
    data = {graph.parent / name for graph, names in locations.items() for name in names}
    # Graphs come last but for their data, without which they cannot be opened: a run that replaces them finds it.
    files.sort(key=lambda file: (file in data, file == staging.model_path, file.suffix == ".onnx"))
    files.sort(key=lambda file: file != staging.manifest)
    targets = {file: staging.root / file.relative_to(staging.folder) for file in files}
    if not force:
        check_free_names([pair for pair in targets.items() if pair[0] != staging.model_path])
    for target in targets.values():
        check_not_input(target)
    new_locations = locations.get(staging.model_path, ())
    superseded = [location for location in _locations_of(staging.output) if location not in new_locations]
    if parts := {*_parts_of(staging.output)}:  # a copied graph has those of the old one, which were copied before it
        staging.obsolete.extend(parts - {*targets.values()} - _stated_by(staging))
    # A copied graph refers to the data of the old one.
    unread = [file for file in _own_data(staging.output, superseded) if input_at(file) is None]
    commit(hidden, [*targets.values()], staging.obsolete, [*staging.obsolete_data, *unread])


def _files_in(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file()]
