"""A model of pictures with all that it takes to run files through it: session, image processor and output.

Letters of shapes: N pictures, B batch, H height, W width, P tokens of a page, D width of a vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import CheckpointFolder, find_checkpoint_folder
from onnxtool.checkpoint.picture_files import blank_picture, read_picture
from onnxtool.checkpoint.picture_processing import PROCESSOR_NAMES, PictureProcessor, Pixels
from onnxtool.checkpoint.quantized_vectors import VectorType
from onnxtool.checkpoint.sentence_modules import TOKENS
from onnxtool.checkpoint.tasks import TASK_OF_PICTURES
from onnxtool.errors import InputError
from onnxtool.infer.batches import BatchRules
from onnxtool.infer.heads.embeddings import Embeddings
from onnxtool.infer.heads.head import require_finite
from onnxtool.infer.tasks import stated_task
from onnxtool.infer.vectors import DenseVectors, TokenVectors
from onnxtool.model_file import ModelFile
from onnxtool.reports import TensorInfo
from onnxtool.runtime.session import Session, open_session

PIXELS = "pixel_values"
# What there is of a picture, with its axes: the vector of a dual encoder, or a vector for each token of a page.
_VECTORS = {"image_embeds": 2, "image_features": 2, TOKENS: 3}
# Of 224 x 224 pixels, a picture is 600 KB of float32.
_BATCH_SIZE = 16


def takes_pictures(model: ModelFile) -> bool:
    """Whether a graph takes pictures and no text."""
    names = {info.name for info in model.structure.inputs}
    return PIXELS in names and "input_ids" not in names


@dataclass(frozen=True, eq=False)
class PreparedPicture:
    """A picture that is ready to run; it counts as one token where batches are counted in tokens."""

    pixels: Pixels

    truncated = False

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True)
class PictureModel:
    """A model that pictures can be run through. Nothing of it changes after loading: threads may share it.

    Attributes:
        session: runs the graph.
        folder: the checkpoint's small files.
        processor: makes pixels of a picture.
        pixels: the input of the graph.
        vector: the name of the output that is read, float [B, D], or [B, P, D] with a vector for each token.
        by_token: which of them it is.
        task: what the model is for.
    """

    session: Session
    folder: CheckpointFolder
    processor: PictureProcessor
    pixels: TensorInfo
    vector: str
    by_token: bool
    task: str

    def prepare(self, path: Path) -> Pixels:
        """Return the pixels of the picture at `path`: float32 [3, H, W].

        Raises:
            InputError: it is no picture, or the graph takes another size.
        """
        return self._fitting(self.processor.prepare(read_picture(path)), str(path))

    def _fitting(self, pixels: Pixels, name: str) -> Pixels:
        """Return pixels of the size that the graph takes, or raise an InputError."""
        wanted = self.pixels.shape[1:]
        if any(isinstance(size, int) and size != found for size, found in zip(wanted, pixels.shape, strict=True)):
            raise InputError(
                f"the image processor makes pixels of {list(pixels.shape)} of {name}, and {self.session.model.path} "
                f"takes {list(wanted)}",
                "the image processor belongs to another model; pass --model_name with the right one",
            )
        return pixels

    def blank(self) -> PreparedPicture:
        """Return a white picture as the image processor makes it.

        Raises:
            InputError: the graph takes another size.
        """
        return PreparedPicture(self._fitting(self.processor.prepare(blank_picture()), "a blank picture"))

    @property
    def head(self) -> Embeddings:
        """How vectors are read: as the graph gives them."""
        blank = self.run([self.blank()])
        scales = isinstance(blank, np.ndarray) and bool(np.allclose(np.linalg.norm(blank), 1.0, atol=1e-3))
        return Embeddings(before=(), pooling=None, after=(), in_graph=True, normalizes=scales, is_stated=True)

    @property
    def batch_rules(self) -> BatchRules:
        """What the graph takes at once, in pictures."""
        size = self._fixed_batch
        return BatchRules(
            batch_size=size, sequence_length=None, max_texts=size or _BATCH_SIZE, max_tokens=_BATCH_SIZE, has_mask=True
        )

    def tokenize(
        self, texts: Sequence[str], *, prompt: str | None = None, task: str | None = None
    ) -> list[PreparedPicture]:
        """Read the pictures at N paths.

        Raises:
            InputError: one is no picture, the graph takes another size, or a prompt or task was passed.
        """
        if prompt is not None or task is not None:
            raise InputError("pictures take no prompt and no task", "leave them out")
        return [PreparedPicture(self.prepare(Path(text))) for text in texts]

    def encode(self, paths: Sequence[Path]) -> DenseVectors | TokenVectors:
        """Return the vectors of N pictures, in their order: float32 [N, D], or those of their tokens.

        Raises:
            InputError: there are none, one cannot be read, or the graph takes another size.
            SessionError: onnxruntime fails, or gives what is not a finite number.
        """
        if not paths:
            raise InputError("no pictures to encode", "pass at least one")
        most = self._fixed_batch or _BATCH_SIZE
        starts = range(0, len(paths), most)
        return _joined(
            [self.run(self.tokenize([str(path) for path in paths[start : start + most]])) for start in starts]
        )

    def run(self, pictures: Sequence[PreparedPicture]) -> DenseVectors | TokenVectors:
        """Return the vectors of B pictures: float32 [B, D], or those of their tokens.

        Neighbours of one size run together.

        Raises:
            SessionError: onnxruntime fails, or gives what is not a finite number.
        """
        groups = itertools.groupby((picture.pixels for picture in pictures), key=lambda pixels: pixels.shape)
        return _joined([self._run(list(group)) for _, group in groups])

    def _run(self, pixels: Sequence[Pixels]) -> DenseVectors | TokenVectors:
        """Run pictures of one size; a graph of a fixed batch gets the last one again."""
        missing = (self._fixed_batch or len(pixels)) - len(pixels)
        feed: NDArray[Any] = np.stack([*pixels, *[pixels[-1]] * missing]).astype(self.pixels.dtype, copy=False)
        values = self.session.run({PIXELS: feed})[self.vector][: len(pixels)].astype(np.float32)
        require_finite(values, "embedding")
        return TokenVectors.stack(list(values)) if self.by_token else values

    @property
    def _fixed_batch(self) -> int | None:
        size = self.pixels.shape[0]
        return size if isinstance(size, int) else None


def _joined(parts: Sequence[DenseVectors | TokenVectors]) -> DenseVectors | TokenVectors:
    tokens = [part for part in parts if isinstance(part, TokenVectors)]
    if tokens:
        return TokenVectors.concatenate(tokens)
    return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])


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
    vector = next((name for name, rank in _VECTORS.items() if outputs.get(name) == rank), None)
    if others or vector is None or len(pixels.shape) != 4:
        names = ", ".join(
            f"{info.name} {list(info.shape)}" for info in (*model.structure.inputs, *model.structure.outputs)
        )
        raise InputError(
            f"{model.path} is no picture side of a dual encoder or of a retriever of pages: it has {names}",
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
    task = stated_task(model) or TASK_OF_PICTURES
    return PictureModel(session, folder, processor, pixels, vector, _VECTORS[vector] == 3, task)
