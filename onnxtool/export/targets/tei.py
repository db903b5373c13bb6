"""text-embeddings-inference, whose router runs graphs with onnxruntime (backends/ort/src/lib.rs).

It reads the model's size from config.json, and legacy flags from 1_Pooling/config.json.
"""

from __future__ import annotations

from pathlib import Path

from onnxtool.checkpoint.module_forms import POOLING_MODES
from onnxtool.checkpoint.sentence_modules import TRANSFORMER_NAMES, positive
from onnxtool.errors import TargetError
from onnxtool.export.sidecar_files import read_object, write_changed, write_json
from onnxtool.export.target_specification import TargetSpecification
from onnxtool.export.targets import DENSE

# Settings that it reads from config.json, and the names it knows for each.
_CONFIG_KEYS = {
    "architectures": ("architectures",),
    "model_type": ("model_type",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
}


class TeiSpecification(TargetSpecification):
    """Files with settings under the names that it knows."""

    def files(self, folder: Path, longest: int | None) -> None:
        """Add settings that it reads under names the checkpoint does not use."""
        super().files(folder, longest)
        content = read_object(folder / "config.json")
        missing = [key for key, names in _CONFIG_KEYS.items() if not any(name in content for name in names)]
        changes = {key: getattr(self.config, key, None) for key in missing}
        if unknown := [key for key, value in changes.items() if value is None]:
            raise TargetError(
                f"text-embeddings-inference needs {', '.join(unknown)} in config.json, which this model does not have",
                "serve it from Python, or pass --target plain",
            )
        write_changed(folder / "config.json", changes)
        for path in (folder / name for name in TRANSFORMER_NAMES if (folder / name).is_file()):
            # sentence-transformers 6 leaves the longest text to the tokenizer; the router demands it here.
            if positive(read_object(path).get("max_seq_length")) is None:
                write_changed(path, {"max_seq_length": longest or self.config.max_position_embeddings})
        if self.pooling:
            _write_flags(folder / "1_Pooling" / "config.json", self.pooling)

    @property
    def note(self) -> str:
        """Name the router option to use if the files do not say how to pool."""
        if self.usage.kind != DENSE or self.pooling:
            return ""
        in_graph = self.head is not None
        reason = "it asks for one, but the graph has already pooled" if in_graph else "the checkpoint names no pooling"
        return f"start text-embeddings-router with --pooling mean: {reason}"


def _write_flags(path: Path, mode: str) -> None:
    """Write the legacy flags for a pooling mode, which are all that text-embeddings-inference reads."""
    content = read_object(path) if path.is_file() else {}
    flags = {row.flag: name == mode for name, row in POOLING_MODES.items()}
    if any(content.get(flag) is not value for flag, value in flags.items()):
        path.parent.mkdir(exist_ok=True)
        write_json(path, {**content, **flags})


SPECIFICATION = TeiSpecification
