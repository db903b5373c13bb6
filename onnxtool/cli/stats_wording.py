"""Word the figures of a model and of a difference, for text, Markdown and HTML alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from onnxtool.cli.render import format_shape, format_tensor
from onnxtool.errors import shorten
from onnxtool.model_file.metadata import STEPS_KEY, License
from onnxtool.reports import Json, TensorInfo
from onnxtool.summary.figures import Cost, MappingDelta, Stats, StatsDelta

ABSENT = "absent"
_UNCHANGED, _CHANGED = "unchanged", "changed"
_MAX_CELL_LENGTH = 160
_MAX_DEPTH = 3
_VERIFICATION = ("reference", "max_abs_error", "cosine_min", "cases")
# The verification figures that a step records, worded as in the reports of export and optimize.
_VERIFICATION_LABELS = {
    "reference": "Verified against",
    "verified_on": "Verified on",
    "cases": "Cases",
    "max_abs_error": "max_abs_error",
    "cosine_min": "Lowest cosine",
    "atol": "Allowed",
    "mask_effect": "Moving the mask moves the outputs by",
    "padding_effect": "Other ids in the padding move them by",
    "batch_effect": "The rest of the batch moves a text by",
}
_VERIFICATION_KEYS = frozenset({*_VERIFICATION_LABELS, "verified", "rtol", "cosine_required", "error", "arithmetic"})
_NUM_STEPS = 3  # only the last ones are shown side by side, to fit a phone; onnxtool's own files have two
_NOT_RECORDED = "-"

# A row of a comparison: the name, the base's value, the model's value, and the change.
Row = tuple[str, str, str, str]


def join(counts: Mapping[str, int], show: Callable[[int], str] = str) -> str:
    """Write counts on one line: `float32 8.0 kB, int64 24 B`."""
    return ", ".join(f"{name} {show(count)}" for name, count in counts.items()) or "none"


def replaced(name: str, after: int | str | None, before: int | str | None) -> Row:
    """Return the row of a value without a numeric difference, such as a version."""
    was, now = (ABSENT if value is None else str(value) or "not stated" for value in (before, after))
    return name, was, now, _UNCHANGED if after == before else _CHANGED


def compared(name: str, after: int, before: int, show: Callable[[int], str] = "{:,}".format) -> Row:
    """Return the row of a figure."""
    return name, show(before), show(after), growth(after, before, show)


def comparison(before: str, after: str, change: str) -> str:
    """Write a row on one line: `3, was 5 (-2, -40.0%)`."""
    if change == _UNCHANGED:
        return f"{after}, unchanged"
    return f"{after}, was {before}" + (f" ({change})" if change != _CHANGED else "")


def growth(after: int, before: int, show: Callable[[int], str] = "{:,}".format) -> str:
    """Write the change of a figure: `-2, -40.0%`."""
    if after == before:
        return _UNCHANGED
    percent = f", {(after - before) / before:+.1%}" if before else ""
    return f"{signed(after - before, show)}{percent}"


def signed(amount: int, show: Callable[[int], str] = "{:,}".format) -> str:
    """Write an amount with its sign."""
    return f"{'+' if amount > 0 else ''}{show(amount)}"


def format_count(count: float) -> str:
    """Write a large count with about three digits: `11.2 G`."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f}"


def needs(stats: Stats) -> str:
    """Write what is needed to load a model."""
    opsets = join(stats.opsets) if stats.opsets else "no opset"
    return f"{opsets}; IR {stats.ir_version}; onnxruntime {stats.min_onnxruntime or 'of no release that is known'}"


def shape_of(cost: Cost) -> str:
    """Write the input shape that a cost applies to."""
    return f"{cost.batch_size} x {cost.sequence_length}"


def names_of(changes: MappingDelta) -> list[str]:
    """Return all differences by name."""
    return sorted([*changes.added, *changes.removed, *changes.changed])


def counts_of(changes: MappingDelta) -> str:
    """Write the numbers of changes: `1 added, 2 removed, 3 changed`; empty if nothing differs."""
    counts = {"added": changes.added, "removed": changes.removed, "changed": changes.changed}
    return ", ".join(f"{len(entries)} {what}" for what, entries in counts.items() if entries)


def initializers_of(delta: StatsDelta) -> str:
    """Write how the initializers differ; empty if all are the same."""
    more = {"renamed": len(delta.renamed), "not compared by their data": delta.num_not_hashed}
    return ", ".join(filter(None, [counts_of(delta.weights), *(f"{n} {what}" for what, n in more.items() if n)]))


def initializer_row(model: Stats, base: Stats, delta: StatsDelta) -> Row:
    """Return the row of the number of initializers, with how they differ."""
    *values, change = compared("Initializers", model.num_initializers, base.num_initializers)
    changes = [change] if change != _UNCHANGED else []
    return values[0], values[1], values[2], "; ".join(filter(None, [*changes, initializers_of(delta)])) or _UNCHANGED


def entry_rows(changes: MappingDelta, show: Callable[[Json], str]) -> list[tuple[str, str, str]]:
    """Return name, base value and model value of every entry that differs."""
    rows = []
    for name in names_of(changes):
        change = changes.changed.get(name)
        before = change.before if change else changes.removed.get(name)
        after = change.after if change else changes.added.get(name)
        values = [ABSENT if value is None else show(value) for value in (before, after)]
        rows.append((name, values[0], values[1]))
    return rows


def show_weight(value: Json) -> str:
    """Write an initializer of a difference: `float32 [768, 768]`, with the start of its hash."""
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
    """Return the metadata, with the recorded steps reduced to their names."""
    values = dict(stats.metadata)
    if stats.steps:
        values[STEPS_KEY] = ", ".join(str(step.get("step", "?")) for step in stats.steps)
    return values


def license_of(stats: Stats) -> str:
    """Return the license with the details that distinguish it from similar ones."""
    described = str(License(stats.license, stats.license_name))
    return f"{described}, {stats.license_link}" if stats.license_link else described


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


def step_row(number: int, step: Mapping[str, Json]) -> tuple[str, str]:
    """Write a recorded step: its name and its details, without the verification."""
    details = {key: value for key, value in step.items() if key not in _VERIFICATION_KEYS}
    passes = details.get("passes")
    if isinstance(passes, dict):
        details["passes"] = {name: count for name, count in passes.items() if count != 0}
    return step_title(number, step), ", ".join(
        f"{key} {show(value)}" for key, value in details.items() if key != "step"
    )


def step_title(number: int, step: Mapping[str, Json]) -> str:
    """Write the title of a step: `2. optimize int8`."""
    words = [show(step[key]) for key in ("step", "precision") if key in step]
    return f"{number}. {shorten(' '.join(words), 40)}"


def verification_table(steps: Sequence[Mapping[str, Json]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and rows of the verification recorded by the last steps; no rows if none did.

    Files are untrusted and may record anything, so a value may have any type.
    """
    numbered = [(number, step) for number, step in enumerate(steps, 1) if "verified" in step][-_NUM_STEPS:]
    columns = ("Figure", *(step_title(number, step) for number, step in numbered))
    recorded = [_recorded(step) for _, step in numbered]
    labels = list(dict.fromkeys(label for figures in recorded for label in figures))
    return columns, [(label, *(figures.get(label, _NOT_RECORDED) for figures in recorded)) for label in labels]


def _recorded(step: Mapping[str, Json]) -> dict[str, str]:
    if step.get("verified") is not True:
        return {"Result": "not verified"}
    figures = {"Result": "passed", **verification_figures(step)}
    if step.get("error") is not None:
        figures["Quantization error"] = f"1 - cosine {show(step['error'])}"
    errors = step.get("arithmetic")
    for arithmetic, error in errors.items() if isinstance(errors, dict) else ():
        figures[f"Error in {shorten(arithmetic, 40)} arithmetic"] = (
            "not for such CPUs" if error is None else f"1 - cosine {show(error)}"
        )
    return figures


def verification_figures(recorded: Mapping[str, Json]) -> dict[str, str]:
    """Return the recorded figures of a verification by their labels."""
    found = {key: value for key in _VERIFICATION_LABELS if (value := recorded.get(key)) is not None}
    figures = {_VERIFICATION_LABELS[key]: show(value) for key, value in found.items()}
    if isinstance(cosine := found.get("cosine_min"), float):
        figures[_VERIFICATION_LABELS["cosine_min"]] = f"{cosine:.8f}"
    if "atol" in found:
        atol, rtol, required = (_bound(recorded.get(key)) for key in ("atol", "rtol", "cosine_required"))
        figures[_VERIFICATION_LABELS["atol"]] = f"{atol} + {rtol} x largest value, cosine {required}"
    return figures


def _bound(value: Json) -> str:
    """Write a tolerance with all digits: a cosine of 0.99999 is not 1."""
    return f"{value:g}" if isinstance(value, float) else show(value)


def last_verification(stats: Stats) -> str:
    """Write how the last step was verified; empty for files made by other tools."""
    if not stats.steps:
        return ""
    step = stats.steps[-1]
    name = show(step.get("step", "?"))
    if step.get("verified") is not True:
        return f"{name}, not verified"
    figures = ", ".join(f"{key} {show(step[key])}" for key in _VERIFICATION if step.get(key) is not None)
    return f"{name}, verified: {figures}"


def show(value: Json, depth: int = 0) -> str:
    """Write a JSON value of a step in readable form: `yes`, `1.2e-06`, `(a 1, b 2)`."""
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
