"""sentence-transformers modules after the transformer: from token states to one vector per text.

To add a module, add a class here or in sparse_modules.py, and an entry in POOLING_MODULES. The definitions follow
sentence-transformers 6.2.

Shape letters: B batch, S sequence, H hidden, V vocabulary, W width of a vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.module_forms import (
    ACTIVATIONS,
    POOLING_MODES,
    Builder,
    Floats,
    PoolingMode,
    PoolingModule,
    Value,
    activation_name,
    build_count,
    build_places,
    count_setting,
    places_in_torch,
    require_known_keys,
    stored_tensors,
)
from onnxtool.checkpoint.module_settings import WEIGHTED, require_known_settings, transformer_output
from onnxtool.checkpoint.sentence_modules import (
    STATIC,
    TOKENS,
    TRANSFORMERS,
    VECTOR,
    SentenceModules,
    StoredModule,
    is_index,
)
from onnxtool.checkpoint.sparse_modules import LargestTerms, SparseAutoEncoder, SpladePooling
from onnxtool.reports import Json

# Lower bound of the norm in a division: torch.nn.functional.normalize's default.
_SMALLEST_NORM = 1e-12
_LAYER_NORM_EPSILON = 1e-5  # torch's default, which sentence-transformers does not change
_NAMES = ("module_input_name", "module_output_name")  # of what a module reads and makes
# `cls` takes the first token after the prompt, whose tokens count twice for that; `lasttoken` takes the last one.
_FIRST, _LAST = POOLING_MODES["cls"], POOLING_MODES["lasttoken"]
# Checkpoints older than that setting, whose prompts sentence-transformers excludes by hub id.
INSTRUCTORS = ("hkunlp/instructor-base", "hkunlp/instructor-large", "hkunlp/instructor-xl")


@dataclass(frozen=True)
class Pooling(PoolingModule):
    """Pool the states of real tokens into one vector: float [B, S, H] to [B, M * H] for M modes.

    Attributes:
        modes: the names of the modes.
        includes_prompt: whether prompt tokens are pooled too. If not, each form takes a second mask, [B, S], which is 0
            for prompt tokens; without that mask they are pooled.
    """

    pools_tokens = True
    keys = frozenset(("embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt"))

    modes: tuple[str, ...] = ("mean",)
    includes_prompt: bool = True

    @classmethod
    def read(cls, stored: StoredModule) -> Pooling:
        """Read the modes, in the notation of any version; the default is the mean."""
        name = stored.file("config.json")
        if stored.folder and not stored.settings and stored.files.locate(name) is None:
            raise stored.files.malformed(name, "it is missing or unreadable, and says how states are pooled")
        modes = _stated_modes(stored.settings)
        unknown = [mode for mode in modes if mode not in POOLING_MODES]
        if unknown:
            raise stored.files.refuse(
                f"{stored.files.label} pools with {', '.join(unknown)}, which is an unknown pooling mode; "
                f"onnxtool knows {', '.join(POOLING_MODES)}"
            )
        includes_prompt = stored.settings.get("include_prompt") is not False
        return cls(modes, includes_prompt and stored.files.label not in INSTRUCTORS)

    def build(self, build: Builder, value: Value, mask: Value, pooled: Value | None = None) -> Value:
        """Append each mode, and their concatenation."""
        real = counted = build.cast(mask)
        states = build.cast(value)
        leaves_out = pooled is not None and not self.includes_prompt
        if leaves_out:
            counted = build.op("Mul", real, build.cast(pooled))
        pooled_states = []
        for mode in self._rows:
            states_of_mode, weights = states, counted
            if mode.is_weighted:
                weights = build.op("Mul", build_places(build, real), counted)
            elif leaves_out and mode is _FIRST:
                weights = build.op("Add", real, counted)
            elif leaves_out and mode is _LAST:  # zeros if nothing is pooled
                states_of_mode = build.op("Mul", states, build.as_weights(counted))
            pooled_states.append(mode.build(build, states_of_mode, weights))
        return pooled_states[0] if len(pooled_states) == 1 else build.op("Concat", *pooled_states, axis=1)

    def reference(self, torch: Any, value: Any, mask: Any, pooled: Any = None) -> Any:
        """Compute each mode, and concatenate."""
        counted = mask if pooled is None or self.includes_prompt else mask * pooled
        pooled_states = []
        for mode in self._rows:
            weights = places_in_torch(torch, mask) * counted if mode.is_weighted else counted
            pooled_states.append(mode.reference(torch, value, mask + counted if mode is _FIRST else weights))
        return torch.cat(pooled_states, dim=1)

    @property
    def _rows(self) -> list[PoolingMode]:
        return [POOLING_MODES[mode] for mode in self.modes]

    def width(self, before: int) -> int:
        """Multiply by the number of modes."""
        return len(self.modes) * before

    @property
    def description(self) -> str:
        """Name the modes."""
        return f"pooling by {' and '.join(self.modes)}"


@dataclass(frozen=True, eq=False)
class Dense(PoolingModule):
    """Project: float [B, W] to [B, W'], or each token's vector, [B, S, W] to [B, S, W'], with an activation.

    Attributes:
        name: the module's folder, which prefixes the weight names.
        weight: float32 [W', W].
        bias: float32 [W'], or None.
        activation: one of ACTIVATIONS.
        residual: float32 [W', W], applied to the input before it is added to the result; None for no residual.
        on_tokens: whether it projects token vectors.
    """

    keys = frozenset(("in_features", "out_features", "bias", "activation_function", "use_residual", *_NAMES))

    name: str
    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    activation: str
    residual: NDArray[np.float32] | None = None
    on_tokens: bool = False

    @classmethod
    def read(cls, stored: StoredModule) -> Dense:
        """Read the projection; the default activation is Tanh."""
        on_tokens = works_on_tokens(stored)
        settings = stored.settings
        path = settings.get("activation_function", "torch.nn.Tanh")
        activation = activation_name(path)
        if activation is None:
            raise stored.files.refuse(
                f"{stored.folder} of {stored.files.label} is activated by {path}, which onnxtool does not compute; it "
                f"knows {', '.join(ACTIVATIONS)} of torch.nn"
            )
        # Stanford's ColBERT stores it with the transformer's weights, and its shape nowhere else.
        files = stored.files
        tensors = files.read_tensors(stored.folder) if stored.folder else files.read_tensors("", ("linear.weight",))
        columns, rows = settings.get("in_features"), settings.get("out_features")
        if not stored.folder and "linear.weight" in tensors and tensors["linear.weight"].ndim == 2:
            rows, columns = tensors["linear.weight"].shape
        has_residual = settings.get("use_residual") is True and rows != columns
        shapes: dict[str, tuple[Json, ...]] = {"linear.weight": (rows, columns)}
        shapes |= {"linear.bias": (rows,)} if settings.get("bias", True) else {}
        shapes |= {"residual.weight": (rows, columns)} if has_residual else {}
        weights = dict(zip(shapes, stored_tensors(stored, tensors, shapes), strict=True))
        weight, residual = weights["linear.weight"], weights.get("residual.weight")
        if settings.get("use_residual") is True and not has_residual:  # the input is added unchanged
            residual = np.eye(len(weight), dtype=np.float32)
        return cls(stored.folder or "projection", weight, weights.get("linear.bias"), activation, residual, on_tokens)

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append it."""
        value = build.cast(value) if self.on_tokens else value
        bias = [] if self.bias is None else [self.bias]
        result = ACTIVATIONS[self.activation](build, self._project(build, value, "linear", self.weight, *bias))
        if self.residual is None:
            return result
        return build.op("Add", result, self._project(build, value, "residual", self.residual))

    def _project(self, build: Builder, value: Value, name: str, *weights: NDArray[np.float32]) -> Value:
        """Append a product with the first weight, [W', W], and add the second one."""
        matrix, bias = weights[0], weights[1:]
        if self.on_tokens:  # [B, S, W], which Gemm does not take
            product = build.op("MatMul", value, build.weight(matrix.T, f"{self.name}.{name}.weight"))
            added = [build.weight(vector, f"{self.name}.{name}.bias") for vector in bias]
            return build.op("Add", product, *added) if added else product
        factors = [build.weight(matrix, f"{self.name}.{name}.weight")]
        factors += [build.weight(vector, f"{self.name}.{name}.bias") for vector in bias]
        return build.op("Gemm", value, *factors, transB=1)

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Apply torch's own linear layer and activation."""

        def tensor(array: NDArray[np.float32]) -> Any:
            return torch.from_numpy(array).to(value)

        bias = None if self.bias is None else tensor(self.bias)
        linear = torch.nn.functional.linear(value, tensor(self.weight), bias)
        result = getattr(torch.nn, self.activation)().eval()(linear)
        return result if self.residual is None else result + value @ tensor(self.residual).T


@dataclass(frozen=True)
class Activation(PoolingModule):
    """Apply one of ACTIVATIONS to each number: float [B, W]."""

    name: str

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append it."""
        return ACTIVATIONS[self.name](build, value)

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Apply torch's own."""
        return getattr(torch.nn, self.name)().eval()(value)


@dataclass(frozen=True, eq=False)
class LayerNorm(PoolingModule):
    """Normalize mean and variance: float [B, W].

    Attributes:
        name: of the module's folder.
        weight: float32 [W].
        bias: float32 [W].
    """

    keys = frozenset(("dimension",))

    name: str
    weight: NDArray[np.float32]
    bias: NDArray[np.float32]

    @classmethod
    def read(cls, stored: StoredModule) -> LayerNorm:
        """Read scale and shift."""
        tensors, shape = stored.files.read_tensors(stored.folder), (stored.settings.get("dimension"),)
        scale, shift = stored_tensors(stored, tensors, {"norm.weight": shape, "norm.bias": shape})
        return cls(stored.folder, scale, shift)

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append plain operators; LayerNormalization is newer than the oldest exported opsets."""
        centred = build.op("Sub", value, build.reduce("ReduceMean", value, keepdims=1))
        variance = build.reduce("ReduceMean", build.op("Mul", centred, centred), keepdims=1)
        deviation = build.op("Sqrt", build.op("Add", variance, build.number(_LAYER_NORM_EPSILON)))
        scaled = build.op(
            "Mul", build.op("Div", centred, deviation), build.weight(self.weight, f"{self.name}.norm.weight")
        )
        return build.op("Add", scaled, build.weight(self.bias, f"{self.name}.norm.bias"))

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Apply torch's own."""
        weight, bias = torch.from_numpy(self.weight).to(value), torch.from_numpy(self.bias).to(value)
        return torch.nn.functional.layer_norm(value, value.shape[-1:], weight, bias, _LAYER_NORM_EPSILON)


@dataclass(frozen=True)
class Normalize(PoolingModule):
    """Scale to length 1: float [B, W], or each token's vector, [B, S, W]. Zero vectors are unchanged."""

    on_tokens: bool = False

    @classmethod
    def read(cls, stored: StoredModule) -> Normalize:
        """Read its input."""
        return cls(works_on_tokens(stored))

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append it."""
        value = build.cast(value) if self.on_tokens else value
        norm = build.reduce("ReduceL2", value, axis=-1, keepdims=1)
        return build.op("Div", value, build.op("Max", norm, build.number(_SMALLEST_NORM)))

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Apply torch's own."""
        return torch.nn.functional.normalize(value, p=2, dim=-1, eps=_SMALLEST_NORM)


@dataclass(frozen=True)
class Truncate(PoolingModule):
    """Keep the first numbers of a vector: float [B, W] to [B, min(W, D)], the checkpoint's `truncate_dim`.

    For models trained this way (Kusupati et al., 2022, arXiv:2205.13147). The result is not rescaled.
    """

    dimensions: int

    @classmethod
    def read(cls, stored: StoredModule) -> Truncate:
        """Read it from the settings of the encoder."""
        return cls(count_setting(stored, "truncate_dim"))

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append it."""
        return build.op("Slice", value, *(build.integers(number) for number in (0, self.dimensions, 1)))

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Take a part of the tensor."""
        return value[:, : self.dimensions]

    def width(self, before: int) -> int:
        """Return the smaller one."""
        return min(before, self.dimensions)

    @property
    def description(self) -> str:
        """Name the number of dimensions."""
        return f"the first {self.dimensions} dimensions"


@dataclass(frozen=True)
class LogitScore(PoolingModule):
    """Score a pair by a causal language model's next token: float [B, S, V] to [B, 1].

    The score is the logit of one token (`yes`) minus the logit of another (`no`), at the last real token of a text
    (Nogueira et al., 2020, arXiv:2003.06713).

    Attributes:
        true_token_id: the token that means relevant.
        false_token_id: the token that means not relevant; None to use only the first logit.
    """

    pools_tokens = True
    reads = "causal_logits"
    keys = frozenset(("true_token_id", "false_token_id", "module_input_name"))

    true_token_id: int
    false_token_id: int | None = None

    @classmethod
    def read(cls, stored: StoredModule) -> LogitScore:
        """Read the tokens."""
        settings = stored.settings
        true, false = settings.get("true_token_id"), settings.get("false_token_id")
        if not is_index(true) or (false is not None and not is_index(false)):
            raise stored.files.malformed(
                stored.file("config.json"), f"true_token_id {true!r} and false_token_id {false!r} are not tokens"
            )
        source = settings.get("module_input_name", cls.reads)
        if source != cls.reads:
            raise stored.files.refuse(
                f"{stored.kind} of {stored.files.label} reads {source!r}; onnxtool computes it on {cls.reads} alone"
            )
        return cls(true, false)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens whose logits are read."""
        return (self.true_token_id,) if self.false_token_id is None else (self.true_token_id, self.false_token_id)

    @property
    def narrowed(self) -> LogitScore:
        """The same score for logits restricted to `token_ids`, [B, S, 2] or [B, S, 1]."""
        return LogitScore(0, None if self.false_token_id is None else 1)

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append it."""
        last = build.pick_before(value, build_count(build, build.cast(mask)))
        logits = [build.op("Gather", last, build.integers(token), axis=1) for token in self.token_ids]
        return logits[0] if len(logits) == 1 else build.op("Sub", *logits)

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Apply the definition."""
        last = _LAST.reference(torch, value, mask)
        score = last[:, self.true_token_id]
        return (score if self.false_token_id is None else score - last[:, self.false_token_id]).unsqueeze(1)

    def width(self, before: int) -> int:
        """Expect logits of a vocabulary that contains the tokens."""
        if before <= max(self.token_ids):
            raise ValueError(f"LogitScore reads token {max(self.token_ids)}, and there are {before} tokens")
        return 1

    @property
    def description(self) -> str:
        """Name the tokens."""
        return f"the logit of token {' less that of '.join(map(str, self.token_ids))}"


POOLING_MODULES: tuple[type[PoolingModule], ...] = (
    Pooling,
    SpladePooling,
    Dense,
    LayerNorm,
    Normalize,
    SparseAutoEncoder,
    LogitScore,
)
_CLASSES = {cls.__name__: cls for cls in POOLING_MODULES}
# Modules before any pooling, and one that only training uses.
_NOT_COMPUTED = (*TRANSFORMERS, "Dropout")
# The encoder setting that acts as a final module, by pooling module.
_ENCODER_MODULES: dict[type[PoolingModule], tuple[str, type[PoolingModule]]] = {
    Pooling: ("truncate_dim", Truncate),
    SpladePooling: ("max_active_dims", LargestTerms),
}


def read_pooling_modules(modules: SentenceModules, first: type[PoolingModule]) -> tuple[PoolingModule, ...]:
    """Read the modules after the transformer, in the order of modules.json; empty if there are none.

    Args:
        modules: the checkpoint's modules.
        first: the kind of the module that must come first and pool the tokens.

    Raises:
        OnnxtoolError: it has unsupported modules or settings, or does not pool the tokens first and exactly once.
    """
    # The export chooses which states are pooled: TokenStates.
    chooses = first is Pooling and WEIGHTED in modules.kinds[1:2]
    stored = [
        module
        for place, module in enumerate(modules.modules)
        if module.kind not in _NOT_COMPUTED and not (chooses and place == 1)
    ]
    if not modules.modules:
        return ()
    files = modules.modules[0].files
    require_known_settings(modules, files)
    if first is Pooling and modules.kinds[0] == STATIC:  # which is the mean of the token vectors
        return (Pooling(), *_read_of_vectors(stored[1:], modules, "a table of vectors"))
    if not stored:
        return ()
    unknown = sorted({module.kind for module in stored} - set(_CLASSES))
    if unknown:
        raise files.refuse(
            f"{files.label} has the modules {', '.join(unknown)}, which onnxtool does not compute; it computes "
            f"{', '.join(_CLASSES)}"
        )
    num_before = modules_before(stored, first)
    if num_before == len(stored):
        raise files.refuse(
            f"{files.label} does not say how it pools: it has no modules.json with a {first.__name__} before "
            f"{stored[0].kind}"
        )
    for place, module in enumerate(stored):
        if place != num_before and works_on_tokens(module) != (place < num_before):
            side = "before its" if place < num_before else "after its"
            raise files.refuse(
                f"{files.label} computes {module.kind} {side} {first.__name__}, on "
                f"{VECTOR if place < num_before else TOKENS}; onnxtool computes modules of tokens before it, and of "
                "vectors after it"
            )
    if transformer_output(modules) != first.reads:
        raise files.refuse(
            f"{first.__name__} of {files.label} reads {first.reads}, and its transformer gives "
            f"{transformer_output(modules) or 'none'}"
        )
    if sum(_CLASSES[module.kind].pools_tokens for module in stored) > 1:
        raise files.refuse(f"{files.label} pools twice, and tokens can be pooled once")
    if first is LogitScore and len(stored) > 1:
        raise files.refuse(f"{files.label} computes {stored[1].kind} after a score, which onnxtool does not")
    return _read_all(stored, modules, _ENCODER_MODULES.get(first, ("", first)))


def read_modules_of_sides(modules: SentenceModules) -> tuple[PoolingModule, ...]:
    """Read the modules after a dual encoder, which returns vectors itself, like read_pooling_modules.

    Raises:
        OnnxtoolError: it has modules or settings that are not computed here.
    """
    if not modules.modules:
        return ()
    require_known_settings(modules, modules.modules[0].files, of_sides=True)
    stored = [module for module in modules.modules if module.kind not in _NOT_COMPUTED]
    return _read_of_vectors(stored, modules, "a model that gives one vector for a text or an image")


def _read_of_vectors(
    stored: Sequence[StoredModule], modules: SentenceModules, source: str
) -> tuple[PoolingModule, ...]:
    """Read modules of vectors, after a `source` of them."""
    unsupported = [
        m.kind for m in stored if m.kind not in _CLASSES or _CLASSES[m.kind].pools_tokens or works_on_tokens(m)
    ]
    if unsupported:
        raise modules.modules[0].files.refuse(
            f"{modules.modules[0].files.label} computes {', '.join(unsupported)} after {source}, which onnxtool does "
            "not"
        )
    return _read_all(stored, modules, _ENCODER_MODULES[Pooling])


def _read_all(
    stored: Iterable[StoredModule], modules: SentenceModules, of_encoder: tuple[str, type[PoolingModule]]
) -> tuple[PoolingModule, ...]:
    """Read modules, followed by the one that comes from an encoder setting."""
    for module in stored:
        require_known_keys(module, _CLASSES[module.kind].keys)
    computed = tuple(_CLASSES[module.kind].read(module) for module in stored)
    key, last = of_encoder
    if modules.encoder.get(key) is None:
        return computed
    files = modules.modules[0].files
    return (*computed, last.read(StoredModule(last.__name__, "", modules.encoder, files)))


def truncated(modules: tuple[PoolingModule, ...], dimensions: int) -> tuple[PoolingModule, ...]:
    """Return `modules` followed by truncation, and by normalization if they normalize."""
    again = (Normalize(),) if any(isinstance(module, Normalize) for module in modules) else ()
    return (*modules, Truncate(dimensions), *again)


def build_all(
    modules: Iterable[PoolingModule], build: Builder, value: Value, mask: Value, pooled: Value | None
) -> Value:
    """Append modules in sequence; `pooled` is the mask int64 [B, S] of graphs that exclude prompts from pooling."""
    for module in modules:
        value = (
            module.build(build, value, mask, pooled)
            if isinstance(module, Pooling)
            else module.build(build, value, mask)
        )
    return value


def _stated_modes(settings: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the modes as written, known or not; flags are concatenated in the order of POOLING_MODES."""
    stated = settings.get("pooling_mode")
    if stated is None:
        known = [name for name, mode in POOLING_MODES.items() if settings.get(mode.flag) is True]
        flags = {key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True}
        modes: list[Json] = [*known, *sorted(flags - {mode.flag for mode in POOLING_MODES.values()})]
    else:
        modes = stated if isinstance(stated, list) else [stated]
    return tuple(map(str, modes)) or ("mean",)


def modules_before(modules: Sequence[StoredModule | PoolingModule], first: type[PoolingModule]) -> int:
    """Return the number of modules before the first of a kind; all if there is none."""
    places = (
        place
        for place, module in enumerate(modules)
        if (module.kind if isinstance(module, StoredModule) else type(module).__name__) == first.__name__
    )
    return next(places, len(modules))


def works_on_tokens(stored: StoredModule) -> bool:
    """Whether a module works on token vectors rather than on the text vector.

    Raises:
        OnnxtoolError: it reads or writes anything else.
    """
    input_name = stored.settings.get("module_input_name") or VECTOR
    output_name = stored.settings.get("module_output_name") or input_name
    if output_name != input_name or input_name not in (TOKENS, VECTOR):
        raise stored.files.refuse(
            f"{stored.kind} of {stored.files.label} makes {output_name} of {input_name}; onnxtool computes modules "
            f"that replace {TOKENS} or {VECTOR}"
        )
    return input_name == TOKENS


def normalize(vectors: Floats) -> Floats:
    """Scale each vector, float [..., W], to length 1; zero vectors are unchanged."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), _SMALLEST_NORM))
