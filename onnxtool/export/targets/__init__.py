"""The consumers of exported models: a table of the names, layouts and settings of each.

Most are only a row. One that computes or reads something of its own also has a module here, with a subclass of
TargetSpecification and its name SPECIFICATION for it.

Shape axes: batch_size, sequence; None for a width that the model decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING
from onnxtool.errors import TargetError
from onnxtool.reports import TensorInfo

# Kinds of models, by task. Consumers of sparse encoders treat a masked language model whose checkpoint does not mention
# pooling as SPLADE.
SPARSE, INFERENCE_FREE, DENSE, TOKENS, SCORES, VERDICTS, TAGS, OTHER = (
    "sparse encoders",
    "inference-free sparse encoders",
    "text encoders",
    "late-interaction encoders",
    "text classifiers",
    "rerankers that are decoders",
    "token classifiers",
    "other",
)
KINDS = {
    "sparse-encoding": SPARSE,
    "fill-mask": SPARSE,
    "sentence-similarity": DENSE,
    "feature-extraction": DENSE,
    LATE_INTERACTION: TOKENS,
    "text-classification": SCORES,
    RANKING: VERDICTS,
    "token-classification": TAGS,
}


@dataclass(frozen=True)
class Usage:
    """The way a consumer uses models of one kind.

    Attributes:
        kind: one of SPARSE, INFERENCE_FREE (whose graph is for documents), DENSE, TOKENS, SCORES, VERDICTS, TAGS.
        outputs: the graph outputs that it reads: exactly these, in this order.
        head: the head in the graph; `none` for the model's own outputs.
        after: the modules it can compute on the outputs itself, from COMPUTED in target_specification; None for all
            known to sentence-transformers.
        declares: the graph's inputs, in this order, including inputs that the model ignores.
        unfed: inputs it does not feed, which the model treats as zeros.
        tells_pairs: whether it feeds token types for pairs of texts.
        prefix: the prefix of the graph's input names.
    """

    kind: str
    outputs: tuple[TensorInfo, ...]
    head: str = "none"
    after: tuple[str, ...] | None = ()
    declares: tuple[str, ...] = ()
    unfed: tuple[str, ...] = ()
    tells_pairs: bool = True
    prefix: str = ""

    def inputs(self, available: Iterable[str]) -> tuple[str, ...]:
        """Return the inputs that the graph declares, in order, for a model that uses `available`."""
        return self.declares + tuple(name for name in available if name not in (*self.declares, *self.unfed))


_MODEL, _NESTED = "model.onnx", "onnx/model.onnx"
_LENGTH_FILE, _MAP = "tokenizer_config.json", "special_tokens_map.json"
_FILES = ("config.json", "tokenizer.json", _LENGTH_FILE)
_ORT_1_14, _ORT_1_17, _ORT_1_20 = (8, 18), (9, 20), (10, 21)


@dataclass(frozen=True)
class Target:
    """A consumer.

    Attributes:
        name: its --target name.
        title: its name for users.
        usages: how it uses models; for several of one kind, the first that suits a checkpoint; empty for any graph.
        graph: the graph file in the folder, with `{name}` for the model's name; empty for a file next to the folder.
        files: other files that the folder must have.
        versions: the highest IR version and opset that its onnxruntime reads; None for no bound.
        refused: kinds it does not accept, each with an alternative.
        batch: the batch size it calls the graph with; None for any.
        tokenizer_of: its tokenization library: tokenizers, transformers or sentence-transformers.
        pads: what it pads, which requires a padding token and a maximum length; empty for nothing.
        length_in: the file from which it reads the maximum text length; empty if it does not, or its module writes it.
        most_tokens: the number of tokens to which it cuts texts; None for no limit of its own.
        fills_up: whether it pads each text to `most_tokens`, so that the model must accept as many.
        functions: functions of torch.nn that it applies to logits: of one label, of several, then of both for
            `multi_label_classification`; empty if it returns logits.
        note: what its users must configure, with `{name}` for the model, `{output}` for what it reads, `{pooling}` for
            the pooling mode, `{cut}` for a remark if it cuts texts shorter than the model does, and `{scaling}`.
        notes: what follows it for each kind of model.
        scaling: the texts for `{scaling}`: if it need not scale vectors to length 1, and if it must.
        module: the module in this package with its code; empty for none.
        variants: the names of the files next to the graph that it opens for a precision, by precision.
        embeddings: the lowest precision of embeddings in int4 that its onnxruntime has operators for.
        data_suffix: what it appends to the graph's name to find the external data; empty if it reads any name.
        opens: the precision of the file that it opens by default, if there is one.
        transformers: the major version of transformers that it runs.
        cuts_pairs: whether it cuts pairs of texts as the checkpoint's tokenizer does.
        runner: the module in `onnxtool.consumers.runners` that runs it; empty for one that cannot be called from here.
        install: what installs it.
        reads_texts: whether it feeds texts, so that the tokenizer must be in the graph.
    """

    name: str
    title: str
    usages: tuple[Usage, ...]
    graph: str = _MODEL
    files: tuple[str, ...] = _FILES
    versions: tuple[int, int] | None = _ORT_1_20
    refused: tuple[tuple[str, str], ...] = ()
    batch: int | None = None
    tokenizer_of: str = "tokenizers"
    pads: str = ""
    length_in: str = ""
    most_tokens: int | None = None
    fills_up: bool = False
    functions: tuple[str, ...] = ()
    note: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    scaling: tuple[str, str] = ("", "")
    module: str = ""
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    embeddings: str = "int4"
    data_suffix: str = ""
    opens: str = "fp32"
    transformers: int = 5
    cuts_pairs: bool = True
    runner: str = ""
    install: str = ""
    reads_texts: bool = False

    @property
    def variant_names(self) -> tuple[str, ...]:
        """The names of all files that it may open next to the graph."""
        return tuple(name for names in self.variants.values() for name in names)

    def precisions(self, names: str) -> tuple[str, ...]:
        """Return the precisions in `names`, which are separated by commas.

        Raises:
            TargetError: it opens no file for one of them.
        """
        precisions = tuple(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))
        if wrong := [name for name in precisions if name not in self.variants]:
            opened = f", but in {', '.join(self.variants)}" if self.variants else ": it opens a single file"
            bits = re.findall(r"\d+", wrong[0])[:1]
            alike = [name for name in self.variants if re.findall(r"\d+", name)[:1] == bits]
            raise TargetError(
                f"{self.title} opens no file in {wrong[0]!r} (--precisions){opened}",
                f"pass {' or '.join(alike)}"
                if bits and alike
                else "leave it out, or run `onnxtool optimize` on the file",
            )
        return precisions

    @property
    def takes_any_graph(self) -> bool:
        """Whether it accepts graphs without adaptation, as files next to a folder; others read one folder."""
        return not self.usages


_TYPES = "token_type_ids"
_IDS_AND_MASK = ("input_ids", "attention_mask")
_TEXT_INPUTS = ("input_ids", _TYPES, "attention_mask")

_PER_TOKEN, _PER_TEXT = ("batch_size", "sequence", None), ("batch_size", None)
_LOGITS = TensorInfo("logits", "float32", _PER_TOKEN)
_SCORES = TensorInfo("logits", "float32", _PER_TEXT)
_STATES = TensorInfo("last_hidden_state", "float32", _PER_TOKEN)
_VECTORS = TensorInfo("sentence_embedding", "float32", _PER_TEXT)
_STATE = TensorInfo("sentence_embedding", "float32", ("batch_size", 1, None))
_TOKEN_VECTORS = TensorInfo("token_embeddings", "float32", _PER_TOKEN)
_TERMS = TensorInfo("output_idx", "int64", ("terms",)), TensorInfo("output_weights", "float32", ("terms",))
_WEIGHTS = TensorInfo("sparse", "float32", _PER_TEXT)

# Uses shared by several consumers; the last ones are those of sentence-transformers, which computes its own modules.
_IN_GRAPH = Usage(DENSE, (_VECTORS,), "embedding")
_BY_CONSUMER = Usage(DENSE, (_STATES,), after=("mean", "cls", "lasttoken", "normalize"))
_BY_MEAN_OR_CLS = Usage(DENSE, (_STATES,), after=("mean", "cls", "normalize"))
_BY_MEAN = Usage(DENSE, (_STATES,), after=("mean", "normalize"), declares=_TEXT_INPUTS)
_SPLADE = Usage(SPARSE, (_LOGITS,), after=("splade",))
_SPLADE_IN_GRAPH = Usage(SPARSE, (_WEIGHTS,), "splade", declares=_IDS_AND_MASK, unfed=(_TYPES,), prefix="input1.")
_CLASSIFIERS = Usage(SCORES, (_SCORES,))
_BY_MODULES = tuple(
    Usage(kind, (output,), after=None) for kind, output in ((DENSE, _STATES), (SPARSE, _LOGITS), (SCORES, _SCORES))
)
# As export_optimized_onnx_model and export_dynamic_quantized_onnx_model name their files (backend/optimize.py and
# backend/quantize.py), which `file_name` in model_kwargs opens.
_EXPORTED = {
    "fp32": ("model_O2.onnx",),
    "fp16": ("model_O4.onnx",),
    "int8": ("model_qint8_avx512_vnni.onnx",),
}
_SCALES = ("; it scales vectors to length 1, unlike this checkpoint", "")

_TABLE = (
    Target("plain", "onnxtool", (), graph="", files=(), versions=None),
    Target(  # SpladePlusPlusEncoder.java
        "anserini",
        "Anserini",
        (Usage(SPARSE, _TERMS, "splade", declares=_TEXT_INPUTS),),
        graph="{name}-optimized.onnx",
        files=("{name}-vocab.txt",),
        versions=_ORT_1_17,
        batch=1,
        note="Anserini looks for graph and vocabulary in ~/.cache/pyserini/encoders; {name}-batched.onnx takes many "
        "texts, and its output_text says which of them a term is of. In texts, it reads special tokens, Chinese and "
        "words of over 100 characters differently from the tokenizer",
        module="anserini",
    ),
    Target(  # chromadb 1.5, onnx_mini_lm_l6_v2.py, which downloads another model where it finds no vocab.txt
        "chroma",
        "Chroma",
        (_BY_MEAN,),
        files=(*_FILES, _MAP, "vocab.txt"),
        versions=_ORT_1_14,
        most_tokens=256,
        fills_up=True,
        note="subclass chromadb's ONNXMiniLM_L6_V2 with DOWNLOAD_PATH = FOLDER, EXTRACTED_FOLDER_NAME = '', with its "
        "own name() and build_from_config(){cut}{scaling}",
        scaling=_SCALES,
        runner="run_chroma.py",
        install="pip install chromadb",
    ),
    Target(  # fastembed 0.9
        "fastembed",
        "fastembed",
        (
            _SPLADE,
            Usage(INFERENCE_FREE, (_LOGITS,), after=("splade of two logarithms",)),  # its IfSplade has only these
            _BY_CONSUMER,
            _IN_GRAPH,
            # It adds a marker to ids and mask, but would not extend token types.
            Usage(TOKENS, (_TOKEN_VECTORS,), LATE_INTERACTION, unfed=(_TYPES,)),
            _CLASSIFIERS,
        ),
        files=(*_FILES, _MAP),
        versions=_ORT_1_17,
        pads="every batch",
        length_in=_LENGTH_FILE,
        notes={
            SPARSE: 'load it with SparseTextEmbedding("prithivida/Splade_PP_en_v1", specific_model_path=FOLDER)',
            INFERENCE_FREE: 'load it with SparseTextEmbedding("opensearch-project/opensearch-neural-sparse-encoding-'
            'doc-v3-gte", specific_model_path=FOLDER), and encode queries with query_embed',
            DENSE: "register it with TextEmbedding.add_custom_model(..., pooling=PoolingType.{pooling}, "
            'normalization={scaling}, model_file="model.onnx"); load it with specific_model_path=FOLDER',
            TOKENS: 'load it with LateInteractionTextEmbedding("colbert-ir/colbertv2.0", specific_model_path=FOLDER); '
            "query_embed does not cut queries of more than 32 tokens",
            SCORES: 'register it with TextCrossEncoder.add_custom_model(..., model_file="model.onnx")',
        },
        scaling=("False", "True"),
        module="fastembed",
        # The names in its own lists; a model of one's own names any file as `model_file`.
        variants={"fp32": ("model_optimized.onnx",), "fp16": ("model_fp16.onnx",), "int8": ("model_quantized.onnx",)},
        runner="run_fastembed.py",
        install="pip install fastembed",
    ),
    # infinity-emb 0.0.78: transformer/embedder/optimum.py, transformer/crossencoder/optimum.py. With the path that it
    # passes, optimum finds no graph in a subfolder, nor from another folder.
    Target(
        "infinity",
        "infinity",
        (_BY_MEAN_OR_CLS, replace(_CLASSIFIERS, tells_pairs=False)),
        refused=(
            (SPARSE, "it serves no sparse encoders; pass another --target"),
            (TOKENS, "its engine optimum pools all tokens; pass --target sentence-transformers"),
        ),
        tokenizer_of="transformers",
        length_in="config.json",
        # transformer/utils_optimum.py: of several files, one called quantized on the CPU, and model.onnx elsewhere.
        variants={"fp32": (), "int8": ("model_quantized.onnx",)},
        opens="int8",
        transformers=4,
        note="in the folder, start infinity_emb v2 --model-id . --engine optimum",
        notes={DENSE: " --pooling-method {pooling}{scaling}", SCORES: "; scores are the model's logits"},
        scaling=_SCALES,
        runner="run_infinity.py",
        install="pip install infinity-emb 'optimum-onnx[onnxruntime]' 'transformers<5'",
    ),
    Target(  # OnnxEmbeddingFunction of pymilvus-model 0.3.4, dense/onnx.py, which feeds one text at a time
        "milvus",
        "Milvus",
        (_BY_MEAN,),
        tokenizer_of="transformers",
        pads="every text",
        length_in=_LENGTH_FILE,
        note="push the folder to the hub, from where it fetches model.onnx, and load it with "
        "pymilvus.model.dense.OnnxEmbeddingFunction(model_name=ID, tokenizer_name=ID){scaling}",
        scaling=_SCALES,
        runner="run_milvus.py",
        install="pip install 'pymilvus[model]'",
    ),
    Target(  # next-plaid-onnx/src/lib.rs
        "next-plaid",
        "next-plaid",
        (Usage(TOKENS, (_TOKEN_VECTORS._replace(name="output"),), LATE_INTERACTION, unfed=(_TYPES,)),),
        files=(*_FILES, "onnx_config.json"),
        pads="every batch",
        length_in=_LENGTH_FILE,
        note="Colbert::new(FOLDER) of next-plaid-onnx opens model.onnx, and with_quantized(true) model_int8.onnx; "
        "white space around texts is removed",
        module="next_plaid",
        variants={"fp32": (), "int8": ("model_int8.onnx",)},
    ),
    # ml-commons 3.6 with DJL. The translators of vectors and weights feed ids and mask, and check the number of inputs
    # before their names. That of vectors feeds token types for a `model_type` of bert or albert; that of pairs always
    # did, before ml-commons#4946.
    Target(
        "opensearch",
        "OpenSearch",
        (
            Usage(DENSE, (_STATE,), "embedding", declares=_IDS_AND_MASK),
            _SPLADE_IN_GRAPH,
            replace(_SPLADE_IN_GRAPH, kind=INFERENCE_FREE),
            Usage(SCORES, (_SCORES,), declares=(*_IDS_AND_MASK, _TYPES)),
        ),
        graph="{name}.onnx",
        files=("tokenizer.json",),
        most_tokens=512,  # DJL's limit; ml-commons has none of its own
        note="register {name}.zip by POST /_plugins/_ml/models/_register with ml-commons_model_config.json and a "
        "`url`, or by register_model() of opensearch-py-ml{cut}",
        notes={
            INFERENCE_FREE: "; register {name}-tokenizer.zip with ml-commons_tokenizer_config.json for queries",
            SCORES: "; similarities are the model's logits, without an activation",
        },
        module="opensearch",
    ),
    # The ONNX backend of sentence-transformers 5.7 with optimum-onnx 0.1. For sentence-transformers 6, the target
    # sentence-transformers runs the file without optimum.
    Target(
        "optimum",
        "optimum",
        _BY_MODULES,
        graph=_NESTED,
        tokenizer_of="sentence-transformers",
        note='load it with backend="onnx" in sentence-transformers 5 with optimum-onnx and transformers 4',
        module="optimum",
        transformers=4,
        variants=_EXPORTED,
        runner="run_sentence_transformers.py",
        install="pip install 'sentence-transformers[onnx]<6' 'transformers<5'",
    ),
    Target(
        "oracle",
        "Oracle AI Database",
        (Usage(DENSE, (_VECTORS._replace(name="embedding"),), "embedding"),),
        graph="{name}.onnx",
        versions=_ORT_1_14,  # 1.15, which has no If of opset 19
        tokenizer_of="sentence-transformers",  # as the tokenizer in the graph is compared
        note="the text is read by operators of onnxruntime-extensions, and the database's documentation does not list "
        "those that it has; copy {name}.onnx to a directory of the database, and EXECUTE DBMS_VECTOR.LOAD_ONNX_MODEL("
        "directory => 'DIRECTORY', file_name => '{name}.onnx', model_name => 'MODEL',",
        module="oracle",
        reads_texts=True,
    ),
    Target(  # sentence-transformers 6.2, with a transformer that onnxtool.sentence_transformers runs
        "sentence-transformers",
        "sentence-transformers",
        (
            *_BY_MODULES,
            Usage(INFERENCE_FREE, (_LOGITS,), after=None),
            Usage(TOKENS, (_STATES,), after=None),
            # The score of a pair, not the vocabulary logits of each token.
            Usage(VERDICTS, (_SCORES,), "reranker", after=None),
        ),
        graph=_NESTED,
        versions=None,
        tokenizer_of="sentence-transformers",
        module="sentence_transformers",
        variants=_EXPORTED,
        runner="run_sentence_transformers.py",
        install="pip install 'onnxtool-cli[sentence-transformers]'",
    ),
    Target(  # backends/ort/src/lib.rs
        "tei",
        "text-embeddings-inference",
        (_BY_CONSUMER, _IN_GRAPH, _CLASSIFIERS),
        refused=(
            (SPARSE, "its onnxruntime backend has no SPLADE pooling; serve the safetensors with --pooling splade"),
        ),
        functions=("Sigmoid", "Softmax") * 2,  # unless `raw_scores` is set (core/src/infer.rs)
        module="tei",
    ),
    Target(  # Transformers.js 4.3
        "transformers.js",
        "Transformers.js",
        # It pools the last place of a batch, which is padding for most texts.
        (_BY_MEAN_OR_CLS, _IN_GRAPH, replace(_SPLADE, after=None), _CLASSIFIERS, Usage(TAGS, (_LOGITS,))),
        graph=_NESTED,
        refused=((OTHER, "decoders need their cache as inputs there; pass --target plain for a graph without one"),),
        length_in=_LENGTH_FILE,
        functions=("Softmax", "Softmax", "Sigmoid", "Sigmoid"),  # src/pipelines/text-classification.js
        module="transformers_js",
        variants={  # src/utils/dtypes.js; in a browser, the default is q8: model_quantized.onnx
            "fp32": (),
            "fp16": ("model_fp16.onnx",),
            "int8": ("model_quantized.onnx", "model_int8.onnx"),
            "uint8": ("model_uint8.onnx",),
            "int4": ("model_q4.onnx",),
            "int4_fp16": ("model_q4f16.onnx",),
        },
        data_suffix="_data",  # src/utils/model-loader.js
        embeddings="int8",  # onnxruntime-web's build for WebGPU has no GatherBlockQuantized on the CPU
        cuts_pairs=False,
        runner="transformers_js.mjs",
        install="npm install @huggingface/transformers, in the current folder",
    ),
    # Vespa 8: SpladeEmbedder.java, which fails if the graph lacks an input that it feeds, and HuggingFaceEmbedder.java,
    # which checks first.
    Target(
        "vespa",
        "Vespa",
        (replace(_SPLADE, declares=_TEXT_INPUTS), _BY_MEAN_OR_CLS, _IN_GRAPH),
        files=("tokenizer.json",),
        refused=((SCORES, "a ranking model of Vespa names its inputs itself (onnx-model): pass --target plain"),),
        length_in="tokenizer.json",
        note="services.xml: a component of type ",
        notes={
            SPARSE: "splade-embedder",
            DENSE: "hugging-face-embedder with <pooling-strategy>{pooling}</pooling-strategy>"
            "<transformer-output>{output}</transformer-output>{scaling}",
        },
        scaling=("", "<normalize>true</normalize>"),
        # The path in services.xml names any file; these names are ours.
        variants={"fp32": ("model_optimized.onnx",), "fp16": ("model_fp16.onnx",), "int8": ("model_int8.onnx",)},
    ),
)
TARGETS = {target.name: target for target in _TABLE}
TARGET_NAMES = tuple(TARGETS)
