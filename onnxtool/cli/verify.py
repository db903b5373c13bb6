"""`onnxtool verify`: compare a file with its source."""

from __future__ import annotations

from pathlib import Path

import click

from onnxtool.agreement import VerifyOptions
from onnxtool.cli.options import PathType, Result, derived_options, result_options
from onnxtool.cli.progress import progress
from onnxtool.cli.verification import verification_blocks


@click.command(epilog="Example: onnxtool verify models/all-MiniLM-L6-v2-optimized.onnx models/all-MiniLM-L6-v2.onnx")
@click.argument("model", type=PathType())
@click.argument("reference")
@derived_options(options=VerifyOptions)
@result_options()
def command(options: VerifyOptions, *, model: Path, reference: str, result: Result) -> int:
    """Compare the ONNX file MODEL with REFERENCE: an ONNX file, or a checkpoint given as a folder or hub id.

    Both run on many lengths, batch sizes and paddings, or on --sample_inputs. Exits with 1 if an output differs by more
    than the tolerance.
    """
    from onnxtool.agreement import verify

    with progress(quiet=result.quiet):
        verification = verify(model, reference, options)
    result.emit(verification, verification_blocks(verification))
    return 0 if verification.passed else 1
