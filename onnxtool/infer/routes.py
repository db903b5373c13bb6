"""A checkpoint that encodes queries and documents by different models is two files: find the one for a text."""

from __future__ import annotations

from pathlib import Path

from onnxtool.checkpoint.folder import find_checkpoint_folder
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import PAIR_KEY, PARTNER_KEY, READS_KEY, ROUTE_KEY


def find_file(path: Path, model_name: str | None, task: str | None) -> tuple[Path, str | None]:
    """Return the file that encodes texts for a task, and what names its checkpoint; None for the files beside it.

    A folder that holds one route says nothing of the partner, which has files of its own.

    Args:
        path: an ONNX file.
        model_name: the folder or id that a user named for it; None for none.
        task: as in `file_for`.

    Raises:
        OnnxtoolError: as `file_for`, or the folder cannot be read.
    """
    model = ModelFile.open(path)
    found = file_for(model, task)
    if found == path or model_name is None:
        return found, model_name
    return found, model_name if find_checkpoint_folder(model, model_name).route is not None else None


def file_for(model: ModelFile, task: str | None, partner: Path | None = None) -> Path:
    """Return the file that encodes texts for a task: that of `model`, or its partner.

    Args:
        model: an ONNX file.
        task: `query` or `document`; None for texts of no task, which any file takes.
        partner: the other file of its checkpoint; None for the one that the file names.

    Raises:
        InputError: the file is for other texts, and the one for these is not there, or does not belong to it.
        ModelFileError: a file cannot be used, or names a partner that is not beside it.
    """
    path = model.path
    reads = model.metadata.get(READS_KEY)
    if task is None or reads is None or task in reads.split(", "):
        return path
    route = model.metadata.get(ROUTE_KEY)
    name = model.plain_name(PARTNER_KEY)
    if partner is None and name is None:
        raise InputError(
            f"{path} holds the route {route} of its checkpoint, which is for texts of the task {reads}, and not {task}",
            "export the checkpoint without --route, which writes the files of both",
        )
    partner = partner or path.with_name(str(name))
    if not partner.is_file():
        raise InputError(
            f"{path} is for texts of the task {reads}, and the file for {task} is not there: {partner}",
            "keep both files of the checkpoint in one folder",
        )
    other = ModelFile.open(partner).metadata
    if task not in other.get(READS_KEY, "").split(", ") or other.get(PAIR_KEY) != model.metadata.get(PAIR_KEY):
        raise InputError(
            f"{partner} is not the partner of {path}: it holds other weights, or is not for texts of the task {task}",
            "export both again from one checkpoint",
        )
    return partner
