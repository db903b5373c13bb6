"""What a model wrote."""

from __future__ import annotations

from dataclasses import dataclass

from onnxtool.reports import short_repr


@short_repr
@dataclass(frozen=True)
class WrittenText:
    """What a model wrote after one text.

    Attributes:
        num_tokens: tokens of the text, special ones included.
        truncated: whether the text was longer than the model takes, and cut.
        generated: without special tokens, and without the stop that ended it.
        token_ids: all tokens that were written.
        finish_reason: `end` for a token that ends texts, `stop` for one of the stop texts, `length` for as many tokens
            as were asked for, and `limit` for as many as the model takes.
        id: what the input file calls the text; None where it has no name.
    """

    text: str
    num_tokens: int
    truncated: bool
    generated: str
    token_ids: tuple[int, ...]
    finish_reason: str
    id: str | None = None


@short_repr
@dataclass(frozen=True)
class GenerationReport:
    """What a model wrote after a list of texts, in their order.

    Attributes:
        kind: `texts`.
        decoding: `greedy` or `sample`.
        num_generated: tokens of all answers.
        generation_ms: from the first run to the last one, of all batches.
        first_token_ms: to the first token of the first batch.
        throughput_tokens_per_s: tokens written in a second, of all batches, the prompts' time included.
        notes: what a user should know about these answers.
    """

    model: str
    provider: str
    task: str
    kind: str
    decoding: str
    answers: tuple[WrittenText, ...]
    num_generated: int
    generation_ms: float
    first_token_ms: float
    throughput_tokens_per_s: float
    notes: tuple[str, ...] = ()
