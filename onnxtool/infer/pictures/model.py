"""A model of pictures with all that it takes to run files through it: session, image processor and output.

Letters of shapes: N pictures, B batch, H height, W width, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import CheckpointFolder, find_checkpoint_folder
from onnxtool.checkpoint.picture_files import read_picture
from onnxtool.checkpoint.picture_processing import PROCESSOR_NAMES, PictureProcessor, Pixels
from onnxtool.checkpoint.quantized_vectors import VectorType
from onnxtool.checkpoint.tasks import TASK_OF_PICTURES
from onnxtool.errors import InputError
from onnxtool.infer.heads.head import require_finite
from onnxtool.infer.tasks import stated_task
from onnxtool.infer.vectors import DenseVectors
from onnxtool.model_file import ModelFile
from onnxtool.reports import TensorInfo
from onnxtool.runtime.session import Session, open_session

PIXELS = "pixel_values"
# The vector of a picture, by the names that an export of one side of a dual encoder gives it.
_VECTORS = ("image_embeds", "image_features")
# Of 224 x 224 pixels, a picture is 600 KB of float32.
_BATCH_SIZE = 16


def takes_pictures(model: ModelFile) -> bool:
    """Whether a graph takes pictures and no text."""
    names = {info.name for info in model.structure.inputs}
    return PIXELS in names and "input_ids" not in names


@dataclass(frozen=True)
class PictureModel:
    """A model that pictures can be run through. Nothing of it changes after loading: threads may share it.

    Attributes:
        session: runs the graph.
        folder: the checkpoint's small files.
        processor: makes pixels of a picture.
        pixels: the input of the graph.
        vector: the name of the output that is read, float [B, D].
        task: what the model is for.
    """

    session: Session
    folder: CheckpointFolder
    processor: PictureProcessor
    pixels: TensorInfo
    vector: str
    task: str

    def prepare(self, path: Path) -> Pixels:
        """Return the pixels of the picture at `path`: float32 [3, H, W].

        Raises:
            InputError: it is no picture, or the graph takes another size.
        """
        pixels = self.processor.prepare(read_picture(path))
        wanted = self.pixels.shape[1:]
        if any(isinstance(size, int) and size != found for size, found in zip(wanted, pixels.shape, strict=True)):
            raise InputError(
                f"the image processor makes pixels of {list(pixels.shape)} of {path}, and {self.session.model.path} "
                f"takes {list(wanted)}",
                "the image processor belongs to another model; pass --model_name with the right one",
            )
        return pixels

    def encode(self, paths: Sequence[Path]) -> DenseVectors:
        """Return the vectors of N pictures, in their order: float32 [N, D].

        Raises:
            InputError: there are none, one cannot be read, or the graph takes another size.
            SessionError: onnxruntime fails, or gives what is not a finite number.
        """
        if not paths:
            raise InputError("no pictures to encode", "pass at least one")
        parts = [self.run(batch) for batch in self._batches(paths)]
        return np.concatenate(parts)

    def run(self, pixels: Sequence[Pixels]) -> DenseVectors:
        """Return the vectors of B prepared pictures of one size; a graph of a fixed batch gets the last one again.

        Raises:
            SessionError: onnxruntime fails, or gives what is not a finite number.
        """
        missing = (self._fixed_batch or len(pixels)) - len(pixels)
        feed: NDArray[Any] = np.stack([*pixels, *[pixels[-1]] * missing]).astype(self.pixels.dtype, copy=False)
        vectors = self.session.run({PIXELS: feed})[self.vector][: len(pixels)].astype(np.float32)
        require_finite(vectors, "embedding")
        return vectors

    @property
    def _fixed_batch(self) -> int | None:
        size = self.pixels.shape[0]
        return size if isinstance(size, int) else None

    def _batches(self, paths: Sequence[Path]) -> Iterator[list[Pixels]]:
        """Yield prepared pictures that run together: neighbours of one size."""
        most = self._fixed_batch or _BATCH_SIZE
        batch: list[Pixels] = []
        for path in paths:
            pixels = self.prepare(path)
            if batch and (len(batch) == most or batch[0].shape != pixels.shape):
                yield batch
                batch = []
            batch.append(pixels)
        if batch:
            yield batch


def load_pictures(
    model_path: Path | str,
    *,
    model_name: str | None = None,
    provider: str = "auto",
    threads: int = 0,
    on_progress: Callable[[str], None] = lambda _stage: None,
) -> PictureModel:
    """Load the model of pictures at `model_path` with its image processor.

    Args:
        model_path: the ONNX file; preprocessor_config.json is found beside it.
        model_name: the checkpoint's folder, or its id on the hub, in place of the files beside the model.
        provider: `auto`, `cpu` or `cuda`.
        threads: intra-op threads; 0 for one a core.
        on_progress: is told what is being done.

    Raises:
        InputError: the graph takes no pictures alone, gives no vector of one, or its image processor is not computed.
        ModelFileError: the file or its external data cannot be used.
        ProviderError: the provider cannot run here.
        SessionError: onnxruntime cannot load the model.
    """
    model = ModelFile.open(Path(model_path))
    if not takes_pictures(model):
        names = ", ".join(info.name for info in model.structure.inputs)
        raise InputError(
            f"{model.path} takes {names}, and no pictures alone",
            f"export the side of a dual encoder for them: onnxtool export --task {TASK_OF_PICTURES}",
        )
    others = [info.name for info in model.structure.inputs if info.name != PIXELS]
    pixels = next(info for info in model.structure.inputs if info.name == PIXELS)
    outputs = {info.name: len(info.shape) for info in model.structure.outputs}
    vector = next((name for name in _VECTORS if outputs.get(name) == 2), None)
    if others or vector is None or len(pixels.shape) != 4:
        names = ", ".join(
            f"{info.name} {list(info.shape)}" for info in (*model.structure.inputs, *model.structure.outputs)
        )
        raise InputError(
            f"{model.path} is not the picture side of a dual encoder, whose pictures onnxtool prepares: it has {names}",
            "run it with onnxtool.open_session and inputs of your own",
        )
    if (stored := VectorType.of_model(model)) is not None:
        raise InputError(
            f"{model.path} gives {stored.name} vectors, and pictures are encoded as float32", "export it without that"
        )
    folder = find_checkpoint_folder(model, model_name, needs=PROCESSOR_NAMES)
    processor = PictureProcessor.of(folder)
    on_progress(f"loading {model.path}")
    session = open_session(model.path, provider=provider, threads=threads)
    return PictureModel(session, folder, processor, pixels, vector, stated_task(model) or TASK_OF_PICTURES)
