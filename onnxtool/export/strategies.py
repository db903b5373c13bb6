"""How to trace a model, in the order to try: exporter, attention, and at last axes that are not dynamic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnxtool.export.modalities.sizes import Axis
from onnxtool.export.tracing import EXPORTERS, Exporter

# dynamo reasons about every dynamic size, and about those of Swin's rolling windows without an end.
_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class ExportStrategy:
    """A strategy to trace a model: an exporter with its settings.

    Attributes:
        attention: transformers' attention implementation; None leaves the choice to it.
        fixed: the axes that are not dynamic in the file, with their sizes.
        prompts: how a file with a cache runs its prompts; empty for others.
        timeout_s: how long the trace may take, where other strategies are left; None for no limit.
    """

    exporter: Exporter
    attention: str | None
    fixed: Mapping[str, int] = field(default_factory=dict)
    prompts: str = ""
    timeout_s: float | None = None

    @property
    def name(self) -> str:
        """What notes call it, e.g. `dynamo with eager attention, sequence fixed to 512`."""
        attention = f" with {self.attention} attention" if self.attention else ""
        fixed = "".join(f", {axis} fixed to {size}" for axis, size in self.fixed.items())
        prompts = f", prompts {self.prompts}" if self.prompts else ""
        return f"{self.exporter.name}{attention}{fixed}{prompts}"


def strategies_for(
    exporter: str, axes: Iterable[Axis], default_attention: str | None, *, verified: bool = True
) -> Iterator[ExportStrategy]:
    """List the strategies for a model, the most useful file first.

    All axes are dynamic in the first ones; then the lengths are fixed, which a user can pad to; then the batch as well.

    TorchScript comes first where verification reaches the largest size that the model takes: it traces in a tenth of
    the time, and onnxruntime fuses its attention. It keeps the branches that the sample took, which verification would
    show. Where sizes have no bound, dynamo comes first, which guards what it assumes.

    Args:
        exporter: a name of EXPORTER_NAMES; `auto` for all of them.
        axes: the dynamic axes of the model's inputs.
        default_attention: what transformers chooses, which need not be tried twice.
        verified: whether the file will be verified; else dynamo, which guards what it assumes, comes first.
    """
    axes = tuple(axes)
    chosen = [row for row in EXPORTERS if exporter in ("auto", row.name)]
    if verified and all(axis.is_covered for axis in axes if axis.may_fail):
        chosen.sort(key=lambda row: row.name != "torchscript")
    contents = {axis.name: axis.fixed_size for axis in axes if axis.may_fail}
    batches = {axis.name: axis.fixed_size for axis in axes if not axis.may_fail}
    for row in chosen:
        for attention in row.attentions:
            if attention is None or attention != default_attention or None not in row.attentions:
                yield ExportStrategy(row, attention, timeout_s=_TIMEOUT_S if len(chosen) > 1 else None)
    if contents:
        yield from (ExportStrategy(row, row.attentions[0], contents) for row in chosen)
    yield from (ExportStrategy(row, row.attentions[0], contents | batches) for row in chosen)


def attention_of(model: Any) -> str | None:
    """Return the attention implementation that a loaded model has."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)
