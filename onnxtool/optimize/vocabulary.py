"""Cut a model and its tokenizer to the tokens of some texts, before anything else is done to the graph.

The cut file is compared with the input on these texts: ids map one to one, and outputs are equal bit by bit. Passes,
conversions and their verification then work on the cut file as on any other.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.files import MODULE_WEIGHTS
from onnxtool.checkpoint.folder import SMALL_FILES, TOKENIZER_NAME, CheckpointFolder, find_checkpoint_folder
from onnxtool.checkpoint.limits import reserved_positions
from onnxtool.checkpoint.sentence_modules import as_list
from onnxtool.checkpoint.static_embeddings import IDF_NAME, SparseStaticEmbedding, table_files
from onnxtool.checkpoint.tokenizer_library import ROLES
from onnxtool.checkpoint.vocabulary import Vocabulary, ids_in_settings, renumber_settings, renumbering
from onnxtool.errors import InputError, OutputExistsError, OutputWriteError, PassError, some
from onnxtool.graph.shapes import find_shapes
from onnxtool.model_file import ModelFile, Staging, check_sidecar_files, save_model, staged
from onnxtool.model_file.metadata import (
    DECODER_KEY,
    ENCODER_KEY,
    FILES_KEY,
    INPUTS_KEY,
    PARTNER_KEY,
    PROCESSOR_KEY,
    SIZES_KEY,
    STEPS_KEY,
    TOKENIZER_KEY,
    VOCABULARY_KEY,
    WEIGHTS_KEY,
)
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.options import QUANTIZED, OptimizeOptions
from onnxtool.optimize.report import OptimizeReport, VocabularyCut
from onnxtool.optimize.vocabulary_check import HELD_OUT, Check, Texts, read_settings
from onnxtool.optimize.vocabulary_rows import IDS, VocabularyRows
from onnxtool.progress import tell
from onnxtool.reading import parse_json, read_bytes
from onnxtool.runtime.adapters import copy_adapters
from onnxtool.runtime.tokens import open_tokenizer
from onnxtool.summary import summarize_file

_OVER_VOCABULARY = ("fill-mask", "sparse-encoding", "text-generation", "text-generation-with-past")
_TOGETHER = (ENCODER_KEY, DECODER_KEY, PARTNER_KEY, PROCESSOR_KEY)  # of files that share a tokenizer with another
_WORDPIECE = "vocab.txt"
_OF_OTHERS = ("vocab.json", "merges.txt", "*.model")  # what slow tokenizers read instead of tokenizer.json
_FURTHER = ("generation_config.json", IDF_NAME, _WORDPIECE, *_OF_OTHERS)
_ENOUGH = 32  # texts to calibrate on
Optimize = Callable[[OptimizeOptions], OptimizeReport]


def optimize_cut(source: ModelFile, output: Path, options: OptimizeOptions, optimize: Optimize) -> OptimizeReport:
    """Cut the vocabulary of `source`, and optimize what is left.

    Args:
        source: the file.
        output: where to write; the tokenizer goes to the folder of its name without the suffix.
        options: of the optimization.
        optimize: optimizes a file.

    Raises:
        InputError: there are no texts, or the tokenizer cannot be cut.
        PassError: the graph cannot be cut, or the cut file differs on texts whose tokens are kept.
        OnnxtoolError: as for other files.
    """
    texts, own = Path(str(options.vocabulary)), output.with_suffix("")
    with staged(output, force=options.force) as staging, tempfile.TemporaryDirectory(dir=staging.folder.parent) as name:
        inside = Path(name)
        work = Cut(source, texts, inside / f"cut-{output.name}", inside / own.name)
        if own.is_dir() and own.samefile(work.folder.path):
            raise OutputWriteError(f"the cut tokenizer would replace the whole one in {own}", "pass another --output")
        cut, found = work.write(runs=options.verify)
        copy_adapters(source, inside)
        del work  # which holds the weights
        old = own.rglob("*") if own.is_dir() else ()
        stale = [
            path for path in old if _is_small(path, own) and not (inside / own.name / path.relative_to(own)).exists()
        ]
        if not options.force:
            check_sidecar_files(inside / own.name, own)
            if stale:
                raise OutputExistsError(
                    f"{stale[0]} is of another tokenizer", "pass --force to remove it, or another --output"
                )
        staging.obsolete += stale
        inner = replace(options, vocabulary=None, model_path=cut.path, output=inside / output.name, force=False)
        if (
            options.calibration is None
            and found.num_texts >= _ENOUGH
            and texts.suffix != ".json"
            and options.precision in (*QUANTIZED, "auto")
        ):
            inner = replace(inner, calibration=texts)  # all of their tokens are there
        report = optimize(inner)
        for file in (cut.path, *(cut.path.with_name(name) for name in cut.external_locations)):
            file.unlink()
        for file in list(inside.iterdir()):
            file.rename(staging.model_path.parent / file.name)
        after = summarize_file(ModelFile.open(staging.model_path))._replace(path=str(output))
    return replace(report, output=str(output), before=summarize_file(source), after=after, vocabulary=found)


def _is_small(path: Path, folder: Path, names: Collection[str] = ()) -> bool:
    """Return whether a file is one that lies with a graph, and may name tokens."""
    name = path.relative_to(folder).as_posix()
    return path.is_file() and any(fnmatch(name, one) for one in (*SMALL_FILES, *_FURTHER, *names))


def _small_files(folder: CheckpointFolder) -> Iterator[Path]:
    """Yield the files of a checkpoint that are cut with it, but not those in folders of other models."""
    modules = folder.sentence_modules
    query = [] if modules.query is None else [modules.query]
    parts = {"", folder.transformer_folder, *(module.folder for module in (*modules.modules, *query))}
    names = [name for module in query for name in table_files(module)]
    for path in sorted({path for part in parts for path in (folder.path / part).glob("*")}):
        if _is_small(path, folder.path, names) and not any(fnmatch(path.name, name) for name in _OF_OTHERS):
            yield folder.inside(path, folder.path)


class Cut:
    """A model, its tokenizer, and what is left of them.

    Attributes:
        folder: the files of its checkpoint.
    """

    def __init__(self, source: ModelFile, texts: Path, path: Path, folder: Path) -> None:
        together = [key for key in _TOGETHER if key in source.metadata]
        if together or source.text_input is not None:
            what = f"shares it with another file ({together[0]})" if together else "has its tokenizer in the graph"
            raise PassError(f"the vocabulary of {source.path} cannot be cut: it {what}", "leave --vocabulary out")
        self._source, self._path, self._files = source, path, folder
        self.folder = find_checkpoint_folder(source)
        self._own = open_tokenizer(self.folder)
        self._vocabulary = Vocabulary.of(self._own.rules)
        self._texts = Texts(texts, source, self.folder)
        self._model = load_model(source.path)
        self._settings = {file.relative_to(self.folder.path).as_posix(): file for file in _small_files(self.folder)}
        query = self.folder.sentence_modules.query
        self._by_token = (IDF_NAME, *(() if query is None else table_files(query)))  # weights, not settings
        shapes, size = find_shapes(self._model), self._vocabulary.size
        wide = [str(one.name) for one in self._model.graph.outputs if (shapes.fixed(one, -1) or 0) >= size]
        is_over = source.stated_task in _OVER_VOCABULARY
        has_latents = self.folder.sentence_modules.find("SparseAutoEncoder") is not None
        self._rows = VocabularyRows(self._model, wide if is_over and not has_latents else [])
        self._over = [str(value.name) for value in self._rows.axes if value.is_graph_output()]
        unclear = [name for name in wide if name not in self._over and not source.stated_task]
        if unclear:
            raise PassError(
                f"{source.path} does not say whether {some(unclear)} is over the vocabulary",
                "export the checkpoint with onnxtool, which states the task",
            )

    def planned(self) -> list[Path]:
        """Return the files beside the graph, after a look at the texts."""
        next(self._texts.batches())
        return [self._files / name for name in self._settings]

    def write(self, *, runs: bool) -> tuple[ModelFile, VocabularyCut]:
        """Write the cut file and its folder, and compare them with the input; without `runs`, only the ids."""
        tell("reading the texts")
        vocabulary, basic = self._vocabulary, self._basic_ids()
        used = basic | vocabulary.find(self._texts.tokens or ())
        part = set(used)  # without the texts that are held out
        batches = self._texts.batches() if self._texts.tokens is None else iter(())
        rows = chain.from_iterable(self._texts.read_all(self._own, batch) for batch in batches)
        for number, ids in enumerate(rows, 1):
            used.update(ids)
            part.update(ids if number % HELD_OUT else ())
        if used == basic:
            raise InputError("the texts have no tokens", "pass texts as onnxtool infer --input reads them")
        kept = vocabulary.kept(used)
        notes = self._write_files(kept)
        gone, size = self._rows.bytes_beyond(len(kept)), max(one for _, one in self._rows.axes.values())
        self._rows.cut(kept)
        self._model.metadata_props.clear()
        self._model.metadata_props.update(self._metadata(size, kept))
        cut = ModelFile.open(save_model(self._model, Staging(self._path.parent, self._path, self._path.parent)))
        names = {table.name for table in self._rows.tables}
        before, after = (
            sum(one.size_bytes for one in file.structure.initializers if one.name in names)
            for file in (self._source, cut)
        )
        if before - after != gone:
            raise PassError(f"the weights fall by {before - after} bytes, and the rows have {gone}", "report this")
        sizes = self._source.size_bytes, cut.size_bytes
        found = VocabularyCut(size, len(kept), before, after, *sizes, notes=notes)
        held_out = kept if self._texts.tokens else vocabulary.kept(part)
        check = Check(self._source, self.folder, self._texts, kept, held_out)
        return cut, check.compare(cut, found, self._over, runs=runs)

    def _basic_ids(self) -> set[int]:
        """Return the ids that are kept whatever the texts are."""
        own, modules = self._own, self.folder.sentence_modules
        words = [word for module in modules.modules for word in as_list(module.settings.get("skiplist_words"))]
        named = (*own.added_tokens, *filter(None, map(own.named_token, ROLES)), *map(str, words))
        found = {one for one in map(own.id_of, named) if one is not None}
        for name, path in self._settings.items():
            is_settings = path.suffix == ".json" and path.name != TOKENIZER_NAME and name not in self._by_token
            found.update(ids_in_settings(read_settings(path)) if is_settings else ())
        # Positions begin behind the id of padding, which therefore stays where it is.
        return found | self._rows.compared | {*range(reserved_positions(self.folder))}

    def _write_files(self, kept: NDArray[np.int64]) -> tuple[str, ...]:
        """Write the checkpoint's files for the ids `kept`; return notes on ids in them that no token has."""
        new, content = renumbering(kept), self._vocabulary.trimmed(kept)
        tokens = Vocabulary.of(content).ids
        query, notes = self.folder.sentence_modules.query, []
        for name, path in self._settings.items():
            target = self._files / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.name == TOKENIZER_NAME:
                target.write_text(content, encoding="utf-8")
            elif path.name == _WORDPIECE:
                target.write_text("".join(f"{token}\n" for token in sorted(tokens, key=tokens.__getitem__)), "utf-8")
            elif query is not None and name == query.file(MODULE_WEIGHTS):
                from safetensors.numpy import save_file

                save_file({"weight": SparseStaticEmbedding.read(query).weights[kept]}, target)
            elif path.suffix != ".json":
                shutil.copyfile(path, target)
            else:
                value = read_settings(path)
                if name in self._by_token:
                    value = {token: weight for token, weight in dict(value).items() if token in tokens}
                else:
                    missing = sorted(ids_in_settings(value) - {*self._vocabulary.ids.values()})
                    notes += [f"{name} names the id {number}, which no token has: it is null now" for number in missing]
                    value = renumber_settings(value, new, len(kept), is_id=path.name == "added_tokens.json")
                target.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return tuple(notes)

    def _metadata(self, num_rows: int, kept: NDArray[np.int64]) -> dict[str, str]:
        """Return the metadata of the cut file."""
        stated = {key: text for key, text in self._source.structure.metadata.items() if key != SIZES_KEY}
        before, after = (
            hashlib.sha256(read_bytes(path)).hexdigest()
            for path in (CheckpointFolder(folder).locate(TOKENIZER_NAME) for folder in (self.folder.path, self._files))
            if path is not None
        )
        stated |= {FILES_KEY: self._files.name, VOCABULARY_KEY: after}
        if stated.pop(TOKENIZER_KEY, None) == before:
            stated[TOKENIZER_KEY] = after
        if WEIGHTS_KEY in stated:  # vectors of the cut file and of the input are not those of one model
            stated[WEIGHTS_KEY] = hashlib.sha256(f"{stated[WEIGHTS_KEY]} {after}".encode()).hexdigest()
        new, recipes = renumbering(kept), parse_json(stated.get(INPUTS_KEY, "{}"))
        for recipe in (recipes.get("inputs", {}).get(IDS),) if INPUTS_KEY in stated else ():
            recipe |= {key: None if recipe[key] is None else new(recipe[key]) for key in ("first", "last", "pad")}
            recipe["below"] = len(kept)
            stated[INPUTS_KEY] = json.dumps(recipes, separators=(",", ":"))
        step = {"step": "cut_vocabulary", "rows": len(kept), "rows_before": num_rows}
        return stated | {STEPS_KEY: json.dumps([*self._source.steps, step], sort_keys=True, separators=(",", ":"))}
