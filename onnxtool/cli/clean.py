"""`onnxtool clean`: finish or remove leftovers of killed runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from onnxtool.cli.options import Result, result_options
from onnxtool.cli.render import Block, Facts, Note, Table, format_bytes
from onnxtool.model_file.commits import Leftover, find_leftovers, settle

_MEANINGS = {
    "running": "of a run that is still going",
    "elsewhere": "of a run on another machine",
    "half": "half a set, of no use",
    "unfinished": "a whole set that lacks names",
    "unproven": "not known to be yours",
}


@dataclass(frozen=True)
class _Entry:
    path: str
    state: str
    size_bytes: int
    action: str


@dataclass(frozen=True)
class _Report:
    folder: str
    dry_run: bool
    leftovers: tuple[_Entry, ...]
    removed_bytes: int


@click.command(epilog="Example: onnxtool clean --dry_run")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".", metavar="[DIR]")
@click.option("--dry_run", is_flag=True, help="List what would be done, without doing it.")
@result_options()
def command(*, folder: Path, dry_run: bool, result: Result) -> None:
    """List what killed runs left in DIR and its subfolders, and clean it up.

    A killed run leaves a hidden folder next to its output. An incomplete set of files is removed; a complete set that
    was only partly moved into place is finished. Files of a run that is still going are left alone, and so are files
    written on another machine, because only that machine knows whether the run is still going. A folder that may come
    from a clone or an archive is listed and left alone.
    """
    entries = [_entry(leftover, dry_run=dry_run) for leftover in find_leftovers(folder)]
    removed = sum(entry.size_bytes for entry in entries if entry.action == "removed")
    report = _Report(str(folder), dry_run, tuple(entries), removed)
    result.emit(report, _blocks(report))


def _entry(leftover: Leftover, *, dry_run: bool) -> _Entry:
    action = {"half": "removed", "unfinished": "finished"}.get(leftover.state, "left alone")
    if dry_run:
        action = {"removed": "to remove", "finished": "to finish"}.get(action, action)
    elif action != "left alone" and not settle(leftover.path):
        action = "left alone"  # another run has taken it over in the meantime
    return _Entry(str(leftover.path), leftover.state, leftover.size_bytes, action)


def _blocks(report: _Report) -> list[Block]:
    if not report.leftovers:
        return [Facts([("Found", f"nothing that a killed run left in {report.folder}")])]
    rows = [
        (entry.path, format_bytes(entry.size_bytes), _MEANINGS[entry.state], entry.action) for entry in report.leftovers
    ]
    blocks: list[Block] = [Table(("left", "size", "what it is", "done"), rows, frozenset({"size"}))]
    if any(entry.state == "elsewhere" for entry in report.leftovers):
        blocks.append(Note("remove what is of a run on another machine by hand, once no run writes it any more"))
    if any(entry.state == "unproven" for entry in report.leftovers):
        blocks.append(
            Note("a clone, an archive or a backup may have brought what is not known to be yours: look at it")
        )
    return blocks
