"""A release depends on contents: those of the checkpoint, of what its adapter is for, and of no hidden file."""

from __future__ import annotations

import json
from pathlib import Path

from onnxtool.release.config import read_config
from onnxtool.release.run import checked_inputs


def test_names_and_contents_of_the_checkpoint_count(tmp_path: Path) -> None:
    """Hidden files belong to git or the hub."""
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / ".cache").mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    (tmp_path / "release.toml").write_text('checkpoint = "checkpoint"\n')

    def digest() -> str:
        return checked_inputs(read_config(tmp_path / "release.toml"))["checkpoint"]

    before = digest()
    (checkpoint / ".cache" / "a").write_text("1")
    assert digest() == before
    (checkpoint / "a.txt").write_text("1")
    assert (first := digest()) != before
    (checkpoint / "a.txt").rename(checkpoint / "b.txt")
    assert digest() not in (before, first)


def test_the_model_that_an_adapter_is_for_counts(tmp_path: Path) -> None:
    """Its folder lies elsewhere."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    (base / "config.json").write_text('{"model_type": "bert"}')
    (base / "model.safetensors").write_bytes(b"1")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (tmp_path / "release.toml").write_text('checkpoint = "adapter"\n')
    before = checked_inputs(read_config(tmp_path / "release.toml"))
    (base / "model.safetensors").write_bytes(b"2")
    after = checked_inputs(read_config(tmp_path / "release.toml"))
    assert [name for name in before if before[name] != after[name]] == ["checkpoint"]
