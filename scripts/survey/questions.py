"""Questions for exported files, and the answers of PyTorch and onnxruntime, with provider options from onnxtool alone.

Letters of shapes: B batch, S sequence, T tokens that are written, V vocabulary.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from transformers import AutoTokenizer
from zoo.processors import image_size
from zoo.running import Feeds, audio_feeds, generate, image_feeds, load_model, run_model, start_id, text_feeds
from zoo.tasks import Task

from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import DISABLED_OPTIMIZERS_KEY
from onnxtool.runtime.providers import apply_provider
from onnxtool.runtime.session import find_provider

_TEXTS = ("the quick brown fox jumps over the lazy dog", "a graph", "is this model of text at all: yes or no? 42!")
_NEW_TOKENS = 8
# Lengths of the prompts in a row, padded on the left, or on the right for an encoder.
_PROMPTS = (("1 x 8", (8,)), ("3 ragged", (12, 7, 2)), ("2 x 1", (1, 1)), ("1 x 60", (60,)), ("2 x 17", (17, 17)))
# Lengths of the rows, and the side of the padding.
_TEXT_SHAPES: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("2 x 16", (16, 16), "right"),
    ("3 x 23", (23, 23, 23), "right"),
    ("1 x 11", (11,), "right"),
    ("2 x 90", (90, 90), "right"),
    ("ragged right", (24, 17, 9, 3), "right"),
    ("ragged left", (21, 14, 6), "left"),
)
_DTYPES: dict[str, Any] = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(float)": np.float32,
    "tensor(bool)": np.bool_,
}
Axes = dict[str, dict[int, int]]  # by input, those that are numbers


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        feeds: the inputs; of graphs with a cache, the prompt.
        mask: where outputs count: bool [B, S]; None for everywhere.
        tokens: what graphs with a cache read after the prompt, one at a time: int64 [B, T].
        start: what a decoder with an encoder reads first.
    """

    name: str
    feeds: Feeds
    mask: NDArray[np.bool_] | None = None
    tokens: NDArray[Any] | None = None
    start: int = 0


def open_session(path: str, level: str = "ENABLE_ALL", *, provider: str = "cpu", tuned: bool = False) -> Any:
    """Open a graph with onnxruntime as users do, on one thread; `level` is what onnxruntime optimizes in it.

    On another provider than the CPU's, it runs in the precision that the file is for. `tuned`: without the optimizers
    that the file says a session should not run, as onnxtool opens it.

    Raises:
        Exception: onnxruntime does not load it.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    providers: Any = ["CPUExecutionProvider"]
    if provider != "cpu":
        providers = apply_provider(options, find_provider(ModelFile.open(Path(path)), provider)[0], 1)
    disabled = ModelFile.open(Path(path)).metadata.get(DISABLED_OPTIMIZERS_KEY, "").split(",") if tuned else []
    return onnxruntime.InferenceSession(
        path, options, providers=providers, disabled_optimizers=list(filter(None, disabled))
    )


def questions(task: Task, folder: Path, sessions: Mapping[str, Any]) -> Iterator[Question]:
    """Yield what the graphs of a checkpoint are asked: `model`, and `encoder` where one goes before it."""
    model = load_model(task, folder)
    if task.has_cache:
        yield from _prompts(model, sessions.get("encoder"))
        return
    fixed = _fixed_axes(sessions["model"])
    if task.modality == "image":
        candidates = _image_questions(model, fixed)
    elif task.modality == "audio":
        candidates = _audio_questions(model, fixed)
    else:
        candidates = _text_questions(model, folder, fixed)
    for question in candidates:
        # A file may do without these, as tokenizers of most models do; the model has its own value then.
        feeds = {name: value for name, value in question.feeds.items() if name in fixed or name != "token_type_ids"}
        yield replace(question, feeds=feeds)


def ask_pytorch(task: Task, folder: Path, question: Question) -> tuple[Question, Feeds]:
    """Return PyTorch's answer, and the question with the tokens that it wrote.

    The model is a fresh copy each time: running BigBird on a short text changes the model.

    Raises:
        Exception: whatever the model raises.
    """
    model = load_model(task, folder)
    if question.tokens is not None:
        tokens, logits = generate(model, question.feeds, _NEW_TOKENS, use_cache=True)
        return replace(question, tokens=tokens), {"logits": logits}
    uncached = {"use_cache": False} if task.name.startswith("text-generation") else {}
    return question, run_model(model, question.feeds, **uncached)


def ask(sessions: Mapping[str, Any], question: Question) -> Feeds:
    """Return the answer of graphs.

    Raises:
        Exception: onnxruntime does not run it, or a graph takes something that the task does not have.
    """
    session = sessions["model"]
    if question.tokens is not None:
        return {"logits": _write(session, sessions.get("encoder"), question, question.tokens)}
    feeds = question.feeds
    if "input_ids" in feeds:
        feeds = {"inputs": feeds["input_ids"], **feeds}  # Perceiver's name for them
    return {name: value for name, value in _run(session, feeds).items() if isinstance(value, np.ndarray)}


def _run(session: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    inputs = {
        value.name: feeds[value.name].astype(_DTYPES.get(value.type, feeds[value.name].dtype))
        for value in session.get_inputs()
    }
    return dict(zip((value.name for value in session.get_outputs()), session.run(None, inputs), strict=True))


def _write(step: Any, encoder: Any, question: Question, tokens: NDArray[Any]) -> NDArray[Any]:
    """Feed a graph with the prompt and then with `tokens`, one at a time; return their logits [B, T, V].

    With an encoder, which is asked once, the prompt is its own, and the decoder begins with a token.
    """
    prompt = question.feeds
    mask = prompt.get("attention_mask", np.ones_like(prompt["input_ids"]))
    past = _empty_past(step, len(tokens))
    feeds: Feeds = {"encoder_attention_mask": mask}
    ids = prompt["input_ids"]
    if encoder is not None:
        past |= _as_past(step, _run(encoder, prompt))
        ids = np.full_like(tokens[:, :1], question.start)
    logits = []
    for position in range(tokens.shape[1]):
        length = ids.shape[1]
        feeds |= {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -length:],
        }
        outputs = _run(step, {**feeds, **past})
        logits.append(outputs["logits"][:, -1])
        past |= _as_past(step, outputs)
        ids = tokens[:, position : position + 1]
        mask = np.concatenate([mask, np.ones((len(tokens), 1), dtype=mask.dtype)], axis=1)
    return np.stack(logits, axis=1)


def _empty_past(session: Any, batch: int) -> Feeds:
    """Return a cache that holds nothing yet: no keys and values, and states of zeros."""
    past: Feeds = {}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            shape = [size if isinstance(size, int) else batch if "batch" in size else 0 for size in value.shape]
            past[value.name] = np.zeros(shape, _DTYPES[value.type])
    return past


def _as_past(session: Any, outputs: Feeds) -> Feeds:
    """Rename what a step gave to what the next one takes: `present.0.key` to `past_key_values.0.key`."""
    names = {value.name: re.sub("^past(_key_values)?", "present", value.name) for value in session.get_inputs()}
    return {past: outputs[present] for past, present in names.items() if present in outputs}


def _fixed_axes(session: Any) -> Axes:
    return {
        value.name: {axis: size for axis, size in enumerate(value.shape) if isinstance(size, int)}
        for value in session.get_inputs()
    }


def _prompts(model: Any, encoder: Any) -> Iterator[Question]:
    width = _fixed_axes(encoder)["input_ids"].get(1, 0) if encoder is not None else 0
    for seed, (name, lengths) in enumerate(_PROMPTS):
        feeds = text_feeds(model, lengths, max(lengths), padding="left" if encoder is None else "right", seed=seed)
        prompt: Feeds = {key: feeds[key] for key in ("input_ids", "attention_mask") if key in feeds}
        more = max(0, width - max(lengths))  # up to the length that the encoder is fixed to
        prompt = {key: np.pad(array, ((0, 0), (0, more))) for key, array in prompt.items()}
        tokens = np.random.default_rng(seed).choice(feeds["input_ids"].reshape(-1), (len(lengths), _NEW_TOKENS))
        yield Question(name, prompt, tokens=tokens, start=start_id(model))


def _text_questions(model: Any, folder: Path, fixed: Axes) -> Iterator[Question]:
    axes = fixed.get("input_ids") or fixed.get("inputs") or {}
    batch, sequence = axes.get(0), axes.get(1)
    shapes = _TEXT_SHAPES
    if sequence is not None:
        rows = batch or 2
        ragged = (sequence,) * (rows - 1) + (max(1, sequence // 3),)  # a single row is a short one
        shapes = (
            ("full", (sequence,) * rows, "right"),
            *((f"ragged {side}", ragged, side) for side in ("right", "left")),
        )
    for seed, (name, lengths, padding) in enumerate(shapes):
        if batch is not None and len(lengths) != batch:
            continue
        length = sequence or max(lengths)
        feeds = text_feeds(model, lengths, length, padding=padding, seed=seed + 1, decodes="decoder_input_ids" in fixed)
        written = fixed.get("decoder_input_ids", {}).get(1)
        if written is not None:
            feeds["decoder_input_ids"] = np.resize(feeds["decoder_input_ids"], (len(lengths), written))
        position, own = np.arange(length)[None, :], np.array(lengths)[:, None]
        real = position >= length - own if padding == "left" else position < own
        if "attention_mask" in feeds or real.all():  # a model that takes no mask has no padding
            yield Question(name, feeds, real)
    if batch is None and sequence is None:
        yield _real_text(model, folder, decodes="decoder_input_ids" in fixed)


def _real_text(model: Any, folder: Path, *, decodes: bool) -> Question:
    tokens = AutoTokenizer.from_pretrained(folder)(list(_TEXTS), padding=True, return_tensors="np")
    accepted = inspect.signature(model.forward).parameters
    feeds = {name: np.asarray(value, dtype=np.int64) for name, value in tokens.items() if name in accepted}
    sample = text_feeds(model, (4,) * len(_TEXTS), 4, seed=9, decodes=decodes)
    feeds |= {name: value for name, value in sample.items() if name.startswith("decoder")}
    mask = feeds.get("attention_mask")
    return Question("real text", feeds, None if mask is None else mask.astype(bool))


def _image_questions(model: Any, fixed: Axes) -> Iterator[Question]:
    axes = fixed.get("pixel_values", fixed.get("input_ids", {}))
    height, width = image_size(model.config)
    sizes = [("", height, width)]
    if 2 not in axes and 3 not in axes and "pixel_values" in fixed:
        sizes += [("larger ", 2 * height, 2 * width), ("wide ", height, 2 * width), ("odd ", height + 32, width + 32)]
    for name, rows, columns in sizes:
        for batch in (1, 2, 3) if not name else (2,):
            if axes.get(0, batch) == batch:
                feeds = image_feeds(model, batch, rows, columns, seed=batch)
                yield Question(f"{name}{batch} x {rows} x {columns}", feeds)


def _audio_questions(model: Any, fixed: Axes) -> Iterator[Question]:
    axes = next(iter(fixed.values()))
    for lengths in ((6400, 6400), (9600,), (12800, 8000, 4800), (16000, 16000)):
        if axes.get(0, len(lengths)) != len(lengths):
            continue
        feeds = audio_feeds(model, lengths, seed=len(lengths))
        shape = next(iter(feeds.values())).shape
        if all(shape[axis] == size for axis, size in axes.items()):
            yield Question(f"{len(lengths)} x {max(lengths)} samples", feeds)
