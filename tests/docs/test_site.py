"""README and docs/ are complete and consistent: links, length, public names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import onnxtool
import onnxtool.torch_backend
import onnxtool.training
from tests.docs.documents import ROOT, documents, name_of

_WITHOUT_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def _anchors(document: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_links_inside_the_repository_lead_somewhere(document: Path) -> None:
    """To a file, and to a heading of it where an anchor is given."""
    text = _WITHOUT_CODE.sub("", document.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        assert path.exists(), target
        assert not anchor or anchor in _anchors(path), target


def test_a_broken_anchor_is_seen() -> None:
    """The test above can fail."""
    assert "what-is-exported" in _anchors(ROOT / "docs" / "guide" / "export.md")
    assert "what-is-not-exported" not in _anchors(ROOT / "docs" / "guide" / "export.md")


def test_the_readme_fits_on_a_page() -> None:
    """Everything longer belongs into docs/."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_public_name_is_in_the_reference() -> None:
    """A name of the packages that users import is documented by itself, or with its module."""
    reference = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    whole_modules = set(re.findall(r"automodule:: (\S+)\n", reference))
    for module in (onnxtool, onnxtool.torch_backend, onnxtool.training):
        for name in set(module.__all__) - {"__version__"}:
            documented = f":: {module.__name__}.{name}\n" in reference
            home = getattr(module, name).__module__
            assert documented or {module.__name__, home} & whole_modules, f"{module.__name__}.{name}"


def test_every_page_is_in_the_navigation() -> None:
    """Sphinx warns about the others as well; this says so without building the site."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    listed = {line for block in re.findall(r"```{toctree}(.*?)```", index, re.DOTALL) for line in block.splitlines()}
    assert pages - listed == {"index"}


def test_hooks_have_the_pinned_versions() -> None:
    """A hook of another version would change what `make lint` refuses."""
    pins = set((ROOT / "requirements.txt").read_text(encoding="utf-8").split())
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    for hook in repository["hooks"]:
        assert set(hook["additional_dependencies"]) <= pins


def test_workflows_call_targets_of_the_makefile() -> None:
    """What CI runs is what a developer runs."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in ("test.yml", "release.yml"):
        jobs = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))["jobs"]
        lines = [
            step["run"] for job in jobs.values() for step in job["steps"] if step.get("run", "").startswith("make ")
        ]
        targets = [word for line in lines for word in line.split()[1:] if "=" not in word]
        assert name != "test.yml" or {"test", "lint", "docs", "test_lowest"} <= set(targets)
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), targets
