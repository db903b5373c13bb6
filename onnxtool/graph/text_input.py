"""Put a tokenizer in front of a graph that reads ids, so that it reads texts; and take it off again.

The graph itself stays as it is: its inputs become values that operators of onnxruntime-extensions compute.

Shape letters: N texts, S sequence, T tokens of all texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxtool.errors import ModelFileError, first_line
from onnxtool.graph.tokenizers import SCOPE, GraphTokenizer, StringGraph, Tokens
from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import STRINGS

LOWEST_OPSET = 16  # of ScatterElements that adds
_OPSETS = {STRINGS: 1, "ai.onnx.ml": 3}
_IR_VERSION, _OPSET = 10, 18
IDS, MASK, TYPES, POSITIONS, POOLED = "input_ids", "attention_mask", "token_type_ids", "position_ids", "pooling_mask"
COUNT = f"{SCOPE}/count"
NAMES = ("text", "text_pair")  # of inputs for texts, string [N] each
GIVEN = (IDS, MASK, TYPES, POSITIONS, POOLED)  # the inputs that a tokenizer gives


@dataclass(frozen=True)
class Segment:
    """A part of a tokenized text: a text, or tokens that frame it.

    Attributes:
        text: 0 or 1 for the first or second text; None for `ids`.
        segment_id: of its tokens.
    """

    text: int | None
    ids: tuple[int, ...] = ()
    segment_id: int = 0


@dataclass(frozen=True)
class Frame:
    """The form of a row of ids, of a text or of a pair of texts.

    Attributes:
        segments: the parts of a row, in order.
        most_tokens: S is at most this; longer texts are cut, the longer one of a pair first.
        cuts_left: whether the beginning of a text is cut.
        pads_left: whether padding precedes a text.
        prompt: a text before each text, or before the first of a pair.
        num_prompt: the number of tokens at the start of a row that are not pooled.
    """

    segments: tuple[Segment, ...]
    most_tokens: int
    pad_id: int
    pad_segment_id: int = 0
    cuts_left: bool = False
    pads_left: bool = False
    prompt: str = ""
    num_prompt: int = 0

    @property
    def num_texts(self) -> int:
        """1, or 2 for pairs."""
        return sum(segment.text is not None for segment in self.segments)

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs of a graph that makes such rows."""
        return NAMES[: self.num_texts]

    @property
    def num_framing(self) -> int:
        """The number of tokens in a row that are of no text."""
        return sum(len(segment.ids) for segment in self.segments)


def build_front(tokenizer: GraphTokenizer, frame: Frame, dtypes: Mapping[str, ir.DataType], opset: int) -> ir.Model:
    """Return a model that reads texts and gives the inputs of a graph.

    Args:
        tokenizer: reads texts.
        frame: makes rows of their ids.
        dtypes: the outputs, among GIVEN, with their dtypes; integer [N, S] each.
        opset: the graph's.
    """
    texts = [ir.val(name, dtype=ir.DataType.STRING, shape=["batch_size"]) for name in frame.names]
    graph = ir.Graph(texts, [], nodes=[], opset_imports={"": opset, **_OPSETS}, name=SCOPE)
    write = StringGraph(graph)
    arrays = _rows(write, tokenizer, frame, texts)
    for name, dtype in dtypes.items():
        output = write.op("Cast", arrays[name], to=dtype.value)
        output.name, output.dtype, output.shape = name, dtype, ir.Shape(["batch_size", "sequence_length"])
        graph.outputs.append(output)
    arrays[COUNT].name = COUNT
    graph.outputs.append(arrays[COUNT])
    front = ir.Model(graph, ir_version=_IR_VERSION)
    common.RemoveUnusedNodesPass()(front)
    return front


def id_model(tokenizer: GraphTokenizer, frame: Frame) -> bytes:
    """Return a serialized model that reads texts and gives their ids, mask and types, int64 [N, S] each."""
    front = build_front(tokenizer, frame, dict.fromkeys((IDS, MASK, TYPES), ir.DataType.INT64), _OPSET)
    return serialized(front)


def serialized(front: ir.Model) -> bytes:
    """Return a small model as bytes."""
    content: bytes = ir.to_proto(front).SerializeToString()
    return content


def put_before(core: ir.Model, front: ir.Model) -> None:
    """Let a graph read texts, in place; `front` is used up."""
    graph, before = core.graph, front.graph
    outputs = {value.name: value for value in before.outputs}
    for value in list(graph.inputs):
        source = outputs[value.name]
        value.name = f"{SCOPE}/{value.name}"  # two values of one name, until the input is gone
        source.type, source.shape = value.type, value.shape
        ir.convenience.replace_all_uses_with(value, source)
    texts, nodes, count = list(before.inputs), list(before), outputs[COUNT]
    before.inputs.clear()
    before.outputs.clear()
    before.remove(nodes)
    graph.inputs[:] = texts
    graph.insert_before(graph[0], nodes)
    write = Writer(graph)
    zero = write.initializer(ir.tensor(np.array([0])), f"{COUNT}/zero")
    for place, value in enumerate(list(graph.outputs)):
        name, value.name = value.name, f"{COUNT}/{value.name}"
        cut = write.op("Slice", value, zero, count)
        cut.name, cut.type, cut.shape = name, value.type, value.shape
        graph.outputs[place] = cut
    for name in list(before.initializers):
        graph.initializers[name] = before.initializers.pop(name)
    for domain, version in before.opset_imports.items():
        graph.opset_imports.setdefault(domain, version)


def take_off(model: ir.Model, former: Sequence[str]) -> tuple[ir.Model, ir.Model]:
    """Return the graph that reads ids, and the one before it, of a graph that `put_before` made.

    Args:
        model: the graph.
        former: the inputs that it had.

    Raises:
        ModelFileError: it was changed since, so that it does not consist of these.
    """
    names = [str(output.name) for output in model.graph.outputs]
    try:
        front = ir.convenience.extract(model.graph, model.graph.inputs, [*former, COUNT])
        core = ir.convenience.extract(model.graph, former, [f"{COUNT}/{name}" for name in names])
    except ValueError as error:
        raise ModelFileError(
            f"the graph does not show where its tokenizer ends: {first_line(error)}",
            "pass the file that onnxtool export or optimize wrote",
        ) from error
    for output, name in zip(core.outputs, names, strict=True):
        output.name = name
    core.opset_imports.pop(STRINGS, None)
    reads_ids = ir.Model(
        core,
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        functions=tuple(model.functions.values()),
        metadata_props=dict(model.metadata_props),
    )
    return reads_ids, ir.Model(front, ir_version=_IR_VERSION)


def _rows(
    write: StringGraph, tokenizer: GraphTokenizer, frame: Frame, texts: Sequence[ir.Value]
) -> Mapping[str, ir.Value]:
    """Write ids, their mask and so on, by name: int64 [N, S] each, and N; one row if there are no texts."""
    prompted = list(texts)
    if frame.prompt:
        prompted[0] = write.replace(prompted[0], "(?s)^(.*)$", frame.prompt.replace("\\", "\\\\") + r"\1")
    # One more text, because operators on strings refuse none, and many graphs refuse a batch of none.
    rows = write.op("Concat", *(part for text in prompted for part in (text, write.string(""))), axis=0)
    tokens = tokenizer.tokenize(write, rows)
    count = write.op("Shape", texts[0])
    num_rows, tokenized, begin = write.op("Max", count, write.array([1])), [], write.array([0])
    for _ in texts:
        end = write.op("Add", begin, num_rows)
        part = (write.op("Slice", value, begin, end) for value in (tokens.begins, tokens.lengths))
        tokenized.append(Tokens(tokens.flat, *part))
        begin = write.op("Add", begin, write.op("Add", count, write.array([1])))
    kept = _kept(write, frame, [part.lengths for part in tokenized])
    total = write.array(frame.num_framing)
    for length in kept:
        total = write.op("Add", total, length)
    longest = write.op("ReduceMax", write.op("Concat", total, write.array([frame.num_framing]), axis=0), keepdims=0)
    place = write.op("Range", write.array(0), longest, write.array(1))
    total = write.op("Unsqueeze", total, write.array([1]))
    if frame.pads_left:
        place = write.op("Sub", place, write.op("Sub", longest, total))
    framing = [token_id for segment in frame.segments for token_id in segment.ids]
    flat = write.op("Concat", tokens.flat, write.array([*framing, frame.pad_id]), axis=0)
    own = write.op("Size", tokens.flat)
    padding = write.op("Add", own, write.array(len(framing)))
    source, segments = padding, write.array(frame.pad_segment_id)
    start: ir.Value | None = None
    used = 0
    for segment in frame.segments:
        if segment.text is None:
            first = write.op("Add", own, write.array(used))
            size = write.array(len(segment.ids))
            used += len(segment.ids)
        else:
            first, length = tokenized[segment.text].begins, kept[segment.text]
            if frame.cuts_left:
                first = write.op("Add", first, write.op("Sub", tokenized[segment.text].lengths, length))
            first, size = (write.op("Unsqueeze", value, write.array([1])) for value in (first, length))
        begin = write.array(0) if start is None else start
        inside = write.op("GreaterOrEqual", place, begin)
        source = write.op("Where", inside, write.op("Add", first, write.op("Sub", place, begin)), source)
        segments = write.op("Where", inside, write.array(segment.segment_id), segments)
        start = size if start is None else write.op("Add", start, size)
    attended = write.op("And", write.op("GreaterOrEqual", place, write.array(0)), write.op("Less", place, total))
    ids = write.op("Gather", flat, write.op("Where", attended, source, padding))
    mask = write.op("Cast", attended, to=ir.DataType.INT64.value)
    nowhere = write.array(frame.pad_segment_id)
    outputs = {IDS: ids, MASK: mask, TYPES: write.op("Where", attended, segments, nowhere)}
    pooled = write.op("And", attended, write.op("GreaterOrEqual", place, write.array(frame.num_prompt)))
    outputs[POOLED] = write.op("Cast", pooled, to=ir.DataType.INT64.value)
    counted = write.op("Sub", write.op("CumSum", mask, write.array(1)), write.array(1))
    return {**outputs, POSITIONS: write.op("Max", counted, write.array(0)), COUNT: count}


def _kept(write: StringGraph, frame: Frame, lengths: Sequence[ir.Value]) -> list[ir.Value]:
    """Return the number of tokens of each text that fit into a row: int64 [N] each."""
    room = frame.most_tokens - frame.num_framing
    if len(lengths) == 1:
        return [write.op("Min", lengths[0], write.array(room))]
    first, second = lengths
    shorter = write.op("Min", first, second, write.array(room // 2))
    longer = write.op("Sub", write.array(room), shorter)
    fits = write.op("LessOrEqual", write.op("Add", first, second), write.array(room))
    is_first = write.op("LessOrEqual", first, second)
    return [
        write.op("Where", fits, length, write.op("Where", is_first, *cut))
        for length, cut in ((first, (shorter, longer)), (second, (longer, shorter)))
    ]
