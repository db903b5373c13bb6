"""Make .venv, and install a group of pyproject.toml's packages into it, in the versions of requirements.txt.

`python scripts/set_up.py demo` is what `make demo` needs, `dev` what tests and linters need, `dev-all` what tests of
stores, Ray and other people's clients need as well. uv installs: the one on the PATH, else the pinned one. Names and
versions of a group are in requirements/, hashes of all packages in requirements.txt.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("demo", "dev", "dev-all")  # each contains the ones before it
# What pip's settings (its files and PIP_*) are called in uv. uv reads proxies, netrc and SSL_CERT_FILE itself.
SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
}
# Only PyPI's torch for Linux needs the libraries of CUDA, which are gigabytes.
CUDA = re.compile(r"cuda|nvidia|triton")


def main() -> int:
    """Install the group; return the exit code of the step that fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv", help="where to make the environment")
    arguments = parser.parse_args()
    try:
        set_up(arguments.folder.absolute(), arguments.group)
    except subprocess.CalledProcessError as error:
        print(f"{Path(sys.argv[0]).name}: {error.cmd[0]} ended with {error.returncode}: {error.cmd}", file=sys.stderr)
        return int(error.returncode) or 1
    return 0


def set_up(folder: Path, group: str) -> None:
    """Install `group` into `folder`, which is made if it does not exist."""
    python = str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    if not Path(python).exists():
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile", "--no-deps"]
    entries = read_entries(ROOT / "requirements.txt")
    if group != GROUPS[-1]:
        entries = {name: entries[name] for name in read_entries(ROOT / "requirements" / f"{group}.txt")}
    own = shutil.which("uv")
    if own is None:
        subprocess.run([*pip, *write(folder, "uv", {"uv": entries["uv"]})], check=True)
    environment = {**translated(python), **os.environ, "UV_INDEX_STRATEGY": "unsafe-best-match"}
    uv = [*([own] if own else [python, "-m", "uv"]), "pip", "install", "--quiet", "--python", python, "--no-deps"]

    # torch's build for processors alone is in no index, and only pip takes a local version for the pinned one. It is
    # unpacked while uv fetches the rest.
    torch = subprocess.Popen(
        [*pip, "--no-index", *write(folder, "torch", {"torch": entries["torch"]})], stderr=subprocess.DEVNULL
    )
    light = {name: entry for name, entry in entries.items() if name != "torch" and not CUDA.match(name)}
    try:
        subprocess.run([*uv, *write(folder, group, light)], check=True, env=environment)
    finally:
        torch.wait()
    if torch.returncode:
        print("torch is PyPI's build, with CUDA on Linux: pip's find-links have no other")
        subprocess.run([*uv, *write(folder, group, entries)], check=True, env=environment)
    editable = ["--no-index", "--no-build-isolation", "--editable", str(ROOT)]
    subprocess.run([*uv, *editable], check=True, env=environment)
    subprocess.run([python, "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)
    for contained in GROUPS[: GROUPS.index(group) + 1]:
        (folder / f".{contained}").touch()


def read_entries(path: Path) -> dict[str, str]:
    """Return the requirements of a locked file by name: version, marker and hashes of each."""
    entries = re.split(r"\n(?=\w)", re.sub(r"(?m)^#.*\n", "", path.read_text("utf-8")))
    return {entry.partition("==")[0].partition("[")[0]: entry for entry in entries}


def write(folder: Path, name: str, entries: Mapping[str, str]) -> list[str]:
    """Write requirements into a file, and return the arguments that install them with their hashes, as wheels."""
    path = folder / f"{name}.txt"
    path.write_text("\n".join(entries.values()) + "\n", encoding="utf-8")
    return ["--require-hashes", "--only-binary", ":all:", "--requirement", str(path)]


def translated(python: str) -> dict[str, str]:
    """Return pip's settings as variables of uv."""
    listed = subprocess.run([python, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True).stdout
    variables: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # a later one overrides an earlier one
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            name = key.removeprefix(f"{section}.")
            if name in SETTINGS:
                words = str(ast.literal_eval(value)).split()
                variables[SETTINGS[name]] = ("," if name == "find-links" else " ").join(words)
            elif name == "client-cert":
                print(f"pip's setting {name} is not known to uv, which installs the packages: set SSL_CLIENT_CERT")
    return variables


if __name__ == "__main__":
    sys.exit(main())
