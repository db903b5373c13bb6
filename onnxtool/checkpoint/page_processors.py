"""What retrievers of pages as pictures are fed: pages cut and written, and queries, as the processors of transformers.

The definitions are those of transformers 5.23.

Letters of shapes: S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.page_pictures import GRID, OWN_SETTINGS, CutPage, PagePictures, read_page_pictures
from onnxtool.checkpoint.picture_processing import FOLLOWED, PIXELS, PROCESSOR_NAME, Feeds, PictureProcessor
from onnxtool.checkpoint.sentence_modules import positive
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.reports import Json

if TYPE_CHECKING:
    from PIL.Image import Image

# What a graph of pages may take.
PAGE_INPUTS = ("input_ids", "attention_mask", PIXELS, GRID)

_NAME, _TOKENIZER = "processor_config.json", "tokenizer_config.json"
_PREFIX, _PROMPT, _TOKENS_OF_TILE = "query_prefix", "visual_prompt_prefix", "image_seq_len"
_NUM_AUGMENTING = 10  # tokens behind a query, in which the model may put what the query has no words for
_BORDER, _WHOLE = "<fake_token_around_image>", "<global-img>"
# What the processors of transformers read of a tokenizer's settings as if it were an argument of theirs, and which
# values of it change neither tokens nor pixels.
_ARGUMENTS: Mapping[str, tuple[Json, ...]] = {
    "add_special_tokens": (None, True),
    **dict.fromkeys(("is_split_into_words", "padding", "truncation"), (None, False)),
    **dict.fromkeys((*FOLLOWED, *OWN_SETTINGS), (None,)),
}
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
    ),
}


@dataclass(frozen=True, eq=False)
class PageProcessor:
    """How a page becomes pixels and the tokens that stand for them, as many as its size asks for.

    Attributes:
        pictures: cuts pages.
        tokenizer: reads what a page is written as.
        prompt: that, with `image` where the page stands.
        image: the token that stands for a part of a page.
        tokens_of_tile: how often it does for one tile.
    """

    pictures: PagePictures
    tokenizer: TextTokenizer
    prompt: str
    image: str
    tokens_of_tile: int

    @classmethod
    def of(cls, folder: CheckpointFolder, name: str) -> PageProcessor:
        """Read the processor of a checkpoint, which is called `name`.

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
        tokenizer = TextTokenizer(folder)
        if tokenizer.id_of(kind.image) is None:
            raise folder.malformed("tokenizer.json", f"it has no token {kind.image}")
        return cls(read_page_pictures(folder, kind.images), tokenizer, prompt, kind.image, number)

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
        return {**{name: read[name][0] for name in ("input_ids", "attention_mask")}, **cut.feeds}

    def _written(self, cut: CutPage) -> str:
        """Write what a page is cut into."""
        if cut.num_merged:
            return self.image * cut.num_merged
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


def _read(files: CheckpointFiles) -> tuple[_Kind, Mapping[str, Json]]:
    """Return the processor of a checkpoint and its settings.

    Raises:
        OnnxtoolError: it is another one, or says what is not followed.
    """
    settings, arguments = files.read(_NAME), files.read(_TOKENIZER)
    # Processors that say nothing else were saved without a file of their own.
    names = {file: files.read(file).get("processor_class") for file in (_NAME, PROCESSOR_NAME, _TOKENIZER)}
    file, name = next(((file, name) for file, name in names.items() if name is not None), (_NAME, None))
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise files.refuse(
            f"{file} of {files.label} names the processor {name!r}, and pages and queries are written as "
            f"{', '.join(_KINDS)} do",
            "prepare pages and queries with transformers for this checkpoint",
        )
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
