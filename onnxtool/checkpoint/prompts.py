"""The prompts of a checkpoint: what is written before a text, as sentence-transformers does it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.late_interaction import as_multi_vector
from onnxtool.checkpoint.sentence_modules import ENCODER_NAME, SentenceModules
from onnxtool.errors import InputError
from onnxtool.reports import short_repr

# What looks like a name; a prompt that is none of the checkpoint's has at least a space or a colon.
_NAME = re.compile(r"[\w.-]+")


@short_repr
@dataclass(frozen=True)
class Prompts:
    """What may be written before a text.

    Attributes:
        by_name: the texts, such as `query: `, by name.
        default: the name of the one that is used where no other is asked for; None for no prompt.
    """

    by_name: Mapping[str, str]
    default: str | None = None

    @classmethod
    def of(cls, folder: CheckpointFiles) -> Prompts:
        """Read them from config_sentence_transformers.json, or from where an older late-interaction encoder has them.

        Raises:
            InputError: the file is malformed, or its default is none of its prompts.
        """
        config = as_multi_vector(SentenceModules.of(folder), folder).encoder
        stated = config.get("prompts") or {}
        if not isinstance(stated, dict) or not all(isinstance(text, str | None) for text in stated.values()):
            raise folder.malformed(ENCODER_NAME, f"its prompts are no texts by name: {stated}")
        by_name = {name: str(text or "") for name, text in stated.items()}
        default = config.get("default_prompt_name")
        if default is not None and (not isinstance(default, str) or default not in by_name):
            raise folder.malformed(ENCODER_NAME, f"its default prompt {default!r} is none of {', '.join(by_name)}")
        return cls(by_name, default)

    def find(self, prompt: str | None, task: str | None = None) -> str:
        """Return the text to write before others.

        Args:
            prompt: a name, or the text itself; empty for none, and None for the one of the task, or the checkpoint's
                default where there is no task.
            task: `query` or `document`, as encode_query and encode_document of sentence-transformers. It has a prompt
                of its name or none: version 6.2 does not fall back to the default, nor to one called `passage`.

        Raises:
            InputError: it reads like a name, and the checkpoint has no such prompt.
        """
        if prompt is None and task is not None:
            return self.by_name.get(task, "")
        if prompt is None:
            return "" if self.default is None else self.by_name[self.default]
        if prompt in self.by_name or not _NAME.fullmatch(prompt):
            return self.by_name.get(prompt, prompt)
        known = ", ".join(f"{name} ({text!r})" for name, text in self.by_name.items())
        raise InputError(
            f"the checkpoint has no prompt called {prompt!r}; " + (f"it has {known}" if known else "it has none"),
            f"to write it before each text as it is, end it with a space: '{prompt} '",
        )
