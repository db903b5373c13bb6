"""How Sphinx builds the site; `make docs` runs it, and treats every warning as an error."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import re
import sys
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import onnxtool.infer.options  # noqa: E402  the path comes first
from onnxtool.version import __version__  # noqa: E402

project = "onnxtool"
author = "the onnxtool authors"
copyright = "the onnxtool authors"  # noqa: A001  the name is Sphinx's
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

# Quotes and hyphens stay as they are written, and `name` in a docstring is code: `--model_name` is copied from pages.
smartquotes = False
default_role = "code"

# Markdown: the headings of included files keep the anchors that they have on a repository's page.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"onnxtool {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# A reference to a name that does not exist is a warning, and warnings are errors.
nitpicky = True


def _names_in_annotations() -> set[str]:
    """Return every name that a module of onnxtool defines or imports, also for type checkers only."""
    names = set(dir(builtins))
    for path in (ROOT / "onnxtool").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


_NAMES = _names_in_annotations()


def _exists(name: str) -> bool:
    """Return whether `name` is a name of an annotation, a module, or an attribute of one."""
    parts = name.split(".")
    if parts[0] in _NAMES and parts[0] != "onnxtool":
        return True
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def _leave_unlinked(_app: Any, _env: Any, node: Any, text: Any) -> Any:
    """Accept a name that exists but has no page: of another project, or not public. Other names stay warnings."""
    if node.get("refdomain") != "py":
        return None
    names = re.findall(r"[\w.]+", node.get("reftarget", ""))  # several in an annotation such as dict[str, Path]
    return text if names and all(map(_exists, names)) else None


def _strip_options(found: Any) -> None:
    """Leave the types of a dataclass, without what the command line says of its fields: `Annotated[int, Option(…)]`."""
    # Some names are imported for type checkers only, and some classes have no annotations.
    with contextlib.suppress(NameError, TypeError, AttributeError):
        try:
            found.__annotations__ = typing.get_type_hints(found)
        except NameError:  # of fields that a class of another module has
            found.__annotations__ = typing.get_type_hints(found, localns=vars(onnxtool.infer.options))


def setup(app: Any) -> None:
    """Connect the handlers above."""
    app.connect("missing-reference", _leave_unlinked)
    app.connect("autodoc-before-process-signature", lambda _app, found, _bound: _strip_options(found))
    # Before napoleon, which reads the types of attributes.
    app.connect(
        "autodoc-process-docstring",
        lambda _app, kind, _name, found, _options, _lines: _strip_options(found) if kind == "class" else None,
        priority=100,
    )
