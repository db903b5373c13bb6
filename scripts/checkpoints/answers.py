"""Functions between a graph and an answer: of labels, scores, tokens, spans, vectors, and their similarities.

Each checkpoint is saved by its library, exported, and answered by the file and by the library's own entry point:
transformers' pipelines and `generate`, and sentence-transformers' CrossEncoder, SentenceTransformer and SparseEncoder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling

from onnxtool import ExportOptions, export_model
from onnxtool.errors import OnnxtoolError
from onnxtool.infer import GenerateOptions, InferOptions, generate, load, run_texts
from onnxtool.infer.report import InferReport
from tests.infer.tiny_models import TEXTS, VOCABULARY, write_checkpoint

_TOLERANCE = 1e-4
_PAIRS = [(TEXTS[0], text) for text in TEXTS]
_CONFIG: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
_PROBLEMS = (None, "regression", "single_label_classification", "multi_label_classification")
_ACTIVATIONS = ("linear.Identity", *(f"activation.{name}" for name in torch.nn.modules.activation.__all__))
_NEW, _OLD = "sentence_transformers", "sbert_ce_default_activation_function"
_TANH, _SIGMOID, _OTHER = "torch.nn.Tanh", "torch.nn.modules.activation.Sigmoid", "evil.Function"
_STATED: tuple[dict[str, Any], ...] = (
    {_NEW: {"activation_fn": _TANH}},
    {_OLD: _TANH},
    {_NEW: {"activation_fn": _TANH}, _OLD: _SIGMOID},
    {_NEW: {"activation_fn": None}, _OLD: _TANH},
    {_NEW: {"version": "5.0.0"}, _OLD: _TANH},
    {_NEW: {"activation_fn": _OTHER}},
    {_NEW: {"activation_fn": _OTHER}, _OLD: _TANH},
    {_OLD: _OTHER, "problem_type": "regression"},
    {_OLD: _TANH, "problem_type": "multi_label_classification"},
)
_GRAPHS: dict[str, Path] = {}
_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


EQUAL, SAID, REFUSED, NOTHING, DIFFERENT, CRASHED = "equal", "said", "refused", "no oracle", "DIFFERENT", "CRASHED"


class MismatchError(Exception):
    """An answer differs from the library's."""


class LibraryError(Exception):
    """The library itself refuses the checkpoint, so there is nothing to compare."""


@dataclass(frozen=True)
class Row:
    """A comparison.

    Attributes:
        kind: what is compared, for `--only`.
        name: the setting.
        compare: makes the checkpoint in an empty folder, and returns a figure, or what onnxtool says about a
            difference after "said: ". It raises MismatchError for a difference without a word.
    """

    kind: str
    name: str
    compare: Callable[[Path], str]


def compare_answers(part: str = "") -> int:
    """Print a table of the rows whose kind or name contains `part`; return 1 where an answer is silently different."""
    transformers.logging.disable_progress_bar()
    counts: Counter[str] = Counter()
    print("| compared | checkpoint | result | |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as work:
        for number, row in enumerate(row for row in _rows() if part in f"{row.kind}: {row.name}"):
            result, reason = _outcome(row, Path(work, str(number)))
            counts[result] += 1
            print(f"| {row.kind} | {row.name} | {result} | {reason} |", flush=True)
    print(f"\n{counts.total()} rows: {', '.join(f'{count} {result}' for result, count in counts.items())}")
    return int(any(counts[result] for result in (DIFFERENT, CRASHED)))


def _outcome(row: Row, work: Path) -> tuple[str, str]:
    """Return what came of a row, and why."""
    try:
        figure = row.compare(work / "checkpoint")
        result, reason = (SAID, figure.removeprefix("said: ")) if figure.startswith("said: ") else (EQUAL, figure)
    except OnnxtoolError as error:
        result, reason = REFUSED, error.message
    except LibraryError as error:
        result, reason = NOTHING, str(error)
    except MismatchError as error:
        result, reason = DIFFERENT, str(error)
    except Exception as error:  # noqa: BLE001  a row of the table, and the worst of all
        traceback.print_exc()
        result, reason = CRASHED, f"{type(error).__name__}: {error}"
    return result, " ".join(reason.replace(str(work), "").replace("|", "/").split())[:150]


def _rows() -> Iterator[Row]:
    """Yield a row for each function after the logits, label count, problem type and activation."""
    for labels in (1, 2, 3):
        for problem in _PROBLEMS:
            yield Row("labels", f"{labels} labels, {problem}", partial(_pipeline_labels, labels, problem, None))
    for top_k in (1, 2, 9):
        yield Row("labels", f"3 labels, top_k {top_k}", partial(_pipeline_labels, 3, None, top_k))
    for labels in (1, 3):
        for name in _ACTIVATIONS:
            yield Row("scores", f"{labels} labels, {name}", partial(_saved_scores, labels, name))
        for stated in _STATED:
            yield Row("scores", f"{labels} labels, config.json {json.dumps(stated)}", partial(_stated, labels, stated))
    yield Row("scores", "a base of three labels", _base_of_several)
    for names in (("O", "B-A", "I-A", "B-B", "I-B"), ("O", "A", "B"), ("O", "B-A", "A", "I-B", "B")):
        yield Row("spans", ", ".join(names), partial(_spans, names))
    for top_k in (1, 3, 10):
        yield Row("tokens", f"mask, top_k {top_k}", partial(_masks, top_k))
    for top_k in (1, 5):
        yield Row("tokens", f"next token, top_k {top_k}", partial(_next_tokens, top_k))
    for settings in ({"temperature": 0.5, "top_k": 1}, {"temperature": 1e-3}, {"top_p": 1e-6, "temperature": 2.0}, {}):
        yield Row("generation", json.dumps(settings), partial(_generated, settings))
    for mode in (*_MODES, ("cls", "mean")):
        for scaled in (False, True):
            name = f"{mode}{', Normalize' * scaled}"
            yield Row("pooling in Python", name, partial(_pooled, mode, scaled))
    for strategy in ("max", "sum"):
        for function in ("relu", "log1p_relu"):
            yield Row("pooling in Python", f"SPLADE {strategy}, {function}", partial(_splade, strategy, function))
    for similarity in (None, "cosine", "dot", "euclidean", "manhattan"):
        yield Row("similarity", str(similarity), partial(_similar, similarity))


def _saved(folder: Path, kind: str, **config: Any) -> Path:
    """Save a BERT of one kind with random weights that are large enough to show a wrong function."""
    torch.manual_seed(0)
    write_checkpoint(folder)
    try:
        model = getattr(transformers, kind)(transformers.BertConfig(**_CONFIG, **config)).eval()
    except ValueError as error:
        raise LibraryError(str(error)) from error
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": 32,
                **dict(
                    zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), VOCABULARY, strict=False)
                ),
            }
        )
    )
    return folder


def _exported(folder: Path, **options: Any) -> Path:
    """Export a checkpoint; one with the same weights as an earlier one gets its graph, beside its own files."""
    output = folder.parent / "out" / "model.onnx"
    weights = (folder / "model.safetensors").read_bytes() + repr(options).encode()
    known = _GRAPHS.setdefault(hashlib.sha256(weights).hexdigest(), folder.parent.parent / f"{folder.parent.name}.onnx")
    if not known.exists():
        export_model(ExportOptions(str(folder), output=output, **{"exporter": "torchscript", **options}))
        shutil.copyfile(output, known)
        return output
    shutil.copytree(folder, output.with_suffix(""))
    shutil.copyfile(known, output)
    return output


def _answers(folder: Path, texts: Sequence[Any], top_k: int | None = None, **options: Any) -> Any:
    return load(_exported(folder, **options), provider="cpu").answer(texts, top_k=top_k).answers


def _equal(ours: Any, theirs: Any) -> str:
    """Return the largest difference.

    Raises:
        MismatchError: it is too large, or shapes differ.
    """
    one, other = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if one.shape != other.shape:
        raise MismatchError(f"shape {list(one.shape)} instead of {list(other.shape)}")
    difference = float(np.abs(one - other).max(initial=0.0))
    if not difference <= _TOLERANCE * max(1.0, float(np.abs(other).max(initial=0.0))):
        raise MismatchError(f"off by {difference:.3g}: {one.ravel()[:3]} instead of {other.ravel()[:3]}")
    return f"within {difference:.1e}"


def _same(ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise MismatchError(f"{ours!r} instead of {theirs!r}")


def _pipeline(task: str, folder: Path, **options: Any) -> Any:
    return transformers.pipeline(task, model=str(folder), device="cpu", **options)


def _pipeline_labels(labels: int, problem: str | None, top_k: int | None, folder: Path) -> str:
    named = {"id2label": {i: f"name {i}" for i in range(labels)}, "label2id": {f"name {i}": i for i in range(labels)}}
    _saved(folder, "BertForSequenceClassification", problem_type=problem, **named)
    wanted = _pipeline("text-classification", folder, top_k=top_k)(list(TEXTS))
    found = _answers(folder, TEXTS, top_k if labels > 1 else None)
    _same([list(one.scores) for one in found], [[label["label"] for label in one] for one in wanted])
    return _equal([list(one.scores.values()) for one in found], [[label["score"] for label in one] for one in wanted])


def _predicted(folder: Path, labels: int) -> str:
    try:
        wanted = CrossEncoder(str(folder), device="cpu", local_files_only=True).predict(_PAIRS).reshape(-1, labels)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise LibraryError(str(error)) from error
    found = [[one.scores[f"LABEL_{i}"] for i in range(labels)] for one in _answers(folder, _PAIRS)]
    return _equal(found, wanted)


def _saved_scores(labels: int, activation: str, folder: Path) -> str:
    """Compare with a checkpoint that CrossEncoder saves."""
    _saved(folder.parent / "plain", "BertForSequenceClassification", num_labels=labels)
    package, _, name = activation.partition(".")
    try:
        function = getattr(getattr(torch.nn.modules, package), name)()
    except TypeError as error:
        raise LibraryError(str(error)) from error
    CrossEncoder(str(folder.parent / "plain"), activation_fn=function, device="cpu").save_pretrained(str(folder))
    return _predicted(folder, labels)


def _stated(labels: int, stated: dict[str, Any], folder: Path) -> str:
    """Compare with a checkpoint whose config.json names activations, as older versions wrote them."""
    path = _saved(folder, "BertForSequenceClassification", num_labels=labels) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))
    return _predicted(folder, labels)


def _base_of_several(folder: Path) -> str:
    from onnxtool import EvaluateOptions
    from onnxtool.evaluation.options import RERANKER
    from onnxtool.evaluation.pytorch import open_checkpoint

    open_checkpoint(str(_saved(folder, "BertForSequenceClassification", num_labels=3)), RERANKER, EvaluateOptions())
    raise MismatchError("it is taken as a reranker")


def _spans(names: Sequence[str], folder: Path) -> str:
    _saved(folder, "BertForTokenClassification", id2label=dict(enumerate(names)))
    pipeline = _pipeline("token-classification", folder, aggregation_strategy="simple")
    scores: list[float] = []
    wanted_scores: list[float] = []
    for text, found in zip(TEXTS, _answers(folder, TEXTS), strict=True):
        wanted = pipeline(text)
        _same(
            [(span.label, span.start, span.end) for span in found.spans],
            [(one["entity_group"], one["start"], one["end"]) for one in wanted],
        )
        scores += [span.score for span in found.spans]
        wanted_scores += [float(one["score"]) for one in wanted]
    return _equal(scores, wanted_scores)


def _masks(top_k: int, folder: Path) -> str:
    _saved(folder, "BertForMaskedLM")
    texts = ["the [MASK] sat", "a red [MASK] on the mat"]
    wanted = _pipeline("fill-mask", folder, top_k=top_k)(texts)
    found = _answers(folder, texts, top_k)
    _same([list(one.scores) for one in found], [[token["token_str"] for token in one] for one in wanted])
    return _equal([list(one.scores.values()) for one in found], [[token["score"] for token in one] for one in wanted])


def _decoder(folder: Path) -> tuple[Path, Any, Any]:
    """Save a GPT-2, and return its folder, model and tokenizer."""
    _saved(folder, "BertForMaskedLM")
    torch.manual_seed(0)
    ids = {"bos_token_id": 2, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.GPT2Config(vocab_size=len(VOCABULARY), n_positions=32, n_embd=16, n_layer=2, n_head=2, **ids)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(folder)
    return folder, model, transformers.AutoTokenizer.from_pretrained(folder)


def _next_tokens(top_k: int, folder: Path) -> str:
    _, model, tokenizer = _decoder(folder)
    scores, wanted = [], []
    for text, found in zip(TEXTS, _answers(folder, TEXTS, top_k, task="text-generation"), strict=True):
        with torch.no_grad():
            best = model(**tokenizer(text, return_tensors="pt")).logits[0, -1].softmax(0).topk(top_k)
        _same(list(found.scores), tokenizer.convert_ids_to_tokens(best.indices.tolist()))
        scores.append(list(found.scores.values()))
        wanted.append(best.values.tolist())
    return _equal(scores, wanted)


def _generated(settings: dict[str, Any], folder: Path) -> str:
    """Compare samples that leave one choice, which are those of a greedy search."""
    _, model, tokenizer = _decoder(folder)
    path = _exported(folder, task="text-generation-with-past", exporter="auto")
    asked = GenerateOptions(max_new_tokens=6, decoding="sample" if settings else None, **settings)
    found = generate(path, TEXTS, options=asked, provider="cpu")
    for text, answer in zip(TEXTS, found.answers, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs.input_ids.shape[1] :]
        _same(answer.generated, tokenizer.decode(ids, skip_special_tokens=True))
    return "the same tokens"


def _encoder(folder: Path, mode: Any, scaled: bool, similarity: Any = None) -> Any:
    _saved(folder.parent / "plain", "BertModel")
    modules = [Transformer(str(folder.parent / "plain")), Pooling(_CONFIG["hidden_size"], mode)]
    model = SentenceTransformer(modules=[*modules, *[Normalize()] * scaled], similarity_fn_name=similarity)
    model.save_pretrained(str(folder))
    return SentenceTransformer(str(folder), device="cpu")


def _pooled(mode: Any, scaled: bool, folder: Path) -> str:
    wanted = _encoder(folder, mode, scaled).encode(list(TEXTS))
    return _equal(load(_exported(folder, head="none"), provider="cpu").encode(TEXTS), wanted)


def _splade(strategy: Any, function: Any, folder: Path) -> str:
    _saved(folder.parent / "plain", "BertForMaskedLM")
    first = Transformer(str(folder.parent / "plain"), transformer_task="fill-mask")
    SparseEncoder(
        modules=[first, SpladePooling(pooling_strategy=strategy, activation_function=function)]
    ).save_pretrained(str(folder))
    wanted = SparseEncoder(str(folder), device="cpu").encode(list(TEXTS), convert_to_sparse_tensor=False)
    vectors: Any = load(_exported(folder, head="none"), provider="cpu").encode(TEXTS, keep_special=True)
    return _equal(vectors.to_dense(), wanted.cpu().numpy())


def _similar(similarity: str | None, folder: Path) -> str:
    model = _encoder(folder, "mean", scaled=False, similarity=similarity)
    vectors = model.encode(list(TEXTS))
    report: InferReport = run_texts(InferOptions(_exported(folder), texts=TEXTS, provider="cpu"))
    try:
        return _equal(report.similarities, model.similarity(vectors, vectors))
    except MismatchError:
        said = [note for note in report.notes if str(similarity) in note]
        if not said:
            raise
        return f"said: {said[0]}"
