"""Token limits of a model and their sources, and truncation or windowing of longer texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING
from onnxtool.errors import InputError
from onnxtool.graph.operators import named_inputs
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import MAX_LENGTH_KEY, VERIFIED_LENGTH_KEY
from onnxtool.model_file.wire import read_nodes
from onnxtool.reports import Json, short_repr

# Model types whose positions start after the padding token's id, so that their table has that many rows, plus one, more
# than a text may have tokens (transformers' create_position_ids_from_input_ids).
_PADDED_POSITIONS = frozenset(
    (
        *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm"),
        *("mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    )
)
# Tasks of sentence-transformers checkpoints. Their limit reflects intended use, not the model's capacity.
_SENTENCE_TASKS = (
    *("sentence-similarity", "sparse-encoding", "feature-extraction", "text-classification"),
    *(RANKING, LATE_INTERACTION),
)
_DEFAULT_PAD_ID = 1  # default of all these model types' configurations
# Tokenizers without a limit say 1e30 (transformers' VERY_LARGE_INTEGER).
_UNLIMITED = 10**9
# Exporters keep parameter names; relative and rotary positions have no such table.
_POSITION_TABLE = re.compile(r"(?<!relative_)position_embeddings?\.|embed_positions\.|\bwpe\.")


@dataclass(frozen=True, order=True)
class Limit:
    """The maximum number of tokens, including special ones, and its source."""

    tokens: int
    source: str


def text_limit(model: ModelFile, folder: CheckpointFolder, task: str) -> Limit | None:
    """Return the smallest limit set for texts, or None if there is none.

    The limit comes from the export's stamp; for files without one, made by other tools, it is deduced from the graph
    and the checkpoint's files.

    Raises:
        InputError: a file of the checkpoint is malformed.
        ModelFileError: the stamp is not a number of tokens.
    """
    if (graph_cut := _cut_in_graph(model)) is not None:
        return graph_cut
    stamped = [limit for limit in (_stamped_limit(model, MAX_LENGTH_KEY), verified_limit(model)) if limit is not None]
    limits = [*stamped, *_shape_limit(model)] if stamped else [*_deduced_limits(model, folder)]
    modules = folder.sentence_modules
    if modules.max_sequence_length is not None and task in _SENTENCE_TASKS:
        limits.append(Limit(modules.max_sequence_length, f"max_seq_length of {modules.transformer_file}"))
    return min(limits, default=None)


def limit_of_task(model: ModelFile, folder: CheckpointFolder, task: str) -> Limit | None:
    """Return the checkpoint's separate limit for queries or documents; None if it has none.

    As in sentence-transformers, it replaces the limit for texts, whether longer or shorter, up to the graph's limit.

    Args:
        model: the file.
        folder: of the checkpoint.
        task: `query` or `document`.
    """
    modules = folder.sentence_modules
    length = modules.stated_length(task)
    if length is None or model.text_input is not None:
        return None
    own = Limit(length, f"the length of a {task} in {modules.transformer_file}")
    return min((own, *_graph_limits(model, folder)))


def graph_limit(model: ModelFile, folder: CheckpointFolder | None) -> Limit | None:
    """Return the limit beyond which the graph fails or was not verified; None if none is known, or without tokens."""
    if (graph_cut := _cut_in_graph(model)) is not None:
        return graph_cut
    if all(info.dtype.startswith("float") for info in model.structure.inputs):
        return None  # images and audio; their positions count patches and frames
    return min(_graph_limits(model, folder), default=None)


def _cut_in_graph(model: ModelFile) -> Limit | None:
    """Return where the graph itself cuts texts; None if it does not read texts."""
    return None if model.text_input is None else Limit(model.text_input.most_tokens, "the tokenizer in the graph")


def verified_limit(model: ModelFile) -> Limit | None:
    """Return the maximum length at which export compared the file with the checkpoint; None if it did not.

    Raises:
        ModelFileError: the stamp is not a number of tokens.
    """
    return _stamped_limit(model, VERIFIED_LENGTH_KEY)


def reserved_positions(folder: CheckpointFolder | None) -> int:
    """Return the number of unused rows at the start of the position table."""
    config = folder.read_object("config.json") if folder else {}
    if str(config.get("model_type")) not in _PADDED_POSITIONS:
        return 0
    pad_id = _integer(config, "pad_token_id")
    return (_DEFAULT_PAD_ID if pad_id is None else pad_id) + 1


def fixed_shape(model: ModelFile) -> tuple[int | None, int | None]:
    """Return the graph's fixed batch size and sequence length, None for dynamic axes."""
    for info in model.structure.inputs:
        if info.name == "input_ids" and len(info.shape) == 2:
            batch, sequence = info.shape
            return batch if isinstance(batch, int) else None, sequence if isinstance(sequence, int) else None
    return None, None


def _stamped_limit(model: ModelFile, key: str) -> Limit | None:
    stamped = model.metadata_number(key)
    return None if stamped is None else Limit(stamped, f"{key} of the model's metadata")


def _deduced_limits(model: ModelFile, folder: CheckpointFolder) -> Iterator[Limit]:
    tokens = _integer(folder.read_object("tokenizer_config.json"), "model_max_length")
    if tokens is not None and 0 < tokens < _UNLIMITED:
        yield Limit(tokens, "model_max_length of tokenizer_config.json")
    config = folder.read_object("config.json")
    for key in ("max_position_embeddings", "n_positions"):
        tokens = _integer(config, key)
        if tokens is not None and tokens > 0:  # XLNet writes -1 for no limit
            yield Limit(tokens - reserved_positions(folder), f"{key} of config.json")
    yield from _graph_limits(model, folder)


def batch_shapes(model: ModelFile) -> tuple[tuple[int, int], ...]:
    """Return the texts and the tokens of each file of fixed sizes that belongs to a model; empty without any."""
    axes = next((info.shape for info in model.structure.inputs if info.name == "input_ids"), ())
    if not model.sizes or len(axes) != 2:
        return ()
    texts, tokens = (str(axis) if axis else f"input_ids[{place}]" for place, axis in enumerate(axes))
    return tuple((file.sizes.get(texts, 1), file.sizes.get(tokens, 1)) for file in model.sizes)


def _shape_limit(model: ModelFile) -> Iterator[Limit]:
    sequence_length = fixed_shape(model)[1]
    if sequence_length is not None:
        yield Limit(sequence_length, "the shape of the input input_ids")
    elif shapes := batch_shapes(model):
        yield Limit(max(tokens for _, tokens in shapes), "the largest of its --sizes")


def _graph_limits(model: ModelFile, folder: CheckpointFolder | None) -> Iterator[Limit]:
    yield from _shape_limit(model)
    verified = verified_limit(model)
    if verified is not None:
        yield verified
    yield from position_limits(model, reserved_positions(folder))


def position_limits(model: ModelFile, reserved: int = 0) -> Iterator[Limit]:
    """Yield the rows of each table of positions, beyond which the graph fails."""
    rows = {tensor.name: tensor.dims[0] for tensor in model.structure.initializers if len(tensor.dims) == 2}
    named = (named_inputs(node.domain, node.op_type, node.inputs) for node in read_nodes(model.path))
    fused = {inputs.get("position_embedding") for inputs in named}
    for name, length in rows.items():
        if name in fused or _POSITION_TABLE.search(name):
            yield Limit(length - reserved, f"the rows of {name}")


def _integer(config: dict[str, Json], key: str) -> int | None:
    value = config.get(key)
    # Some tokenizers write model_max_length as 1e30, which JSON reads as a float.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


Value = TypeVar("Value")

# A text, or a pair of texts.
Text = str | tuple[str, str]

# A text is huge if it exceeds both this many characters per kept token and this many in total.
_CHARACTERS_PER_TOKEN, _MIN_HUGE = 64, 1 << 14


@dataclass(frozen=True)
class ReadOptions:
    """Tokenization options.

    Attributes:
        with_offsets: whether to return token positions in the text, which costs time.
        cut_side: truncation side, `left` or `right`; None for the tokenizer's setting.
        keeps_first: whether the first text of a pair stays whole; otherwise the longer one is truncated first.
        num_leading: number of leading characters, the prompt, that are repeated in each window; needs offsets.
        adds_special: whether special tokens are added around a text; a chat template writes its own.
    """

    with_offsets: bool = False
    cut_side: str | None = None
    keeps_first: bool = False
    num_leading: int = 0
    adds_special: bool = True


PLAIN = ReadOptions()


@short_repr
@dataclass(frozen=True)
class TokenOffsets:
    """Positions of tokens in their texts.

    Attributes:
        parts: 0 for tokens of the text, or of the first text of a pair; 1 for tokens of the second; -1 for added
            tokens.
        spans: start and end (exclusive) of the token in its text, in characters; (0, 0) for added tokens.
        words: index of the word in that text, shared by its tokens; -1 for added tokens.
        first: number of tokens of the truncated text before this window.
    """

    parts: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    words: tuple[int, ...]
    first: int = 0

    def framed(self, count: int, *, before: bool) -> TokenOffsets:
        """Return the positions with `count` added tokens before or after."""
        nowhere, places = (-1,) * count, ((0, 0),) * count
        if before:
            return TokenOffsets(nowhere + self.parts, places + self.spans, nowhere + self.words, self.first)
        return TokenOffsets(self.parts + nowhere, self.spans + places, self.words + nowhere, self.first)


@short_repr
@dataclass(frozen=True)
class EncodedText:
    """A tokenized text or pair of texts, without padding.

    Attributes:
        ids: token ids, including special tokens.
        segment_ids: the segment of each token.
        is_special: whether the tokenizer added the token, for each.
        truncated: whether the text was longer than the limit; windows are not truncated.
        offsets: positions of the tokens in the texts; None unless requested.
        num_prompt: number of leading prompt tokens that are excluded from pooling.
        attended: whether the model attends to each token; None if it attends to all.
        counted: whether each token's vector counts in late interaction; None if all count.
        source: the text itself, for a graph that reads it; None for others.
    """

    ids: tuple[int, ...]
    segment_ids: tuple[int, ...]
    is_special: tuple[bool, ...]
    truncated: bool
    offsets: TokenOffsets | None = None
    num_prompt: int = 0
    attended: tuple[bool, ...] | None = None
    counted: tuple[bool, ...] | None = None
    source: Text | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def keep(self, ranges: Sequence[range], *, truncated: bool, first: int = 0) -> EncodedText:
        """Return only the tokens in `ranges`, ranges of positions in order."""
        offsets = self.offsets
        if offsets is not None:
            offsets = TokenOffsets(
                _taken(offsets.parts, ranges), _taken(offsets.spans, ranges), _taken(offsets.words, ranges), first
            )
        special = _taken(self.is_special, ranges)
        return EncodedText(_taken(self.ids, ranges), _taken(self.segment_ids, ranges), special, truncated, offsets)


@dataclass(frozen=True)
class WholeText:
    """A tokenized text or pair of texts before truncation.

    Attributes:
        parts: the contiguous positions of each text's tokens; the tokenizer added all others.
    """

    encoded: EncodedText
    parts: tuple[range, ...]

    def cut(self, limit: Limit, side: str, *, keeps_first: bool = False) -> EncodedText:
        """Truncate to `limit`, keeping the tokens that the tokenizer added.

        Raises:
            InputError: nothing would be left of the text.
        """
        if len(self.encoded) <= limit.tokens:
            return self.encoded
        lengths = [len(part) for part in self.parts]
        room = limit.tokens - (len(self.encoded) - sum(lengths))
        if len(lengths) == 2:
            if keeps_first:
                _require_room(lengths[0], room, limit, least=1)
                lengths[1] = room - lengths[0]
            else:
                _require_room(0, room, limit, least=2)
                lengths = list(longest_first((lengths[0], lengths[1]), room))
        else:
            _require_room(0, room, limit, least=1)
            lengths = [room]
        kept = [
            part[len(part) - length :] if side == "left" else part[:length]
            for part, length in zip(self.parts, lengths, strict=True)
        ]
        return self.encoded.keep(_with_framing(len(self.encoded), self.parts, kept), truncated=True)

    def windows(self, limit: Limit, overlap: int, num_leading: int = 0) -> list[EncodedText]:
        """Return windows of at most `limit` tokens over the last text, each preceded by the tokens before that text.

        Args:
            limit: the maximum number of tokens in a window.
            overlap: number of tokens shared by neighbouring windows.
            num_leading: number of leading characters of the first text whose tokens are repeated in each window.

        Raises:
            InputError: windows with that overlap have no room.
        """
        if len(self.encoded) <= limit.tokens:
            return [self.encoded]
        cut = self.parts[-1]
        if num_leading and len(self.parts) == 1:  # each window contains the first text of a pair in full
            assert self.encoded.offsets is not None  # noqa: S101  as ReadOptions says
            spans = self.encoded.offsets.spans
            cut = cut[sum(spans[place][1] <= num_leading for place in cut) :]
        taken = len(self.encoded) - len(cut)
        _require_room(taken, limit.tokens, limit, least=overlap + 1)
        room = limit.tokens - taken
        return [
            self.encoded.keep(
                _with_framing(len(self.encoded), [cut], [cut[start : start + room]]), truncated=False, first=start
            )
            for start in window_starts(len(cut), room, overlap)
        ]


def bounded(text: Text, limit: Limit, side: str) -> Text:
    """Return the part of a huge text that determines its truncation: tokenizing megabytes for 512 tokens takes seconds.

    It ends at a space, and the tokens before that do not depend on what follows. A text that is not huge is returned
    unchanged.
    """
    size = max(_MIN_HUGE, _CHARACTERS_PER_TOKEN * limit.tokens)
    if isinstance(text, str):
        return _bounded_part(text, size, side)
    if max(map(len, text)) <= size:
        return text
    return _bounded_part(text[0], size, side), _bounded_part(text[1], size, side)


def longest_first(lengths: tuple[int, int], room: int) -> tuple[int, int]:
    """Return the numbers of tokens to keep of the two texts of a pair, so that both fit into `room`.

    The longer one is truncated until both have the same length, then both. This matches `longest_first` in the
    tokenizers library, which transformers and sentence-transformers use for pairs.
    """
    if sum(lengths) <= room:
        return lengths
    shorter = min(*lengths, room // 2)
    return (shorter, room - shorter) if lengths[0] <= lengths[1] else (room - shorter, shorter)


def window_starts(length: int, room: int, overlap: int) -> Iterator[int]:
    """Yield the start of each window of `room` tokens over `length`, with `overlap` tokens shared by neighbours."""
    start = 0
    yield start
    while start + room < length:
        start += room - overlap
        yield start


def _taken(values: tuple[Value, ...], ranges: Sequence[range]) -> tuple[Value, ...]:
    return tuple(chain.from_iterable(values[part.start : part.stop] for part in ranges))


def _with_framing(length: int, parts: Sequence[range], ranges: Sequence[range]) -> list[range]:
    """Return the positions that are `ranges` of the parts, with all tokens before, between and after the parts."""
    positions, end = [], 0
    for part, kept in sorted(zip(parts, ranges, strict=True), key=lambda pair: (pair[0].start, pair[0].stop)):
        positions += [range(end, part.start), kept]
        end = part.stop
    return [*positions, range(end, length)]


def _require_room(num_taken: int, room: int, limit: Limit, *, least: int) -> None:
    """Refuse to truncate a text if the other tokens leave fewer than `least` for it."""
    if room - num_taken < least:
        raise InputError(
            f"{limit.source} allows {limit.tokens} tokens, which leaves {max(room - num_taken, 0)} for the text next "
            f"to the other tokens: fewer than {least}",
            "shorten the query, let windows share fewer tokens, or export the model for longer texts",
        )


def _bounded_part(text: str, size: int, side: str) -> str:
    if len(text) <= size:
        return text
    if side == "left":
        end = text[-size:]
        return end[max(end.find(" "), 0) :]
    beginning = text[:size]
    return beginning[: beginning.rfind(" ")] if " " in beginning else beginning
