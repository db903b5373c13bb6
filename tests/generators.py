"""Tiny models that write: checkpoints with random weights, and their exports with a cache, made once for all tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.infer.tiny_models import write_checkpoint
from tests.workshop import Workshop

ENCODER_DECODER = "text2text-generation-with-past"
DECODER = "text-generation-with-past"
SIZES: dict[str, Any] = {"vocab_size": 40, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
BART = {
    **SIZES, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
    "decoder_start_token_id": 3, "forced_eos_token_id": None,
}  # fmt: skip


def make_model(name: str) -> Any:
    """Build a model with weights that are large enough for errors to show."""
    import torch
    import transformers

    torch.manual_seed(0)
    match name:
        case "t5":
            config = transformers.T5Config(
                vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
                eos_token_id=3, pad_token_id=0,
            )  # fmt: skip
            model: Any = transformers.T5ForConditionalGeneration(config)
        case "bart":
            model = transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))
        case "fsmt":
            model = transformers.FSMTForConditionalGeneration(
                transformers.FSMTConfig(
                    langs=["en", "de"], src_vocab_size=40, tgt_vocab_size=40,
                    **{key: value for key, value in BART.items() if key not in ("vocab_size",)},
                )
            )  # fmt: skip
        case "llama":
            model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                    head_dim=8, intermediate_size=64, max_position_embeddings=96, pad_token_id=0, bos_token_id=2,
                    eos_token_id=3,
                )
            )  # fmt: skip
        case _:
            raise ValueError(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model.eval()


def checkpoint(workshop: Workshop, name: str) -> Path:
    """Return the folder of the checkpoint called `name`, which must not be changed."""

    def make(folder: Path) -> None:
        model = make_model(name)
        model.save_pretrained(folder)
        config = (folder / "config.json").read_text()
        write_checkpoint(
            folder, tokenizer_config={"model_max_length": 64, "tokenizer_class": "PreTrainedTokenizerFast"}
        )
        (folder / "config.json").write_text(config)

    return workshop.made(f"{name}-checkpoint", make)


def exported(workshop: Workshop, name: str) -> Path:
    """Return the export of that checkpoint with its cache, which must not be changed."""
    from onnxtool import ExportOptions, export_model

    source = checkpoint(workshop, name)

    def make(folder: Path) -> None:
        output = folder / f"{name}.onnx"
        if name == "llama":  # verified in tests/export/test_decoding.py
            export_model(ExportOptions(str(source), output=output, task=DECODER, verify=False))
            return
        report = export_model(
            # FSMT's tokens are compared with those of `generate` in tests/infer/test_generation.py.
            ExportOptions(
                str(source), output=output, task=ENCODER_DECODER, exporter="torchscript", verify=name != "fsmt"
            )
        )
        verification = report.verification
        figures = {
            "inputs": {info.name: info.shape for info in report.inputs},
            "outputs": {info.name: info.shape for info in report.outputs},
            "notes": report.notes,
            "cases": [] if verification is None else [case.description for case in verification.cases],
            "mask_effect": None if verification is None else verification.mask_effect,
        }
        (folder / "report.json").write_text(json.dumps(figures), encoding="utf-8")

    return workshop.made(f"{name}-exported", make) / f"{name}.onnx"
