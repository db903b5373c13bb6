"""What is known of a tiny checkpoint, in a file of its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FACTS_FILE = "zoo.json"


@dataclass(frozen=True)
class Facts:
    """What is known of a checkpoint that was made.

    Attributes:
        architecture: its class in transformers.
        effort: how much of the default configuration was cut, see EFFORTS.
    """

    task: str
    model_type: str
    architecture: str
    effort: str
    parameters: int

    @classmethod
    def read(cls, folder: Path) -> Facts:
        """Read the facts of the checkpoint in `folder`."""
        return cls(**json.loads((folder / FACTS_FILE).read_text(encoding="utf-8")))
