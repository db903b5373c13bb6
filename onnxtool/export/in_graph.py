"""Put a checkpoint's tokenizer into an exported graph (`export --tokenizer in_graph`), and compare the two.

Two things make the comparison more than a sample. Each character of Unicode is in one of the texts, between letters,
which shows what rules do to single characters. The pattern that splits words for byte pairs depends on the kinds of
neighbouring characters, so all short texts over one character of each kind are compared.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.checkpoint.chat_templates import ChatTemplate
from onnxtool.checkpoint.folder import TOKENIZER_NAME, CheckpointFolder, Prompts, find_checkpoint_folder
from onnxtool.checkpoint.limits import EncodedText, Limit, Text, text_limit
from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError, SessionError, shorten
from onnxtool.export.options import PAIRS_IN_GRAPH, ExportOptions
from onnxtool.export.tokenizer_rules import SCORE_STEP, read_tokenizer
from onnxtool.graph.text_input import (
    GIVEN,
    IDS,
    LOWEST_OPSET,
    MASK,
    POOLED,
    Frame,
    build_front,
    id_model,
    put_before,
    serialized,
)
from onnxtool.graph.tokenizers import SPACE, ByteBpe, GraphTokenizer, Unigram
from onnxtool.model_file import ModelFile, Staging, save_model
from onnxtool.model_file.domains import default_opset
from onnxtool.model_file.metadata import (
    EMBEDDED_KEY,
    LONGEST,
    NO_PADDING,
    PADDING_KEY,
    TOKENIZER_KEY,
    TextInput,
    pack,
)
from onnxtool.model_file.weights import load_model
from onnxtool.progress import tell
from onnxtool.runtime.text_feeds import text_feeds
from onnxtool.runtime.text_graph import TextGraph, check_same_outputs
from onnxtool.runtime.tokens import HARD_TEXTS, open_tokenizer

_PAIR_TASKS = (RANKING, "text-classification")
_HINT = "leave --tokenizer out, and tokenize where the file runs"


def put_tokenizer(core: ModelFile, staging: Staging, files: Path, options: ExportOptions) -> ModelFile:
    """Replace a staged graph by one that reads texts, verified against it and its tokenizer.

    Args:
        core: the staged graph, which reads ids.
        staging: its staging folder.
        files: the folder with its tokenizer.
        options: of the export.

    Raises:
        InputError: the graph needs more than ids or has outputs for each token, a graph cannot express the tokenizer,
            or the result differs from it.
    """
    with tempfile.TemporaryDirectory(dir=staging.folder.parent) as name:
        core = _moved(core, Path(name))
        metadata = core.metadata
        folder = CheckpointFolder(
            files, tokenizer_sha256=metadata.get(TOKENIZER_KEY, ""), padding=metadata.get(PADDING_KEY, "")
        )
        _require_plain(core, folder)
        is_pair = core.stated_task == RANKING or options.tokenizer == PAIRS_IN_GRAPH
        if is_pair and core.stated_task not in _PAIR_TASKS:
            raise InputError(
                f"{core.stated_task} is a task of single texts, and --tokenizer {options.tokenizer} reads pairs",
                "pass --tokenizer in_graph",
            )
        prompt = Prompts.of(folder).text_of(options.prompt)
        limit = text_limit(core, folder, core.stated_task)
        most_tokens = LONGEST if limit is None else limit.tokens
        tokenizer = open_tokenizer(folder)
        rules, frame = _read_rules(core, tokenizer, most_tokens, prompt, is_pair=is_pair)
        model = load_model(core.path)
        former = {str(value.name): value.dtype or ir.DataType.INT64 for value in model.graph.inputs}
        front = build_front(rules, frame, former, default_opset(model.graph.opset_imports))
        content = serialized(front)
        num_texts, differences = 0, dict[str, int]()
        if options.verify:
            tell("comparing the tokenizer in the graph")
            num_texts, differences = TextProof(tokenizer, rules, frame, TextGraph(content), core).check()
        put_before(model, front)
        written = ModelFile.open(save_model(model, staging))
        del model, front
        if options.verify:
            try:
                check_same_outputs(written, core, content)
            except SessionError as error:  # of no exporter: another one would not help
                raise InputError(error.message, error.hint) from error
        stated = TextInput(frame.names, tuple(former), prompt, frame.most_tokens, num_texts, differences)
        written.stamp({**stated.entry, EMBEDDED_KEY: pack(tokenizer.content)})
    return written


def check_tokenizer(file: ModelFile, text_input: TextInput, core: ModelFile, front: bytes) -> None:
    """Compare the tokenizer in a file with the tokenizer.json in its metadata, as the export did.

    Args:
        file: the file.
        text_input: how it reads texts.
        core: the part of it that reads ids.
        front: the graph before that.

    Raises:
        InputError: a text becomes other tokens.
    """
    tokenizer = TextTokenizer(find_checkpoint_folder(file))
    rules, frame = _read_rules(
        core, tokenizer, text_input.most_tokens, text_input.prompt, is_pair=len(text_input.names) > 1
    )
    TextProof(tokenizer, rules, frame, TextGraph(front), core).check()


def _read_rules(
    core: ModelFile, tokenizer: TextTokenizer, most_tokens: int, prompt: str, *, is_pair: bool
) -> tuple[GraphTokenizer, Frame]:
    leaves_out = bool(prompt) and POOLED in core.input_names
    num_prompt = tokenizer.count_prompt(prompt, Limit(most_tokens, "the graph")) if leaves_out else 0
    return read_tokenizer(tokenizer, most_tokens, is_pair=is_pair, prompt=prompt, num_prompt=num_prompt)


def _moved(core: ModelFile, folder: Path) -> ModelFile:
    """Move a staged graph and its external data to another folder."""
    for name in (core.path.name, *core.external_locations):
        shutil.move(core.path.with_name(name), folder / name)
    return ModelFile.open(folder / core.path.name)


def _require_plain(core: ModelFile, folder: CheckpointFolder) -> None:
    """Refuse a graph that needs more inputs than a text, or whose outputs cannot be used without the tokens."""
    task, opset = core.stated_task, default_opset(core.structure.opsets)
    reason = ""
    extra_inputs = sorted(
        info.name for info in core.structure.inputs if info.name not in GIVEN or "int" not in info.dtype
    )
    of_tokens = [
        info.name for info in core.structure.outputs if not all(isinstance(size, int) for size in info.shape[1:])
    ]
    if extra_inputs:
        reason = f"takes {', '.join(extra_inputs)} as well"
    elif of_tokens or task == LATE_INTERACTION:
        reason = f"gives {', '.join(of_tokens) or 'a vector'} for each token, and its readers do not see the tokens"
    elif core.metadata.get(PADDING_KEY) == NO_PADDING:
        reason = "does not mask padding, and texts of a batch are padded"
    elif any(isinstance(size, int) for info in core.structure.inputs for size in info.shape):
        reason = "has fixed sizes, and texts have any length"
    elif folder.sentence_modules.takes_messages(task) and ChatTemplate.of(folder, folder.sentence_modules, task):
        reason = "reads texts as chats, by a template"
    elif opset < LOWEST_OPSET:
        raise InputError(
            f"the operators that read texts need opset {LOWEST_OPSET}, and the graph has {opset}", "leave --opset out"
        )
    elif folder.locate(TOKENIZER_NAME) is None:
        raise InputError(f"no {TOKENIZER_NAME} to put into the graph", _HINT)
    if reason:
        raise InputError(f"no tokenizer can be put into the graph: it {reason}", _HINT)


NUL = "texts with the character NUL, which end there in onnxruntime's Python"
NEXT_LINE = "texts with U+0085, which the operator of byte pairs does not take for white space"
TIES = "texts with two readings of a word of the same score, to the precision of float32"

_BATCH_SIZE, _CHARACTERS_PER_TEXT = 64, 20
_KINDS = "a1 \n.'é中s\x85"  # a letter, a digit, spaces, signs, letters of several bytes, a contraction, a next line
_MAX_KINDS = 4
_LETTERS = "abcXYZ éßñ日本語😀\u0301 .,'-_[]#<>/19"
_WORDS, _MIXED = 200, 300
_UNLIMITED = 1 << 20
_PENALTY = 10  # of an unknown piece, beyond the lowest score
_REPORT_HINT = "export the model without --tokenizer in_graph, and report this text"


def proof_texts(tokenizer: TextTokenizer, limit: int) -> list[str]:
    """Return texts that tokenizers disagree on, as the module describes."""
    draw = random.Random(62)  # noqa: S311  texts, no secrets
    forms = ("{0}", "a {0} b", "x{0}y", "{0}{0} ")
    own = [form.replace("{0}", token) for token in tokenizer.added_tokens[:64] for form in forms]
    words = [word.lstrip("#Ġ▁") for word in tokenizer.vocabulary]
    words = [word for word in words if word.isalnum()] or ["a"]
    chosen = words[:: max(1, len(words) // _WORDS)]
    texts = [*HARD_TEXTS, *own, *(" ".join(chosen[start : start + 10]) for start in range(0, len(chosen), 10))]
    texts += [" ".join(draw.choices(texts, k=draw.randint(2, 6))) for _ in range(_MIXED)]
    texts += ["".join(draw.choices([*_LETTERS, *chosen[:9]], k=draw.randint(1, 60))) for _ in range(_MIXED)]
    around = (*range(max(1, limit - 5), limit + 3), 2 * limit) if limit < _UNLIMITED else (600,)
    return [*texts, *(" ".join(draw.choices(chosen, k=count)) for count in around)]


def _characters() -> Iterator[str]:
    """Yield texts with each assigned character of Unicode, between letters."""
    characters = map(chr, (*range(1, 0xD800), *range(0xE000, 0x110000)))
    assigned = [character for character in characters if unicodedata.category(character) not in ("Cn", "Co")]
    for start in range(0, len(assigned), _CHARACTERS_PER_TEXT):
        yield " ".join(f"a{character}b" for character in assigned[start : start + _CHARACTERS_PER_TEXT])


def _patterns() -> Iterator[str]:
    """Yield all short texts over one character of each kind, several in one text with separators."""
    texts = ["".join(kinds) for size in range(1, _MAX_KINDS + 1) for kinds in product(_KINDS, repeat=size)]
    for start in range(0, len(texts), _CHARACTERS_PER_TEXT):
        yield "|".join(texts[start : start + _CHARACTERS_PER_TEXT])


@dataclass(frozen=True)
class TextProof:
    """A tokenizer in a graph, to be compared with the tokenizer that it was made from.

    Attributes:
        tokenizer: the tokenizer.
        rules: the rules of the same tokenizer in the graph.
        frame: how ids become rows.
        graph: the graph, from texts to the inputs of `core`; None for a graph of ids, mask and types.
        core: the graph that takes the outputs of `graph`.
    """

    tokenizer: TextTokenizer
    rules: GraphTokenizer
    frame: Frame
    graph: TextGraph | None = None
    core: ModelFile | None = None

    def check(self) -> tuple[int, dict[str, int]]:
        """Compare ids, masks and types; return the number of texts, and of known differences by kind.

        Raises:
            InputError: a text differs in another way.
        """
        draw = random.Random(0)  # noqa: S311  texts, no secrets
        items = self._items(proof_texts(self.tokenizer, self.frame.most_tokens))
        all_items = [*items, *self._items([*_characters(), *(_patterns() if self.frame.num_texts == 1 else ())])]
        kinds: Counter[str] = Counter()
        differing: set[Text] = set()
        for start in range(0, len(all_items), _BATCH_SIZE):
            for text in self._differences(all_items[start : start + _BATCH_SIZE]):
                kinds[self.kind(text)] += 1
                differing.add(text)
        same = [item for item in items if item not in differing]
        groups = [[], *([item] for item in same[::2]), *(draw.sample(same, size) for size in range(2, _BATCH_SIZE + 1))]
        for group in groups:
            if differing_texts := self._differences(group):
                raise _differs(differing_texts[0], f"in a batch of {len(group)}")
        return len(all_items), dict(sorted(kinds.items()))

    @cached_property
    def _graph(self) -> TextGraph:
        return TextGraph(id_model(self.rules, self.frame)) if self.graph is None else self.graph

    def _items(self, texts: Sequence[str]) -> list[Text]:
        """Return texts, or pairs of them."""
        if self.frame.num_texts == 1:
            return list(texts)
        return list(zip(texts, [*texts[3:], *texts[:3]], strict=True))

    def _expected(self, items: Sequence[Text], limit: int) -> list[EncodedText]:
        before = self.frame.prompt
        prompted = [before + item if isinstance(item, str) else (before + item[0], item[1]) for item in items]
        return self.tokenizer.encode(prompted, Limit(limit, "the graph"))

    def _differences(self, items: Sequence[Text]) -> list[Text]:
        """Return the texts of a batch whose ids, mask, types and so on differ from the tokenizer's."""
        outputs = self._graph.run(items)
        if not items:
            return []
        encoded = self._expected(items, self.frame.most_tokens)
        arrays: dict[str, NDArray[Any]] = {
            **self.tokenizer.pad([replace(text, num_prompt=self.frame.num_prompt) for text in encoded])
        }
        if self.core is not None:
            arrays = text_feeds(self.core, arrays)
        width = arrays[IDS].shape[1]
        same = np.ones(len(items), bool)
        for name in arrays.keys() & outputs.keys():  # one text that differs may change the width of all
            same &= (_to_width(outputs[name], width, left=self.frame.pads_left) == arrays[name]).all(axis=1)
        if len(items) == 1 and outputs[IDS].shape[1] != width:
            same[:] = False
        return [item for item, is_same in zip(items, same, strict=True) if not is_same]

    def kind(self, item: Text) -> str:
        """Return the kind of difference of a text that differs.

        Raises:
            InputError: it is of no known kind.
        """
        if not self._differences([item]):
            raise _differs(item, "in a batch")
        changes: dict[str, Callable[[str], str]] = {NUL: lambda text: text.split("\0")[0]}
        if isinstance(self.rules, ByteBpe):
            changes[NEXT_LINE] = lambda text: text.replace("\x85", "\n")
        for kind, change in changes.items():
            item = change(item) if isinstance(item, str) else (change(item[0]), change(item[1]))
            if not self._differences([item]):
                return kind
        if isinstance(self.rules, Unigram) and self._is_tie(item):
            return TIES
        raise _differs(item, "alone")

    @cached_property
    def _unlimited(self) -> TextGraph:
        return TextGraph(id_model(self.rules, replace(self.frame, most_tokens=_UNLIMITED)))

    @cached_property
    def _scores(self) -> dict[int, float]:
        """The scores of the tokenizer's pieces by id."""
        model = json.loads(self.tokenizer.content)["model"]
        scores = {token: float(score) for token, (_, score) in enumerate(model["vocab"])}
        return {**scores, model["unk_id"]: min(scores.values()) - _PENALTY}

    def _is_tie(self, item: Text) -> bool:
        """Return whether both segmentations of each word have the same score, within the precision of float32."""
        (own,) = self._expected([item], _UNLIMITED)
        outputs = self._unlimited.run([item])

        def words(row: Sequence[int]) -> list[Sequence[int]]:
            begins = [place for place, token in enumerate(row) if self.tokenizer.token(token).startswith(SPACE)]
            return [row[start:end] for start, end in pairwise((0, *begins, len(row)))]

        def are_same(*readings: Sequence[int]) -> bool:
            (first, second), (text, other) = (
                ([self._scores.get(token, 0.0) for token in row] for row in readings),
                ("".join(map(self.tokenizer.token, row)) for row in readings),
            )
            rounding = max(map(len, readings)) * max(SCORE_STEP, float(np.finfo(np.float32).eps) * abs(sum(first)))
            return text == other and bool(abs(sum(first) - sum(second)) <= rounding)

        rows = words(own.ids), words(outputs[IDS][0][outputs[MASK][0] > 0].tolist())
        return len(rows[0]) == len(rows[1]) and all(map(are_same, *rows))


def _to_width(array: NDArray[Any], width: int, *, left: bool) -> NDArray[Any]:
    """Return an array with another number of columns, cut or filled with -1."""
    if array.shape[1] >= width:
        return array[:, -width:] if left else array[:, :width]
    filling = ((0, 0), (width - array.shape[1], 0) if left else (0, width - array.shape[1]))
    return np.pad(array, filling, constant_values=-1)


def _differs(item: Text, context: str) -> InputError:
    return InputError(
        f"the graph reads {shorten(repr(item), 80)} {context} otherwise than the tokenizer does", _REPORT_HINT
    )
