"""How the figures of a model, and what separates two, are worded: for text, Markdown and HTML alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from onnxtool.cli.render import format_bytes, format_shape, format_tensor
from onnxtool.model_file.metadata import STEPS_KEY
from onnxtool.reports import Json, TensorInfo
from onnxtool.summary.figures import Cost, Layer, MappingDelta, Stats

ABSENT = "absent"
_MAX_CELL_LENGTH = 160
_MAX_DEPTH = 3
_VERIFICATION = ("reference", "max_abs_error", "cosine_min", "cases")

# A row of a comparison: what it is about, the base's, the model's, and how much that is more.
Row = tuple[str, str, str, str]


def join(counts: Mapping[str, int], show: Callable[[int], str] = str) -> str:
    """Write counts in a line: `float32 8.0 kB, int64 24 B`."""
    return ", ".join(f"{name} {show(count)}" for name, count in counts.items()) or "none"


def shorten(text: str, length: int = _MAX_CELL_LENGTH) -> str:
    """Cut a text that would hide the others, and say how long it was."""
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


def replaced(after: int | str | None, before: int | str | None) -> str:
    """Write a value and what it was: `20, was 17`."""
    texts = [ABSENT if value is None else str(value) or "not stated" for value in (after, before)]
    return f"{texts[0]}, unchanged" if after == before else f"{texts[0]}, was {texts[1]}"


def compared(after: int, before: int, show: Callable[[int], str] = "{:,}".format) -> str:
    """Write a figure and what it was: `3, was 5 (-2, -40.0%)`."""
    if after == before:
        return f"{show(after)}, unchanged"
    return f"{show(after)}, was {show(before)} ({growth(after, before, show)})"


def growth(after: int, before: int, show: Callable[[int], str] = "{:,}".format) -> str:
    """Write how much a figure has grown: `-2, -40.0%`."""
    if after == before:
        return "unchanged"
    percent = f", {(after - before) / before:+.1%}" if before else ""
    return f"{'+' if after > before else ''}{show(after - before)}{percent}"


def format_count(count: float) -> str:
    """Write a large count with three digits or so: `11.2 G`."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f}"


def needs(stats: Stats) -> str:
    """Write what must be there to load a model."""
    opsets = join(stats.opsets) if stats.opsets else "no opset"
    return f"{opsets}; IR {stats.ir_version}; onnxruntime {stats.min_onnxruntime or 'of no release that is known'}"


def shape_of(cost: Cost) -> str:
    """Write the shape of the inputs that a cost is for."""
    return f"{cost.batch_size} x {cost.sequence_length}"


def names_of(changes: MappingDelta) -> list[str]:
    """Return everything that differs, by name."""
    return sorted([*changes.added, *changes.removed, *changes.changed])


def counts_of(changes: MappingDelta) -> str:
    """Write how much differs: `1 added, 2 removed, 3 changed`; empty where nothing does."""
    counts = {"added": changes.added, "removed": changes.removed, "changed": changes.changed}
    return ", ".join(f"{len(entries)} {what}" for what, entries in counts.items() if entries)


def operator_rows(changes: MappingDelta, base: Mapping[str, int], model: Mapping[str, int]) -> list[Row]:
    """Return the operators that differ, those that differ most first."""
    more = {op: model.get(op, 0) - base.get(op, 0) for op in names_of(changes)}
    return [
        (op, str(base.get(op, 0)), str(model.get(op, 0)), f"{more[op]:+d}")
        for op in sorted(more, key=lambda op: (-abs(more[op]), op))
    ]


def layer_rows(base: Stats, model: Stats) -> list[Row]:
    """Return the parts of the model that lost or gained nodes or bytes, in their order."""
    rows = []
    for name in [*base.layers, *(name for name in model.layers if name not in base.layers)]:
        before, after = base.layers.get(name), model.layers.get(name)
        if before == after:
            continue
        more = (after.num_nodes if after else 0) - (before.num_nodes if before else 0)
        bytes_more = (after.size_bytes if after else 0) - (before.size_bytes if before else 0)
        changes = [f"{more:+d} nodes" if more else "", f"{signed_bytes(bytes_more)}" if bytes_more else ""]
        rows.append((name, _layer(before), _layer(after), ", ".join(filter(None, changes))))
    return rows


def _layer(layer: Layer | None) -> str:
    return ABSENT if layer is None else f"{layer.num_nodes}, {format_bytes(layer.size_bytes)}"


def signed_bytes(amount: int) -> str:
    """Write bytes with their sign."""
    return f"{'+' if amount > 0 else ''}{format_bytes(amount)}"


def entry_rows(changes: MappingDelta, show: Callable[[Json], str]) -> list[tuple[str, str, str]]:
    """Return name, base's and model's of every entry that differs."""
    rows = []
    for name in names_of(changes):
        change = changes.changed.get(name)
        before = change.before if change else changes.removed.get(name)
        after = change.after if change else changes.added.get(name)
        values = [ABSENT if value is None else show(value) for value in (before, after)]
        rows.append((name, values[0], values[1]))
    return rows


def show_weight(value: Json) -> str:
    """Write an initializer as a difference tells it: `float32 [768, 768]`, with the start of its hash."""
    if not isinstance(value, dict) or not isinstance(value.get("shape"), list):
        return show(value)
    digest = str(value.get("sha256", ""))[:12]
    shape = value["shape"]
    sizes = (
        format_shape(size if isinstance(size, int | str) else None for size in shape) if isinstance(shape, list) else ""
    )
    return f"{value['dtype']} {sizes}{f' {digest}' if digest else ''}"


def signatures(tensors: Iterable[TensorInfo]) -> dict[str, str]:
    """Return inputs or outputs by name, as `float32 [batch, 384]`."""
    return {tensor.name: format_tensor(tensor) for tensor in tensors}


def metadata_of(stats: Stats) -> dict[str, str]:
    """Return the metadata, with the record of steps as the names of the steps."""
    values = dict(stats.metadata)
    if stats.steps:
        values[STEPS_KEY] = ", ".join(str(step.get("step", "?")) for step in stats.steps)
    return values


def interface_notes(base: Stats, model: Stats, inputs: MappingDelta, outputs: MappingDelta) -> list[str]:
    """Return what callers of the base must know about the model's inputs and outputs."""
    notes = []
    for what, changes, before, after in (
        ("inputs", inputs, base.inputs, model.inputs),
        ("outputs", outputs, base.outputs, model.outputs),
    ):
        if changes:
            counts = f"{len(changes.added)} added, {len(changes.removed)} removed, {len(changes.changed)} changed"
            notes.append(f"the {what} differ ({counts}); what feeds or reads the base may not fit this model")
        elif [tensor.name for tensor in before] != [tensor.name for tensor in after]:
            notes.append(f"the {what} are in another order; what addresses them by position may not fit this model")
    return notes


def step_row(step: Mapping[str, Json]) -> tuple[str, str]:
    """Write a step that onnxtool recorded: its name, and its details."""
    details = [f"{key} {show(value)}" for key, value in step.items() if key != "step"]
    return show(step.get("step", "?")), ", ".join(details)


def last_verification(stats: Stats) -> str:
    """Write how the last step that made a file was verified; empty for a file of another tool."""
    if not stats.steps:
        return ""
    step = stats.steps[-1]
    name = show(step.get("step", "?"))
    if step.get("verified") is not True:
        return f"{name}, not verified"
    figures = ", ".join(f"{key} {show(step[key])}" for key in _VERIFICATION if step.get(key) is not None)
    return f"{name}, verified: {figures}"


def show(value: Json, depth: int = 0) -> str:
    """Write a JSON value of a step for a reader: `yes`, `1.2e-06`, `(a 1, b 2)`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict | list) and depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {show(item, depth + 1)}' for key, item in value.items())})"
    if isinstance(value, list):
        return f"[{', '.join(show(item, depth + 1) for item in value)}]"
    return shorten("-" if value is None else str(value))
