"""How a model writes, where it should not write as its checkpoint says."""

from __future__ import annotations

from typing import Annotated

from onnxtool.options import NOTHING, UNSET, Many, Option, OptionalPath, Options

DECODINGS = ("greedy", "sample")
_CHECKPOINT = "as the checkpoint says"


class GenerateOptions(Options):
    """Settings that stand above those of generation_config.json. None leaves one as the checkpoint has it.

    Attributes:
        max_new_tokens: the most tokens written for a text.
        decoding: the best token each time (`greedy`), or one that is drawn (`sample`).
        num_beams: how many answers are searched at once, of which the likeliest is written; 1 for no search.
        temperature: what scores are divided by before a token is drawn.
        top_p: draw from the likeliest tokens that have this much of the probability together.
        top_k: draw from this many of the likeliest tokens; 0 for all.
        repetition_penalty: what scores of tokens that are there already are divided by.
        no_repeat_ngram_size: no run of this many tokens is written twice; 0 for no such rule.
        stop: texts that end an answer, and are no part of it.
        chat: whether each text is a message, put into the chat template of the tokenizer; a prompt is the system's.
        seed: of what is drawn; answers do not depend on the other texts.
        encoder_path: the encoder of an encoder-decoder, instead of the file that the decoder names.
    """

    max_new_tokens: Annotated[
        int | None,
        Option(
            "Write after each text, at most this many tokens.",
            minimum=1,
            default=f"{_CHECKPOINT}; without it, a decoder gives candidates for the next token",
        ),
    ] = None
    decoding: Annotated[
        str | None,
        Option("Take the best token each time, or draw one.", choices=DECODINGS, default=_CHECKPOINT),
    ] = None
    num_beams: Annotated[
        int | None,
        Option(
            "Search this many answers at once, and write the likeliest.",
            minimum=1,
            default=f"{_CHECKPOINT}; 1 with --decoding",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Option("Scores are divided by it before a token is drawn.", minimum=0, is_open=True, default=_CHECKPOINT),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            "Draw from the likeliest tokens of this probability together.", minimum=0, maximum=1, default=_CHECKPOINT
        ),
    ] = None
    top_k: Annotated[int | None, Option(minimum=0)] = None
    repetition_penalty: Annotated[
        float | None,
        Option(
            "Scores of tokens that are there already are divided by it.", minimum=0, is_open=True, default=_CHECKPOINT
        ),
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None, Option("Write no run of this many tokens twice.", minimum=0, default=_CHECKPOINT)
    ] = None
    stop: Annotated[Many[str], Option("A text that ends what is written; may be given several times.")] = NOTHING
    chat: Annotated[
        bool,
        Option("Put each text into the checkpoint's chat template, as a user's message; --prompt is the system's."),
    ] = False
    seed: Annotated[int, Option("Seed of the tokens that are drawn.", minimum=0)] = 0
    encoder_path: Annotated[
        OptionalPath,
        Option("The encoder of an encoder-decoder.", default="the file that the decoder names, beside it"),
    ] = UNSET

    @property
    def asks_for_text(self) -> bool:
        """Whether anything was asked for that only a model that writes has."""
        return self != GenerateOptions(top_k=self.top_k)
