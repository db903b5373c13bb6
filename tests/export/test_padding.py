"""The answer for a text is the one that the model gives for it alone, whichever side its tokenizer pads on."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from onnxtool import ExportOptions, export_model
from onnxtool.encoding import CorpusOptions, encode_corpus, read_shards
from onnxtool.export.modalities.modality import SEQUENCE
from onnxtool.export.modalities.text import TextInputs, choose_side
from onnxtool.export.signature import detect_signature, run_torch_tensors, to_numpy
from onnxtool.infer import load
from onnxtool.infer.heads.head import BatchRules
from onnxtool.model_file import ModelFile
from onnxtool.runtime.difference import TOLERANCES
from tests.infer.tiny_models import TEXTS, TinyModel, write_checkpoint

GPT: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 48}
LONG: dict[str, Any] = {"max_position_embeddings": 48}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, **LONG}
NEO = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]], **LONG}
XGLM = {"d_model": 16, "num_layers": 1, "attention_heads": 2, "ffn_dim": 32, **LONG}
XLNET = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}
# Architecture and settings, and the sides on which padding leaves the answer for a text as it is.
MODELS: dict[str, tuple[str, str, dict[str, Any], set[str]]] = {
    "GPT-2": ("GPT2", "LMHeadModel", GPT, {"right"}),
    "GPT-2 classifier": ("GPT2", "ForSequenceClassification", GPT, {"right"}),
    "GPT-2 states": ("GPT2", "Model", GPT, {"right"}),
    "GPT-Neo": ("GPTNeo", "ForCausalLM", NEO, {"right"}),
    "GPT-BigCode": ("GPTBigCode", "ForCausalLM", GPT, {"right"}),
    "XGLM": ("XGLM", "ForCausalLM", XGLM, {"right"}),
    "BERT": ("Bert", "Model", BERT, {"right"}),
    "RoBERTa counts from its padding id": ("Roberta", "ForMaskedLM", BERT, {"right", "left"}),
    "Llama has relative positions": ("Llama", "ForCausalLM", BERT, {"right", "left"}),
    "XLNet classifies by the last position": ("XLNet", "ForSequenceClassification", XLNET, {"left"}),
    "ConvBERT's convolutions read the padding": ("ConvBert", "Model", BERT, set()),
}
POOLED = {"Transformer": {}, "Pooling": {"word_embedding_dimension": 16, "pooling_mode_lasttoken": True}}


def build(kind: str) -> Any:
    """Make a model with large random weights."""
    name, head, sizes, _ = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}{head}")(
        config(vocab_size=40, pad_token_id=0, bos_token_id=2, eos_token_id=3, **sizes)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


@pytest.mark.parametrize("kind", MODELS)
def test_texts_are_padded_where_it_does_not_change_their_answers(tmp_path: Path, kind: str) -> None:
    """The tokenizer's side is kept where it is right; the oracle is the model itself on a text alone."""
    model, right = build(kind), MODELS[kind][3]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(write_checkpoint(tmp_path))
    text = TextInputs.of(model, tokenizer, tuple(inspect.signature(model.forward).parameters))
    sequences = detect_signature(model, text).sequences
    for side in ("right", "left"):
        tokenizer.padding_side = side
        chosen, stamped, note = choose_side(model, text, sequences, TOLERANCES["fp32"])
        assert (set(chosen.sides), stamped) == (right, side if side in right else min(right, default="none"))
        assert bool(note) == (stamped != side)
        one, several = (tokenizer(texts, padding=True, return_tensors="pt") for texts in ([TEXTS[1]], TEXTS[:2]))
        with torch.inference_mode():
            alone, batch = (model(**{name: read[name] for name in text.names})[0] for read in (one, several))
        found = batch[1][several["attention_mask"][1] > 0] if sequences else batch[1]
        assert torch.allclose(found, alone[0], atol=1e-4) == bool(right)


def test_vectors_do_not_depend_on_shards(tmp_path: Path) -> None:
    """A decoder by its last token: infer and corpora in parts and shards of any size give the vector of a text alone.

    The stamp overrides the tokenizer's side, which the checkpoint's own folder still states.
    """
    folder, model = tmp_path / "checkpoint", build("GPT-2 states")
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    write_checkpoint(folder, config=config, tokenizer_config={"padding_side": "left"}, modules=POOLED)
    output = tmp_path / "model.onnx"
    report = export_model(ExportOptions(str(folder), output=output, exporter="torchscript"))
    assert report.metadata["onnxtool.padding"] == "right"
    assert json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())["padding_side"] == "right"
    assert any("padded on the right, although the tokenizer pads on the left" in note for note in report.notes)
    assert report.verification is not None
    assert report.verification.batch_effect is not None
    assert report.verification.batch_effect < 1e-4
    model = load(output, model_name=folder, provider="cpu")
    alone = np.stack([np.asarray(model.encode(text)) for text in TEXTS])
    corpus = tmp_path / "corpus.jsonl"
    lines = (json.dumps({"id": str(number), "contents": text}) for number, text in enumerate(TEXTS))
    corpus.write_text("".join(f"{line}\n" for line in lines))
    for shard_size, split_bytes in ((5, 1 << 20), (2, 60), (1, 20)):
        vectors = tmp_path / f"{shard_size}"
        options = CorpusOptions(provider="cpu", workers=1, shard_size=shard_size, split_bytes=split_bytes)
        encode_corpus(output, corpus, vectors, options)
        shards = list(read_shards(vectors))
        assert [text for shard in shards for text in shard.ids] == [str(number) for number in range(len(TEXTS))]
        assert np.allclose(np.concatenate([shard.vectors for shard in shards]), alone, atol=1e-5)


def test_texts_of_other_lengths_share_no_batch_where_padding_changes_them(tmp_path: Path) -> None:
    """The stamp says so; a graph with a mask pads otherwise."""
    for side, batches in (("none", [[1], [0, 2]]), ("right", [[1, 0, 2]])):
        table = TinyModel(np.eye(4), "last_hidden_state", metadata={"onnxtool.padding": side})
        rules = BatchRules.of(ModelFile.open(table.write(tmp_path / f"{side}.onnx")))
        assert list(rules.batches([5, 3, 5])) == batches


@pytest.mark.parametrize(("kind", "side", "moves"), [("BERT", "right", False), ("ConvBERT's", "left", True)])
def test_padding_to_a_fixed_length_is_measured_against_the_text_alone(
    tmp_path: Path, kind: str, side: str, moves: bool
) -> None:
    """A file with a fixed length has no other way to run a short text."""
    model = build(next(name for name in MODELS if name.startswith(kind)))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(write_checkpoint(tmp_path))
    tokenizer.padding_side = side
    text = TextInputs.of(model, tokenizer, tuple(inspect.signature(model.forward).parameters))
    assert text.filled_up({}) is None
    pair = text.filled_up({SEQUENCE: 36})
    assert pair is not None
    padded, alone = pair
    assert padded.valid is not None
    assert padded.valid.sum(axis=1).tolist() == [12, 12]
    assert (padded.feeds["input_ids"][~padded.valid] == text.pad_id).all()
    assert alone.feeds["input_ids"].shape == (1, 12)
    found, wanted = (run_torch_tensors(model, case.feeds)["last_hidden_state"] for case in pair)
    error = np.abs(to_numpy(found)[:1][:, padded.valid[0]] - to_numpy(wanted)).max()
    assert (error > 1e-3) == moves
