"""Optimizers: update all parameters, held in one buffer, in a single step.

The buffer is split into blocks, float32 [K, S], zero-padded at the end; gradients and moments have the same layout.
A Scan applies the formula block by block. The number of kernels therefore does not grow with the number of parameters,
and with 32768 elements per block all intermediate results stay in the CPU cache. On a GPU, one block holds everything.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnxtool.errors import ArtifactError
from onnxtool.training.graphs.names import (
    FIRST_MOMENTS,
    GRADIENTS,
    LEARNING_RATE,
    PARAMETERS,
    SECOND_MOMENTS,
    STEP,
    updated_name,
)
from onnxtool.training.onnxblock.block import Block, ForwardBlock
from onnxtool.training.onnxblock.blocks import Add, Clip, Constant, Div, ReduceAllL2

Parameters = tuple["Sequence[TensorProto]", "Sequence[TensorProto]"]


class ClipGradNorm(Block):
    """Scale down all gradients by one factor if their joint Euclidean norm exceeds a bound.

    Args:
        max_norm: the bound.
    """

    def __init__(self, max_norm: float) -> None:
        if not max_norm > 0:
            raise ArtifactError(f"gradients cannot be clipped to the norm {max_norm}", "give a number above 0")
        self._max_norm = max_norm

    def build(self, *gradient_names: str) -> list[str]:
        """Return the names of the clipped gradients.

        Raises:
            ArtifactError: a name refers to a sequence of gradients.
        """
        for value in self.base.graph.input:
            if value.name in gradient_names and value.type.HasField("sequence_type"):
                raise ArtifactError(
                    f"{value.name} is a sequence, and gradients that are clipped are tensors",
                    "pass the names of all of them, each as a separate input",
                )
        scale = self.scale(*gradient_names)
        return [self.accessor.add_node("Mul", [name, scale]) for name in gradient_names]

    def scale(self, *gradient_names: str) -> str:
        """Return the scale factor for the gradients, float32 [1], at most 1, using PyTorch's formula."""
        norm = Add()(ReduceAllL2()(*gradient_names), Constant(1e-6)())
        scale: str = Clip(clip_max=1.0)(Div()(Constant(self._max_norm)(), norm))
        return scale


class ScanBody:
    """The nodes that a Scan runs on each block; they may read values of the outer graph."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []

    def op(self, op_type: str, *inputs: str, to: str = "") -> str:
        """Apply an operator, and return the name of its output."""
        output = to or f"block/{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [output], name=f"block/node_{len(self.nodes)}"))
        return output


class Optimizer(ForwardBlock):
    """The common base of optimizers: inputs, outputs and the Scan.

    Attributes:
        moments: the inputs that hold the optimizer state.
        clip_grad: scales down the gradients before the step.
    """

    moments: tuple[str, ...] = ()
    clip_grad: ClipGradNorm | None = None

    @abstractmethod
    def update(self, body: ScanBody, parameters: str, gradients: str, moments: Sequence[str]) -> None:
        """Add the formula for one block to `body`; set `updated_name` of the parameters and moments."""

    def build(self, parameters: Parameters) -> list[str]:
        """Add the optimizer step for the given (trained, frozen) parameters, and return the output names."""
        trained = parameters[0]
        if not trained:
            raise ArtifactError(
                "there is no parameter to optimize", "freeze fewer, or write no optimizer (--optimizer none)"
            )
        other = [tensor.name for tensor in trained if tensor.data_type != TensorProto.FLOAT]
        if other:
            raise ArtifactError(f"the parameters {', '.join(other[:5])} are not float32", "freeze or convert them")
        scanned = [PARAMETERS, GRADIENTS, *self.moments]
        graph, info = self.base.graph, helper.make_tensor_value_info
        graph.input.extend([info(LEARNING_RATE, TensorProto.FLOAT, [1]), info(STEP, TensorProto.INT64, [1])])
        graph.input.extend(info(name, TensorProto.FLOAT, ["blocks", "size"]) for name in scanned)
        updated = [updated_name(name) for name in (PARAMETERS, *self.moments)]
        inside = [f"block/{name}" for name in scanned]
        body = ScanBody()
        self.update(body, inside[0], inside[1], inside[2:])
        results = [f"block/{name}" for name in updated]
        before, after = ([info(name, TensorProto.FLOAT, ["size"]) for name in names] for names in (inside, results))
        step = helper.make_graph(body.nodes, "block", before, after)
        graph.node.append(
            helper.make_node("Scan", scanned, updated, name="step", body=step, num_scan_inputs=len(scanned))
        )
        return updated

    def number(self, value: float) -> str:
        """Add a number as an initializer, float32 [1]."""
        name: str = Constant(value)()
        return name

    def gradient_scale(self) -> str | None:
        """Return the factor by which clipping scales the gradients; None without clipping."""
        return None if self.clip_grad is None else self.clip_grad.scale(GRADIENTS)


@dataclass(eq=False)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as in torch.optim.AdamW.

    onnxruntime-training decays after the step and adds `eps` before the bias correction; its results differ by less
    than the learning rate times either.

    Args:
        bias_correction: correct for moments that start at zero.
        betas: decay rates of the two moments per step.
        eps: added to the square root of the second moment.
        weight_decay: the fraction of a parameter subtracted in each step, times the learning rate.
        clip_grad: scales down the gradients before the step.
    """

    moments = (FIRST_MOMENTS, SECOND_MOMENTS)

    bias_correction: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    clip_grad: ClipGradNorm | None = None

    def update(self, body: ScanBody, parameters: str, gradients: str, moments: Sequence[str]) -> None:
        """Add the formula for one block.

        With c the square roots of the bias corrections it is `p (1 - lr w) - lr c2/c1^2 m / (sqrt(v) + eps c2)`, so
        everything except p, m and v is a scalar of the outer graph.
        """
        op, (beta1, beta2) = self.accessor.add_node, self.betas
        rate, eps = LEARNING_RATE, self.number(self.eps)
        if self.bias_correction:
            root = op("Sqrt", [self._correction(beta2)])
            rate = op("Div", [op("Mul", [LEARNING_RATE, root]), self._correction(beta1)])
            eps = op("Mul", [eps, root])
        first, second = self.number(1 - beta1), self.number(1 - beta2)
        scale = self.gradient_scale()
        if scale is not None:
            first, second = op("Mul", [first, scale]), op("Mul", [second, op("Mul", [scale, scale])])
        kept = parameters
        if self.weight_decay:
            decay = op("Mul", [LEARNING_RATE, self.number(self.weight_decay)])
            kept = body.op("Mul", parameters, op("Sub", [self.number(1.0), decay]))
        mean = body.op(
            "Add",
            body.op("Mul", moments[0], self.number(beta1)),
            body.op("Mul", gradients, first),
            to=updated_name(moments[0]),
        )
        square = body.op(
            "Add",
            body.op("Mul", moments[1], self.number(beta2)),
            body.op("Mul", body.op("Mul", gradients, gradients), second),
            to=updated_name(moments[1]),
        )
        step = body.op("Div", body.op("Mul", mean, rate), body.op("Add", body.op("Sqrt", square), eps))
        body.op("Sub", kept, step, to=updated_name(parameters))

    def _correction(self, beta: float) -> str:
        """Return `1 - beta ** step`."""
        op = self.accessor.add_node
        # In double precision: in float32, 1 - 0.999 ** 1 loses four digits.
        step = op("Cast", [STEP], to=TensorProto.DOUBLE)
        power = op("Pow", [self._double(beta), step])
        return op("Cast", [op("Sub", [self._double(1.0), power])], to=TensorProto.FLOAT)

    def _double(self, value: float) -> str:
        return self.accessor.add_constant(np.array([value], np.float64))


@dataclass(eq=False)
class SGD(Optimizer):
    """Stochastic gradient descent, as in torch.optim.SGD.

    Args:
        clip_grad: scales down the gradients before the step.
        momentum: the fraction of the last step that is added; stored as the first moment.
        weight_decay: the fraction of a parameter that is added to its gradient.
    """

    clip_grad: ClipGradNorm | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self.moments = (FIRST_MOMENTS,) if self.momentum else ()

    def update(self, body: ScanBody, parameters: str, gradients: str, moments: Sequence[str]) -> None:
        """Add the formula for one block."""
        rate, scale = LEARNING_RATE, self.gradient_scale()
        if scale is not None and not self.moments and not self.weight_decay:
            rate = self.accessor.add_node("Mul", [rate, scale])
        elif scale is not None:
            gradients = body.op("Mul", gradients, scale)
        if self.weight_decay:
            decay = body.op("Mul", parameters, self.number(self.weight_decay))
            gradients = body.op("Add", gradients, decay)
        if moments:
            kept = body.op("Mul", moments[0], self.number(self.momentum))
            gradients = body.op("Add", kept, gradients, to=updated_name(moments[0]))
        body.op("Sub", parameters, body.op("Mul", gradients, rate), to=updated_name(parameters))
