"""Tokenizers as operators of onnxruntime-extensions: strings to ids, in one pass over a batch.

Operators whose results depend on tables of characters of their own are kept away from texts wherever a table of the
checkpoint's tokenizer can do the same: WordPiece gets words that are already normalized and split.

Shape letters: N texts, T tokens of all texts, C characters of all texts.
"""

from __future__ import annotations

import base64
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import STRINGS

SCOPE = "onnxtool.text"  # of names
_ML = "ai.onnx.ml"
# Characters of no script, which texts may contain but no vocabulary: Unicode keeps them for use inside programs.
_MARK = "\x01"  # StringSplit looks for each byte of a separator
RESERVED = (_MARK, *map(chr, range(0xFDD0, 0xFDD4)))
UNKNOWN, END, _DROPPED, _APART = RESERVED[1:]
_WHITE = r"\s\x{0B}\x{85}\pZ"  # what Unicode calls white space, in a class of RE2
_ALL = 2**31 - 1  # the end of a slice
_INCOMPLETE, _ROW = -1, -2  # ids that no vocabulary has
_PREFIX = "##"
SPACE = "▁"
LONG = 6  # bytes of a cluster that is read character by character


Branch: TypeAlias = "Callable[[StringGraph], Sequence[ir.Value]]"


class StringGraph(Writer):
    """Writes string operators; constants of branches belong to the graph around them, and equal ones are shared."""

    def __init__(self, graph: ir.Graph, around: StringGraph | None = None) -> None:
        """Append to `graph`, a branch inside the graph of `around` if that is given."""
        super().__init__(graph, naming=self._name)
        self.constants: dict[object, ir.Value] = {} if around is None else around.constants
        self.numbers: Iterator[int] = itertools.count() if around is None else around.numbers
        if around is not None:
            self.initializers = around.initializers

    def _name(self, node: ir.Node, _number: int) -> None:
        node.name = f"{SCOPE}/{node.op_type}_{next(self.numbers)}"
        for place, output in enumerate(node.outputs):
            output.name = f"{node.name}/{place}"

    def branch(self, condition: ir.Value, yes: Branch, no: Branch) -> Sequence[ir.Value]:
        """Write an If with what `yes` and `no` append to their branches, and return its outputs."""
        branches = {}
        for name, write in (("then_branch", yes), ("else_branch", no)):
            inner = ir.Graph([], [], nodes=[], opset_imports=self._graph.opset_imports, name=f"{SCOPE}/{name}")
            inner.outputs.extend(write(StringGraph(inner, self)))
            branches[name] = inner
        return self.add(ir.node("If", [condition], branches, num_outputs=len(inner.outputs)))

    def array(self, values: Any, dtype: Any = np.int64) -> ir.Value:
        """Return an initializer."""
        tensor = ir.tensor(np.asarray(values, dtype))
        return self._constant((tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes()), tensor)

    def string(self, text: str) -> ir.Value:
        """Return a string as an initializer of shape [1]."""
        return self.strings((text,))

    def strings(self, texts: Sequence[str]) -> ir.Value:
        """Return strings as an initializer of shape [N]."""
        held = ir.StringTensor([text.encode() for text in texts], shape=ir.Shape([len(texts)]))
        return self._constant(tuple(texts), held)

    def _constant(self, key: object, tensor: ir.TensorProtocol) -> ir.Value:
        if key not in self.constants:
            self.constants[key] = self.initializer(tensor, f"{SCOPE}/constant_{next(self.numbers)}")
        return self.constants[key]

    def contrib(self, operator: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Write a node of onnxruntime-extensions with one output."""
        return self.node(operator, inputs, attributes, domain=STRINGS)

    def replace(self, text: ir.Value, pattern: str, by: str) -> ir.Value:
        """Replace all that match a regular expression of RE2."""
        return self.contrib("StringRegexReplace", text, self.string(pattern), self.string(by))

    def join(self, texts: ir.Value, separator: str) -> ir.Value:
        """Join strings [N] to one."""
        return self.contrib("StringJoin", texts, self.string(separator), self.array([0]))

    def split(self, text: ir.Value, separator: str) -> ir.Value:
        """Split a string into parts that are not empty."""
        inputs = [text, self.string(separator), self.array([True], np.bool_)]
        return self.add(ir.node("StringSplit", inputs, num_outputs=3, domain=STRINGS))[1]

    def lookup(self, values: ir.Value, table: Mapping[str, str] | Mapping[str, int], default: str | int) -> ir.Value:
        """Look strings up in a table."""
        kind = "strings" if isinstance(default, str) else "int64s"
        attributes = {
            "keys_strings": list(table), f"values_{kind}": list(table.values()), f"default_{kind[:-1]}": default,
        }  # fmt: skip
        return self.node("LabelEncoder", [values], attributes, domain=_ML)


@dataclass(frozen=True)
class Tokens:
    """The ids of N texts in one list, without the tokens that frame them.

    Attributes:
        flat: int64 [T], possibly with other ids between texts.
        begins: the place of each text's first token in it, int64 [N].
        lengths: the number of its tokens, int64 [N].
    """

    flat: ir.Value
    begins: ir.Value
    lengths: ir.Value


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before anything else of it is read.

    Attributes:
        strips: whether white space before, and after it, belongs to it.
    """

    content: str
    token_id: int
    strips: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class GraphTokenizer(ABC):
    """A tokenizer that a graph can contain.

    Attributes:
        added: the tokens that a text may spell; the longest wins.
    """

    added: tuple[AddedToken, ...]

    @abstractmethod
    def append(self, graph: StringGraph, texts: ir.Value) -> Tokens:
        """Append the operators that read texts without added tokens: string [N], at least one and the last empty."""

    def tokenize(self, graph: StringGraph, texts: ir.Value) -> Tokens:
        """Append the operators that read texts: string [N], at least one and the last empty.

        Only where a text spells added tokens, its parts between them are read instead of it.
        """
        if not self.added:
            return self.append(graph, texts)
        for token in self.added:
            left, right = (f"[{_WHITE}]*" if strips else "" for strips in token.strips)
            if left or right:
                texts = graph.replace(texts, f"{left}({_escaped(token.content)}){right}", r"\1")
        spelled = sorted((_escaped(token.content) for token in self.added), key=len, reverse=True)
        pattern = graph.string(f"({'|'.join(spelled)})")
        parts, _, _, bounds = graph.add(
            ir.node("StringRegexSplitWithOffsets", [texts, pattern, pattern], num_outputs=4, domain=STRINGS)
        )
        parts = graph.op("Concat", parts, graph.string(""), axis=0)
        ids = graph.lookup(parts, {token.content: token.token_id for token in self.added}, -1)
        is_added = graph.op("Greater", graph.op("ReduceMax", ids, keepdims=0), graph.array(-1))

        def one(value: ir.Value) -> Branch:
            return lambda inner: [inner.op("Identity", value)]

        (strings,) = graph.branch(is_added, one(parts), one(texts))
        tokens = self.append(graph, strings)
        return Tokens(
            *graph.branch(
                is_added,
                lambda inner: _regrouped(inner, tokens, ids, bounds),
                lambda inner: [inner.op("Identity", value) for value in (tokens.flat, tokens.begins, tokens.lengths)],
            )
        )


def _regrouped(graph: StringGraph, tokens: Tokens, ids: ir.Value, bounds: ir.Value) -> list[ir.Value]:
    """Return the tokens of texts, given those of their parts.

    Args:
        graph: where to write.
        tokens: the tokens of P parts.
        ids: the added token that a part is, or -1: int64 [P].
        bounds: the first part of each of N texts, and the number of all: int64 [N + 1].
    """
    sizes = graph.op("Where", graph.op("Greater", ids, graph.array(-1)), graph.array(1), tokens.lengths)
    ends = graph.op("CumSum", sizes, graph.array(0))
    starts = graph.op("Sub", ends, sizes)
    total = graph.op("ReduceMax", ends, keepdims=0)
    place = graph.op("Range", graph.array(0), total, graph.array(1))
    before = graph.op("Range", graph.array(0), graph.op("Add", total, graph.array(1)), graph.array(1))
    ones = graph.op("Add", graph.op("Sub", ends, ends), graph.array(1))
    counts = graph.node(
        "ScatterElements", [graph.op("Sub", before, before), ends, ones], {"axis": 0, "reduction": "add"}
    )
    part = graph.op("Gather", graph.op("CumSum", counts, graph.array(0)), place)  # the one that each token is of
    added = graph.op("Gather", ids, part)
    offset = graph.op("Sub", graph.op("Gather", tokens.begins, part), graph.op("Gather", starts, part))
    own = graph.op("Gather", graph.op("Concat", tokens.flat, graph.array([0]), axis=0), graph.op("Add", place, offset))
    flat = graph.op("Where", graph.op("Greater", added, graph.array(-1)), added, own)
    edges = graph.op("Gather", graph.op("Concat", graph.array([0]), ends, axis=0), bounds)
    begins = graph.op("Slice", edges, graph.array([0]), graph.array([-1]))
    return [flat, begins, graph.op("Sub", graph.op("Slice", edges, graph.array([1]), graph.array([_ALL])), begins)]


@dataclass(frozen=True)
class WordPiece(GraphTokenizer):
    """Words, split at places that single characters decide, and cut into their longest known pieces.

    Attributes:
        vocabulary: ids by piece; pieces inside words begin with `##`.
        unknown: the token of a word that has no pieces.
        most_characters: of a word that is not unknown for its length alone.
        table: what each character becomes, where that is another text: nothing, spaces around it, letters.
    """

    vocabulary: Mapping[str, int]
    unknown: str
    most_characters: int
    table: Mapping[str, str]

    @cached_property
    def letters(self) -> frozenset[str]:
        """The characters that pieces consist of."""
        return frozenset(letter for piece in self.vocabulary for letter in piece)

    @cached_property
    def incomplete(self) -> tuple[str, ...]:
        """Characters that are no piece of their own: a word that needs one is unknown."""
        used = {letter for text in self.pieces.values() for letter in text}
        single = [form for letter in sorted(used & self.letters) for form in (letter, _PREFIX + letter)]
        return tuple(piece for piece in single if piece not in self.vocabulary)

    @cached_property
    def _spelled(self) -> dict[str, str]:
        """Each character in terms of the vocabulary's letters, with all others as unknown ones."""
        same = {letter: letter for letter in (*self.letters, " ")}
        return {
            key: "".join(character if character in self.letters or character == " " else UNKNOWN for character in text)
            for key, text in {**same, **self.table}.items()
        }

    @cached_property
    def pieces(self) -> dict[str, str]:
        """The characters that become letters of the vocabulary alone; a word with any other is unknown."""
        return {key: text for key, text in self._spelled.items() if text.strip() and UNKNOWN not in text}

    @cached_property
    def kinds(self) -> dict[str, list[str]]:
        """Characters by what they become: nothing, a space, an unknown word, or several words with unknown ones."""
        kinds: dict[str, list[str]] = {"": [], " ": [], f" {UNKNOWN} ": []}
        for key, text in self._spelled.items():
            if not text.strip() or (UNKNOWN in text and " " in text):
                kinds.setdefault(text, []).append(key)
        return kinds

    def append(self, graph: StringGraph, texts: ir.Value) -> Tokens:
        """Append the operators; all texts become one, in which a marker ends each."""
        table = {**self.pieces, **dict.fromkeys(self.kinds[" "], " "), END: f" {END} "}
        characters = _characters(graph, texts, self.table)
        places = graph.lookup(characters, {key: place for place, key in enumerate(table)}, -1)
        known = graph.op("GreaterOrEqual", places, graph.array(0))
        mapped = graph.op("Gather", graph.strings(list(table.values())), places)  # of -1 the last one

        def whole(inner: StringGraph) -> list[ir.Value]:
            return [inner.join(mapped, "")]

        def with_unknown(inner: StringGraph) -> list[ir.Value]:
            kinds = inner.join(inner.op("Where", known, inner.string(END), characters), _MARK)
            for by, text in ((_DROPPED, ""), (_APART, f" {UNKNOWN} ")):
                if characters_of := [key for key in self.kinds[text] if key not in RESERVED]:
                    kinds = inner.replace(kinds, f"[{ranges(characters_of)}]", by)
            other = inner.lookup(inner.split(kinds, _MARK), {_DROPPED: "", _APART: f" {UNKNOWN} "}, UNKNOWN)
            joined = inner.join(inner.op("Where", known, mapped, other), "")
            return [inner.replace(joined, f"[^ ]*{UNKNOWN}[^ ]*", UNKNOWN)]

        is_unknown = graph.op("Less", graph.op("ReduceMin", places, keepdims=0), graph.array(0))
        (words,) = graph.branch(is_unknown, with_unknown, whole)
        return self._split(graph, words)

    def _split(self, graph: StringGraph, words: ir.Value) -> Tokens:
        """Cut words into pieces."""
        ids = {**self.vocabulary, **dict.fromkeys(self.incomplete, _INCOMPLETE), END: _ROW}
        attributes = {
            "vocab": json.dumps(dict.fromkeys(ids, 0), ensure_ascii=False, separators=(",", ":")),
            "suffix_indicator": _PREFIX,
            "unknown_token": self.unknown,
            "max_input_chars_per_word": self.most_characters,
        }
        pieces, *_ = graph.add(
            ir.node("WordpieceTokenizer", [words, graph.array(np.zeros(0))], attributes, num_outputs=4, domain=STRINGS)
        )
        flat = graph.lookup(pieces, ids, self.vocabulary[self.unknown])
        if self.incomplete:
            flat = self._whole(graph, pieces, flat)
        ends = graph.op("NonZero", graph.op("Equal", flat, graph.array(_ROW)))
        return _between(graph, flat, graph.op("Squeeze", ends, graph.array([0])))

    def _whole(self, graph: StringGraph, pieces: ir.Value, flat: ir.Value) -> ir.Value:
        """Make one unknown token of each word with an incomplete piece."""
        inside = {piece: 0 for piece in (*self.vocabulary, *self.incomplete) if piece.startswith(_PREFIX)}
        begins = graph.lookup(pieces, inside, 1)
        word = graph.op("Sub", graph.op("CumSum", begins, graph.array(0)), graph.array(1))
        bad = graph.op("Cast", graph.op("Equal", flat, graph.array(_INCOMPLETE)), to=ir.DataType.INT64.value)
        none = graph.op("Sub", flat, flat)
        counts = graph.node("ScatterElements", [none, word, bad], {"axis": 0, "reduction": "add"})
        is_bad = graph.op("Greater", graph.op("Gather", counts, word), graph.array(0))
        kept = graph.op("Or", graph.op("Cast", begins, to=ir.DataType.BOOL.value), graph.op("Not", is_bad))
        named = graph.op("Where", is_bad, graph.array(self.vocabulary[self.unknown]), flat)
        return graph.op("Compress", named, kept, axis=0)


# Each with the tokens that it looks for in texts, and that the vocabulary must therefore have.
BPE_OPERATORS = {"GPT2Tokenizer": ("<|endoftext|>",), "RobertaTokenizer": ("<unk>", "<s>", "</s>", "<pad>")}


@dataclass(frozen=True)
class ByteBpe(GraphTokenizer):
    """Byte pairs, merged inside the words of GPT-2's pattern.

    Attributes:
        vocabulary: ids by token.
        merges: pairs of tokens, separated by a space, in order.
        operator: one of BPE_OPERATORS.
    """

    vocabulary: Mapping[str, int]
    merges: tuple[str, ...]
    operator: str

    def append(self, graph: StringGraph, texts: ir.Value) -> Tokens:
        """Append the operator, which pads, and frames with `<s>` and `</s>` in the form of RoBERTa."""
        attributes = {
            "vocab": json.dumps(dict(self.vocabulary), ensure_ascii=False, separators=(",", ":")),
            "merges": "\n".join(("#version: 0.2", *self.merges, "")),
            "padding_length": -1,
        }
        ids, mask = graph.add(ir.node(self.operator, [texts], attributes, num_outputs=2, domain=STRINGS))
        num_texts, width = (graph.op("Gather", graph.op("Shape", ids), graph.array(axis)) for axis in (0, 1))
        places = graph.op("Range", graph.array(0), num_texts, graph.array(1))
        begins = graph.op("Mul", places, width)
        lengths = graph.op("ReduceSum", mask, graph.array([1]), keepdims=0)
        if self.operator == "RobertaTokenizer":  # a token before each text, and one after it
            begins = graph.op("Add", begins, graph.array(1))
            lengths = graph.op("Sub", lengths, graph.array(2))
        return Tokens(graph.op("Reshape", ids, graph.array([-1])), begins, lengths)


@dataclass(frozen=True)
class Unigram(GraphTokenizer):
    """Pieces of the highest total score inside words, by SentencePiece.

    The tokenizers library reads a character and the marks after it as one if they have fewer than LONG bytes: the
    first rule that fits their beginning stands for all of them.

    Attributes:
        model: SentencePiece's model of the pieces, to be applied to single words; the last piece is the text of the
            unknown one.
        num_pieces: the number of pieces without that.
        unknown: the index of the unknown piece, whose text in the model is UNKNOWN.
        table: what each character becomes alone, where that is another text.
        marks: characters that belong to the one before them.
        leading: characters whose rule stands for the marks after them.
        pairs: what a character and its first mark become.
        replaced: regular expressions in a text of such characters, each with its replacement; words end at spaces and
            begin with `▁` then.
    """

    model: bytes
    num_pieces: int
    unknown: int
    table: Mapping[str, str]
    marks: frozenset[str]
    leading: frozenset[str]
    pairs: Mapping[str, str]
    replaced: tuple[tuple[str, str], ...]

    def append(self, graph: StringGraph, texts: ir.Value) -> Tokens:
        """Append the operators; all texts become one, in which a marker ends each."""
        characters = _characters(graph, texts, self.table)
        same = sorted({*self.marks, *(both[0] for both in self.pairs)})
        table = {**dict(zip(same, same, strict=True)), **self.table, END: END}
        places = graph.lookup(characters, {key: place for place, key in enumerate(table)}, -1)
        mapped = graph.op("Gather", graph.strings(list(table.values())), places)
        mapped = graph.op("Where", graph.op("Less", places, graph.array(0)), characters, mapped)
        if self.marks:
            is_mark = graph.op("Gather", graph.array([key in self.marks for key in (*table, "")], np.int64), places)
            (mapped,) = graph.branch(
                graph.op("Greater", graph.op("ReduceMax", is_mark, keepdims=0), graph.array(0)),
                lambda inner: [self._with_marks(inner, list(table), (characters, places, is_mark), mapped)],
                lambda inner: [inner.op("Identity", mapped)],
            )
        text = graph.join(mapped, "")
        for pattern, by in (
            *self.replaced,
            (f"([{SPACE}{END}])", r" \1"),
            (f"(^|[ {END}])([^ {SPACE}{END}])", rf"\1 {SPACE}\2"),
        ):
            text = graph.replace(text, pattern, by)
        words = graph.split(text, " ")
        no = graph.array([False], np.bool_)
        settings = (graph.array([0]), graph.array([0], np.float32), no, no, no)
        flat, starts = graph.add(
            ir.node(
                "SentencepieceTokenizer", [words, *settings], {"model": base64.b64encode(self.model).decode()},
                num_outputs=2, domain=STRINGS,
            )
        )  # fmt: skip
        places = graph.op("NonZero", graph.contrib("StringEqual", words, graph.string(END)))
        ends = graph.op("Gather", starts, graph.op("Squeeze", places, graph.array([0])))
        flat = graph.op("Cast", flat, to=ir.DataType.INT64.value)
        is_spelled = graph.op("Equal", flat, graph.array(self.num_pieces))
        return _between(graph, graph.op("Where", is_spelled, graph.array(self.unknown), flat), ends)

    def _with_marks(
        self, graph: StringGraph, keys: list[str], by_character: tuple[ir.Value, ...], alone: ir.Value
    ) -> ir.Value:
        """Return what the characters of a text become: string [C].

        Args:
            graph: where to write.
            keys: the characters with a place.
            by_character: the characters, string [C]; their places, or -1, and whether each is a mark, int64 [C].
            alone: what each becomes without those around it, string [C].
        """
        characters, places, is_mark = by_character
        end = graph.array([keys.index(END)])
        before = graph.op("Concat", end, graph.op("Slice", places, graph.array([0]), graph.array([-1])), axis=0)
        is_mark = graph.op("Where", graph.op("Equal", before, end), graph.array(0), is_mark)  # none begins a text
        cluster = graph.op("CumSum", graph.op("Sub", graph.array(1), is_mark), graph.array(0))
        none = graph.op("Concat", graph.op("Sub", places, places), graph.array([0]), axis=0)

        def total(values: ir.Value) -> ir.Value:  # of each one's cluster
            values = graph.op("Cast", values, to=ir.DataType.INT64.value)
            counts = graph.node("ScatterElements", [none, cluster, values], {"axis": 0, "reduction": "add"})
            return graph.op("Gather", counts, cluster)

        sizes = graph.op("Gather", graph.array([*(len(key.encode()) for key in keys), LONG]), places)
        leads = graph.op("Gather", graph.array([*(key in self.leading for key in keys), False], np.bool_), places)
        parts = (graph.op("Slice", characters, *map(graph.array, part)) for part in (([0], [-1]), ([1], [_ALL])))
        pair = graph.lookup(graph.contrib("StringConcat", *parts), {key: i for i, key in enumerate(self.pairs)}, -1)
        pair = graph.op("Concat", pair, graph.array([-1]), axis=0)
        is_pair = graph.op("GreaterOrEqual", pair, graph.array(0))
        begins = graph.op(
            "And", graph.op("Less", total(sizes), graph.array(LONG)), graph.op("Equal", is_mark, graph.array(0))
        )
        leads = graph.op("And", begins, graph.op("Or", leads, is_pair))
        is_dropped = graph.op("And", graph.op("Greater", total(leads), graph.array(0)), graph.op("Not", leads))
        paired = graph.op("Gather", graph.strings([*self.pairs.values(), ""]), pair)
        mapped = graph.op("Where", graph.op("And", leads, is_pair), paired, alone)
        return graph.op("Where", is_dropped, graph.string(""), mapped)


def _characters(graph: StringGraph, texts: ir.Value, table: Mapping[str, str]) -> ir.Value:
    """Return the characters of texts, with END after each text: string [C]."""
    for by in sorted({table.get(character, UNKNOWN) for character in RESERVED}):
        texts = graph.replace(
            texts, f"[{ranges(character for character in RESERVED if table.get(character, UNKNOWN) == by)}]", by
        )
    text = graph.contrib("StringConcat", graph.join(texts, END), graph.string(END))
    return graph.split(graph.replace(text, "(?s)(.)", rf"\1{_MARK}"), _MARK)


def _between(graph: StringGraph, flat: ir.Value, ends: ir.Value) -> Tokens:
    """Return the tokens of texts, given the places of the tokens that end them: int64 [N]."""
    begins = graph.op("Add", graph.op("Slice", ends, graph.array([0]), graph.array([-1])), graph.array(1))
    begins = graph.op("Concat", graph.array([0]), begins, axis=0)
    return Tokens(flat, begins, graph.op("Sub", ends, begins))


def _escaped(text: str) -> str:
    """Return a regular expression of RE2 for a text."""
    return "".join(
        character if character.isalnum() and character.isascii() else f"\\x{{{ord(character):X}}}" for character in text
    )


def ranges(characters: Iterable[str]) -> str:
    """Return the inside of a class of RE2 with these characters."""
    return "".join(
        f"\\x{{{first:X}}}" + (f"-\\x{{{last:X}}}" if last > first else "") for first, last in _runs(characters)
    )


def _runs(characters: Iterable[str]) -> Iterator[tuple[int, int]]:
    first = last = -2
    for point in sorted(map(ord, characters)):
        if point != last + 1 and first >= 0:
            yield first, last
        first, last = (first, point) if point == last + 1 else (point, point)
    if first >= 0:
        yield first, last
