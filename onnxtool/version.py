"""The package version, used in pyproject.toml and stamped into generated files, and the commit."""

from collections.abc import Iterable

__version__ = "0.1.0"
# The command and the import are onnxtool; PyPI treats that name as equal to the existing package onnx-tool.
DISTRIBUTION = "onnxtool-cli"


def installed(name: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of onnxtool and of those of `names` that are installed; onnxruntime's by either package."""
    versions = {name: installed(f"{name}-gpu") or installed(name) for name in names}
    return {"onnxtool": __version__, **{name: version for name, version in versions.items() if version}}


def commit() -> str:
    """Return the commit that a checkout is at or a package was built from, `-dirty` if changed; empty if unknown."""
    from pathlib import Path

    package = Path(__file__).resolve().parent
    if (package.parent / ".git").exists():
        return ask_git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    stamped = package / "commit.txt"  # written by hatch_build.py
    return stamped.read_text(encoding="ascii").strip() if stamped.is_file() else ""


def ask_git(*arguments: str) -> str:
    """Return what git says of the checkout that this file is in; empty if there is none, or no git."""
    import os
    import subprocess
    from pathlib import Path

    root = Path(__file__).resolve().parent.parent
    # A hook of git names another index in the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}", *arguments]
    try:
        return subprocess.check_output(
            command, cwd=root, env=environment, stderr=subprocess.DEVNULL, text=True, timeout=2
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return ""
