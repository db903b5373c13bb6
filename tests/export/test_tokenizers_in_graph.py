"""A tokenizer in a graph makes the ids, masks and types of the tokenizers library, or is refused by name."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import onnx_ir as ir
import pytest
from tokenizers import Tokenizer

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import Text
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.export import in_graph, tokenizer_rules
from onnxtool.export.in_graph import NEXT_LINE, NUL, TIES, TextProof
from onnxtool.export.tokenizer_rules import read_tokenizer
from onnxtool.graph.text_input import COUNT, IDS, MASK, TYPES, Frame, id_model
from onnxtool.graph.tokenizers import GraphTokenizer, StringGraph, Tokens, Unigram
from onnxtool.runtime.text_graph import TextGraph
from onnxtool.runtime.tokens import HARD_TEXTS
from tests.export.text_tokenizers import NAMES, train

pytest.importorskip("onnxruntime_extensions")
LIMIT = 24
MARKS = (  # what a map of characters composes, or not: few bytes, many bytes, in the wrong order, behind controls
    *("ﾊﾞｶﾞ", "e\u0323\u0302", "e\u0301\u0302\u0303", "\uff21\u0301 \u00aa\u0301", "\u0627\u0654\u064e", "\x02\u0301a"),
    *(
        "\u1112\u1161\u11ab",
        "\u00e2\u0323",
        "\u09c7\u09be",
        "\uff1cs\uff1e \uff1cunk\uff1e",
        "a\u0344\u0301",
        "\u0344\u0301",
    ),
)
WHITE = [
    f"a{one}b{one}{one}c{one}" for one in "\t\n\x0b\x0c\r\x1c\x1f\x85\xa0\u1680\u180e\u200b\u2028\u202f\u3000\ufeff▁"
]


@cache
def trained(name: str) -> Tokenizer:
    """Return a tokenizer of the class; sums of its scores are exact in any order, so that ties are the same."""
    content = json.loads(train(name, [text.replace("\0", "") for text in HARD_TEXTS] * 2).to_str())
    if isinstance(content["model"]["vocab"], list):
        content["model"]["vocab"] = [(piece, round(score * 64) / 64) for piece, score in content["model"]["vocab"]]
    return Tokenizer.from_str(json.dumps(content))


@cache
def rules_of(name: str, folder: Path) -> GraphTokenizer:
    """Return it as a graph does it."""
    return read_tokenizer(opened(trained(name).to_str(), folder), LIMIT)[0]


def opened(content: str, folder: Path, **settings: Any) -> TextTokenizer:
    """Return the tokenizer of a tokenizer.json."""
    (folder / "tokenizer.json").write_text(content, "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return TextTokenizer(CheckpointFolder(folder))


def frame_of(tokenizer: TextTokenizer, rules: GraphTokenizer, *, is_pair: bool = False) -> Frame:
    """Return how a graph makes rows; the rules need not be read again."""
    with mock.patch.object(tokenizer_rules, "_rules", return_value=rules):
        return read_tokenizer(tokenizer, LIMIT, is_pair=is_pair)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for files that are read at once."""
    return tmp_path_factory.mktemp("tokenizers")


def texts_for(name: str) -> list[str]:
    """Return texts that tokenizers disagree on, with each added token and some too long; without NUL."""
    own = [token.content for token in trained(name).get_added_tokens_decoder().values()]
    forms = [form.format(token) for token in own for form in ("a {} b", "x{}y", "{0}{0} ")]
    lengths = [" ".join(["the"] * count) for count in (LIMIT - 3, LIMIT - 2, LIMIT - 1, LIMIT, 5 * LIMIT)]
    return [text for text in (*HARD_TEXTS, *forms, *lengths, *MARKS, *WHITE) if "\0" not in text]


@pytest.mark.parametrize(("side", "is_pair"), [("right", False), ("left", False), ("right", True)])
@pytest.mark.parametrize("name", NAMES)
def test_ids_masks_and_types_are_the_librarys(name: str, side: str, *, is_pair: bool, folder: Path) -> None:
    """Each text alone, batches of 0 to 64 texts, either side, and pairs have the arrays of the tokenizers library."""
    rules, pad = rules_of(name, folder), 1 if name in ("RoBERTa", "XLM-R", "ModernBERT") else 0
    library, pad_token = Tokenizer.from_str(trained(name).to_str()), trained(name).id_to_token(pad)
    settings = {"pad_token": pad_token, "padding_side": side, "truncation_side": side}
    frame = frame_of(opened(library.to_str(), folder, **settings), rules, is_pair=is_pair)
    library.enable_padding(pad_id=pad, pad_token=pad_token, direction=side)
    library.enable_truncation(LIMIT, direction=side)
    graph, texts = TextGraph(id_model(rules, frame)), texts_for(name)
    items: Sequence[Text] = list(zip(texts, [*texts[7:], *texts[:7]], strict=True)) if is_pair else texts
    draw = random.Random(0)  # noqa: S311  texts, no secrets
    alone = items if side == "right" and not is_pair else items[:9]
    batches = (draw.sample(items, size) for size in (2, 3, 7, 33, 64, 64))
    for group in ([], *([item] for item in alone), *batches):
        wanted = library.encode_batch(group) or library.encode_batch([""] if not is_pair else [("", "")])
        found = {key: array.tolist() for key, array in graph.run(group).items()}
        assert found[COUNT] == [len(group)]
        assert found[IDS] == [encoding.ids for encoding in wanted], group
        assert found[MASK] == [encoding.attention_mask for encoding in wanted], group
        assert found[TYPES] == [encoding.type_ids for encoding in wanted], group


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set what stands at a path in a tokenizer.json."""

    def change(content: dict[str, Any]) -> None:
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("/"))
        inner: Any = content
        for part in parents:
            inner = inner[part]
        inner[last] = value

    return change


def decomposed(content: dict[str, Any]) -> None:
    """Let a tokenizer decompose letters, and split words at white space alone."""
    content |= {"normalizer": {"type": "NFD"}, "pre_tokenizer": {"type": "WhitespaceSplit"}}


_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}
_METASPACE = {"type": "Metaspace", "replacement": "▁", "split": True}
_SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
_STRIP = {"type": "Strip", "strip_left": False, "strip_right": True}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (NAMES[0], changed("normalizer", {"type": "NFC"}), "the normalizer NFC in front of WordPiece"),
        (NAMES[1], decomposed, "whose order the normalizer changes"),
        (NAMES[0], changed("pre_tokenizer", _SPLIT), "the pre-tokenizer Split in front of WordPiece"),
        (NAMES[0], changed("pre_tokenizer", None), "not split into words"),
        (NAMES[0], changed("model/continuing_subword_prefix", "@@"), "the prefix '@@'"),
        (NAMES[0], changed("model/unk_token", "<none>"), "the unknown token '<none>'"),
        (NAMES[2], changed("added_tokens/0/single_word", True), "'<s>' as a single word"),
        (NAMES[2], changed("normalizer", {"type": "NFC"}), "the normalizer NFC in front of byte pairs"),
        (NAMES[2], changed("pre_tokenizer/add_prefix_space", True), "add_prefix_space"),
        (NAMES[2], changed("pre_tokenizer/use_regex", False), "the pre-tokenizer ByteLevel"),
        (NAMES[2], changed("pre_tokenizer", _SPLIT), "the pre-tokenizer Split in front of byte pairs"),
        (NAMES[2], changed("model/ignore_merges", True), "ignore_merges"),
        (NAMES[2], changed("added_tokens", []), "without the added tokens"),
        (NAMES[4], changed("added_tokens/0/normalized", True), "looked for in normalized text"),
        (NAMES[4], changed("normalizer", {"type": "NFKC"}), "the normalizer NFKC in front of Unigram"),
        (NAMES[4], changed("normalizer", _SPACES), "the normalizer Replace in front of Unigram"),
        (NAMES[4], changed("pre_tokenizer", None), "the pre-tokenizer none in front of Unigram"),
        (NAMES[4], changed("pre_tokenizer/pretokenizers/1/prepend_scheme", "first"), "Metaspace that does not"),
        (NAMES[4], changed("model/byte_fallback", True), "bytes for unknown characters"),
        (NAMES[4], changed("model/vocab/9/0", "<s>"), "stand twice"),
        (NAMES[5], changed("normalizer", None), "several spaces in a row"),
        (NAMES[5], changed("normalizer/normalizers/1/strip_left", True), "the normalizer Strip in front of Unigram"),
        (NAMES[5], changed("normalizer/normalizers", [_SPACES, _STRIP]), "the normalizer Replace in front of Unigram"),
    ],
)
def test_what_a_graph_cannot_express_is_refused(
    name: str, change: Callable[[dict[str, Any]], None], said: str, folder: Path
) -> None:
    """A rule that the graph does not have is an error that names it."""
    content = json.loads(trained(name).to_str())
    change(content)
    with pytest.raises(InputError, match=re.escape(said)):
        read_tokenizer(opened(json.dumps(content), folder), LIMIT)


def test_a_template_that_turns_texts_around_is_refused(folder: Path) -> None:
    """The graph joins the two texts of a pair in their order."""
    content = json.loads(trained("ModernBERT").to_str())
    content["post_processor"]["pair"].reverse()
    tokenizer = opened(json.dumps(content), folder)
    with pytest.raises(InputError, match="turns two around"):
        read_tokenizer(tokenizer, LIMIT, is_pair=True)


def proof_of(name: str, folder: Path, **changes: Any) -> TextProof:
    """Return the proof of a graph whose rules or frame, by the names of their attributes, are changed."""
    tokenizer, rules = opened(trained(name).to_str(), folder), rules_of(name, folder)
    frame = frame_of(tokenizer, rules)
    of_rules = {key: change(getattr(rules, key)) for key, change in changes.items() if hasattr(rules, key)}
    of_frame = {key: change(getattr(frame, key)) for key, change in changes.items() if hasattr(frame, key)}
    assert len(of_rules) + len(of_frame) == len(changes)
    return TextProof(tokenizer, replace(rules, **of_rules), replace(frame, **of_frame))


def use_texts(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    """Let the proof read these texts, or its own, without all characters."""
    for name in ("_characters", "_patterns"):
        monkeypatch.setattr(in_graph, name, list)
    if texts:
        monkeypatch.setattr(in_graph, "proof_texts", lambda *_: list(texts))


def without(*keys: str) -> Callable[[Mapping[str, str]], dict[str, str]]:
    """Return a change that drops entries of a table."""
    return lambda table: {key: value for key, value in table.items() if key not in keys}


FAULTS: list[tuple[str, str, Callable[[Any], Any]]] = [
    (NAMES[0], "pad_id", lambda _: 7),
    (NAMES[0], "cuts_left", lambda _: True),
    (NAMES[0], "pads_left", lambda _: True),
    (NAMES[0], "segments", lambda segments: (*segments[:-1], replace(segments[-1], segment_id=1))),
    (NAMES[0], "added", lambda added: added[:-1]),
    (NAMES[0], "table", without("H")),
    (NAMES[1], "vocabulary", lambda ids: {**ids, "the": ids["."]}),
    (NAMES[2], "merges", lambda merges: merges[::-1]),
    (NAMES[3], "vocabulary", lambda ids: {**ids, "Ġthe": ids["."]}),
    (NAMES[4], "table", without("\u2167")),
    (NAMES[4], "marks", lambda _: frozenset()),
    (NAMES[4], "replaced", lambda _: ((" ", ""),)),
    (NAMES[5], "replaced", lambda rules: rules[1:]),
]


@pytest.mark.parametrize(("name", "attribute", "fault"), FAULTS)
def test_a_fault_in_the_graph_is_found(
    name: str, attribute: str, fault: Callable[[Any], Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph with one rule that is not the tokenizer's does not pass the proof."""
    use_texts(monkeypatch)
    with pytest.raises(InputError, match="otherwise than the tokenizer does"):
        proof_of(name, folder, **{attribute: fault}).check()


def test_a_fault_in_a_single_character_is_found(folder: Path) -> None:
    """Each character that there is stands in one of the texts."""
    with pytest.raises(InputError, match="aǍb"):
        proof_of(NAMES[0], folder, table=without("Ǎ")).check()


@dataclass(frozen=True)
class WrongInSevens(GraphTokenizer):
    """A tokenizer that is right but for batches of seven texts."""

    inner: GraphTokenizer

    def append(self, graph: StringGraph, texts: ir.Value) -> Tokens:
        """Append the operators of the inner tokenizer, and add 1 to its ids."""
        read = self.inner.append(graph, texts)
        is_seven = graph.op("Equal", graph.op("Shape", texts), graph.array([8]))  # with the empty one behind them
        return replace(read, flat=graph.op("Add", read.flat, graph.op("Cast", is_seven, to=ir.DataType.INT64.value)))


def test_a_fault_in_batches_of_one_size_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that are right alone and in other batches are read in batches of all sizes."""
    use_texts(monkeypatch, *(f"a{number}" for number in range(64)))
    proof = proof_of("RoBERTa", folder, added=lambda _: ())
    wrong = replace(proof, rules=WrongInSevens((), rules_of("RoBERTa", folder)))
    with pytest.raises(InputError, match="in a batch of 7 otherwise"):
        wrong.check()


def test_what_differs_by_nature_is_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NUL ends a string in onnxruntime's Python; two readings with one score are a tie; a better one is an error."""
    scores = [("<unk>", 0.0), ("▁", -1.0), ("a", -0.1), ("aa", -0.3), ("aaa", -0.2), ("b", -0.7)]
    content = json.loads(trained("XLM-R").to_str()) | {"added_tokens": [], "post_processor": None, "normalizer": None}
    content["model"] |= {"unk_id": 0, "vocab": scores}
    tokenizer = opened(json.dumps(content), folder)
    texts = [*("b" * count for count in range(64)), "a" * 20, "b\0b", "a" * 20 + "\0b"]
    use_texts(monkeypatch, *texts)
    rules, frame = read_tokenizer(tokenizer, LIMIT)
    assert isinstance(rules, Unigram)
    num_texts, kinds = TextProof(tokenizer, rules, frame).check()
    assert (num_texts, set(kinds)) == (67, {NUL, TIES})
    worse = replace(rules, model=tokenizer_rules._model([*scores[:-2], ("aaa", -0.5), scores[-1]], 0))
    with pytest.raises(InputError, match="alone otherwise"):
        TextProof(tokenizer, worse, frame).check()


def test_a_next_line_that_is_read_as_a_sign_is_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator of byte pairs does not take U+0085 for white space; it excuses nothing else."""
    content = json.loads(trained("RoBERTa").to_str())
    content["model"]["merges"].insert(0, ["Ġ", "Â"])
    content["model"]["vocab"]["ĠÂ"] = content["added_tokens"][-1]["id"] = len(content["model"]["vocab"])
    tokenizer = opened(json.dumps(content), folder)
    texts = [*("b" * count for count in range(64)), "a \x85b"]
    use_texts(monkeypatch, *texts)
    rules, frame = read_tokenizer(tokenizer, LIMIT)
    assert TextProof(tokenizer, rules, frame).check() == (65, {NEXT_LINE: 1})
    wrong = proof_of("RoBERTa", folder, vocabulary=lambda ids: {**ids, "Ġthe": ids["."]})
    with pytest.raises(InputError, match="alone otherwise"):
        wrong.kind(" the \x85the the")


def test_words_are_read_apart_at_what_the_tokenizer_takes_for_white_space(folder: Path) -> None:
    """Without a map of characters, white space is what the tokenizers library splits at, and nothing else."""
    content = json.loads(trained("XLM-R").to_str()) | {"normalizer": None}
    tokenizer, library = opened(json.dumps(content), folder), Tokenizer.from_str(json.dumps(content))
    graph = TextGraph(id_model(*read_tokenizer(tokenizer, 10**6)))
    for text in (*WHITE, "a ▁b ▁▁ c▁ ▁", *MARKS):
        assert graph.run([text])[IDS].tolist() == [library.encode(text).ids], ascii(text)
