"""Compare a file whose vocabulary was cut with its input on texts: first the ids, then the outputs.

Letters: B texts of a batch, V rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import CheckpointFolder, Prompts, find_checkpoint_folder
from onnxtool.checkpoint.limits import EncodedText, Limit, Text, fixed_shape, text_limit
from onnxtool.checkpoint.text_files import are_queries, iterate_texts
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.checkpoint.vocabulary import Vocabulary, renumbering
from onnxtool.errors import InputError, PassError, shorten
from onnxtool.model_file import ModelFile
from onnxtool.optimize.quantization.calibration import MOST_TOKENS, OWN_TEXTS, as_chats
from onnxtool.optimize.report import VocabularyCut
from onnxtool.optimize.vocabulary_rows import IDS
from onnxtool.progress import tell
from onnxtool.reading import read_json
from onnxtool.runtime.comparison import Runner
from onnxtool.runtime.difference import TOLERANCES
from onnxtool.runtime.providers import CPU
from onnxtool.runtime.session import open_alike
from onnxtool.runtime.text_feeds import text_feeds
from onnxtool.runtime.tokens import open_tokenizer

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


class Texts:
    """The texts of a file or test collection, as a model's tokenizer reads them.

    Attributes:
        tokens: the tokens in a list, with which the texts are onnxtool's own; None for texts.
    """

    def __init__(self, path: Path, model: ModelFile, folder: CheckpointFolder) -> None:
        self._path, self._model, self._folder = path, model, folder
        self._prompts = ["", *(prompt for prompt in Prompts.of(folder).by_name.values() if prompt)]
        listed = read_settings(path) if path.suffix == ".json" else None
        if listed is not None and not (
            isinstance(listed, list) and listed and all(isinstance(one, str) for one in listed)
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
        given = chain.from_iterable(map(iterate_texts, paths))
        texts = (text.contents if text.query is None else (text.query, text.contents) for text in given)
        while batch := list(islice(texts, _READ_AT_ONCE)):
            yield batch

    def read(
        self, tokenizer: TextTokenizer, texts: Sequence[Text], prompt: str = "", limit: Limit | None = None
    ) -> list[EncodedText]:
        """Return the tokens of texts."""
        written, options = as_chats(self._model, self._folder, texts, prompt)
        return tokenizer.encode(written, limit, options)

    def read_all(self, tokenizer: TextTokenizer, texts: Sequence[Text]) -> list[tuple[int, ...]]:
        """Return the ids of each text alone and behind each prompt, in a row."""
        columns = zip(*(self.read(tokenizer, texts, prompt) for prompt in self._prompts), strict=True)
        return [tuple(chain.from_iterable(text.ids for text in column)) for column in columns]


class Check:
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
        texts: Texts,
        kept: NDArray[np.int64],
        part: NDArray[np.int64],
    ) -> None:
        self._source, self._texts, self._kept, self._part = source, texts, kept, part
        self._own = open_tokenizer(folder)
        vocabulary = Vocabulary.of(self._own.rules)
        self._other = TextTokenizer(replace(folder, embedded=vocabulary.trimmed(part)))
        limit = text_limit(source, folder, source.stated_task)
        self._limit = MOST_TOKENS if limit is None else min(MOST_TOKENS, limit)

    def compare(self, cut: ModelFile, found: VocabularyCut, over: Sequence[str], *, runs: bool) -> VocabularyCut:
        """Compare ids of all texts, then outputs of some.

        Args:
            cut: the cut file, with its tokenizer.
            found: the report so far.
            over: the outputs over the vocabulary, [.., V].
            runs: whether outputs are compared, too.

        Raises:
            PassError: a text whose tokens are kept has other ids, or outputs that differ by more than rounding.
        """
        new, tokenizer = renumbering(self._kept), open_tokenizer(find_checkpoint_folder(cut))
        tried, changed, step, number, num_held_out, num_changed = list[Text](), list[Text](), 1, 0, 0, 0
        for batch in self._texts.batches():
            rows = (self._texts.read_all(one, batch) for one in (self._own, tokenizer))
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
            others = [text for text, one, two in self._read_twice(held_out) if one.ids != two.ids]
            num_held_out, num_changed = num_held_out + len(held_out), num_changed + len(others)
            changed += others[: _MOST_CHANGED - len(changed)]
        found = replace(found, num_texts=number, num_held_out=num_held_out, num_changed=num_changed)
        if not runs:
            return found
        tell(f"running {self._source.path.name} and the cut file")
        run = open_alike(self._source, provider=CPU, disabled=()).run
        cosines = self._cosines(run, changed, over)
        found = self._compare_outputs(run, cut, found, tried[:: -(-len(tried) // _MOST_RUN) or 1], over)
        return replace(
            found, cosine_mean=sum(cosines) / len(cosines) if cosines else None, cosine_min=min(cosines, default=None)
        )

    def _read_twice(
        self, texts: Sequence[Text], limit: Limit | None = None
    ) -> list[tuple[Text, EncodedText, EncodedText]]:
        """Return the tokens of texts, and what they would be without the held-out texts, by their former ids."""
        both = [self._texts.read(one, texts, limit=limit) for one in (self._own, self._other)] if texts else [[], []]
        former = [replace(text, ids=tuple(self._part[list(text.ids)].tolist())) for text in both[1]]
        return list(zip(texts, both[0], former, strict=True))

    def _feeds(self, text: EncodedText) -> dict[str, NDArray[Any]]:
        size, length = fixed_shape(self._source)
        return text_feeds(self._source, self._own.pad([text] * (size or 1), length))

    def _compare_outputs(
        self, run: Runner, cut: ModelFile, found: VocabularyCut, texts: Sequence[Text], over: Sequence[str]
    ) -> VocabularyCut:
        """Run both files on each text alone."""
        run_cut = open_alike(cut, provider=CPU, disabled=()).run
        places = np.zeros(int(self._kept[-1]) + 1, np.int64)
        places[self._kept] = np.arange(len(self._kept))
        equal, largest, sums = [], 0.0, np.zeros((2, 2))  # weights and terms, before and after
        for text in filter(len, self._texts.read(self._own, texts, limit=self._limit) if texts else ()):
            feeds = self._feeds(text)
            after = run_cut({**feeds, IDS: places[feeds[IDS]].astype(feeds[IDS].dtype)})
            outputs = dict(run(feeds))
            for name in over:
                whole, outputs[name] = outputs[name], np.take(outputs[name], self._kept, -1)
                if whole.ndim == 2 and (whole >= 0).all():  # of a sparse encoder
                    sums += [[one.sum(dtype=np.float64), np.count_nonzero(one)] for one in (whole, outputs[name])]
            equal.append(all(np.array_equal(array, after[name]) for name, array in outputs.items()))
            for name, array in outputs.items() if not equal[-1] else ():
                largest = max(largest, float(np.abs(array.astype(np.float64) - after[name]).max(initial=0.0)))
        if not largest <= TOLERANCES["fp32"].atol:
            raise PassError(f"outputs of the cut file differ by {largest:.3g} on texts whose tokens are kept", _REPORT)
        (before, num_before), (weights, num_terms) = sums.tolist()
        return replace(
            found,
            num_run=len(equal),
            num_equal=sum(equal),
            largest_difference=largest,
            weight_lost=1 - weights / before if before else None,
            terms=(num_before / len(equal), num_terms / len(equal)) if before else None,
        )

    def _cosines(self, run: Runner, texts: Sequence[Text], over: Sequence[str]) -> list[float]:
        """Return the cosine of each text's vector with that of its tokens without the held-out texts."""
        found = []
        for _, *pair in self._read_twice(texts, self._limit):
            outputs = [run(self._feeds(text)) for text in pair]
            for name in [name for name, array in outputs[0].items() if array.ndim == 2 and array.dtype.kind == "f"]:
                one, two = (output[name][0].astype(np.float64) for output in outputs)
                if name in over:
                    two[np.setdiff1d(np.arange(len(two)), self._part)] = 0
                size = float(np.linalg.norm(one) * np.linalg.norm(two))
                found += [float(one @ two) / size] if size and one.shape == two.shape else []
        return found
