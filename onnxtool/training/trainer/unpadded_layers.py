"""The layers of a transformer that compute only the rows of real tokens, as hooks on its modules.

From the first layer to the last, or to the output head, rows of padding are left out. Attention alone gets them back,
so that its mask, its sums and its dropout stay as they are. The rows are found before the compiled graph and are inputs
of it, with one dynamic size.

Letters: B sequences, S positions, N rows of real tokens out of B * S.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._dynamo import maybe_mark_dynamic
from torch.nn import functional

from onnxtool.training.trainer.label_pruning import modules_around

_ATTENTION = "onnxtool_unpadded"
_PADDED = "sdpa"
_SEED = 0


class RowLayout(NamedTuple):
    """The places of the rows of a padded batch.

    Attributes:
        ids: the batch's tokens, int [B, S], by which a call of the model is known.
        mask: the batch's attention mask, [B, S]; nonzero for tokens.
        rows: int64 [N], the positions of the tokens in the flattened batch.
        places: int64 [B, S], the index of each position in `rows`; N for padding.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor) -> RowLayout:
        """Return the layout of a batch with these tokens and this mask."""
        is_token = mask != 0
        rows = is_token.reshape(-1).nonzero().view(-1)
        places = (is_token.reshape(-1).cumsum(0) - 1).masked_fill(~is_token.reshape(-1), rows.numel())
        maybe_mark_dynamic(rows, 0)
        return cls(ids, mask, rows, places.view_as(mask))


class _Pad(torch.autograd.Function):  # type: ignore[misc]  # PyTorch is untyped here
    """Rows [N, F] to [B * S, F], with zeros for padding. Both directions gather: nothing is scattered."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the rows with those of padding."""
        ctx.save_for_backward(rows)
        return _gathered(hidden, places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of the rows."""
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):  # type: ignore[misc]  # PyTorch is untyped here
    """Rows [B * S, F] to [N, F]; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the rows without those of padding."""
        ctx.save_for_backward(places)
        return hidden.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of the padded rows."""
        return _gathered(gradient, ctx.saved_tensors[0]), None, None


def _gathered(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return functional.pad(rows, (0, 0, 0, 1)).index_select(0, places.reshape(-1))


def padded(hidden: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Return `hidden` [1, N, ...] as [B, S, ...], with zeros for padding."""
    rows: torch.Tensor = _Pad.apply(hidden.reshape(hidden.shape[1], -1), layout.rows, layout.places)
    return rows.reshape(*layout.mask.shape, *hidden.shape[2:])


def unpadded(hidden: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Return the rows of tokens of `hidden` [B, S, ...], or [1, S, ...] for all sequences, as [1, N, ...]."""
    whole = hidden.expand(layout.mask.shape[0], *hidden.shape[1:])
    flat = whole.reshape(layout.mask.numel(), -1)
    rows: torch.Tensor = _Unpad.apply(flat, layout.rows, layout.places)
    return rows.reshape(1, -1, *hidden.shape[2:])


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    unpadding: RowLayout,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of rows without padding as transformers' function for `sdpa` computes it with padding.

    Args:
        module: the layer's attention.
        query: float [1, heads, N, D], like `key` and `value`.
        key: see `query`.
        value: see `query`.
        attention_mask: of the padded batch.
        unpadding: the layout of the rows.
        **named: as the layer gives them.

    Returns:
        Float [1, N, heads, D].
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    states = (padded(states.transpose(1, 2), unpadding).transpose(1, 2) for states in (query, key, value))
    output, _ = sdpa_attention_forward(module, *states, attention_mask, **named)
    return unpadded(output, unpadding), None


class _CurrentStep:
    """The layouts of the batches of a step; none if it is padded.

    It is no attribute of a hook, because TorchDynamo takes the sizes of what it finds in modules for fixed ones.
    """

    layouts: tuple[RowLayout, ...] = ()


_STEP = _CurrentStep()


class Region:
    """The part of a transformers model that computes rows without padding, as hooks that are inactive without a layout.

    The hooks are on modules inside the model, since libraries call its `forward`, which runs none of its own.

    Attributes:
        ends: the modules whose output may have the padding again: the output head, if there is one, and the last layer.
        end: the one of them that does.
        has_noise: whether the rows stay padded, and those of padding are replaced by noise, for `UnpaddingCheck`.
        was_used: whether the model got the tokens of one of the layouts, in this step or the last one.
    """

    def __init__(self, model: Any, base: Any, layers: Sequence[torch.nn.Module]) -> None:
        """Put hooks on a model.

        Args:
            model: the transformers model.
            base: the part of it without its head.
            layers: those of `base`.
        """
        head = model.get_output_embeddings()
        around = [] if head is None else modules_around(head, model)[:1]
        self.ends = (*around, layers[-1])
        self.end = layers[-1]
        self.layers = tuple(layers)
        self.has_noise = False
        self.was_used = False
        self._is_on = False  # a model may have the hooks of an earlier wrapper, which are no part of the step
        self._layout: RowLayout | None = None
        self._is_inside = False
        configs = {
            id(config): config for config in (getattr(part, "config", None) for part in base.modules()) if config
        }
        self._configs = tuple(configs.values())
        base.get_input_embeddings().register_forward_pre_hook(self._choose)
        for layer in layers:
            layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True)
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.register_forward_pre_hook(self._before_dropout)
                part.register_forward_hook(self._after_dropout)
        layers[-1].register_forward_hook(self._leave_layers)
        for part in around:
            part.register_forward_hook(self._leave_head)

    @classmethod
    def all_of(cls, model: torch.nn.Module) -> list[Region]:
        """Return the regions of the transformers models in `model`; none if one of them has not the known structure."""
        if "transformers" not in sys.modules:
            return []
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers.masking_utils import sdpa_mask
        from transformers.modeling_layers import GradientCheckpointingLayer

        AttentionInterface.register(_ATTENTION, attention)
        AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
        candidates: list[tuple[Any, Any, list[torch.nn.Module]]] = []
        inside: set[int] = set()
        for part in model.modules():
            if not isinstance(part, PreTrainedModel) or id(part) in inside:
                continue
            inside.update(id(inner) for inner in part.modules())
            stacks = [
                stack
                for stack in part.modules()
                if isinstance(stack, torch.nn.ModuleList)
                and any(isinstance(layer, GradientCheckpointingLayer) for layer in stack)
            ]
            if len(stacks) != 1 or getattr(part.config, "_attn_implementation", None) != _PADDED:
                return []
            layers = list(stacks[0])
            models = [inner for inner in part.modules() if isinstance(inner, PreTrainedModel)]
            base = [inner for inner in models if any(layers[0] is module for module in inner.modules())][-1]
            candidates.append((part, base, layers))
        return [cls(*parts) for parts in candidates]

    @property
    def is_checkpointed(self) -> bool:
        """Whether layers run again in the backward pass."""
        return any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers)

    def begin(self, *, with_head: bool) -> None:
        """Begin a step, in which rows are left out of the output head as well if `with_head` is set."""
        self._is_on = True
        self.was_used = False
        self.end = self.ends[0 if with_head else -1]

    def stop(self) -> None:
        """End the step, also after an error inside it."""
        self._is_on = False
        self.leave()

    def leave(self) -> None:
        """End the region, also after an error inside it."""
        if self._is_inside:
            self._attend_by(_PADDED)
        self._is_inside = False
        self._layout = None

    def _attend_by(self, implementation: str) -> None:
        for config in self._configs:
            config._attn_implementation = implementation  # noqa: SLF001 - transformers' own name for it

    def _choose(self, _embeddings: torch.nn.Module, args: tuple[Any, ...]) -> None:
        for layout in _STEP.layouts if self._is_on else ():
            if args[0] is layout.ids:
                self._layout = layout
                self.was_used = True

    def _enter_layer(
        self, layer: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        layout = self._layout
        if layout is None:
            return None
        is_named = "hidden_states" in named
        hidden: torch.Tensor = named["hidden_states"] if is_named else args[0]
        if self.has_noise:
            hidden = _with_noise(hidden, layout)
        else:
            if layer is self.layers[0]:
                self._is_inside = True
                self._attend_by(_ATTENTION)
                hidden = unpadded(hidden, layout)
            named = {**named, "unpadding": layout}
            positions = named.get("position_embeddings")
            if positions is not None:
                named["position_embeddings"] = tuple(unpadded(position, layout) for position in positions)
        return ((), {**named, "hidden_states": hidden}) if is_named else ((hidden, *args[1:]), named)

    def _leave_layers(self, layer: torch.nn.Module, _args: Any, output: Any) -> Any:
        layout = self._layout
        if layout is None:
            return None
        if not self.has_noise:
            self._attend_by(_PADDED)
        if self.end is not layer:
            return None
        first = self._restored(output if isinstance(output, torch.Tensor) else output[0], layout)
        return first if isinstance(output, torch.Tensor) else (first, *output[1:])

    def _leave_head(self, head: torch.nn.Module, _args: Any, output: Any) -> Any:
        layout = self._layout
        return None if layout is None or self.end is not head else self._restored(output, layout)

    def _restored(self, value: torch.Tensor, layout: RowLayout) -> torch.Tensor:
        """Return the region's result [1, N, ...] with its padding."""
        self.leave()
        return _with_noise(value, layout) if self.has_noise else padded(value, layout)

    def _before_dropout(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        layout = self._layout_of_dropout(module, args)
        return None if layout is None else (padded(args[0], layout),)

    def _after_dropout(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: Any) -> Any:
        layout = self._layout_of_dropout(module, args)
        return None if layout is None else unpadded(output, layout)

    def _layout_of_dropout(self, module: Any, args: tuple[torch.Tensor, ...]) -> RowLayout | None:
        """Return the layout where dropout has to draw numbers for padding as well, as it does without this."""
        draws = self._is_inside and module.training and module.p > 0 and args[0].dim() == 3
        return self._layout if draws else None


def _with_noise(hidden: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Return `hidden` [B, S, ...] with large random numbers in the rows of padding."""
    generator = torch.Generator().manual_seed(_SEED)
    noise = torch.randn(hidden.shape, generator=generator).to(hidden) * hidden.detach().abs().max()
    is_token = (layout.mask != 0).reshape(*layout.mask.shape, *(1,) * (hidden.dim() - 2))
    return torch.where(is_token, hidden, noise)


def enter(regions: Iterable[Region], layouts: tuple[RowLayout, ...], with_head: bool) -> None:
    """Begin a step whose batches have these layouts, see `leave`."""
    _STEP.layouts = layouts
    for region in regions:
        region.begin(with_head=with_head)


def leave(regions: Iterable[Region]) -> None:
    """End a step, also after an error inside it."""
    _STEP.layouts = ()
    for region in regions:
        region.stop()
