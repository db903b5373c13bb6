"""Retrievers of pages as images (ColPali and similar): map a page or a query to a vector per token.

A page is prepared by the retriever's processor: pixels, and a token for each part of the page.

Shape letters: B batch, S tokens, P parts of a page or their tokens, T tiles of a page, N its patches,
K tokens made from these, W vector width.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.picture_files import picture_of
from onnxtool.checkpoint.sentence_modules import TOKENS
from onnxtool.checkpoint.tasks import LATE_INTERACTION, TASK_OF_PICTURES
from onnxtool.errors import ExportError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.modalities.image import draw_picture
from onnxtool.export.modalities.modality import (
    BATCH,
    PROCESSOR_FILE,
    SEQUENCE,
    Axis,
    Feeds,
    Sizes,
    disagreement,
    prepare,
    run,
    scaled,
    usual_sizes,
)
from onnxtool.export.signature import run_own_forward, run_torch_tensors
from onnxtool.model_file import PIXELS
from onnxtool.model_file.metadata import PLACEHOLDER_KEY, PLACEHOLDERS_KEY, PROCESSOR_KEY
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.pictures import GRID
from onnxtool.runtime.recipes import GIVEN, MASK, NORMAL, Recipe

_IDS, _MASK = "input_ids", "attention_mask"
# Several aspect ratios, as retrievers cut each differently. A tile takes a real model about a second, so there are only
# a few across all cases.
_PAGES = ((640, 480), (120, 30), (40, 120))


@dataclass(frozen=True)
class PageInputs:
    """Prepared pages.

    Attributes:
        processor: the checkpoint's own processor.
        prepared: its result for one page: [1, …] each.
        image_id: the id of the token that represents a part of a page.
        unit: height and width in patches of a square that becomes one token; 1 if pages are split into tiles.
    """

    processor: Any
    prepared: Mapping[str, NDArray[Any]]
    image_id: int
    unit: int

    @classmethod
    def of(cls, processor: Any, accepted: Sequence[str], model: Any, image_id: int) -> PageInputs:
        """Determine what the processor provides for a page; `accepted` are the parameters of the model's forward.

        Raises:
            CheckpointError: the processor does not run.
            ExportError: it does not provide what the model takes.
        """
        offered = _prepare(processor, [_PAGES[0]])
        if any(name not in offered for name in accepted) or not (offered[_IDS] == image_id).any():
            raise disagreement(model, accepted, "processor", offered)
        unit = processor.image_processor.merge_size if GRID in offered else 1
        return cls(processor, {name: offered[name] for name in accepted}, image_id, unit)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """B, S and P; fixing any of them would make a file useless."""
        parts, step = "num_patches" if GRID in self.prepared else "num_tiles", self.unit**2
        return (
            Axis(BATCH, 2, 3, may_fail=False),
            Axis(SEQUENCE, 16, 19, may_fail=False),
            Axis(parts, 2 * step, 3 * step, may_fail=False),
        )

    @property
    def metadata(self) -> dict[str, str]:
        """File metadata about its inputs: the architecture, the token that represents pixels, and how often it repeats.

        `onnxtool.image_tokens` is the number of these tokens per P.
        """
        count = int((self.prepared[_IDS] == self.image_id).sum())
        return {
            PROCESSOR_KEY: type(self.processor).__name__,
            PLACEHOLDER_KEY: str(self.image_id),
            PLACEHOLDERS_KEY: str(Fraction(count, self.prepared[PIXELS].shape[1])),
        }

    def feeds(self, sizes: Sizes, *, seed: int = 0) -> Feeds:
        """Make noise, and page tokens in any order."""
        generator = np.random.default_rng(seed)
        batch, length, parts = (sizes[axis.name] for axis in self.axes)
        feeds: Feeds = {}
        for name, array in self.prepared.items():
            if name == PIXELS:
                feeds[name] = generator.standard_normal((batch, parts, *array.shape[2:])).astype(array.dtype)
            elif name == GRID:
                feeds[name] = np.array([[1, self.unit, parts // self.unit]] * batch, array.dtype)
            else:
                feeds[name] = generator.choice(array.reshape(-1), (batch, length))
        return feeds

    def sample(self, fixed: Sizes) -> Feeds:
        """Return noise whose last row is smaller than the others."""
        self._require_open(fixed)
        return self._ragged(usual_sizes(self), seed=1)

    def cases(self, fixed: Sizes) -> list[Case]:
        """Real pages with several aspect ratios, alone and batched, and noise with few and many parts."""
        self._require_open(fixed)
        batch, length, parts = (axis.name for axis in self.axes)
        usual, step = usual_sizes(self), self.unit**2
        return [
            self._page(_PAGES[:1]),
            self._page(_PAGES[1:]),
            Case("one part", self.feeds({batch: 1, length: 1, parts: step}), None),
            Case("many tokens, few parts", self.feeds({batch: 2, length: 300, parts: step}, seed=2), None),
            Case("few tokens, many parts", self.feeds({batch: 1, length: 7, parts: 5 * step}, seed=4), None),
            Case("little contrast", scaled(self.feeds(usual, seed=5), 0.1), None),
            Case("strong contrast", scaled(self.feeds(usual, seed=6), 3.0), None),
            Case("pages of several sizes, noise", self._ragged(usual | {batch: 3, parts: 3 * step}, seed=3), None),
        ]

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """Pixels, masks, and the tokens and sizes of a page, which cannot be random."""
        kinds = {PIXELS: NORMAL, _MASK: MASK}
        return {name: Recipe(kinds.get(name, GIVEN)) for name in self.prepared}

    def _page(self, pages: Sequence[tuple[int, int]]) -> Case:
        feeds = _prepare(self.processor, pages)
        shown = " and ".join(f"{height} x {width}" for height, width in pages)
        return Case(f"pages of {shown}", {name: feeds[name] for name in self.prepared}, None)

    def pages(self) -> Feeds:
        """Return the processor's full result for pages of several sizes, padded to one."""
        return _prepare(self.processor, _PAGES[1:])

    def _ragged(self, sizes: Sizes, seed: int) -> Feeds:
        feeds = self.feeds(sizes, seed=seed)
        feeds[_MASK] = np.ones_like(feeds[_MASK])
        feeds[_MASK][-1, -5:] = 0
        if GRID in feeds:
            feeds[GRID][-1, 2] -= self.unit
        return feeds

    def _require_open(self, fixed: Sizes) -> None:
        if fixed:
            raise ExportError(
                f"a file with {', '.join(f'{axis} fixed to {size}' for axis, size in fixed.items())} would take pages "
                "of one size",
                "pass --exporter auto, which tries those that leave sizes open",
            )


def _prepare(processor: Any, pages: Sequence[tuple[int, int]]) -> Feeds:
    pictures = [picture_of(draw_picture(*size)) for size in pages]
    return prepare(lambda: processor.process_images(images=pictures, return_tensors="pt"), "processor")


# The one page retriever class of transformers 5.23 whose pages all have the same tokens.
_FIXED_TOKENS = "ColPaliForRetrieval"
_REFUSED = {
    "NeoMMEForRetrieval": "transformers prepares its pages only with torchvision, whose pixels are not computed here, "
    "and writes its queries by a chat template"
}
_TASKS = (TASK_OF_PICTURES, LATE_INTERACTION)
_PICTURE = (64, 48, 3)
_TOLERANCE = 1e-4  # above float32 rounding, and far below the effect of a different formula


def restrict_to_pages(model: Any, checkpoint: Checkpoint) -> Any:
    """Replace the forward of a page retriever with one for pages or one for queries.

    A ColPali page is only `pixel_values`, float [B, 3, H, W] to [B, P, W]: the other tokens are always the same and
    become constants. For other retrievers, a page is the processor's result, mapped to [B, S, W], zeros for padding.
    A query is the tokenizer's result, [B, S], mapped to [B, S, W] in the same way.

    Raises:
        CheckpointError: the checkpoint has no processor, or it does not run.
        ExportError: the model is not supported, or the task is another.
    """
    if checkpoint.architecture not in (_FIXED_TOKENS, *_FORWARDS):
        raise ExportError(
            f"{checkpoint.architecture} is a page retriever that onnxtool does not support: "
            f"{_REFUSED.get(checkpoint.architecture, 'it is none that transformers 5.23 has')}",
            f"of the retrievers of pages, {', '.join((_FIXED_TOKENS, *_FORWARDS))} are exported; run this one with "
            "transformers",
        )
    if checkpoint.task not in _TASKS:
        raise ExportError(
            f"{checkpoint.architecture} encodes pages and queries separately",
            f"export each: {' and '.join(f'--task {task}' for task in _TASKS)}",
        )
    if checkpoint.task != TASK_OF_PICTURES:
        forward = _query_forward(model, has_types=checkpoint.architecture == _FIXED_TOKENS)
    elif checkpoint.architecture == _FIXED_TOKENS:
        forward = _page_forward(model, _page_tokens(checkpoint))
    else:
        forward = _FORWARDS[checkpoint.architecture](model)
    model.forward = types.MethodType(forward, model)
    return model


def find_page_inputs(model: Any, checkpoint: Checkpoint, accepted: tuple[str, ...]) -> PageInputs:
    """Return the inputs of a retriever that was restricted to pages of any size.

    Raises:
        CheckpointError: the checkpoint has no processor, or it does not run.
        ExportError: the processor does not fit the model, or the restricted forward differs from the model's own.
    """
    image_id = model.config.vlm_config.image_token_id
    inputs = PageInputs.of(checkpoint.load_processor("processor"), accepted, model, image_id)
    pages = inputs.pages()
    restricted = run_torch_tensors(model, {name: pages[name] for name in accepted})[TOKENS]
    own = run_own_forward(model, pages)["embeddings"]
    if restricted.shape != own.shape or not (restricted - own).abs().max() <= _TOLERANCE:
        raise ExportError(
            f"{type(model).__name__} computes other vectors of pages than onnxtool's form of it",
            "use the version of transformers that onnxtool was tested with (5.23)",
        )
    return inputs


def _page_tokens(checkpoint: Checkpoint) -> Any:
    """Return the non-image tokens of a page, as made by the checkpoint's own processor: int64 [P]."""
    processor = checkpoint.load_processor("processor")
    blank = np.full(_PICTURE, 255, np.uint8)
    inputs = run(lambda: processor(images=[blank, blank], return_tensors="pt"), "processor", PROCESSOR_FILE)
    tokens, mask, types_of = (inputs[name] for name in ("input_ids", "attention_mask", "token_type_ids"))
    if not (tokens[0] == tokens[1]).all() or not mask.all() or types_of.any():
        raise ExportError(
            f"the processor of {checkpoint.source.model_name} gives other tokens for each image",
            "save it again with transformers 5.23",
        )
    return tokens[0].clone()


def _page_forward(model: Any, tokens: Any) -> Any:
    import torch

    whole = type(model).forward

    def forward(self: Any, pixel_values: Any) -> dict[str, Any]:
        ids = tokens.to(pixel_values.device)[None].expand(pixel_values.shape[0], -1)
        inputs = {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        return {TOKENS: whole(self, input_ids=ids, pixel_values=pixel_values, **inputs).embeddings}

    return forward


def _query_forward(model: Any, *, has_types: bool) -> Any:
    import torch

    whole = type(model).forward

    def forward(self: Any, input_ids: Any, attention_mask: Any) -> dict[str, Any]:
        types_of = {"token_type_ids": torch.zeros_like(input_ids)} if has_types else {}
        return {TOKENS: whole(self, input_ids=input_ids, attention_mask=attention_mask, **types_of).embeddings}

    return forward


def _tiled_forward(model: Any) -> Any:
    """Make ColModernVBERT's forward for pages: `pixel_values` float [B, T, 3, E, E].

    The model's own forward skips padding tiles, which it recognizes by their zeros. Here they are also computed, but no
    token represents them.
    """
    whole = type(model).forward

    def forward(self: Any, input_ids: Any, attention_mask: Any, pixel_values: Any) -> dict[str, Any]:
        vlm = self.vlm
        states = vlm.vision_model(pixel_values=pixel_values.flatten(0, 1)).last_hidden_state
        embeddings = _with_pictures(self, input_ids, vlm.connector(states))
        return {TOKENS: whole(self, inputs_embeds=embeddings, attention_mask=attention_mask).embeddings}

    return forward


def _patched_forward(model: Any) -> Any:
    """Make ColQwen2's forward for pages: `pixel_values` float [B, N, C], `image_grid_thw` int64 [B, 3].

    The model's own forward takes the patches of all pages as one row, split by lists of lengths that a trace would
    freeze. Here each page is a row, and its padding is masked.

    Raises:
        ExportError: its vision tower is a different one.
    """
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    whole, visual = type(model).forward, model.vlm.visual
    if type(visual) is not Qwen2VisionTransformerPretrainedModel:
        raise ExportError(
            f"the vision tower of this {type(model).__name__} is {type(visual).__name__}, and onnxtool's form of its "
            f"attention is for {Qwen2VisionTransformerPretrainedModel.__name__}",
            "pages of Qwen2-VL can be exported, and so can the query side (--task late-interaction)",
        )
    for block in visual.blocks:
        block.attn.forward = types.MethodType(_attend, block.attn)

    def forward(
        self: Any, input_ids: Any, attention_mask: Any, pixel_values: Any, image_grid_thw: Any
    ) -> dict[str, Any]:
        places, mask = _places_and_mask(pixel_values, image_grid_thw, self.vlm.visual.spatial_merge_size)
        patches = pixel_values.flatten(0, 1)
        # The model's own blocks pass the page lengths on to their attention as cu_seqlens.
        features = self.vlm.visual(patches, grid_thw=None, position_ids=places, cu_seqlens=mask).pooler_output
        embeddings = _with_pictures(self, input_ids, features)
        return {TOKENS: whole(self, inputs_embeds=embeddings, attention_mask=attention_mask).embeddings}

    return forward


def _places_and_mask(pixel_values: Any, grid: Any, merged: int) -> tuple[Any, Any]:
    """Return rows and columns of patches, int64 [B * N, 2], and float [B, 1, 1, N]: 0, or the lowest value on padding.

    Patches are ordered square by square, each with `merged` x `merged` patches, row by row.
    """
    import torch

    number = torch.arange(pixel_values.shape[1], device=pixel_values.device)[None]
    square, inner = _divided(number, merged**2)
    # At least one, because a division by zero crashes onnxruntime.
    square_row, square_column = _divided(square, _divided(grid[:, 2:], merged)[0].clamp(min=1))
    row, column = _divided(inner, merged)
    places = torch.stack([square_row * merged + row, square_column * merged + column], dim=-1)
    is_padding = number >= grid[:, 1:2] * grid[:, 2:]
    least = torch.finfo(pixel_values.dtype).min
    mask = torch.zeros_like(is_padding, dtype=pixel_values.dtype).masked_fill(is_padding, least)
    return places.flatten(0, 1), mask[:, None, None]


def _divided(numbers: Any, by: Any) -> tuple[Any, Any]:
    import torch

    return torch.div(numbers, by, rounding_mode="floor"), numbers % by


def _attend(self: Any, hidden_states: Any, cu_seqlens: Any, position_embeddings: Any, **kwargs: Any) -> Any:
    """Attend within pages: `hidden_states` float [B * N, W], with the mask of `_places_and_mask` as `cu_seqlens`."""
    import torch
    from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

    if cu_seqlens.ndim == 1:  # lengths, as passed by the model's own forward
        return type(self).forward(self, hidden_states, cu_seqlens, position_embeddings, **kwargs)
    batch, heads = cu_seqlens.shape[0], self.num_heads
    query, key, value = self.qkv(hidden_states).unflatten(-1, (3, heads, -1)).unbind(1)
    turned = (*apply_rotary_pos_emb_vision(query, key, *position_embeddings), value)
    rows = (states.reshape(batch, -1, heads, states.shape[-1]).transpose(1, 2) for states in turned)
    mixed = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=cu_seqlens, scale=self.scaling)
    return self.proj(mixed.transpose(1, 2).flatten(2).flatten(0, 1))


def _with_pictures(model: Any, input_ids: Any, features: Any) -> Any:
    """Return token embeddings, float [B, S, W], with a page's `features` inserted at the tokens that represent them.

    Args:
        model: a page retriever.
        input_ids: int64 [B, S].
        features: float [B * K, W] or [B * T, K / T, W], in the token order of each page.
    """
    import torch

    words = model.get_input_embeddings()(input_ids)
    features = features.reshape(input_ids.shape[0], -1, words.shape[-1]).to(words.dtype)
    is_picture = input_ids == model.config.vlm_config.image_token_id
    order = (is_picture.long().cumsum(1) - 1).clamp(min=0).clamp(max=features.shape[1] - 1)
    placed = features.gather(1, order[..., None].expand(-1, -1, words.shape[-1]))
    return torch.where(is_picture[..., None], placed, words)


_FORWARDS: Mapping[str, Callable[[Any], Any]] = {
    "ColModernVBertForRetrieval": _tiled_forward,
    "ColQwen2ForRetrieval": _patched_forward,
}
