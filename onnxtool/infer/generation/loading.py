"""Load a model that writes, and let it write, in one call."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from onnxtool.checkpoint.text_files import TextInput
from onnxtool.infer.generation.encoders import ENCODER_MASK
from onnxtool.infer.generation.options import GenerateOptions
from onnxtool.infer.generation.report import GenerationReport
from onnxtool.infer.generation.writing import OnText, Writer
from onnxtool.infer.loading import load
from onnxtool.model_file import ModelFile
from onnxtool.options import CheckpointName, StrPath, checked
from onnxtool.runtime.bounds import Threads
from onnxtool.runtime.providers import Provider

_AS_THE_CHECKPOINT = GenerateOptions()


def writes_text(model_path: Path, options: GenerateOptions) -> bool:
    """Whether text is asked for: by an option that only writing has, or of a model that does nothing else."""
    return options.asks_for_text or any(
        info.name == ENCODER_MASK for info in ModelFile.open(model_path).structure.inputs
    )


@checked
def load_writer(
    model_path: StrPath,
    *,
    options: GenerateOptions = _AS_THE_CHECKPOINT,
    model_name: CheckpointName = None,
    provider: Provider = "auto",
    threads: Threads = 0,
) -> Writer:
    """Load a decoder with its cache, or the decoder of an encoder-decoder, whose encoder is found beside it.

    Raises:
        OnnxtoolError: of `onnxtool.infer.load`; or the model does not write, or asks for what is not computed.
    """
    model = load(
        model_path,
        model_name=model_name,
        provider=provider,
        threads=threads,
        encoder_path=options.encoder_path,
    )
    return Writer(model, options)


@checked
def generate(
    model_path: StrPath,
    texts: str | TextInput | Iterable[str | TextInput],
    *,
    options: GenerateOptions = _AS_THE_CHECKPOINT,
    model_name: CheckpointName = None,
    provider: Provider = "auto",
    threads: Threads = 0,
    on_text: OnText | None = None,
) -> GenerationReport:
    """Load the model at `model_path` and let it write after `texts`; see `load_writer` and `Writer.write`.

    Raises:
        OnnxtoolError: the model cannot be loaded, does not write, or a text cannot be read.
    """
    writer = load_writer(model_path, options=options, model_name=model_name, provider=provider, threads=threads)
    return writer.write(texts, on_text=on_text)
