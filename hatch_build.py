"""Additions to the packages: the commit, the addresses of the repository, and a README whose links work on an index."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# Also git@github.com:owner/name.git; a user or a token in the address is left out.
_REMOTE = re.compile(r"(?:https://|ssh://|)(?:[^@/]+@)?(github\.com)[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def version_module(root: str) -> dict[str, Any]:
    """Return the names of onnxtool/version.py, which is not installed yet."""
    return runpy.run_path(str(Path(root) / "onnxtool" / "version.py"))


def resolve_links(text: str, address: str, revision: str) -> str:
    """Rewrite relative links to point to the repository at `revision`, or leave their text without an address."""

    def resolve(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        if not address:
            return "" if image else label
        return f"{image}[{label}]({address}/{'raw' if image else 'blob'}/{revision}/{target})"

    return _LINK.sub(resolve, text)


class Addresses(MetadataHookInterface):
    """Set `urls` and `readme`; hatchling takes those of an sdist from its PKG-INFO."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read the remote of the checkout, and README.md."""
        remote = _REMOTE.fullmatch(version_module(self.root)["ask_git"]("config", "--get", "remote.origin.url"))
        address = f"https://{remote[1]}/{remote[2]}" if remote else ""
        pages = {
            "Source": "",
            "Documentation": "/tree/HEAD/docs",
            "Changelog": "/blob/HEAD/CHANGELOG.md",
            "Issues": "/issues",
        }
        metadata["urls"] = {name: address + page for name, page in pages.items()} if address else {}
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = resolve_links(readme, address, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class Commit(BuildHookInterface[Any]):
    """Add onnxtool/commit.txt to packages that are built from a checkout; that of an sdist is packed as it is."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the file beside the packages."""
        if version != "editable" and (Path(self.root) / ".git").exists():
            commit = version_module(self.root)["commit"]()
            self._file.write_text(f"{commit}\n", encoding="ascii")
            build_data["force_include"][str(self._file)] = "onnxtool/commit.txt"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove it again."""
        self._file.unlink(missing_ok=True)

    @property
    def _file(self) -> Path:
        return Path(self.directory) / "commit.txt"
