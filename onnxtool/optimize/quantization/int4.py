"""Quantize weights to 4 bits within a bound on the error, with 8 bits or float32 for layers that need it.

Weights are stored in blocks with a scale and a zero point each, for MatMulNBits and GatherBlockQuantized. Activations
stay floating point. Shape letters: K input width of a layer, N output width, C blocks in a column (K / BLOCK, rounded
up) or a table row, V rows of a table, H row width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.graph.edit import drop_unused, is_made_on_saving, replace_and_erase, tensor_of
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass, refusals
from onnxtool.optimize.quantization.activations import Activations, Feeds, Recording
from onnxtool.optimize.quantization.arithmetic import Floats, damped_factors, round_together
from onnxtool.optimize.quantization.bounded import (
    DEFAULT_SETTING,
    Level,
    QuantizationConfig,
    QuantizationSetting,
    Quantized,
    quantize_within,
)
from onnxtool.optimize.quantization.int8 import int8_embeddings, rewrite_lookups
from onnxtool.optimize.quantization.linear_layers import (
    LinearLayer,
    find_linear_layers,
    shared_initializer,
    unfuse_linear_layers,
)
from onnxtool.optimize.quantization.written import made_from
from onnxtool.optimize.report import FallbackLayer
from onnxtool.progress import counted

BLOCK = 32

# Fractions of the range of a 4-bit block: clipping its largest weight improves the other 31.
_CLIPS = (1.0, 0.92, 0.84, 0.76)
_SMALLEST = np.float32(1e-30)  # the scale of a block of zeros
# A channel that is almost always zero on calibration inputs may be larger on others.
_LEAST_IMPORTANCE = 0.05
_WEIGHTS_AT_A_TIME = 1 << 18  # they stay in the cache of a core from one candidate to the next


@dataclass(frozen=True)
class Grid:
    """The values of a weight in blocks: `(code - zero) * scale`, for codes below `2**bits`.

    Attributes:
        bits: 4 or 8.
        scale: float32 [N, C]; negative where the largest weight of a symmetric block is positive, which has the code 0.
        zero: uint8 [N, C], the code of zero; a symmetric block has the middle one.
    """

    bits: int
    scale: Floats
    zero: NDArray[np.uint8]


@dataclass(frozen=True)
class BlockGrids:
    """The grids of a model's weights, each found once, and the weights on them.

    Attributes:
        activations: returns rows of the input of a weight, float32 [T, K], by the name of the weight; without them, all
            channels count alike, and each weight is rounded to the nearest code.
    """

    activations: Mapping[str, Callable[[], Floats]] = field(default_factory=dict)
    _found: dict[tuple[str, int], Grid] = field(default_factory=dict)
    _packed: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    def grid_of(self, name: str, bits: int, read: Callable[[], Floats]) -> Grid:
        """Return the grid of the weight called `name`, which `read` reads, float32 [K, N]."""
        if (name, bits) not in self._found:
            rows = self.activations[name]() if name in self.activations else None
            importance = None if rows is None else np.square(rows).mean(axis=0)
            self._found[name, bits] = find_grid(read(), bits, importance)
        return self._found[name, bits]

    def pack(self, name: str, bits: int, read: Callable[[], Floats]) -> NDArray[np.uint8]:
        """Return the codes of the weight called `name`, as `pack_weight` packs them.

        With 4 bits, channels compensate for each other's errors. With 8, the nearest codes are close enough.
        """
        weight = read()
        grid = self.grid_of(name, bits, lambda: weight)
        if bits != 4 or name not in self.activations:
            return pack_weight(weight, grid)
        if name not in self._packed:
            self._packed[name] = _pack_together(weight, grid, damped_factors(self.activations[name]()))
        return self._packed[name]


def find_grid(weight: Floats, bits: int, importance: Floats | None = None) -> Grid:
    """Choose the grid of least error for each block of `weight`, float32 [K, N].

    With 4 bits, symmetric and asymmetric grids over several parts of the block's range are tried, and the scale of the
    best one is fitted by least squares. With 8 bits, the grid spans the range.

    Args:
        weight: float32 [K, N].
        bits: 4 or 8.
        importance: float32 [K], the weight of a squared error; None for ones.
    """
    rows, columns = weight.shape
    num_blocks = -(-rows // BLOCK)
    counts = np.ones(rows, np.float32) if importance is None else _floored(importance)
    counts = np.pad(counts, (0, num_blocks * BLOCK - rows)).reshape(num_blocks, BLOCK)
    scale, zero = np.empty((columns, num_blocks), np.float32), np.empty((columns, num_blocks), np.uint8)
    for part, blocks in _parts(weight):
        if bits == 4:
            scale[part], zero[part] = _search(blocks, counts)
        else:
            scale[part], zero[part] = _asymmetric(blocks, bits)
    return Grid(bits, scale, zero)


def pack_weight(weight: Floats, grid: Grid) -> NDArray[np.uint8]:
    """Round `weight`, float32 [K, N], to codes, two of 4 bits in a byte: uint8 [N, C, BLOCK * bits / 8]."""
    columns, num_blocks = grid.scale.shape
    packed = np.empty((columns, num_blocks, BLOCK * grid.bits // 8), np.uint8)
    for part, blocks in _parts(weight):
        codes = _codes(blocks, grid.scale[part], grid.zero[part], grid.bits)
        packed[part] = _pack(codes.astype(np.uint8), grid.bits)
    return packed


def _pack_together(weight: Floats, grid: Grid, factors: Sequence[Floats]) -> NDArray[np.uint8]:
    """Round `weight`, float32 [K, N], as `round_together` does, and pack it as `pack_weight` does."""
    columns, num_blocks = grid.scale.shape
    # Padding has the code of zero.
    codes = np.repeat(grid.zero, BLOCK, axis=1)

    def one(place: int, values: Floats) -> Floats:
        scale, zero = grid.scale[:, place // BLOCK], grid.zero[:, place // BLOCK]
        steps = np.clip(np.rint(values / scale) + zero, 0, 2**grid.bits - 1)
        codes[:, place] = steps
        rounded: Floats = (steps - zero) * scale
        return rounded

    round_together(weight, factors, one)
    return _pack(codes.reshape(columns, num_blocks, BLOCK), grid.bits)


def pack_zeros(grid: Grid) -> NDArray[np.uint8]:
    """Pack the zero points as the weights: uint8 [N, C * bits / 8], rounded up."""
    odd = grid.zero.shape[1] % 2 if grid.bits == 4 else 0
    return _pack(np.pad(grid.zero, ((0, 0), (0, odd))), grid.bits)


def _pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack two codes of 4 bits along the last axis into a byte, the first into its lower half."""
    packed: NDArray[np.uint8] = codes if bits == 8 else codes[..., 0::2] | np.left_shift(codes[..., 1::2], 4)
    return packed


def _parts(weight: Floats) -> Iterator[tuple[slice, Floats]]:
    """Yield groups of columns: their slice, and their blocks, float32 [n, C, BLOCK], padded with zeros."""
    rows, columns = weight.shape
    num_blocks = -(-rows // BLOCK)
    step = max(1, _WEIGHTS_AT_A_TIME // (num_blocks * BLOCK))
    for start in range(0, columns, step):
        part = slice(start, min(start + step, columns))
        padded = np.zeros((part.stop - start, num_blocks * BLOCK), np.float32)
        padded[:, :rows] = weight[:, part].T
        yield part, padded.reshape(-1, num_blocks, BLOCK)


def _floored(importance: Floats) -> Floats:
    average = max(float(importance.mean()), 1e-12)
    floored: Floats = np.maximum(importance / np.float32(average), np.float32(_LEAST_IMPORTANCE)).astype(np.float32)
    return floored


def _codes(blocks: Floats, scale: Floats, zero: NDArray[np.uint8], bits: int) -> Floats:
    codes: Floats = blocks * np.reciprocal(scale)[..., None]
    np.rint(codes, out=codes)
    codes += zero[..., None]
    return np.clip(codes, 0, 2**bits - 1, out=codes)


def _asymmetric(blocks: Floats, bits: int) -> tuple[Floats, NDArray[np.uint8]]:
    """Return the grid from the smallest to the largest weight of each block, zero among them."""
    low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
    scale = np.maximum((high - low) / (2**bits - 1), _SMALLEST).astype(np.float32)
    return scale, np.clip(np.rint(-low / scale), 0, 2**bits - 1).astype(np.uint8)


def _symmetric(blocks: Floats, bits: int) -> tuple[Floats, NDArray[np.uint8]]:
    """Return the grid around zero on which the largest weight of each block is at the longer end."""
    low, high = blocks.min(axis=-1), blocks.max(axis=-1)
    largest = np.where(high > -low, high, low)
    scale = -largest / np.float32(2 ** (bits - 1))
    scale = np.where(np.abs(scale) < _SMALLEST, _SMALLEST, scale).astype(np.float32)
    return scale, np.full(scale.shape, 2 ** (bits - 1), np.uint8)


def _search(blocks: Floats, counts: Floats) -> tuple[Floats, NDArray[np.uint8]]:
    best_loss = np.full(blocks.shape[:2], np.inf, np.float32)
    best_scale, best_zero = np.empty_like(best_loss), np.empty(blocks.shape[:2], np.uint8)
    for whole, zero in (_asymmetric(blocks, 4), _symmetric(blocks, 4)):
        for clip in _CLIPS:
            scale = whole * np.float32(clip)
            lost = _codes(blocks, scale, zero, 4)
            lost -= zero[..., None]
            lost *= scale[..., None]
            lost -= blocks
            loss = np.einsum("ncb,ncb,cb->nc", lost, lost, counts)
            better = loss < best_loss
            for kept, candidate in ((best_loss, loss), (best_scale, scale), (best_zero, zero)):
                np.copyto(kept, candidate, where=better)
    return _least_squares(blocks, best_scale, best_zero, counts), best_zero


def _least_squares(blocks: Floats, scale: Floats, zero: NDArray[np.uint8], counts: Floats) -> Floats:
    """Return the scale with which the codes of `scale` are closest to the weights, by least squares."""
    steps = _codes(blocks, scale, zero, 4)
    steps -= zero[..., None]
    along = np.einsum("ncb,ncb,cb->nc", blocks, steps, counts)
    square = np.einsum("ncb,ncb,cb->nc", steps, steps, counts)
    fitted = np.where(square > 0, along / np.maximum(square, _SMALLEST), scale)
    return np.where(np.abs(fitted) < _SMALLEST, scale, fitted).astype(np.float32)


_WITH_BIAS = frozenset({"cpu"})  # providers on which the operator adds the bias
_WITH_LEVELS = frozenset({"cpu"})  # providers that read accuracy_level
_BITS = {"int4": 4, "int8": 8}
_ACCURACY_LEVELS = {"float32": 0, "int8": 4}


@dataclass(frozen=True)
class BlockForm:
    """The form of a layer in blocks, and of its products.

    Attributes:
        bits: 4 or 8.
        activations: `int8`, rounded one block at a time and multiplied in integers, which takes half the time of
            float32 for a single token, and adds a hundredth of the weights' error unless one channel is much larger
            than the others in its block; or `float32`.
        cost: the time of a weight for a single token, compared with the first of _FORMS.
    """

    bits: int
    activations: str = "int8"
    cost: float = 1.0

    @property
    def precision(self) -> str:
        """The name of its precision."""
        return f"int{self.bits}"


# Cheapest first.
_FORMS = (BlockForm(4), BlockForm(8, cost=1.7), BlockForm(4, "float32", cost=2.3))


def quantize_int4(
    fallbacks: Mapping[str, str | BlockForm] | None = None, grids: BlockGrids | None = None, provider: str = "cpu"
) -> Pass:
    """Return the pass that quantizes the weights of all linear layers to 4 bits, except for `fallbacks`.

    Args:
        fallbacks: `int8` for 8 bits, `float32`, or another form, by the name of a weight.
        grids: the grids of one model, and the importances to find others; None for a pass for any model.
        provider: the execution provider of the result.
    """
    forms = {name: BlockForm(_BITS[form]) if form in _BITS else form for name, form in (fallbacks or {}).items()}

    def apply(model: ir.Model, _context: Context) -> Outcome:
        return _apply(model, forms, BlockGrids() if grids is None else grids, provider)

    return Pass("quantize_int4", apply)


def _apply(model: ir.Model, forms: Mapping[str, str | BlockForm], grids: BlockGrids, provider: str) -> Outcome:
    """Replace `Add(MatMul(x, W), b)` by `MatMulNBits(x, W in blocks, scales, zero points, , b)`.

    A packed `Attention` is unfused first; a weight that is also an embedding is copied.
    """
    exact = frozenset(name for name, form in forms.items() if isinstance(form, str))
    reasons = unfuse_linear_layers(model, exact, find_shapes(model))
    layers, refused = find_linear_layers(model)
    wanted = [layer for layer in layers if layer.name not in exact]
    for layer in wanted:
        form = forms.get(layer.name, _FORMS[0])
        if isinstance(form, BlockForm):
            replace_and_erase(layer.result, write_blocks(layer, form, grids, Writer(layer.node), provider))
    drop_unused(layer.weight for layer in wanted)
    return Outcome(model, len(wanted), refusals([*reasons, *refused]))


def write_blocks(
    layer: LinearLayer, form: BlockForm, grids: BlockGrids, writer: Writer, provider: str = "cpu"
) -> ir.Value:
    """Write a layer whose weight is in blocks, and return its result."""
    rows, columns = layer.size
    parts = lazy_parts(layer.stored_name, layer.size, form.bits, grids, layer.weight_reader())
    inputs: list[ir.Value | None] = [
        layer.value,
        *(
            shared_initializer(tensor, f"{layer.stored_name}_{form.precision}_{part}", writer)
            for part, tensor in parts.items()
        ),
    ]
    inside = layer.bias is not None and provider in _WITH_BIAS
    if inside:
        inputs += [None, layer.bias]  # no row order
    attributes = {"K": rows, "N": columns, "bits": form.bits, "block_size": BLOCK}
    if provider in _WITH_LEVELS:
        attributes["accuracy_level"] = _ACCURACY_LEVELS[form.activations]
    result = writer.node("MatMulNBits", inputs, attributes, domain=MICROSOFT, like=layer.result)
    if layer.bias is None or inside:
        return result
    return writer.node("Add", [result, layer.bias], like=layer.result)


def lazy_parts(
    name: str, size: tuple[int, int], bits: int, grids: BlockGrids, read: Callable[[], Floats]
) -> dict[str, ir.TensorProtocol]:
    """Return weight, scales and zero points in the operator's layout, computed when their bytes are read.

    Args:
        name: the key of the weight in `grids`.
        size: K and N.
        bits: 4 or 8.
        grids: of the model.
        read: reads the weight, float32 [K, N].
    """

    def weight() -> ir.TensorProtocol:
        return ir.tensor(grids.pack(name, bits, read))

    def scale() -> ir.TensorProtocol:
        return ir.tensor(grids.grid_of(name, bits, read).scale)

    def zero() -> ir.TensorProtocol:
        return ir.tensor(pack_zeros(grids.grid_of(name, bits, read)))

    rows, columns = size
    num_blocks = -(-rows // BLOCK)
    return {
        "blocks": made_from(
            ir.LazyTensor(weight, ir.DataType.UINT8, ir.Shape([columns, num_blocks, BLOCK * bits // 8])),
            lambda: read().T,
        ),
        "scale": ir.LazyTensor(scale, ir.DataType.FLOAT, ir.Shape([columns, num_blocks])),
        "zero": ir.LazyTensor(zero, ir.DataType.UINT8, ir.Shape([columns, -(-num_blocks * bits // 8)])),
    }


def int4_embeddings(grids: BlockGrids | None = None) -> Pass:
    """Return the pass that quantizes embeddings to 4-bit blocks.

    Args:
        grids: the grids of one model, and the importances to find others; None for a pass for any model.
    """
    return Pass(
        "int4_embeddings", lambda model, _context: _quantize_tables(model, BlockGrids() if grids is None else grids)
    )


def _quantize_tables(model: ir.Model, grids: BlockGrids) -> Outcome:
    """Replace `Gather(table, ids)` by `GatherBlockQuantized(table in blocks, ids, scales, zero points)`.

    A table tied to a quantized head shares its blocks, of 4 or 8 bits. `EmbedLayerNormalization` is unfused if it has
    position ids.
    """
    written: dict[ir.Value, _Blocks] = {}

    def rewrite(node: ir.Node, table: ir.Value) -> str:
        if tensor_of(table).shape.numpy()[1] % 2:
            return "a row of an odd width fills no whole bytes"
        if table not in written:
            written[table] = _shared_blocks(table, model.graph, node) or _own_blocks(table, grids, node)
        _write_lookup(node, written[table])
        return ""

    return rewrite_lookups(model, rewrite)


@dataclass(frozen=True)
class _Blocks:
    """A table in the operator's layout: uint8 [V, H * bits / 8], float32 [V, C], uint8 [V, C * bits / 8]."""

    bits: int
    data: ir.Value
    scale: ir.Value
    zero: ir.Value


def _write_lookup(node: ir.Node, blocks: _Blocks) -> None:
    inputs = [blocks.data, node.inputs[1], blocks.scale, blocks.zero]
    attributes = {"bits": blocks.bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    writer = Writer(node)
    rows = writer.node("GatherBlockQuantized", inputs, attributes, domain=MICROSOFT, like=node.outputs[0])
    replace_and_erase(node.outputs[0], rows)


def _shared_blocks(table: ir.Value, graph: ir.Graph, node: ir.Node) -> _Blocks | None:
    """Return the blocks of a head that reads the same table, as rows; None if there is none.

    The head's weight has an extra axis for blocks. Its bytes are the same unless the last block is padded.
    """
    num_rows, width = (int(size) for size in tensor_of(table).shape.numpy())
    # See `stored_name`: the rows of a square table are what is stored of its transpose.
    name = f"{table.name}_transposed" if num_rows == width else table.name
    for bits in (4, 8):
        held = [graph.initializers.get(f"{name}_int{bits}_{part}") for part in ("blocks", "scale", "zero")]
        data, scale, zero = held
        shape = [num_rows, width // BLOCK, BLOCK * bits // 8]
        if data is None or scale is None or zero is None:
            continue
        # Initializers that the file already had under these names are not made on saving; padding adds a block.
        if not is_made_on_saving(tensor_of(data)) or list(tensor_of(data).shape.numpy()) != shape:
            continue
        writer = Writer(node)
        sizes = writer.constant(np.array([num_rows, width * bits // 8]), f"{table.name}_rows_shape")
        rows = writer.node("Reshape", [data, sizes])
        rows.type, rows.shape = ir.TensorType(ir.DataType.UINT8), ir.Shape([num_rows, width * bits // 8])
        return _Blocks(bits, rows, scale, zero)
    return None


def _own_blocks(table: ir.Value, grids: BlockGrids, node: ir.Node) -> _Blocks:
    tensor, name = tensor_of(table), f"{table.name}_rows"
    num_rows, width = (int(size) for size in tensor.shape.numpy())

    def read() -> Floats:
        array: Floats = tensor.numpy().T
        return array

    def data() -> ir.TensorProtocol:
        array = read()
        packed = pack_weight(array, grids.grid_of(name, 4, lambda: array)).reshape(num_rows, -1)
        return ir.tensor(np.ascontiguousarray(packed[:, : width // 2]))  # without padding in the last block

    parts = lazy_parts(name, (width, num_rows), 4, grids, read)
    rows = ir.LazyTensor(data, ir.DataType.UINT8, ir.Shape([num_rows, width // 2]))
    parts["blocks"] = made_from(rows, tensor.numpy)
    writer = Writer(node)
    return _Blocks(4, *(writer.initializer(part, f"{name}_int4_{suffix}") for suffix, part in parts.items()))


def to_int4(
    model: ir.Model,
    feeds: Sequence[Feeds],
    max_error: float | None = None,
    *,
    provider: str = "cpu",
    tables: str = "int4",
    setting: QuantizationSetting = DEFAULT_SETTING,
) -> Quantized:
    """Quantize the weights of linear layers of a float32 model to 4 bits in blocks, within `max_error`.

    Activations and sums stay floating point. Weight errors are weighted by the magnitude of their channel on `feeds`,
    and the error of one channel is compensated by others. Layers get 8 bits, those with the largest error per weight
    first, until the error on `feeds` is below `max_error` with a margin; if 8 bits in all layers are not enough, layers
    stay in float32, in the same order.

    Args:
        model: an optimized float32 model; it is not changed.
        feeds: calibration inputs, arrays by input name, on which the error is measured.
        max_error: see `quantize_within`.
        provider: the execution provider of the result.
        tables: the lowest precision of embeddings, `int4` or `int8`.
        setting: see `quantize_within`.

    Raises:
        PassError: there is nothing to quantize, no feeds, or no layer can be quantized within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """

    def choose(layers: Sequence[LinearLayer], recording: Recording) -> QuantizationConfig:
        grids = BlockGrids(_activations(layers, recording))
        for layer in counted(layers, "choosing scales of layer"):
            grids.grid_of(layer.stored_name, 4, layer.weight_reader())

        def level(form: BlockForm) -> Level:
            def write(layer: LinearLayer, writer: Writer) -> ir.Value:
                return write_blocks(layer, form, grids, writer, provider)

            activations = form.activations if provider in _WITH_LEVELS else ""
            return Level(form.precision, write, form.cost, activations)

        def convert(fallbacks: Sequence[FallbackLayer]) -> Pass:
            forms = {layer.name: _form_of(layer) for layer in fallbacks}
            return quantize_int4(forms, grids, provider)

        embeddings = (("int4", int4_embeddings(grids)), ("int8", int8_embeddings))
        is_precise = setting.tokens is not None and provider in _WITH_LEVELS
        levels = tuple(map(level, _FORMS if is_precise else _FORMS[:2]))
        return QuantizationConfig("int4", lambda: levels, convert, embeddings[tables == "int8" :])

    return quantize_within(model, feeds, max_error, choose, setting)


def _form_of(layer: FallbackLayer) -> str | BlockForm:
    if layer.precision not in _BITS:
        return layer.precision
    return BlockForm(_BITS[layer.precision], layer.activations or "int8")


def _activations(layers: Sequence[LinearLayer], recording: Recording) -> Mapping[str, Callable[[], Floats]]:
    """Return functions that give rows of the input of each layer, float32 [T, K], by weight name."""

    def rows(names: Sequence[str]) -> Floats:
        return np.concatenate(Activations.joined([recording.activations[name] for name in names]).rows)

    return {
        layer.stored_name: partial(rows, recording.inputs[layer.name])
        for layer in layers
        if any(recording.activations[name].rows for name in recording.inputs[layer.name])
    }
