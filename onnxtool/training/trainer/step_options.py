"""How training steps are compiled and run: the options that ModuleWithLoss and OrtTrainer share."""

from __future__ import annotations

from typing import Annotated

from onnxtool.errors import InputError
from onnxtool.options import Option, Options
from onnxtool.training.trainer.step_choice import PLACEMENTS


class StepOptions(Options, kw_only=True):
    """Keyword arguments of `ModuleWithLoss`, `OrtTrainer` and `create_model_with_loss`.

    Attributes:
        label_sparsity: whether rows whose label is ignored may be pruned before the output head, see `LabelSparsity`.
            To check this, the first batch computes the loss a few extra times.
        unpadding: whether the rows of padding may be left out of the layers of a transformers model, see `Unpadding`.
            To check this, the first batch with padding computes the loss a few extra times.
        dynamic: as in `torch.compile`: True if batch sizes differ from the start.
        overlap_exchange: whether DistributedDataParallel around the module exchanges gradients while others are
            computed. The step is then one graph for each of its buckets (`bucket_cap_mb`, 1 or more), not one.
        mini_batch_size: embeds each batch in mini-batches of this many rows, in the memory of one, for a loss over
            embeddings; the gradients are those of the whole batch. The model alone is compiled, see `GradientCache`.
        placement: `measured` runs the first 16 steps in onnxruntime and in PyTorch in turns, and the others where they
            are faster: losses and random numbers are the same, and `explain()` has the times. This is for models with a
            million parameters or more, on the CPU, in one process. `onnxruntime` runs all steps there.

    Raises:
        InputError: a `mini_batch_size` below 1, or together with `overlap_exchange`.
        OptionError: an option does not accept a value.
    """

    label_sparsity: bool = True
    unpadding: bool = True
    dynamic: bool | None = None
    overlap_exchange: bool = False
    mini_batch_size: int | None = None
    placement: Annotated[str, Option(choices=PLACEMENTS)] = "measured"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mini_batch_size is None:
            return
        if self.mini_batch_size < 1:
            raise InputError(
                f"mini_batch_size is {self.mini_batch_size}", "it is the number of rows of a mini-batch, from 1"
            )
        if self.overlap_exchange:
            raise InputError(
                "overlap_exchange with mini_batch_size", "gradients are complete at the end: leave one out"
            )
