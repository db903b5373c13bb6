"""Options of `stats`."""

from typing import Annotated

from onnxtool.options import NOTHING, Many, Option, Options


class Shape(Options):
    """The size of the axes of a batch; an axis that the file fixes keeps its own size."""

    batch_size: Annotated[int, Option(minimum=1)] = 1
    sequence_length: Annotated[int, Option(minimum=1)] = 128


class Settings(Options):
    """The input shape for the cost, and the gates to check.

    Attributes:
        fail_if: gates. Relative gates from a configuration file are only checked if there is a base.
    """

    fail_if: Annotated[
        Many[str],
        Option(
            "Exit with 1 if this holds: a figure of the JSON report, one of > >= < <= == !=, and a number; with a "
            "sign, and optionally %, the number is relative to BASE. E.g. 'num_nodes>500', 'ops.MatMul!=98', "
            "'size_bytes>+5%', 'count(delta.inputs.removed)>0'. Texts are compared with == and !=: "
            "'license!=apache-2.0'. May be given several times.",
            metavar="EXPR",
        ),
    ] = NOTHING
    allowed_licenses: Annotated[
        Many[str],
        Option(
            "Exit with 1 unless the license of MODEL is one of these: an SPDX id, or the name of another license. An "
            "unknown license never matches. May be given several times.",
            metavar="ID",
        ),
    ] = NOTHING
    batch_size: Annotated[
        int | None, Option("Report the cost of a run with this batch size: MACs and activations.", minimum=1)
    ] = None
    sequence_length: Annotated[
        int | None, Option("Sequence length for the cost of a run.", minimum=1, default="128 with --batch_size")
    ] = None
    weights: Annotated[
        bool, Option("Compare the weights with BASE by their data, not only dtype and shape; reads both files.")
    ] = True
