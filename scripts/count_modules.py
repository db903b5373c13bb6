"""Count the modules of onnxtool that one real run of a command walks through.

Run `python scripts/count_modules.py export --model_name DIR --output FILE`, with the arguments of any command. A module
counts when one of its functions is called while the command runs; that it is imported, or that an import reads a table
of it, is not enough. Prints the modules with the number of their functions that were called, the modules of each
package, and the total on the last line.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType


def walked_modules(arguments: list[str]) -> dict[str, set[str]]:
    """Run a command in this process and return the qualified names of the functions that were called, by module.

    Args:
        arguments: the command line after `onnxtool`.
    """
    import onnxtool
    from onnxtool.cli import run_arguments

    root = Path(onnxtool.__file__).parent
    for found in pkgutil.walk_packages([str(root)], "onnxtool."):  # now: what an import calls is no step of the walk
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    functions: dict[str, set[str]] = defaultdict(set)

    def record(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{root}/"):
            functions[frame.f_globals["__name__"]].add(code.co_qualname)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        if code := run_arguments(arguments):
            sys.exit(code)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return dict(functions)


def main() -> int:
    """Print the modules that the command on the command line walks through."""
    found = walked_modules(sys.argv[1:])
    for module, functions in sorted(found.items()):
        print(f"{module:<48} {len(functions)}", file=sys.stderr)
    packages = Counter(module.split(".")[1] for module in found)
    print(", ".join(f"{package} {count}" for package, count in packages.most_common()), file=sys.stderr)
    print(f"{len(found)} modules, {sum(map(len, found.values()))} functions", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
