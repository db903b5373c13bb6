"""Choose what an exported graph computes on top of the model: a table of heads, and which one a checkpoint needs.

A head is a sequence of pooling modules on one model output. SPLADE is trained by scripts that save a plain
BertForMaskedLM: nothing in the weights or config.json distinguishes it from a mask-filling model, so the name, the
model card and training logs are read. Pickles, such as training_args.bin, are never read.

Shape letters: B batch, S sequence, V vocabulary, W vector width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onnxtool.checkpoint.files import M3_FILES
from onnxtool.checkpoint.folder import path_parts
from onnxtool.checkpoint.late_interaction import QueryExpansion
from onnxtool.checkpoint.module_forms import PoolingModule
from onnxtool.checkpoint.module_settings import require_known_settings
from onnxtool.checkpoint.page_modules import require_known_page_modules, require_known_pages
from onnxtool.checkpoint.pooling_modules import (
    Dense,
    LogitScore,
    Normalize,
    Pooling,
    read_modules_of_sides,
    read_pooling_modules,
)
from onnxtool.checkpoint.sentence_modules import (
    ENCODER_NAME,
    SPARSE_STATIC,
    STATIC,
    TOKENS,
    TRANSFORMERS,
    VECTOR,
    SentenceModules,
)
from onnxtool.checkpoint.sparse_modules import SpladePooling
from onnxtool.checkpoint.static_embeddings import SparseStaticEmbedding, require_same_tokens
from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING, SPARSE_TAGS, TASK_OF_PICTURES
from onnxtool.checkpoint.token_modules import (
    TOKEN_WEIGHTS,
    LexicalWeights,
    MultiVectorMask,
    ZeroPadding,
    read_mask,
    read_token_modules,
)
from onnxtool.errors import CheckpointError, ExportError
from onnxtool.export.heads.head import GraphHead, require_output
from onnxtool.export.modalities.finding import SIDES, Side
from onnxtool.export.pickles import load_pickle
from onnxtool.export.signature import Signature
from onnxtool.export.source import Source
from onnxtool.reports import Json
from onnxtool.runtime.pictures import PictureProcessor

if TYPE_CHECKING:
    from onnxtool.export.checkpoint import Checkpoint


@dataclass(frozen=True)
class _HeadKind:
    """A head before its checkpoint is known; `pooling` is the module that pools the tokens, before all others.

    Late interaction does not pool, and `pooling` says which tokens count. Users may request `task`, or one of the
    `general` tasks, whose architectures provide the output that the head reads.
    """

    name: str
    source: str
    output: str
    task: str
    pooling: type[PoolingModule]
    general: tuple[str, ...]

    def head(self, modules: tuple[PoolingModule, ...]) -> GraphHead:
        """Return the head that computes `modules`."""
        return GraphHead(self.name, self.source, self.output, self.task, modules)


_HEAD_KINDS = (
    _HeadKind("splade", "logits", "sparse", "sparse-encoding", SpladePooling, ("fill-mask", "text-generation")),
    _HeadKind(
        "embedding", "last_hidden_state", "sentence_embedding", "sentence-similarity", Pooling, ("feature-extraction",)
    ),
    _HeadKind(
        LATE_INTERACTION, "last_hidden_state", TOKENS, LATE_INTERACTION, MultiVectorMask, ("feature-extraction",)
    ),
    _HeadKind("reranker", "logits", "logits", RANKING, LogitScore, ("text-generation",)),
)
_KINDS = {kind.name: kind for kind in _HEAD_KINDS}
# Other uses of heads: sides of dual encoders, and rerankers that score a vector of a pair.
_FURTHER_TASKS = {"embedding": (TASK_OF_PICTURES,), "reranker": ("text-classification",)}
# Endings of architecture names that weigh the vocabulary at every token; the second is older.
_MASKED = ("ForMaskedLM", "WithLMHeadModel")
# The answers of a reranker without modules about a document, as in CrossEncoder of sentence-transformers.
_VERDICTS = ("yes", "no")
_CROSS_ENCODER = "CrossEncoder"
# M3 embedders, such as bge-m3.
M3 = "m3"
_SPARSE, _COLBERT = M3_FILES
# Tasks of the heads that add something to the model.
_HEAD_TASKS = {**{kind.name: kind.task for kind in _HEAD_KINDS}, M3: "sentence-similarity"}
_STATES = "last_hidden_state"


@dataclass(frozen=True)
class HeadChoice:
    """The head to export.

    Attributes:
        name: one of `ExportOptions`' heads, but not `auto`.
        head: what it adds to the graph; None for the model's own outputs.
        reason: the reason to show to users who did not choose it; empty if they did, or if there is nothing to say.
    """

    name: str
    head: GraphHead | None
    reason: str = ""


def recognize_head(source: Source, architecture: str) -> HeadChoice:
    """Determine which head a checkpoint was trained with, and the evidence for it.

    Args:
        source: the checkpoint.
        architecture: the class that its weights are loaded into, e.g. `BertForMaskedLM`.

    Returns:
        The head named `splade`, `embedding`, `late-interaction` or `m3`, with the reason in words; or `none` if no file
        mentions one.

    Raises:
        CheckpointError: the checkpoint has modules or settings that are not supported.
    """
    modules = source.sentence_modules
    if modules.is_late_interaction:
        return HeadChoice(
            LATE_INTERACTION, read_head(LATE_INTERACTION, source), "the checkpoint has a vector for each token"
        )
    if modules.kinds[:1] == (STATIC,):
        return HeadChoice("embedding", read_head("embedding", source), f"modules.json names {STATIC}")
    if source.is_m3:
        return HeadChoice(M3, read_m3(source), f"{' and '.join(M3_FILES)} are next to the model")
    if _scores_vectors(modules):
        return HeadChoice("reranker", _scored_embedding(source), f"{ENCODER_NAME} names {_CROSS_ENCODER}")
    for kind in _HEAD_KINDS:
        if kind.pooling.__name__ in modules.kinds:
            return HeadChoice(kind.name, read_head(kind.name, source), f"modules.json names {kind.pooling.__name__}")
    if modules.kinds:
        require_known_settings(modules, source)
        raise source.refuse(
            f"modules.json of {source.model_name} names {', '.join(modules.kinds)}, and onnxtool computes no pooling "
            f"but {' and '.join(kind.pooling.__name__ for kind in _HEAD_KINDS)}"
        )
    if not architecture.endswith(_MASKED):
        return HeadChoice("none", None, "the checkpoint does not say how it is pooled")
    if evidence := splade_evidence(source):
        return HeadChoice("splade", read_head("splade", source), evidence)
    if source.card_tags:  # which would say it
        return HeadChoice("none", None)
    return HeadChoice(
        "none", None, "nothing says what this masked language model is for; if it is a SPLADE, pass --head splade"
    )


def read_head(name: str, source: Source) -> GraphHead | None:
    """Read the settings and weights of the head named `name`; None for names that add nothing to the model.

    A sparse encoder without modules weighs terms as SPLADE v2.

    Raises:
        CheckpointError: the checkpoint does not say how it pools, or has modules that no head computes.
    """
    if name == M3:
        return read_m3(source)
    kind = _KINDS.get(name)
    if kind is None:
        return None
    if kind.pooling is MultiVectorMask:
        return _late_interaction(kind, source)
    if kind.pooling is LogitScore and _scores_vectors(source.sentence_modules):
        return _scored_embedding(source)
    modules = read_pooling_modules(source.sentence_modules, kind.pooling)
    if (query := source.sentence_modules.query) is not None:
        require_same_tokens(query, source)
        SparseStaticEmbedding.read(query)  # fail if `infer` would refuse the export's queries
    if not modules and kind.pooling is not SpladePooling:
        raise source.refuse(
            f"{source.model_name} does not say how it pools: it has no modules.json with a {kind.pooling.__name__}",
            "pass --head none, and pool after the model; a hub model needs the network once for this file",
        )
    return kind.head(modules or (SpladePooling(),))


def _late_interaction(kind: _HeadKind, source: Source) -> GraphHead:
    modules = source.sentence_modules
    if not modules.is_late_interaction:
        raise source.refuse(
            f"{source.model_name} is not a late-interaction encoder: no file names MultiVectorEncoder, PyLate's "
            "ColBERT, or HF_ColBERT",
            "pass --head auto",
        )
    read_mask(modules)  # fail if `infer` would refuse the export
    expansion = QueryExpansion.of(modules, source)
    unseen = 0 if expansion is None or expansion.attend else expansion.length
    return replace(kind.head(read_token_modules(modules)), keeps_tokens=True, unseen_length=unseen)


def expanding_token(source: Source, tokenizer: Any) -> int | None:
    """Return the id of the query expansion token of a late-interaction encoder; None if queries are not expanded.

    Raises:
        CheckpointError: the tokenizer lacks it.
    """
    expansion = QueryExpansion.of(source.sentence_modules, source)
    if expansion is None:
        return None
    usual, pads_left = (tokenizer.mask_token, tokenizer.eos_token), tokenizer.padding_side == "left"
    return expansion.find_token(tokenizer.get_vocab().get, usual, source, pads_left=pads_left)


def _scores_vectors(modules: SentenceModules) -> bool:
    """Return whether a reranker pools a pair before scoring it."""
    return modules.encoder_class == _CROSS_ENCODER and Pooling.__name__ in modules.kinds


def _scored_embedding(source: Source) -> GraphHead:
    """Return the head of a CrossEncoder that scores a vector of the pair: pooling, with a Dense at the end."""
    modules = source.sentence_modules
    *before, last = modules.modules
    if last.kind != Dense.__name__ or last.settings.get("module_output_name") != "scores":
        raise source.refuse(
            f"{source.model_name} is a {_CROSS_ENCODER} whose last module, {last.kind}, makes no scores of vectors"
        )
    # The computation treats scores as another vector.
    projection = replace(last, settings={**last.settings, "module_output_name": None})
    pooling = read_pooling_modules(replace(modules, modules=(*before, projection)), Pooling)
    return GraphHead("reranker", "last_hidden_state", "logits", "text-classification", pooling)


def _plain_reranker(checkpoint: Checkpoint) -> GraphHead:
    """Return the head of a causal language model without modules: `yes` minus `no`."""
    vocabulary = checkpoint.load_tokenizer().get_vocab()
    missing = [token for token in _VERDICTS if token not in vocabulary]
    if missing:
        raise checkpoint.source.refuse(
            f"{checkpoint.source.model_name} has no token {' and none '.join(map(repr, missing))}, by which a causal "
            "language model says whether a document is relevant",
            "name the tokens by LogitScore: save the checkpoint with CrossEncoder of sentence-transformers",
        )
    return _KINDS["reranker"].head((LogitScore(*(vocabulary[token] for token in _VERDICTS)),))


def check_head(name: str, task: str) -> None:
    """Refuse a contradictory head and task, as typed by the user.

    Raises:
        ExportError: the head produces something other than the task requires.
    """
    own = _HEAD_TASKS.get(name)
    if own is None or task in ("auto", own, *_FURTHER_TASKS.get(name, ())) or task_with_head(name, task) == own:
        return
    raise ExportError(
        f"--head {name} makes a file for {own}, but --task {task} was passed",
        f"leave one of them out, or pass --task {own}",
    )


def task_with_head(name: str, task: str) -> str:
    """Return the task of a model for `task` with the head named `name` added."""
    general = _KINDS[name].general if name in _KINDS else ("feature-extraction",)
    own = _HEAD_TASKS.get(name)
    return own if own is not None and task in general else task


def choose_head(name: str, checkpoint: Checkpoint, signature: Signature, *, task: str = "auto") -> HeadChoice:
    """Choose the head: the one with that name, or for `auto`, the one that the checkpoint was trained with.

    Args:
        name: one of HEAD_NAMES.
        checkpoint: the checkpoint.
        signature: the signature of its model.
        task: the task the user requested; `auto` for the checkpoint's.

    Raises:
        CheckpointError: the checkpoint does not say how it pools, or its modules do not fit its model.
        ExportError: the model lacks what the head reads.
    """
    if name != "auto":
        if name == "logits":
            require_output(name, "logits", signature)
        is_plain = name == "reranker" and not checkpoint.source.sentence_modules.modules
        choice = HeadChoice(name, _plain_reranker(checkpoint) if is_plain else read_head(name, checkpoint.source))
    elif checkpoint.architecture == SPARSE_STATIC:
        choice = HeadChoice("none", None, "terms are weighed by a table")
    elif checkpoint.task in (kind.task for kind in _HEAD_KINDS) or (
        # Neither the user nor modules.json says what this masked language model is for.
        task == "auto" and checkpoint.task == "fill-mask" and not checkpoint.source.sentence_modules.modules
    ):
        choice = _recognize(checkpoint, task)
        off = (
            "--head logits leaves the logits"
            if choice.name == "splade"
            else "--head none leaves the model's own outputs"
        )
        reason = f"head {choice.name}: {choice.reason}; {off}" if choice.head else f"no head was added: {choice.reason}"
        choice = replace(choice, reason=reason if choice.reason else "")
    else:  # a --task of another kind requests the model's output for that task
        if task == "auto":
            _require_own_outputs(checkpoint.source)
        choice = HeadChoice("none", None)
    if choice.head is not None:
        choice.head.check(signature)
    elif name == "auto" and "logits" in signature.outputs:
        return replace(choice, name="logits")
    return choice


def _recognize(checkpoint: Checkpoint, task: str) -> HeadChoice:
    """Determine the checkpoint's head for its task; `task` is the one that the user requested."""
    source = checkpoint.source
    if checkpoint.task == RANKING and not source.sentence_modules.modules:
        verdicts = " and ".join(map(repr, _VERDICTS))
        return HeadChoice("reranker", _plain_reranker(checkpoint), f"a document is scored by the logits of {verdicts}")
    choice = recognize_head(source, checkpoint.architecture)
    if task == "sparse-encoding" and choice.head is None:
        return HeadChoice("splade", read_head("splade", source))
    if choice.head is not None and task not in ("auto", choice.head.task, *_FURTHER_TASKS.get(choice.name, ())):
        raise ExportError(
            f"--task {task} was passed, but {source.model_name} is for {choice.head.task}: {choice.reason}",
            f"leave --task out, or pass --task {choice.head.task}",
        )
    return choice


def choose_side_head(
    name: str, side: Side, source: Source, signature: Signature, *, scales: bool, pads: bool
) -> HeadChoice:
    """Choose what follows one side of a dual encoder: what sentence-transformers computes, or the model's own steps.

    Args:
        name: one of HEAD_NAMES.
        side: the side to export.
        source: the checkpoint.
        signature: the signature of the side.
        scales: whether the model's own forward scales vectors to length 1 before comparing them.
        pads: whether text vectors depend on padding.

    Raises:
        CheckpointError: the checkpoint has modules or settings that are not supported.
        ExportError: the head is not for dual encoders.
    """
    if name == "none":
        return HeadChoice(name, None)
    if name not in ("auto", "embedding"):
        raise ExportError(f"the head {name} does not apply to a side of a dual encoder", "pass --head auto, or none")
    if name == "auto" and side.task == TASK_OF_PICTURES:
        _require_known(PictureProcessor.of, source, "--head embedding")
    modules = read_modules_of_sides(source.sentence_modules)
    if pads and source.sentence_modules.modules:
        raise source.refuse(
            f"the vectors of texts of {source.model_name} depend on their padding, and sentence-transformers pads to "
            "the longest text of a batch: they differ from batch to batch",
            "export the checkpoint of transformers, without modules.json, which pads to one length",
        )
    reason = "modules.json says what follows"
    if not source.sentence_modules.modules:
        modules = (Normalize(),) if scales else ()
        reason = f"{side.embeddings} as the model's own forward compares them"
    head = GraphHead("embedding", side.features, side.embeddings, side.task, modules)
    head.check(signature)
    return HeadChoice(
        head.name, head, f"{reason}; --head none gives what {side.method} gives" if name == "auto" else ""
    )


def _require_known(check: Callable[[Source], object], source: Source, anyway: str) -> None:
    """Refuse a checkpoint whose images `infer` could not prepare, which `check` finds out."""
    try:
        check(source)
    except CheckpointError as error:
        hint = f"pass {anyway} to export it anyway, and prepare images with transformers"
        raise CheckpointError(error.message, hint) from None


def choose_no_head(name: str, source: Source) -> HeadChoice:
    """Choose the head for a page retriever, which returns vectors itself.

    Args:
        name: one of HEAD_NAMES.
        source: the checkpoint.

    Raises:
        CheckpointError: sentence-transformers adds further computations to it.
        ExportError: a head was requested.
    """
    if name not in ("auto", "none"):
        raise ExportError(
            f"the head {name} does not apply to a page retriever, which returns vectors itself", "leave it out"
        )
    require_known_page_modules(source)
    if name == "auto":
        _require_known(require_known_pages, source, "--head none")
    return HeadChoice("none", None)


def _require_own_outputs(source: Source) -> None:
    """Refuse a checkpoint whose answer is more than its model's outputs, such as a decoder-based reranker."""
    modules = source.sentence_modules
    if modules.encodes_pictures:
        raise source.refuse(
            f"sentence-transformers encodes texts and images separately with {source.model_name}",
            f"export each side: {' and '.join(f'--task {side.task}' for side in SIDES)}",
        )
    unsupported = [kind for kind in modules.kinds if kind not in (*TRANSFORMERS, "Dropout")]
    if unsupported:
        raise source.refuse(
            f"modules.json of {source.model_name} names {', '.join(unsupported)}, which onnxtool does not compute "
            "after a model of this kind"
        )
    require_known_settings(modules, source)


# Words that negate the next one: `not-splade`, `pretrained-for-splade`, `vs_splade`. `distilsplade` is a SPLADE.
_SPLADE_NAME = re.compile(
    r"(?<![a-z])(?:not?|non|never|without|anti|pre|before|for|to|vs|versus|than)[\W_]*(?:an?[\W_]+)?splade"
    r"|splade[\W_]*(?:free|less|negatives|tokenizer)(?![a-z])"
    r"|(?P<named>splade)",
    re.IGNORECASE,
)
# Folders are often named after a training step, or nothing in particular, and their parent after the model.
_GENERIC_NAME = re.compile(
    r"(?:checkpoint|step|epoch|global_step)?[-_]?\d+|checkpoint|final|best|last|model|output|(?:final|best|last)[-_]"
    r"(?:model|checkpoint)|(?:model|checkpoint)[-_](?:final|best|last)|hf|pytorch|0_(?:MLM)?Transformer",
    re.IGNORECASE,
)
# Keys of the card's front matter. Not `datasets`, which may have been mined with a SPLADE, and no prose.
_CARD_KEYS = ("tags", "pipeline_tag", "library_name", "model_name", "base_model")
# Files that trainers write next to a checkpoint, and config.json keys that say where the weights came from.
_TRAINING_FILES = ("training_args.json", "trainer_state.json", "train_args.json", "args.json", "training_config.json")
_CONFIG_KEYS = ("_name_or_path", "name_or_path")
_OTHER_MODELS = re.compile(r"teacher|negative|data|corpus|min(?:er|ed|ing)|retriever|rerank|baseline", re.IGNORECASE)
# Keys of sentence-transformers' SpladeLoss in training logs.
_LOGGED = frozenset({"document_regularizer_loss", "query_regularizer_loss"})


def splade_evidence(source: Source) -> str:
    """Describe the evidence that a masked language model without modules is a SPLADE; empty if there is none."""
    if source.sentence_modules.encoder_class == "SparseEncoder":
        return f"{ENCODER_NAME} names SparseEncoder"
    if tags := [tag for tag in SPARSE_TAGS if tag in source.card_tags]:
        return f"the model card's tags name {' and '.join(tags)}"
    if name := _splade_name(path_parts(source.model_name)) or _splade_name(source.origin.split("/")):
        return f"it is called {name}"
    for key in _CARD_KEYS:
        if mention := _first_mention(source.card.get(key)):
            return f"the model card's {key} says {mention}"
    config = source.read_object("config.json")
    for key in _CONFIG_KEYS:
        if mention := _first_mention(config.get(key)):
            return f"{key} of config.json says {mention}"
    for file in _TRAINING_FILES:
        with suppress(CheckpointError):  # not part of the model: a file that cannot be parsed is no evidence
            if mention := _first_mention(source.read_json(file)):
                return f"{file} says {mention}"
    return ""


def _splade_name(parts: Sequence[str]) -> str:
    """Return the last path component that is a real name, if it says SPLADE and does not negate it; else nothing."""
    name = next((part for part in reversed(parts) if _GENERIC_NAME.fullmatch(part) is None), "")
    return name if any(match["named"] for match in _SPLADE_NAME.finditer(name)) else ""


def _first_mention(value: Json) -> str:
    """Return the first text in a JSON value that says SPLADE; empty if there is none."""
    return next((text for text in _texts(value) if text in _LOGGED or _splade_name(text.rstrip("/").split("/"))), "")[
        :200
    ]


def _texts(value: Json) -> Iterator[str]:
    """Yield the texts in a JSON value, and the keys of its objects; skip entries about other models and data."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            own = {key: inner for key, inner in item.items() if _OTHER_MODELS.search(key) is None}
            waiting += [*reversed(own.values()), *reversed(own)]
        elif isinstance(item, list):
            waiting += reversed(item)


def read_m3(source: Source) -> GraphHead:
    """Read the head of an M3 embedder: a text vector, a weight per token and a vector per token, from one pass.

    Chen et al., 2024, arXiv:2402.03216; layout and formulas of FlagEmbedding 1.4: next to the transformer are
    `sparse_linear.pt` and `colbert_linear.pt`, each a linear layer on token states.

    The text vector is pooled as modules.json says; without one, it is the scaled first token, as in FlagEmbedding.
    Weights and vectors of padding are 0. Consumers must drop the vector of the first token and the weights of special
    tokens, as `infer` does: a graph does not know which tokens these are.

    Raises:
        CheckpointError: a layer is missing, or its file is not the state of a linear layer.
    """
    modules = read_pooling_modules(source.sentence_modules, Pooling) or (Pooling(("cls",)), Normalize())
    weight, bias = _read_linear(source, _SPARSE)
    if len(weight) != 1:
        raise source.refuse(f"{_SPARSE} of {source.model_name} gives {len(weight)} numbers for a token; it has to be 1")
    lexical: tuple[PoolingModule, ...] = (LexicalWeights(weight, bias),)
    projection = Dense("colbert_linear", *_read_linear(source, _COLBERT), "Identity", on_tokens=True)
    colbert = (projection, ZeroPadding(), Normalize(on_tokens=True))
    return GraphHead(
        M3, _STATES, VECTOR, "sentence-similarity", modules,
        extra_heads=(
            GraphHead(M3, _STATES, TOKEN_WEIGHTS, "sparse-encoding", lexical, keeps_tokens=True),
            GraphHead(M3, _STATES, TOKENS, LATE_INTERACTION, colbert, keeps_tokens=True),
        ),
    )  # fmt: skip


def _read_linear(source: Source, name: str) -> tuple[Any, Any]:
    """Read the weight and bias of a linear layer written by torch.save: float32 [W, H] and [W].

    The file is a zip with a pickle, of which only tensors, numbers and containers are loaded. The result is checked
    here: two tensors, no larger than the file.

    Raises:
        CheckpointError: the file is missing, or contains anything else.
    """
    import torch

    path = source.locate(name)
    if path is None:
        raise source.refuse(f"{source.model_name} has no {name}", f"an M3 embedder has {' and '.join(M3_FILES)}")
    content = load_pickle(path, lambda reason: _damaged(source, name, f"it {reason}"))
    if content.keys() != {"weight", "bias"}:
        raise _damaged(source, name, f"it holds {sorted(map(str, content))}, and not weight and bias")
    for key, tensor in content.items():
        # A view of a few numbers may claim a huge shape.
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or not tensor.is_contiguous():
            raise _damaged(source, name, f"{key} is not a plain floating-point tensor")
    weight, bias = (content[key].detach().to(torch.float32).numpy() for key in ("weight", "bias"))
    if weight.ndim != 2 or bias.shape != weight.shape[:1] or not weight.size:
        raise _damaged(source, name, f"its weight is {list(weight.shape)} and its bias {list(bias.shape)}")
    return weight, bias


def _damaged(source: Source, name: str, reason: str) -> CheckpointError:
    return source.refuse(
        f"{name} of {source.model_name} is not the state of a linear layer: {reason}",
        "fetch the checkpoint again from where you trust it; --head embedding exports only the text vectors",
    )
