"""Account for every stored tensor of a checkpoint: what the model uses, what it computes itself, and what is an error.

transformers skips tensors that it has no place for, and casts integers to floats without their scales. Here, the
headers of the weight files are matched with the loaded model, using transformers' own renames. Quantized weights that
transformers computes with are exported as the floats they represent.

This is the only module that reads how transformers renames weights (core_model_loading, conversion_mapping); tested
with 5.23.
"""

from __future__ import annotations

import copy
import errno
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onnxtool.errors import CheckpointError, some
from onnxtool.export.pickles import load_pickle
from onnxtool.export.source import Source, plain_name
from onnxtool.runtime.quiet import quiet

_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # a layer number in a weight's name
# Identified by the additional tensors they store, in this order: two methods share the scales in the last row.
_QUANTIZER_TENSORS = (
    (re.compile(r"\.SCB$"), "bitsandbytes in 8 bits"),
    (re.compile(r"\.(absmax|quant_map|quant_state\.\S+)$"), "bitsandbytes in 4 bits"),
    (re.compile(r"\.(qweight|qzeros|g_idx)$"), "GPTQ or AWQ"),
    (re.compile(r"\.weight_(packed|shape)$"), "compressed-tensors"),
    (re.compile(r"_proj_(blocks|scales)$"), "mxfp4"),
    (re.compile(r":(qdata|scale|zero_point)$|\._weight_(qdata|scale|zero_point)$"), "torchao"),
    (re.compile(r"[._](scales?|scale_inv|scale_2|zero_point|amax)$"), "a method that keeps scales with its weights"),
)
# Relative errors explained by rounding to a stored dtype, for buffers that a model computes itself.
_ROUNDING = {"BF16": 1e-2, "F16": 1e-3}
FLOAT_CHECKPOINT = "export the checkpoint that it was quantized from, and quantize the file with onnxtool optimize"
_WEIGHTS, _PICKLE = "model.safetensors", "pytorch_model.bin"
_MAX_SHARDS = 10_000  # each is looked up; the largest checkpoints have a few hundred
_CONVERT = "load it with {} and save it with save_pretrained(...), which writes safetensors; or take its safetensors"
# Other formats in which a folder may hold its weights.
_OTHER_WEIGHTS = (
    ("tf_model*.h5", "a model of TensorFlow", _CONVERT.format("transformers before 5, from_tf=True")),
    ("flax_model*.msgpack", "a model of Flax", _CONVERT.format("transformers before 5, from_flax=True")),
    ("*.gguf", "GGUF", _CONVERT.format("from_pretrained(..., gguf_file=...)")),
    ("onnx/*.onnx", "ONNX", "it is exported already: onnxtool optimize --model_path takes the file"),
    ("*.onnx", "ONNX", "it is exported already: onnxtool optimize --model_path takes the file"),
    ("*.ckpt", "a trainer's checkpoint", "save the model with save_pretrained(...) where it was trained"),
    ("model.*.safetensors", "a variant", "rename the file to model.safetensors if it is the one to export"),
    ("*.safetensors", "safetensors of another name", "rename the file to model.safetensors if it is the model's"),
    ("*.bin", "a file of another name", "save the model with save_pretrained(...) where it was trained"),
    ("*.pt", "a pickle of PyTorch", "save the model with save_pretrained(...) where it was trained"),
    ("*.pth", "a pickle of PyTorch", "save the model with save_pretrained(...) where it was trained"),
)


def weight_files(source: Source) -> tuple[Path, ...]:
    """Return the weight files: safetensors, or pickles if there are no others and they are allowed.

    Raises:
        CheckpointError: there are none, or some are missing.
    """
    files = _files(source, _WEIGHTS)
    if files:
        return files
    pickles = _files(source, _PICKLE)
    if pickles and source.allow_pickle:
        return pickles
    if pickles:
        raise CheckpointError(
            f"{source.model_name} has its weights in a pickle ({pickles[0].name}) only, which can run code",
            "if you trust it, pass --allow_pickle; or convert it: save_pretrained(...) writes model.safetensors",
        )
    raise _without_weights(source)


def _without_weights(source: Source) -> CheckpointError:
    """Make the error for a checkpoint without readable weights, and say which other formats it has."""
    folder = Path(source.model_name) / source.transformer_folder
    for pattern, kind, hint in _OTHER_WEIGHTS:
        local = sorted(folder.glob(pattern)) if source.is_local else []
        name = local[0].name if local else pattern if "*" not in pattern and source.locate(pattern) else ""
        if name:
            return CheckpointError(
                f"{source.model_name} has its weights as {kind} ({name}) only, and onnxtool reads {_WEIGHTS}", hint
            )
    return CheckpointError(
        f"{source.model_name} has no weights ({_WEIGHTS})",
        "a tokenizer or configuration alone cannot be exported; pass the model's own folder or id",
    )


def _files(source: Source, name: str) -> tuple[Path, ...]:
    """Return the file named `name`, or the shards in its index; nothing if there is neither."""
    single = source.locate(name)
    if single is not None:
        return (single,)
    index = f"{name}.index.json"
    names = source.read_object(index).get("weight_map")
    if names is None and source.locate(index) is None:
        return ()
    if not isinstance(names, dict) or not names:
        raise source.malformed(index, "it has no weight_map, which says which shard holds each weight")
    listed = sorted(set(map(str, names.values())))
    if len(listed) > _MAX_SHARDS:
        raise source.malformed(index, f"it lists {len(listed)} files, and a checkpoint has at most {_MAX_SHARDS}")
    shards = {shard: source.locate(plain_name(shard)) for shard in listed}
    missing = [shard for shard, path in shards.items() if path is None]
    if missing:
        raise CheckpointError(
            f"{source.model_name} lacks {len(missing)} of {len(shards)} shards of its weights: {some(missing)}",
            f"fetch the whole checkpoint; {index} lists all of them",
        )
    return tuple(path for path in shards.values() if path is not None)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as described by its file's header.

    Attributes:
        dtype: safetensors' name for it, e.g. `F32`, `I8`, `F8_E4M3`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def is_float(self) -> bool:
        """Whether its numbers are meaningful without a scale."""
        return self.dtype in _FLOATS

    def load(self) -> Any:
        """Read its numbers as a torch tensor."""
        from safetensors import safe_open

        if self.file.suffix == ".bin":
            return load_pickle(self.file, partial(_harmful, self.file, str(self.file.parent)), device=None)[self.name]
        with safe_open(self.file, "pt") as file:
            return file.get_tensor(self.name)


@dataclass(frozen=True)
class Accounts:
    """The fate of a checkpoint's tensors, if none is an error.

    Attributes:
        left_out: names belonging to a head that the checkpoint was saved with and this architecture does not have.
        unknown: names unknown to all architectures of this kind of model.
        defaults: names of parameters that transformers silently initializes if a checkpoint lacks them.
    """

    left_out: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()


def read_headers(files: Iterable[Path], label: str) -> dict[str, StoredTensor]:
    """Describe all tensors in the weight files, by name; reads only their headers.

    Raises:
        CheckpointError: two files hold a tensor of one name, a file cannot be read, or a pickle holds other values.
    """
    headers: dict[str, StoredTensor] = {}
    for path in files:
        for tensor in _unpickle_header(path, label) if path.suffix == ".bin" else _header(path, label):
            if tensor.name in headers:
                raise CheckpointError(
                    f"{headers[tensor.name].file.name} and {path.name} of {label} both hold {tensor.name}, and one "
                    "would be ignored",
                    "the folder mixes two sets of shards; take all files from one",
                )
            headers[tensor.name] = tensor
    return headers


def foreign_prefix(model: Any, stored: Mapping[str, StoredTensor]) -> str:
    """Return a prefix that a trainer added to all names, such as `module.`; empty unless stripping it makes all fit."""
    if not stored:
        return ""
    parts = [name.split(".") for name in stored]
    shared = next((n for n, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1), len(min(parts)))
    for count in range(1, shared + 1):
        prefix = ".".join(parts[0][:count]) + "."
        places = place((name.removeprefix(prefix) for name in stored), model)
        state = model.state_dict()
        if all(target in state for target, _ in places.values()):
            return prefix
    return ""


def key_mapping(prefix: str) -> dict[str, str]:
    """Return the from_pretrained renaming that strips a prefix; empty for none."""
    return {f"^{re.escape(prefix)}": ""} if prefix else {}


def place(names: Iterable[str], model: Any, prefix: str = "") -> dict[str, tuple[str, bool]]:
    """Return where transformers puts each stored tensor: its name in the model, and whether it is converted.

    A name that the model does not have is one that transformers skips.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rows = get_model_conversion_mapping(model, key_mapping(prefix) or None)
    renamings = [row for row in rows if isinstance(row, WeightRenaming)]
    converters = [row for row in rows if isinstance(row, WeightConverter)]
    state, base, places = model.state_dict(), model.base_model_prefix, dict[str, tuple[str, bool]]()
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, base, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], base, state)
        places[name] = (target, pattern is not None)
    return places


def account(model: Any, stored: Mapping[str, StoredTensor], label: str, prefix: str = "") -> Accounts:
    """Match the stored tensors with a loaded, unquantized model.

    Args:
        model: a loaded transformers model.
        stored: the tensors in its weight files.
        label: the checkpoint's name in errors.
        prefix: the prefix stripped from names.

    Raises:
        CheckpointError: a tensor's kind differs from its parameter's, two tensors are for one parameter, or one differs
            from what the model computes instead.
    """
    state, places = model.state_dict(), place(stored, model, prefix)
    by_target: dict[str, list[StoredTensor]] = defaultdict(list)
    unplaced: dict[str, StoredTensor] = {}
    for name, (target, is_converted) in places.items():
        if target not in state:
            unplaced[target] = stored[name]
        else:
            by_target[target].append(stored[name])
            if not is_converted and len(by_target[target]) > 1:
                first, second = (tensor.name for tensor in by_target[target][:2])
                raise CheckpointError(
                    f"{label} holds both {first} and {second} for {target} of {type(model).__name__}, and one would be "
                    "ignored",
                    "delete the one that is not part of the model from the file",
                )
    coded = [
        tensor
        for target, tensors in by_target.items()
        for tensor in tensors
        if state[target].is_floating_point() != tensor.is_float
    ]
    if coded:
        raise _coded(coded, [tensor.name for tensor in unplaced.values()], label)
    _require_equal_ties(state, by_target, label)
    buffers: dict[str, list[Any]] = defaultdict(list)
    for name, value in model.named_buffers():
        buffers[_leaf(name)].append(value)
    computed = {
        target
        for target, tensor in unplaced.items()
        if _is_computed(model, target, tensor, buffers[_leaf(target)], label)
    }
    unused = {target: tensor.name for target, tensor in unplaced.items() if target not in computed}
    known = _siblings_names(model, unused)
    unknown = sorted(name for target, name in unused.items() if target not in known)
    quantized = [name for name in unknown if method_of([name])]
    if quantized:
        raise CheckpointError(
            f"{len(quantized)} tensors of {label} are scales or codes of a quantization ({method_of(quantized)}) that "
            f"config.json does not declare, and would be ignored: {some(quantized)}",
            FLOAT_CHECKPOINT,
        )
    return Accounts(tuple(sorted(known)), tuple(unknown), tuple(_defaults(model, state, by_target)))


def require_scaled(model: Any, stored: Mapping[str, StoredTensor], label: str) -> None:
    """Refuse a quantized checkpoint if transformers used some stored numbers without their scales.

    Raises:
        CheckpointError: there are such numbers.
    """
    import torch

    state = model.state_dict()
    for name, (target, _) in place(stored, model).items():
        tensor, value = stored[name], state.get(target)
        if tensor.is_float or value is None or not value.is_floating_point() or tuple(value.shape) != tensor.shape:
            continue
        if torch.equal(value.float(), tensor.load().float()) and value.any():
            raise _coded([tensor], [], label)


def surplus_layers(model: Any, unused: Iterable[str]) -> list[str]:
    """Return the weights in `unused` that belong to additional layers of a kind that the model has, or an empty list.

    This is the case if the model has a weight whose name differs only in its numbers (`stages.0.blocks.1.weight` and
    `stages.0.blocks.0.weight`), or if a layer list in the name is empty in the model. Both are layers that the
    checkpoint was trained with; leftovers of another head are neither.

    Args:
        model: a loaded transformers model.
        unused: weights of its checkpoint that it has no place for.
    """
    import torch

    known = {_without_numbers(name) for name in model.state_dict()}
    empty = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and not len(module)
    }
    return sorted(
        weight
        for weight in unused
        if any(
            (_NUMBER.search(name) and _without_numbers(name) in known) or not empty.isdisjoint(_numbered_lists(name))
            for name in _with_and_without_base(model, weight)
        )
    )


def method_of(names: Iterable[str]) -> str:
    """Return the quantization method that stores tensors with such names; empty if unknown."""
    return next((method for pattern, method in _QUANTIZER_TENSORS for name in names if pattern.search(name)), "")


def _coded(tensors: Sequence[StoredTensor], other_names: Sequence[str], label: str) -> CheckpointError:
    names = [f"{tensor.name} ({tensor.dtype})" for tensor in tensors]
    method = method_of([tensor.name for tensor in tensors]) or method_of(other_names) or "an unknown method"
    return CheckpointError(
        f"{len(names)} tensors of {label} hold numbers of another kind than their parameters, quantized by {method}, "
        f"and nothing would apply their scales: {some(names)}",
        FLOAT_CHECKPOINT,
    )


def _require_equal_ties(state: Mapping[str, Any], by_target: Mapping[str, list[StoredTensor]], label: str) -> None:
    """Refuse two different stored tensors for one parameter that the model has under two names."""
    import torch

    shared: dict[Any, list[StoredTensor]] = defaultdict(list)
    for target, tensors in by_target.items():
        if len(tensors) == 1 and state[target].numel():
            shared[state[target].data_ptr(), state[target].shape].append(tensors[0])
    for first, *further in shared.values():
        for other in further:
            if not torch.equal(first.load(), other.load()):
                raise CheckpointError(
                    f"{first.name} and {other.name} of {label} hold different numbers, but the model has one parameter "
                    "for both",
                    "set tie_word_embeddings in config.json to what the model was trained with",
                )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _is_computed(model: Any, name: str, tensor: StoredTensor, buffers: Sequence[Any], label: str) -> bool:
    """Return whether a tensor without a parameter was stored by older versions but is computed by the model itself.

    These are positions, masks and frequencies, and any buffer that the model does not store: `buffers` of that name.

    Raises:
        CheckpointError: it is such a tensor, but differs from what the model computes.
    """
    import torch

    leaf = _leaf(name)
    is_mask = leaf in ("bias", "masked_bias") and "attn" in name and len(tensor.shape) in (0, 4)
    if leaf != "position_ids" and not is_mask and not buffers:
        return False
    stored = tensor.load()
    if leaf == "position_ids":
        equal = torch.equal(stored.flatten().long(), torch.arange(stored.numel()))
    elif is_mask and not buffers:
        equal = stored.dim() == 0 or torch.equal(stored.float(), torch.ones_like(stored).tril().float())
    else:
        tolerance = _ROUNDING.get(tensor.dtype, 1e-5)
        equal = any(
            value.shape == stored.shape
            and torch.allclose(value.detach().cpu().double(), stored.double(), rtol=tolerance, atol=tolerance * 1e-3)
            for value in buffers
        )
    if not equal:
        raise CheckpointError(
            f"{tensor.name} of {label} differs from what {type(model).__name__} computes from config.json",
            "the folder mixes two models, or its config was edited; take both from one",
        )
    return True


def _siblings_names(model: Any, names: Mapping[str, str]) -> set[str]:
    """Return the given names that another architecture with the same configuration has: names of a head.

    This includes names that transformers itself drops for this architecture, such as multi-token prediction layers.
    """
    import torch

    dropped = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]  # noqa: SLF001  as above
    known = {name for name in names if any(pattern.search(name) for pattern in dropped)}
    for architecture in _architectures(type(model), type(model.config)) if names.keys() - known else ():
        try:
            with torch.device("meta"):
                state = architecture(model.config).state_dict()
        except Exception:  # noqa: BLE001, S112  a class that needs more than its configuration cannot have saved this
            continue
        known |= {name for name in names if any(spelling in state for spelling in _with_and_without_base(model, name))}
        if known >= names.keys():
            break
    return known


def _architectures(model_class: Any, config_class: Any) -> Iterator[Any]:
    """Yield other classes with their own forward for the same configuration."""
    import sys

    import torch
    import transformers

    architecture: Any
    for architecture in vars(sys.modules[model_class.__module__]).values():
        is_model = isinstance(architecture, type) and issubclass(architecture, transformers.PreTrainedModel)
        if (
            is_model
            and architecture.config_class is config_class
            and architecture.forward is not torch.nn.Module.forward
        ):
            yield architecture


def _defaults(model: Any, state: Mapping[str, Any], covered: Mapping[str, Any]) -> Iterator[str]:
    """Yield parameters that no tensor was loaded into, and that transformers does not report as missing."""
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]  # noqa: SLF001  as above
    pointers = {state[name].data_ptr() for name in covered}
    for name, _ in model.named_parameters():
        is_loaded = name in covered or state[name].data_ptr() in pointers
        if not is_loaded and any(pattern.search(name) for pattern in ignored):
            yield name


def _with_and_without_base(model: Any, name: str) -> tuple[str, str, str]:
    """Return a name as it is in a model with a head, and in the base model."""
    base = f"{getattr(model, 'base_model_prefix', '')}."
    return name, base + name, name.removeprefix(base)


def _without_numbers(name: str) -> str:
    return _NUMBER.sub("#", name)


def _numbered_lists(name: str) -> Iterator[str]:
    """Yield the lists that the numbers in a name index: `decoder.block` for `decoder.block.3.weight`."""
    for match in _NUMBER.finditer(name):
        yield name[: match.start() - 1]


def _header(path: Path, label: str) -> Iterator[StoredTensor]:
    from safetensors import SafetensorError, safe_open

    if not os.access(path, os.R_OK):  # which safetensors reports as a file that is not there
        raise CheckpointError(f"cannot read {path}: {os.strerror(errno.EACCES)}", "check its permissions")
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                header = file.get_slice(name)
                yield StoredTensor(name, header.get_dtype(), tuple(header.get_shape()), path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"cannot load {label}: {path.name} is not a safetensors file: {error}",
            "the folder may be incomplete or damaged",
        ) from error


def _unpickle_header(path: Path, label: str) -> Iterator[StoredTensor]:
    import torch

    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    for name, value in load_pickle(path, partial(_harmful, path, label), device="meta").items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path.name} of {label} holds {type(value).__name__} as {name!r}, not only tensors",
                "it is a trainer's own file; save the model with save_pretrained(...)",
            )
        dtype = names.get(value.dtype, str(value.dtype).removeprefix("torch."))
        yield StoredTensor(str(name), dtype, tuple(value.shape), path)


def _harmful(path: Path, label: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} of {label} {reason}",
        "it is incomplete, damaged or malicious: fetch it again, take a checkpoint with safetensors, or save only the "
        "tensors if you trust the file",
    )


_MODELOPT = "hf_quant_config.json"
# By transformers, during loading, if requested in the configuration.
_DEQUANTIZED_ON_LOADING = ("fp8", "mxfp8", "mxfp4")


def require_known_quantizer(config: Any, source: Source) -> None:
    """Refuse a quantization that transformers would skip, and request floats for those it can dequantize.

    Raises:
        CheckpointError: transformers does not know the method.
    """
    from transformers.quantizers import AutoHfQuantizer

    stated = getattr(config, "quantization_config", None)
    if stated is None and source.locate(_MODELOPT) is not None:
        stated = {"quant_method": f"modelopt ({_MODELOPT})"}
    if stated is None:
        return
    settings = stated if isinstance(stated, dict) else {}
    method = settings.get("quant_method")
    try:
        with quiet():
            known = AutoHfQuantizer.supports_quant_method(settings)
    except ValueError:  # it does not name a method
        known = False
    if not known:
        raise CheckpointError(
            f"{source.model_name} is quantized by {method or 'a method that config.json does not name'}, which "
            "transformers does not compute with",
            FLOAT_CHECKPOINT,
        )
    if method in _DEQUANTIZED_ON_LOADING:
        config.quantization_config = {**settings, "dequantize": True}


def is_quantized(model: Any) -> bool:
    """Return whether a model computes with quantization kernels."""
    return getattr(model, "hf_quantizer", None) is not None


def as_floats(model: Any) -> Any:
    """Return a model of plain layers with the weights that a quantized model's layers represent.

    A matrix multiplication layer is evaluated on unit vectors to get its matrix, plus its bias. A layer that also does
    something else, such as rounding its input, differs; verification against the quantized model detects it.

    Raises:
        CheckpointError: a quantized parameter does not belong to a linear layer.
    """
    import torch

    state = dict[str, Any]()
    with torch.no_grad():
        model(**model.dummy_inputs)  # some quantizers unpack their weights at the first call
        for name, layer in model.named_modules():
            if hasattr(layer, "in_features") and hasattr(layer, "out_features"):
                bias = layer(torch.zeros(1, layer.in_features)).float()
                state[f"{name}.weight"] = (layer(torch.eye(layer.in_features)).float() - bias).T.contiguous()
                state[f"{name}.bias"] = bias[0]
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.random.fork_rng(devices=[]):
        plain = type(model)._from_config(config, dtype=model.dtype)  # noqa: SLF001  what AutoModel.from_config calls
    wanted = plain.state_dict()
    state = {name: value for name, value in {**model.state_dict(), **state}.items() if name in wanted}
    unlike = [name for name, value in wanted.items() if name not in state or state[name].shape != value.shape]
    if unlike:
        raise CheckpointError(f"{some(unlike)} are quantized, and no linear layers of a model", FLOAT_CHECKPOINT)
    plain.load_state_dict(state)
    plain.config.use_cache = False
    return plain.eval()
