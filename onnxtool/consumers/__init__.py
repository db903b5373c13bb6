"""Answer texts in the consumer of a target, file by file, and compare each answer with the checkpoint's in PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.agreement import VerifyOptions
from onnxtool.errors import InputError, OptionError
from onnxtool.evaluation.options import DENSE as SENTENCES
from onnxtool.evaluation.options import LATE_INTERACTION, RERANKER
from onnxtool.evaluation.options import SPARSE as WEIGHTS
from onnxtool.evaluation.pytorch import load_encoder
from onnxtool.export.options import DTYPES, ExportOptions
from onnxtool.export.preparation import Job, Request, prepare
from onnxtool.export.target_specification import TargetSpecification
from onnxtool.export.targets import DENSE, INFERENCE_FREE, SCORES, SPARSE, TAGS, TARGETS, TOKENS, VERDICTS
from onnxtool.interruption import temporary_folder
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import DTYPE_KEY
from onnxtool.options import StrPath, checked
from onnxtool.progress import tell
from onnxtool.reading import read_json
from onnxtool.reports import short_repr
from onnxtool.runtime.difference import TOLERANCES, Spread

_RUNNERS = Path(__file__).with_name("runners")
_BATCH_SIZES = (1, 4)
_TEXTS = (
    "a cat",
    "How do I reset my password?",
    "",
    "The train to Berlin leaves at noon and arrives in the evening, if nothing happens.",
    "Café Zürich: naïve œuvres, 3.14 € (approx.) -- it's 'quoted'!",
    "日本語のテキスト and 中文, привет мир, مرحبا",
    "e-mail someone@example.org, see https://example.org/a?b=c#d",
    "antidisestablishmentarianism unbelievably tokenizes",
    "UPPER CASE Words And\ttabs  and   spaces ",
    "1,234.56 and 007 + x = B-52",
    "a kitten is a young cat that plays with yarn",
)
_WORDS = ("the", "model", "of", "sparse", "retrieval", "weighs", "terms", "query", "document", "search", "engine")
_QUESTION = "what is the capital of France?"
_QUERY = 40  # characters of a text that are a query
# More words in a text take minutes in PyTorch; the report says where the limit is beyond.
_MOST_WORDS = 2048
# Answers are computed in another order than PyTorch's: this allows 0.05 % in float32, and 1.4 % in float16.
_BOUNDS = {"fp32": 1e-7, "fp16": 1e-4}
_MOST_BYTES = 1 << 30  # of answers: vectors of the tokens of a dozen texts take a hundredth
_SCALED = 1e-3  # how near to 1 the lengths of scaled vectors are, in half precision as well
_SENTENCE_KINDS = {
    DENSE: SENTENCES,
    SPARSE: WEIGHTS,
    INFERENCE_FREE: WEIGHTS,
    TOKENS: LATE_INTERACTION,
    VERDICTS: RERANKER,
}
# Kinds that encode queries and documents differently.
_OF_ROLES = (INFERENCE_FREE, TOKENS)

Rows = list[NDArray[np.float64]]


@short_repr
@dataclass(frozen=True)
class ConsumerResult:
    """The answers of a file that a consumer has opened.

    Attributes:
        file: its name in the folder; empty for the file that the consumer opens by default.
        precision: what the bound is for.
        batch_size: how many texts were passed in a call.
        role: `query` or `document`; empty for models that read all texts alike.
        error: for vectors, half the squared distance from PyTorch's, relative to its length, which is 1 - cosine at
            equal lengths; for scores, 1 - the cosine that an error of this size gives scores of this spread. The
            largest of all texts; None if there is no answer to compare.
        bound: the largest error that is allowed.
        passed: whether it is within the bound.
        ms_per_text: time in the consumer, tokenization included; None if there is no answer.
        reason: why there is no answer to compare; empty if there is one.
    """

    file: str
    precision: str
    batch_size: int
    role: str
    error: float | None
    bound: float
    passed: bool
    ms_per_text: float | None = None
    reason: str = ""


@short_repr
@dataclass(frozen=True)
class ConsumerReport:
    """A folder in its consumer.

    Attributes:
        consumer: the package and its version.
        num_texts: the number of texts that each file answered.
        results: for each file, batch size and role.
        notes: inputs that were not tried, and differences of the consumer.
    """

    folder: str
    checkpoint: str
    consumer: str
    num_texts: int
    results: tuple[ConsumerResult, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there are answers, all within their bounds."""
        return bool(self.results) and all(result.passed for result in self.results)


@checked
def verify_in_consumer(folder: StrPath, checkpoint: StrPath, options: VerifyOptions) -> ConsumerReport:
    """Open each file of a folder in the consumer `options.consumer`, and compare its answers with the checkpoint's.

    Texts of many kinds are passed alone and in batches, one of them longer than the limit where that is at most 2,048
    tokens; PyTorch reads each alone. The file that the consumer opens by default comes first.

    Args:
        folder: written by the target of that name, or by another tool in the layout of the consumer.
        checkpoint: the folder or hub id of the checkpoint that it was made from.
        options: the consumer and its environment; `max_error` bounds int8, uint8 and int4.

    Raises:
        OptionError: the consumer cannot be run here, or an option has no effect.
        InputError: the folder has no file that it opens, or the consumer is not installed.
        TargetError: it does not accept such a checkpoint.
        CheckpointError: the checkpoint cannot be found, understood or loaded.
    """
    name, root = str(options.consumer), Path(folder).resolve()
    _require_own(options)
    if not root.is_dir():
        raise InputError(
            f"{folder} is no folder, which --consumer opens", "pass the folder that the export has written"
        )
    loading = {key: getattr(options, key) for key in ("revision", "trust_remote_code", "allow_pickle")}
    with temporary_folder() as scratch:
        unused = scratch / "unused"
        exporting = ExportOptions(os.fspath(checkpoint), target=name, output=unused, verify=False, **loading)
        job = prepare(Request.of(exporting))
        specification = job.plan.specification
        assert specification is not None  # noqa: S101  only targets for any graph have none, and these have no runner
        files = _files(specification, root)
        texts, notes = _texts(specification, job.lengths.stated)
        question = _question(specification)
        calls: list[dict[str, Any]] = [
            {"file": file, "batch_size": size, "role": role}
            for file, _ in files
            for size in _BATCH_SIZES
            for role in texts
        ]
        tell(f"answering texts in {specification.target.title}")
        request: dict[str, Any] = {"question": question, "texts": texts, "calls": calls}
        reply = _ask({"folder": str(root), **request}, specification, options, scratch)
    tell("answering texts in PyTorch")
    expected = {role: _in_pytorch(job, specification, rows, role, question) for role, rows in texts.items()}
    precisions = dict(files)
    results, unnamed = list[ConsumerResult](), dict[str, None]()
    for call, answer in zip(calls, reply["answers"], strict=True):
        if not answer:  # the consumer cannot be told the file
            unnamed[call["file"]] = None
            continue
        precision = precisions[answer.get("opened", call["file"])]
        results.append(_compared(call, precision, answer, expected[call["role"]], specification, options))
    notes += [f"{file} was not opened by its name, which {name} cannot be told" for file in unnamed]
    num_texts = len(next(iter(texts.values())))
    return ConsumerReport(str(folder), os.fspath(checkpoint), reply["version"], num_texts, tuple(results), tuple(notes))


def _require_own(options: VerifyOptions) -> None:
    """Refuse consumers that cannot be run, and options that are for the comparison of a file."""
    target = TARGETS[str(options.consumer)]
    if not target.runner:
        raise OptionError(
            f"{target.title} is no package that can be called from here (--consumer)",
            f"take one of {', '.join(known.name for known in TARGETS.values() if known.runner)}; the export has called "
            f"the graph as {target.title} does",
        )
    own = {"consumer", "interpreter", "max_error", "revision", "trust_remote_code", "allow_pickle"}
    defaults = VerifyOptions()
    for name in (field for field in vars(defaults) if field not in own):
        if getattr(options, name) != getattr(defaults, name):
            raise OptionError(f"--{name} has no effect on --consumer", "leave it out")


def _graph(specification: TargetSpecification) -> str:
    return specification.target.graph.format(name=specification.source.name)


def _files(specification: TargetSpecification, root: Path) -> list[tuple[str, str]]:
    """Return the files to open, each with its precision; the first is called "", for the consumer's default.

    Raises:
        InputError: there is none, or a graph that the consumer would not open.
    """
    target, graph = specification.target, Path(_graph(specification))
    precisions = {graph.name: "fp32"}
    precisions |= {name: precision for precision, names in target.variants.items() for name in names}
    place = root / graph.parent
    present = sorted(path.name for path in place.glob("*.onnx")) if place.is_dir() else []
    if target.variants and (unknown := [name for name in present if name not in precisions]):
        raise InputError(
            f"{target.title} opens no file called {unknown[0]}, which is in {place}",
            f"it opens {', '.join(precisions)}; move the file elsewhere",
        )
    if not present and type(specification).pack is TargetSpecification.pack:  # else it lies in an archive
        raise InputError(
            f"{root} has no {graph}, which {target.title} opens",
            f"onnxtool export --target {target.name} writes such a folder",
        )
    if graph.name in present:  # its precision is that of the export
        stated = ModelFile.open(place / graph.name).metadata.get(DTYPE_KEY, "float32")
        precisions[graph.name] = DTYPES.get(stated, "fp32")
    named = [((graph.parent / name).as_posix(), precisions[name]) for name in precisions if name in present]
    first = next((precision for _, precision in named if precision == target.opens), named[0][1] if named else "fp32")
    return [("", first), *named]


def _texts(specification: TargetSpecification, limit: int | None) -> tuple[dict[str, list[str]], list[str]]:
    """Return the texts by role, and what could not be tried with them."""
    limit, texts, notes, kind = specification.limit(limit), [*_TEXTS], list[str](), specification.usage.kind
    most = specification.target.most_tokens or _MOST_WORDS
    is_pair = _question(specification) is not None
    if is_pair:
        texts.remove("")  # libraries read a pair with an empty text as a pair, or as one text
    if is_pair and not specification.target.cuts_pairs:
        notes.append("pairs beyond the limit, which it cuts otherwise than the checkpoint does, were not tried")
    elif limit is None or limit > most:
        notes.append(f"no text of more than {most} tokens was tried, and the checkpoint takes {limit or 'any number'}")
    else:
        texts.append(" ".join(_WORDS[place * place % len(_WORDS)] for place in range(limit + 32)))
    if kind not in _OF_ROLES:
        return {"": texts}, notes
    # Queries are short: some consumers cut none.
    return {"document": texts, "query": [text[:_QUERY].strip() for text in texts]}, notes


def _question(specification: TargetSpecification) -> str | None:
    """Return what pairs begin with; None for models of single texts: encoders, and classifiers with several labels."""
    kind = specification.usage.kind
    return _QUESTION if kind == VERDICTS or (kind == SCORES and specification.config.num_labels == 1) else None


def _ask(
    job: Mapping[str, Any], specification: TargetSpecification, options: VerifyOptions, scratch: Path
) -> dict[str, Any]:
    """Run the consumer, and return what it has written.

    Raises:
        InputError: it is not installed, or died.
    """
    target = specification.target
    request, answers, runner = scratch / "job.json", scratch / "answers.json", _RUNNERS / target.runner
    known = {"consumer": target.name, "graph": _graph(specification), "kind": specification.usage.kind}
    pooled = {"pooling": specification.pooling_name, "normalize": specification.scales}
    request.write_text(json.dumps({**known, **pooled, **job}), encoding="utf-8")
    if runner.suffix == ".mjs":
        command = [options.interpreter or "node", str(runner)]
    else:
        command = [options.interpreter or sys.executable, str(_RUNNERS / "exchange.py"), str(runner)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    remedy = f"{target.install}; --interpreter names the one that has it"
    try:
        done = subprocess.run(
            [*command, str(request), str(answers)], capture_output=True, text=True, env=environment, check=False
        )
    except OSError as error:
        raise InputError(f"{command[0]} cannot be started to run {target.title}: {error.strerror}", remedy) from error
    if not answers.is_file():
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise InputError(
            f"{target.title} ended with exit code {done.returncode}: {last}", "see whether it runs on its own"
        )
    reply: dict[str, Any] = read_json(answers, _MOST_BYTES)
    if "missing" in reply:
        raise InputError(f"{target.title} is not installed: {command[0]} has no {reply['missing']}", remedy)
    return reply


def _in_pytorch(
    job: Job, specification: TargetSpecification, texts: Sequence[str], role: str, question: str | None
) -> Rows:
    """Return the checkpoint's answer to each text alone, in float32: a row, or a row for each token."""
    kind, name = specification.usage.kind, job.request.options.model_name
    if kind not in _SENTENCE_KINDS:
        return list(_logits(job, specification, texts, question))
    model = load_encoder(name, _SENTENCE_KINDS[kind])
    if kind == VERDICTS:
        scores = model.predict([(question, text) for text in texts], batch_size=1, convert_to_numpy=True)
        return [np.atleast_1d(np.asarray(score, np.float64)) for score in scores]
    # Other consumers do not write the prompt of the checkpoint before texts.
    knows = specification.target.tokenizer_of == "sentence-transformers" or role
    encode, more = getattr(model, f"encode_{role}" if role else "encode"), {} if knows else {"prompt": ""}
    vectors = encode(list(texts), batch_size=1, show_progress_bar=False, **more)
    if _SENTENCE_KINDS[kind] == WEIGHTS:
        vectors = vectors.to_dense().numpy()
    return [np.asarray(row, np.float64) for row in vectors]


def _logits(
    job: Job, specification: TargetSpecification, texts: Sequence[str], question: str | None
) -> Iterator[NDArray[np.float64]]:
    model, limit = job.models.reference(), specification.limit(job.lengths.stated)
    for text in texts:
        inputs = [text if question is None else (question, text)]
        encoded = specification.tokenizer(inputs, truncation=True, max_length=limit, return_tensors="pt")
        yield np.asarray(model(**encoded).logits[0].tolist(), np.float64)


def _compared(
    call: Mapping[str, Any],
    precision: str,
    answer: Mapping[str, Any],
    expected: Rows,
    specification: TargetSpecification,
    options: VerifyOptions,
) -> ConsumerResult:
    """Compare the answers to one call with PyTorch's."""
    bound = _BOUNDS.get(precision, 0.01 if options.max_error is None else options.max_error)
    error, reason = None, str(answer.get("error", ""))
    if len(answer.get("rows", expected)) != len(expected):
        reason = f"{len(answer['rows'])} answers to {len(expected)} texts"
    elif "rows" in answer:
        actual = [_as_rows(row, len(reference)) for row, reference in zip(answer["rows"], expected, strict=True)]
        if specification.usage.kind == INFERENCE_FREE:  # consumers leave the weights of special tokens out, or do not
            actual, expected = ([_without(row, specification) for row in rows] for rows in (actual, expected))
        sizes = [
            (row.shape, wanted.shape) for row, wanted in zip(actual, expected, strict=True) if row.shape != wanted.shape
        ]
        if sizes:
            reason = f"{len(sizes)} texts have answers {list(sizes[0][0])}, and {list(sizes[0][1])} in PyTorch"
        else:
            error = _error(actual, expected, specification)
    passed = error is not None and error <= bound
    ms = answer["seconds"] * 1000 / len(expected) if "seconds" in answer else None
    return ConsumerResult(call["file"], precision, call["batch_size"], call["role"], error, bound, passed, ms, reason)


def _as_rows(row: Any, size: int) -> NDArray[np.float64]:
    """Return an answer as an array; an object has term ids and weights."""
    if not isinstance(row, dict):
        return np.asarray(row, np.float64)
    terms = [int(term) for term in row]
    vector = np.zeros(max(size, 1 + max(terms, default=0)))
    vector[terms] = list(row.values())
    return vector


def _without(row: NDArray[np.float64], specification: TargetSpecification) -> NDArray[np.float64]:
    kept = row.copy()
    kept[specification.tokenizer.all_special_ids] = 0
    return kept


def _error(actual: Rows, expected: Rows, specification: TargetSpecification) -> float:
    """Return the largest error of a text, as `ConsumerResult` states it; infinite where a number is not finite."""
    if not all(np.isfinite(row).all() for row in actual):
        return float("inf")
    if specification.usage.kind in (SCORES, VERDICTS, TAGS):
        ours, theirs = (np.concatenate([np.atleast_2d(row) for row in rows]) for rows in (actual, expected))
        spread = Spread.of([theirs])
        if spread is not None:
            return 1 - spread.measure(ours, theirs, TOLERANCES["fp32"]).cosine
    pairs = list(zip(actual, expected, strict=True))
    if specification.usage.kind == DENSE and not specification.scales:
        lengths = np.array([np.linalg.norm(row) for row in actual])
        if np.abs(lengths - 1).max() < _SCALED:  # several consumers scale all vectors; their notes say so
            pairs = [(row, second / np.linalg.norm(second)) for row, second in pairs]
    rows = [(a, b) for first, second in pairs for a, b in zip(np.atleast_2d(first), np.atleast_2d(second), strict=True)]
    return max((float(np.square(a - b).sum() / np.square(b).sum() / 2) if b.any() else float(a.any()) for a, b in rows))
