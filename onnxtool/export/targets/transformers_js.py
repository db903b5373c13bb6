"""Transformers.js, which cuts texts after adding their special tokens, and so cuts the closing one off.

From the sources of Transformers.js 4.3: src/tokenization_utils.js, src/pipelines/feature-extraction.js, and
src/utils/dtypes.js.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxtool.checkpoint.folder import TOKENIZER_NAME
from onnxtool.checkpoint.limits import Text
from onnxtool.checkpoint.tokenizer_library import read_file
from onnxtool.errors import TargetError
from onnxtool.export.modalities.modality import Modality
from onnxtool.export.modalities.text import TextInputs
from onnxtool.export.sidecar_files import read_object, write_json
from onnxtool.export.target_specification import TargetSpecification
from onnxtool.export.targets import DENSE, SCORES
from onnxtool.graph.writer import Writer
from onnxtool.runtime.tokens import ReadTokens

_SETTINGS, _EXTERNAL = "transformers.js_config", "use_external_data_format"  # in config.json
_IDS, _MASK = "input_ids", "attention_mask"


class TransformersJsSpecification(TargetSpecification):
    """A graph that closes the texts which were cut, and settings by which the file that is there is opened."""

    @cached_property
    def closing(self) -> int | None:
        """The id of the special token at the end of a text; None if there is none.

        Raises:
            TargetError: there are several.
        """
        tokens = self.tokenizer("a", return_special_tokens_mask=True)
        flags = tokens["special_tokens_mask"]
        if flags[-2:] == [1, 1]:
            raise TargetError(
                f"{self.target.title} cuts off the end of a long text, and this tokenizer ends a text with more than "
                "one special token",
                "pass --target plain, and cut texts before they are tokenized",
            )
        return int(tokens["input_ids"][-1]) if flags[-1] else None

    def fed(self, modality: Modality) -> Modality:
        """Return the modality with texts that end with their closing token, as the checkpoint was trained on."""
        modality = super().fed(modality)
        if isinstance(modality, TextInputs) and modality.end_id is None:
            return replace(modality, end_id=self.closing)
        return modality

    def adapt(self, graph: ir.Model, longest: int | None) -> dict[str, ir.Model]:
        """Convert the graph, and let it close the texts which have as many tokens as the limit, where texts are cut."""
        further = super().adapt(graph, longest)
        closing, limit = self.closing, self.limit(longest)
        if closing is not None and limit is not None:
            _close(graph.graph, closing, limit)
        return further

    def files(self, folder: Path, longest: int | None) -> None:
        """Let the pipelines open the file that is there: in a browser, they would look for one in int8."""
        super().files(folder, longest)
        config = read_object(folder / "config.json")
        stored_settings = config.get(_SETTINGS)
        settings = dict(stored_settings) if isinstance(stored_settings, dict) else {}
        for name in ("dtype", _EXTERNAL):
            settings.pop(name, None)
        if (folder / f"{self.target.graph}{self.target.data_suffix}").is_file():
            settings[_EXTERNAL] = {Path(self.target.graph).name: 1}
        if "int8" not in self.precisions:
            settings["dtype"] = "fp32"
        if stored_settings != settings and (settings or stored_settings is not None):
            write_json(folder / "config.json", {**config, _SETTINGS: settings})

    def reader(self, folder: Path) -> ReadTokens:
        """Return a function that cuts the ids of texts as the consumer does, and closes them as the graph does.

        Pairs are cut otherwise than the tokenizer cuts them, and are left out with a limit; `note` says so.
        """
        read_ids, closing = partial(read_file, folder / TOKENIZER_NAME), self.closing

        def cut(ids: list[int], limit: int) -> list[int]:
            return ids if len(ids) < limit or closing is None else [*ids[: limit - 1], closing]

        def read_cut(texts: Sequence[Text], limit: int | None) -> list[list[int]]:
            if limit is None:
                return read_ids(texts, None)
            return [cut(ids, limit)[:limit] for ids in read_ids(texts, None)] if isinstance(texts[0], str) else []

        return read_cut

    @property
    def note(self) -> str:
        """Name what the pipeline has to be told, and what it does otherwise."""
        if self.usage.kind == DENSE and self.head is not None:
            return "vectors are in the graph: AutoModel gives them as sentence_embedding, and no pipeline does"
        if self.usage.kind == DENSE:
            scaling = ", normalize: true" if self.scales else ""
            return f'pass {{ pooling: "{self.pooling_name}"{scaling} }} to the pipeline feature-extraction'
        return "pairs longer than the model takes are cut at their end alone there" if self.usage.kind == SCORES else ""


def _close(graph: ir.Graph, closing: int, limit: int) -> None:
    """Replace the last of `limit` tokens by the closing one, unless it is padding: input_ids int64 [B, S].

    A text that has as many tokens without being cut ends with this one already.
    """
    inputs = {str(value.name): value for value in graph.inputs}
    ids, mask = inputs[_IDS], inputs[_MASK]
    readers, write = list(ids.uses()), Writer(graph[0])
    number, last, end = (
        write.constant(np.array(value), f"onnxtool.{name}")
        for name, value in (("limit", limit), ("last_place", limit - 1), ("closing_token", closing))
    )
    zero, step, axis = (write.constant(np.array(value), f"onnxtool.{value}") for value in (0, 1, [0]))
    length = write.op("Squeeze", write.sizes(ids, range(1, 2)), axis)
    is_last = write.op("Equal", write.op("Range", zero, length, step), last)
    is_full = write.op("And", is_last, write.op("Equal", length, number))
    attended = write.op("Cast", mask, to=ir.DataType.BOOL.value)
    closed = write.node("Where", [write.op("And", is_full, attended), end, ids], like=ids)
    for node, place in readers:
        node.replace_input_with(place, closed)


SPECIFICATION = TransformersJsSpecification
