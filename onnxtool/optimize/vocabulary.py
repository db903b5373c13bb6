"""Cut a model and its tokenizer to the tokens of some texts, before anything else is done to the graph.

The cut file is compared with the input on these texts: ids map one to one, and outputs are equal bit by bit. Passes,
conversions and their verification then work on the cut file as on any other.

Letters: B texts of a batch, V rows of the vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.files import MODULE_WEIGHTS, ROLES
from onnxtool.checkpoint.folder import SMALL_FILES, TOKENIZER_NAME, CheckpointFolder, Prompts, find_checkpoint_folder
from onnxtool.checkpoint.limits import EncodedText, Limit, Text, fixed_shape, reserved_positions, text_limit
from onnxtool.checkpoint.sentence_modules import as_list
from onnxtool.checkpoint.static_embeddings import IDF_NAME, SparseStaticEmbedding, table_files
from onnxtool.checkpoint.text_files import are_queries, iterate_texts
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.checkpoint.vocabulary import Vocabulary, ids_in_settings, renumber_settings, renumbering
from onnxtool.errors import InputError, OutputExistsError, OutputWriteError, PassError, shorten, some
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
from onnxtool.optimize.quantization.calibration import MOST_TOKENS, OWN_TEXTS, as_chats
from onnxtool.optimize.report import OptimizeReport, VocabularyCut
from onnxtool.optimize.vocabulary_rows import IDS, VocabularyRows
from onnxtool.progress import tell
from onnxtool.reading import parse_json, read_bytes, read_json
from onnxtool.runtime.adapters import copy_adapters
from onnxtool.runtime.comparison import Runner
from onnxtool.runtime.difference import TOLERANCES
from onnxtool.runtime.providers import CPU
from onnxtool.runtime.session import open_alike
from onnxtool.runtime.text_feeds import text_feeds
from onnxtool.runtime.tokens import open_tokenizer
from onnxtool.summary import summarize_file

HELD_OUT = 10  # one of so many texts
_READ_AT_ONCE, _MOST_RUN, _MOST_CHANGED = 256, 256, 64  # texts
_REPORT = "report this model"


def read_settings(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        InputError: it is malformed, or cannot be read.
    """
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not JSON: {error}"
        raise InputError(f"cannot read {path}: {reason}", "check the file, and its path") from None


class KeptTexts:
    """The texts of a file or test collection, as a model's tokenizer reads them.

    Attributes:
        tokens: the tokens in a list, with which the texts are onnxtool's own; None for texts.
    """

    def __init__(self, path: Path, model: ModelFile, folder: CheckpointFolder) -> None:
        self._path, self._model, self._folder = path, model, folder
        self._prompts = ["", *(prompt for prompt in Prompts.of(folder).by_name.values() if prompt)]
        listed = read_settings(path) if path.suffix == ".json" else None
        if listed is not None and not (
            isinstance(listed, list) and listed and all(isinstance(token, str) for token in listed)
        ):
            raise InputError(
                f"{path} is not a JSON list of tokens", 'write ["token", "##s"]; texts are .txt, .jsonl or .tsv'
            )
        self.tokens: tuple[str, ...] | None = None if listed is None else tuple(listed)

    def batches(self) -> Iterator[list[Text]]:
        """Yield all texts, a few hundred at a time."""
        paths = [self._path if self.tokens is None else OWN_TEXTS]
        if self._path.is_dir():
            paths += [path for path in sorted(self._path.iterdir()) if path.is_file() and are_queries(path)]
        items = chain.from_iterable(map(iterate_texts, paths))
        texts = (text.contents if text.query is None else (text.query, text.contents) for text in items)
        while batch := list(islice(texts, _READ_AT_ONCE)):
            yield batch

    def tokenize(
        self, tokenizer: TextTokenizer, texts: Sequence[Text], prompt: str = "", limit: Limit | None = None
    ) -> list[EncodedText]:
        """Return the tokens of texts."""
        written, options = as_chats(self._model, self._folder, texts, prompt)
        return tokenizer.encode(written, limit, options)

    def ids_with_prompts(self, tokenizer: TextTokenizer, texts: Sequence[Text]) -> list[tuple[int, ...]]:
        """Return the ids of each text, alone and after each prompt, concatenated."""
        columns = zip(*(self.tokenize(tokenizer, texts, prompt) for prompt in self._prompts), strict=True)
        return [tuple(chain.from_iterable(text.ids for text in column)) for column in columns]


class CutComparison:
    """The comparison of a file with the one whose vocabulary is cut.

    Args:
        source: the input.
        folder: of its tokenizer.
        texts: to compare on.
        kept: the ids that are kept, ascending.
        part: those that would be kept without the held-out texts.
    """

    def __init__(
        self,
        source: ModelFile,
        folder: CheckpointFolder,
        texts: KeptTexts,
        kept_ids: NDArray[np.int64],
        part: NDArray[np.int64],
    ) -> None:
        self._source, self._texts, self._kept, self._part = source, texts, kept_ids, part
        self._own = open_tokenizer(folder)
        vocabulary = Vocabulary.of(self._own.rules)
        self._other = TextTokenizer(replace(folder, embedded=vocabulary.trimmed(part)))
        limit = text_limit(source, folder, source.stated_task)
        self._limit = MOST_TOKENS if limit is None else min(MOST_TOKENS, limit)

    def compare(
        self, cut: ModelFile, cut_vocabulary: VocabularyCut, over: Sequence[str], *, runs: bool
    ) -> VocabularyCut:
        """Compare ids of all texts, then outputs of some.

        Args:
            cut: the cut file, with its tokenizer.
            cut_vocabulary: the report so far.
            over: the outputs over the vocabulary, [.., V].
            runs: whether outputs are compared, too.

        Raises:
            PassError: a text whose tokens are kept has other ids, or outputs that differ by more than rounding.
        """
        new, tokenizer = renumbering(self._kept), open_tokenizer(find_checkpoint_folder(cut))
        tried, changed, step, number, num_held_out, num_changed = list[Text](), list[Text](), 1, 0, 0, 0
        for batch in self._texts.batches():
            rows = (self._texts.ids_with_prompts(reader, batch) for reader in (self._own, tokenizer))
            held_out = []
            for text, before, after in zip(batch, *rows, strict=True):
                mapped = tuple(map(new, before))
                if None not in mapped and mapped != after:
                    raise PassError(f"the cut tokenizer reads other tokens: {shorten(repr(text))}", "report this text")
                tried += [text] if None not in mapped and number % step == 0 else []
                if len(tried) > 2 * _MOST_RUN:
                    tried, step = tried[::2], 2 * step
                number += 1
                held_out += [text] if self._texts.tokens or number % HELD_OUT == 0 else []
            split_otherwise = [text for text, *both in self._read_twice(held_out) if both[0].ids != both[1].ids]
            num_held_out, num_changed = num_held_out + len(held_out), num_changed + len(split_otherwise)
            changed += split_otherwise[: _MOST_CHANGED - len(changed)]
        cut_vocabulary = replace(cut_vocabulary, num_texts=number, num_held_out=num_held_out, num_changed=num_changed)
        if not runs:
            return cut_vocabulary
        tell(f"running {self._source.path.name} and the cut file")
        run = open_alike(self._source, provider=CPU, disabled=()).run
        cosines = self._cosines(run, changed, over)
        cut_vocabulary = self._compare_outputs(
            run, cut, cut_vocabulary, tried[:: -(-len(tried) // _MOST_RUN) or 1], over
        )
        return replace(
            cut_vocabulary,
            cosine_mean=sum(cosines) / len(cosines) if cosines else None,
            cosine_min=min(cosines, default=None),
        )

    def _read_twice(
        self, texts: Sequence[Text], limit: Limit | None = None
    ) -> list[tuple[Text, EncodedText, EncodedText]]:
        """Return the tokens of texts, and what they would be without the held-out texts, by their former ids."""
        both = (
            [self._texts.tokenize(tokenizer, texts, limit=limit) for tokenizer in (self._own, self._other)]
            if texts
            else [[], []]
        )
        former = [replace(text, ids=tuple(self._part[list(text.ids)].tolist())) for text in both[1]]
        return list(zip(texts, both[0], former, strict=True))

    def _feeds(self, text: EncodedText) -> dict[str, NDArray[Any]]:
        size, length = fixed_shape(self._source)
        return text_feeds(self._source, self._own.pad([text] * (size or 1), length))

    def _compare_outputs(
        self, run: Runner, cut: ModelFile, cut_vocabulary: VocabularyCut, texts: Sequence[Text], over: Sequence[str]
    ) -> VocabularyCut:
        """Run both files on each text alone."""
        run_cut = open_alike(cut, provider=CPU, disabled=()).run
        places = np.zeros(int(self._kept[-1]) + 1, np.int64)
        places[self._kept] = np.arange(len(self._kept))
        equal, largest, sums = [], 0.0, np.zeros((2, 2))  # weights and terms, before and after
        for text in filter(len, self._texts.tokenize(self._own, texts, limit=self._limit) if texts else ()):
            feeds = self._feeds(text)
            after = run_cut({**feeds, IDS: places[feeds[IDS]].astype(feeds[IDS].dtype)})
            outputs = dict(run(feeds))
            for name in over:
                whole, outputs[name] = outputs[name], np.take(outputs[name], self._kept, -1)
                if whole.ndim == 2 and (whole >= 0).all():  # of a sparse encoder
                    sums += [
                        [weights_of_text.sum(dtype=np.float64), np.count_nonzero(weights_of_text)]
                        for weights_of_text in (whole, outputs[name])
                    ]
            equal.append(all(np.array_equal(array, after[name]) for name, array in outputs.items()))
            for name, array in outputs.items() if not equal[-1] else ():
                largest = max(largest, float(np.abs(array.astype(np.float64) - after[name]).max(initial=0.0)))
        if not largest <= TOLERANCES["fp32"].atol:
            raise PassError(f"outputs of the cut file differ by {largest:.3g} on texts whose tokens are kept", _REPORT)
        (before, num_before), (weights, num_terms) = sums.tolist()
        return replace(
            cut_vocabulary,
            num_run=len(equal),
            num_equal=sum(equal),
            largest_difference=largest,
            weight_lost=1 - weights / before if before else None,
            terms=(num_before / len(equal), num_terms / len(equal)) if before else None,
        )

    def _cosines(self, run: Runner, texts: Sequence[Text], over: Sequence[str]) -> list[float]:
        """Return the cosine of each text's vector with that of its tokens without the held-out texts."""
        cosines = []
        for _, *pair in self._read_twice(texts, self._limit):
            outputs = [run(self._feeds(text)) for text in pair]
            for name in [name for name, array in outputs[0].items() if array.ndim == 2 and array.dtype.kind == "f"]:
                first, second = (output[name][0].astype(np.float64) for output in outputs)
                if name in over:
                    second[np.setdiff1d(np.arange(len(second)), self._part)] = 0
                size = float(np.linalg.norm(first) * np.linalg.norm(second))
                cosines += [float(first @ second) / size] if size and first.shape == second.shape else []
        return cosines


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
        work = CutModel(source, texts, inside / f"cut-{output.name}", inside / own.name)
        if own.is_dir() and own.samefile(work.folder.path):
            raise OutputWriteError(f"the cut tokenizer would replace the whole one in {own}", "pass another --output")
        cut, cut_report = work.write(runs=options.verify)
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
            and cut_report.num_texts >= _ENOUGH
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
    return replace(report, output=str(output), before=summarize_file(source), after=after, vocabulary=cut_report)


def _is_small(path: Path, folder: Path, names: Collection[str] = ()) -> bool:
    """Return whether a file is one that lies with a graph, and may name tokens."""
    name = path.relative_to(folder).as_posix()
    return path.is_file() and any(fnmatch(name, pattern) for pattern in (*SMALL_FILES, *_FURTHER, *names))


def _small_files(folder: CheckpointFolder) -> Iterator[Path]:
    """Yield the files of a checkpoint that are cut with it, but not those in folders of other models."""
    modules = folder.sentence_modules
    query = [] if modules.query is None else [modules.query]
    parts = {"", folder.transformer_folder, *(module.folder for module in (*modules.modules, *query))}
    names = [name for module in query for name in table_files(module)]
    for path in sorted({path for part in parts for path in (folder.path / part).glob("*")}):
        if _is_small(path, folder.path, names) and not any(fnmatch(path.name, name) for name in _OF_OTHERS):
            yield folder.inside(path, folder.path)


class CutModel:
    """A model and its tokenizer, before and after the cut.

    Attributes:
        folder: the files of its checkpoint.
    """

    def __init__(self, source: ModelFile, texts: Path, path: Path, folder: Path) -> None:
        together = [key for key in _TOGETHER if key in source.metadata]
        if together or source.text_input is not None:
            reason = f"shares it with another file ({together[0]})" if together else "has its tokenizer in the graph"
            raise PassError(f"the vocabulary of {source.path} cannot be cut: it {reason}", "leave --vocabulary out")
        self._source, self._path, self._files = source, path, folder
        self.folder = find_checkpoint_folder(source)
        self._own = open_tokenizer(self.folder)
        self._vocabulary = Vocabulary.of(self._own.rules)
        self._texts = KeptTexts(texts, source, self.folder)
        self._model = load_model(source.path)
        self._settings = {file.relative_to(self.folder.path).as_posix(): file for file in _small_files(self.folder)}
        query = self.folder.sentence_modules.query
        self._by_token = (IDF_NAME, *(() if query is None else table_files(query)))  # weights, not settings
        shapes, size = find_shapes(self._model), self._vocabulary.size
        wide = [str(output.name) for output in self._model.graph.outputs if (shapes.fixed(output, -1) or 0) >= size]
        is_over = source.stated_task in _OVER_VOCABULARY
        has_latents = self.folder.sentence_modules.first_of("SparseAutoEncoder") is not None
        self._rows = VocabularyRows(self._model, wide if is_over and not has_latents else [])
        self._over = [str(value.name) for value in self._rows.axes if value.is_graph_output()]
        unclear = [name for name in wide if name not in self._over and not source.stated_task]
        if unclear:
            raise PassError(
                f"{source.path} does not say whether {some(unclear)} is over the vocabulary",
                "export the checkpoint with onnxtool, which states the task",
            )

    def planned(self) -> list[Path]:
        """Return the files next to the graph, after checking the texts."""
        next(self._texts.batches())
        return [self._files / name for name in self._settings]

    def write(self, *, runs: bool) -> tuple[ModelFile, VocabularyCut]:
        """Write the cut file and its folder, and compare them with the input; without `runs`, only the ids."""
        tell("reading the texts")
        vocabulary, basic = self._vocabulary, self._basic_ids()
        used = basic | vocabulary.ids_of(self._texts.tokens or ())
        part = set(used)  # without the texts that are held out
        batches = self._texts.batches() if self._texts.tokens is None else iter(())
        rows = chain.from_iterable(self._texts.ids_with_prompts(self._own, batch) for batch in batches)
        for number, ids in enumerate(rows, 1):
            used.update(ids)
            part.update(ids if number % HELD_OUT else ())
        if used == basic:
            raise InputError("the texts have no tokens", "pass texts as onnxtool infer --input reads them")
        kept = vocabulary.kept(used)
        notes = self._write_files(kept)
        gone, size = self._rows.bytes_beyond(len(kept)), max(num_rows for _, num_rows in self._rows.axes.values())
        self._rows.cut(kept)
        self._model.metadata_props.clear()
        self._model.metadata_props.update(self._metadata(size, kept))
        cut = ModelFile.open(save_model(self._model, Staging(self._path.parent, self._path, self._path.parent)))
        names = {table.name for table in self._rows.tables}
        before, after = (
            sum(initializer.size_bytes for initializer in file.structure.initializers if initializer.name in names)
            for file in (self._source, cut)
        )
        if before - after != gone:
            raise PassError(f"the weights fall by {before - after} bytes, and the rows have {gone}", "report this")
        sizes = self._source.size_bytes, cut.size_bytes
        cut_report = VocabularyCut(size, len(kept), before, after, *sizes, notes=notes)
        held_out = kept if self._texts.tokens else vocabulary.kept(part)
        comparison = CutComparison(self._source, self.folder, self._texts, kept, held_out)
        return cut, comparison.compare(cut, cut_report, self._over, runs=runs)

    def _basic_ids(self) -> set[int]:
        """Return the ids that are kept whatever the texts are."""
        own, modules = self._own, self.folder.sentence_modules
        words = [word for module in modules.modules for word in as_list(module.settings.get("skiplist_words"))]
        named = (*own.added_tokens, *filter(None, map(own.named_token, ROLES)), *map(str, words))
        ids = {token_id for token_id in map(own.id_of, named) if token_id is not None}
        for name, path in self._settings.items():
            is_settings = path.suffix == ".json" and path.name != TOKENIZER_NAME and name not in self._by_token
            ids.update(ids_in_settings(read_settings(path)) if is_settings else ())
        # Positions begin after the id of padding, which therefore stays where it is.
        return ids | self._rows.compared | {*range(reserved_positions(self.folder))}

    def _write_files(self, kept_ids: NDArray[np.int64]) -> tuple[str, ...]:
        """Write the checkpoint's files for the ids `kept_ids`; return notes on ids in them that no token has."""
        new, content = renumbering(kept_ids), self._vocabulary.trimmed(kept_ids)
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

                save_file({"weight": SparseStaticEmbedding.read(query).weights[kept_ids]}, target)
            elif path.suffix != ".json":
                shutil.copyfile(path, target)
            else:
                value = read_settings(path)
                if name in self._by_token:
                    value = {token: weight for token, weight in dict(value).items() if token in tokens}
                else:
                    missing = sorted(ids_in_settings(value) - {*self._vocabulary.ids.values()})
                    notes += [f"{name} names the id {number}, which no token has: it is null now" for number in missing]
                    value = renumber_settings(value, new, len(kept_ids), is_id=path.name == "added_tokens.json")
                target.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return tuple(notes)

    def _metadata(self, num_rows: int, kept_ids: NDArray[np.int64]) -> dict[str, str]:
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
        new, recipes = renumbering(kept_ids), parse_json(stated.get(INPUTS_KEY, "{}"))
        for recipe in (recipes.get("inputs", {}).get(IDS),) if INPUTS_KEY in stated else ():
            recipe |= {key: None if recipe[key] is None else new(recipe[key]) for key in ("first", "last", "pad")}
            recipe["below"] = len(kept_ids)
            stated[INPUTS_KEY] = json.dumps(recipes, separators=(",", ":"))
        step = {"step": "cut_vocabulary", "rows": len(kept_ids), "rows_before": num_rows}
        return stated | {STEPS_KEY: json.dumps([*self._source.steps, step], sort_keys=True, separators=(",", ":"))}
