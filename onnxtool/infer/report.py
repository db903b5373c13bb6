"""What `infer` found out about texts."""

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
