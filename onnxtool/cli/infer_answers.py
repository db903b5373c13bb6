"""How answers of `onnxtool infer` are laid out."""

from __future__ import annotations

from onnxtool.cli.render import Block, Facts, Heading, Note, Table, format_shape
from onnxtool.reports import InferReport, TextAnswer

# What the two columns of candidates are called, by kind.
_COLUMNS = {"terms": ("term", "weight"), "tokens": ("token", "probability"), "labels": ("label", "score")}
# A wider table of all pairs does not fit a screen; the nearest text of each is shown instead.
_MAX_MATRIX = 12
_MAX_TEXT_WIDTH = 80


def answer_blocks(report: InferReport) -> list[Block]:
    """Lay out the answers by what the model is for."""
    facts = Facts([("Model", report.model), ("Task", report.task), ("Provider", report.provider)])
    blocks: list[Block] = [facts, *(Note(note) for note in report.notes)]
    if report.similarities:
        return [*blocks, *_similarity_blocks(report)]
    for number, answer in enumerate(report.answers, start=1):
        blocks.append(Heading(_title(number, answer)))
        if answer.candidates:
            label, score = _COLUMNS[report.kind]
            rows = [(candidate.label, f"{candidate.score:.4f}") for candidate in answer.candidates]
            blocks.append(Table((label, score), rows, frozenset({score})))
        elif answer.outputs:
            blocks.append(Facts([(name, format_shape(shape)) for name, shape in answer.outputs.items()]))
        else:
            blocks.append(Facts([(_COLUMNS[report.kind][0], "none")]))
    return blocks


def _similarity_blocks(report: InferReport) -> list[Block]:
    rows = [
        (str(number), str(answer.num_tokens), _label(answer)) for number, answer in enumerate(report.answers, start=1)
    ]
    blocks: list[Block] = [Heading("Texts"), Table(("#", "tokens", "text"), rows, frozenset({"#", "tokens"}))]
    if len(rows) <= _MAX_MATRIX:
        numbers = [number for number, _, _ in rows]
        matrix = [
            (number, *(f"{value:.4f}" for value in row))
            for number, row in zip(numbers, report.similarities, strict=True)
        ]
        return [*blocks, Heading("Cosine similarity"), Table(("#", *numbers), matrix, frozenset({"#", *numbers}))]
    nearest = []
    for place, row in enumerate(report.similarities):
        other = max((index for index in range(len(row)) if index != place), key=lambda index: row[index])
        nearest.append((str(place + 1), str(other + 1), f"{row[other]:.4f}"))
    columns = ("#", "nearest", "cosine")
    return [*blocks, Heading("Nearest other text of each"), Table(columns, nearest, frozenset(columns))]


def _title(number: int, answer: TextAnswer) -> str:
    cut = ", cut" if answer.truncated else ""
    return f"{number}. {_label(answer)} ({answer.num_tokens} tokens{cut})"


def _label(answer: TextAnswer) -> str:
    """Name a text by its id and how it begins, on one line."""
    text = " ".join(answer.text.split())
    short = text if len(text) <= _MAX_TEXT_WIDTH else f"{text[: _MAX_TEXT_WIDTH - 1]}…"
    return short if answer.id is None else f"[{answer.id}] {short}"
