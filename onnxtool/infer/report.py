"""What `infer` found out about texts, and what a model wrote after them."""

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
        start: its first character, counted from 0.
        end: the character behind its last.
    """

    label: str
    score: float
    text: str
    start: int
    end: int


@short_repr
@dataclass(frozen=True)
class TextAnswer:
    """What the model says about one text, or about a query and a text.

    Attributes:
        num_tokens: tokens the model read, special ones included; of all windows together.
        truncated: whether the text was longer than the model takes, and cut.
        candidates: highest score first; empty for embeddings and spans.
        outputs: name to shape of what the model returned, where no other answer is known.
        id: what the input file calls the text; None where it has no name.
        query: the first text of a pair; None for a text by itself.
        num_windows: how many windows the text was read in.
        spans: entities and words in the order of the text; answers to a question with the best first.
        vector: the embedding, as the shortest decimals that are the same float32; empty for other models.
        token_vectors: likewise the vectors of the tokens that count, in late interaction; empty for other models, and
            where texts are ranked.
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
        """Label to score of the candidates."""
        return {candidate.label: candidate.score for candidate in self.candidates}


@dataclass(frozen=True)
class Ranking:
    """The texts of one query, best first.

    Attributes:
        query: None where the texts were scored by themselves.
        order: positions in `answers`, counted from 0; of equal scores the first comes first.
    """

    query: str | None
    order: tuple[int, ...]


@short_repr
@dataclass(frozen=True)
class InferReport:
    """Answers for a list of texts.

    Attributes:
        kind: what the answers are: `terms`, `labels`, `scores`, `tokens`, `spans`, `similarities`,
            `token_vectors` or `shapes`.
        similarities: cosine of every pair of texts, for embeddings with more than one text; else empty.
        rankings: for scores, one a query in the order of the queries; else empty.
        notes: what a user should know about these answers.
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
        decoding: `greedy`, `sample`, `beam_search` or `beam_sample`.
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
    generation_ms: float = 0.0
    first_token_ms: float = 0.0
    throughput_tokens_per_s: float = 0.0
    notes: tuple[str, ...] = ()
