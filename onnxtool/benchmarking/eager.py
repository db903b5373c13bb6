"""Run the same checkpoint in PyTorch through transformers, to time a file against it.

This is the only module of this package that loads torch and transformers, and only to compare with a checkpoint.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import CheckpointError, InputError, OnnxtoolError, ProviderError, first_line
from onnxtool.reading import require_small_settings
from onnxtool.runtime.providers import is_on_cuda
from onnxtool.runtime.quiet import quiet

Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class EagerModel:
    """A transformers model in evaluation mode, in float32.

    Attributes:
        device: its torch device.
        threads: number of torch threads while it runs.
        accepted: the argument names of its forward.
    """

    name: str
    device: str
    threads: int
    load_ms: float
    accepted: frozenset[str]
    _model: Any

    @property
    def architecture(self) -> str:
        """The transformers class, e.g. `BertModel`."""
        return type(self._model).__name__

    def prepare(self, feeds: Feeds) -> Callable[[], object]:
        """Return a run on `feeds`, which are copied to the device here."""
        import torch

        torch.set_num_threads(self.threads)
        tensors = self._tensors(feeds)
        model, is_cuda = self._model, self.device != "cpu"

        def run() -> object:
            with torch.inference_mode():
                outputs: object = model(**tensors)
            if is_cuda:
                torch.cuda.synchronize()
            return outputs

        return run

    def outputs(self, feeds: Feeds) -> Mapping[str, NDArray[Any]]:
        """Run once."""
        import torch

        outputs = self.prepare(feeds)()
        assert isinstance(outputs, Mapping)  # noqa: S101 - what return_dict promises
        return {name: value.cpu().numpy() for name, value in outputs.items() if isinstance(value, torch.Tensor)}

    def _tensors(self, feeds: Feeds) -> dict[str, Any]:
        import torch

        return {
            name: torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
            for name, array in feeds.items()
            if name in self.accepted
        }


def _model_class(name: str) -> Any:
    """Return transformers' model class of that name; None if there is no such class."""
    import transformers

    found: Any = getattr(transformers, name, None)
    return found if inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel) else None


def load_eager(name: str, *, provider: str, threads: int) -> EagerModel:
    """Load the checkpoint `name`, a folder or an id on the hub, into the class that its config.json names.

    Only safetensors weights are loaded, and no code of the checkpoint runs.

    Raises:
        CheckpointError: there is no such checkpoint, or it does not load.
        ProviderError: torch cannot use the device.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise CheckpointError(f"{error.name} is not installed", "pip install 'onnxtool-cli[export]'") from error
    device = "cuda" if is_on_cuda(provider) else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ProviderError("this PyTorch cannot use CUDA", "install a PyTorch with CUDA, or pass --provider cpu")
    start = time.perf_counter()
    local = Path(name).is_dir()
    try:
        if local:
            require_small_settings(Path(name))
        with quiet():
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=local)
            architecture = (getattr(config, "architectures", None) or [""])[0]
            model_class = _model_class(str(architecture))
            if model_class is None:
                raise InputError(
                    f"config.json of {name} names the architecture {architecture!r}, which transformers does not have",
                    "compare with a checkpoint of transformers, or with an ONNX file",
                )
            model = model_class.from_pretrained(
                name, config=config, dtype=torch.float32, use_safetensors=True, local_files_only=local
            )
            model = model.to(device).eval()
    except OnnxtoolError:
        raise
    except Exception as error:  # damaged files fail in many ways, and attention may need a package of kernels
        reason = first_line(error)
        raise CheckpointError(
            f"cannot load {name} in PyTorch: {reason}", "--compare takes an ONNX file, a checkpoint, or cpu and cuda"
        ) from error
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    model.config.return_dict = True
    accepted = frozenset(inspect.signature(model.forward).parameters)
    return EagerModel(name, device, threads, (time.perf_counter() - start) * 1e3, accepted, model)
