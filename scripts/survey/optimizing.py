"""Optimize what was exported, and judge the result: the optimized file beside the exported one, on a judge's inputs.

The inputs are those of `survey.judging` and `survey.decoding`, which share nothing with onnxtool: the exported file has
answered them as PyTorch does, so its answers are what the optimized file must give.

Letters of shapes: B batch, S sequence, T tokens that are written, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from zoo.facts import Facts
from zoo.running import Feeds, load_model, start_id, text_feeds
from zoo.tasks import find_task

from survey.decoding import PROMPT_INPUTS, PROMPTS, filled, follow, follow_encoder
from survey.judging import TOLERANCE, cases_for, first_line, fixed_axes, open_session, run_session

if TYPE_CHECKING:
    from numpy.typing import NDArray

PRECISIONS = ("fp32", "int8")
# The least cosine of an output: of rounding, and of 8 bits on random ids, whose error on texts is bounded by 0.01.
_COSINES = {"fp32": 0.9999, "int8": 0.97}
_NEW_TOKENS = 8
_Recorded = tuple[str, dict[str, "NDArray[Any]"]]
_FEEDS, _OUTPUT, _VALID = "feeds", "output", "valid"


def record_cases(folder: str, files: Mapping[str, str], destination: str) -> dict[str, Any]:
    """Write what an optimized file will be asked, with the answers of the exported one, to NPZ files.

    Args:
        folder: the checkpoint.
        files: `model`, and `encoder` where it goes before it.
        destination: a folder; a case is DESTINATION/NUMBER.npz.

    Returns:
        `cases`, how many there are.
    """
    sessions = {role: open_session(file) for role, file in files.items()}
    facts = Facts.read(Path(folder))
    model = load_model(facts, Path(folder))
    place = Path(destination)
    place.mkdir(parents=True, exist_ok=True)
    record = _record_written if find_task(facts.task).has_cache else _record_calls
    cases = list(record(facts, model, Path(folder), sessions))
    for number, (name, arrays) in enumerate(cases):
        everything: dict[str, Any] = {"name": np.array(name), **arrays}
        np.savez(place / f"{number}.npz", **everything)
    return {"cases": len(cases)}


def _record_calls(facts: Facts, model: Any, folder: Path, sessions: Mapping[str, Any]) -> Iterator[_Recorded]:
    session = sessions["model"]
    for case in cases_for(facts, model, folder, fixed_axes(session)):
        try:
            answers = run_session(session, case.feeds)
        except Exception:  # noqa: BLE001, S112  what the exported file does not run, PyTorch does not either
            continue
        arrays = _named(_FEEDS, case.feeds) | _named(_OUTPUT, answers)
        yield case.name, arrays | ({} if case.mask is None else {_VALID: case.mask})


def _record_written(_facts: Facts, model: Any, _folder: Path, sessions: Mapping[str, Any]) -> Iterator[_Recorded]:
    encoder = sessions.get("encoder")
    start = start_id(model)
    for seed, (name, lengths) in enumerate(PROMPTS):
        feeds = text_feeds(model, lengths, max(lengths), padding="left" if encoder is None else "right", seed=seed)
        prompt: Feeds = {key: feeds[key] for key in PROMPT_INPUTS if key in feeds}
        if encoder is not None:
            prompt = filled(encoder, prompt)
        # What is written matters little: the same tokens go into both files.
        tokens = np.random.default_rng(seed).choice(feeds["input_ids"].reshape(-1), (len(lengths), _NEW_TOKENS))
        arrays = _named(_FEEDS, prompt) | {"tokens": tokens, "start": np.array(start)}
        try:
            logits = _write(sessions, arrays)
        except Exception:  # noqa: BLE001, S112  as in `_record_calls`
            continue
        yield name, arrays | _named(_OUTPUT, {"logits": logits})


def _write(sessions: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Feed the graphs with a recorded prompt and tokens; return their logits [B, T, V]."""
    prompt, tokens = _part(_FEEDS, arrays), arrays["tokens"]
    if "encoder" in sessions:
        return follow_encoder(sessions["encoder"], sessions["model"], prompt, tokens, int(arrays["start"]))
    return follow(sessions["model"], prompt, tokens)


def optimize(path: str, output: str, precision: str) -> dict[str, Any]:
    """Optimize the file at `path`; return what the report says of fusions, passes and layers, or the `error`."""
    from onnxtool.errors import OnnxtoolError
    from onnxtool.optimize import OptimizeOptions, optimize_model

    options = OptimizeOptions(Path(path), output=Path(output), precision=precision, force=True)
    try:
        report = optimize_model(options)
    except OnnxtoolError as error:
        return {"error": error.message}
    attention = next(count for count in report.fusions if count.kind == "attention")
    quantization = report.quantization
    return {
        "attentions": [attention.found, attention.expected or 0],
        "fused": {count.kind: count.found for count in report.fusions if count.found},
        "has_heads": "num_heads" in report.before.metadata,
        "nodes": [report.before.num_nodes, report.after.num_nodes],
        "notes": {result.name: result.note for result in report.passes if result.note},
        "left_out": [result.name for result in report.passes if result.left_out],
        "quantized": None
        if quantization is None
        else {
            "layers": quantization.num_layers,
            "kept": len(quantization.kept),
            "embeddings": quantization.num_embeddings,
            "error": quantization.error,
        },
    }


def together(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one report for all graphs of an export."""
    fused: Counter[str] = Counter()
    for report in reports:
        fused.update(report["fused"])
    quantized = [report["quantized"] for report in reports if report["quantized"]]
    return {
        "attentions": [sum(column) for column in zip(*(report["attentions"] for report in reports), strict=True)],
        "nodes": [sum(column) for column in zip(*(report["nodes"] for report in reports), strict=True)],
        "has_heads": any(report["has_heads"] for report in reports),
        "fused": dict(sorted(fused.items())),
        "notes": {name: note for report in reports for name, note in report["notes"].items()},
        "left_out": sorted({name for report in reports for name in report["left_out"]}),
        "quantized": {
            **{name: sum(part[name] for part in quantized) for name in ("layers", "kept", "embeddings")},
            "error": max(part["error"] for part in quantized),
        }
        if quantized
        else None,
    }


def judge_optimized(files: Mapping[str, str], cases: str, precision: str) -> dict[str, Any]:
    """Ask optimized graphs what `record_cases` has written.

    Returns:
        `right`, `cases`, `error` (the largest difference in parts of the largest value, or of 1), `cosine` (the least)
        and `reason`, empty where it is right.
    """
    asked, worst, least = 0, 0.0, 1.0

    def verdict(reason: str) -> dict[str, Any]:
        return {"right": not reason, "cases": asked, "error": min(worst, 1e300), "cosine": least, "reason": reason}

    try:
        sessions = {role: open_session(file) for role, file in files.items()}
    except Exception as error:  # noqa: BLE001  onnxruntime has no public tree of errors
        return verdict(f"onnxruntime does not load it: {first_line(error)}")
    for file in sorted(Path(cases).glob("*.npz"), key=lambda file: int(file.stem)):
        with np.load(file, allow_pickle=False) as recorded:
            arrays = dict(recorded)
        name, expected = str(arrays["name"]), _part(_OUTPUT, arrays)
        try:
            if "tokens" in arrays:
                found: Feeds = {"logits": _write(sessions, arrays)}
            else:
                found = run_session(sessions["model"], _part(_FEEDS, arrays))
        except Exception as error:  # noqa: BLE001  as above
            return verdict(f"{name}: onnxruntime raises: {first_line(error)}")
        asked += 1
        for output, reference in expected.items():
            error_here, cosine = _distance(found.get(output), reference, arrays.get(_VALID))
            worst, least = max(worst, error_here), min(least, cosine)
        too_far = precision == "fp32" and worst > TOLERANCE
        if too_far or not least >= _COSINES[precision]:
            return verdict(f"{name}: differs by {worst:.3g} of the largest value, cosine {least:.5f}")
    return verdict("" if asked else "no case was recorded")


def _distance(
    found: NDArray[Any] | None, reference: NDArray[Any], valid: NDArray[np.bool_] | None
) -> tuple[float, float]:
    """Return the largest difference in parts of the largest value, or of 1, and the cosine of real tokens."""
    if found is None or found.shape != reference.shape:
        return float("inf"), -1.0
    ours, theirs = found.astype(np.float64), reference.astype(np.float64)
    if valid is not None and reference.shape[:2] == valid.shape:
        ours, theirs = ours[valid], theirs[valid]
    if not ours.size:
        return 0.0, 1.0
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True) or not np.isfinite(ours[finite]).all():
        return float("inf"), -1.0
    ours, theirs = ours[finite], theirs[finite]
    scale = max(1.0, float(np.abs(theirs).max(initial=0.0)))
    norms = float(np.linalg.norm(ours) * np.linalg.norm(theirs))
    cosine = float(ours @ theirs) / norms if norms else float(np.array_equal(ours, theirs))
    return float(np.abs(ours - theirs).max(initial=0.0)) / scale, cosine


def _named(part: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {f"{part}/{name}": array for name, array in arrays.items()}


def _part(part: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(f"{part}/"): array for name, array in arrays.items() if name.startswith(f"{part}/")}
