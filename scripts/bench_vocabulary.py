"""Cut vocabularies, and count the texts whose outputs differ from the whole model's in any bit.

`python scripts/bench_vocabulary.py` reads the demo's models and collection (`make demo`). WordPiece is the demo's
MiniLM; BPE and Unigram are a RoBERTa and an XLM-R with random weights and trained tokenizers. The oracle is
onnxruntime on the whole file, with ids of the tokenizers library. Then: the bytes of a multilingual encoder of 250,002
rows, and the demo's SPLADE without the terms that have no weight anywhere.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from documentation_texts import documentation_texts
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import XLMRobertaConfig, XLMRobertaModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxtool import ExportOptions, OptimizeOptions, export_model, optimize_model
from onnxtool.checkpoint.text_files import read_texts
from onnxtool.optimize.report import VocabularyCut
from tests.export.text_tokenizers import CLASSES, train

TEXTS, ROWS = 2_000, 250_002
ROLES = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}


def write(path: Path, texts: list[str]) -> Path:
    """Write texts as JSON Lines."""
    lines = (json.dumps({"id": str(number), "contents": text}) for number, text in enumerate(texts))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def random_model(folder: Path, kind: str, texts: list[str], rows: int | None = None) -> Path:
    """Export an encoder with random weights and a tokenizer trained on the texts, of `rows` tokens if given."""
    tokenizer = train(kind, [*texts, *(text[::-1] for text in texts)])  # half of its words are in no text
    content = json.loads(tokenizer.to_str())
    if rows is not None:  # pieces that no text has, with scores as low as the least
        least, before = min(score for _, score in content["model"]["vocab"]), tokenizer.get_vocab_size()
        content["model"]["vocab"] += [[f"\ue000{number}", least] for number in range(rows - before)]
        content["added_tokens"][-1]["id"] = rows - 1  # <mask>, the last one
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        vocab_size=rows or tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=140,
    )  # fmt: skip
    checkpoint = folder / f"{kind}-{rows}-checkpoint"
    XLMRobertaModel(config).save_pretrained(checkpoint)
    (checkpoint / "tokenizer.json").write_text(json.dumps(content))
    stated = {f"{role}_token": token for role, token in ROLES.items()} | {"tokenizer_class": CLASSES[kind]}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(stated))
    output = folder / f"{kind}-{rows}.onnx"
    export_model(ExportOptions(str(checkpoint), output=output, exporter="torchscript", verify=False))
    return output


def outputs(path: Path, folder: Path, texts: list[str]) -> list[NDArray[Any]]:
    """Return the first output of each text alone."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(128)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names, found = [one.name for one in session.get_inputs()], []
    for read in tokenizer.encode_batch(texts):
        ids = np.array([read.ids])
        arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        found.append(session.run(None, {name: arrays[name] for name in names})[0])
    return found


def cut(source: Path, output: Path, texts: Path, precision: str = "fp32") -> VocabularyCut:
    """Cut a vocabulary and optimize the rest."""
    options = OptimizeOptions(source, output=output, vocabulary=texts, precision=precision, timing=False)
    found = optimize_model(options).vocabulary
    if found is None:
        raise RuntimeError("nothing was cut")
    gone = found.weight_bytes_before - found.weight_bytes
    print(f"{output.stem:<16}{found.rows_before:>10,} ->{found.rows:>8,} rows, {gone:>12,} bytes less", end="")
    return found


def optimize(source: Path, output: Path, precision: str = "fp32", texts: Path | None = None) -> Path:
    """Optimize the whole model in the same way."""
    calibration = None if precision == "fp32" else texts
    optimize_model(OptimizeOptions(source, output=output, precision=precision, calibration=calibration, timing=False))
    return output


def wrong_texts(folder: Path, texts: list[str]) -> int:
    """Cut vocabularies of each kind in each precision, and return the number of texts that differ."""
    given, wrong = write(folder / "texts.jsonl", texts), 0
    sources = {"WordPiece": Path("models/all-MiniLM-L6-v2.onnx")}
    sources |= {name: random_model(folder, kind, texts) for name, kind in (("BPE", "RoBERTa"), ("Unigram", "XLM-R"))}
    for name, source in sources.items():
        for precision in ("fp32", "int8"):
            whole = optimize(source, folder / f"whole-{name}-{precision}.onnx", precision, given)
            few = folder / f"{name}-{precision}.onnx"
            cut(source, few, given, precision)
            pairs = zip(
                outputs(whole, source.with_suffix(""), texts), outputs(few, few.with_suffix(""), texts), strict=True
            )
            num_wrong = sum(not np.array_equal(one, two) for one, two in pairs)
            print(f", {num_wrong} of {len(texts):,} texts wrong")
            wrong += num_wrong
    return wrong


def wrong_rankings(folder: Path) -> int:
    """Cut the terms of SPLADE that have no weight in any text; return the number of queries with another ranking."""
    source, collection = Path("models/splade.onnx"), Path("models/collection")
    texts = [text.contents for text in (*read_texts(collection), *read_texts(collection / "queries.jsonl"))]
    whole = optimize(source, folder / "whole-splade.onnx")
    tokenizer = Tokenizer.from_file("models/splade/tokenizer.json")
    before = np.concatenate(outputs(whole, source.with_suffix(""), texts))
    terms = {
        *np.nonzero(before.any(axis=0))[0].tolist(),
        *(one for read in tokenizer.encode_batch(texts) for one in read.ids),
    }
    listed = folder / "terms.json"
    listed.write_text(json.dumps([tokenizer.id_to_token(term) for term in sorted(terms)]))
    cut(source, folder / "splade.onnx", listed)
    after = np.concatenate(outputs(folder / "splade.onnx", folder / "splade", texts))
    rankings = []
    for weights in (before, after):
        documents, queries = np.split(weights.astype(np.float64), [len(read_texts(collection))])
        rankings.append((-(queries @ documents.T)).argsort(axis=1, kind="stable"))
    num_wrong = int((rankings[0] != rankings[1]).any(axis=1).sum())
    print(f", {num_wrong} of {len(rankings[0])} queries with another ranking")
    return num_wrong


def main() -> int:
    """Print a line for each cut; exit code 1 if anything is wrong."""
    texts = [text.replace("<", "") for text in documentation_texts(TEXTS)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wrong = wrong_texts(folder, texts) + wrong_rankings(folder)
        found = cut(random_model(folder, "XLM-R", texts, ROWS), folder / "multilingual.onnx", folder / "texts.jsonl")
        predicted = (found.rows_before - found.rows) * 32 * 4
        print(f", {predicted:,} predicted")
        return int(wrong > 0 or found.weight_bytes_before - found.weight_bytes != predicted)


if __name__ == "__main__":
    raise SystemExit(main())
