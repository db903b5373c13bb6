"""Count the texts that a tokenizer in a graph reads like the tokenizers library, next to the packages that do the same.

`python scripts/compare_text_input.py` trains one tokenizer of each class on the documentation and on words of ten
scripts, takes all-MiniLM-L6-v2's as well where `make models` has made it, and has 1,000 other texts read by each graph:
alone and in batches of 0 to 64. A difference is counted as one of the kinds that an export states, or as wrong: exit
code 1. Beside it stand `gen_processing_models` of onnxruntime-extensions, and onnx2oracle from the folder of
`--onnx2oracle` (`pip install --target DIR --no-deps onnx2oracle`): both read one text a run, without truncation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import onnxruntime as ort
import onnxruntime_extensions
import tokenizers
import transformers
from harness.machine import describe_machine
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.export.in_graph import TextProof
from onnxtool.export.tokenizer_rules import read_tokenizer
from onnxtool.graph.text_input import COUNT, IDS, MASK, TYPES, id_model
from onnxtool.runtime.text_graph import TextGraph
from tests.export.text_tokenizers import CLASSES, train

ROOT = Path(__file__).resolve().parents[1]
MINILM = ROOT / "models" / "checkpoints" / "all-MiniLM-L6-v2"
GENERATE = onnxruntime_extensions.gen_processing_models
LIMIT, TEXTS = 256, 1000
WRONG = "wrong"
# The first and the last letter of ten scripts: Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai, Hangul, …
_ENDS = "Aɏ\u0391ώ\u0410\u0451\u05d0\u05ea\u0621\u0652\u0905\u094d\u0e01\u0e4d\uac00\uae00\u3041\u30fe\u4e00\u5000"
_EMOJIS = ("😀", "👍🏽", "👩\u200d👩\u200d👧", "🇩🇪", "❤\ufe0f", "1\ufe0f\u20e3", "☕", "©", "→")
_SPECIAL = ("[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<mask>", "<unk>", "<pad>", "<|endoftext|>", "<extra_id_1>")
_SIGNS = "\t\n\r\x0b\x0c\x85\xa0\xad\u200b\u200e\u2028\u3000\ufeff\ufffd\x00\x01\x1f\x7f▁.,:!?-'()[]{}#/@"


def mixed_texts(count: int, seed: int) -> list[str]:
    """Return texts of words in ten scripts, some decomposed, with numbers, emojis, control characters and tokens."""
    draw = random.Random(seed)  # noqa: S311  texts, no secrets

    def word() -> str:
        first, last = map(ord, draw.choice(tuple(zip(_ENDS[::2], _ENDS[1::2], strict=True))))
        letters = "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 9)))
        return unicodedata.normalize(draw.choice(("NFC", "NFC", "NFD", "NFKC")), letters)

    def part() -> str:
        kind = draw.random()
        own = (_EMOJIS, _SIGNS, _SPECIAL)[int(kind * 40)] if kind < 3 / 40 else ()
        return draw.choice(own) if own else str(draw.randint(0, 10**6)) if kind < 0.15 else word()

    lengths = [0, 1, LIMIT, 2 * LIMIT, *(draw.choice((3, 10, 30, 300)) for _ in range(count - 4))]
    separators = (" ", " ", " ", "", "  ")
    return ["".join(part() + draw.choice(separators) for _ in range(length)) for length in lengths]


def count_texts(folder: Path, texts: Sequence[str]) -> tuple[Counter[str], int]:
    """Return the number of texts that differ alone, by kind, and of batches with a difference."""
    own = TextTokenizer(CheckpointFolder(folder))
    library = Tokenizer.from_str(own.content)
    rules, frame = read_tokenizer(own, LIMIT)
    library.enable_truncation(LIMIT)
    graph, proof, counts = TextGraph(id_model(rules, frame)), TextProof(own, rules, frame), Counter[str]()

    def is_same(group: Sequence[str]) -> bool:
        found, wanted = graph.run(group), library.encode_batch(group)
        rows = zip(*((one.ids, one.attention_mask, one.type_ids) for one in wanted), strict=True)
        return all(found[name].tolist() == list(row) for name, row in zip((IDS, MASK, TYPES), rows, strict=True))

    same = [text for text in texts if is_same([text])]
    for text in texts:
        if text not in same:
            try:
                counts[proof.kind(text)] += 1
            except InputError:
                counts[WRONG] += 1
    draw = random.Random(0)  # noqa: S311  texts, no secrets
    batches = sum(not is_same(draw.sample(same, size)) for size in range(1, 65)) + int(graph.run([])[COUNT][0])
    return counts, batches


def by_extensions(folder: Path) -> Any:
    """Return the graph of onnxruntime-extensions for a tokenizer of transformers."""
    return GENERATE(transformers.AutoTokenizer.from_pretrained(folder), pre_kwargs={}, opset=14)[0]


def by_onnx2oracle(folder: Path) -> Any:
    """Return the graph that onnx2oracle puts before a model: the last one that it asks onnxruntime-extensions for."""
    made: list[Any] = []

    def generate(*given: Any, **settings: Any) -> Any:
        made.append(GENERATE(*given, **settings))
        return made[-1]

    ways = "huggingface_hub.hf_hub_download", "onnx.load", "onnxruntime_extensions.gen_processing_models"
    with mock.patch(ways[0]), mock.patch(ways[1]), mock.patch(ways[2], generate), suppress(TypeError, AttributeError):
        spec = SimpleNamespace(hf_repo=str(folder))
        import_module("onnx2oracle.pipeline").build_augmented(spec)  # fails behind that, because there is no model
    return made[-1][0]


def count_of_peer(make: Callable[[Path], Any], folder: Path, texts: Sequence[str]) -> str:
    """Return the number of texts whose ids a peer's graph makes, or that there is none."""
    try:
        session = TextGraph(make(folder).SerializeToString())
    except Exception as error:  # noqa: BLE001  each class fails in its own way
        return f"none ({type(error).__name__})"
    library = TextTokenizer(CheckpointFolder(folder))
    return str(sum(session.run([text])[IDS].ravel().tolist() == list(library.encode([text])[0].ids) for text in texts))


def main() -> int:
    """Print the table; return 1 if a text is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--onnx2oracle", type=Path, metavar="DIR", help="a folder with the package onnx2oracle")
    given = parser.parse_args()
    peers = {"gen_processing_models": by_extensions}
    if given.onnx2oracle:
        sys.path.append(str(given.onnx2oracle))
        peers["onnx2oracle"] = by_onnx2oracle
    pages = [line for page in sorted((ROOT / "docs").rglob("*.md")) for line in page.read_text("utf-8").splitlines()]
    corpus, texts = [*pages, *(text.replace("\0", "") for text in mixed_texts(500, 1))], mixed_texts(TEXTS, 0)
    packages = (tokenizers, ort, onnxruntime_extensions, transformers)
    print(describe_machine(), *(f"{package.__name__} {package.__version__}" for package in packages), sep=", ")
    print(f"\n| tokenizer | equal | stated | wrong | wrong batches | {' | '.join(peers)} |")
    print("|---" * (5 + len(peers)) + "|")
    num_wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in CLASSES} | ({MINILM.name: MINILM} if MINILM.is_dir() else {})
        for kind, folder in folders.items():
            if kind in CLASSES:
                folder.mkdir()
                train(kind, corpus).save(str(folder / "tokenizer.json"))
                config = {"tokenizer_class": CLASSES[kind], "do_lower_case": "uncased" in kind}
                (folder / "tokenizer_config.json").write_text(json.dumps(config))
            counts, batches = count_texts(folder, texts)
            wrong = counts.pop(WRONG, 0)
            stated = "; ".join(f"{count} {name}" for name, count in counts.items())
            row = [len(texts) - wrong - counts.total(), stated, wrong, batches]
            row += [count_of_peer(make, folder, texts) for make in peers.values()]
            print(f"| {kind} | {' | '.join(map(str, row))} |", flush=True)
            num_wrong += wrong + batches
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
