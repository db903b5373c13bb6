"""Four small good checkpoints, as their own libraries save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

MLM, SPLADE, SENTENCE, DECODER = "masked", "splade", "sentence", "decoder"
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = "the a cat dog Cat Berlin cafe café Café train leaves at noon run ##ning ##s naïve naive zu Zürich Zurich"
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCZéèüï0123456789.,!?-'中文字"
_ROLES = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
TEXTS = (
    "The cat leaves Berlin at noon.",
    "Café, cafe and CAFÉ: naïve in Zürich!",
    "中文字 and a dog",
    "running dogs  \t trains\n0123",
    "[MASK] the [SEP] train",
    "",
)


def make_bases(folder: Path) -> dict[str, Path]:
    """Save all four below `folder`."""
    paths = {name: folder / name for name in (MLM, SPLADE, SENTENCE, DECODER)}
    _masked(paths[MLM])
    _masked(folder / "parts")
    for name in (SPLADE, SENTENCE):
        _modules(name, folder / "parts", paths[name])
    _decoder(paths[DECODER])
    return paths


def enliven(model: Any) -> Any:
    """Give all parameters numbers that matter: those of a fresh model are so small that errors do not show."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.08)
    return model.eval()


def change_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None deletes one."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), encoding="utf-8")


def _masked(folder: Path) -> None:
    torch.manual_seed(0)
    vocabulary = [*SPECIAL, *WORDS.split(), *CHARACTERS, *(f"##{character}" for character in CHARACTERS)]
    tokenizer = transformers.BertTokenizer(
        vocab={token: index for index, token in enumerate(dict.fromkeys(vocabulary))}, do_lower_case=True
    )
    tokenizer.model_max_length = 64
    config = transformers.BertConfig(vocab_size=len(tokenizer), **SIZES)
    enliven(transformers.BertForMaskedLM(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _modules(name: str, source: Path, folder: Path) -> None:
    torch.manual_seed(0)
    if name == SPLADE:
        SparseEncoder(modules=[MLMTransformer(str(source)), SpladePooling()], device="cpu").save_pretrained(str(folder))
        return
    transformer = Transformer(str(source))
    modules = [transformer, Pooling(32, "mean"), enliven(Dense(32, 16)), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu")
    model.save_pretrained(str(folder))


def _decoder(folder: Path) -> None:
    torch.manual_seed(0)
    core = Tokenizer(models.BPE(_bytes(), [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("a", "t")]))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder, core.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=64, **_ROLES)
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **SIZES,
    )  # fmt: skip
    enliven(transformers.LlamaForCausalLM(config)).save_pretrained(folder)


def _bytes() -> dict[str, int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet, "Ġt", "he", "Ġthe", "at"])}
