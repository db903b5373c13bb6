"""Who may import whom, and what a light command may load: asserted from the imports themselves."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import onnxtool

PACKAGE = Path(__file__).resolve().parent.parent / "onnxtool"
SCRIPTS = PACKAGE.parent / "scripts"

# A package may import the packages below its own, and itself; those of one row never import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("training", "release", "consumers"),
    ("autodiff", "torch_backend"),
    ("evaluation",),
    ("agreement", "benchmarking", "encoding"),
    ("export", "optimize", "infer", "stats", "sentence_transformers"),
    ("runtime",),
    ("checkpoint",),
    ("graph",),
    ("summary",),
    ("model_file",),
    ("options",),
    ("errors",),
    ("verification",),
    ("guarded", "interruption", "lazy", "progress", "reading", "reports"),
    ("version",),
)
# The package itself holds the version and the public names, which it imports when they are used.
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}

# Where a library may appear at all: in a package, or in one module of it.
ONLY_IN = {
    "click": {"cli"},
    "rich": {"cli"},
    "torch": {
        "export",
        "benchmarking/comparison.py",
        "evaluation/pytorch.py",
        "infer/generation/session_model.py",
        "sentence_transformers",
        "torch_backend",
        "training",
    },
    "sentence_transformers": {"sentence_transformers", "evaluation/pytorch.py", "consumers/runners"},
    "transformers": {
        "export",
        "benchmarking/comparison.py",
        "checkpoint/chat_templates.py",
        "runtime/pictures.py",
        "infer/generation",
        "runtime/tokens.py",
        "training/trainer",
    },
    "onnxoptimizer": {"optimize/onnxoptimizer_child.py"},
    "onnxscript": {"autodiff", "export", "graph", "optimize", "torch_backend", "training"},
    "tokenizers": {"checkpoint", "export/tokenizer_rules.py"},
    "PIL": {"checkpoint"},
    "ir_measures": {"evaluation"},
    "bm25s": {"evaluation"},
    "scipy": {"evaluation"},
    "pyarrow": {"encoding"},
    "obstore": {"encoding/files.py"},
    "ray": {"encoding/ray.py"},
    "cyclonedx": {"release"},
    "model_signing": {"release"},
    "onnxruntime_extensions": {"runtime/providers.py"},
    "onnxruntime": {"runtime", "optimize", "torch_backend", "training"},
    "onnx": {"autodiff", "export", "graph", "model_file", "optimize", "runtime", "torch_backend", "training"},
    "onnx_ir": {"autodiff", "export", "graph", "model_file", "optimize", "torch_backend", "training"},
}
HEAVY = (
    *("torch", "transformers", "onnx", "onnxruntime", "onnx_ir", "onnxoptimizer", "onnxscript", "tokenizers"),
    *("pyarrow", "sentence_transformers", "PIL", "ir_measures", "bm25s", "scipy"),
    *("obstore", "cyclonedx", "model_signing"),
)
# Whoever imports these packages needs the library: torch.compile has called them, or they work on ONNX graphs.
LOADED_AT_ONCE = {
    **{name: {"onnx", "onnx_ir"} for name in ("autodiff", "export", "graph", "optimize")},
    "torch_backend": {"torch", "onnx", "onnx_ir", "onnxruntime"},
    **{
        f"training/{package}": {"onnx", "onnx_ir", "onnxruntime"}
        for package in ("api", "artifacts", "checkpoints", "graphs", "onnxblock")
    },
    "infer/generation/session_model.py": {"torch", "transformers"},
    "training/trainer": {"torch", "transformers"},
    "sentence_transformers": {"torch", "sentence_transformers"},
    "consumers/runners": {"sentence_transformers"},  # processes of their own
}
STANDARD_LIBRARY_ONLY = (
    *(
        "errors",
        "interruption",
        "lazy",
        "model_file",
        "options",
        "progress",
        "reading",
        "reports",
        "stats",
        "summary",
        "verification",
        "version",
    ),
    "checkpoint/sentence_modules.py",
)


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def places_of(path: Path) -> set[str]:
    """Return the module and all folders it lies in, relative to the package."""
    inside = path.relative_to(PACKAGE)
    return {package_of(path), inside.as_posix(), *(folder.as_posix() for folder in inside.parents)}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


class Import(NamedTuple):
    """A module that is imported, what of it, and whether with the importing module or for type checkers only."""

    name: str
    parts: tuple[str, ...]
    at_import: bool
    for_types: bool


@functools.cache
def imports(path: Path) -> tuple[Import, ...]:
    """Return all imports of a module, those in its functions as well."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    guarded = {
        node
        for block in nodes
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    top_level = {*ast.iter_child_nodes(nodes[0])}
    found = []
    for node in nodes:
        when = (node in top_level, node in guarded)
        if isinstance(node, ast.Import):
            found += [Import(alias.name, (), *when) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(Import(node.module or "", tuple(alias.name for alias in node.names), *when))
    return tuple(found)


def test_a_package_imports_only_packages_below_it() -> None:
    """Data flows one way."""
    for path in modules():
        package = package_of(path)
        for name, *_ in imports(path):
            parts = name.split(".")
            if parts[0] == "onnxtool" and len(parts) > 1 and parts[1] != package:
                assert LEVEL[parts[1]] > LEVEL[package], f"{path} imports {name}"


def test_the_picture_of_the_house_shows_these_floors() -> None:
    """Rooms of a floor have one height; the ground floor holds what stands below the files, in order."""
    picture = (PACKAGE.parent / "docs" / "diagrams" / "house.svg").read_text(encoding="utf-8")
    floors: dict[str, list[str]] = {}
    for height, name in re.findall(r'<text class="(?:name|ground)" x="\d+" y="(\d+)">(\w+)<', picture):
        floors.setdefault(height, []).append(name)
    ground = LEVEL["model_file"] + 1
    rows = [*LAYERS[1:ground], tuple(name for row in LAYERS[ground:] for name in row)]
    assert [tuple(floor) for floor in floors.values()] == rows


def test_a_library_appears_only_in_its_packages() -> None:
    """Hints for type checkers load nothing and are free."""
    for path in modules():
        places = places_of(path)
        expected = set().union(*(LOADED_AT_ONCE.get(place, set()) for place in places))
        for name, _, at_import, for_types in imports(path):
            library = name.split(".")[0]
            if for_types:
                continue
            if library in ONLY_IN:
                assert places & ONLY_IN[library], f"{path} imports {name}"
            at_once = at_import and library not in expected
            assert not (at_once and library in HEAVY and library != "tokenizers"), f"{path} loads {name} at once"


def test_the_ground_stands_on_the_standard_library() -> None:
    """Reading a model's structure needs nothing else; only saving one does, when it happens."""
    for path in modules():
        for name, _, at_import, for_types in imports(path) if places_of(path) & {*STANDARD_LIBRARY_ONLY} else ():
            if at_import and not for_types:
                assert name.split(".")[0] in {*sys.stdlib_module_names, "onnxtool"}, f"{path} imports {name}"


LIGHT = (
    ["--help"],
    *([name, "--help"] for name in ("stats", "infer", "export", "optimize", "verify", "artifacts")),
    ["stats", "no-such-file.onnx"],
)


def test_light_commands_load_no_heavy_library() -> None:
    """Starting up is most of what they cost."""
    code = (
        "import sys\n"
        "from onnxtool.cli import run_arguments\n"
        f"for arguments in {LIGHT!r}:\n"
        "    run_arguments(arguments)\n"
        f"    print('loaded', *sorted({{*{HEAVY!r}, 'numpy', 'rich'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("loaded")] == ["loaded"] * len(LIGHT)


@pytest.mark.parametrize(
    ("modules", "libraries"),
    [
        # The help of the command needs the options; what makes artifacts is imported when it is run.
        ("onnxtool.cli.artifacts", HEAVY),
        # That the names of the package are imported on first use is what tests/docs/test_site.py and all tests of them
        # need.
        ("onnxtool.training", HEAVY),
        ("onnxtool.cli.infer, onnxtool.infer", ("torch", "transformers", "onnx")),
    ],
)
def test_modules_load_no_library_before_it_is_used(modules: str, libraries: tuple[str, ...]) -> None:
    """Artifacts are made and trained with without PyTorch, and models served by onnxruntime and tokenizers alone."""
    code = f"import sys, {modules}; print(sorted({{*{libraries!r}}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def dependencies(root: Path, prefix: str = "") -> dict[str, set[str]]:
    """Return, for each module below `root`, those of them that it names in an import, be it at once or later."""
    places = {prefix + ".".join(path.relative_to(root).with_suffix("").parts): path for path in root.rglob("*.py")}
    named = {name.removesuffix(".__init__").removesuffix("__init__"): path for name, path in places.items()}
    found: dict[str, set[str]] = {}
    for module, path in named.items():
        imported: set[str] = set()
        for one in imports(path):
            imported |= ({f"{one.name}.{part}" for part in one.parts} & named.keys()) or {one.name}
        found[module] = (imported & named.keys()) - {module}
    return found


def cycle_of(dependencies: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a ring; an empty list where there are none."""
    try:
        tuple(TopologicalSorter(dependencies).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    """Neither at once, nor in a function, nor for types: each can be read after those that it names."""
    assert cycle_of(dependencies(PACKAGE, "onnxtool.")) == []


def test_a_ring_of_imports_is_seen() -> None:
    """The test above can fail."""
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


def test_scripts_do_not_import_each_other_in_a_ring() -> None:
    """A script may use another, but not both ways."""
    assert cycle_of(dependencies(SCRIPTS)) == []


def readings_of_the_default_opset(code: str) -> list[int]:
    """Return the lines that look for ONNX's own domain among opset imports, or compare with its alias."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and node.value == "ai.onnx":
            lines.append(node.lineno)
        key, source = None, ast.AST()
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key, source = node.slice, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            key, source = node.args[0], node.func.value
        if isinstance(key, ast.Constant) and key.value == "" and "opset" in ast.unparse(source):
            lines.append(key.lineno)
        if isinstance(node, ast.comprehension) and node.ifs and ast.unparse(node.iter).endswith(".opset_import"):
            lines.append(node.iter.lineno)
    return lines


def test_the_default_opset_is_read_in_one_place() -> None:
    """The domain has two names, which model_file/domains.py settles; all others call its functions."""
    found = {path for path in modules() if readings_of_the_default_opset(path.read_text(encoding="utf-8"))}
    assert found == {PACKAGE / "model_file" / "domains.py"}


@pytest.mark.parametrize(
    "code",
    [
        "model.opset_imports.get('', 0)",
        "node.graph.opset_imports['']",
        "opsets.setdefault('', 17)",
        "node.domain in ('', 'ai.onnx')",
        "next(one.version for one in model.opset_import if not one.domain)",
    ],
)
def test_a_reading_of_the_default_opset_is_seen(code: str) -> None:
    """The test above can fail."""
    assert readings_of_the_default_opset(code)


def test_no_module_hides_a_public_name() -> None:
    """Importing `onnxtool.encode` as a module would replace the function of that name."""
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert modules.isdisjoint(onnxtool.__all__)
