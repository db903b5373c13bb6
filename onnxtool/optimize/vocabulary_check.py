"""Compare a file whose vocabulary was cut with its input on texts: first the ids, then the outputs.

Letters: B texts of a batch, V rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import CheckpointFolder, Prompts, find_checkpoint_folder
from onnxtool.checkpoint.limits import EncodedText, Limit, Text, fixed_shape
from onnxtool.checkpoint.text_files import are_queries, iterate_texts
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.checkpoint.vocabulary import Vocabulary, renumbering
from onnxtool.errors import InputError, PassError, shorten
from onnxtool.model_file import ModelFile
from onnxtool.optimize.quantization.calibration import MOST_TOKENS, OWN_TEXTS, as_chats, text_feeds_of
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
Changed = tuple[EncodedText, EncodedText]


class Texts:
    """The texts of a file or test collection, as a model's tokenizer reads them.

    Attributes:
        tokens: the tokens in a list, with which the texts are onnxtool's own; None for texts.
    """

    def __init__(self, path: Path, model: ModelFile, folder: CheckpointFolder) -> None:
        self._path, self._model, self._folder = path, model, folder
        self._prompts = ["", *(prompt for prompt in Prompts.of(folder).by_name.values() if prompt)]
        listed = read_json(path) if path.suffix == ".json" else None
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
    """The comparison.

    Args:
        source: the input.
        cut: the cut file, with its tokenizer.
        folder: of the input's tokenizer.
        kept: the ids that are kept, ascending.
        texts: to compare on.
    """

    def __init__(
        self, source: ModelFile, cut: ModelFile, folder: CheckpointFolder, kept: NDArray[np.int64], texts: Texts
    ) -> None:
        self._source, self._cut, self._kept, self._texts = source, cut, kept, texts
        self._folder, self._own = folder, open_tokenizer(folder)

    def compare_ids(
        self, found: VocabularyCut, vocabulary: Vocabulary, part: NDArray[np.int64]
    ) -> tuple[VocabularyCut, list[Text], list[Changed]]:
        """Read all texts with both tokenizers, and the held-out texts with the tokens of the others.

        Args:
            found: the report so far.
            vocabulary: of the input.
            part: the ids that are kept without the held-out texts.

        Returns:
            The report, texts to run, and held-out texts as they are and as ids of the input that stand for `part`.

        Raises:
            PassError: a text whose tokens are kept has other ids.
        """
        new, tokenizer = renumbering(self._kept), open_tokenizer(find_checkpoint_folder(self._cut))
        other = TextTokenizer(replace(self._folder, embedded=vocabulary.trimmed(part)))
        tried, changed, step, num_texts, num_held_out, num_changed = list[Text](), list[Changed](), 1, 0, 0, 0
        for batch in self._texts.batches():
            rows = (self._texts.read_all(one, batch) for one in (self._own, tokenizer))
            for number, (text, before, after) in enumerate(zip(batch, *rows, strict=True), num_texts):
                mapped = tuple(map(new, before))
                if None not in mapped and mapped != after:
                    raise PassError(f"the cut tokenizer reads other tokens: {shorten(repr(text))}", "report this text")
                tried += [text] if None not in mapped and number % step == 0 else []
                if len(tried) > 2 * _MOST_RUN:
                    tried, step = tried[::2], 2 * step
            places = range(num_texts + 1, num_texts + len(batch) + 1)
            held_out = [
                one for one, place in zip(batch, places, strict=True) if self._texts.tokens or not place % HELD_OUT
            ]
            num_texts += len(batch)
            num_held_out += len(held_out)
            if held_out:
                limits = (self._texts.read(one, held_out, limit=MOST_TOKENS) for one in (self._own, other))
                for one, two in zip(*limits, strict=True):
                    as_before = replace(two, ids=tuple(int(part[place]) for place in two.ids))
                    if one.ids != as_before.ids:
                        num_changed += 1
                        changed += [(one, as_before)] if len(changed) < _MOST_CHANGED else []
        found = replace(found, num_texts=num_texts, num_held_out=num_held_out, num_changed=num_changed)
        return found, tried[:: -(-len(tried) // _MOST_RUN) or 1], changed

    def compare_outputs(
        self, found: VocabularyCut, texts: Sequence[Text], changed: Sequence[Changed], over: Sequence[str]
    ) -> VocabularyCut:
        """Run both files on texts whose tokens are kept, and the input on what became of held-out texts.

        Args:
            found: the report so far.
            texts: the texts.
            changed: as from `compare_ids`.
            over: the outputs over the vocabulary, [.., V].

        Raises:
            PassError: outputs differ by more than rounding.
        """
        tell(f"running {self._source.path.name} and the cut file")
        runs = [open_alike(file, provider=CPU, disabled=()).run for file in (self._source, self._cut)]
        places = np.zeros(int(self._kept[-1]) + 1, np.int64)
        places[self._kept] = np.arange(len(self._kept))
        num_run, equal, largest, weights, terms = 0, 0, 0.0, np.zeros(2), np.zeros(2)
        for feeds in text_feeds_of(self._source, texts):
            before, after = runs[0](feeds), runs[1]({**feeds, IDS: places[feeds[IDS]].astype(feeds[IDS].dtype)})
            same = np.ones(len(feeds[IDS]), bool)
            for name, array in before.items():
                rows = np.take(array, self._kept, -1) if name in over else array
                if name in over and array.ndim == 2 and (array >= 0).all():  # of a sparse encoder
                    weights += [array.sum(dtype=np.float64), rows.sum(dtype=np.float64)]
                    terms += [np.count_nonzero(array), np.count_nonzero(rows)]
                largest = max(largest, float(np.abs(rows.astype(np.float64) - after[name]).max(initial=0.0)))
                alike = (rows == after[name]).reshape(len(rows), -1).all(1)
                same &= alike if len(alike) == len(same) else alike.all()
            num_run, equal = num_run + len(same), equal + int(same.sum())
        if not largest <= TOLERANCES["fp32"].atol:
            raise PassError(
                f"outputs of the cut file differ by {largest:.3g} on texts whose tokens are kept", "report this model"
            )
        cosines = self._cosines(runs[0], changed, over)
        return replace(
            found,
            num_run=num_run,
            num_equal=equal,
            largest_difference=largest,
            cosine_mean=float(np.mean(cosines)) if cosines else None,
            cosine_min=min(cosines, default=None),
            weight_lost=1 - weights[1] / weights[0] if weights[0] else None,
            terms=(terms[0] / num_run, terms[1] / num_run) if weights[0] else None,
        )

    def _cosines(self, run: Runner, changed: Sequence[Changed], over: Sequence[str]) -> list[float]:
        """Return the cosine of the vectors of each text as it was and as it is read now; nothing without vectors."""
        found = []
        for pair in changed if fixed_shape(self._source) == (None, None) else ():
            outputs = [run(text_feeds(self._source, self._own.pad([text]))) for text in pair]
            for name in [name for name, array in outputs[0].items() if array.ndim == 2 and array.dtype.kind == "f"]:
                one, two = (output[name][0].astype(np.float64) for output in outputs)
                if name in over:
                    two[np.setdiff1d(np.arange(len(two)), self._kept)] = 0
                size = float(np.linalg.norm(one) * np.linalg.norm(two))
                found += [float(one @ two) / size] if size and one.shape == two.shape else []
        return found
