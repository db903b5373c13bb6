"""Run image files through a model: image vectors, and images ranked for a text.

Shape letters: N images, B batch, H height, W width, P tokens of a page, D width of a vector.
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
from onnxtool.checkpoint.page_modules import PROCESSOR_NAMES
from onnxtool.checkpoint.picture_files import PictureInput, blank_picture, find_pictures, read_picture
from onnxtool.checkpoint.sentence_modules import TOKENS
from onnxtool.checkpoint.tasks import TASK_OF_PICTURES
from onnxtool.errors import InputError
from onnxtool.infer.answering import MAX_SIMILARITIES, numbers_of
from onnxtool.infer.heads.embeddings import Embeddings
from onnxtool.infer.heads.head import BatchRules, require_finite
from onnxtool.infer.loading import load
from onnxtool.infer.options import InferOptions
from onnxtool.infer.report import InferReport, Ranking, Scored, TextAnswer
from onnxtool.infer.vectors import DenseVectors, TokenVectors, concatenated, cosine_similarities
from onnxtool.model_file import PIXELS, ModelFile, ModelPath
from onnxtool.model_file.metadata import PLACEHOLDER_KEY, PLACEHOLDERS_KEY, PROCESSOR_KEY, WEIGHTS_KEY
from onnxtool.options import CheckpointName, StrPath, checked
from onnxtool.progress import tell
from onnxtool.reports import TensorInfo, short_repr
from onnxtool.runtime.pictures import PAGE_INPUTS, Feeds, PageProcessor, PictureProcessor
from onnxtool.runtime.providers import Provider, Threads
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import open_session
from onnxtool.runtime.signature import index_bounds
from onnxtool.runtime.text_feeds import text_feeds

# Outputs for an image, with their axes: the vector of a dual encoder, or one vector per token of a page.
_VECTORS = {"image_embeds": 2, "image_features": 2, TOKENS: 3}
# An image of 224 x 224 pixels takes 600 KB in float32. A tiled page is a batch by itself: 13 tiles of 512 x 512 pixels
# take 40 MB.
_BATCH_SIZE, _BATCH_OF_PAGES = 16, 1


@short_repr
@dataclass(frozen=True, eq=False)
class PreparedPicture:
    """A preprocessed image; it counts as one token in token-based batching.

    Attributes:
        feeds: the graph's inputs, without a batch axis.
    """

    feeds: Feeds

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its arrays: images with the same shapes are batched."""
        return tuple(array.shape for array in self.feeds.values())

    truncated = False

    def __len__(self) -> int:
        return 1


@short_repr
@dataclass(frozen=True)
class PictureModel:
    """A model that runs on images. It does not change after loading, so threads may share it.

    Attributes:
        session: runs the graph.
        folder: the checkpoint's small files.
        processor: converts an image to the graph's inputs.
        inputs: the graph's inputs, by name.
        parts: the id of the pixel placeholder, and its count per tile or patch; None without such tokens.
        vector: the name of the output to read, float [B, D], or [B, P, D] with one vector per token.
        by_token: whether it has one vector per token.
        task: the model's task.
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
        """Return the graph's inputs for the image at `path`.

        Raises:
            InputError: it is not an image, or the graph takes another size.
        """
        return self._fitting(self.processor.prepare(read_picture(Path(path))), str(path))

    def _fitting(self, feeds: Feeds, name: str) -> PreparedPicture:
        """Return arrays with the sizes that the graph takes, or raise an InputError."""
        for info in self.inputs.values():
            if info.name not in feeds:
                raise InputError(
                    f"{self.session.model.path} takes {info.name}, and its image processor gives {', '.join(feeds)}",
                    "the image processor belongs to another model; pass --model_name with the right one",
                )
            expected, actual = info.shape[1:], feeds[info.name].shape
            if len(expected) != len(actual) or any(
                isinstance(size, int) and size != other for size, other in zip(expected, actual, strict=True)
            ):
                raise InputError(
                    f"the image processor makes {info.name} of {list(actual)} of {name}, and {self.session.model.path} "
                    f"takes {list(expected)}",
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
        """Return a white image after preprocessing.

        Raises:
            InputError: the graph takes another size.
        """
        return self._fitting(self.processor.prepare(blank_picture()), "a blank image")

    @property
    def head(self) -> Embeddings:
        """The interpretation of vectors: as returned by the graph."""
        blank = self.run([self.blank()])
        scales = isinstance(blank, np.ndarray) and bool(np.allclose(np.linalg.norm(blank), 1.0, atol=1e-3))
        return Embeddings(before=(), pooling=None, after=(), in_graph=True, normalizes=scales, is_stated=True)

    @property
    def batch_rules(self) -> BatchRules:
        """The graph's batching rules, in images."""
        size = self._fixed_batch
        return BatchRules(
            batch_size=size, sequence_length=None, max_texts=self._most, max_tokens=self._most, has_mask=True
        )

    @checked
    def encode(self, paths: StrPath | Iterable[StrPath]) -> DenseVectors | TokenVectors:
        """Return the vectors of N images, in order: float32 [N, D], or the vectors of their tokens.

        For a single path, it is float32 [D], or float32 [its tokens, D].

        Raises:
            InputError: there are none, one cannot be read, or the graph takes another size.
            SessionError: onnxruntime fails, or returns a value that is not finite.
        """
        if isinstance(paths, str | PathLike):
            return self.encode((paths,))[0]
        paths = tuple(paths)
        if not paths:
            raise InputError("no images to encode", "pass at least one")
        batches = (paths[start : start + self._most] for start in range(0, len(paths), self._most))
        joined: DenseVectors | TokenVectors = concatenated(
            [self.run([self.prepare(path) for path in batch]) for batch in batches]
        )
        return joined

    @checked
    def run(self, pictures: Sequence[PreparedPicture]) -> DenseVectors | TokenVectors:
        """Return the vectors of B images: float32 [B, D], or the vectors of their tokens.

        Neighbouring images of the same size are batched.

        Raises:
            SessionError: onnxruntime fails, or returns a value that is not finite.
        """
        groups = itertools.groupby(pictures, key=lambda picture: picture.shapes)
        joined: DenseVectors | TokenVectors = concatenated([self._run(list(group)) for _, group in groups])
        return joined

    def _run(self, pictures: Sequence[PreparedPicture]) -> DenseVectors | TokenVectors:
        """Run images of one size; a graph with a fixed batch size is filled up with the last one."""
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


@checked
def load_pictures(
    model_path: ModelPath,
    *,
    model_name: CheckpointName = None,
    provider: Provider = "auto",
    threads: Threads = 0,
) -> PictureModel:
    """Load the image model at `model_path` with its image processor.

    Args:
        model_path: the ONNX file, or an open one; preprocessor_config.json is found next to it.
        model_name: the checkpoint's folder or hub id, instead of the files next to the model.
        provider: `auto`, `cpu` or `cuda`.
        threads: intra-op threads; 0 for one per core.

    Raises:
        InputError: the graph does not take images by themselves, returns no vector, or its image processor is
            unsupported.
        ModelFileError: the file or its external data cannot be used.
        ProviderError: the provider cannot run here.
        SessionError: onnxruntime cannot load the model.
    """
    model = ModelFile.open(model_path)
    if not model.takes_pictures:
        names = ", ".join(info.name for info in model.structure.inputs)
        raise InputError(
            f"{model.path} takes {names}, and no images alone",
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
            f"{model.path} is no image side of a dual encoder or of a retriever of pages: it has {names}",
            "run it with onnxtool.open_session and inputs of your own",
        )
    folder = find_checkpoint_folder(model, model_name, needs=PROCESSOR_NAMES)
    tell("loading transformers, which prepares the images")
    processor = PageProcessor.of(folder, model.metadata[PROCESSOR_KEY]) if is_cut else PictureProcessor.of(folder)
    parts = _parts(model) if is_cut else None
    tell(f"loading {model.path}")
    session = open_session(model, provider=provider, threads=threads)
    task = model.stated_task or TASK_OF_PICTURES
    return PictureModel(session, folder, processor, inputs, parts, vector, _VECTORS[vector] == 3, task)


def _parts(model: ModelFile) -> tuple[int, Fraction]:
    """Return the placeholder token for pixels, and its count per tile or patch.

    Raises:
        InputError: the metadata, which is untrusted, does not state it.
    """
    token, count = (model.metadata.get(key, "") for key in (PLACEHOLDER_KEY, PLACEHOLDERS_KEY))
    if not re.fullmatch(r"\d{1,9}", token) or not re.fullmatch(r"[1-9]\d{0,5}(/[1-9]\d{0,5})?", count):
        raise InputError(
            f"the metadata of {model.path} has {PLACEHOLDER_KEY} {token!r} and {PLACEHOLDERS_KEY} {count!r}, and no "
            "numbers",
            "export the model again",
        )
    return int(token), Fraction(count)


def answer_pictures(file: ModelFile, options: InferOptions) -> InferReport:
    """Run the images of `options` through a model, and rank them by cosine if there is a query.

    Raises:
        InputError: an option is not for images, there are none, or one cannot be read.
        OnnxtoolError: as for `load_pictures`, or for `load` of the query's model.
    """
    _refuse_unused(options)
    model = load_pictures(
        file,
        model_name=options.model_name,
        provider=options.provider,
        threads=options.threads,
    )
    pictures = [PictureInput(path) for path in options.images]
    if options.input_path is not None:
        pictures += find_pictures(options.input_path)
    if not pictures:
        raise InputError("no images to run", "pass at least one --image, or --input with a folder or list of them")
    query = None if options.query is None else encode_query(model, options.query, options)
    tell(f"running {len(pictures)} images")
    vectors = model.encode([picture.path for picture in pictures])
    return _report(model, options.query, pictures, vectors, query)


def _report(
    model: PictureModel,
    query: str | None,
    pictures: Sequence[PictureInput],
    vectors: DenseVectors | TokenVectors,
    query_vectors: DenseVectors | TokenVectors | None,
) -> InferReport:
    similarities: tuple[tuple[float, ...], ...] = ()
    scores: list[float] = []
    notes: tuple[str, ...] = ()
    if query_vectors is not None:
        scores = _scores(query_vectors, vectors)
    elif isinstance(vectors, np.ndarray) and 1 < len(pictures) <= MAX_SIMILARITIES:
        similarities = tuple(tuple(float(value) for value in row) for row in cosine_similarities(vectors))
    elif isinstance(vectors, np.ndarray) and len(pictures) > MAX_SIMILARITIES:
        notes = (f"no similarities: {len(pictures)} images, and pairs are compared up to {MAX_SIMILARITIES}",)
    label = "maxsim" if model.by_token else "similarity"
    answers = tuple(
        TextAnswer(
            text=str(picture.path),
            num_tokens=0,
            truncated=False,
            candidates=(Scored(label, scores[place]),) if scores else (),
            outputs={model.vector: own.shape},
            id=picture.id,
            query=query,
            vector=() if model.by_token else numbers_of(own),
            token_vectors=tuple(map(numbers_of, own)) if model.by_token and not scores else (),
        )
        for place, picture in enumerate(pictures)
        for own in [vectors.row(place) if isinstance(vectors, TokenVectors) else vectors[place]]
    )
    order = tuple(sorted(range(len(scores)), key=lambda place: -scores[place]))
    return InferReport(
        model=str(model.session.model.path),
        provider=model.session.provider,
        task=model.task,
        kind="scores" if scores else "token_vectors" if model.by_token else "similarities",
        answers=answers,
        similarities=similarities,
        rankings=(Ranking(query, order),) if scores else (),
        notes=(*model.session.notes, *notes),
    )


def _scores(query: DenseVectors | TokenVectors, pictures: DenseVectors | TokenVectors) -> list[float]:
    """Return the cosine of each image with the query, or its MaxSim if tokens have vectors."""
    if isinstance(query, TokenVectors) and isinstance(pictures, TokenVectors):
        return [float(score) for score in query.max_similarities(pictures)[0]]
    return [float(score) for score in cosine_similarities(np.concatenate([query, pictures]))[0, 1:]]


def _refuse_unused(options: InferOptions) -> None:
    """Refuse options that are only for texts.

    Raises:
        InputError: it was passed.
    """
    text_options = {"--text": options.texts, "--top_k": options.top_k}
    names = [*(name for name, value in text_options.items() if value), *options.given_for_texts]
    if options.query is None:
        names += [name for name, value in (("--prompt", options.prompt), ("--text_model", options.text_model)) if value]
    if names:
        raise InputError(
            f"{options.model_path} takes images, and {' and '.join(names)} was passed, which is for texts",
            "pass --image, and --query with --text_model to rank images for a text",
        )


def encode_query(model: PictureModel, query: str, options: InferOptions) -> DenseVectors | TokenVectors:
    """Return the vector of `query`, float32 [1, D], or the vectors of its tokens.

    Raises:
        InputError: the text model is missing, returns other vectors, or comes from another checkpoint.
        OnnxtoolError: it cannot be loaded or run.
    """
    path = options.text_model
    if path is None:
        raise InputError(
            "--query ranks images for a text, and the model of texts is not named",
            "export it from the same checkpoint (--task late-interaction of a retriever of pages, else --task "
            "sentence-similarity), and pass it with --text_model",
        )
    texts = ModelFile.open(path)
    if texts.metadata.get(WEIGHTS_KEY) != model.session.model.metadata.get(WEIGHTS_KEY):
        raise InputError(
            f"{path} and {model.session.model.path} come from different weights, and their vectors are of no common "
            "space",
            "export both sides from one checkpoint",
        )
    encode = _encode_tokens if model.by_token else _encode_text
    vectors = encode(texts, query, options)
    width = next(info.shape[-1] for info in model.session.model.structure.outputs if info.name == model.vector)
    array = vectors.vectors if isinstance(vectors, TokenVectors) else vectors
    if array.dtype != np.float32 or array.shape[1:] != (width,):
        raise InputError(
            f"{path} gives other vectors than {model.session.model.path}, of {width} numbers of float32",
            "take both sides from one checkpoint",
        )
    return vectors


def _encode_text(model: ModelFile, query: str, options: InferOptions) -> DenseVectors | TokenVectors:
    texts = load(model, provider=options.provider, threads=options.threads)
    return np.asarray(texts.encode([query], prompt=options.prompt, task="query"))


def _encode_tokens(texts: ModelFile, query: str, options: InferOptions) -> DenseVectors | TokenVectors:
    """Encode a query for pages: formatted by the checkpoint's processor, with one vector per token."""
    path = texts.path
    if options.prompt is not None:
        raise InputError("queries for pages are written as the checkpoint's processor does", "leave --prompt out")
    if [len(info.shape) for info in texts.structure.outputs if info.name == TOKENS] != [3]:
        raise InputError(f"{path} gives no {TOKENS}", "export it with --task late-interaction from the same checkpoint")
    arrays = PageProcessor.of(find_checkpoint_folder(texts)).read_query(query)
    known, largest = index_bounds(texts).get("input_ids"), arrays["input_ids"].max()
    if known is not None and largest >= known:
        raise InputError(
            f"the tokenizer gives token {largest}, and {path} knows {known} tokens",
            "the tokenizer belongs to another model; export the model again",
        )
    tell(f"loading {path}")
    session = open_session(texts, provider=options.provider, threads=options.threads)
    values = session.run(text_feeds(texts, arrays))[TOKENS][0].astype(np.float32)
    require_finite(values, "vector of a token")
    return TokenVectors.stack([values])
