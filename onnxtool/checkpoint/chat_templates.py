"""Render texts with the chat template of a checkpoint's tokenizer, like Transformer of sentence-transformers 6.2.

A text is a `user` message, a pair is a `query` and a `document` message, and a prompt is a `system` message.
transformers renders them. A template is a program that comes with a checkpoint, and its sandbox allows loops over ten
billion numbers or texts as large as memory, so it runs in a guarded child process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onnxtool.checkpoint.files import ROLES, CheckpointFiles, stated_token
from onnxtool.checkpoint.limits import Text
from onnxtool.checkpoint.sentence_modules import SentenceModules, as_object
from onnxtool.errors import OnnxtoolError, first_line
from onnxtool.guarded import ChildEndedError, ChildError, GuardedChild
from onnxtool.reports import Json, short_repr

TEMPLATE_NAME = "chat_template.jinja"
_TOKENIZER = "tokenizer_config.json"
_ROLES = ("query", "document")
# Pairs whose chats must differ, as tried by sentence-transformers: in the query, and in the document.
_PROBES = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
# Two texts that no tokenizer ends with the same tokens, used to find the tokens after a text.
FILLERS = ("0", "1 2 3 4")
# Signs of a template that takes content in parts, and the models known to have one.
_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
_FLAT_MODELS = ("apertus", "deepseek_v3", "gpt_oss", "seed_oss")
# Arguments of apply_chat_template that are not template variables; all others are passed to the template.
NO_VARIABLES = frozenset(
    (
        *("chat_template", "continue_final_message", "max_length", "padding", "return_assistant_tokens_mask"),
        *("return_dict", "return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools"),
        "truncation",
    )
)
FORMATS = ("flat", "structured", "auto")
_MAX_SECONDS = 5  # for _TEXTS_PER_REQUEST; a template takes a millisecond for one
_TEXTS_PER_REQUEST = 64
_MAX_BYTES = 512 << 20  # a process that has loaded the renderer has a third of that
_BYTES_PER_CHARACTER = 64  # in addition to those, for each text
_MAX_CHARACTERS, _GROWTH = 1_000_000, 16  # of a chat, and this many times the characters of its texts
# One process for all templates: loading the renderer takes a second.
_CHILD = GuardedChild(f"{__name__}:render_chats", ("transformers.utils.chat_template_utils",))


@short_repr
@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and its rendering settings.

    Attributes:
        source: Jinja source.
        is_flat: whether the content of a message is a text; otherwise it is a list with one text part.
        special_tokens: by name, such as `eos_token`.
        passed: variables that the checkpoint sets, such as `add_generation_prompt`.
        restores_end: whether the tokens that the template writes after a text are restored when the text is truncated.
        files: the checkpoint, for errors.
    """

    source: str
    is_flat: bool
    special_tokens: Mapping[str, Json]
    passed: Mapping[str, Json]
    restores_end: bool
    files: CheckpointFiles

    @classmethod
    def of(cls, files: CheckpointFiles, modules: SentenceModules, task: str) -> ChatTemplate | None:
        """Read the template; None for a checkpoint that reads texts as they are.

        Args:
            files: the checkpoint.
            modules: the checkpoint's modules.
            task: the model's task.

        Raises:
            OnnxtoolError: the checkpoint expects messages, and its template is missing or not a string.
        """
        if not modules.takes_messages(task):
            return None
        source = _stored_template(files)
        if source is None and modules.modules:
            raise files.refuse(
                f"{files.label} puts texts into a chat template ({modules.transformer_file}), and its tokenizer has "
                f"none ({TEMPLATE_NAME})"
            )
        if source is None:
            return None
        config = as_object(modules.transformer.get("modality_config"))
        stated = as_object(config.get("message")).get("format", "auto")
        is_flat = _is_flat(files, source) if stated == "auto" else stated == "flat"
        passed = dict(as_object(as_object(modules.transformer.get("processing_kwargs")).get("chat_template")))
        restores_end = passed.pop("restore_suffix", True) is not False
        return cls(source, is_flat, _special_tokens(files), passed, restores_end, files)

    @classmethod
    def for_answers(cls, files: CheckpointFiles) -> ChatTemplate:
        """Read a tokenizer's template for prompts to be answered: it ends where the answer begins.

        Raises:
            OnnxtoolError: the template is missing or not a string.
        """
        source = _stored_template(files)
        if source is None:
            raise files.refuse(
                f"{files.label} has no chat template ({TEMPLATE_NAME})", "leave --chat out: the text is read as it is"
            )
        passed = {"add_generation_prompt": True}
        return cls(source, _is_flat(files, source), _special_tokens(files), passed, restores_end=True, files=files)

    @cached_property
    def reads_task(self) -> bool:
        """Whether it renders queries and documents differently."""
        return "task" in self._ask([], {})

    def render(self, texts: Sequence[Text], prompt: str = "", task: str | None = None) -> list[str]:
        """Render texts and pairs as chats.

        Args:
            texts: texts, and pairs of texts.
            prompt: the system message; empty for none.
            task: `query` or `document`, for templates that read it; None for neither.

        Raises:
            OnnxtoolError: the template cannot be read, fails, or reaches a limit of time or memory.
        """
        task_variable: dict[str, Json] = {"task": task} if task is not None and self.reads_task else {}
        variables = {**self.special_tokens, **task_variable, **self.passed}
        chats: list[str] = []
        for start in range(0, len(texts), _TEXTS_PER_REQUEST):
            chats += self._ask(
                [self.messages(text, prompt) for text in texts[start : start + _TEXTS_PER_REQUEST]], variables
            )
        return chats

    def _ask(self, conversations: list[list[dict[str, Json]]], variables: Mapping[str, Json]) -> list[str]:
        """Render in the child; without conversations, return the names of the template's variables."""
        size = len(str(conversations))
        num_bytes = _MAX_BYTES + _BYTES_PER_CHARACTER * size
        try:
            chats: list[str] = _CHILD.call(
                [self.source, conversations, dict(variables), _MAX_CHARACTERS + _GROWTH * size],
                seconds=_MAX_SECONDS,
                num_bytes=num_bytes,
            )
        except ChildError as error:
            raise self._failure(str(error)) from None
        except ChildEndedError as error:
            raise self._failure(error.reason(_MAX_SECONDS, num_bytes)) from None
        return chats

    def messages(self, text: Text, prompt: str = "") -> list[dict[str, Json]]:
        """Return the messages: a system message for the prompt, then the messages of the text."""
        parts = (("user", text),) if isinstance(text, str) else tuple(zip(_ROLES, text, strict=True))
        rendered = (*((("system", prompt),) if prompt else ()), *parts)
        return [
            {"role": role, "content": part if self.is_flat else [{"type": "text", "text": part}]}
            for role, part in rendered
        ]

    def require_pairs(self) -> None:
        """Refuse a template that omits the query or the document, as sentence-transformers does.

        Raises:
            OnnxtoolError: it does.
        """
        base, *changed = self.render(_PROBES)
        dropped = [role for role, chat in zip(_ROLES, changed, strict=True) if chat == base]
        if dropped:
            raise self.files.refuse(
                f"the chat template of {self.files.label} leaves out the {' and the '.join(dropped)} of a pair",
                f"sentence-transformers asks for one that writes messages of the roles query and document: save it as "
                f"{TEMPLATE_NAME} next to the tokenizer",
            )

    def fillers(self, text: Text) -> tuple[Text, Text]:
        """Return two other texts, or pairs, of the same form as `text`, whose chats share the ending after the text."""
        first, second = FILLERS
        return (first, second) if isinstance(text, str) else ((first, first), (second, second))

    def _failure(self, reason: str) -> OnnxtoolError:
        return self.files.refuse(
            f"the chat template of {self.files.label} {reason}",
            "it came with the checkpoint; if you trust that, run it with sentence-transformers",
        )


def render_chats(request: list[Any]) -> list[str]:
    """Render chats, or list the variables of a template, like transformers 5.23; called in the child.

    Args:
        request: the template, the conversations, the rendering settings, and the maximum length of a chat in
            characters.

    Raises:
        ValueError: the template cannot be read, fails, or produces too much text.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils import chat_template_utils

    source, conversations, variables, most = request
    try:
        if not conversations:
            return sorted(chat_template_utils._get_template_variables(source))  # noqa: SLF001  no public way
        chats, _ = chat_template_utils.render_jinja_template(conversations, chat_template=source, **variables)
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        raise ValueError(f"cannot be read: {error.message}") from None
    except Exception as error:  # noqa: BLE001  a program of the checkpoint, which can fail in any way
        raise ValueError(f"fails: {first_line(error)}") from None
    if any(len(chat) > most for chat in chats):
        raise ValueError(f"makes a chat of more than {most} characters")
    rendered: list[str] = chats
    return rendered


def common_end(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """Return the common ending tokens of two chats of different texts; none if one chat is the ending of the other."""
    count = 0
    while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return tuple(first[len(first) - count :]) if count < min(len(first), len(second)) else ()


def _is_flat(files: CheckpointFiles, source: str) -> bool:
    """Whether a template takes message content as a text, judging by its source."""
    is_structured = any(pattern in source for pattern in _STRUCTURED)
    return files.read_object("config.json").get("model_type") in _FLAT_MODELS or not is_structured


def _stored_template(files: CheckpointFiles) -> str | None:
    """Return the template that transformers would use; `default` if there are several."""
    text = files.read_text(TEMPLATE_NAME)
    if text is not None:
        return text
    stated = files.read_object(_TOKENIZER).get("chat_template")
    if isinstance(stated, list):
        named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = named.get("default")
        if stated is None:
            raise files.refuse(f"{files.label} has several chat templates ({_TOKENIZER}), and none called default")
    if stated is not None and not isinstance(stated, str):
        raise files.malformed(_TOKENIZER, "its chat_template is not a text")
    return stated


def _special_tokens(files: CheckpointFiles) -> dict[str, Json]:
    configs = [files.read_object(name) for name in (_TOKENIZER, "special_tokens_map.json")]
    return {role: token for role in ROLES if (token := stated_token(role, *configs)) is not None}
