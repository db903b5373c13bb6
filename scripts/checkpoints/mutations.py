"""What is done to a good checkpoint, a function each: what it is called, to which bases, and what has to come of it.

A mutation that damages what the weights mean has to be refused: the checkpoint's own library computes garbage from
many of these, so that it is no oracle for them. All others are equal to what that library computes, or refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoints.bases import DECODER, MLM, SENTENCE, SPLADE, change_json

Weights = dict[str, torch.Tensor]
ALL = (MLM, SPLADE, SENTENCE, DECODER)
_QUERY = {DECODER: "model.layers.1.self_attn.q_proj.weight", SENTENCE: "encoder.layer.1.attention.self.query.weight"}
_NORM = {DECODER: "model.layers.1.input_layernorm.weight", SENTENCE: "embeddings.LayerNorm.weight"}
_EMBEDDING = {DECODER: "model.embed_tokens.weight", SENTENCE: "embeddings.word_embeddings.weight"}
_BERT = (MLM, SPLADE, SENTENCE)
_HEADS = (MLM, SPLADE)


@dataclass(frozen=True)
class Mutation:
    """A change of a checkpoint.

    Attributes:
        apply: changes the folder of a base of the given name.
        bases: which it is applied to.
        is_damage: whether it has to be refused.
        keeps_meaning: whether it is to be what the base is, which the checkpoint's own library does not see.
    """

    name: str
    apply: Callable[[Path, str], None]
    bases: tuple[str, ...] = ALL
    is_damage: bool = False
    keeps_meaning: bool = False


def _weights(folder: Path, change: Callable[[Weights], Weights | None]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    changed = change(weights)
    save_file(weights if changed is None else changed, path, metadata={"format": "pt"})


def _of(names: dict[str, str], base: str) -> str:
    name = names.get(base)
    return name if name is not None else f"bert.{names[SENTENCE]}"


def _cast(folder: Path, base: str, *, names: dict[str, str], dtype: torch.dtype, scale: str = "") -> None:
    name = _of(names, base)

    def change(weights: Weights) -> None:
        value = weights[name]
        factor = value.abs().max() / 100
        weights[name] = (value / factor).round().to(dtype) if not dtype.is_complex else value.to(dtype)
        if scale:
            weights[name.removesuffix("weight") + scale] = factor.reshape(1)

    _weights(folder, change)


def _edit(folder: Path, base: str, *, names: dict[str, str], change: Callable[[Weights, str], object]) -> None:
    _weights(folder, lambda weights: (change(weights, _of(names, base)), None)[1])


def _rename(folder: Path, base: str, *, names: dict[str, str], old: str, new: str) -> None:
    def change(weights: Weights, name: str) -> None:
        weights[name.replace(old, new)] = weights.pop(name)

    _edit(folder, base, names=names, change=change)


def _prefix(folder: Path, _base: str, *, prefix: str, only: str = "") -> None:
    _weights(folder, lambda weights: {(prefix + name if only in name else name): v for name, v in weights.items()})


def _float(folder: Path, _base: str, *, dtype: torch.dtype) -> None:
    _weights(folder, lambda weights: {name: value.to(dtype) for name, value in weights.items()})


def _extra(folder: Path, _base: str, *, name: str, value: torch.Tensor) -> None:
    _weights(folder, lambda weights: {**weights, name: value})


def _shards(folder: Path, _base: str, *, fault: str = "") -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    path.unlink()
    names = sorted(weights)
    parts = [names[:3], names[3:]]
    index = {name: f"model-{part + 1}.safetensors" for part, some in enumerate(parts) for name in some}
    for part, some in enumerate(parts):
        held = {name: weights[name] for name in some}
        if fault == "twice" and part:
            held[names[0]] = weights[names[0]] + 1
        if fault == "tensor" and part:
            held.pop(names[3])
        if not (fault == "missing" and part):
            save_file(held, folder / f"model-{part + 1}.safetensors", metadata={"format": "pt"})
    content: Any = {"metadata": {"total_size": 1}, "weight_map": index}
    if fault == "empty":
        content["weight_map"] = {}
    if fault == "outside":
        content["weight_map"][names[0]] = "../model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def _setting(folder: Path, _base: str, *, name: str, value: Any, file: str = "config.json") -> None:
    change_json(folder / file, **{name: value})


def _tokenizer(folder: Path, _base: str, *, change: Callable[[Any], object]) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def _replaced(folder: Path, _base: str, *, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)


def _module(folder: Path, _base: str, *, name: str, **changes: Any) -> None:
    change_json(folder / name / "config.json", **changes)


def _dense(folder: Path, _base: str, *, change: Callable[[Weights], Weights | None]) -> None:
    _weights(folder / "2_Dense", change)


def _pickled_dense(folder: Path, _base: str) -> None:
    path = folder / "2_Dense" / "model.safetensors"
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()


def _adapter(
    folder: Path, base: str, *, beside: bool, change: Callable[[Weights], object] | None = None, **settings: Any
) -> None:
    """Add an adapter of LoRA to a checkpoint, beside it or in a folder without the model."""
    a, b = (
        torch.randn(4, 32, generator=torch.manual_seed(3)) * 0.2,
        torch.randn(32, 4, generator=torch.manual_seed(4)) * 0.2,
    )
    name = _of(_QUERY, base).removesuffix(".weight")
    weights = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    if change is not None:
        change(weights)
    content = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [name.rpartition(".")[2]],
        "layers_to_transform": [1], "layers_pattern": "layers" if base == DECODER else "layer", "task_type": None,
        "bias": "none", "base_model_name_or_path": str(folder) if beside else str(folder.with_name("base")), **settings,
    }  # fmt: skip
    if not beside:
        kept = [path for path in folder.iterdir() if path.name not in ("config.json", "model.safetensors")]
        shutil.copytree(folder, folder.with_name("base"))
        for path in folder.iterdir():
            if path not in kept:
                path.unlink()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(content))


def _scale(folder: Path, base: str, *, scale: str) -> None:
    _edit(
        folder,
        base,
        names=_QUERY,
        change=lambda w, name: w.update({name.removesuffix("weight") + scale: torch.ones(1)}),
    )


def _halve(folder: Path, _base: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def _add_token(folder: Path, _base: str) -> None:
    (folder / "added_tokens.json").write_text(json.dumps({"leaves": 40}))


_DTYPES = [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2]
_SCALES = ["weight_scale", "weight_scale_inv", "SCB", "scales", "weight_zero_point", "absmax", "qzeros"]


def _pop(weights: Weights, name: str) -> None:
    weights.pop(name)


def _grow(weights: Weights, name: str) -> None:
    weights[name] = torch.cat([weights[name], weights[name]])


def _untie(weights: Weights, _name: str) -> None:
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"] + 0.3


def _twin(weights: Weights, name: str) -> None:
    weights[name.removeprefix("bert.") if name.startswith("bert.") else f"bert.{name}"] = weights[name] + 0.5


def _gamma(weights: Weights, name: str) -> None:
    weights[name.replace("weight", "gamma")] = weights[name] + 0.5


_POSITIONS = torch.arange(64).unsqueeze(0)

MUTATIONS: tuple[Mutation, ...] = (
    Mutation("nothing", lambda _folder, _base: None),
    *(
        Mutation(
            f"{kind} in {dtype}{f' with {scale}' if scale else ''}".replace("torch.", ""),
            partial(_cast, names=names, dtype=dtype, scale=scale),
            is_damage=True,
        )
        for kind, names, scales in (("a linear layer", _QUERY, ("", "weight_scale")), ("embeddings", _EMBEDDING, ("",)))
        for dtype in _DTYPES
        for scale in scales
    ),
    *(
        Mutation(f"a scale called {scale} beside floats", partial(_scale, scale=scale), is_damage=True)
        for scale in _SCALES
    ),
    *(
        Mutation(f"all weights in {dtype}".replace("torch.", ""), partial(_float, dtype=dtype))
        for dtype in (torch.float16, torch.bfloat16, torch.float64)
    ),
    Mutation("a layer without its weight", partial(_edit, names=_QUERY, change=_pop), is_damage=True),
    Mutation("a norm without its weight", partial(_edit, names=_NORM, change=_pop), is_damage=True),
    Mutation("no embeddings", partial(_edit, names=_EMBEDDING, change=_pop), (SENTENCE, DECODER), is_damage=True),
    Mutation(
        "no head",
        lambda folder, _base: _weights(
            folder, lambda w: {k: v for k, v in w.items() if "lm_head" not in k and "cls." not in k}
        ),
        (*_HEADS, DECODER),
        is_damage=True,
    ),
    Mutation("a weight with a letter less", partial(_rename, names=_QUERY, old="weight", new="weigt"), is_damage=True),
    Mutation("a weight of another layer", partial(_rename, names=_QUERY, old="1", new="7"), is_damage=True),
    Mutation("a weight twice as high", partial(_edit, names=_QUERY, change=_grow), is_damage=True),
    Mutation("a weight under two names", partial(_edit, names=_QUERY, change=_twin), _BERT, is_damage=True),
    Mutation("gamma and weight of a norm", partial(_edit, names=_NORM, change=_gamma), _BERT, is_damage=True),
    Mutation("gamma in place of weight", partial(_rename, names=_NORM, old="weight", new="gamma"), _BERT),
    Mutation("an unknown tensor", partial(_extra, name="adapter.gate", value=torch.ones(3)), is_damage=True),
    Mutation(
        "an unknown bias", partial(_extra, name="encoder.layer.0.extra.bias", value=torch.ones(3)), is_damage=True
    ),
    Mutation(
        "positions as older versions stored them",
        partial(_extra, name="embeddings.position_ids", value=_POSITIONS),
        _BERT,
    ),
    Mutation(
        "positions in another order",
        partial(_extra, name="embeddings.position_ids", value=_POSITIONS.flip(1)),
        _BERT,
        is_damage=True,
    ),
    Mutation(
        "frequencies of another base",
        partial(_extra, name="model.rotary_emb.inv_freq", value=torch.ones(4)),
        (DECODER,),
        is_damage=True,
    ),
    Mutation("a head for classes beside it", partial(_extra, name="classifier.weight", value=torch.ones(2, 32))),
    Mutation("untied output layer", partial(_edit, names=_EMBEDDING, change=_untie), _HEADS),
    Mutation("tied by the config alone", partial(_setting, name="tie_word_embeddings", value=True), (DECODER,)),
    Mutation("untied by the config alone", partial(_setting, name="tie_word_embeddings", value=False), _HEADS),
    *(
        Mutation(f"all names behind {prefix}", partial(_prefix, prefix=prefix), keeps_meaning=True)
        for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "model.", "encoder.", "net.bert.")
    ),
    Mutation("some names behind encoder.", partial(_prefix, prefix="encoder.", only="layer"), is_damage=True),
    Mutation(
        "names of the model behind module., others not",
        partial(_prefix, prefix="module.", only="bert."),
        (MLM, SPLADE),
        is_damage=True,
    ),
    Mutation("two shards", _shards),
    *(
        Mutation(f"two shards: {fault}", partial(_shards, fault=fault), is_damage=True)
        for fault in ("missing", "twice", "tensor", "empty", "outside")
    ),
    *(
        Mutation(f"weights in {name} alone", partial(_replaced, name=name), is_damage=True)
        for name in (
            "tf_model.h5",
            "flax_model.msgpack",
            "model.gguf",
            "model.onnx",
            "pytorch_model.bin",
            "model.fp16.safetensors",
            "last.ckpt",
        )
    ),
    Mutation("half a file", _halve, is_damage=True),
    # Lies of the configuration.
    *(
        Mutation(f"config: {name} {value}", partial(_setting, name=name, value=value), bases, is_damage=is_damage)
        for name, value, bases, is_damage in (
            ("num_attention_heads", 8, _BERT, False),
            ("num_attention_heads", 5, _BERT, True),
            ("hidden_act", "relu", _BERT, False),
            ("hidden_act", "silly", _BERT, True),
            ("layer_norm_eps", 0.1, _BERT, False),
            ("rms_norm_eps", 0.5, (DECODER,), False),
            ("max_position_embeddings", 32, _BERT, True),
            ("max_position_embeddings", 32, (DECODER,), False),
            ("num_hidden_layers", 1, ALL, True),
            ("num_hidden_layers", 3, ALL, True),
            ("hidden_size", 48, ALL, True),
            ("vocab_size", 50, ALL, True),
            ("vocab_size", 900, ALL, True),
            ("intermediate_size", 32, ALL, True),
            ("type_vocab_size", 3, _BERT, True),
            ("pad_token_id", 3, ALL, False),
            ("num_key_value_heads", 4, (DECODER,), True),
            ("num_key_value_heads", 1, (DECODER,), True),
            ("head_dim", 16, (DECODER,), True),
            ("is_decoder", True, _BERT, False),
            ("architectures", ["BertForSequenceClassification"], _BERT, False),
            ("architectures", ["BertModel"], _HEADS, False),
            ("architectures", ["BertLMHeadModel"], _HEADS, False),
            ("architectures", ["RobertaForMaskedLM"], _BERT, False),
            ("model_type", "roberta", _BERT, False),
            ("rope_parameters", {"rope_type": "default", "rope_theta": 100.0}, (DECODER,), False),
            ("quantization_config", {"quant_method": "nibbles"}, ALL, True),
            ("quantization_config", {"bits": 4}, ALL, True),
            ("quantization_config", {"quant_method": "fp8", "weight_block_size": [16, 16]}, ALL, False),
        )
    ),
    # Lies of the tokenizer.
    *(
        Mutation(
            f"tokenizer_config: {name} {value}",
            partial(_setting, name=name, value=value, file="tokenizer_config.json"),
            bases,
        )
        for name, value, bases in (
            ("do_lower_case", False, _BERT),
            ("strip_accents", False, _BERT),
            ("strip_accents", True, _BERT),
            ("tokenize_chinese_chars", False, _BERT),
            ("split_special_tokens", True, ALL),
            ("tokenizer_class", "RobertaTokenizer", _BERT),
            ("tokenizer_class", "PreTrainedTokenizerFast", ALL),
            ("model_max_length", 8, ALL),
            ("model_max_length", 4, ALL),
            ("padding_side", "left", ALL),
            ("truncation_side", "left", ALL),
            ("add_prefix_space", True, (DECODER,)),
            ("cls_token", "[SEP]", _BERT),
            ("unk_token", "a", _BERT),
            ("add_bos_token", True, (DECODER,)),
            ("clean_up_tokenization_spaces", True, ALL),
        )
    ),
    *(
        Mutation(f"tokenizer.json: {name}", partial(_tokenizer, change=change), bases)
        for name, change, bases in (
            ("no normalizer", lambda content: content.update(normalizer=None), ALL),
            ("keeps case", lambda content: content["normalizer"].update(lowercase=False), _BERT),
            ("keeps accents", lambda content: content["normalizer"].update(strip_accents=False), _BERT),
            ("no post-processor", lambda content: content.update(post_processor=None), ALL),
            (
                "truncation to 4",
                lambda content: content.update(
                    truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
                ),
                ALL,
            ),
            (
                "an added token of two words",
                lambda content: content["added_tokens"].append(
                    {
                        "id": len(content["model"]["vocab"]),
                        "content": "the cat",
                        "single_word": False,
                        "lstrip": False,
                        "rstrip": False,
                        "normalized": True,
                        "special": False,
                    }
                ),
                ALL,
            ),
            ("an id beyond the embeddings", lambda content: content["model"]["vocab"].update(noon=5000), ALL),
        )
    ),
    Mutation("added_tokens.json with a word", _add_token, _BERT),
    Mutation("no tokenizer.json", lambda folder, _base: (folder / "tokenizer.json").unlink(), ALL),
    # Modules.
    Mutation("pooling: cls", partial(_module, name="1_Pooling", pooling_mode="cls"), (SENTENCE,)),
    Mutation(
        "pooling: unknown", partial(_module, name="1_Pooling", pooling_mode="median"), (SENTENCE,), is_damage=True
    ),
    Mutation(
        "Dense in int8",
        partial(_dense, change=lambda weights: {k: (v * 50).to(torch.int8) for k, v in weights.items()}),
        (SENTENCE,),
        is_damage=True,
    ),
    Mutation(
        "Dense without its bias",
        partial(_dense, change=lambda weights: {k: v for k, v in weights.items() if "bias" not in k}),
        (SENTENCE,),
        is_damage=True,
    ),
    Mutation(
        "Dense with another tensor",
        partial(_dense, change=lambda weights: {**weights, "scale": torch.ones(1)}),
        (SENTENCE,),
        is_damage=True,
    ),
    Mutation("Dense of another width", partial(_module, name="2_Dense", out_features=8), (SENTENCE,), is_damage=True),
    Mutation("Dense in a pickle", _pickled_dense, (SENTENCE,), is_damage=True),
    Mutation(
        "Dense with another activation",
        partial(_module, name="2_Dense", activation_function="torch.nn.modules.activation.ReLU"),
        (SENTENCE,),
    ),
    # Adapters.
    Mutation("an adapter beside the model", partial(_adapter, beside=True)),
    Mutation("an adapter alone", partial(_adapter, beside=False)),
    Mutation(
        "an adapter with half its weights",
        partial(_adapter, beside=True, change=lambda weights: weights.pop(min(weights))),
        is_damage=True,
    ),
    Mutation(
        "an adapter in int8",
        partial(
            _adapter,
            beside=True,
            change=lambda weights: weights.update({k: (v * 99).to(torch.int8) for k, v in weights.items()}),
        ),
        is_damage=True,
    ),
    Mutation(
        "an adapter with another tensor",
        partial(
            _adapter,
            beside=True,
            change=lambda weights: weights.update({"base_model.model.x.lora_A.weight": torch.ones(4, 32)}),
        ),
        is_damage=True,
    ),
    Mutation("an adapter of another rank", partial(_adapter, beside=True, r=8), is_damage=True),
    Mutation("an adapter without base", partial(_adapter, beside=False, base_model_name_or_path=None), is_damage=True),
    Mutation("an adapter whose scale is rank-stabilized", partial(_adapter, beside=False, use_rslora=True)),
)
