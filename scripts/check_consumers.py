"""Export models for every target, load each result in its real consumer, and compare the answers with PyTorch.

What is checked of a consumer stands in scripts/consumers/TARGET.json, with the script that runs it. Each consumer runs
in an environment of its own, installed below --work_dir from the pins there (PyPI, npm; node must be there); one
without pins runs in this environment. Vespa and text-embeddings-inference are no packages: what their source does is
done in onnxruntime, and the table says so. Exit code 1 where an answer differs.

Run `python scripts/check_consumers.py --work_dir models/consumers`, with --target for some consumers only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from consumer_models import build_model
from numpy.typing import NDArray

SCRIPTS = Path(__file__).resolve().parent
CONSUMERS = SCRIPTS / "consumers"
QUERY = 40  # so many characters of a text are a query to encoders that tell queries and documents apart
QUESTION = "what is the capital of France?"  # which rerankers rank texts by
COSINE = 0.99999
TOLERANCE = 1e-4  # of scores
# How near to a half a scaled weight is on the boundary of two integers: float32 noise of 1e-5, times 256 / 5.
ROUNDING = 5e-4
_WORDS = """the model of sparse retrieval weighs terms query document search engine index it's (see) [2] ?! 12345 B-52
e-mail unbelievably antidisestablishmentarianism"""
_EXPORT = (sys.executable, "-m", "onnxtool", "export", "--quiet", "--force")
# Anserini's quantization of weights: SpladePlusPlusEncoder.java and SparseEncoder.java.
WEIGHT_RANGE, QUANT_RANGE, DROPPED = np.float32(5), np.float32(256), (0, 101, 102)

Vector = NDArray[Any]


@dataclass(frozen=True)
class Check:
    """One model for one consumer.

    Attributes:
        consumer: the name of its files in scripts/consumers/: that of the target, or of what runs a target's folder.
        target: as --target names it.
        model: one of MODELS.
        script: what runs the consumer, in scripts/consumers/.
        settings: what the script is told of the model, as the note of the export says.
        options: what the export is told beside the target.
        simulated: whether it is the consumer's source that runs, and not the consumer.
        compare: how its answers are compared with PyTorch's, one of COMPARISONS.
        cosine: the lowest cosine that is allowed, which a file in another precision states.
    """

    consumer: str
    target: str
    model: str
    script: str
    settings: Sequence[str] = ()
    options: Sequence[str] = ()
    simulated: bool = False
    compare: str = "cosines"
    cosine: float = COSINE


def find_checks() -> tuple[Check, ...]:
    """Return the checks of all consumers, from scripts/consumers/."""
    checks = []
    for path in sorted(CONSUMERS.glob("*.json")):
        shared: dict[str, Any] = {"target": path.stem, **json.loads(path.read_text(encoding="utf-8"))}
        checks += [Check(path.stem, **{**shared, **row}) for row in shared.pop("checks", ())]
    return tuple(checks)


def make_texts(count: int) -> list[str]:
    """Make up texts of 1 to 60 words, some of them cut into pieces by the tokenizer, and one that is too long."""
    words = [*_WORDS.split(), "naïve", "Café", "日本", "Straße"]
    source = random.Random(0)  # noqa: S311  nothing secret
    texts = ["what is AI?", "How do I reset my password?", "The train to Berlin leaves at noon."]
    texts += [" ".join(source.choices(words, k=source.randint(1, 60))) for _ in range(count - len(texts))]
    return [*texts[: count - 1], " ".join(source.choices(words, k=700))]


def main() -> int:
    """Run the checks that were asked for and print their table."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--work_dir", type=Path, required=True, help="where environments, models and exports are put")
    names = sorted({check.consumer for check in find_checks()})
    parser.add_argument("--target", action="append", choices=names, help="check this one; may be given several times")
    parser.add_argument("--texts", type=int, default=200, help="how many texts to encode")
    arguments = parser.parse_args()
    work_dir: Path = arguments.work_dir.resolve()
    texts = work_dir / "texts.json"
    work_dir.mkdir(parents=True, exist_ok=True)
    texts.write_text(json.dumps(make_texts(arguments.texts)), encoding="utf-8")
    rows, passed = [], True
    for check in find_checks():
        if arguments.target and check.consumer not in arguments.target:
            continue
        print(f"checking {check.model} in {check.consumer}", file=sys.stderr, flush=True)
        try:
            held, figures = run_check(check, work_dir, texts)
        except subprocess.CalledProcessError as error:
            held, figures = False, (str(error.stderr).strip().splitlines() or [str(error)])[-1]
        passed = passed and held
        consumer = f"{check.consumer}{' (its source, in onnxruntime)' if check.simulated else ''}"
        how = " ".join((*check.settings, *check.options))
        rows.append((consumer, check.model, " ".join(how.split()), figures, "yes" if held else "NO"))
    print("| consumer | model | as | figures | passed |\n|---|---|---|---|---|")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return 0 if passed else 1


def run_check(check: Check, work_dir: Path, texts: Path) -> tuple[bool, str]:
    """Export, encode `texts` in the consumer and in PyTorch, and say whether they agree, with figures.

    Raises:
        subprocess.CalledProcessError: the export or the consumer failed.
    """
    checkpoint = build_model(check.model, work_dir / "checkpoints")
    folder = work_dir / "exports" / "-".join((check.target, *check.options[1:])) / check.model
    if not folder.is_dir():
        words = ("--target", check.target, *check.options, "--model_name", str(checkpoint), "--output", str(folder))
        _run([*_EXPORT, *words])
    answers = work_dir / "answers.json"
    answers.unlink(missing_ok=True)
    command = [*_interpreter(check, work_dir), str(folder), str(texts), str(answers), *check.settings]
    _run(command)
    wanted = [np.array(row) for row in reference(checkpoint, tuple(json.loads(texts.read_text(encoding="utf-8"))))]
    rows = zip(json.loads(answers.read_text(encoding="utf-8")), wanted, strict=True)
    found = [_as_vector(row, len(vector)) for row, vector in rows]
    return COMPARISONS[check.compare](found, wanted, check.cosine)


@cache
def reference(checkpoint: Path, texts: tuple[str, ...]) -> list[list[float]]:
    """Return a vector for each text, in float32: of the vocabulary for a sparse encoder, a score for a reranker.

    Of encoders that tell queries and documents apart, behind the vector of the text there is that of its first words
    as a query: all vectors of tokens of a late-interaction encoder, and weights without those of [CLS] and its kin.
    """
    import torch
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder

    has_routes, architecture = (checkpoint / "router_config.json").is_file(), ""
    if not has_routes:
        architecture = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    name, queries = str(checkpoint), [text[:QUERY] for text in texts]
    if architecture.endswith(("ForSequenceClassification", "ForCausalLM")):
        activation = torch.nn.Identity() if architecture.endswith("ForSequenceClassification") else None
        reranker = CrossEncoder(name, device="cpu", activation_fn=activation)
        pairs = [(QUESTION, text) for text in texts]
        return [[float(score)] for score in reranker.predict(pairs, batch_size=1)]
    if architecture == "HF_ColBERT":
        late = MultiVectorEncoder(name, device="cpu")
        both = zip(late.encode_document([*texts]), late.encode_query(queries), strict=True)
        return [[*document.ravel().tolist(), *query.ravel().tolist()] for document, query in both]
    if has_routes or architecture.endswith("ForMaskedLM"):
        sparse = SparseEncoder(name, device="cpu")
        weights = sparse.encode_document([*texts], batch_size=1).to_dense()
        if has_routes:
            weights = torch.cat([weights, sparse.encode_query(queries).to_dense()], dim=1)
            size = weights.shape[1] // 2
            weights[:, [start + term for start in (0, size) for term in sparse.tokenizer.all_special_ids]] = 0
        found: list[list[float]] = weights.tolist()
        return found
    dense: list[list[float]] = SentenceTransformer(name, device="cpu").encode([*texts], batch_size=1).tolist()
    return dense


def _as_vector(row: Any, size: int) -> Vector:
    """Return the vector of an answer, which may be an object of term ids and weights."""
    if not isinstance(row, dict):
        return np.asarray(row, dtype=np.float64)
    vector = np.zeros(size)
    vector[[int(term) for term in row]] = list(row.values())
    return vector


def quantize(weights: Vector) -> Vector:
    """Return Anserini's integer weights: Math.round(weight / 5 * 256) in float32; -1 for what it drops."""
    scaled = (weights.astype(np.float32) / WEIGHT_RANGE * QUANT_RANGE).astype(np.float64)
    terms = np.where(weights > 0, np.floor(scaled + 0.5), -1.0)
    terms[..., DROPPED] = -1
    return terms


def _compare_integers(found: Sequence[Vector], wanted: Sequence[Vector], _cosine: float) -> tuple[bool, str]:
    """Compare integer weights, which have to be equal.

    A weight of PyTorch's that lies on the boundary between two integers, as far as float32 can tell, rounds either way
    in PyTorch too, by its number of threads; these are counted apart.
    """
    weights = np.stack(wanted)
    ours, theirs = quantize(np.stack(found)), quantize(weights)
    differ, terms = ours != theirs, int((theirs >= 0).sum())
    is_near = np.abs(weights / float(WEIGHT_RANGE) * float(QUANT_RANGE) % 1 - 0.5) < ROUNDING
    boundary = differ & is_near & (ours >= 0) & (theirs >= 0)
    equal, wrong = int((~differ.any(axis=1)).sum()), int((differ & ~boundary).sum())
    figures = f"{equal} of {len(found)} texts with equal integers; of {terms} terms {wrong} differ"
    return wrong == 0 and terms > 0, f"{figures}, {boundary.sum()} at a rounding boundary"


def _compare_cosines(found: Sequence[Vector], wanted: Sequence[Vector], cosine: float) -> tuple[bool, str]:
    pairs = zip(found, wanted, strict=True)
    cosines = [float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) for a, b in pairs]
    lowest = min(cosines)
    return lowest >= cosine, f"{len(cosines)} texts, lowest cosine {lowest:.8f}"


def _compare_scores(found: Sequence[Vector], wanted: Sequence[Vector], _cosine: float) -> tuple[bool, str]:
    ours, theirs = np.stack(found), np.stack(wanted)
    largest = float(np.abs(ours - theirs).max())
    return largest <= TOLERANCE < np.ptp(theirs), f"{len(found)} texts, scores within {largest:.2g}"


# By the name that a consumer's file, or one of its checks, gives as `compare`; cosines where it gives none.
COMPARISONS: dict[str, Callable[[Sequence[Vector], Sequence[Vector], float], tuple[bool, str]]] = {
    "cosines": _compare_cosines,
    "integers": _compare_integers,
    "scores": _compare_scores,
}


def _interpreter(check: Check, work_dir: Path) -> list[str]:
    """Return the command that runs the consumer's script, after installing what it needs."""
    script = CONSUMERS / check.script
    if script.suffix == ".mjs":
        home = work_dir / "node"
        home.mkdir(exist_ok=True)
        for file in (CONSUMERS / "package.json", script):  # node looks for packages beside the script
            shutil.copyfile(file, home / file.name)
        _run(["npm", "install", "--no-audit", "--no-fund"], cwd=home, ONNXRUNTIME_NODE_INSTALL_CUDA="skip")
        return ["node", str(home / script.name)]
    pins = CONSUMERS / f"{check.consumer}.txt"
    python = sys.executable
    if pins.is_file():
        home = work_dir / "environments" / check.consumer
        python = str(home / "bin" / "python")
        if not home.is_dir():
            print(f"installing {pins.name}", file=sys.stderr, flush=True)
            _run([sys.executable, "-m", "venv", str(home)])
        _run([python, "-m", "pip", "install", "--quiet", "--requirement", str(pins)])
    return [python, str(CONSUMERS / "exchange.py"), check.script]


def _run(command: Sequence[str], *, cwd: Path | None = None, **variables: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **variables}
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd, env=environment)


if __name__ == "__main__":
    sys.exit(main())
