"""transformers' Trainer with model and loss compiled as one graph for training steps.

Tested with transformers 5.23 and accelerate 1.15: `_wrap_model`, which wraps a model for training, is a private Trainer
method and may change between releases.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from onnxtool.errors import TrainingError
from onnxtool.options import checked, field_hints
from onnxtool.torch_backend import Explanation, OrtBackend, OrtBackendOptions
from onnxtool.training.trainer.losses import with_all_arguments
from onnxtool.training.trainer.module_with_loss import ModuleWithLoss, StepOptions

_logger = logging.getLogger(__name__)


class OrtTrainer(Trainer):  # type: ignore[misc]  # transformers is not followed here
    """A drop-in replacement for `transformers.Trainer` whose training steps run in onnxruntime.

    It compiles `compute_loss`, the Trainer's own or a subclass's, on the original model. `self.model` stays that model,
    so evaluation, prediction, saving, resuming, callbacks and hub uploads work as in the Trainer. With
    DistributedDataParallel (torchrun), each process compiles one graph, and gradients are averaged as usual. To compile
    another Trainer, put this class first: `class Mine(OrtTrainer, Seq2SeqTrainer)`; this also works for the Trainers of
    sentence-transformers and TRL. Numbers that a schedule changes in such a Trainer's `loss` are inputs of the graph.

    Attributes:
        ort_backend: compiles the training steps.
        eager_loss: the class's `compute_loss`, which gets compiled.
        model_with_loss: the module that runs training steps, with the reports `label_sparsity` and `unpadding`; None
            before `train()`.
    """

    compute_loss: Callable[..., Any]

    # transformers defines the Trainer's arguments, and adds more with each release.
    @checked
    def __init__(
        self,
        *args: Any,
        ort_options: OrtBackendOptions | OrtBackend | None = None,
        **kwargs: Any,
    ) -> None:
        """Create a Trainer from its own arguments and compilation options.

        Args:
            *args: Trainer arguments.
            ort_options: backend options, or a backend.
            **kwargs: arguments of the Trainer, and fields of `StepOptions`.

        Raises:
            TrainingError: the model or the arguments rule out a compilation.
        """
        steps = {name: kwargs.pop(name) for name in field_hints(StepOptions) if name in kwargs}
        self._step_options = StepOptions(**steps)
        super().__init__(*args, **kwargs)
        check_distribution(self)
        self.ort_backend = ort_options if isinstance(ort_options, OrtBackend) else OrtBackend(ort_options)
        self.model_with_loss: ModuleWithLoss | None = None
        self._was_explained = False
        self._numbers: ChangingNumbers | None = None
        self._whole_texts = WholeTexts(self.model)
        # Hides the method, even a subclass's, which is the one that gets compiled.
        self.eager_loss = with_all_arguments(self.compute_loss)
        self.compute_loss = self._compute_loss

    def create_model_with_loss(self) -> ModuleWithLoss:
        """Return a new module that computes this Trainer's loss for `self.model` in onnxruntime."""
        return create_model_with_loss(self, options=self.ort_backend, **vars(self._step_options))

    def explain(self) -> Explanation:
        """Describe all graphs so far: what runs in onnxruntime and what stays in PyTorch."""
        trained = self.model_with_loss
        return self.ort_backend.explain() if trained is None else trained.explain()

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, then create the accelerator."""
        check_request(self.args, self.model)
        super().create_accelerator_and_postprocess()

    @checked
    def training_step(
        self, model: torch.nn.Module, inputs: Mapping[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run forward and backward of one batch; after the first batch, log what ran where.

        Returns:
            The loss, float [].
        """
        encoder = None if self.model_with_loss is None else self.model_with_loss.encoder
        # For the backward pass as well, which runs the model again if the loss caches gradients.
        with self._whole_texts.in_one_turn(), encoder.in_place() if encoder else contextlib.nullcontext():
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        if not self._was_explained:
            self._was_explained = True
            if self.is_world_process_zero() and self.model_with_loss is not None:
                trained = self.model_with_loss
                _logger.info("the training step\n%s\n%s\n%s", self.explain(), trained.label_sparsity, trained.unpadding)
        return loss

    def _compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Compute the loss in onnxruntime for the training module, otherwise as the Trainer does."""
        inside = model.module if isinstance(model, DistributedDataParallel) else model
        if isinstance(inside, ModuleWithLoss):
            if self._numbers is None:
                self._numbers = ChangingNumbers(getattr(self, "loss", None), inside.module)
            with self._numbers.as_tensors():
                return model(dict(inputs), return_outputs, num_items_in_batch)
        return self.eager_loss(model, inputs, return_outputs, num_items_in_batch)

    def _wrap_model(self, model: torch.nn.Module, training: bool = True, dataloader: Any = None) -> torch.nn.Module:
        """Wrap the model in the training module, and that in DistributedDataParallel."""
        if not training:
            return super()._wrap_model(model, training, dataloader)
        # Autocast wraps only the model's forward: a smoothed loss is computed outside it.
        self.accelerator.prepare_model(self.model, evaluation_mode=True)
        self.model._is_accelerate_prepared = True  # noqa: SLF001 - as accelerate itself marks models that it has prepared
        if model is not self.model:
            return model  # a second call of train()
        self.model_with_loss = self.create_model_with_loss()
        self._numbers = None
        self._whole_texts = WholeTexts(self.model)
        return self._distributed(self.model_with_loss) if self.args.world_size > 1 else self.model_with_loss

    def _distributed(self, module: ModuleWithLoss) -> DistributedDataParallel:
        """Wrap the module in the same way and with the same options as accelerate wraps a model."""
        device = self.accelerator.device
        place = {} if device.type == "cpu" else {"device_ids": [device.index], "output_device": device.index}
        handler = self.accelerator.ddp_handler
        wrapped = DistributedDataParallel(module, **place, **handler.to_kwargs())
        handler.register_comm_hook(wrapped)
        return wrapped


@checked
def create_model_with_loss(
    trainer: Trainer,
    *,
    options: OrtBackendOptions | OrtBackend | None = None,
    **steps: Any,
) -> ModuleWithLoss:
    """Return a module that computes a Trainer's loss for its model in onnxruntime.

    Args:
        trainer: any Trainer; its `compute_loss` is compiled, label smoothing included.
        options: backend options, or a backend.
        **steps: fields of `StepOptions`.

    Raises:
        TrainingError: the loss caches gradients itself, and does not do so here.
    """
    chosen = StepOptions(**steps)
    parts = _modules_of(getattr(trainer, "loss", None))
    # The Cached losses of sentence-transformers call the model again in their backward pass.
    caching = next((type(part).__name__ for part in parts if getattr(part, "uses_gradient_cache", False)), None)
    if caching is not None:
        without = "leave mini_batch_size out"
        if chosen.mini_batch_size is None:
            without = "use the loss without Cached in its name, with the mini_batch_size of OrtTrainer"
        if chosen.mini_batch_size is not None or trainer.args.world_size > 1 or not isinstance(trainer, OrtTrainer):
            raise TrainingError(f"{caching} splits batches itself, in one process and inside of an OrtTrainer", without)
    if _counts_calls(trainer):
        chosen = replace(chosen, label_sparsity=False, unpadding=False)
    module = ModuleWithLoss(
        trainer.model,
        compute_loss=trainer.eager_loss if isinstance(trainer, OrtTrainer) else trainer.compute_loss,
        options=options,
        **vars(chosen),
    )
    if caching is not None:
        module.leave_loss_in_pytorch()
    return module


def _modules_of(loss: object) -> list[torch.nn.Module]:
    """Return all modules of a loss, or of losses by name; sentence-transformers' losses contain the model."""
    parts: Iterable[Any] = loss.values() if isinstance(loss, Mapping) else (loss,)
    return [module for part in parts if isinstance(part, torch.nn.Module) for module in part.modules()]


def _counts_calls(trainer: Trainer) -> bool:
    """Return whether the Trainer's `compute_loss` records statistics, which would then include the check's calls.

    TRL's do, and the models they train select the labeled rows themselves.
    """
    return any(base.__module__.startswith("trl.") for base in type(trainer).__mro__)


_TORCHRUN = "start the script with torchrun for DistributedDataParallel, or use transformers' Trainer"


def check_request(args: TrainingArguments, model: torch.nn.Module | None) -> None:
    """Refuse arguments and models meant for another compiler, or for distribution that splits the model.

    Args:
        args: the Trainer's arguments.
        model: the model to train; None if `model_init` will create it.

    Raises:
        TrainingError: one of them is not supported.
    """
    if args.torch_compile:
        raise TrainingError(
            f"torch_compile asks for the compiler {args.torch_compile_backend!r}",
            "leave torch_compile out of the TrainingArguments: OrtTrainer compiles the training step itself",
        )
    if args.deepspeed:
        raise TrainingError("DeepSpeed splits the model, and OrtTrainer compiles it whole", _TORCHRUN)
    if args.fsdp:
        raise TrainingError("FSDP splits the model, and OrtTrainer compiles it whole", _TORCHRUN)
    if isinstance(model, ModuleWithLoss):
        raise TrainingError(
            "the model is a ModuleWithLoss already", "give OrtTrainer the original, model.module: it wraps it itself"
        )
    if hasattr(model, "_orig_mod"):
        raise TrainingError(
            "the model comes from torch.compile",
            "give OrtTrainer the model as it was before, model._orig_mod: it compiles the training step itself",
        )


def check_distribution(trainer: Trainer) -> None:
    """Refuse multi-device training other than DistributedDataParallel, which keeps the whole model on each device.

    Raises:
        TrainingError: the Trainer is set up for another kind.
    """
    plugin = trainer.accelerator.state.dynamo_plugin
    if plugin.backend.value != "NO":
        raise TrainingError(
            f"accelerate is set to compile with {plugin.backend.value}",
            "set the compiler in `accelerate config`, or ACCELERATE_DYNAMO_BACKEND, to no",
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise TrainingError("accelerate is set to split the model, and OrtTrainer compiles it whole", _TORCHRUN)
    if trainer.is_model_parallel or trainer.is_distributed_loading_by_transformers:
        raise TrainingError("the model lies on several devices, and OrtTrainer compiles it whole", _TORCHRUN)
    if trainer.args.n_gpu > 1:
        raise TrainingError(
            f"one process would train on {trainer.args.n_gpu} devices",
            "start the script with torchrun, one process per device, or select one device with CUDA_VISIBLE_DEVICES",
        )


class ChangingNumbers:
    """Passes Python numbers that changed since an earlier step to the compiled step as float32 tensors [].

    TorchDynamo compiles a module's numbers into the graph. The regularizer weights of sentence-transformers'
    SpladeLoss, for example, grow at every step. A number that never changes stays a number, because a loss may branch
    on it.
    """

    def __init__(self, loss: object, model: torch.nn.Module) -> None:
        """Find the modules whose numbers are watched.

        Args:
            loss: a module, or modules by name; anything else has no numbers.
            model: its modules are not watched, because a layer may need its number as a number.
        """
        of_model = set(model.modules())
        self._modules = [module for module in _modules_of(loss) if module not in of_model]
        self._first: dict[tuple[int, str], float] = {}
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Replace the numbers with the tensors, and restore the numbers at the end."""
        changed: list[tuple[dict[str, Any], str, float, torch.Tensor]] = []
        for index, module in enumerate(self._modules):
            attributes = vars(module)
            for name, value in attributes.items():
                key = index, name
                if type(value) is float and (key in self._tensors or self._first.setdefault(key, value) != value):
                    tensor = self._tensors.setdefault(key, torch.empty(()))
                    changed.append((attributes, name, value, tensor.fill_(value)))
        try:
            for attributes, name, _, tensor in changed:
                attributes[name] = tensor
            yield
        finally:
            for attributes, name, value, _ in changed:
                attributes[name] = value


# The loop of `SpladePooling.forward` (sentence-transformers 6.2) runs once unless `chunk_size` is set, but its bounds
# are the text length, so TorchDynamo would compile each length separately.
# Letters: B texts, S positions, V words.
class WholeTexts:
    """Pools all positions at once in each module whose loop would run only once."""

    def __init__(self, model: torch.nn.Module) -> None:
        # The same methods at every step: TorchDynamo would recompile for a new one.
        self._methods = [
            (module, types.MethodType(_forward, module)) for module in model.modules() if _takes_one_turn(module)
        ]

    @contextlib.contextmanager
    def in_one_turn(self) -> Iterator[None]:
        """Replace the modules' own methods inside the block."""
        for module, method in self._methods:
            vars(module)["forward"] = method
        try:
            yield
        finally:
            for module, _ in self._methods:
                del vars(module)["forward"]


def _takes_one_turn(module: torch.nn.Module) -> bool:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    is_pooling = name.startswith("sentence_transformers.sparse_encoder.") and name.endswith(".SpladePooling")
    return is_pooling and "forward" not in vars(module) and not max(getattr(module, "chunk_size", None) or 0, 0)


def _forward(self: Any, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add `sentence_embedding` [B, V], pooled from the logits `token_embeddings` [B, S, V] where the mask is 1."""
    if "cu_seq_lens_q" in features:
        result: dict[str, torch.Tensor] = type(self).forward(self, features)
        return result
    logits = features["token_embeddings"]
    weights = (logits * features["attention_mask"].unsqueeze(-1).to(logits.dtype)).relu().log1p()
    if self.activation_function == "log1p_relu":
        weights = weights.log1p()
    pooled = weights.max(1).values if self.pooling_strategy == "max" else weights.sum(1)
    if self.embedding_dimension is None:
        self.embedding_dimension = pooled.shape[1]
    features["sentence_embedding"] = pooled
    return features
