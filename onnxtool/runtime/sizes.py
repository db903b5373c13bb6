"""Sizes of the axes of a model's inputs, as `--sizes` states them, and the choice among the sizes of a set of files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from onnxtool.errors import InputError, OptionError
from onnxtool.model_file import ModelFile
from onnxtool.options import ManyTexts, Option
from onnxtool.reports import short_repr
from onnxtool.verification import Verification

FixedTo = Annotated[
    ManyTexts,
    Option(
        "Fix the axes of the inputs to batch x sequence, for hardware and compilers that need it. Several sizes give a "
        "file each beside the output, which finds them, all over one file of weights; a single one is the output. "
        "NAME=VALUE,... names the axes. May be given several times.",
        metavar="1x32,8x128",
    ),
]
_NUMBERS = re.compile(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", re.ASCII)
_NAMED = re.compile(r"[^=,]+=[1-9][0-9]{0,8}(,[^=,]+=[1-9][0-9]{0,8})*", re.ASCII)

Sizes = dict[str, int]  # by the name of a dynamic axis


@short_repr
class SizeResult(NamedTuple):
    """A file of fixed sizes.

    Attributes:
        sizes: by the name of the axis.
        num_nodes: of its graph.
        num_computing: the nodes that still compute sizes, because these depend on values, or lie in a branch.
        verification: the comparison with the file of any size; None if it was not compared.
        note: for the user, on what was compiled.
    """

    file: str
    sizes: Sizes
    num_nodes: int
    num_computing: int
    verification: Verification | None
    note: str = ""


def check_sizes(texts: Sequence[str] | str) -> None:
    """Refuse sizes that are malformed, or stated twice.

    Raises:
        OptionError: the one that is.
    """
    stated = [*split_sizes(texts)]
    for text in stated:
        if not (_NUMBERS.fullmatch(text) or _NAMED.fullmatch(text)):
            raise OptionError(f"{text!r} is not a size", "write --sizes 1x32,8x128, or NAME=VALUE,NAME=VALUE")
        names = [part.partition("=")[0] for part in text.split(",")]
        if stated.count(text) > 1 or ("=" in text and len({*names}) < len(names)):
            raise OptionError(f"--sizes {text} says something twice", "state each size, and each axis of one, once")
    files = set_files(Path("model.onnx"), texts)
    if len({*files}) < len(files):
        raise OptionError(f"two of the sizes {', '.join(stated)} would have one file", "make them in two runs")


def read_sizes(texts: Sequence[str] | str, model: ModelFile) -> dict[str, Sizes]:
    """Return each size that `--sizes` states, for the dynamic axes of a model, by the name that its file has.

    Raises:
        OptionError: a size names other axes than these, or has more tokens than the model has positions.
    """
    from onnxtool.checkpoint.limits import position_limits
    from onnxtool.runtime.signature import is_text, num_positions

    places = [axes for _, axes in input_axes(model)]
    axes = [*dict.fromkeys(axis for own in places for axis in own.values())]
    sizes_by_name: dict[str, Sizes] = {}
    for text in split_sizes(texts):
        sizes_by_name[_name(text)] = sizes = sizes_of(text, places)
        if not axes or sizes.keys() != {*axes}:
            example = ",".join(f"{axis}=1" for axis in axes)
            raise OptionError(
                f"--sizes {text} does not state the sizes of exactly the dynamic axes of {model.path}: "
                f"{', '.join(axes) or 'it has none'}",
                f"pass --sizes {example}" if axes else "leave --sizes out",
            )
    positions = [num_positions(model), *(limit.tokens for limit in position_limits(model))]
    lengths = {dict(input_axes(model))[info.name].get(1, "") for info in model.structure.inputs if is_text(info)}
    require_short(sizes_by_name, lengths, min((most for most in positions if most), default=None), str(model.path))
    return sizes_by_name


def sizes_of(text: str, places: Sequence[Mapping[int, str]]) -> Sizes:
    """Return a size by axis, for the axes of each input by position; empty for too many or too few numbers."""
    if "=" in text:
        return {name.strip(): int(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    numbers = [int(number) for number in text.split("x")]
    if all([*own] == [*range(len(numbers))] for own in places):  # axes without names, the same in all inputs
        return {axis: numbers[place] for own in places for place, axis in own.items()}
    axes = dict.fromkeys(axis for own in places for axis in own.values())
    return dict(zip(axes, numbers, strict=True)) if len(numbers) == len(axes) else {}


def require_short(sizes_by_name: Mapping[str, Sizes], axes: Collection[str], most: int | None, name: str) -> None:
    """Raise an OptionError for a size one of whose `axes` is longer than a model takes."""
    for text, sizes in sizes_by_name.items():
        if most is not None and max((sizes.get(axis, 0) for axis in axes), default=0) > most:
            raise OptionError(f"--sizes {text} is too long: {name} takes at most {most} tokens", "pass a shorter one")


def set_files(output: Path, texts: Sequence[str] | str) -> list[Path]:
    """Return the files of fixed sizes next to an output; empty for a single size, which is the output itself."""
    names = [*map(_name, split_sizes(texts))]
    return [sized_path(output, name) for name in names] if len(names) > 1 else []


def sized_path(output: Path, name: str) -> Path:
    """Return the path of a file of fixed sizes called e.g. `8x128`."""
    return output.with_name(f"{output.stem}-{name}.onnx")


def _name(text: str) -> str:
    return "x".join(part.rpartition("=")[2] for part in text.split(","))


def label(sizes: Mapping[str, int]) -> str:
    """Return sizes as a text, e.g. `8x128`."""
    return "x".join(map(str, sizes.values()))


def input_axes(model: ModelFile) -> Iterator[tuple[str, dict[int, str]]]:
    """Yield each input of a model with its dynamic axes, by position; one without a name is `NAME[POSITION]`."""
    for info in model.structure.inputs:
        yield (
            info.name,
            {
                place: size or f"{info.name}[{place}]"
                for place, size in enumerate(info.shape)
                if not isinstance(size, int)
            },
        )


def rows_axis(model: ModelFile) -> str:
    """Return the axis that is the first one of all inputs and outputs, and no other one; empty if there is none."""
    firsts: set[object] = {axes.get(0) for _, axes in input_axes(model)}
    outputs = [info.shape for info in model.structure.outputs]
    first, *more = firsts | {(*shape, None)[0] for shape in outputs}
    is_last = any(first in shape[1:] for shape in outputs)  # as of scores between all rows
    return first if isinstance(first, str) and not (more or is_last) else ""


def best_batches(lengths: Sequence[int], sizes: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield the indices of rows for each batch, shortest first, such that all batches together have the least padding.

    Args:
        lengths: the length of each row.
        sizes: the rows and the length of each possible batch.

    Raises:
        InputError: a row is longer than all of them.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    # The cost of the first rows, in elements and batches, and the start of their last batch.
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    for end, row in enumerate(order, 1):
        starts = ((max(0, end - rows), rows * length) for rows, length in sizes if length >= lengths[row])
        choices = [(best[start][0] + cost, best[start][1] + 1, start) for start, cost in starts]
        if not choices:
            raise InputError(
                f"a text has {lengths[row]} tokens, and the largest size has {max(length for _, length in sizes)}",
                "cut it, or make the files with a larger --sizes",
            )
        best.append(min(choices))
    ends, end = [], len(order)
    while end:
        ends.append((best[end][2], end))
        end = best[end][2]
    yield from (order[start:end] for start, end in reversed(ends))


def split_sizes(texts: Sequence[str] | str) -> Iterator[str]:
    """Yield each size that `--sizes` states."""
    for text in (texts,) if isinstance(texts, str) else texts:
        yield from [text.strip()] if "=" in text else (part.strip() for part in text.split(","))
