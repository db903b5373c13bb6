"""Own translations of operators, PyTorch's and a library's: they run, and what is wrong with them is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxscript import opset18, opset20, script
from torch._dynamo.exc import BackendCompilerFailed

from onnxtool.errors import CompilationError, OptionError
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from tests.torch_backend.oracle import require_same

aten, mine = torch.ops.aten, torch.ops.onnxtool_tests


@torch.library.custom_op("onnxtool_tests::wave", mutates_args=())  # type: ignore[untyped-decorator]
def wave(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@torch.library.custom_op("onnxtool_tests::parts", mutates_args=())  # type: ignore[untyped-decorator]
def parts(x: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x + offset, (x > 0).sum(0)


wave.register_fake(torch.empty_like)
parts.register_fake(lambda x, _offset: (torch.empty_like(x), x.new_empty(x.shape[1:], dtype=torch.int64)))
# The threefold of the derivative: whoever differentiates the translation instead gets other numbers.
wave.register_autograd(
    lambda context, gradient: 3 * gradient * context.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@script()  # type: ignore[untyped-decorator]
def gelu(x, approximate: str = "none"):  # type: ignore[no-untyped-def]
    return opset20.Gelu(x, approximate=approximate)


def parts_by_onnx(x: Any, offset: int) -> Any:
    positive = opset18.Cast(opset18.Greater(x, opset18.CastLike(0.0, x)), to=7)
    return opset18.Add(x, opset18.CastLike(offset, x)), opset18.ReduceSum(positive, [0], keepdims=0)


def compiled(function: Callable[..., Any], translations: Any, **options: Any) -> Callable[..., Any]:
    backend = OrtBackend(OrtBackendOptions(translations=translations, **options))
    return torch.compile(function, backend=backend)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")  # the exporter's remarks about itself
@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"converter": "export"}])
def test_operators_of_pytorch_and_of_a_library_run_as_translated(options: dict[str, Any]) -> None:
    """Also next to operators in an older opset, and the gradient is the operator's own."""
    calls = []

    def sum_of_product(x: Any, left: Any, right: Any, value: int = 1) -> Any:
        calls.append(value)
        return opset18.Add(x, opset18.Mul(left, right))

    translations = {
        aten.addcmul.default: sum_of_product,  # PyTorch would decompose it
        aten.gelu.default: (lambda x, approximate="none": opset20.Gelu(x, approximate=approximate)),
        mine.wave.default: opset18.Sin,
    }
    dynamic = options.pop("dynamic", None)
    backend = require_same(
        lambda x: torch.addcmul(x, mine.wave(x), torch.nn.functional.gelu(x, approximate="tanh")).softmax(-1),
        torch.randn(4, 3, requires_grad=True),
        options=OrtBackendOptions(translations=translations, assert_close_to_baseline=True, **options),
        dynamic=dynamic,
    )
    assert not [node for graph in backend.explain().graphs for node in graph.eager]
    assert calls


def test_functions_with_script_need_no_annotations_and_may_return_several_results(tmp_path: Path) -> None:
    """Their bodies may have another opset than other functions; a cache of translated graphs is no obstacle."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.nn.functional.gelu(x) * x.var(0), *mine.parts(x.detach(), 3)

    options = OrtBackendOptions(
        translations={aten.gelu.default: gelu, mine.parts.default: parts_by_onnx}, cache_folder=tmp_path
    )
    require_same(function, torch.randn(4, 3), options=options)


def test_equal_graphs_with_other_translations_share_nothing() -> None:
    """Sessions of equal graphs are shared otherwise."""
    x, results = torch.randn(5), []
    for function in (opset18.Sin, opset18.Cos):
        torch._dynamo.reset()
        results.append(compiled(lambda x: mine.wave(x), {mine.wave.default: function})(x))
    torch.testing.assert_close(results, [x.sin(), x.cos()])


def test_an_operator_without_a_gradient_is_named() -> None:
    """It has none in eager PyTorch either."""
    with pytest.raises(BackendCompilerFailed, match=r"backward through onnxtool_tests.parts.default"):
        compiled(lambda x: mine.parts(x, 1)[0], {mine.parts.default: parts_by_onnx})(torch.rand(2, requires_grad=True))


def test_other_numbers_are_found_where_that_is_asked_for() -> None:
    """With the operator whose translation may be the cause."""
    call = compiled(lambda x: mine.wave(x), {mine.wave.default: opset18.Cos}, assert_close_to_baseline=True)
    with pytest.raises(CompilationError, match=r"(?s)differs from PyTorch's.*the translation of onnxtool_tests.wave"):
        call(torch.rand(3))


@pytest.mark.parametrize(
    ("translation", "reason"),
    [
        (lambda x, _y: opset18.Sin(x), "missing 1 required positional argument"),
        (lambda x: None, "it returned NoneType, and the operator returns Tensor"),
        (lambda x: (opset18.Sin(x), x), "it returned SymbolicTensor, SymbolicTensor"),
        (lambda x: opset18.Cast(x, to=7), r"its translation gives tensor\(int64\)"),
        (lambda x: opset18.ReduceSum(x), r"the shape \[1, 1\] instead of"),
        (lambda x: opset18.Transpose(x, perm=[1, 0]), r"the shape \[3, 4\] instead of \[4, 3\]"),
        (lambda x: opset20.Gelu(opset18.Cast(x, to=11)), "has no kernel for its types"),
        (lambda x: x.sin(), "AttributeError"),
    ],
)
def test_what_is_no_translation_of_the_operator_is_refused_by_name(translation: Any, reason: str) -> None:
    """PyTorch would run it otherwise, or wrong numbers would be read."""
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(lambda x: mine.wave(x) * 2, {mine.wave.default: translation})(torch.rand(4, 3))
    assert re.search(f"the own translation of onnxtool_tests.wave.default fails: .*{reason}", str(caught.value))


@pytest.mark.parametrize(
    ("translations", "reason"),
    [
        ([gelu], "is not a Mapping"),
        ({aten.gelu: gelu}, "'aten.gelu'.* is not an overload"),
        ({"aten::gelu": gelu}, "'aten::gelu' is not an overload"),
        ({torch.nn.functional.gelu: gelu}, "is not an overload"),
        ({aten.linear.default: gelu}, "aten.linear.default is decomposed by PyTorch"),
        ({aten.relu_.default: gelu}, "modifies its arguments"),
        ({aten.view.default: gelu}, "a view of them"),
        ({aten.bernoulli.p: gelu}, "random numbers"),
        ({aten.item.default: gelu}, "does not return a fixed number of tensors"),
        ({aten.gelu.default: "Gelu"}, "aten.gelu.default has 'Gelu', which is no function"),
    ],
)
def test_what_is_no_table_of_translations_is_refused_by_name(translations: Any, reason: str) -> None:
    """Such an entry would never be read."""
    with pytest.raises((CompilationError, OptionError), match=f"(?s)translations: .*{reason}"):
        OrtBackendOptions(translations=translations)
