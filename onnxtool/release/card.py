"""The model card of a release: metadata for the hub, and all figures; equal facts produce the same bytes."""

from __future__ import annotations

import shlex
from hashlib import sha256

from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING, SPARSE_TAGS
from onnxtool.release.facts import FACTS_NAME, ReleaseFacts, facts_text
from onnxtool.reports import code_span
from onnxtool.runtime.providers import ExecutionProvider

CARD_NAME = "README.md"

_TEXTS = '--text "A model is exported, optimized and verified." --text "The weather is fine today."'
_PAIRS = f'--query "How is a model released?" {_TEXTS}'
# The arguments of `onnxtool infer` by task; models with other inputs are only described.
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
_PLAIN = """\
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

text = Tokenizer.from_file({tokenizer!r}).encode("A model is exported, optimized and verified.")
session = onnxruntime.InferenceSession({model!r}, providers={providers!r})
columns = {{"input_ids": text.ids, "attention_mask": text.attention_mask, "token_type_ids": text.type_ids}}
inputs = {{one.name: np.array([columns[one.name]]) for one in session.get_inputs()}}
print(session.run(None, inputs)[0])"""
_COLUMNS = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), "int64")  # of _PLAIN
_COUNTS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
_VECTORS = ("sparse-encoding", "sentence-similarity")
# The hub's names for onnxtool's own tasks.
_PIPELINES = {"sparse-encoding": "feature-extraction", LATE_INTERACTION: "feature-extraction"}
_TAGS = {"sparse-encoding": SPARSE_TAGS, LATE_INTERACTION: ("ColBERT",)}


def card_text(facts: ReleaseFacts) -> str:
    """Write the card: YAML that the hub reads, and Markdown for people."""
    from huggingface_hub import ModelCard

    return str(ModelCard(f"---\n{_metadata(facts)}\n---\n\n{_body(facts)}"))


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
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(  # noqa: S701  it writes Markdown, in which names stand as code
        loader=PackageLoader("onnxtool.release"), trim_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {"code": code_span, "repr": repr, "fence": _fence}
    return environment.get_template("card.md.jinja").render(
        facts=facts,
        origin=facts.provenance,
        record=FACTS_NAME,
        tasks_of_vectors=_VECTORS,
        count=_COUNTS[len(facts.models)] if len(facts.models) < len(_COUNTS) else len(facts.models),
        usage=_usage(facts),
        plain=_plain(facts),
        provenance=_provenance(facts),
    )


def _fence(text: str) -> str:
    """Return a code fence that no line of the code can close."""
    fence = "```"
    while fence in text:
        fence += "`"
    return fence


def _usage(facts: ReleaseFacts) -> str:
    """Return a command that runs the first model; empty if there is none."""
    if not facts.models:
        return ""
    path, arguments = shlex.quote(facts.models[0].path), _ARGUMENTS.get(facts.provenance.task)
    return f"onnxtool stats {path}" if arguments is None else f"onnxtool infer --model_path {path} {arguments}"


def _plain(facts: ReleaseFacts) -> str:
    """Return a program that runs the first model with its tokenizer on one text.

    Empty if the release has none, if the model takes more than a tokenizer gives, or if its provider is a plugin, whose
    library each program loads in its own way.
    """
    provider = ExecutionProvider.parse(facts.provider)
    tokenizers = [file.path for file in facts.files if file.path.rpartition("/")[2] == "tokenizer.json"]
    if (
        provider.row.plugin
        or not facts.models
        or not tokenizers
        or not facts.models[0].inputs.items() <= _COLUMNS.items()
    ):
        return ""
    model = facts.models[0].path
    own = f"{model.removesuffix('.onnx')}/tokenizer.json"
    name, settings = provider.row.runtime_name, dict(provider.row.settings(provider, 0))
    return _PLAIN.format(
        model=model,
        providers=[(name, settings) if settings else name],
        tokenizer=own if own in tokenizers else tokenizers[0],
    )


def _provenance(facts: ReleaseFacts) -> dict[str, str]:
    origin, license_ = facts.provenance, facts.license
    return {
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
