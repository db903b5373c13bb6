"""The supply chain: pins with hashes, and packages that anyone can build again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import onnx
import pytest
from packaging.metadata import Metadata
from packaging.version import Version

from hatch_build import resolve_links
from onnxtool.release.bom import check_bom
from onnxtool.version import DISTRIBUTION, __version__
from tests.workshop import load_script

write_sbom = load_script("write_sbom")
read_pins, sbom_text = write_sbom.read_pins, write_sbom.sbom_text
ROOT = Path(__file__).resolve().parent.parent


def test_every_line_that_says_how_to_install_has_the_name_of_the_distribution() -> None:
    """The index takes `onnxtool` for the name of another package."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"] == DISTRIBUTION
    paths = [path for end in ("py", "md", "jinja", "yml") for path in ROOT.glob(f"[a-zA-Z.]*/**/*.{end}")]
    paths = [path for path in [*ROOT.glob("*.md"), *paths] if not {".venv", "build"} & {*path.parts}]
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines() if "pip install" in line]
    named = re.compile(r"pip install (?:-\S+ )*['\"]?onnxtool[\w-]*")
    found = [match[0] for line in lines for match in named.finditer(line)]
    assert len(found) > 20
    assert [text for text in found if not text.endswith(DISTRIBUTION)] == []


def test_every_pin_has_hashes() -> None:
    """Without, pip refuses the file; the build backend is among the pins."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    assert len(entries) == len(read_pins(ROOT / "requirements.txt")) > 100
    assert all(re.search(r" \\\n    --hash=sha256:[0-9a-f]{64}", pin) for pin in entries)
    assert {"hatchling", "editables", "uv"} <= read_pins(ROOT / "requirements.txt").keys()


def test_each_group_is_a_part_of_the_next_in_the_same_versions() -> None:
    """Their hashes are those of requirements.txt."""
    demo, dev = (read_pins(ROOT / "requirements" / f"{group}.txt") for group in ("demo", "dev"))
    assert demo.items() < dev.items() < read_pins(ROOT / "requirements.txt").items()
    assert not {"ray", "moto", "pytest"} & demo.keys()
    assert not {"ray", "moto"} & dev.keys()


def test_settings_of_pip_apply_to_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a variable precede those of a file, as for pip."""
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nindex-url = https://one.example/simple\nproxy = http://proxy.example:3128\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_INDEX_URL", "https://two.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/one /two")
    found = runpy.run_path(str(ROOT / "scripts" / "set_up.py"))["translated"](sys.executable)
    assert found["UV_DEFAULT_INDEX"] == "https://two.example/simple"
    assert (found["ALL_PROXY"], found["UV_FIND_LINKS"]) == ("http://proxy.example:3128", "/one,/two")


def test_the_bill_of_materials_has_the_packages_and_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directly or through others, in the pinned versions; what tests alone need is left out."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    (tmp_path / "onnxtool_cli-1.tar.gz").write_bytes(b"sdist")
    text = sbom_text(tmp_path)
    check_bom(text)
    assert text == sbom_text(tmp_path)
    bom = json.loads(text)
    (package,) = bom["metadata"]["component"]["components"]
    assert package["hashes"][0]["content"] == hashlib.sha256(b"sdist").hexdigest()
    found = {component["name"]: component for component in bom["components"]}
    assert found.keys() >= {"torch", "numpy", "markupsafe"}
    assert not found.keys() & {"pytest", "onnxtool-cli", "pyarrow"}
    assert found["numpy"]["licenses"]
    (needs,) = [one["dependsOn"] for one in bom["dependencies"] if one["ref"] == found["jinja2"]["bom-ref"]]
    assert needs == [found["markupsafe"]["bom-ref"]]


def test_a_version_that_is_not_pinned_is_in_no_bill_of_materials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that was changed by hand describes no release."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setattr(write_sbom, "read_pins", lambda path: read_pins(path) | {"numpy": [Version("1.0")]})
    with pytest.raises(ValueError, match=r"numpy .* is not the version of requirements.txt"):
        sbom_text(tmp_path)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The sdist, and the wheel that is built from it, of two clones: other folders, times of files, umasks, orders."""
    folders = []
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    moment = "1700000000 +0000"
    environment = os.environ | {
        "SOURCE_DATE_EPOCH": moment[:10],
        "GIT_AUTHOR_DATE": moment,
        "GIT_COMMITTER_DATE": moment,
    }
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for name, umask, remote in (
        ("one", 0o022, "git@github.com:someone/somewhere.git"),
        ("two", 0o077, "https://someone:secret@github.com/someone/somewhere"),
    ):
        folder = tmp_path_factory.mktemp(name)
        previous = os.umask(umask)
        for path in sorted((path for path in names if not path.startswith("tests/")), reverse=name == "two"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, folder / path)
            os.utime(folder / path, (1_700_000_000 + umask, 1_700_000_000 + umask))
        identity = ("-c", "user.name=Someone", "-c", "user.email=someone@example.com")
        for command in (
            ["git", "init", "--quiet"],
            ["git", "remote", "add", "origin", remote],
            ["git", "add", "--all", "--force"],
            ["git", *identity, "commit", "--quiet", "--message", "All"],
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")],
        ):
            subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
        os.umask(previous)
        folders.append(folder / "dist")
    return folders


@pytest.mark.slow
def test_packages_are_the_same_wherever_and_whenever_they_are_built(built: list[Path]) -> None:
    """A commit gives the same bytes, and a password in the address of the remote gets into no package."""
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in built)
    assert len(first) == 2
    assert first == second


@pytest.mark.slow
def test_the_wheel_is_complete_when_it_is_installed_alone(built: list[Path], tmp_path: Path) -> None:
    """Its metadata is valid and leads to the repository, it knows its commit, and it has the files that it reads."""
    (wheel,) = built[0].glob("*.whl")
    site = tmp_path / "site"
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--target", site)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, wheel], check=True)
    (information,) = site.glob("*.dist-info/METADATA")
    metadata = Metadata.from_email(information.read_bytes())
    description, at = metadata.description or "", "https://github.com/someone/somewhere"
    assert (metadata.project_urls or {})["Source"] == at
    links = re.findall(r"\]\(([^)\s]+)|(?:src|href)=[\"']?([^\"'\s>]+)", description)
    assert [link for link in map("".join, links) if not link.startswith(("https://", "#"))] == []
    assert {f"{at}/blob/v{__version__}/LICENSE", f"{at}/raw/v{__version__}/docs/diagrams/pipeline.svg"} <= {
        *map("".join, links)
    }
    names = subprocess.check_output(["git", "ls-files", "onnxtool"], cwd=ROOT, text=True).splitlines()
    installed = (path.relative_to(site) for path in site.glob("onnxtool/**/*") if path.is_file())
    assert {path.as_posix() for path in installed} == {*names, "onnxtool/commit.txt"}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "onnxtool", *arguments]
        environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)

    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=built[0].parent, text=True)
    assert run("--version") == f"onnxtool, version {__version__} ({commit[:12]})\n"
    graph = '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) {y = Relu(x)}'
    onnx.save(onnx.parser.parse_model(graph), tmp_path / "relu.onnx")
    assert "Number of nodes" in run("stats", "relu.onnx")
    assert run("stats", "relu.onnx", "--format", "html").startswith("<!doctype html>")


@pytest.mark.slow
def test_the_commit_of_a_checkout_is_its_own(built: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes are marked, the index that a hook of git names is not asked, and without git there is none."""
    folder = built[1].parent
    commit = runpy.run_path(str(folder / "onnxtool" / "version.py"))["commit"]
    monkeypatch.setenv("GIT_INDEX_FILE", str(folder / "absent"))
    head = commit()
    assert re.fullmatch("[0-9a-f]{12}", head)
    (folder / "LICENSE").write_text("Other", encoding="utf-8")
    assert commit() == f"{head}-dirty"
    monkeypatch.setenv("PATH", "")
    assert commit() == ""


def test_links_of_a_readme_lead_into_the_repository_or_nowhere() -> None:
    """Without an address, which a folder that no remote is known of lacks, their text is left."""
    text = "![an image](a.svg) [`a\nlink`](docs/a.md#b), [out](https://a.org), [here](#b)"
    outside = "[out](https://a.org), [here](#b)"
    assert resolve_links(text, "", "v1") == f" `a\nlink`, {outside}"
    there = "![an image](https://a.b/raw/v1/a.svg) [`a\nlink`](https://a.b/blob/v1/docs/a.md#b)"
    assert resolve_links(text, "https://a.b", "v1") == f"{there}, {outside}"
