"""Reports of `infer`: answers for texts, and generated text."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxtool.reports import short_repr


@dataclass(frozen=True)
class Scored:
    """A term, label or candidate and its score."""

    label: str
    score: float


@dataclass(frozen=True)
class Span:
    """A part of a text with a label.

    Attributes:
        label: of an entity or word; `answer` for the answer to a question.
        text: the part.
        start: the index of its first character, from 0.
        end: the index after its last character.
    """

    label: str
    score: float
    text: str
    start: int
    end: int


@short_repr
@dataclass(frozen=True)
class TextAnswer:
    """The model's answer for one text, or for a query and a text.

    Attributes:
        num_tokens: number of tokens read, including special ones, over all windows.
        truncated: whether the text exceeded the model's limit and was truncated.
        candidates: highest score first; empty for embeddings and spans.
        outputs: output shapes by name, if there is no other answer.
        id: the text's id in the input file; None if it has none.
        query: the first text of a pair; None for a single text.
        num_windows: number of windows the text was read in.
        spans: entities and words in text order; answers to a question, best first.
        vector: the embedding, as the shortest decimals that round-trip to the same float32; empty for other models.
        token_vectors: the vectors of the counting tokens in late interaction, also as decimals; empty for other models,
            and for rankings.
    """

    text: str
    num_tokens: int
    truncated: bool
    candidates: tuple[Scored, ...] = ()
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    id: str | None = None
    query: str | None = None
    num_windows: int = 1
    spans: tuple[Span, ...] = ()
    vector: tuple[float, ...] = ()
    token_vectors: tuple[tuple[float, ...], ...] = ()

    @property
    def scores(self) -> dict[str, float]:
        """Scores of the candidates by label."""
        return {candidate.label: candidate.score for candidate in self.candidates}


@dataclass(frozen=True)
class Ranking:
    """The texts of one query, best first.

    Attributes:
        query: None if the texts were scored without one.
        order: positions in `answers`, from 0; ties keep their order.
    """

    query: str | None
    order: tuple[int, ...]


@short_repr
@dataclass(frozen=True)
class InferReport:
    """Answers for a list of texts.

    Attributes:
        kind: the kind of answers: `terms`, `labels`, `scores`, `tokens`, `spans`, `similarities`,
            `token_vectors` or `shapes`.
        similarities: cosine of every pair of texts, for embeddings with more than one text; otherwise empty.
        rankings: for scores, one per query in the order of the queries; otherwise empty.
        notes: notes for the user about these answers.
    """

    model: str
    provider: str
    task: str
    kind: str
    answers: tuple[TextAnswer, ...]
    similarities: tuple[tuple[float, ...], ...] = ()
    rankings: tuple[Ranking, ...] = ()
    notes: tuple[str, ...] = ()


@short_repr
@dataclass(frozen=True)
class WrittenText:
    """The text generated after one prompt.

    Attributes:
        num_tokens: number of prompt tokens, including special ones.
        truncated: whether the prompt exceeded the model's limit and was truncated.
        generated: the generated text, without special tokens and without the stop text that ended it.
        token_ids: all generated tokens.
        finish_reason: `end` for an end-of-text token, `stop` for a stop text, `length` for the requested number of
            tokens, and `limit` for the model's limit.
        id: the prompt's id in the input file; None if it has none.
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
    """The texts generated after a list of prompts, in order.

    Attributes:
        kind: `texts`.
        decoding: `greedy`, `sample`, `beam_search` or `beam_sample`.
        num_generated: number of tokens in all answers.
        generation_ms: time from the first run to the last, over all batches.
        first_token_ms: time to the first token of the first batch.
        throughput_tokens_per_s: generated tokens per second over all batches, including prompt time.
        notes: notes for the user about these answers.
    """

    model: str
    provider: str
    task: str
    kind: str
    decoding: str
    answers: tuple[WrittenText, ...]
    num_generated: int
    generation_ms: float = 0.0
    first_token_ms: float = 0.0
    throughput_tokens_per_s: float = 0.0
    notes: tuple[str, ...] = ()
