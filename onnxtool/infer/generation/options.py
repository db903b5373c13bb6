"""Generation options that override the checkpoint's settings."""

from __future__ import annotations

from typing import Annotated

from onnxtool.options import NOTHING, UNSET, Many, Option, OptionalPath, Options

DECODINGS = ("greedy", "sample")
_CHECKPOINT = "as the checkpoint says"


class GenerateOptions(Options):
    """Settings that override generation_config.json. None keeps the checkpoint's value.

    Attributes:
        max_new_tokens: the maximum number of tokens generated per text.
        decoding: `greedy` for the best token each time, `sample` for a random one.
        num_beams: number of beams, of which the most likely is returned; 1 for no beam search.
        temperature: divisor of the scores before sampling.
        top_p: sample from the most likely tokens with this total probability.
        top_k: sample from this many of the most likely tokens; 0 for all.
        repetition_penalty: divisor of the scores of tokens that already occur.
        no_repeat_ngram_size: n-grams of this size are not repeated; 0 for no such rule.
        stop: texts that end an answer, and are not part of it.
        chat: whether each text is a user message for the tokenizer's chat template; a prompt is the system message.
        seed: random seed for sampling; answers do not depend on the other texts.
        encoder_path: the encoder of an encoder-decoder, instead of the file named in the decoder.
    """

    max_new_tokens: Annotated[
        int | None,
        Option(
            "Generate at most this many tokens after each text.",
            minimum=1,
            default=f"{_CHECKPOINT}; without it, a decoder lists candidates for the next token",
        ),
    ] = None
    decoding: Annotated[
        str | None,
        Option("Take the best token each time, or sample one.", choices=DECODINGS, default=_CHECKPOINT),
    ] = None
    num_beams: Annotated[
        int | None,
        Option(
            "Number of beams; the most likely answer is returned.",
            minimum=1,
            default=f"{_CHECKPOINT}; 1 with --decoding",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Option("Divide scores by this before sampling a token.", minimum=0, is_open=True, default=_CHECKPOINT),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            "Sample from the most likely tokens with this total probability.", minimum=0, maximum=1, default=_CHECKPOINT
        ),
    ] = None
    top_k: Annotated[int | None, Option(minimum=0)] = None
    repetition_penalty: Annotated[
        float | None,
        Option("Divide scores of tokens that already occur by this.", minimum=0, is_open=True, default=_CHECKPOINT),
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None, Option("Do not repeat n-grams of this size.", minimum=0, default=_CHECKPOINT)
    ] = None
    stop: Annotated[Many[str], Option("A text that ends generation; may be repeated.")] = NOTHING
    chat: Annotated[
        bool,
        Option("Apply the checkpoint's chat template to each text as a user message; --prompt is the system message."),
    ] = False
    seed: Annotated[int, Option("Random seed for sampling.", minimum=0)] = 0
    encoder_path: Annotated[
        OptionalPath,
        Option("The encoder of an encoder-decoder.", default="the file named in the decoder, next to it"),
    ] = UNSET

    @property
    def asks_for_text(self) -> bool:
        """Whether any option is set that needs a generative model."""
        return self != GenerateOptions(top_k=self.top_k)
