"""Oracle AI Database, whose onnxruntime runs one graph from a text to a vector (DBMS_VECTOR.LOAD_ONNX_MODEL).

From its documentation: onnxruntime 1.15.1; one file of at most 2 GB, beyond which there is a format of its own; input
and output with at most one axis of any size (ORA-54426), and vectors with one of a fixed size (ORA-54423).
"""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir

from onnxtool.errors import TargetError
from onnxtool.export.sidecar_files import write_json
from onnxtool.export.target_specification import Arrays, TargetSpecification
from onnxtool.graph.text_input import NAMES
from onnxtool.model_file import ModelFile
from onnxtool.reports import Json
from onnxtool.runtime.running import Session


class OracleSpecification(TargetSpecification):
    """A graph that reads texts, and how the database finds its input and output."""

    @property
    def metadata(self) -> dict[str, Json]:
        """The metadata for LOAD_ONNX_MODEL."""
        return {"function": "embedding", "embeddingOutput": self.usage.outputs[0].name, "input": {NAMES[0]: ["DATA"]}}

    @property
    def note(self) -> str:
        """Instructions to load the graph."""
        return f"{super().note} metadata => JSON('{json.dumps(self.metadata)}'))"

    def convert(self, graph: ir.Model) -> dict[str, ir.Model]:
        """Rename the output."""
        graph.graph.outputs[0].name = self.usage.outputs[0].name
        return {}

    def run(self, session: Session, feeds: Arrays) -> Arrays:
        """Run the graph, and name the vectors as the head does."""
        return {"sentence_embedding": session.run(feeds)[self.usage.outputs[0].name]}

    def pack(self, folder: Path, graph: Path) -> None:
        """Write the metadata, and refuse a graph whose weights are not all in its file."""
        if ModelFile.open(graph).external_locations:
            raise TargetError(
                f"{self.target.title} loads one file of at most 2 GB, and {self.source.model_name} needs a second one",
                "pass --dtype float16, which halves the weights, or take a smaller checkpoint",
            )
        write_json(folder / "metadata.json", self.metadata)


SPECIFICATION = OracleSpecification
