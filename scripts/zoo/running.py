"""Load a tiny checkpoint with transformers, and run it on inputs of its modality.

Letters of shapes: B batch, S sequence.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from zoo.processors import feature_extractor, image_size
from zoo.tasks import Task
from zoo.vocabulary import special_ids, vocabulary_size

Feeds = dict[str, NDArray[Any]]

_LONGER = 90  # tokens, as many as the longest that a judge asks
_SAME_ANSWER = 1e-3  # of the largest logit: far above any rounding


def load_model(task: Task, folder: Path) -> Any:
    """Load the model in evaluation mode, without a cache unless the task has one.

    Raises:
        ValueError: it was not saved whole.
    """
    (name,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    model, info = getattr(transformers, name).from_pretrained(folder, use_safetensors=True, output_loading_info=True)
    lost = sorted(info["missing_keys"]) + sorted(info["mismatched_keys"])
    if lost:
        raise ValueError(f"weights were lost in saving: {lost[:3]}")
    if not task.has_cache and hasattr(model.config, "use_cache"):
        # FSMT lets words see those behind them where a cache that is empty comes with more than one.
        model.config.use_cache = False
    return model.eval()


def run_once(task: Task, folder: Path) -> None:
    """Run the model twice on two inputs, and, where its graphs will hand on a cache, the way `generate` does.

    Raises:
        ValueError: it gives no tensor, one that is not finite, or two answers to one question; or it has no cache.
        Exception: whatever the model raises.
    """
    model = load_model(task, folder)
    if task.modality == "image":
        feeds = image_feeds(model, 2, *image_size(model.config))
    elif task.modality == "audio":
        feeds = audio_feeds(model, (6400, 6400))
    else:
        feeds = text_feeds(model, (16, 16), 16, decodes=task.name.startswith("text2text-generation"))
    if task.has_cache:
        require_cache(task, folder)
    _require_same(run_model(model, feeds), run_model(model, feeds))
    if task.modality == "text":
        # Windows, chunks and hashes begin behind the first tokens, and so does what is drawn for them.
        longer = text_feeds(model, (_LONGER,) * 2, _LONGER, seed=1, decodes="decoder_input_ids" in feeds)
        try:
            first, second = run_model(model, longer), run_model(model, longer)
        except Exception:  # noqa: BLE001  some take no text as long as this, and refuse it each in its own way
            return
        _require_same(first, second)


def _require_same(first: Feeds, second: Feeds) -> None:
    if not first:
        raise ValueError("the model returns no tensor")
    for name, value in first.items():
        if not np.isfinite(value).all():
            raise ValueError(f"{name} is not finite")
        if not np.array_equal(value, second[name]):
            raise ValueError(f"{name} differs between two runs on the same inputs")


def require_cache(task: Task, folder: Path) -> None:
    """Let the model generate two tokens after prompts of two lengths, with its cache and without.

    Its second step must read one token alone, and so take what its first one left: keys and values, or what a
    recurrence remembers. And its answer must be that without a cache, or there is no reference.

    Raises:
        ValueError: it reads all tokens again, or its answer is another one.
        Exception: whatever the model raises.
    """
    model = load_model(task, folder)
    lengths: list[int] = []

    def note_length(_model: Any, _args: Any, named: Mapping[str, Any]) -> None:
        lengths.append(named["decoder_input_ids" if has_encoder else "input_ids"].shape[1])

    model.register_forward_pre_hook(note_length, with_kwargs=True)
    has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    prompt = text_feeds(model, (16, 9), 16, padding="right" if has_encoder else "left", seed=0)
    prompt = {name: prompt[name] for name in ("input_ids", "attention_mask") if name in prompt}
    _, logits = generate(model, prompt, 2, use_cache=True)
    if lengths[1] != 1:
        raise ValueError("it generates without a cache: no state of one step goes into the next")
    _, at_once = generate(load_model(task, folder), prompt, 2, use_cache=False)
    off = float(np.abs(logits - at_once).max())
    if not off <= _SAME_ANSWER * max(1.0, float(np.abs(at_once).max())):
        raise ValueError("its cache does not stand for the tokens before: PyTorch answers otherwise without it")


def generate(model: Any, prompt: Feeds, length: int, *, use_cache: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Let the model write after a prompt, greedily and not ended by any token.

    Returns:
        The tokens that it writes [B, length], and the logits that they were chosen by [B, length, V] as float32.
    """
    model.generation_config = transformers.GenerationConfig(  # the checkpoint's own could end or sample
        do_sample=False,
        max_new_tokens=length,
        min_new_tokens=length,
        pad_token_id=special_ids(model.config.get_text_config(), model.config)["pad"],
        use_cache=use_cache,
        decoder_start_token_id=start_id(model),
        output_logits=True,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():
        written = model.generate(**{name: torch.from_numpy(array) for name, array in prompt.items()})
    return written.sequences[:, -length:].numpy(), torch.stack(written.logits, 1).float().numpy()


def start_id(model: Any) -> int:
    """Return what every text of a decoder with an encoder begins with; 0 where nothing says it."""
    names = ("decoder_start_token_id", "bos_token_id")
    ids = (getattr(config, name, None) for name in names for config in (model.generation_config, model.config))
    return next((token for token in ids if isinstance(token, int)), 0)


def run_model(model: Any, feeds: Mapping[str, NDArray[Any]], **arguments: Any) -> Feeds:
    """Run a torch model on arrays and return its tensors, in order; those inside of tuples are left out."""
    with torch.inference_mode():
        outputs = model(**{name: torch.from_numpy(value) for name, value in feeds.items()}, **arguments)
    if isinstance(outputs, torch.Tensor):
        return {"output": outputs.numpy()}
    items = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
    return {str(name): value.float().numpy() for name, value in items if isinstance(value, torch.Tensor)}


def text_feeds(
    model: Any,
    lengths: tuple[int, ...],
    sequence: int,
    *,
    padding: str = "right",
    seed: int = 0,
    decodes: bool = False,
) -> Feeds:
    """Return random tokens: as many real ones in a row as `lengths` says, of `sequence` in all.

    With `decodes`, the first tokens of a decoder as well.
    """
    config = model.config
    part = config.get_text_config()
    ids = special_ids(part, config) if vocabulary_size(config) else {"pad": 0, "eos": 1}
    size = vocabulary_size(config) or 256
    generator = np.random.default_rng(seed)
    ordinary = np.array([number for number in range(min(size, 5000)) if number not in ids.values()])
    tokens = generator.choice(ordinary, (len(lengths), sequence)).astype(np.int64)
    position = np.arange(sequence)[None, :]
    own = np.array(lengths)[:, None]
    mask = (position >= sequence - own) if padding == "left" else (position < own)
    last = sequence - 1 if padding == "left" else own - 1
    # Encoder-decoders read a text's end: they need one in every row, and never in the middle.
    tokens = np.where((position == last) & bool(getattr(config, "is_encoder_decoder", False)), ids["eos"], tokens)
    tokens = np.where(mask, tokens, ids["pad"])
    accepted = inspect.signature(model.forward).parameters
    feeds: Feeds = {"input_ids": tokens}
    if "attention_mask" in accepted or any(p.kind == p.VAR_KEYWORD for p in accepted.values()):
        feeds["attention_mask"] = mask.astype(np.int64)
    if "token_type_ids" in accepted and (getattr(part, "type_vocab_size", 0) or 0) > 1:
        feeds["token_type_ids"] = ((position >= sequence // 2) & mask).astype(np.int64)
    if decodes and "decoder_input_ids" in accepted:
        feeds["decoder_input_ids"] = generator.choice(ordinary, (len(lengths), 5)).astype(np.int64)
    return feeds


def image_feeds(model: Any, batch: int, height: int, width: int, *, seed: int = 0) -> Feeds:
    """Return random images: float32 [B, channels, height, width], or what the model takes in their place."""
    generator = np.random.default_rng(seed)
    part = getattr(model.config, "vision_config", None) or model.config
    accepted = inspect.signature(model.forward).parameters
    if "pixel_values" in accepted and "spatial_shapes" not in accepted:
        shape = (batch, getattr(part, "num_channels", None) or 3, height, width)
        return {"pixel_values": generator.standard_normal(shape).astype(np.float32)}
    pictures = list(generator.integers(0, 256, (batch, height, width, 3), dtype=np.uint8))
    inputs = transformers.AutoImageProcessor.from_pretrained(model.name_or_path)(pictures, return_tensors="np")
    return {name: np.asarray(value) for name, value in inputs.items() if name in accepted}


def audio_feeds(model: Any, lengths: tuple[int, ...], *, seed: int = 0) -> Feeds:
    """Return what the feature extractor makes of noise of so many samples, and the first tokens of a decoder."""
    config = model.config
    generator = np.random.default_rng(seed)
    waves = [generator.standard_normal(length).astype(np.float32) for length in lengths]
    extractor = feature_extractor(config)
    # Whisper's encoder takes one length only, to which its extractor pads when left alone.
    padding = "max_length" if hasattr(extractor, "n_samples") or hasattr(extractor, "max_length") else True
    inputs = extractor(waves, sampling_rate=extractor.sampling_rate, padding=padding, return_tensors="np")
    accepted = inspect.signature(model.forward).parameters
    feeds: Feeds = {}
    for name, value in inputs.items():
        if name in accepted:
            array = np.asarray(value)
            feeds[name] = array.astype(np.int64 if array.dtype.kind in "iub" else np.float32)
    if "decoder_input_ids" in accepted:
        size = vocabulary_size(config) or 64
        feeds["decoder_input_ids"] = generator.integers(3, size, (len(lengths), 5))
    return feeds
