"""The independent verdict on an exported file: PyTorch and onnxruntime on the same inputs, and nothing of onnxtool.

Letters of shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from zoo.facts import Facts
from zoo.processors import image_size
from zoo.running import Feeds, audio_feeds, image_feeds, load_model, run_model, text_feeds
from zoo.tasks import find_task

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOLERANCE = 1e-4  # of the largest value of an output, or of 1 where all are smaller
_TEXTS = ("the quick brown fox jumps over the lazy dog", "a graph", "is this model of text at all: yes or no? 42!")


@dataclass(frozen=True)
class Case:
    """One question.

    Attributes:
        mask: where outputs count: bool [B, S]; None for everywhere.
    """

    name: str
    feeds: Feeds
    mask: NDArray[np.bool_] | None = None

    def without(self, names: set[str] | frozenset[str]) -> Case:
        """Return the same question without some of its inputs, for which the model has its own value then."""
        return replace(self, feeds={name: value for name, value in self.feeds.items() if name not in names})


# A file may do without these, as tokenizers of most models do.
_OPTIONAL = frozenset({"token_type_ids"})


def judge(folder: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Compare graphs with the checkpoint in `folder`.

    Args:
        folder: the checkpoint.
        files: `model`, one graph.

    Returns:
        `right` (None where the file cannot be asked), `cases` (how many were asked), `error` (the largest, in parts of
        what is allowed), and `reason`, empty where it is right.
    """
    facts = Facts.read(Path(folder))
    try:
        session = open_session(files["model"])
    except Exception as error:  # noqa: BLE001  onnxruntime has no public tree of errors
        return verdict(0, 0.0, f"onnxruntime does not load it: {first_line(error)}")
    asked, largest = 0, 0.0
    fixed = fixed_axes(session)
    model = load_model(facts, Path(folder))
    for asked_case in cases_for(facts, model, Path(folder), fixed):
        case = asked_case.without(_OPTIONAL - set(fixed))
        # A fresh copy each time: running BigBird on a short text changes it for good.
        try:
            expected = run_model(load_model(facts, Path(folder)), case.feeds, **_arguments(facts))
        except Exception:  # noqa: BLE001, S112  what PyTorch does not run is no question
            continue
        try:
            found = run_session(session, case.feeds)
        except UnknownInputError as error:
            return {**verdict(asked, largest, str(error)), "right": None}
        except Exception as error:  # noqa: BLE001
            return verdict(asked, largest, f"{case.name}: onnxruntime raises: {first_line(error)}")
        distance = difference(expected, found, case.mask)
        asked += 1
        largest = max(largest, distance)
        if not distance <= 1:
            return verdict(asked, largest, f"{case.name}: differs by {distance:.3g} times what is allowed")
    if not asked:
        return verdict(0, 0.0, "no case could be asked")
    return verdict(asked, largest, "")


def open_session(file: str) -> Any:
    """Open a file with onnxruntime, on one thread.

    Raises:
        Exception: onnxruntime does not load it.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


class UnknownInputError(Exception):
    """A file takes something that nobody who has this task has."""


def fixed_axes(session: Any) -> dict[str, dict[int, int]]:
    """Return the axes of each input that are numbers."""
    return {
        value.name: {axis: size for axis, size in enumerate(value.shape) if isinstance(size, int)}
        for value in session.get_inputs()
    }


def difference(
    expected: Mapping[str, NDArray[Any]], found: Mapping[str, NDArray[Any]], mask: NDArray[np.bool_] | None
) -> float:
    """Return the largest difference of any output, in parts of what is allowed; infinite for another shape."""
    pairs = [(expected[name], value) for name, value in found.items() if name in expected]
    pairs = pairs or [(next(iter(expected.values())), next(iter(found.values())))]
    largest = 0.0
    for reference, value in pairs:
        if reference.shape != value.shape:
            return float("inf")
        ours, theirs = value.astype(np.float64), reference.astype(np.float64)
        if mask is not None and reference.shape[:2] == mask.shape:
            ours, theirs = ours[mask], theirs[mask]
        if not ours.size:
            continue
        if not np.isfinite(ours).all():
            return float("inf")
        allowed = TOLERANCE * max(1.0, float(np.abs(theirs).max()))
        largest = max(largest, float(np.abs(ours - theirs).max()) / allowed)
    return largest


def first_line(error: BaseException) -> str:
    """Return the first line of a message, no longer than a table can bear."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def verdict(cases: int, error: float, reason: str) -> dict[str, Any]:
    """Return what a judge returns."""
    return {"right": not reason, "cases": cases, "error": min(error, 1e300), "reason": reason}


def _arguments(facts: Facts) -> dict[str, Any]:
    return {"use_cache": False} if facts.task.startswith("text-generation") else {}


def run_session(session: Any, feeds: Feeds) -> Feeds:
    """Run a file on what it takes of `feeds`.

    Raises:
        UnknownInputError: it takes something that the task does not have.
        Exception: onnxruntime does not run it.
    """
    wanted = {}
    for value in session.get_inputs():
        array = _input(value.name, feeds)
        wanted[value.name] = array.astype(_NUMPY.get(value.type, array.dtype))
    names = [value.name for value in session.get_outputs()]
    return {
        name: value
        for name, value in zip(names, session.run(None, wanted), strict=True)
        if isinstance(value, np.ndarray)
    }


_NUMPY: dict[str, Any] = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(float)": np.float32,
    "tensor(bool)": np.bool_,
}


def _input(name: str, feeds: Feeds) -> NDArray[Any]:
    """Return the array for an input that an exporter may have added or called otherwise.

    Raises:
        UnknownInputError: there is none.
    """
    if name in feeds:
        return feeds[name]
    if name == "position_ids":
        positions: NDArray[Any] = np.maximum(np.cumsum(feeds["attention_mask"], axis=1) - 1, 0)
        return positions
    if name == "decoder_attention_mask":
        return np.ones_like(feeds["decoder_input_ids"])
    if name in ("attention_mask", "token_type_ids"):
        return np.full_like(feeds["input_ids"], int(name == "attention_mask"))
    if name == "global_attention_mask":
        return np.zeros_like(feeds["input_ids"])
    if name == "bbox":
        return np.zeros((*feeds["input_ids"].shape, 4), dtype=np.int64)
    main = next(iter(feeds.values()))
    if name == "inputs" or (name in _SOUNDS_AND_PICTURES and main.dtype.kind == "f"):
        return main
    raise UnknownInputError(f"the file asks for an input called {name}, which the task does not have")


_SOUNDS_AND_PICTURES = frozenset({"input_values", "input_features", "pixel_values"})


def cases_for(facts: Facts, model: Any, folder: Path, fixed: dict[str, dict[int, int]]) -> Iterator[Case]:
    """Yield what a file with these fixed axes is asked."""
    modality = find_task(facts.task).modality
    if modality == "image":
        yield from _image_cases(model, fixed)
    elif modality == "audio":
        yield from _audio_cases(model, fixed)
    else:
        yield from _text_cases(model, folder, fixed)


def _text_cases(model: Any, folder: Path, fixed: dict[str, dict[int, int]]) -> Iterator[Case]:
    axes = fixed.get("input_ids") or fixed.get("inputs") or {}
    batch, sequence = axes.get(0), axes.get(1)
    # Lengths of the rows, the sequence, and the side of the padding.
    shapes: tuple[tuple[str, tuple[int, ...], int, str], ...] = (
        ("2 x 16", (16, 16), 16, "right"),
        ("3 x 23", (23, 23, 23), 23, "right"),
        ("1 x 11", (11,), 11, "right"),
        ("2 x 90", (90, 90), 90, "right"),
        ("ragged right", (24, 17, 9, 3), 24, "right"),
        ("ragged left", (21, 14, 6), 21, "left"),
    )
    if sequence is not None:
        rows = batch or 2
        ragged = (sequence,) * (rows - 1) + (max(1, sequence // 3),)  # a single row is a short one
        shapes = (
            ("full", (sequence,) * rows, sequence, "right"),
            ("ragged right", ragged, sequence, "right"),
            ("ragged left", ragged, sequence, "left"),
        )
    for seed, (name, lengths, length, padding) in enumerate(shapes):
        if batch is not None and len(lengths) != batch:
            continue
        feeds = text_feeds(model, lengths, length, padding=padding, seed=seed + 1, decodes="decoder_input_ids" in fixed)
        written = fixed.get("decoder_input_ids", {}).get(1)
        if written is not None:
            feeds["decoder_input_ids"] = np.resize(feeds["decoder_input_ids"], (len(lengths), written))
        mask = feeds.get("attention_mask")
        position = np.arange(length)[None, :]
        own = np.array(lengths)[:, None]
        real = position >= length - own if padding == "left" else position < own
        if mask is None and not real.all():
            continue  # a model that takes no mask has no padding
        yield Case(name, feeds, real)
    if batch is None and sequence is None:
        yield _real_text(model, folder, decodes="decoder_input_ids" in fixed)


def _real_text(model: Any, folder: Path, *, decodes: bool) -> Case:
    import inspect

    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(list(_TEXTS), padding=True, return_tensors="np")
    accepted = inspect.signature(model.forward).parameters
    feeds = {name: np.asarray(value, dtype=np.int64) for name, value in tokens.items() if name in accepted}
    sample = text_feeds(model, (4,) * len(_TEXTS), 4, seed=9, decodes=decodes)
    feeds |= {name: value for name, value in sample.items() if name.startswith("decoder")}
    mask = feeds.get("attention_mask")
    return Case("real text", feeds, None if mask is None else mask.astype(bool))


def _image_cases(model: Any, fixed: dict[str, dict[int, int]]) -> Iterator[Case]:
    axes = fixed.get("pixel_values", fixed.get("input_ids", {}))
    height, width = image_size(model.config)
    sizes = [("", height, width)]
    if 2 not in axes and 3 not in axes and "pixel_values" in fixed:
        sizes += [("larger ", 2 * height, 2 * width), ("wide ", height, 2 * width), ("odd ", height + 32, width + 32)]
    for name, rows, columns in sizes:
        for batch in (1, 2, 3) if not name else (2,):
            if axes.get(0, batch) == batch:
                feeds = image_feeds(model, batch, rows, columns, seed=batch)
                yield Case(f"{name}{batch} x {rows} x {columns}", feeds)


def _audio_cases(model: Any, fixed: dict[str, dict[int, int]]) -> Iterator[Case]:
    axes = next(iter(fixed.values()))
    for lengths in ((6400, 6400), (9600,), (12800, 8000, 4800), (16000, 16000)):
        if axes.get(0, len(lengths)) != len(lengths):
            continue
        feeds = audio_feeds(model, lengths, seed=len(lengths))
        shape = next(iter(feeds.values())).shape
        if all(shape[axis] == size for axis, size in axes.items()):
            yield Case(f"{len(lengths)} x {max(lengths)} samples", feeds)
