"""The options of the backend: what PyTorch's own `onnxrt` backend offered before 2.13, and what came since."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtool.errors import CompilationError

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir
    import onnxruntime as ort
    import torch

Provider = str | tuple[str, Mapping[str, object]]
"""A provider by its name, or by its name and its own options."""

Transform = Callable[["onnx.ModelProto"], None]
"""Changes a model in place."""

Converter = Callable[["torch.fx.GraphModule"], "ir.Model | onnx.ModelProto"]
"""Translates a graph of ATen operators, whose placeholders have their fake value as `meta["val"]`.

Inputs and outputs of the model are those of the graph in their order; `SymInt` inputs are INT64 scalars.
"""


@dataclass(frozen=True)
class OrtBackendOptions:
    """How graphs are cut, translated and run. Instances that are equal share one backend.

    Attributes:
        preferred_execution_providers: come first, in their order.
        infer_execution_providers: whether the devices of a graph's inputs, else of its outputs, add a provider.
        default_execution_providers: come last; the CPU where none are given.
        preallocate_output: whether PyTorch allocates the outputs of static graphs, and onnxruntime writes into them.
        use_aot_autograd: whether the backend gets what TorchDynamo captured, and runs AOTAutograd on it. Without it,
            it takes graphs of ATen operators and is itself the compiler to give to AOTAutograd.
        ort_session_options: copied into every session; else each has as many threads as PyTorch, which wait busily
            during a call and never between two.
        pre_ort_model_transforms: functions that change each model in place before its session is made, or names of
            ready-made ones (onnxtool/torch_backend/lower/transforms.py).
        partition_fn: cuts a joint graph into forward and backward; the minimum cut where none is given.
        assert_close_to_baseline: whether each call is compared with PyTorch's own answer, at twice the cost.
        rtol: relative tolerance of that comparison.
        atol: absolute tolerance of that comparison.
        converter: what translates a graph: a function, or a name of onnxtool/torch_backend/lower/converters.py. The
            environment variable ONNXRT_CHANGE_REWRITER=1 takes the second name there in place of the first.
        optimize: whether constants are folded and functions inlined before the session is made.
        flush_denormals: whether numbers below 1.2e-38 (float32) count as zero inside of sessions. With session options
            of the user, that is so in the calling thread alone, unless they ask for it.
        cache_folder: where translated graphs are kept for the next process; nowhere where none is given.

    Raises:
        CompilationError: what should be a list is none, or the cache's folder is empty.
    """

    preferred_execution_providers: Sequence[Provider] = ()
    infer_execution_providers: bool = True
    default_execution_providers: Sequence[Provider] = ("CPUExecutionProvider",)
    preallocate_output: bool = False
    use_aot_autograd: bool = True
    ort_session_options: ort.SessionOptions | None = None
    pre_ort_model_transforms: Sequence[Transform | str] = ()
    partition_fn: Callable[..., Any] | None = None
    assert_close_to_baseline: bool = False
    rtol: float = 1e-4
    atol: float = 1e-4
    converter: Converter | str = "fx"
    optimize: bool = True
    flush_denormals: bool = True
    cache_folder: Path | str | None = None

    def __post_init__(self) -> None:
        for name in ("preferred_execution_providers", "default_execution_providers", "pre_ort_model_transforms"):
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise CompilationError(f"{name} is a list, and not {given!r}", f"pass [{given!r}]")
            object.__setattr__(self, name, tuple(given))
        if self.cache_folder is not None:
            if not str(self.cache_folder):
                raise CompilationError("cache_folder is empty", "pass a folder, or None to keep nothing")
            object.__setattr__(self, "cache_folder", Path(self.cache_folder))

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> OrtBackendOptions:
        """Make options of what `torch.compile(options=...)` was given.

        Raises:
            CompilationError: there is no option of that name.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(options) - set(known)):
            raise CompilationError(
                f"the backend has no option {', '.join(unknown)}", f"the options are {', '.join(known)}"
            )
        return cls(**options)
