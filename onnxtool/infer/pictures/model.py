"""A model of pictures with all that it takes to run files through it: session, image processor and output.

Letters of shapes: N pictures, B batch, H height, W width, P tokens of a page, D width of a vector.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import CheckpointFolder, find_checkpoint_folder
from onnxtool.checkpoint.page_processors import PAGE_INPUTS, PageProcessor
from onnxtool.checkpoint.picture_files import blank_picture, read_picture
from onnxtool.checkpoint.picture_processing import PIXELS, PROCESSOR_NAMES, Feeds, PictureProcessor
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
from onnxtool.model_file.metadata import PLACEHOLDER_KEY, PLACEHOLDERS_KEY, PROCESSOR_KEY
from onnxtool.options import CheckpointName, StrPath, checked
from onnxtool.progress import tell
from onnxtool.reports import TensorInfo, short_repr
from onnxtool.runtime.bounds import Threads
from onnxtool.runtime.providers import Provider
from onnxtool.runtime.session import Session, open_session
from onnxtool.runtime.tokens import open_tokenizer

# What there is of a picture, with its axes: the vector of a dual encoder, or a vector for each token of a page.
_VECTORS = {"image_embeds": 2, "image_features": 2, TOKENS: 3}
# Of 224 x 224 pixels, a picture is 600 KB of float32. A page that is cut is a batch by itself: 13 tiles of 512 x 512
# pixels are 40 MB.
_BATCH_SIZE, _BATCH_OF_PAGES = 16, 1


def takes_pictures(model: ModelFile) -> bool:
    """Whether a graph takes pictures and no text, but for the tokens of pages."""
    names = {info.name for info in model.structure.inputs}
    return PIXELS in names and ("input_ids" not in names or PROCESSOR_KEY in model.metadata)


@short_repr
@dataclass(frozen=True, eq=False)
class PreparedPicture:
    """A picture that is ready to run; it counts as one token where batches are counted in tokens.

    Attributes:
        feeds: what the graph takes, without an axis for the batch.
    """

    feeds: Feeds

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those of its arrays: pictures of the same ones run together."""
        return tuple(array.shape for array in self.feeds.values())

    truncated = False

    def __len__(self) -> int:
        return 1


@short_repr
@dataclass(frozen=True)
class PictureModel:
    """A model that pictures can be run through. Nothing of it changes after loading: threads may share it.

    Attributes:
        session: runs the graph.
        folder: the checkpoint's small files.
        processor: makes of a picture what the graph takes.
        inputs: those of the graph, by name.
        parts: the id that stands for pixels, and how often it does for each tile or patch; None without such tokens.
        vector: the name of the output that is read, float [B, D], or [B, P, D] with a vector for each token.
        by_token: which of them it is.
        task: what the model is for.
    """

    session: Session
    folder: CheckpointFolder
    processor: PictureProcessor | PageProcessor
    inputs: Mapping[str, TensorInfo]
    parts: tuple[int, Fraction] | None
    vector: str
    by_token: bool
    task: str

    @checked
    def prepare(self, path: StrPath) -> PreparedPicture:
        """Return what the graph takes of the picture at `path`.

        Raises:
            InputError: it is no picture, or the graph takes another size.
        """
        return self._fitting(self.processor.prepare(read_picture(Path(path))), str(path))

    def _fitting(self, feeds: Feeds, name: str) -> PreparedPicture:
        """Return arrays of the sizes that the graph takes, or raise an InputError."""
        for info in self.inputs.values():
            if info.name not in feeds:
                raise InputError(
                    f"{self.session.model.path} takes {info.name}, and its image processor gives {', '.join(feeds)}",
                    "the image processor belongs to another model; pass --model_name with the right one",
                )
            wanted, found = info.shape[1:], feeds[info.name].shape
            if len(wanted) != len(found) or any(
                isinstance(size, int) and size != other for size, other in zip(wanted, found, strict=True)
            ):
                raise InputError(
                    f"the image processor makes {info.name} of {list(found)} of {name}, and {self.session.model.path} "
                    f"takes {list(wanted)}",
                    "the image processor belongs to another model; pass --model_name with the right one",
                )
        if self.parts is not None:
            token, count = self.parts
            wanted_tokens, found_tokens = len(feeds[PIXELS]) * count, int((feeds["input_ids"] == token).sum())
            if wanted_tokens != found_tokens:
                raise InputError(
                    f"the processor writes {found_tokens} tokens for what is seen of {name}, and "
                    f"{self.session.model.path} has {wanted_tokens} vectors for it",
                    "the processor belongs to another model; pass --model_name with the right one",
                )
        return PreparedPicture({name: feeds[name] for name in self.inputs})

    def blank(self) -> PreparedPicture:
        """Return a white picture as the image processor makes it.

        Raises:
            InputError: the graph takes another size.
        """
        return self._fitting(self.processor.prepare(blank_picture()), "a blank picture")

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
            batch_size=size, sequence_length=None, max_texts=self._most, max_tokens=self._most, has_mask=True
        )

    @checked
    def tokenize(
        self, texts: StrPath | Iterable[StrPath], *, prompt: str | None = None, task: str | None = None
    ) -> list[PreparedPicture]:
        """Read the pictures at N paths.

        Raises:
            InputError: one is no picture, the graph takes another size, or a prompt or task was passed.
        """
        if prompt is not None or task is not None:
            raise InputError("pictures take no prompt and no task", "leave them out")
        return [self.prepare(path) for path in ((texts,) if isinstance(texts, str | PathLike) else texts)]

    @checked
    def encode(self, paths: StrPath | Iterable[StrPath]) -> DenseVectors | TokenVectors:
        """Return the vectors of N pictures, in their order: float32 [N, D], or those of their tokens.

        Of one, whose path is passed alone, it is float32 [D], or float32 [its tokens, D].

        Raises:
            InputError: there are none, one cannot be read, or the graph takes another size.
            SessionError: onnxruntime fails, or gives what is not a finite number.
        """
        if isinstance(paths, str | PathLike):
            return self.encode((paths,))[0]
        paths = tuple(paths)
        if not paths:
            raise InputError("no pictures to encode", "pass at least one")
        most = self._most
        starts = range(0, len(paths), most)
        return _joined([self.run(self.tokenize(paths[start : start + most])) for start in starts])

    @checked
    def run(self, pictures: Sequence[PreparedPicture]) -> DenseVectors | TokenVectors:
        """Return the vectors of B pictures: float32 [B, D], or those of their tokens.

        Neighbours of one size run together.

        Raises:
            SessionError: onnxruntime fails, or gives what is not a finite number.
        """
        groups = itertools.groupby(pictures, key=lambda picture: picture.shapes)
        return _joined([self._run(list(group)) for _, group in groups])

    def _run(self, pictures: Sequence[PreparedPicture]) -> DenseVectors | TokenVectors:
        """Run pictures of one size; a graph of a fixed batch gets the last one again."""
        missing = (self._fixed_batch or len(pictures)) - len(pictures)
        batch = [*pictures, *[pictures[-1]] * missing]
        feeds: dict[str, NDArray[Any]] = {
            name: np.stack([picture.feeds[name] for picture in batch]).astype(info.dtype, copy=False)
            for name, info in self.inputs.items()
        }
        values = self.session.run(feeds)[self.vector][: len(pictures)].astype(np.float32)
        require_finite(values, "embedding")
        if not self.by_token:
            return values
        rows = list(values)
        if isinstance(self.processor, PageProcessor):
            counted = [self.processor.counted(picture.feeds["input_ids"]) for picture in pictures]
            rows = [row[own] for row, own in zip(rows, counted, strict=True)]
        return TokenVectors.stack(rows)

    @property
    def _most(self) -> int:
        return self._fixed_batch or (_BATCH_SIZE if self.parts is None else _BATCH_OF_PAGES)

    @property
    def _fixed_batch(self) -> int | None:
        size = self.inputs[PIXELS].shape[0]
        return size if isinstance(size, int) else None


def _joined(parts: Sequence[DenseVectors | TokenVectors]) -> DenseVectors | TokenVectors:
    tokens = [part for part in parts if isinstance(part, TokenVectors)]
    if tokens:
        return TokenVectors.concatenate(tokens)
    return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])


@checked
def load_pictures(
    model_path: StrPath,
    *,
    model_name: CheckpointName = None,
    provider: Provider = "auto",
    threads: Threads = 0,
) -> PictureModel:
    """Load the model of pictures at `model_path` with its image processor.

    Args:
        model_path: the ONNX file; preprocessor_config.json is found beside it.
        model_name: the checkpoint's folder, or its id on the hub, in place of the files beside the model.
        provider: `auto`, `cpu` or `cuda`.
        threads: intra-op threads; 0 for one a core.

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
    inputs = {info.name: info for info in model.structure.inputs}
    outputs = {info.name: len(info.shape) for info in model.structure.outputs}
    vector = next((name for name, rank in _VECTORS.items() if outputs.get(name) == rank), None)
    is_cut = PROCESSOR_KEY in model.metadata
    unknown = set(inputs) - ({*PAGE_INPUTS} if is_cut else {PIXELS})
    is_whole = "input_ids" in inputs if is_cut else len(inputs[PIXELS].shape) == 4
    if unknown or vector is None or not is_whole:
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
    processor = (
        PageProcessor.of(folder, model.metadata[PROCESSOR_KEY], open_tokenizer(folder))
        if is_cut
        else PictureProcessor.of(folder)
    )
    parts = _parts(model) if is_cut else None
    tell(f"loading {model.path}")
    session = open_session(model.path, provider=provider, threads=threads)
    task = stated_task(model) or TASK_OF_PICTURES
    return PictureModel(session, folder, processor, inputs, parts, vector, _VECTORS[vector] == 3, task)


def _parts(model: ModelFile) -> tuple[int, Fraction]:
    """Return which token stands for pixels, and how often it does for each tile or patch.

    Raises:
        InputError: the metadata, which is untrusted, does not say it.
    """
    token, count = (model.metadata.get(key, "") for key in (PLACEHOLDER_KEY, PLACEHOLDERS_KEY))
    if not re.fullmatch(r"\d{1,9}", token) or not re.fullmatch(r"[1-9]\d{0,5}(/[1-9]\d{0,5})?", count):
        raise InputError(
            f"the metadata of {model.path} has {PLACEHOLDER_KEY} {token!r} and {PLACEHOLDERS_KEY} {count!r}, and no "
            "numbers",
            "export the model again",
        )
    return int(token), Fraction(count)
