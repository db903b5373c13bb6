"""What retrievers of pages as pictures are fed: pages cut and written, and queries, as the processors of transformers.

The definitions are those of transformers 5.23.

Letters of shapes: S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import Limit
from onnxtool.checkpoint.page_pictures import GRID, OWN_SETTINGS, CutPage, PagePictures, read_page_pictures
from onnxtool.checkpoint.picture_processing import FOLLOWED, PIXELS, PROCESSOR_NAME, Feeds, PictureProcessor
from onnxtool.checkpoint.sentence_modules import ENCODER_NAME, MULTI_VECTOR, TOKENS, SentenceModules, positive
from onnxtool.checkpoint.token_modules import read_mask
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.reports import Json

if TYPE_CHECKING:
    from PIL.Image import Image

# What a graph of pages may take.
PAGE_INPUTS = ("input_ids", "attention_mask", PIXELS, GRID)

_NAME, _TOKENIZER = "processor_config.json", "tokenizer_config.json"
_PREFIX, _PROMPT, _TOKENS_OF_TILE = "query_prefix", "visual_prompt_prefix", "image_seq_len"
_NUM_AUGMENTING = 10  # tokens behind a query, in which the model may put what the query has no words for
_MOST_TOKENS = 1 << 17  # of a page: more than any retriever takes
_BORDER, _WHOLE = "<fake_token_around_image>", "<global-img>"
# What the processors of transformers read of a tokenizer's settings as if it were an argument of theirs, and which
# values of it change neither tokens nor pixels.
_ARGUMENTS: Mapping[str, tuple[Json, ...]] = {
    "add_special_tokens": (None, True),
    **dict.fromkeys(("is_split_into_words", "padding", "truncation"), (None, False)),
    **dict.fromkeys((*FOLLOWED, *OWN_SETTINGS), (None,)),
}
# What sentence-transformers says of a retriever of pages, which gives vectors itself, and what beside that changes
# nothing.
_MODULES = ("Transformer", "MultiVectorMask")
_FORWARD: Json = {"method": "forward", "method_output_name": "embeddings"}
_TRANSFORMER: Mapping[str, Json] = {
    "transformer_task": "retrieval",
    "modality_config": {"text": _FORWARD, "image": _FORWARD},
    "module_output_name": TOKENS,
}
_ENCODER: Mapping[str, tuple[Json, ...]] = {
    "model_type": (MULTI_VECTOR,),
    "prompts": ({}, {"query": "", "document": ""}),
    "similarity_fn_name": ("maxsim",),
}
_NOTHING: tuple[Json, ...] = (None, False, {}, [])
# Names of classes and files, and parts that are read for themselves.
_HARMLESS = ("processor_class", "image_processor", "chat_template", "auto_map")


@dataclass(frozen=True)
class _Kind:
    """A processor.

    Attributes:
        prefix: what stands before a query, where the file says nothing.
        keeps_empty: whether an empty prefix, or prompt, is one.
        begins: the role of the token before all of a query; empty for none.
        augments: what follows a query: a token, or the role of one.
        ends: what stands behind that.
        images: its image processor where pages have other numbers of tokens; empty where all have the same.
        prompt: what a page is written as, where the file says nothing.
        image: the token that stands for a part of a page.
        settings: what its file may say.
        is_of_modules: whether sentence-transformers 6.2 calls it so that it writes pages and queries.
    """

    prefix: str
    keeps_empty: bool = False
    begins: str = ""
    augments: str = "pad_token"
    ends: str = "\n"
    images: str = ""
    prompt: str = ""
    image: str = ""
    settings: tuple[str, ...] = (_PREFIX, _PROMPT)
    is_of_modules: bool = True


_KINDS: Mapping[str, _Kind] = {
    "ColPaliProcessor": _Kind("Question: ", keeps_empty=True, begins="bos_token"),
    "ColQwen2Processor": _Kind(
        "Query: ",
        images="Qwen2VLImageProcessor",
        prompt="<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
        "<|endoftext|>",
        image="<|image_pad|>",
    ),
    "ColModernVBertProcessor": _Kind(
        "",
        augments="<end_of_utterance>",
        ends="",
        images="Idefics3ImageProcessor",
        prompt="<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:",
        image="<image>",
        settings=(_PREFIX, _PROMPT, _TOKENS_OF_TILE),
        is_of_modules=False,  # queries go without what stands behind them, and pages without tokens
    ),
}


_OF_MODELS = {name.removesuffix("Processor").lower(): name for name in _KINDS}


@dataclass(frozen=True, eq=False)
class PageProcessor:
    """How a page becomes pixels and the tokens that stand for them, as many as its size asks for.

    Attributes:
        pictures: cuts pages.
        tokenizer: reads what a page is written as.
        prompt: that, with `image` where the page stands.
        image: the token that stands for a part of a page.
        tokens_of_tile: how often it does for one tile.
        limit: the most tokens of a page; None for any number.
        kept_ids: where it is not empty, no vectors of other tokens count.
    """

    pictures: PagePictures
    tokenizer: TextTokenizer
    prompt: str
    image: str
    tokens_of_tile: int
    limit: Limit | None
    kept_ids: frozenset[int]

    @classmethod
    def of(cls, folder: CheckpointFolder, name: str, tokenizer: TextTokenizer | None = None) -> PageProcessor:
        """Read the processor of a checkpoint, which is called `name`.

        Args:
            folder: of the checkpoint.
            name: the class that the graph was exported for.
            tokenizer: what reads its texts; None for the tokenizer.json in the folder as it is.

        Raises:
            InputError: it is another one, or one of its settings is not computed, or malformed.
        """
        kind, settings = _read(folder)
        if kind is not _KINDS.get(name):
            raise folder.refuse(f"{folder.label} has another processor than {name}, whose inputs the graph takes")
        prompt = _text(folder, settings, _PROMPT, kind.prompt, kind)
        number = positive(settings.get(_TOKENS_OF_TILE, 64))
        if not kind.images or number is None or prompt.count(kind.image) != 1:
            raise folder.malformed(
                _NAME, f"{_PROMPT} has not one {kind.image or 'picture'}, or {_TOKENS_OF_TILE} is no positive number"
            )
        tokenizer = tokenizer or TextTokenizer(folder)
        if tokenizer.id_of(kind.image) is None:
            raise folder.malformed("tokenizer.json", f"it has no token {kind.image}")
        pictures = read_page_pictures(folder, kind.images)
        mask = read_mask(SentenceModules.of(folder))
        kept_ids = frozenset[int]() if mask is None else mask.kept_ids
        return cls(pictures, tokenizer, prompt, kind.image, number, page_limit(folder), kept_ids)

    @property
    def image_id(self) -> int | None:
        """The id of the token that stands for a part of a page."""
        return self.tokenizer.id_of(self.image)

    def prepare(self, picture: Image) -> Feeds:
        """Return what the model takes of an RGB picture, without an axis for the batch.

        `input_ids` and `attention_mask` int64 [S], `pixel_values` float32, and what else the image processor gives.

        Raises:
            InputError: the proportions of the picture are none of a page.
        """
        cut = self.pictures.cut(picture)
        text = self.prompt.replace(self.image, self._written(cut))
        read = self.tokenizer.pad(self.tokenizer.encode([text]))
        num_tokens = read["input_ids"].shape[1]
        if self.limit is not None and num_tokens > self.limit.tokens:
            raise InputError(
                f"a page of {picture.width} x {picture.height} pixels has {num_tokens} tokens, more than "
                f"{self.limit.tokens} ({self.limit.source})",
                "make the page smaller: sentence-transformers cuts its tokens, and then refuses it",
            )
        if not self.counted(read["input_ids"]).any():
            raise InputError(
                "keep_only_token_ids of MultiVectorMask has no token of pages", "the list belongs to another model"
            )
        return {**{name: read[name][0] for name in ("input_ids", "attention_mask")}, **cut.feeds}

    def counted(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which tokens count, of any shape."""
        return np.isin(ids, list(self.kept_ids)) if self.kept_ids else np.ones_like(ids, dtype=bool)

    def _written(self, cut: CutPage) -> str:
        """Write what a page is cut into."""
        if cut.num_merged:
            return self.image * cut.num_merged
        num_tokens = len(cut.feeds[PIXELS]) * self.tokens_of_tile
        if num_tokens > _MOST_TOKENS:
            raise InputError(
                f"a page would have {num_tokens} tokens", f"check {_TOKENS_OF_TILE} in the settings of the processor"
            )
        tile = self.image * self.tokens_of_tile
        rows = "".join(
            "".join(f"{_BORDER}<row_{row}_col_{column}>{tile}" for column in range(1, cut.num_columns + 1)) + "\n"
            for row in range(1, cut.num_rows + 1)
        )
        return (f"{rows}\n" if rows else "") + f"{_BORDER}{_WHOLE}{tile}{_BORDER}"


def require_known_pages(files: CheckpointFiles) -> None:
    """Refuse a checkpoint whose pages would not be prepared.

    Raises:
        OnnxtoolError: its processor, or a setting of that, is not computed here.
    """
    kind, _ = _read(files)
    if kind.images:
        read_page_pictures(files, kind.images)
    else:
        PictureProcessor.of(files)


def require_known_queries(files: CheckpointFiles) -> None:
    """Refuse a checkpoint whose queries would not be written.

    Raises:
        OnnxtoolError: its processor, or a setting of that, is not computed here.
    """
    _read(files)


def write_page_query(query: str, files: CheckpointFiles, tokenizer: TextTokenizer) -> str:
    """Return the text that is tokenized for `query`.

    Raises:
        OnnxtoolError: the checkpoint has another processor, or its tokenizer no token to begin or pad with.
    """
    kind, settings = _read(files)
    prefix = _text(files, settings, _PREFIX, kind.prefix, kind)
    begins = tokenizer.named_token(kind.begins) if kind.begins else ""
    augments = tokenizer.named_token(kind.augments) if kind.augments == "pad_token" else kind.augments
    if begins is None or augments is None or tokenizer.id_of(augments) is None:
        raise files.malformed(_TOKENIZER, f"it has no {kind.begins or kind.augments}, or no {kind.augments}")
    return f"{begins}{prefix}{query}{augments * _NUM_AUGMENTING}{kind.ends}"


def page_limit(files: CheckpointFiles) -> Limit | None:
    """Return the most tokens of a page or query; None for a checkpoint without modules: transformers cuts none."""
    modules = SentenceModules.of(files)
    if not modules.modules:
        return None
    own, of_tokenizer = modules.max_sequence_length, positive(files.read(_TOKENIZER).get("model_max_length"))
    if own is not None:
        return Limit(own, f"max_seq_length of {modules.transformer_file}")
    return None if of_tokenizer is None else Limit(of_tokenizer, f"model_max_length of {_TOKENIZER}")


def require_known_page_modules(files: CheckpointFiles) -> None:
    """Refuse what sentence-transformers computes with a retriever of pages beyond what its model gives.

    Raises:
        OnnxtoolError: it has other modules or settings.
    """
    modules, hint = SentenceModules.of(files), "export the checkpoint of transformers, without modules.json"
    if not modules.modules:
        return
    if modules.kinds != _MODULES:
        raise files.refuse(
            f"modules.json of {files.label} names {', '.join(modules.kinds)}, and of a retriever of pages "
            f"onnxtool follows {' and '.join(_MODULES)}",
            hint,
        )
    unknown = [
        f"{key} {value!r} of {modules.transformer_file}"
        for key, value in modules.transformer.items()
        if value not in (*_NOTHING, _TRANSFORMER.get(key)) and not (key == "max_seq_length" and positive(value))
    ]
    unknown += [f"no {key} in sentence_bert_config.json" for key in _TRANSFORMER if key not in modules.transformer]
    unknown += [
        f"{key} {value!r} of {ENCODER_NAME}"
        for key, value in modules.encoder.items()
        if key != "__version__" and value not in (*_NOTHING, *_ENCODER.get(key, ()))
    ]
    name, kind = _kind_of(files)
    # Where pages are pixels alone, nobody sees the tokens beside them.
    followed = ("skiplist_tasks", *(("keep_only_token_ids",) if kind.images else ()))
    unknown += [
        f"{key} {value!r} of MultiVectorMask"
        for key, value in modules.modules[1].settings.items()
        if key not in followed and value not in _NOTHING
    ]
    read_mask(modules)
    if unknown:
        raise files.refuse(
            f"{files.label} has settings that onnxtool does not follow: {'; '.join(unknown)[:300]}", hint
        )
    if not kind.is_of_modules:
        raise files.refuse(
            f"sentence-transformers 6.2 calls {name} so that pages have no tokens, and queries lack those behind them",
            hint,
        )


def _kind_of(files: CheckpointFiles) -> tuple[str, _Kind]:
    """Return the name of a checkpoint's processor, and what it does.

    Raises:
        OnnxtoolError: it is another one.
    """
    # Processors that say nothing else were saved without a file of their own. Without any name, the model decides.
    names = {file: files.read(file).get("processor_class") for file in (_NAME, PROCESSOR_NAME, _TOKENIZER)}
    names["config.json"] = _OF_MODELS.get(str(files.read("config.json").get("model_type")))
    file, name = next(((file, name) for file, name in names.items() if name is not None), (_NAME, None))
    if not isinstance(name, str) or name not in _KINDS:
        raise files.refuse(
            f"{file} of {files.label} names the processor {name!r}, and pages and queries are written as "
            f"{', '.join(_KINDS)} do",
            "prepare pages and queries with transformers for this checkpoint",
        )
    return name, _KINDS[name]


def _read(files: CheckpointFiles) -> tuple[_Kind, Mapping[str, Json]]:
    """Return the processor of a checkpoint and its settings.

    Raises:
        OnnxtoolError: it is another one, or says what is not followed.
    """
    _, kind = _kind_of(files)
    settings, arguments = files.read(_NAME), files.read(_TOKENIZER)
    unknown = {
        _NAME: [key for key in settings if key not in (*kind.settings, *_HARMLESS) and settings[key] is not None],
        _TOKENIZER: [key for key, harmless in _ARGUMENTS.items() if arguments.get(key) not in harmless],
    }
    for file, keys in unknown.items():
        if keys:
            said = "; ".join(f"{key} {files.read(file)[key]!r}" for key in keys)
            raise files.refuse(
                f"{file} of {files.label} has settings that onnxtool does not follow: {said[:300]}",
                "prepare pages and queries with transformers for this checkpoint",
            )
    if _image_token(arguments) not in (None, kind.image) and kind.images:
        raise files.refuse(f"{_TOKENIZER} of {files.label} has another image_token than {kind.image}")
    require_known_page_modules(files)
    return kind, settings


def _image_token(arguments: Mapping[str, Json]) -> Json:
    """Return the token of pictures that a tokenizer itself names, in its present or an earlier place; None for none."""
    for place in (arguments, arguments.get("extra_special_tokens"), arguments.get("model_specific_special_tokens")):
        if isinstance(place, dict) and (token := place.get("image_token")) is not None:
            return token.get("content") if isinstance(token, dict) else token
    return None


def _text(files: CheckpointFiles, settings: Mapping[str, Json], key: str, default: str, kind: _Kind) -> str:
    value = settings.get(key, default)
    if value is None and not kind.keeps_empty:
        return default
    if not isinstance(value, str):
        raise files.malformed(_NAME, f"{key} is {value!r}, and no text")
    return value if value or kind.keeps_empty else default
