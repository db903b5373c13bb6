"""The model card of a release: metadata that the hub reads, and all figures; the same facts give the same bytes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256

from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING, SPARSE_TAGS
from onnxtool.evaluation.measures import Difference
from onnxtool.release.agreement import first_difference
from onnxtool.release.facts import FACTS_NAME, EvaluationResult, ReleasedModel, ReleaseFacts, facts_text
from onnxtool.reports import code_span

CARD_NAME = "README.md"

_NONE = "-"
_TEXTS = '--text "A model is exported, optimized and verified." --text "The weather is fine today."'
_PAIRS = f'--query "How is a model released?" {_TEXTS}'
# The arguments of `onnxtool infer` by the task of a model; other models are fed otherwise, and only described.
_ARGUMENTS = {
    "sparse-encoding": _TEXTS,
    "sentence-similarity": _TEXTS,
    "feature-extraction": _TEXTS,
    LATE_INTERACTION: _TEXTS,
    "text-classification": _TEXTS,
    "token-classification": _TEXTS,
    RANKING: _PAIRS,
    "question-answering": _PAIRS,
}
_VECTORS = ("sparse-encoding", "sentence-similarity")
# What the hub calls tasks that are ours.
_PIPELINES = {"sparse-encoding": "feature-extraction", LATE_INTERACTION: "feature-extraction"}
_TAGS = {"sparse-encoding": SPARSE_TAGS, LATE_INTERACTION: ("ColBERT",)}


def card_text(facts: ReleaseFacts) -> str:
    """Write the card: YAML that the hub reads, and Markdown for people."""
    from huggingface_hub import ModelCard

    return str(ModelCard(f"---\n{_metadata(facts)}\n---\n\n{_body(facts)}"))


def card_difference(text: str, facts: ReleaseFacts) -> str:
    """Say where a card is not that of the facts: the first line that differs; empty where it agrees to the last byte.

    Every figure is compared, as the card is written anew from the facts.
    """
    return first_difference(text, card_text(facts))


def _metadata(facts: ReleaseFacts) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    origin = facts.provenance
    task = origin.task.removesuffix("-with-past")
    pipeline = _PIPELINES.get(task, task) or None
    results = [
        EvalResult(
            task_type=pipeline or "feature-extraction",
            dataset_type=result.collection,
            dataset_name=result.collection,
            dataset_split=result.split,
            metric_type=name.lower(),
            metric_name=f"{name} of {model.path}",
            metric_value=measure.mean,
        )
        for model in facts.models
        for result in model.evaluations
        for name, measure in result.measures.items()
    ]
    data = ModelCardData(
        model_name=facts.name,
        license=facts.license.id,
        license_name=facts.license.name or None,
        license_link=facts.license.link or None,
        base_model=origin.source if origin.is_on_hub else None,
        library_name="onnx",
        pipeline_tag=pipeline,
        tags=["onnx", "onnxruntime", *_TAGS.get(task, ())],
        eval_results=results or None,
    )
    return str(data.to_yaml())


def _body(facts: ReleaseFacts) -> str:
    parts = [f"# {code_span(facts.name)}", _introduction(facts), *_usage(facts), *_evaluations(facts)]
    parts += [*_verification(facts), *_latencies(facts)]
    files = _table(
        ("File", "Role", "Precision", "For", "Bytes", "SHA-256"),
        (
            (
                code_span(file.path),
                file.role,
                code_span(file.precision) if file.precision else _NONE,
                code_span(file.target) if file.target else _NONE,
                f"{file.size_bytes:,}",
                file.sha256,
            )
            for file in facts.files
        ),
    )
    parts += ["## Files", files, *_provenance(facts)]
    return "\n\n".join(parts) + "\n"


def _introduction(facts: ReleaseFacts) -> str:
    count = len(facts.models)
    return (
        f"{count} ONNX {'file' if count == 1 else 'files'} of {code_span(facts.provenance.source)}, exported, "
        "verified and described by onnxtool. Figures of this card are those of the record "
        f"`{FACTS_NAME}`; `onnxtool release --check .` verifies all of it."
    )


def _usage(facts: ReleaseFacts) -> Iterator[str]:
    if not facts.models:
        return
    task, path = facts.provenance.task, facts.models[0].path
    yield "## Usage"
    yield "In the folder of the release, after `pip install onnxtool`:"
    arguments = _ARGUMENTS.get(task)
    command = f"onnxtool stats {shlex.quote(path)}"
    if arguments is not None:
        command = f"onnxtool infer --model_path {shlex.quote(path)} {arguments}"
    yield _fenced("sh", command)
    if task in _VECTORS:
        yield _fenced(
            "python",
            "import onnxtool\n\n"
            f"model = onnxtool.load({path!r})\n"
            'print(model.encode(["A model is exported, optimized and verified."]))',
        )


def _evaluations(facts: ReleaseFacts) -> Iterator[str]:
    rows = [row for model in facts.models for result in model.evaluations for row in _evaluation_rows(model, result)]
    if not rows:
        return
    yield "## Retrieval quality"
    yield (
        "Means over the judged queries of a test collection, with the interval of 95 % that they have by the choice of "
        "queries. The change is from the file or model that the row names, over the same queries."
    )
    columns = ("File", "Collection", "Documents", "Queries", "Measure", "Mean", "Interval")
    yield _table((*columns, "Compared with", "Change", "Interval of the change", "p"), rows)


def _evaluation_rows(model: ReleasedModel, result: EvaluationResult) -> Iterator[Sequence[str]]:
    for name, measure in result.measures.items():
        yield (
            code_span(model.path),
            code_span(f"{result.collection}, {result.split}"),
            f"{result.num_documents:,}",
            f"{result.num_queries:,}",
            code_span(name),
            f"{measure.mean:.4f}",
            _interval(measure.low, measure.high),
            *_change(result.base, result.differences.get(name)),
        )


def _change(base: str, difference: Difference | None) -> tuple[str, str, str, str]:
    if difference is None:
        return _NONE, _NONE, _NONE, _NONE
    relative = "" if difference.relative is None else f" ({difference.relative:+.2%})"
    return (
        code_span(base),
        f"{difference.change:+.4f}{relative}",
        _interval(difference.low, difference.high),
        f"{difference.p_value:.4f}",
    )


def _interval(low: float, high: float) -> str:
    return f"{low:.4f} to {high:.4f}"


def _verification(facts: ReleaseFacts) -> Iterator[str]:
    rows = [
        (
            code_span(model.path),
            code_span(step.step),
            code_span(step.reference),
            str(step.num_cases),
            f"{step.max_abs_error:.3g}",
            f"{step.atol:g} + {step.rtol:g} x largest value",
            f"{step.cosine_min:.8f}",
            f"{step.cosine_required:g}",
            _NONE if step.error is None else f"{step.error:.3g}",
            code_span(step.provider),
        )
        for model in facts.models
        for step in model.verification
    ]
    if not rows:
        return
    yield "## Verification"
    yield (
        "Each step that made a file compared its outputs with those of what it was made from, on the inputs of the "
        "cases. The quantization error is 1 - cosine."
    )
    columns = ("File", "Step", "Reference", "Cases", "Largest error", "Allowed", "Least cosine", "Required")
    yield _table((*columns, "Quantization error", "On"), rows)


def _latencies(facts: ReleaseFacts) -> Iterator[str]:
    rows = [
        (
            code_span(model.path),
            code_span(row.cpu),
            str(row.threads),
            str(row.batch_size),
            str(row.sequence_length),
            f"{row.p50_ms:.2f}",
            f"{row.p95_ms:.2f}",
            f"{row.throughput_samples_per_s:.1f}",
        )
        for model in facts.models
        for row in model.latency
    ]
    if rows:
        yield "## Latency"
        columns = ("File", "CPU", "Threads", "Batch", "Tokens", "p50 ms", "p95 ms", "Texts/s")
        yield _table(columns, rows)


def _provenance(facts: ReleaseFacts) -> Iterator[str]:
    origin = facts.provenance
    license_ = facts.license
    entries = {
        "Checkpoint": origin.source,
        "Revision": origin.revision,
        "SHA-256 of its weights": origin.weights_sha256,
        "Architecture": origin.architecture,
        "Model type": origin.model_type,
        "Task": origin.task,
        "Head": origin.head,
        "Parameters": ", ".join(dict.fromkeys(f"{model.num_parameters:,}" for model in facts.models)),
        "License": f"{license_}, {license_.link}" if license_.link else str(license_),
        "Date": origin.date,
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(facts.versions.items())),
        f"SHA-256 of {FACTS_NAME}": sha256(facts_text(facts).encode()).hexdigest(),
    }
    yield "## Provenance"
    yield "\n".join(f"- {name}: {code_span(value)}" for name, value in entries.items() if value)
    yield "The command that makes this release again:"
    yield _fenced("sh", facts.command)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _fenced(language: str, text: str) -> str:
    """Write code between fences that no line of it ends."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"
