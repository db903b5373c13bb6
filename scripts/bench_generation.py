"""Measure how fast `onnxtool infer` writes, beside `generate` of transformers in PyTorch, in one process, in turns.

`python scripts/bench_generation.py` makes models of common shapes with random weights, exports and optimizes them, and
lets each contender write the same number of tokens after the same texts, in several rounds. A ratio is of one round;
the table has the median. All contenders must write the same tokens, but for ties of rounding, which it counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from harness.machine import describe_machine
from tokenizers import Tokenizer, models, pre_tokenizers

from onnxtool.export import ExportOptions, export_model
from onnxtool.infer import GenerateOptions, load_writer
from onnxtool.optimize import OptimizeOptions, optimize_model

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def t5_small() -> Any:
    """T5-small's shape: 60 million parameters."""
    config = transformers.T5Config(**IDS, decoder_start_token_id=0, tie_word_embeddings=False)
    return transformers.T5ForConditionalGeneration(config)


def bart_base() -> Any:
    """BART-base's shape: 139 million parameters."""
    config = transformers.BartConfig(
        d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072, **IDS, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def marian() -> Any:
    """The shape of a translator of Helsinki-NLP: 75 million parameters."""
    config = transformers.MarianConfig(
        vocab_size=58101, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=512, **IDS,
        decoder_start_token_id=0, forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.MarianMTModel(config)


def gpt2() -> Any:
    """GPT-2's shape: 124 million parameters."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**IDS))


def llama_135m() -> Any:
    """SmolLM-135M's shape."""
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, **IDS,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "T5-small": t5_small,
    "BART-base": bart_base,
    "Marian": marian,
    "GPT-2": gpt2,
    "SmolLM-135M": llama_135m,
}


@dataclass
class Contender:
    """Writes after texts each time it is asked: a list of ids for each."""

    name: str
    write: Callable[[Sequence[str]], list[tuple[int, ...]]]
    tokens_per_s: list[float] = field(default_factory=list)


def main() -> int:
    """Measure what the command line names, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64, help="words of a text")
    parser.add_argument("--new_tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for model in arguments.models:
            rows += measure(model, Path(name), arguments)
    print(f"{describe_machine()}; {arguments.threads} threads\n")
    print("| model | texts | contender | tokens/s | to PyTorch | same tokens |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['model']} | {row['batch_size']} | {row['contender']} | {row['tokens_per_s']:.1f} "
            f"| {row['ratio']:.2f} | {row['same']:.1%} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one model."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.generation_config.do_sample = False
    checkpoint = folder / name
    model.save_pretrained(checkpoint)
    vocabulary_size = model.get_output_embeddings().weight.shape[0]
    save_tokenizer(checkpoint, vocabulary_size)
    is_encoder_decoder = model.config.is_encoder_decoder
    task = "text2text-generation-with-past" if is_encoder_decoder else "text-generation-with-past"
    path = folder / f"{name}.onnx"
    exporter = "torchscript" if is_encoder_decoder else "auto"
    export_model(ExportOptions(str(checkpoint), output=path, task=task, exporter=exporter, verify=False))
    optimized = folder / f"{name}-optimized.onnx"
    optimize_model(OptimizeOptions(path, output=optimized, verify=False))
    encoder = folder / f"{name}-encoder-optimized.onnx"
    if is_encoder_decoder:
        optimize_model(OptimizeOptions(folder / f"{name}-encoder.onnx", output=encoder, verify=False))
    contenders = [
        pytorch(model, checkpoint, arguments),
        onnxtool("onnxtool", path, None, arguments),
        onnxtool("onnxtool, optimized", optimized, encoder if is_encoder_decoder else None, arguments),
    ]
    rows = []
    for batch_size in arguments.batch_sizes:
        texts = [
            " ".join(f"w{(7 * row + 13 * word) % (vocabulary_size - 10)}" for word in range(arguments.prompt))
            for row in range(batch_size)
        ]
        rows += race(name, contenders, texts, arguments.rounds)
    return rows


def race(name: str, contenders: Sequence[Contender], texts: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Let each write after `texts` once to warm up, and then in turns."""
    written = [contender.write(texts) for contender in contenders]
    for contender in contenders:
        contender.tokens_per_s.clear()
    for _ in range(rounds):
        for contender in contenders:
            start = time.perf_counter()
            count = sum(map(len, contender.write(texts)))
            contender.tokens_per_s.append(count / (time.perf_counter() - start))
    reference = contenders[0]
    rows = []
    for contender, answers in zip(contenders, written, strict=True):
        ratios = [own / theirs for own, theirs in zip(contender.tokens_per_s, reference.tokens_per_s, strict=True)]
        pairs = zip(answers, written[0], strict=True)
        same = [one == other for pair in pairs for one, other in zip(*pair, strict=True)]
        rows.append(
            {
                "model": name,
                "batch_size": len(texts),
                "contender": contender.name,
                "tokens_per_s": statistics.median(contender.tokens_per_s),
                "ratio": statistics.median(ratios),
                "same": sum(same) / len(same),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def pytorch(model: Any, checkpoint: Path, arguments: argparse.Namespace) -> Contender:
    """Return `generate` with its cache; reading the texts is counted, as it is for onnxtool."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, padding_side="left")

    def write(texts: Sequence[str]) -> list[tuple[int, ...]]:
        inputs = tokenizer(list(texts), padding=True, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            found = model.generate(
                **inputs, max_new_tokens=arguments.new_tokens, min_new_tokens=arguments.new_tokens, do_sample=False
            )
        return [tuple(row) for row in found[:, -arguments.new_tokens :].tolist()]

    return Contender("transformers", write)


def onnxtool(name: str, path: Path, encoder: Path | None, arguments: argparse.Namespace) -> Contender:
    """Return the writer of onnxtool, loaded once."""
    settings = path.with_suffix("") / "generation_config.json"
    folder = settings.parent if settings.exists() else path.parent / path.stem.removesuffix("-optimized")
    settings = folder / "generation_config.json"
    given = {**json.loads(settings.read_text("utf-8")), "min_new_tokens": arguments.new_tokens}
    settings.write_text(json.dumps(given), encoding="utf-8")
    options = GenerateOptions(max_new_tokens=arguments.new_tokens, encoder_path=encoder)
    writer = load_writer(path, options=options, model_name=str(folder), threads=arguments.threads)
    return Contender(name, lambda texts: [answer.token_ids for answer in writer.write(list(texts)).answers])


def save_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of `size` words beside the model."""
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*named.values(), *(f"w{number}" for number in range(size - 4))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=named["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {**named, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
