"""The lengths of texts that a file is verified on: its maximum, and both sides of every threshold on the way there.

A model may compute otherwise from some length on: block-sparse attention, windows, chunks, another scale of its rotary
positions. A trace holds one of the two, or a comparison that may be one off. Thresholds are read from the names of a
configuration and from what a graph compares sizes with; what neither shows differs at the maximum.

Letters of shapes: S sequence.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from onnxtool.errors import ExportError
from onnxtool.export.modalities.text import text_config
from onnxtool.graph.edit import constant
from onnxtool.runtime.feeds import LONGEST_CASE
from onnxtool.runtime.timing import available_memory_bytes

# Operations of a run at the maximum, and of those at all thresholds together. A budget of work and not of seconds,
# so that an export gives the same file on every machine. With two cores a teraflop takes PyTorch about 7 s and the file
# 14 s; a base model of 8192 tokens (ModernBERT, nomic-embed, gte) takes 4 to 6.
WORK = 12e12
# What models without a maximum are verified up to, and their files are for: transformers, and tables without a layer.
_UNLIMITED, _UNLIMITED_TABLE = 4096, 1 << 16
_STEP = 1024  # of a maximum that is within the budget
_SHORTEST = 16  # smaller numbers are no lengths, and the usual cases lie on both sides of them
# How many tensors of the size of all scores of an attention are in memory at once, and how many of all outputs.
_COPIES = 5
_SHARE_OF_MEMORY = 0.7

_SIZES = (
    ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    ("num_attention_heads", "num_heads", "n_heads", "n_head"),
    ("hidden_size", "d_model", "n_embd"),
    ("vocab_size",),
)
_NAMES = re.compile(r"window|block|chunk|local|radius|position_embeddings|seq_len|distance|landmark|buckets")
_COMPARISONS = frozenset(
    ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Min", "Max", "Mod", "Clip", "Div")
)
# What makes a size, or positions up to it, out of another one.
_ARITHMETIC = frozenset(
    (
        *("Gather", "Slice", "Squeeze", "Unsqueeze", "Cast", "Identity", "Concat", "Reshape", "Expand", "Range"),
        *("Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Floor", "Ceil", "Transpose", "Min", "Max"),
    )
)


@dataclass(frozen=True)
class Work:
    """What a run of a model takes.

    Attributes:
        parameters: the numbers that each token is multiplied with.
        layers: of attention.
        width: of queries, all heads together.
        heads: of an attention.
        outputs: the numbers of a token's output.
    """

    parameters: int
    layers: int
    width: int
    heads: int
    outputs: int

    @classmethod
    def of(cls, model: Any) -> Work:
        """Count the weights of a model, and read its sizes; one that names no layers or heads has none."""
        import torch

        tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
        # An output layer that is tied to the embedding is multiplied with as well.
        parameters = sum(
            weight.numel()
            for module in model.modules()
            if module not in tables
            for weight in module.parameters(recurse=False)
        )
        config = text_config(model)
        layers, heads, width, words = (_first_number(config, names) for names in _SIZES)
        has_logits = getattr(model, "get_output_embeddings", lambda: None)() is not None
        return cls(parameters, layers, width, heads, words if has_logits else width)

    def operations(self, length: int) -> float:
        """Return the additions and multiplications for a text of `length` tokens."""
        return 2.0 * length * (self.parameters + 2 * self.layers * self.width * length)

    def memory_bytes(self, length: int) -> int:
        """Return about what a run takes beside the weights: the scores of a layer, and the outputs."""
        return 4 * _COPIES * length * (self.heads * length + self.outputs)


@dataclass(frozen=True)
class Lengths:
    """How long texts are that a file is for and verified on.

    Attributes:
        stated: the most tokens by configuration and tokenizer; None for no limit.
        longest: the most tokens that the file is for; None for no limit, or where it takes no texts.
        work: what a run takes; None for a file that is not verified, or whose texts are of one length.
        thresholds: lengths from which on the model may compute otherwise.
        why: why `longest` is not `stated`; empty where it is.
    """

    stated: int | None
    longest: int | None
    work: Work | None = None
    thresholds: tuple[int, ...] = ()
    why: str = ""

    @classmethod
    def of(cls, model: Any, stated: int | None, *, asked: int | None, verified: bool) -> Lengths:
        """Choose how long texts are that a file is for: as many tokens as the model takes and the budget allows.

        Args:
            model: a transformers model of texts.
            stated: the most tokens by configuration and tokenizer.
            asked: what a user wants it to be for, whatever that takes.
            verified: whether the file will be verified; else nothing is spent.

        Raises:
            ExportError: the model does not take as many tokens as were asked for.
        """
        if asked is not None and stated is not None and asked > stated:
            raise ExportError(
                f"--max_length {asked} was passed, and {type(model).__name__} takes {stated} tokens by its "
                "configuration and tokenizer",
                "leave it out, or pass fewer",
            )
        if not verified:
            return cls(stated, asked or stated, why="as --max_length says" if asked else "")
        work = Work.of(model)
        longest, why = asked or stated or (_UNLIMITED if work.layers else _UNLIMITED_TABLE), ""
        if asked is not None:
            why = "as --max_length says" if asked != stated else ""
        else:
            longest, why = _affordable(work, longest)
            if not why and stated is None:
                why = "no file of the checkpoint states a maximum; --max_length asks for another one"
        thresholds = sorted(set(config_thresholds(text_config(model).to_dict())))
        return cls(stated, longest, work, tuple(thresholds), why)

    def up_to(self, longest: int, why: str) -> Lengths:
        """Return those of a file that is for shorter texts."""
        return replace(self, longest=longest, why=why)

    @classmethod
    def fixed(cls, length: int | None) -> Lengths:
        """Return those of a file whose texts have one length; None where it takes none."""
        return cls(length, length)

    def seen_in(self, graph: ir.Model) -> Lengths:
        """Return these with the thresholds of a graph."""
        return self if self.work is None else replace(self, thresholds=(*self.thresholds, *size_thresholds(graph)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the maximum."""
        notes = []
        if self.why:
            stated = "" if self.stated is None else f", of the {self.stated} that the checkpoint states"
            notes.append(f"for texts of up to {self.longest} tokens{stated}: {self.why}")
        compared = self.beyond(0)
        left_out = sorted({size for size in self.thresholds if size < (self.longest or 0) and size not in compared})
        if left_out and compared:
            notes.append(
                f"not compared on both sides of {', '.join(map(str, left_out))} tokens, where the model may begin to "
                "compute otherwise: these texts are beyond the budget"
            )
        return tuple(notes)

    def beyond(self, covered: int, *, steps: int = 0) -> tuple[int, ...]:
        """Return the lengths to verify beside the usual cases, the longest first.

        The maximum comes before thresholds where the budget does not allow all, and low ones before higher ones.

        Args:
            covered: the most tokens of the usual cases.
            steps: the tokens that a generation adds to its prompt; it is to cross a threshold, and to begin behind it.
        """
        if self.work is None or self.longest is None:
            return ()
        lengths = {self.longest} if self.longest > covered else set()
        left = WORK
        for threshold in sorted(set(self.thresholds)):
            for length in (threshold + (steps + 1) // 2, threshold + 1 + steps):
                if _SHORTEST < length < self.longest and length not in lengths:
                    left -= self.work.operations(length)
                    lengths |= {length} if left >= 0 else set()
        return tuple(sorted(lengths, reverse=True))


def config_thresholds(content: Any) -> Iterator[int]:
    """Yield the numbers of a configuration, of any depth, whose names speak of windows, blocks, chunks or positions."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from config_thresholds(value)
        elif _NAMES.search(str(name)):
            numbers = value if isinstance(value, list | tuple) else (value,)
            yield from (number for number in numbers if isinstance(number, int) and number > _SHORTEST)
    blocks, random = content.get("block_size"), content.get("num_random_blocks")
    if isinstance(blocks, int) and isinstance(random, int):
        yield (5 + 2 * random) * blocks  # BigBird attends fully up to here


def size_thresholds(model: ir.Model) -> set[int]:
    """Return the numbers that a graph compares sizes of its inputs with, or positions up to these."""
    sizes: set[ir.Value] = set()
    found: set[int] = set()
    for node in model.graph.all_nodes():
        given = [value for value in node.inputs if value is not None]
        is_size = node.op_type in ("Shape", "Size") or (
            node.op_type in _ARITHMETIC and any(value in sizes for value in given)
        )
        if node.op_type in _COMPARISONS and any(value in sizes for value in given):
            found.update(number for value in given for number in _integers(value))
        if is_size:
            sizes.update(node.outputs)
    return {number for number in found if number > _SHORTEST}


def _integers(value: ir.Value) -> Iterable[int]:
    """Return the absolute number in a constant of one whole number, and nothing of any other value."""
    array = constant(value)
    if array is None or array.size != 1 or array.dtype.kind not in "iuf":
        return ()
    number = abs(float(array.reshape(-1)[0]))
    return (int(number),) if number.is_integer() and number < 1 << 31 else ()


def _affordable(work: Work, longest: int) -> tuple[int, str]:
    """Return how many of `longest` tokens are within the budget and the memory, and why not more."""
    memory = available_memory_bytes()
    for length in (longest, *range((longest - 1) // _STEP * _STEP, LONGEST_CASE, -_STEP)):
        fits = memory is None or work.memory_bytes(length) <= memory * _SHARE_OF_MEMORY
        if fits and work.operations(length) <= WORK:
            break
    else:
        length = min(longest, LONGEST_CASE)
    if length == longest:
        return longest, ""
    takes = work.operations(longest)
    reason = (
        f"a run of {longest} takes {takes / 1e12:.0f} teraflop, and the budget of a verification is {WORK / 1e12:.0f}"
        if takes > WORK
        else f"a run of {longest} takes about {work.memory_bytes(longest) >> 30} GiB, more than there is"
    )
    return length, f"{reason}; --max_length asks for more"


def _first_number(config: Any, names: Iterable[str]) -> int:
    """Return the first of these figures that a configuration has; 0 without any."""
    for name in names:
        with contextlib.suppress(RuntimeError):  # of transformers, for a figure that its layers do not share
            if isinstance(value := getattr(config, name, None), int):
                return value
    return 0
