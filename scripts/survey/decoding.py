"""The verdict on graphs with a cache: what they write, token by token, beside what PyTorch's `generate` writes.

Letters of shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from zoo.facts import Facts
from zoo.running import Feeds, generate, load_model, start_id, text_feeds

from survey.judging import difference, first_line, open_session, verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NEW_TOKENS = 8
# Lengths of the prompts in a row, padded on the left.
PROMPTS = (("1 x 8", (8,)), ("3 ragged", (12, 7, 2)), ("2 x 1", (1, 1)), ("1 x 60", (60,)), ("2 x 17", (17, 17)))
PROMPT_INPUTS: tuple[str, ...] = ("input_ids", "attention_mask")
_MASKS_AND_POSITIONS = ("attention_mask", "encoder_attention_mask", "position_ids", "cache_position")


def judge_decoding(folder: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Compare the graphs in `files` with the checkpoint in `folder`; see `survey.judging.judge` for what is returned.

    Args:
        folder: the checkpoint.
        files: `model`, one graph for every step, and `encoder` where the cache begins with what that one gives.
    """
    try:
        sessions = {role: open_session(file) for role, file in files.items()}
    except Exception as error:  # noqa: BLE001  onnxruntime has no public tree of errors
        return verdict(0, 0.0, f"onnxruntime does not load it: {first_line(error)}")
    step = sessions["model"]
    facts = Facts.read(Path(folder))
    asked, largest = 0, 0.0
    for seed, (name, lengths) in enumerate(PROMPTS):
        model = load_model(facts, Path(folder))
        encoder = sessions.get("encoder")
        feeds = text_feeds(model, lengths, max(lengths), padding="left" if encoder is None else "right", seed=seed)
        prompt: Feeds = {key: feeds[key] for key in PROMPT_INPUTS if key in feeds}
        if encoder is not None:
            prompt = filled(encoder, prompt)
        try:
            tokens, expected = generate(model, prompt, _NEW_TOKENS, use_cache=True)
        except Exception:  # noqa: BLE001, S112  what PyTorch does not run is no question
            continue
        try:
            if encoder is None:
                found = follow(step, prompt, tokens)
            else:
                found = follow_encoder(encoder, step, prompt, tokens, start_id(model))
        except Exception as error:  # noqa: BLE001
            return verdict(asked, largest, f"{name}: onnxruntime raises: {first_line(error)}")
        asked += 1
        error_here = difference({"logits": expected}, {"logits": found}, None)
        largest = max(largest, error_here)
        if not error_here <= 1:
            return verdict(asked, largest, f"{name}: differs by {error_here:.3g} times what is allowed")
    return verdict(asked, largest, "" if asked else "no prompt could be asked")


def follow(step: Any, prompt: Feeds, tokens: NDArray[Any]) -> NDArray[Any]:
    """Feed the graph with the prompt and then with `tokens` [B, T], one at a time; return their logits [B, T, V]."""
    batch = len(tokens)
    mask = prompt.get("attention_mask", np.ones_like(prompt["input_ids"]))
    past = _empty_past(step, batch)
    ids = prompt["input_ids"]
    logits = []
    for position in range(tokens.shape[1]):
        outputs = _run(step, ids, mask, past)
        logits.append(outputs["logits"][:, -1])
        past = _as_past(step, outputs)
        ids = tokens[:, position : position + 1]
        mask = np.concatenate([mask, np.ones((batch, 1), dtype=mask.dtype)], axis=1)
    return np.stack(logits, axis=1)


def follow_encoder(encoder: Any, step: Any, prompt: Feeds, tokens: NDArray[Any], start: int) -> NDArray[Any]:
    """Feed the encoder with the prompt, and the decoder with `tokens` [B, T] behind `start`; return logits [B, T, V].

    The encoder is asked once.
    """
    given = {value.name: prompt[value.name] for value in encoder.get_inputs()}
    names = (f"past_key_values{value.name.removeprefix('present')}" for value in encoder.get_outputs())
    cross = dict(zip(names, encoder.run(None, given), strict=True))
    past = {name: value for name, value in _empty_past(step, len(tokens)).items() if name not in cross}
    logits = []
    for position in range(tokens.shape[1]):
        ids = tokens[:, position - 1 : position] if position else np.full_like(tokens[:, :1], start)
        given = {"input_ids": ids, "encoder_attention_mask": prompt["attention_mask"], **cross, **past}
        outputs = dict(zip((value.name for value in step.get_outputs()), step.run(None, given), strict=True))
        logits.append(outputs["logits"][:, -1])
        past = _as_past(step, outputs)
    return np.stack(logits, axis=1)


def filled(encoder: Any, prompt: Feeds) -> Feeds:
    """Fill a prompt with padding up to the length that the encoder is fixed to, if it is."""
    width = next(value.shape[1] for value in encoder.get_inputs() if value.name == "input_ids")
    more = width - prompt["input_ids"].shape[1] if isinstance(width, int) else 0
    return {name: np.pad(array, ((0, 0), (0, more))) for name, array in prompt.items()}


def _run(session: Any, ids: NDArray[Any], mask: NDArray[Any], past: Feeds) -> Feeds:
    length = ids.shape[1]
    given: Feeds = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -length:],
        "cache_position": np.arange(mask.shape[1] - length, mask.shape[1]),
        **past,
    }
    names = [value.name for value in session.get_inputs()]
    answers = session.run(None, {name: given[name] for name in names})
    return dict(zip((value.name for value in session.get_outputs()), answers, strict=True))


def _empty_past(session: Any, batch: int) -> Feeds:
    """Return a cache that holds nothing yet: no keys and values, and states of zeros."""
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
    past: Feeds = {}
    for value in session.get_inputs():
        if value.name in ("input_ids", *_MASKS_AND_POSITIONS):
            continue
        shape = [
            size if isinstance(size, int) else batch if "batch" in str(size) or axis == 0 else 0
            for axis, size in enumerate(value.shape)
        ]
        past[value.name] = np.zeros(shape, types[value.type])
    return past


def _as_past(session: Any, outputs: Feeds) -> Feeds:
    """Rename what a step gave to what the next one takes: `present.0.key` to `past_key_values.0.key`."""
    wanted = {value.name for value in session.get_inputs()}
    past: Feeds = {}
    for name, value in outputs.items():
        rest = name.removeprefix("present")
        past |= {taken: value for taken in (f"past_key_values{rest}", f"past{rest}", name) if taken in wanted}
    return past
