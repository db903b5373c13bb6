"""Compare what onnxtool computes with what sentence-transformers computes, for checkpoints of every module and setting.

`python -m tests.retrieval.comparison` saves each checkpoint with sentence-transformers, exports it, runs thirty texts
through both, and prints a table. A checkpoint is *equal*, or *refused* with a reason. It fails where one is neither:
where vectors differ and nobody said so, or where the export succeeds and running it does not.

Equal: cosine of vectors at least 0.99999; weights of terms and scores within 1e-4.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TQDM_DISABLE"] = "1"

import numpy as np
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from transformers.image_utils import load_image

import onnxtool
from onnxtool.checkpoint.tasks import LATE_INTERACTION, TASK_OF_PICTURES
from onnxtool.errors import OnnxtoolError
from onnxtool.infer import InferOptions
from onnxtool.infer.pictures import encode_query, load_pictures
from onnxtool.infer.vectors import SparseVectors
from tests.retrieval.checkpoints import CASES, DENSE, LATE, M3, RERANKER, SPARSE, Case
from tests.retrieval.pages import PAGES, page_cases
from tests.retrieval.pictures import PICTURES, picture_cases, write_pictures
from tests.retrieval.tiny_pages import write_pages

LEAST_COSINE, TOLERANCE = 0.99999, 1e-4
_LONGEST_QUERY = 100
ALL_CASES = (*CASES, *picture_cases(), *page_cases())
_OUTCOMES = ("equal", "refused", "WRONG")
TEXTS = (
    "",
    " ",
    "a",
    "The weather is lovely today.",
    "the weather in the city: is it lovely?",
    "WHAT IS THE CAPITAL OF FRANCE?",
    "Paris is the capital of France, and its largest city.",
    "naïve café, über straße, ÅNGSTRÖM",
    "東京は日本の首都です。",
    "Привет, мир! Как дела?",
    "مرحبا بالعالم",
    "👍🏽 emoji and 🇫🇷 flags",
    "tabs\tand\nnew lines\r\n in  a   text",
    "e\u0301 combining, \u200b zero width, \ufeff mark",
    "query: what is a sparse encoder",
    "passage: it weighs the terms of a vocabulary",
    "3.14159, 1e-5, 100 %, $12.50",
    "https://example.org/path?q=a&b=c#d",
    "x" * 90,
    "one two three four five six seven eight nine ten",
    "one two three four five six seven eight nine ten " * 3,
    "long " * 100,
    "The quick brown fox jumps over the lazy dog. " * 20,
    "!?.,;:-()[]{}",
    "[CLS] [SEP] [MASK] [PAD] [UNK]",
    "<|user|> hello <|end|>",
    "import numpy as np  # code",
    "a b c d e f g h i j k l m n o p",
    "yes",
    "no",
)


class MismatchError(Exception):
    """What a checkpoint computes in onnxtool is not what sentence-transformers computes."""


def _cosine(ours: Any, theirs: Any) -> float:
    if ours.shape != theirs.shape:
        raise MismatchError(f"shape {list(ours.shape)} instead of {list(theirs.shape)}")
    norms = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
    both_zero = (np.linalg.norm(ours, axis=-1) == 0) & (np.linalg.norm(theirs, axis=-1) == 0)
    cosines = np.where(both_zero, 1.0, (ours * theirs).sum(-1) / np.where(norms == 0, 1.0, norms))
    # A cosine does not see a length, which is part of a vector that is not normalized.
    lengths = np.abs(np.linalg.norm(ours, axis=-1) - np.linalg.norm(theirs, axis=-1))
    if (lengths > TOLERANCE * np.maximum(1.0, np.linalg.norm(theirs, axis=-1))).any():
        raise MismatchError(f"lengths differ by up to {lengths.max():.2g}")
    return float(cosines.min())


def _difference(ours: Any, theirs: Any) -> float:
    if ours.shape != theirs.shape:
        raise MismatchError(f"shape {list(ours.shape)} instead of {list(theirs.shape)}")
    return float(np.abs(ours - theirs).max())


def _expect(figure: float, name: str, what: str, *, is_good: bool) -> str:
    if not is_good:
        raise MismatchError(f"{name}: {what} {figure:.3g}")
    return f"{what} {figure:.7g}"


def _vectors(case: Case, folder: Path, model: Any) -> Iterator[str]:
    is_sparse = case.kind == SPARSE
    theirs = (SparseEncoder if is_sparse else SentenceTransformer)(str(folder), device="cpu")
    texts = [text for text in TEXTS if text.strip() or not case.needs_text]
    settings = {"keep_special": True} if is_sparse else {}
    if case.tasks or case.routes or (is_sparse and case.needs_text):
        # Padding overwrites the term [PAD] of a query that is looked up there, so that its weight depends on the batch.
        texts = [text for text in texts if "[PAD]" not in text]
    if case.tasks or case.routes:
        for task in case.routes or ("query", "document", None):
            expected = (theirs.encode if task is None else getattr(theirs, f"encode_{task}"))(texts)
            yield _compare(model.encode(texts, task=task, **settings), expected, task, is_sparse=is_sparse)
        return
    for prompt in (None, *case.prompts):
        expected = theirs.encode(texts, prompt_name=prompt, batch_size=1 if case.alone else 32)
        yield _compare(model.encode(texts, prompt=prompt, **settings), expected, prompt, is_sparse=is_sparse)


def _compare(ours: Any, expected: Any, name: str | None, *, is_sparse: bool) -> str:
    if is_sparse:
        ours = ours.to_dense() if isinstance(ours, SparseVectors) else ours
        dense = expected.to_dense().numpy() if isinstance(expected, torch.Tensor) else expected
        width = max(ours.shape[1], dense.shape[1])
        ours, dense = (np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in (ours, dense))
        difference = _difference(ours, dense)
        return _expect(difference, str(name), "weights within", is_good=difference <= TOLERANCE)
    cosine = _cosine(ours, np.asarray(expected))
    return _expect(cosine, str(name), "cosine", is_good=cosine >= LEAST_COSINE)


def _late(case: Case, folder: Path, model: Any) -> Iterator[str]:
    theirs = MultiVectorEncoder(str(folder), device="cpu")
    texts = [text for text in TEXTS if text.strip() or not case.needs_text]
    encoded = {}
    for task in ("query", "document", None):
        expected = (theirs.encode if task is None else getattr(theirs, f"encode_{task}"))(texts, convert_to_numpy=True)
        ours = model.encode(texts, task=task)
        if len(ours) != len(expected):
            raise MismatchError(f"{len(ours)} texts instead of {len(expected)}")
        rows = [(ours.row(place), other) for place, other in enumerate(expected)]
        cosine = min(_cosine(mine, other) for mine, other in rows if mine.size or other.size)
        yield _expect(cosine, str(task), "cosine", is_good=cosine >= LEAST_COSINE)
        encoded[task] = expected
    expected_scores = theirs.similarity(encoded["query"][:5], encoded["document"]).numpy()
    scores = np.array(
        [[answer.candidates[0].score for answer in model.answer(texts, query=query).answers] for query in texts[:5]]
    )
    # Vectors that are not normalized have scores of any size.
    difference = _difference(scores, expected_scores) / max(1.0, float(np.abs(expected_scores).max()))
    yield _expect(difference, "MaxSim", "within", is_good=difference <= TOLERANCE)


def _m3(case: Case, folder: Path, model: Any) -> Iterator[str]:
    """Compare with FlagEmbedding's formulas (1.4, inference/embedder/encoder_only/m3.py), in PyTorch."""
    output = model.session.model.path
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoder = transformers.AutoModel.from_pretrained(folder).eval()
    layers = {}
    for name in ("sparse", "colbert"):
        state = torch.load(folder / f"{name}_linear.pt", weights_only=True)
        layers[name] = torch.nn.Linear(*reversed(state["weight"].shape))
        layers[name].load_state_dict(state)
    tokens = tokenizer(list(TEXTS), padding=True, truncation=True, return_tensors="pt")
    unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    with torch.inference_mode():
        states = encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"]
        dense = torch.nn.functional.normalize(states[:, 0], dim=-1).numpy()
        weights = torch.relu(layers["sparse"](states)).squeeze(-1)
        vectors = layers["colbert"](states[:, 1:]) * mask[:, 1:, None].float()
        vectors = torch.nn.functional.normalize(vectors, dim=-1).numpy()
    lexical = np.zeros((len(TEXTS), len(tokenizer)), np.float32)
    for row, (ids, own) in enumerate(zip(tokens["input_ids"].tolist(), weights.tolist(), strict=True)):
        for token, weight in zip(ids, own, strict=True):
            if token not in unused:
                lexical[row, token] = max(lexical[row, token], weight)
    cosine = _cosine(onnxtool.encode(output, TEXTS), dense)
    yield _expect(cosine, "dense", "cosine", is_good=cosine >= LEAST_COSINE)
    found = onnxtool.encode(output, TEXTS, representation="sparse")
    yield _compare(found, lexical, "sparse", is_sparse=True)
    colbert = onnxtool.load(output, representation="colbert")
    ours: Any = colbert.encode(TEXTS)
    counts = mask.sum(dim=1).tolist()
    rows = [(ours.row(place), vectors[place, : count - 1]) for place, count in enumerate(counts)]
    cosine = min(_cosine(mine, other) for mine, other in rows)
    yield _expect(cosine, "colbert", "cosine", is_good=cosine >= LEAST_COSINE)
    scores = [answer.candidates[0].score for answer in colbert.answer(TEXTS, query=TEXTS[4]).answers]
    query = rows[4][1]
    expected = [(query @ other.T).max(-1).sum() / len(query) for _, other in rows]
    difference = _difference(np.array(scores), np.array(expected))
    yield _expect(difference, "colbert_score", "within", is_good=difference <= TOLERANCE)


def _reranker(case: Case, folder: Path, model: Any) -> Iterator[str]:
    theirs = CrossEncoder(str(folder), device="cpu")
    pairs = [(TEXTS[index], TEXTS[-1 - index]) for index in range(len(TEXTS))]
    for prompt in (None, *case.prompts):
        expected = np.asarray(theirs.predict(pairs, prompt_name=prompt))
        expected = expected.reshape(len(pairs), -1)
        ours = np.stack(model.head.read_outputs(model.run(model.tokenize(pairs, prompt=prompt)))).astype(np.float32)
        difference = _difference(ours, expected)
        yield _expect(difference, str(prompt), "scores within", is_good=difference <= TOLERANCE)


_CHECKS = {DENSE: _vectors, SPARSE: _vectors, RERANKER: _reranker, LATE: _late, M3: _m3}


def _pictures(folder: Path, root: Path) -> Iterator[str]:
    """Compare both sides of a dual encoder, on texts and on image files.

    Raises:
        OnnxtoolError: a side cannot be exported, or its file cannot be run.
    """
    theirs = SentenceTransformer(str(folder), device="cpu")
    paths = write_pictures(root / "pictures")
    outputs = {task: root / f"{task}.onnx" for task in (TASK_OF_PICTURES, "sentence-similarity")}
    for task, output in outputs.items():
        onnxtool.export_model(onnxtool.ExportOptions(model_name=str(folder), output=output, task=task))
    pictures, texts = outputs.values()
    yield _compare(onnxtool.load(texts).encode(TEXTS), theirs.encode(list(TEXTS)), "texts", is_sparse=False)
    expected = theirs.encode([str(path) for path in paths])
    yield _compare(load_pictures(pictures).encode(paths), expected, "pictures", is_sparse=False)


def _pages(folder: Path, root: Path) -> Iterator[str]:
    """Compare pages of several sizes and queries with transformers, or with sentence-transformers for its folders.

    Raises:
        OnnxtoolError: a side cannot be exported, or its file cannot be run.
    """
    pages = [*write_pages(root / "pages"), *write_pictures(root / "pictures")]
    outputs = {task: root / f"{task}.onnx" for task in (TASK_OF_PICTURES, LATE_INTERACTION)}
    for task, output in outputs.items():
        onnxtool.export_model(onnxtool.ExportOptions(model_name=str(folder), output=output, task=task))
    read, ask, score = _page_reference(folder)
    theirs = [read(page) for page in pages]
    model = load_pictures(outputs[TASK_OF_PICTURES])
    ours: Any = model.encode(pages)
    cosine = min(_cosine(ours.row(number), page) for number, page in enumerate(theirs))
    yield _expect(cosine, f"{len(pages)} pages", "cosine of tokens", is_good=cosine >= LEAST_COSINE)
    options = InferOptions(outputs[TASK_OF_PICTURES], text_model=outputs[LATE_INTERACTION])
    cosine, difference = 1.0, 0.0
    for text in TEXTS:
        query: Any = encode_query(model, text, options)
        expected = ask(text)
        cosine = min(cosine, _cosine(query.row(0), expected))
        if len(text) <= _LONGEST_QUERY:  # rounding adds up over the tokens of a long one
            difference = max(difference, _difference(query.max_similarities(ours)[0], score(expected, theirs)))
    yield _expect(cosine, "queries", "cosine of tokens", is_good=cosine >= LEAST_COSINE)
    yield _expect(difference, "queries", "MaxSim within", is_good=difference <= TOLERANCE)


def _page_reference(folder: Path) -> tuple[Callable[[Path], Any], Callable[[str], Any], Callable[[Any, Any], Any]]:
    """Return how another library encodes a page and a query, and scores them."""
    if (folder / "modules.json").exists():
        encoder = MultiVectorEncoder(str(folder), device="cpu")
        return (
            lambda page: np.asarray(encoder.encode_document([str(page)])[0]),
            lambda text: np.asarray(encoder.encode_query([text])[0]),
            lambda query, pages: encoder.similarity([query], pages).numpy()[0],
        )
    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)

    def embed(inputs: Any) -> Any:
        with torch.inference_mode():
            return model(**inputs).embeddings[0].numpy()

    return (
        lambda page: embed(processor.process_images(images=[load_image(str(page))])),
        lambda text: embed(processor.process_queries(text=[text])),
        lambda query, pages: np.array(
            # One by one: of pages together, the padding of shorter ones is as similar as a vector of zeros.
            [float(processor.score_retrieval([torch.tensor(query)], [torch.tensor(page)])) for page in pages]
        ),
    )


_OF_PICTURES = {PICTURES: _pictures, PAGES: _pages}


def check(case: Case, root: Path) -> tuple[str, str]:
    """Return the outcome (equal, refused or WRONG) and what there is to say about it."""
    folder, base = root / "checkpoint", root / "base"
    base.mkdir(parents=True)
    case.make(folder, base)
    if case.kind in _OF_PICTURES:
        try:
            return "equal", "; ".join(_OF_PICTURES[case.kind](folder, root))
        except OnnxtoolError as error:
            return "refused", error.message
        except MismatchError as error:
            return "WRONG", str(error)
    outputs = {route: root / f"model{route or ''}.onnx" for route in case.routes or (None,)}
    try:
        for route, output in outputs.items():
            onnxtool.export_model(onnxtool.ExportOptions(model_name=str(folder), output=output, route=route))
    except OnnxtoolError as error:
        return "refused", error.message
    try:
        figures = [
            figure
            for route, output in outputs.items()
            for figure in _CHECKS[case.kind](
                case if route is None else replace(case, routes=(route,)), folder, onnxtool.load(output)
            )
        ]
    except OnnxtoolError as error:
        return "WRONG", f"exported, and then refused: {error.message}"
    except MismatchError as error:
        return "WRONG", str(error)
    except TypeError as error:
        return "WRONG", f"no API: {error}"
    return "equal", "; ".join(figures)


def _page(rows: Sequence[tuple[str, str, str, str]]) -> str:
    """Write the page of the documentation: a row for each checkpoint."""
    version = importlib.metadata.version("sentence-transformers")
    lines = [
        "# Retrieval checkpoints",
        "",
        "Generated by `make retrieval` (tests/retrieval/comparison.py); do not edit.",
        "",
        f"Small checkpoints with every module and setting, saved by sentence-transformers {version} itself, are",
        f"exported and compared with it on {len(TEXTS)} texts: empty, long, in many scripts, with and without prompts.",
        "",
        f"- *equal*: the cosine of vectors is at least {LEAST_COSINE}, and lengths, term weights and scores are",
        f"  within {TOLERANCE:g}.",
        "- *refused*: `onnxtool export` ends with the error shown here, and writes no file. `--head none`",
        "  exports the model's own outputs.",
        "",
        ", ".join(f"{sum(row[2] == outcome for row in rows)} {outcome}" for outcome in _OUTCOMES) + ".",
        "",
        "| kind | checkpoint | outcome | figures for each prompt, or the error |",
        "|---|---|---|---|",
    ]
    cells = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return "\n".join([*lines, *cells, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all cases, or those whose names contain `--only`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="check cases whose kind and name have one of these")
    parser.add_argument("--output", type=Path, help="write the page of the documentation to this file")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows: list[tuple[str, str, str, str]] = []
    for case in ALL_CASES:
        if not any(part in f"{case.kind}: {case.name}" for part in options.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome, detail = check(case, Path(folder))
            except Exception:  # noqa: BLE001  the others are still worth knowing
                traceback.print_exc()
                outcome, detail = "WRONG", "crashed"
            rows.append((case.kind, case.name, outcome, detail.replace(folder + "/", "")))
        sys.stdout.write(f"{outcome:8}{case.kind:18}{case.name:42}{rows[-1][3]}\n")
    counts = {outcome: sum(row[2] == outcome for row in rows) for outcome in _OUTCOMES}
    sys.stdout.write(", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + "\n")
    if options.output:
        options.output.write_text(_page(rows), encoding="utf-8")
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
