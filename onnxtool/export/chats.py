"""Check the chat template of a checkpoint before an export: `infer` renders it as transformers does, or not at all."""

from __future__ import annotations

from typing import Any

from onnxtool.checkpoint.chat_templates import ChatTemplate
from onnxtool.checkpoint.folder import Prompts
from onnxtool.checkpoint.tasks import RANKING
from onnxtool.export.source import Source
from onnxtool.runtime.quiet import quiet

_TEXT = "What is the capital of France?\n Paris, <of> course; naïve café."


def check_chat_template(source: Source, tokenizer: Any, task: str) -> ChatTemplate | None:
    """Render a few chats, and compare each with what the tokenizer of transformers makes.

    Args:
        source: the checkpoint.
        tokenizer: its tokenizer, of transformers.
        task: what the export is for.

    Returns:
        The template; None for a checkpoint whose texts are read as they are.

    Raises:
        CheckpointError: the template fails, leaves out a part of a pair, or renders otherwise here.
    """
    template = ChatTemplate.of(source, source.sentence_modules, task)
    if template is None:
        return None
    of_pairs = task in (RANKING, "text-classification")
    if of_pairs:
        template.require_pairs()
    for prompt in dict.fromkeys(("", *Prompts.of(source).by_name.values())):
        text = (_TEXT, _TEXT[::-1]) if of_pairs else _TEXT
        (ours,) = template.render([text], prompt)
        with quiet():
            theirs = tokenizer.apply_chat_template(template.messages(text, prompt), tokenize=False, **template.passed)
        if ours != theirs:
            raise source.refuse(
                f"the chat template of {source.model_name} renders otherwise here than in transformers: {ours[:200]!r} "
                f"instead of {theirs[:200]!r}"
            )
    return template
