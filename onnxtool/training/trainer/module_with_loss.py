"""A model compiled together with its loss: forward, loss and backward run in onnxruntime."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchRuntimeError

from onnxtool.errors import InputError, TrainingError
from onnxtool.options import Option, Options, checked
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.torch_backend.report import Explanation
from onnxtool.training.trainer.fewer_rows import RowReport
from onnxtool.training.trainer.gradient_cache import GradientCache
from onnxtool.training.trainer.label_pruning import LabelSparsity
from onnxtool.training.trainer.losses import (
    Batch,
    ComputeLoss,
    Loss,
    ModelLoss,
    settle_loss_function,
    settle_problem_type,
    with_all_arguments,
)
from onnxtool.training.trainer.packed_documents import PackedDocuments
from onnxtool.training.trainer.step_choice import PLACEMENTS, StepChoice
from onnxtool.training.trainer.unpadded_layers import RowLayout, enter, leave
from onnxtool.training.trainer.unpadding import Unpadding

if TYPE_CHECKING:
    from transformers import TrainingArguments
else:  # not imported just for a type
    TrainingArguments = Any

_LOGGER = logging.getLogger(__name__)
_MOST_GRAPHS = 64
"""Graphs per module: training or not, gradients or not, with outputs, with a number of items, with pruned rows, each
once with fixed sizes and once with dynamic ones."""
_EVERY_MODULE = 1 << 30
"""Graphs that all modules of a process may have. Some hyperparameter searches train hundreds of models."""


@contextlib.contextmanager
def _compiled_whole(overlap_exchange: bool) -> Iterator[None]:
    """Set up TorchDynamo to compile one of our many modules.

    Under DistributedDataParallel, model and loss are one graph whose gradients are exchanged after it, or with
    `overlap_exchange` one graph per gradient bucket, which is exchanged while the next one runs. The silenced
    warnings are about `lru_cache` calls in transformers, which uses them to check what is installed, and about what
    TorchDynamo itself does with an `autograd.Function`. TorchDynamo's graph limits
    count every module of the process because they all have the same code; beyond a limit it would fall back to eager
    PyTorch.
    """
    graphs = "ddp_optimizer" if overlap_exchange else False
    limits = {
        "recompile_limit": max(_MOST_GRAPHS, dynamo_config.recompile_limit),
        "accumulated_recompile_limit": _EVERY_MODULE,
    }
    with warnings.catch_warnings(), dynamo_config.patch(optimize_ddp=graphs, **limits):
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`-wrapped function")
        warnings.filterwarnings("ignore", message=".*autograd.function.Function.* should not be instantiated")
        yield


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


class _Step(NamedTuple):
    """The arguments of a compiled step: a batch, and what the features have changed about it.

    Attributes:
        inputs: the batch, without `labels` if `labels` holds them.
        return_outputs: whether the model's outputs are asked for.
        num_items: the number of labels not ignored in all batches of one optimizer step.
        rows: int64 [N], the rows that go through the output head; None for all.
        labels: those of `rows`, which are another argument than all labels: TorchDynamo would take their sizes for
            those.
        layouts: the layouts of batches whose layers compute no rows of padding; none for all rows.
        with_head: whether the output head leaves these rows out as well.
    """

    inputs: Batch
    return_outputs: bool
    num_items: torch.Tensor | None
    rows: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    layouts: tuple[RowLayout, ...] = ()
    with_head: bool = False


class ModuleWithLoss(torch.nn.Module):  # type: ignore[misc]  # PyTorch is untyped here
    """A model that returns its loss, computed in the same graph as its forward pass.

    For example::

        model = ModuleWithLoss(original_model)
        optimizer = torch.optim.Adam(model.parameters())
        for batch in dataloader:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()

    It shares the original's parameters, which keep their identity: `parameters()`, `to()`, `train()` and `eval()` act
    on the original, and an optimizer may be created from either. In `named_parameters()` and `state_dict()` each name
    has the prefix `module.`, as with PyTorch's DistributedDataParallel. Save, evaluate and generate with `.module`,
    which has the original names; the files then load anywhere.

    Graphs are compiled at the first call, again when the model switches between training and evaluation, and again in a
    copy: neither `copy.deepcopy` nor pickle copies them.

    Attributes:
        module: the original model.
        backend: compiles it, counts runs and explains graphs.
        encoder: runs the model where it alone is compiled and the loss stays in PyTorch, which is the case with a
            `mini_batch_size` and for a loss that caches gradients itself; None otherwise.
    """

    @checked
    def __init__(
        self,
        model: torch.nn.Module,
        args: TrainingArguments | None = None,
        label_smoother: Callable[..., torch.Tensor] | None = None,
        *,
        compute_loss: ComputeLoss | Callable[..., torch.Tensor] | None = None,
        label_smoothing: float = 0.0,
        options: OrtBackendOptions | OrtBackend | None = None,
        **steps: Any,
    ) -> None:
        """Wrap `model`; its output head gets a hook that is active only when this module calls the model.

        Args:
            model: a transformers model that computes a loss from its `labels`; any module with a `compute_loss`.
            args: the arguments of a Trainer, kept but not used.
            label_smoother: transformers' `LabelSmoother`, instead of `label_smoothing`.
            compute_loss: computes the loss, for instance `CriterionLoss(torch.nn.CrossEntropyLoss())`, a Trainer
                method, or a function of model, inputs and targets; by default, the model's own loss.
            label_smoothing: as in transformers' `LabelSmoother`; not with a `compute_loss`, which does its own.
            options: backend options, or a backend.
            **steps: fields of `StepOptions`.

        Raises:
            InputError: label smoothing together with a `compute_loss`, asked for twice, not from 0 to 1, or by `args`
                alone; options of the steps that exclude each other.
            TrainingError: mini-batches of the model do not give the results of the whole batch.
        """
        super().__init__()
        self._options = StepOptions(**steps)
        if compute_loss is not None and (label_smoothing or label_smoother is not None):
            raise InputError("label_smoothing with a compute_loss", "smooth inside compute_loss, or leave one out")
        smoothing = getattr(args, "label_smoothing_factor", 0.0)
        if smoothing and not label_smoothing and label_smoother is None and compute_loss is None:
            raise InputError(
                f"args has the label_smoothing_factor {smoothing:g}, and label_smoother is None",
                f"pass trainer.label_smoother, or label_smoothing={smoothing:g}",
            )
        settle_loss_function(model)
        self.module = model
        self.args = args
        self.label_smoother = label_smoother
        self.compute_loss: ComputeLoss = (
            with_all_arguments(compute_loss) if compute_loss else ModelLoss(model, label_smoothing, label_smoother)
        )
        self.backend = options if isinstance(options, OrtBackend) else OrtBackend(options)
        size = self._options.mini_batch_size
        self.encoder = None if size is None else GradientCache(model, self._run, size)
        self._sparsity = LabelSparsity(model, allowed=self._options.label_sparsity and self.encoder is None)
        self._selection = self._sparsity.selection
        self._unpadding = Unpadding(model, allowed=self._options.unpadding and self.encoder is None)
        self._packing = PackedDocuments(model)
        self._choice = self._new_choice()

    def _new_choice(self) -> StepChoice:
        """Return what decides where steps run; in onnxruntime, if PyTorch's steps are not the same or not wanted."""
        options = self.backend.options
        are_equal = self.encoder is None and options.dropout == "eager" and not options.assert_close_to_baseline
        return StepChoice.of(self._options.placement if are_equal else "onnxruntime", self.module)

    def leave_loss_in_pytorch(self) -> None:
        """Compile the model alone, for a loss that calls the model again during its backward pass."""
        self.encoder = GradientCache(self.module, self._run, None)
        self._choice = self._new_choice()

    @property
    def _original_model(self) -> torch.nn.Module:
        """The original model, under the name that Optimum's wrapper uses."""
        return self.module

    @property
    def compute_model_plus_loss_internal(self) -> Callable[..., Loss]:
        """The function that computes the loss, under the name that Optimum's wrapper uses.

        Set it before the first call. `types.MethodType(Trainer.compute_loss, module)` stands for what that method
        computes for the model, with this module's `label_smoother`.

        Raises:
            InputError: it is set after the first call.
        """
        return self.compute_loss

    @compute_model_plus_loss_internal.setter
    def compute_model_plus_loss_internal(self, compute_loss: Callable[..., Loss]) -> None:
        if "_compiled" in self.__dict__:
            raise InputError(
                "the loss is compiled already", "set it before the first call, or make a new ModuleWithLoss"
            )
        if getattr(compute_loss, "__self__", None) is self:
            from transformers import Trainer

            if getattr(compute_loss, "__func__", None) is Trainer.compute_loss:
                return  # ModelLoss does the same; the method would need other Trainer attributes on this module
        self.compute_loss = with_all_arguments(compute_loss)

    @property
    def config(self) -> Any:
        """The configuration of the original model."""
        return self.module.config

    @property
    def label_sparsity(self) -> RowReport:
        """The number of rows that went through the output head so far, and why batches were not pruned."""
        return self._sparsity.report

    @property
    def unpadding(self) -> RowReport:
        """The number of rows that the layers computed so far, and why batches kept their padding."""
        return self._unpadding.report

    def explain(self) -> Explanation:
        """Describe all graphs so far: what runs in onnxruntime and what stays in PyTorch."""
        return replace(self.backend.explain(), steps=self._choice.times)

    @checked
    def forward(self, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None) -> Loss:
        """Return the model's loss for `inputs`, float [], and its outputs on request.

        Args:
            inputs: the model's arguments by name, with `labels`; `(inputs, targets)` for a criterion; a bare tensor
                to get the model's outputs and compute their loss outside this module.
            return_outputs: whether to return `(loss, outputs)`. All rows then go through the output head.
            num_items_in_batch: the number of labels not ignored in all batches of one optimizer step, if the loss is
                to be a sum divided by it.

        Raises:
            TrainingError: documents packed into one sequence attend to each other.
        """
        if isinstance(inputs, Mapping):
            inputs = dict(inputs)  # transformers' BatchEncoding and similar mappings
        self._packing.require_separate(inputs)
        if num_items_in_batch is not None:
            num_items_in_batch = torch.as_tensor(num_items_in_batch)  # a number would become a graph constant
        if "_compiled" not in self.__dict__:
            settle_problem_type(self.module, self.compute_loss, inputs)
            self.__dict__["_compiled"] = torch.compile(
                self._plain,
                backend=self.backend,
                dynamic=self._options.dynamic,
                isolate_recompiles=True,  # graphs are counted per module, see `_compiled_whole`
            )
        if self.encoder is not None:
            return self._in_onnxruntime(
                self._loss_of_embeddings, self.encoder, inputs, return_outputs, num_items_in_batch
            )
        step = self._prepared(_Step(inputs, return_outputs, num_items_in_batch))
        timed = self._choice.begin((step.inputs, step.labels), len(self.backend.graphs)) if self.training else None
        if self.training and not self._choice.in_onnxruntime:
            result = self._loss(step)
        else:
            result = self._in_onnxruntime(self._run, step)
        self._unpadding.count_batch()
        if timed is not None:
            loss = result[0] if return_outputs else result
            if isinstance(loss, torch.Tensor) and loss.requires_grad:  # outputs for a loss outside are not timed
                self._choice.forward_ended(timed, loss, lambda: len(self.backend.graphs))
        return result

    def _prepared(self, step: _Step) -> _Step:
        """Leave out the rows that neither loss nor gradients depend on."""
        flags = step.return_outputs, step.num_items
        inputs, rows = self._sparsity.prune(self.compute_loss, step.inputs, *flags)
        layouts, with_head = self._unpadding.layouts(self.compute_loss, step.inputs, *flags, rows is not None)
        labels = None if rows is None else inputs.pop("labels")
        return step._replace(inputs=inputs, rows=rows, labels=labels, layouts=layouts, with_head=with_head)

    def _in_onnxruntime(self, run: Callable[..., Loss], *arguments: Any) -> Loss:
        """Run a step, and warn if no session of onnxruntime ran in it."""
        num_runs = self.backend.execution_count
        result = run(*arguments)
        if self.backend.execution_count == num_runs:
            _LOGGER.warning(
                "no session of onnxruntime ran in this step, PyTorch computed all of it: %s", self._why_eager()
            )
        return result

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with _compiled_whole(self._options.overlap_exchange):
            try:
                return self._compiled(*args, **kwargs)
            except TorchRuntimeError:  # the model cannot take these inputs: let PyTorch say why
                self._plain(*args, **kwargs)
                raise

    @property
    def _plain(self) -> Callable[..., Any]:
        """The model as it is compiled: the loss, or the encoder's forward pass."""
        return self._loss if self.encoder is None else self.encoder.model_forward

    def _loss_of_embeddings(
        self, encoder: GradientCache, inputs: Batch, return_outputs: bool, num_items: torch.Tensor | None
    ) -> Loss:
        num_calls = encoder.num_calls
        with encoder.in_place():
            loss = self.compute_loss(self.module, inputs, return_outputs, num_items)
        if encoder.num_calls == num_calls:
            raise TrainingError(
                f"the loss did not call the {type(self.module).__name__}, whose calls mini_batch_size splits",
                "call the model itself and not its parts in the loss, or leave mini_batch_size out",
            )
        return loss

    def _why_eager(self) -> str:
        if not self.backend.graphs:
            return "TorchDynamo captured no graph; TORCH_LOGS=graph_breaks,recompiles says why"
        if failures := {session.failure for graph in self.backend.graphs for session in graph.sessions} - {""}:
            return "; ".join(sorted(failures))
        return "explain() lists the operators that stay there, and TORCH_LOGS=graph_breaks,recompiles the graphs"

    def _loss(self, step: _Step) -> Loss:
        inputs = step.inputs if step.labels is None else {**step.inputs, "labels": step.labels}
        self._selection.rows = step.rows
        enter(self._unpadding.regions, step.layouts, step.with_head)
        try:
            return self.compute_loss(self.module, inputs, step.return_outputs, step.num_items)
        finally:
            self._selection.rows = None
            leave(self._unpadding.regions)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: without compiled code, which calls this module, and with its own backend."""
        state = {name: value for name, value in self.__dict__.items() if name != "_compiled"}
        return {**state, "backend": OrtBackend(self.backend.options), "_choice": self._new_choice()}
