"""Any other model: the shapes of what it gives."""

from __future__ import annotations

from dataclasses import dataclass

from onnxtool.infer.batches import Batch
from onnxtool.infer.heads.head import Answer, AnswerHead, Asked


@dataclass(frozen=True)
class Shapes(AnswerHead[dict[str, tuple[int, ...]]]):
    """Names and shapes of the outputs."""

    kind = "shapes"
    takes_pairs = True

    def read(self, batch: Batch) -> list[dict[str, tuple[int, ...]]]:
        """Return the shapes that the model gives for each text by itself, without padding."""
        size = batch.mask.shape
        readings = []
        for text in batch.texts:
            shapes = {}
            for name, array in batch.outputs.items():
                if array.shape[:2] == size:
                    shapes[name] = (1, len(text), *array.shape[2:])
                else:
                    shapes[name] = (1, *array.shape[1:]) if array.shape[:1] == size[:1] else array.shape
            readings.append(shapes)
        return readings

    def answer(self, reading: dict[str, tuple[int, ...]], asked: Asked) -> Answer:
        """Answer with them."""
        return Answer(outputs=reading)
