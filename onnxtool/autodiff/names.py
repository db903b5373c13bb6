"""Names of new values and nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

PREFIX = "gradient"


class Names:
    """Gives names that neither values nor nodes of a graph, and of those inside it, have yet."""

    def __init__(self, graph: ir.Graph) -> None:
        import onnx_ir as ir

        nodes = ir.traversal.RecursiveGraphIterator(graph)
        self._taken = {*ir.convenience.create_value_mapping(graph, include_subgraphs=True), *(n.name for n in nodes)}
        self._count = 0

    def new(self, kind: str) -> str:
        """Return another one for a value or node of this kind."""
        while (name := f"{PREFIX}/{kind}_{self._count}") in self._taken:
            self._count += 1
        self._count += 1
        return name
