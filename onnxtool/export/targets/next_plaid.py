"""next-plaid, whose encoder reads tokenizer.json and its settings from onnx_config.json (next-plaid-onnx/src/lib.rs).

It inserts a marker after the first token of a text, keeps the last token of a text that it cuts, and fills queries up
with tokens that it always lets the model attend to: the graph hides them from a model that was trained without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtool.checkpoint.folder import TOKENIZER_NAME
from onnxtool.checkpoint.late_interaction import QueryExpansion
from onnxtool.checkpoint.limits import Text
from onnxtool.checkpoint.sentence_modules import TOKENS, as_object
from onnxtool.checkpoint.token_modules import MultiVectorMask, read_mask
from onnxtool.checkpoint.tokenizer_library import read_file
from onnxtool.errors import TargetError
from onnxtool.export.modalities.modality import Modality
from onnxtool.export.modalities.text import TextInputs
from onnxtool.export.sidecar_files import read_object, write_changed, write_json
from onnxtool.export.target_specification import Arrays, TargetSpecification
from onnxtool.graph.writer import Writer
from onnxtool.runtime.running import Session
from onnxtool.runtime.tokens import OwnTokenizer

_CONFIG, _ROLES, _IDS, _MASK = "onnx_config.json", ("query", "document"), "input_ids", "attention_mask"
_REPLACED = 103  # it takes this id for that of [MASK] or <mask>


class NextPlaidSpecification(TargetSpecification):
    """A graph that hides the tokens by which queries are expanded, and the settings."""

    def accepts(self) -> None:
        """Refuse late interaction that the settings cannot describe."""
        super().accepts()
        modules, token = self.source.sentence_modules, self.expansion_id
        expansion, mask = QueryExpansion.of(modules, self.source), read_mask(modules)
        differences = {
            "a marker that is not one token between opening and closing token": None in map(self._marker, _ROLES),
            "token types other than 0": any(self.tokenizer("a").get("token_type_ids", ())),
            "a skip list of other texts than documents": mask and mask.skipped and mask.tasks != ("document",),
            "a list of tokens that count": mask and mask.kept_ids,
            "vectors that are not scaled to length 1, as its index scales them": modules.kinds[-1] != "Normalize",
            "expanded queries that are not cut": expansion and modules.stated_length("query") != expansion.length,
            "queries expanded before their text": expansion and self.tokenizer.padding_side == "left",
            "queries expanded by tokens that do not count": expansion and not expansion.attend and mask is None,
            "this mask token": token == _REPLACED != self.tokenizer.convert_tokens_to_ids("[MASK]"),
        }
        if unsupported := [name for name, differs in differences.items() if differs]:
            raise TargetError(
                f"{self.target.title} has no setting for {', '.join(unsupported)}, as {self.source.model_name} has it",
                "pass --target sentence-transformers, whose MultiVectorEncoder follows the checkpoint",
            )

    def _prompt(self, role: str) -> str:
        return str(as_object(self.source.sentence_modules.encoder.get("prompts")).get(role) or "")

    def _marker(self, role: str) -> int | None:
        ids, framing = (list(self.tokenizer(text)[_IDS]) for text in (self._prompt(role), ""))
        return ids[1] if len(ids) == 3 and ids[::2] == framing else None

    @property
    def _hidden(self) -> int | None:
        """The token that the model does not attend to at the end of queries."""
        return self.expansion_id if self.head is not None and self.head.unseen_length else None

    def fed(self, modality: Modality) -> Modality:
        """Return the modality with texts that end with their closing token, by which the graph knows them."""
        modality = super().fed(modality)
        if not isinstance(modality, TextInputs) or "right" not in modality.sides:
            raise TargetError(
                f"{self.target.title} pads on the right, which moves the vectors of this model", "pass --target plain"
            )
        return replace(modality, end_id=self.tokenizer("")[_IDS][-1])

    def convert(self, graph: ir.Model) -> dict[str, ir.Model]:
        """Rename the output, and hide the tokens by which queries are expanded."""
        graph.graph.outputs[0].name = self.usage.outputs[0].name
        if self._hidden is not None:
            _hide(graph.graph, self._hidden)
        return {}

    def run(self, session: Session, feeds: Arrays) -> Arrays:
        """Run the graph with a mask of 1 for the tokens by which queries are expanded."""
        expands = np.logical_and.accumulate((feeds[_IDS] == self._hidden)[:, ::-1], axis=1)[:, ::-1]
        return {TOKENS: session.run({**feeds, _MASK: np.where(expands, 1, feeds[_MASK])})[self.usage.outputs[0].name]}

    def files(self, folder: Path, longest: int | None) -> None:
        """Write the settings, with the lengths to which the consumer cuts texts itself."""
        super().files(folder, longest)
        write_changed(folder / TOKENIZER_NAME, {"truncation": None, "padding": None})
        modules, head = self.source.sentence_modules, self.head
        expansion, mask = QueryExpansion.of(modules, self.source), read_mask(modules) or MultiVectorMask()
        settings: dict[str, Any] = {
            "do_query_expansion": expansion is not None,
            "attend_to_expansion_tokens": expansion is not None and expansion.attend,
            "mask_token_id": _REPLACED if self.expansion_id is None else self.expansion_id,
            "pad_token_id": self.tokenizer.pad_token_id,
            "skiplist_words": list(mask.skipped),
            "embedding_dim": None if head is None else head.width(self.config.hidden_size),
            "uses_token_type_ids": False,
            "do_lower_case": False,  # tokenizer.json does
        }
        for role in _ROLES:
            length = modules.stated_length(role) or self.limit(longest)
            facts = {"prefix": self._prompt(role), "prefix_id": self._marker(role), "length": length}
            settings |= {f"{role}_{key}": value for key, value in facts.items()}
        write_json(folder / _CONFIG, settings)

    def check_tokens(self, tokenizer: OwnTokenizer, folder: Path, texts: Sequence[Text]) -> None:
        """Compare the tokens of queries and documents, cut to their lengths; white space around texts is removed."""
        settings: dict[str, Any] = read_object(folder / _CONFIG)
        for role in _ROLES:
            prompt, marker, length = (settings[f"{role}_{key}"] for key in ("prefix", "prefix_id", "length"))
            stated = self.source.sentence_modules.stated_length(role) or length
            at_limit = (" ".join("a" * (stated + more)) for more in range(-4, 3))
            plain = [*(text.strip() for text in texts if isinstance(text, str)), *at_limit]
            wanted = tokenizer.ids([f"{prompt}{text}" for text in plain], stated)
            for text, ids, expected_ids in zip(
                plain, read_file(folder / TOKENIZER_NAME, plain, None), wanted, strict=True
            ):
                cut = ids if len(ids) < length else [*ids[: length - 2], ids[-1]]
                if (target_ids := [ids[0], marker, *cut[1:]]) != expected_ids:
                    raise TargetError(
                        f"{self.target.title} would read the {role} {text[:80]!r} as the tokens {target_ids}, not "
                        f"{expected_ids}",
                        "pass --target sentence-transformers",
                    )


def _hide(graph: ir.Graph, token: int) -> None:
    """Set the attention mask to 0 for the tokens at the end of a row that are `token`; a text ends with another one."""
    inputs = {str(value.name): value for value in graph.inputs}
    ids, mask = inputs[_IDS], inputs[_MASK]
    readers, write = list(mask.uses()), Writer(graph[0])
    axis, own = (write.constant(np.array(value), f"onnxtool.{name}") for name, value in (("axis", 1), ("token", token)))
    is_other = write.op("Cast", write.op("Not", write.op("Equal", ids, own)), to=ir.DataType.INT64.value)
    seen = write.node("Min", [mask, write.op("CumSum", is_other, axis, reverse=1)], like=mask)
    for node, place in readers:
        node.replace_input_with(place, seen)


SPECIFICATION = NextPlaidSpecification
