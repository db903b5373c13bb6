"""A model together with its loss, compiled as one: forward, loss and backward run in onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from onnxtool.errors import InputError
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.torch_backend.report import Explanation
from onnxtool.training.trainer.label_pruning import LabelSparsity, SparsityReport
from onnxtool.training.trainer.losses import Batch, ComputeLoss, Loss, ModelLoss, settle_loss_function
from onnxtool.training.trainer.whole_graphs import whole_graphs


class ModuleWithLoss(torch.nn.Module):  # type: ignore[misc]  # PyTorch has no types here
    """A model that returns its loss, which is computed in the same graph as its forward pass.

        model = ModuleWithLoss(original_model)
        optimizer = torch.optim.Adam(model.parameters())
        for batch in dataloader:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()

    It shares the original's parameters, which keep their identity: `parameters()`, `to()`, `train()` and `eval()` act
    on the original, and an optimizer may be made from either. In `named_parameters()` and `state_dict()` each name has
    the prefix `module.`, as with PyTorch's DistributedDataParallel. Save, evaluate and generate with `.module`, whose
    names are the original's; the files then load anywhere.

    Graphs are compiled at the first call, anew where the model changes between training and evaluation, and anew in a
    copy: neither `copy.deepcopy` nor pickle takes them along.

    Attributes:
        module: the original model.
        backend: what compiles it, which counts and explains.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        compute_loss: ComputeLoss | None = None,
        label_smoothing: float = 0.0,
        label_sparsity: bool = True,
        options: OrtBackendOptions | OrtBackend | None = None,
        dynamic: bool | None = None,
    ) -> None:
        """Wrap `model`, whose output head gets a hook that does nothing where it is called without this module.

        Args:
            model: a model of transformers that computes a loss of its `labels`; any module with a `compute_loss`.
            compute_loss: computes the loss, for instance `CriterionLoss(torch.nn.CrossEntropyLoss())`, or the method of
                a Trainer; the model's own loss where none is given.
            label_smoothing: that of transformers' `LabelSmoother`; not with a `compute_loss`, which does its own.
            label_sparsity: whether rows whose label is ignored may be dropped before the output head, see
                `LabelSparsity`. To find out, the first batch calls the loss a few times more.
            options: of the backend, or a backend.
            dynamic: as in `torch.compile`.

        Raises:
            InputError: label smoothing with a loss of one's own, or not from 0 to 1.
        """
        super().__init__()
        if not 0.0 <= label_smoothing <= 1.0:
            raise InputError(f"label_smoothing is {label_smoothing:g}", "it is a part of the loss, from 0 to 1")
        if compute_loss is not None and label_smoothing:
            raise InputError("label_smoothing with a compute_loss", "smooth inside compute_loss, or leave one out")
        settle_loss_function(model)
        self.module = model
        self.compute_loss = compute_loss or ModelLoss(model, label_smoothing)
        self.backend = options if isinstance(options, OrtBackend) else OrtBackend(options)
        self._dynamic = dynamic
        self._sparsity = LabelSparsity(model, allowed=label_sparsity)
        self._selection = self._sparsity.selection

    @property
    def config(self) -> Any:
        """The configuration of the original model."""
        return self.module.config

    @property
    def label_sparsity(self) -> SparsityReport:
        """How many rows went through the output head so far, and why all of them did where they did."""
        return self._sparsity.report()

    def explain(self) -> Explanation:
        """Say what became of all graphs so far."""
        return self.backend.explain()

    def forward(self, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None) -> Loss:
        """Return the loss of the model for `inputs`, float [], and the model's outputs where they are asked for.

        Args:
            inputs: what the model is called with by name, `labels` among it; `(inputs, targets)` for a criterion.
            return_outputs: whether to return `(loss, outputs)`. All rows then go through the output head.
            num_items_in_batch: the number of labels that count in all batches of one step of the optimizer, where the
                loss is to be a sum divided by it.
        """
        if isinstance(inputs, Mapping):
            inputs = dict(inputs)  # transformers' BatchEncoding and its kin
        if num_items_in_batch is not None:
            num_items_in_batch = torch.as_tensor(num_items_in_batch)  # a number would be part of the graph
        if "_compiled" not in self.__dict__:
            self.__dict__["_compiled"] = torch.compile(self._loss, backend=self.backend, dynamic=self._dynamic)
        inputs, rows = self._sparsity.reduced(self.compute_loss, inputs, return_outputs, num_items_in_batch)
        # Labels of fewer rows go by another name: TorchDynamo would take their sizes for those of all labels.
        labels = None if rows is None else inputs.pop("labels")
        with whole_graphs():
            return self._compiled(inputs, return_outputs, num_items_in_batch, rows, labels)

    def _loss(
        self,
        inputs: Batch,
        return_outputs: bool,
        num_items: torch.Tensor | None,
        rows: torch.Tensor | None,
        labels: torch.Tensor | None,
    ) -> Loss:
        if labels is not None:
            inputs = {**inputs, "labels": labels}
        self._selection.rows = rows
        try:
            return self.compute_loss(self.module, inputs, return_outputs, num_items)
        finally:
            self._selection.rows = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: what was compiled goes on calling this module, and sessions have no copies."""
        state = {name: value for name, value in self.__dict__.items() if name != "_compiled"}
        return {**state, "backend": OrtBackend(self.backend.options)}
