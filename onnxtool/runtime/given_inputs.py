"""User-provided samples and shapes of a file's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from onnxtool.errors import OptionError
from onnxtool.options import ManyPaths, ManyTexts, Option

SampleInputs = Annotated[
    ManyPaths,
    Option(
        "Run the model on the arrays in this file, named after the inputs, instead of generated ones. May be given "
        "several times.",
        metavar="FILE.npz",
        effect="check",
    ),
]
InputShapes = Annotated[
    ManyTexts,
    Option(
        "Generate this input with this shape, if the graph does not determine it. May be given several times.",
        name="input_shape",
        metavar="NAME:1,128",
        effect="check",
    ),
]


@dataclass(frozen=True)
class GivenInputs:
    """Samples of inputs, and shapes of generated ones.

    Attributes:
        samples: .npz files, each with all inputs of one run.
        shapes: sizes by input name.
    """

    samples: tuple[Path, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: Sequence[Path] | Path, shapes: Sequence[str] | str) -> GivenInputs:
        """Parse the options, with shapes as `NAME:1,128`.

        Raises:
            OptionError: a shape is malformed, an input has two, or there are both samples and shapes.
        """
        samples, shapes = (
            (samples,) if isinstance(samples, Path) else tuple(samples),
            (shapes,) if isinstance(shapes, str) else shapes,
        )
        parsed: dict[str, tuple[int, ...]] = {}
        for text in shapes:
            name, separator, sizes = text.rpartition(":")
            parts = [part.strip() for part in sizes.split(",")] if sizes.strip() else []
            if not separator or not name or not all(part.isdecimal() and len(part) < 10 for part in parts):
                raise OptionError(f"{text!r} is not the shape of an input", "write it as NAME:1,128; NAME: is a scalar")
            if name in parsed:
                raise OptionError(f"the input {name} has two shapes", "pass one --input_shape for each input")
            parsed[name] = tuple(map(int, parts))
        if samples and parsed:
            raise OptionError("samples have shapes of their own", "leave --input_shape or --sample_inputs out")
        return cls(samples, parsed)


NO_INPUTS = GivenInputs()
