"""A tiny model counts as runnable where PyTorch runs it, and, for tasks with a cache, where its cache works."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from zoo.checkpoint import NotRunnableError, make_checkpoint
from zoo.running import load_model, run_model, run_once, text_feeds
from zoo.shrinking import shrink
from zoo.tasks import find_task

WITH_CACHE = find_task("text-generation-with-past")


def test_a_type_that_generates_without_a_cache_is_not_runnable_with_one(tmp_path: Path) -> None:
    """GPT computes all tokens anew at each step, though `generate` hands it an empty container for them."""
    with pytest.raises(NotRunnableError, match="it generates without a cache"):
        make_checkpoint(WITH_CACHE, "openai-gpt", tmp_path / "with")
    assert make_checkpoint(find_task("text-generation"), "openai-gpt", tmp_path / "without").parameters > 0


@pytest.mark.parametrize("model_type", ["mamba", "gpt2"])
def test_states_and_keys_and_values_are_caches(model_type: str, tmp_path: Path) -> None:
    """Whatever the argument is called that holds them."""
    assert make_checkpoint(WITH_CACHE, model_type, tmp_path / model_type).task == WITH_CACHE.name


def test_a_cache_that_changes_the_answer_is_not_runnable(tmp_path: Path) -> None:
    """RWKV's step mixes the rows of a batch: nobody could say whether an export of it is right."""
    with pytest.raises(NotRunnableError, match="PyTorch answers otherwise without it"):
        make_checkpoint(WITH_CACHE, "rwkv", tmp_path / "rwkv")


def test_a_window_of_the_cache_alone_is_as_long_as_the_texts() -> None:
    """Moshi's mask knows of none, so that a shorter one would make its answer depend on how a prompt was cut."""
    from transformers import CONFIG_MAPPING

    config = shrink(CONFIG_MAPPING["moshi"]())
    assert config.sliding_window == config.max_position_embeddings


def test_models_without_a_cache_are_judged_without_one(tmp_path: Path) -> None:
    """FSMT lets words see those behind them where an empty cache comes along, which no text is written with."""
    facts = make_checkpoint(find_task("text2text-generation"), "fsmt", tmp_path / "fsmt")
    model = load_model(facts, tmp_path / "fsmt")
    feeds = text_feeds(model, (9, 9), 9, decodes=True)
    others = {**feeds, "decoder_input_ids": feeds["decoder_input_ids"].copy()}
    others["decoder_input_ids"][:, -1] += 1
    logits, changed = (run_model(model, given)["logits"] for given in (feeds, others))
    np.testing.assert_array_equal(logits[:, :-1], changed[:, :-1])
    assert np.abs(logits[:, -1] - changed[:, -1]).max() > 0.1


def test_a_model_that_draws_anew_in_every_run_is_not_runnable(tmp_path: Path) -> None:
    """Reformer hashes texts that are longer than a chunk by random rotations; nobody could say which are right."""
    facts = make_checkpoint(find_task("fill-mask"), "reformer", tmp_path / "seeded")
    config = tmp_path / "seeded" / "config.json"
    config.write_text(config.read_text("utf-8").replace('"hash_seed": 0', '"hash_seed": null'), "utf-8")
    with pytest.raises(ValueError, match="differs between two runs"):
        run_once(facts, tmp_path / "seeded")
