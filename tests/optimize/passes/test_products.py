"""Products: Einsums, products with transposed weights, linear layers on matrices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtool.model_file.weights import load_model, write_inline
from onnxtool.optimize.passes.attention import attention
from onnxtool.optimize.passes.products import einsum_products, matmul_add, transposed_weights
from tests.optimize.passes.builders import (
    Arrays,
    Row,
    apply,
    as_type,
    assert_same_numbers,
    build,
    count,
    exported,
    normal,
    of_text,
    operators,
    ragged_feeds,
)
from tests.workshop import WORDS, Workshop

SIZES = {"b": 2, "i": 3, "j": 4, "h": 8, "n": 2, "d": 5}
MOVING = "bij"  # axes of inputs that are dynamic


def einsum(equation: str, *, weight: bool = False) -> ir.Model:
    """Return a model of one Einsum, of two inputs or of one and a weight."""
    terms, result = equation.replace(" ", "").split("->")
    names = dict(zip("xy", terms.split(","), strict=False))
    given = {name: axes for name, axes in names.items() if not (weight and name == "y")}
    inputs = ", ".join(f"float[{_axes(axes)}] {name}" for name, axes in given.items())
    text = f'g ({inputs}) => (float[{_axes(result)}] z) {{ z = Einsum <equation="{equation}"> ({", ".join(names)}) }}'
    weights = {"y": normal(*(SIZES[axis] for axis in names["y"]), seed=2)} if weight else {}
    return build(text, weights)


def _axes(letters: str) -> str:
    return ", ".join(letter.upper() if letter in MOVING else str(SIZES[letter]) for letter in letters)


def feeds(equation: str, *, weight: bool = False) -> Arrays:
    """Return numbers for the inputs, whose axes have the sizes of their letters."""
    terms = equation.replace(" ", "").split("->")[0].split(",")
    return {
        name: normal(*(SIZES[axis] for axis in axes), seed=seed)
        for seed, (name, axes) in enumerate(zip("xy", terms, strict=False))
        if not (weight and name == "y")
    }


PRODUCTS = {
    "as it is": ("bih,bhj->bij", False, ["MatMul"]),
    "scores": ("ibnd,jbnd->bnij", False, ["Transpose", "Transpose", "MatMul"]),
    "values": ("bnij,jbnd->ibnd", False, ["Transpose", "MatMul", "Transpose"]),
    "a batch in another order": ("bnid, nbjd -> nbji", False, ["Transpose", "MatMul"]),
    "rows of the second first": ("bjnd,bind->bnij", False, ["Transpose", "Transpose", "MatMul"]),
    "a layer to heads": ("ibh,hnd->ibnd", True, ["MatMul", "Reshape"]),
    "a layer from heads": ("ibnd,hnd->ibh", True, ["Reshape", "MatMul"]),
    "a layer from heads in another order": ("idbn,nhd->bhi", True, ["Transpose", "Reshape", "MatMul", "Transpose"]),
    "a matrix": ("bih,hd->bid", True, ["MatMul"]),
}
WEIGHT = {"w": normal(4, 8)}
SIGNATURE = "g (float[B, S, 8] x) => (float[B, S, 4] y)"
TRANSPOSED = "t = Transpose <perm=[1, 0]> (w) y = MatMul(x, t)"
TIED = "g (int64[B, S] ids) => (float[B, S, 4] y) { x = Gather(w, ids) t = Transpose(w) y = MatMul(x, t) }"
# A branch keeps its own transposition.
BRANCHES = (
    "then_branch = a () => (float[B, S, 4] p) { u = Transpose(w) p = MatMul(x, u) }, "
    "else_branch = e () => (float[B, S, 4] q) { q = Identity(y) }"
)
LAYER = {"w": normal(8, 4), "b": normal(4)}
BIASED = "h = MatMul(x, w) y = Add(h, b)"
MATRIX = "g (float[B, 8] x) => (float[B, 4] y)"
READ = "the output of the MatMul is read elsewhere"
ROWS = (
    Row(
        einsum_products,
        fires={name: partial(einsum, equation, weight=weight) for name, (equation, weight, _) in PRODUCTS.items()},
        after={name: " ".join(left) for name, (_, _, left) in PRODUCTS.items()},
        atol=None,
        stays={
            # A sum of one side, a diagonal, several columns of what is computed, a weight with a batch.
            **{
                equation: (partial(einsum, equation, weight=weight), "")
                for equation, weight in (
                    ("bnid,bnid->bnd", False),
                    ("bih,bhj->ij", False),
                    ("bih,jd->bij", False),
                    ("bii,bij->bij", False),
                    ("bih,bhnd->bind", False),
                    ("bih->bhi", False),
                    ("bid,bdh->bih", True),
                    ("bih,bj->bihj", False),
                )
            },
            "an ellipsis": (
                of_text(
                    "g (float[B, I, 8] x, float[B, 8, J] y) => (float z) "
                    '{ z = Einsum <equation="...ih,...hj->...ij"> (x, y) }'
                ),
                "",
            ),
            # ONNX's letters have one size each, and onnxruntime takes 1 for any: MatMul would not for the summed ones.
            "an axis of one that a letter stretches": (
                of_text(
                    "g (float[B, I, 8] x, float[B, 1, J] y) => (float z) "
                    '{ z = Einsum <equation="bih,bhj->bij"> (x, y) }'
                ),
                "",
            ),
        },
    ),
    Row(
        transposed_weights,
        fires={"own": of_text(f"{SIGNATURE} {{ {TRANSPOSED} }}", WEIGHT), "tied": of_text(TIED, WEIGHT)},
        after={"own": "MatMul", "tied": "Gather FusedMatMul"},
        atol=None,
        stays={
            "not transposed": (
                of_text(
                    f"g (float[B, 4, 8] x) => (float[B, 4, 8] y) {{ {TRANSPOSED.replace('[1, 0]', '[0, 1]')} }}",
                    {"w": normal(8, 8)},
                ),
                "",
            ),
            "from the left": (
                of_text(
                    "g (float[S, 4] x) => (float[S, 8] y) { t = Transpose(w) z = MatMul(t, x) y = Identity(z) }", WEIGHT
                ),
                "",
            ),
            "no weight": (
                of_text(
                    "g (float[B, S, 8] x, float[4, 8] v) => (float[B, S, 4] y) { t = Transpose(v) y = MatMul(x, t) }",
                    WEIGHT,
                ),
                "",
            ),
            "no product": (of_text(f"{SIGNATURE} {{ t = Transpose(w) y = Add(x, t) }}", WEIGHT), ""),
            "three axes": (
                of_text(
                    "g (float[2, 3, 2] x) => (float y) { t = Transpose <perm=[1, 2, 0]> (w) y = MatMul(x, t) }",
                    {"w": normal(2, 4, 8)},
                ),
                "",
            ),
            # FusedMatMul takes two axes or more.
            "a vector and a tied weight": (
                of_text(
                    "g (float[8] x) => (float[4] y, float[8] z) { t = Transpose(w) y = MatMul(x, t) z = MatMul(y, w) }",
                    WEIGHT,
                ),
                "two axes or more",
            ),
            "doubles": (
                of_text(f"{SIGNATURE} {{ {TRANSPOSED} }}".replace("float", "double"), as_type(np.float64, WEIGHT)),
                "neither float32 nor float16",
            ),
        },
    ),
    Row(
        matmul_add,
        fires={
            "bias": of_text(f"{MATRIX} {{ {BIASED} }}", LAYER),
            "bias first": of_text(f"{MATRIX} {{ h = MatMul(x, w) y = Add(b, h) }}", LAYER),
        },
        after="Gemm",
        stays={
            # Gemm takes nothing but matrices.
            **{
                f"[{shape}]": (of_text(f"g (float[{shape}] x) => (float y) {{ {BIASED} }}", LAYER), "")
                for shape in ("B, S, 8", "8")
            },
            "an unknown rank": (
                of_text(f"g (float[B, 8] z) => (float y) {{ x = com.microsoft.Unknown(z) {BIASED} }}", LAYER),
                "the rank of the input is not known",
            ),
            **{
                f"a bias {shape}": (of_text(f"{MATRIX} {{ {BIASED} }}", {**LAYER, "b": normal(*shape)}), note)
                for shape, note in (((1,), "not as long"), ((3, 4), ""), ((), ""))
            },
            "the product is read": (
                of_text(f"{MATRIX} {{ h = MatMul(x, w) z = Add(h, b) y = Mul(z, h) }}", LAYER),
                READ,
            ),
            "the product is an output": (
                of_text(f"g (float[B, 8] x) => (float[B, 4] y, float[B, 4] h) {{ {BIASED} }}", LAYER),
                READ,
            ),
            "an input": (
                of_text(f"g (float[B, 8] x, float[8, 4] w) => (float[B, 4] y) {{ {BIASED} }}", {"b": LAYER["b"]}),
                "",
            ),
            # Gemm takes integers, and has no fast kernel for them.
            "integers": (
                of_text(f"{MATRIX} {{ {BIASED} }}".replace("float", "int32"), as_type(np.int32, LAYER)),
                "neither float32 nor float16",
            ),
        },
    ),
)


@pytest.mark.parametrize("product", PRODUCTS)
def test_an_einsum_that_is_a_product_is_a_matmul(product: str) -> None:
    """Against the Einsum of onnxruntime."""
    equation, weight, _ = PRODUCTS[product]
    assert_same_numbers(einsum_products, einsum(equation, weight=weight), feeds(equation, weight=weight))


def test_an_attention_that_is_written_in_einsums_is_fused() -> None:
    """With positions that are a product of their own, and axes in the order of XLNet: S, B, H, D."""
    body = """
        q0 = Einsum <equation="ibh,hnd->ibnd"> (x, wq) k = Einsum <equation="ibh,hnd->ibnd"> (x, wk)
        v = Einsum <equation="ibh,hnd->ibnd"> (x, wv) q1 = Add(q0, bq) q2 = Add(q0, br)
        content = Einsum <equation="ibnd,jbnd->bnij"> (q1, k) places = Einsum <equation="ibnd,jbnd->bnij"> (q2, r)
        sum = Add(content, places) masked = Mul(sum, fifth) p = Softmax <axis=3> (masked)
        c = Einsum <equation="bnij,jbnd->ibnd"> (p, v) y = Einsum <equation="ibnd,hnd->ibh"> (c, wo)
    """
    weights = {f"w{name}": normal(8, 2, 5, seed=seed) for seed, name in enumerate("qkvo")}
    weights |= {"bq": normal(2, 5, seed=5), "br": normal(2, 5, seed=6), "fifth": normal(1, seed=7)}
    model = build(f"g (float[S, B, 8] x, float[S, B, 2, 5] r) => (float[S, B, 8] y) {{ {body} }}", weights)
    given = {"x": normal(7, 3, 8, seed=8), "r": normal(7, 3, 2, 5, seed=9)}
    assert_same_numbers(einsum_products, model, given, atol=1e-4)
    assert_same_numbers(attention, model, given, atol=1e-4)  # sums of eight numbers around 20
    assert "MultiHeadAttention" in operators(model)
    assert not {"Einsum", "Softmax"} & set(operators(model))


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "a mask of tokens"])
def test_an_attention_of_keras_is_fused(masked: bool) -> None:
    """MultiHeadAttention as tf2onnx writes it: B, S, H, D, with the scores as keys by queries."""
    padding = "m = Cast <to=1> (mask) n = Unsqueeze(m, outer) o = Sub(one, n) a = Mul(o, minus) s = Add(s0, a)"
    body = f"""
        q0 = Einsum <equation="abc,cde->abde"> (x, wq) q1 = Add(q0, bq) q = Mul(q1, fifth)
        k0 = Einsum <equation="abc,cde->abde"> (x, wk) k = Add(k0, bk)
        v0 = Einsum <equation="abc,cde->abde"> (x, wv) v = Add(v0, bv)
        s0 = Einsum <equation="aecd,abcd->acbe"> (k, q) {padding if masked else "s = Identity(s0)"}
        p = Softmax <axis=-1> (s) c = Einsum <equation="acbe,aecd->abcd"> (p, v)
        y0 = Einsum <equation="abcd,cde->abe"> (c, wo) y = Add(y0, bo)
    """
    weights = {f"w{name}": normal(8, 2, 5, seed=seed) for seed, name in enumerate("qkv")}
    weights |= {f"b{name}": normal(2, 5, seed=seed) for seed, name in enumerate("qkv", 5)}
    weights |= {"wo": normal(2, 5, 8, seed=3), "bo": normal(8, seed=4), "fifth": np.array(0.2, np.float32)}
    if masked:
        weights |= {"one": np.array(1, np.float32), "minus": np.array(-1e9, np.float32), "outer": np.array([1, 2])}
    inputs = "float[B, S, 8] x" + ", int64[B, S] mask" * masked
    model = build(f"g ({inputs}) => (float[B, S, 8] y) {{ {body} }}", weights)
    given: dict[str, Any] = {"x": normal(3, 7, 8, seed=8)}
    if masked:
        given["mask"] = (np.arange(7) < np.array([7, 4, 0])[:, None]).astype(np.int64)
    assert_same_numbers(einsum_products, model, given, atol=1e-4)
    assert_same_numbers(attention, model, given, atol=1e-4)  # sums of eight numbers around 20
    assert "MultiHeadAttention" in operators(model)
    assert not {"Einsum", "Softmax"} & set(operators(model))


def test_a_weight_of_its_own_is_stored_transposed() -> None:
    """And the original is dropped."""
    model = build(f"{SIGNATURE} {{ {TRANSPOSED} }}", WEIGHT)
    assert_same_numbers(transposed_weights, model)
    assert operators(model) == ["MatMul"]
    assert list(model.graph.initializers) == ["w_transposed"]


def test_two_products_share_the_transposed_weight() -> None:
    """It is made once."""
    body = "t = Transpose(w) p = MatMul(x, t) q = MatMul(x, t) y = Add(p, q)"
    model = build(f"{SIGNATURE} {{ {body} }}", WEIGHT)
    assert apply(transposed_weights, model).num_changes == 2
    assert operators(model) == ["MatMul", "MatMul", "Add"]
    assert list(model.graph.initializers) == ["w_transposed"]


def test_a_tied_weight_stays_one_tensor() -> None:
    """The product transposes while it multiplies."""
    model = build(TIED, WEIGHT)
    assert_same_numbers(transposed_weights, model, {"ids": np.array([[0, 3, 1]])})
    assert operators(model) == ["Gather", "FusedMatMul"]
    assert list(model.graph.initializers) == ["w"]


def test_a_transposed_weight_that_is_an_output_keeps_the_weight() -> None:
    """It has to be there, and no second copy of the weight is stored."""
    model = build(f"g (float[B, S, 8] x) => (float[B, S, 4] y, float[8, 4] t) {{ {TRANSPOSED} }}", WEIGHT)
    assert_same_numbers(transposed_weights, model)
    assert sorted(operators(model)) == ["FusedMatMul", "Transpose"]


def test_a_weight_that_a_branch_reads_stays_one_tensor() -> None:
    """The branch keeps its own transposition."""
    inputs = "float[B, S, 8] x, bool c"
    text = f"g ({inputs}) => (float[B, S, 4] y, float[B, S, 4] z) {{ {TRANSPOSED} z = If <{BRANCHES}> (c) }}"
    model = build(text, WEIGHT)
    assert_same_numbers(transposed_weights, model, {"x": normal(2, 3, 8), "c": np.array(True)})
    assert operators(model) == ["FusedMatMul", "If"]
    assert list(model.graph.initializers) == ["w"]


def test_the_bytes_are_not_read_before_they_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large weight stays where it lies on disk until then."""
    path = tmp_path / "large.onnx"
    text = "g (float[B, 256] x) => (float[B, 512] y) { t = Transpose(w) y = MatMul(x, t) }"
    write_inline(build(text, {"w": normal(512, 256)}), path)
    model = load_model(path)

    def refuse(_tensor: ir.ExternalTensor) -> None:
        raise AssertionError("a pass reads a weight")

    with monkeypatch.context() as patch:
        patch.setattr(ir.ExternalTensor, "numpy", refuse)
        assert apply(transposed_weights, model).num_changes == 1
    write_inline(model, tmp_path / "after.onnx")
    feeds = {"x": normal(3, 256)}
    before, after = (
        ort.InferenceSession(one, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for one in (path, tmp_path / "after.onnx")
    )
    np.testing.assert_allclose(after, before, atol=1e-4, rtol=0)  # sums of 256 products in another order


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_the_tied_embedding_of_an_export_stays_one_tensor(workshop: Workshop, exporter: str) -> None:
    """Its output layer reads the table that its lookup reads."""
    model = load_model(workshop.exported("tiny-splade", exporter=exporter, head="splade"))
    num_transposes = count(model, "Transpose")
    assert_same_numbers(transposed_weights, model, ragged_feeds(), atol=1e-4)  # logits of about 10
    assert count(model, "FusedMatMul", "com.microsoft") == 1
    assert count(model, "Transpose") == num_transposes - 1
    large = [value for value in model.graph.initializers.values() if value.shape is not None and WORDS in value.shape]
    assert len([value for value in large if len(value.shape or ()) == 2]) == 1


def test_a_linear_layer_of_an_export_on_three_axes_is_left_alone() -> None:
    """PyTorch exports MatMul and Add where Gemm cannot be."""
    import torch

    model = exported(torch.nn.Linear(8, 4), 2, 3, 8, dynamo=False)
    assert operators(model) == ["MatMul", "Add"]
    assert apply(matmul_add, model).num_changes == 0


def test_a_linear_layer_of_an_export_on_two_axes_fires() -> None:
    """A product with a weight and the addition of a vector, as in a hand-written module."""
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8, 4))
            self.bias = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + self.bias

    model = exported(Layer(), 2, 8, dynamo=False)
    assert_same_numbers(matmul_add, model)
    assert operators(model) == ["Gemm"]
