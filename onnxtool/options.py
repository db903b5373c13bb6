"""An option of a command is a field of the options of its library call, which carries its help text.

`threads: Annotated[int, Option("Intra-op threads.", minimum=0)] = 0` is `--threads` of every command that makes the
call; `onnxtool.cli.options` reads the fields. Several options classes share an option by sharing the annotated type.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple


class Option(NamedTuple):
    """What the command line says of a field; its type and its default are the field's.

    Attributes:
        help: what the option does.
        name: the option's name without dashes, where it is not the field's.
        choices: all values that it takes.
        metavar: what stands for the value in the help.
        minimum: the least value; with `is_open`, what the value must be above.
        maximum: the largest value.
        default: what happens without the option, where the field's default does not say so itself.
        is_checkpoint: whether it names a checkpoint, which shells complete.
        is_location: whether a path may also be the address of an object store.
    """

    help: str
    name: str = ""
    choices: Sequence[str] = ()
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    is_open: bool = False
    default: str = ""
    is_checkpoint: bool = False
    is_location: bool = False


Force = Annotated[bool, Option("Replace an output that exists.")]
