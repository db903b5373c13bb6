"""The function between a classifier's logits and its scores, as the checkpoint's own library chooses it."""

from __future__ import annotations

from collections.abc import Iterator

from onnxtool.checkpoint.folder import ModuleFiles
from onnxtool.checkpoint.module_forms import activation_name
from onnxtool.checkpoint.sentence_modules import as_object
from onnxtool.reports import Json

_CLASS = "CrossEncoder"
_SOFTMAX = ("torch.nn.Softmax", "torch.nn.modules.activation.Softmax")  # over the last axis, the labels


def score_function(files: ModuleFiles, *, is_single: bool, ranks: bool = False) -> str:
    """Return the function's class in torch.nn, such as `Sigmoid`; with its package if onnxtool does not compute it.

    CrossEncoder of sentence-transformers decides for the checkpoints that it saved: their activation, by default a
    sigmoid for one label and the logits for several. Otherwise, transformers' pipeline decides by `problem_type`.

    Args:
        files: the checkpoint.
        is_single: whether the model has one label.
        ranks: whether it is used as a reranker, which only CrossEncoder does.
    """
    stated = stated_activation(files)
    if stated is not None:
        return "Softmax" if stated in _SOFTMAX else activation_name(stated) or stated
    problem = files.read_object("config.json").get("problem_type")
    if ranks or any(True for _ in _stated(files)):
        return "Sigmoid" if is_single else "Identity"
    if problem == "regression":
        return "Identity"
    return "Sigmoid" if is_single or problem == "multi_label_classification" else "Softmax"


def stated_activation(files: ModuleFiles) -> str | None:
    """Return the class that a CrossEncoder applies to logits, e.g. `torch.nn.modules.linear.Identity`; None for none.

    Without trust_remote_code, sentence-transformers uses its default instead of activations from outside torch.
    """
    return next((path for path in _stated(files) if isinstance(path, str) and path.startswith("torch.")), None)


def _stated(files: ModuleFiles) -> Iterator[Json]:
    """Yield the activations that CrossEncoder reads, in its order; nothing for a checkpoint that it did not save."""
    modules, config = files.sentence_modules, files.read_object("config.json")
    if modules.modules and modules.encoder_class == _CLASS:
        yield modules.encoder.get("activation_fn")
    own = as_object(config.get("sentence_transformers"))
    legacy = config.get("sbert_ce_default_activation_function")  # before version 4
    if own or legacy is not None:
        yield own.get("activation_fn", legacy)
