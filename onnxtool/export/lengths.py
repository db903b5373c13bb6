"""Text lengths that a file is verified on: its maximum, and both sides of every threshold below it.

From some length on, a model may compute differently: block-sparse attention, windows, chunks, another scale of its
rotary positions. A trace contains one of the two, or a comparison that may be off by one. Thresholds are read from
configuration names and from comparisons in the graph; anything else shows up at the maximum.

Shape letters: S sequence.
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
from onnxtool.graph.shapes import find_turns
from onnxtool.runtime.input_cases import LONGEST_CASE
from onnxtool.runtime.machine import available_memory_bytes

# Operations for a run at the maximum, and for runs at all thresholds together. The budget is in work, not in seconds,
# so that an export gives the same file on every machine. On two cores, PyTorch takes about 7 s per teraflop and the
# file 14 s; a base model with 8192 tokens (ModernBERT, nomic-embed, gte) needs 4 to 6 teraflop.
WORK = 12e12
# The maximum for models that state none, in verification and use: transformers, and tables without a layer.
_UNLIMITED, _UNLIMITED_TABLE = 4096, 1 << 16
_STEP = 1024  # for a maximum limited by the budget
_SHORTEST = 16  # smaller numbers are not lengths, and the usual cases are on both sides of them
# How many tensors the size of all attention scores are in memory at once, and how many the size of all outputs.
_COPIES = 5
_MEMORY_SHARE = 0.7

_SIZES = (
    ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    ("num_attention_heads", "num_heads", "n_heads", "n_head"),
    ("hidden_size", "d_model", "n_embd"),
    ("vocab_size",),
)
_NAMES = re.compile(r"window|block|chunk|local|radius|position_embeddings|seq_len|distance|landmark|buckets")


@dataclass(frozen=True)
class Work:
    """The cost of running a model.

    Attributes:
        parameters: the number of weights that each token is multiplied by.
        layers: the number of attention layers.
        width: the query width, all heads together.
        heads: the number of attention heads.
        outputs: the number of outputs per token.
    """

    parameters: int
    layers: int
    width: int
    heads: int
    outputs: int

    @classmethod
    def of(cls, model: Any) -> Work:
        """Count a model's weights, and read its sizes; unnamed layers or heads count as zero."""
        import torch

        tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
        # An output layer tied to the embedding is also multiplied by.
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
        """Return the additions and multiplications for a text with `length` tokens."""
        return 2.0 * length * (self.parameters + 2 * self.layers * self.width * length)

    def memory_bytes(self, length: int) -> int:
        """Return the approximate memory of a run in addition to weights: one layer's scores, and the outputs."""
        return 4 * _COPIES * length * (self.heads * length + self.outputs)


@dataclass(frozen=True)
class Lengths:
    """The text lengths that a file supports and is verified on.

    Attributes:
        stated: the maximum number of tokens by configuration and tokenizer; None for no limit.
        longest: the maximum number of tokens the file supports; None for no limit, or if it takes no text.
        work: the cost of a run; None if the file is not verified, or its texts have a single length.
        thresholds: lengths from which the model may compute differently.
        reason: why `longest` differs from `stated`; empty if it does not.
        rescaled: a note on a rotary embedding that the file computes for short texts only; empty for others.
    """

    stated: int | None
    longest: int | None
    work: Work | None = None
    thresholds: tuple[int, ...] = ()
    reason: str = ""
    rescaled: str = ""

    @classmethod
    def of(cls, model: Any, stated: int | None, *, requested: int | None, verified: bool) -> Lengths:
        """Choose the text lengths that a file supports: as many tokens as the model accepts and the budget allows.

        Args:
            model: a transformers model for text.
            stated: the maximum number of tokens by configuration and tokenizer.
            requested: the length requested by the user, at any cost.
            verified: whether the file will be verified; otherwise no budget applies.

        Raises:
            ExportError: the model does not accept as many tokens as requested.
        """
        if requested is not None and stated is not None and requested > stated:
            raise ExportError(
                f"--max_length {requested} was passed, but {type(model).__name__} takes {stated} tokens by its "
                "configuration and tokenizer",
                "leave it out, or pass fewer",
            )
        kind, most = rescaling(model)
        rescaled = (
            f"right up to {most} tokens only: for longer texts, transformers rescales the rotary embedding by the "
        )
        rescaled = f"{rescaled}length of each (rope_type {kind}), and this file does not" if kind == "dynamic" else ""
        if not verified:
            return cls(
                stated, requested or stated, reason="as --max_length says" if requested else "", rescaled=rescaled
            )
        work = Work.of(model)
        longest, reason = requested or stated or (_UNLIMITED if work.layers else _UNLIMITED_TABLE), ""
        if requested is not None:
            reason = "as --max_length says" if requested != stated else ""
        else:
            longest, reason = _affordable(work, longest)
            if not reason and stated is None:
                reason = "no file of the checkpoint states a maximum; --max_length asks for another one"
        thresholds = sorted(set(config_thresholds(text_config(model).to_dict())))
        return cls(stated, longest, work, tuple(thresholds), reason, rescaled)

    def seen_in(self, graph: ir.Model) -> Lengths:
        """Return these lengths with a graph's thresholds added."""
        if self.work is None:
            return self
        sizes = set().union(*find_turns(graph).values())
        return replace(self, thresholds=(*self.thresholds, *sorted(size for size in sizes if size > _SHORTEST)))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about the maximum."""
        notes = [self.rescaled] if self.rescaled else []
        if self.reason:
            stated = "" if self.stated is None else f", of the {self.stated} that the checkpoint states"
            notes.append(f"for texts of up to {self.longest} tokens{stated}: {self.reason}")
        compared = self.beyond(0)
        left_out = sorted({size for size in self.thresholds if size < (self.longest or 0) and size not in compared})
        if left_out and compared:
            notes.append(
                f"not compared on both sides of {', '.join(map(str, left_out))} tokens, where the model may begin to "
                "compute otherwise: these texts are beyond the budget"
            )
        return tuple(notes)

    def beyond(self, covered: int, *, steps: int = 0) -> tuple[int, ...]:
        """Return the lengths to verify in addition to the usual cases, longest first.

        If the budget does not allow all, the maximum comes before thresholds, and low thresholds before high ones.

        Args:
            covered: the maximum number of tokens in the usual cases.
            steps: the tokens that a generation adds to its prompt; it should cross a threshold, and also start beyond
                it.
        """
        if self.work is None or self.longest is None:
            return ()
        lengths = {self.longest} if self.longest > covered else set()
        budget = WORK
        for threshold in sorted(set(self.thresholds)):
            for length in (threshold + (steps + 1) // 2, threshold + 1 + steps):
                if _SHORTEST < length < self.longest and length not in lengths:
                    budget -= self.work.operations(length)
                    lengths |= {length} if budget >= 0 else set()
        return tuple(sorted(lengths, reverse=True))


def rescaling(model: Any) -> tuple[str, int]:
    """Return the rope_type of a rotary embedding that depends on the text's length, and up to where it does not.

    Empty for others. These are the two kinds that transformers' `dynamic_rope_update` updates in each run; `longrope`
    has two scales, and follows neither up to a length.
    """
    for module in model.modules():
        stated = getattr(module, "rope_type", "")
        kinds = [str(kind) for kind in (stated.values() if isinstance(stated, dict) else (stated,))]
        if any("dynamic" in kind for kind in kinds):
            return "dynamic", int(getattr(module, "original_max_seq_len", 0))
        if "longrope" in kinds:
            return "longrope", 0
    return "", 0


def config_thresholds(content: Any) -> Iterator[int]:
    """Yield configuration numbers, at any depth, whose names mention windows, blocks, chunks or positions."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from config_thresholds(value)
        elif _NAMES.search(str(name)):
            numbers = value if isinstance(value, list | tuple) else (value,)
            yield from (number for number in numbers if isinstance(number, int) and number > _SHORTEST)
    blocks, random = content.get("block_size"), content.get("num_random_blocks")
    if isinstance(blocks, int) and isinstance(random, int):
        yield (5 + 2 * random) * blocks  # BigBird attends fully up to here


def _affordable(work: Work, longest: int) -> tuple[int, str]:
    """Return how many of `longest` tokens the budget and memory allow, and why not more."""
    memory = available_memory_bytes()
    for length in (longest, *range((longest - 1) // _STEP * _STEP, LONGEST_CASE, -_STEP)):
        fits = memory is None or work.memory_bytes(length) <= memory * _MEMORY_SHARE
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
    """Return the first of these numbers that a configuration has; 0 if there is none."""
    for name in names:
        with contextlib.suppress(RuntimeError):  # from transformers, for a number that differs between layers
            if isinstance(value := getattr(config, name, None), int):
                return value
    return 0
