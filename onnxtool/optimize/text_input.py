"""Optimize the part that reads ids of a graph that reads texts: the tokenizer is taken off, and put back unchanged.

Passes and conversions never see the tokenizer, and the reference, the calibration texts and the verification are those
of a graph that reads ids.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from onnxtool.graph.text_input import put_before, serialized
from onnxtool.model_file import ModelFile, save_model, staged
from onnxtool.model_file.metadata import TextInput
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.options import OptimizeOptions
from onnxtool.optimize.report import OptimizeReport
from onnxtool.progress import tell
from onnxtool.runtime.text_graph import check_same_outputs, take_tokenizer_off
from onnxtool.summary import summarize_file

Optimize = Callable[[OptimizeOptions], OptimizeReport]


def optimize_behind(
    source: ModelFile, text_input: TextInput, output: Path, options: OptimizeOptions, optimize: Optimize
) -> OptimizeReport:
    """Optimize a graph that reads texts, and compare the result with its optimized part bit by bit.

    Args:
        source: the file.
        text_input: how it reads texts.
        output: where to write.
        options: of the optimization.
        optimize: optimizes a file that reads ids.

    Raises:
        ModelFileError: the graph was changed since its tokenizer was put into it.
        InputError: the result reads texts otherwise.
        OnnxtoolError: as for files that read ids.
    """
    with staged(output, force=options.force) as staging, tempfile.TemporaryDirectory(dir=staging.folder.parent) as name:
        folder = Path(name)
        core, front = take_tokenizer_off(source, text_input, folder)
        report = optimize(
            replace(options, model_path=core.path, output=folder / f"optimized-{output.name}", force=False)
        )
        optimized = ModelFile.open(Path(report.output))
        content, model = serialized(front), load_model(optimized.path)
        put_before(model, front)
        model.metadata_props.update(text_input.entry)
        result = ModelFile.open(save_model(model, staging))
        del model, front
        if options.verify:
            tell("comparing the file that reads texts")
            check_same_outputs(result, optimized, content)
        before, after = summarize_file(source), summarize_file(result)._replace(path=str(output))
    return replace(report, output=str(output), before=before, after=after)
