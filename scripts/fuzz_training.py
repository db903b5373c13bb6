"""Compile random training steps, and compare losses, gradients and the generator's state with eager PyTorch.

`python scripts/fuzz_training.py --seed 0 --count 3000` makes chains of 2 to 6 operators under a loss, with masks,
dropout, values without dimensions, other layouts and in-place writes, in float32 or bfloat16, with static sizes, or
with dynamic ones for two batches; some batches are empty. A chain is wrong if its numbers, its error, or the
generator's state afterwards are not eager's; it is raw if it raises where eager does not, if a rewrite is left out, or
if a session fails. Returns 1 if there is such a chain; `--start 17 --count 1` repeats one.

Rounding decides what is wrong: our error, measured against eager PyTorch in float64 on the same numbers, may be a few
times that of eager PyTorch in the same type, or of float64 on inputs that differ in the type's last digit. Eager
bfloat16 rounds after each operator and is no closer to the truth than another order of operators; after a maximum or a
comparison, both may take another branch.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - the tables below are full of it

from onnxtool.torch_backend import OrtBackend

Shape = tuple[int, ...]
Row = tuple[str, Callable[..., torch.Tensor]]
"""Kinds of leaves (`Leaf`) that a function takes after the value and a random number, separated by blanks."""

BATCH = 7
"""Sizes that are a multiple of it are as many times the size of the batch; no other size is."""
_BATCHES = (7, 7, 5, 2, 1, 0)
_SHAPES = ((7, 6), (7, 4, 6), (7,), (7, 2, 4, 6), (4, 7), (5, 3), (3, 7, 4), ())
_ROUNDING = {torch.float32: 2.0**-16, torch.bfloat16: 2.0**-6}
_MOST_TIMES = 6
_MOST_ELEMENTS = 2**14

OPERATORS: dict[str, Row] = {
    # one number
    "relu": ("", lambda x, n: F.relu(x)),
    "gelu": ("", lambda x, n: F.gelu(x, approximate=("none", "tanh")[n % 2])),
    "silu": ("", lambda x, n: F.silu(x)),
    "tanh": ("", lambda x, n: x.tanh()),
    "sigmoid": ("", lambda x, n: x.sigmoid()),
    "exp": ("", lambda x, n: x.clamp(-3, 3).exp()),
    "softplus": ("", lambda x, n: (F.softplus, F.elu, F.leaky_relu, F.hardswish, F.mish, F.logsigmoid)[n](x)),
    "power": ("", lambda x, n: (x.abs() + 0.1) ** (1, 2, 3, 0.5, -0.5, -1)[n]),
    "log1p": ("", lambda x, n: x.relu().log1p()),
    "magnitude": ("", lambda x, n: (x.abs(), x.square(), x.sin(), x.cos(), x.erf(), x.neg())[n]),
    "identity": ("", lambda x, n: (x * 1, x + 0, x**1, x.contiguous(), x.clone(), x.to(x.dtype))[n]),
    "double": ("", lambda x, n: (x.double() * 1.1).to(x.dtype)),
    # two numbers
    "add": ("part", lambda x, n, y: x + y if n % 2 else y - x),
    "multiply": ("part", lambda x, n, y: x * y),
    "divide": ("part", lambda x, n, y: x / (y.abs() + 0.5)),
    "maximum": ("part", lambda x, n, y: torch.maximum(x, y) if n % 2 else torch.minimum(y, x)),
    "lerp": ("same", lambda x, n, y: (x.lerp(y, 0.3), x.addcmul(y, y, value=0.5), torch.hypot(x, y + 9))[n % 3]),
    "in place": ("part", lambda x, n, y: x.clone().mul_(y.detach()).add_(1, alpha=n)),
    "scaled by one number": ("one", lambda x, n, y: x * y / 2),
    "where": ("mask part", lambda x, n, m, y: torch.where(m, x, y) if n % 2 else torch.where(m, y * 2, x)),
    "masked": ("mask", lambda x, n, m: x.masked_fill(m, (0.0, 1.0, -1.0)[n % 3]) if n % 2 else x * m),
    # products
    "linear": ("weight bias", lambda x, n, w, b: F.linear(x, w.t(), b) if n % 2 else x @ w),
    "matrix times vector": ("last", lambda x, n, w: x @ w),
    "gram": ("", lambda x, n: x @ x.transpose(-1, -2)),
    "einsum": ("weight", lambda x, n, w: torch.einsum(("...i,ij->...j", "...i,ij->j...")[n % 2], x, w)),
    "attention": ("same same", lambda x, n, k, v: F.scaled_dot_product_attention(x, k, v, is_causal=n > 3)),
    "attention with dropout": ("same same", lambda x, n, k, v: F.scaled_dot_product_attention(x, k, v, None, 0.1)),
    "conv1d": ("filters", lambda x, n, w: F.conv1d(x, w, padding=n % 2)),
    # normalization
    "layer norm": ("last last", lambda x, n, w, b: F.layer_norm(x, x.shape[-1:], w, b if n % 2 else None)),
    "rms norm": ("last", lambda x, n, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))),
    "batch norm": ("", lambda x, n: F.batch_norm(x, None, None, training=True)),
    "softmax": ("", lambda x, n: (x.softmax, x.log_softmax)[n % 2](n % max(1, x.dim()))),
    "masked softmax": ("mask", lambda x, n, m: x.masked_fill(m, -1e9).softmax(-1)),
    "normalize": ("", lambda x, n: F.normalize(x, dim=-1) if n % 2 else x / (x.norm(dim=-1, keepdim=True) + 1)),
    # shapes
    "transpose": ("", lambda x, n: x.transpose(0, n % x.dim())),
    "flatten": ("", lambda x, n: x.flatten(0, 1) if n % 2 else x.reshape(-1)),
    "unsqueeze": ("", lambda x, n: x.unsqueeze(n % (x.dim() + 1))),
    "squeeze": ("", lambda x, n: x.squeeze()),
    "slice": ("", lambda x, n: (x[..., 1:], x[..., :-1], x[..., ::2], x[..., -1:], x[..., 0], x[..., None, :])[n]),
    "expand": ("", lambda x, n: x.unsqueeze(0).expand(3, *x.shape) if n % 2 else x[..., :1].expand_as(x)),
    "concatenate": ("same", lambda x, n, y: torch.cat([x, y], -1) if n % 2 else torch.stack([x, y * 2])),
    "halves": ("", lambda x, n: torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1)),
    "flip": ("", lambda x, n: x.flip(-1) if n % 2 else x.roll(1, 0)),
    "repeat": ("", lambda x, n: x.repeat(2, *[1] * (x.dim() - 1))),
    "pad": ("", lambda x, n: F.pad(x, (1, 2)) if n % 2 else x.tril()),
    "permute": ("", lambda x, n: x.movedim(-1, 0)),
    # reductions
    "sum": ("", lambda x, n: x.sum(n % x.dim(), keepdim=n > 2)),
    "mean": ("", lambda x, n: x.mean(n % x.dim(), keepdim=n > 2)),
    "to one number": ("", lambda x, n: (x.sum(), x.mean(), x.amax(), x.logsumexp(0), x.std(), x.max())[n]),
    "maxima": ("", lambda x, n: x.amax(-1) if n % 2 else x.max(n % x.dim(), keepdim=n > 2)[0]),
    "variance": ("", lambda x, n: x.var(-1, keepdim=True) if n % 2 else x.logsumexp(-1)),
    "running sum": ("", lambda x, n: x.cumsum(-(n % 2))),
    "difference": ("", lambda x, n: x.diff(dim=-1)),
    "running maximum": ("", lambda x, n: x.cummax(-1)[0]),
    "sort": ("", lambda x, n: x.sort(-1)[0] if n % 2 else x.topk(2)[0]),
    "mean of a mask": ("mask", lambda x, n, m: (x * m).sum(-1) / m.expand_as(x).sum(-1).clamp(min=1)),
    # indices
    "rows": ("ids", lambda x, n, i: x[..., i] if n % 2 else x.index_select(-1, i)),
    "gather": ("places", lambda x, n, i: x.gather(-1, i)),
    "scatter": ("places two", lambda x, n, i, y: (x.scatter_add(-1, i, y), x.scatter(-1, i, 2.0))[n % 2]),
    "index add": ("ids", lambda x, n, i: x.index_add(-1, i, x[..., :1].expand(*x.shape[:-1], i.shape[0]))),
    "index put": ("first", lambda x, n, i: x.index_put((i,), x[:1] * 2, accumulate=n % 2 == 0)),
    "embedding": ("table places", lambda x, n, t, i: F.embedding(i, t).sum(-1) + x if n % 2 else F.embedding(i, t)),
    # random numbers
    "dropout": ("", lambda x, n: F.dropout(x, (0.1, 0.5, 0.0, 1.0)[n % 4], training=n < 5)),
    "dropout of columns": ("", lambda x, n: F.dropout1d(x, 0.4) if x.dim() == 3 else F.dropout(x, 0.3).relu()),
    "noise": ("", lambda x, n: x + torch.randn_like(x)),
    "uniform noise": ("", lambda x, n: x * torch.rand_like(x)),
    "bernoulli": ("", lambda x, n: x * torch.bernoulli(torch.full_like(x, 0.5))),
    "drawn row": ("", lambda x, n: x * torch.rand(x.shape[-1:], dtype=x.dtype)),
    "drawn in place": ("", lambda x, n: x * torch.empty_like(x).bernoulli_(0.7)),
    "drawn slopes": ("", lambda x, n: F.rrelu(x, training=True)),
}  # fmt: skip

LOSSES: dict[str, Row] = {
    "mean": ("", lambda x, n: x.mean()),
    "sum": ("", lambda x, n: x.sum()),
    "mean of a mask times it": ("mask", lambda x, n, m: (x * m).mean() if n % 2 else (x * m.to(x.dtype)).sum()),
    "mean where": ("mask", lambda x, n, m: (x * m).sum() / m.sum().clamp(min=1)),
    "mean of dropout": ("", lambda x, n: F.dropout(x, 0.2).mean() if n % 2 else F.dropout(x, 0.2).sum()),
    "selected": ("full", lambda x, n, m: x[m].sum()),
    "weighted": ("part", lambda x, n, w: (x * w).mean()),
    "squared error": ("same", lambda x, n, y: F.mse_loss(x, y, reduction=("mean", "sum")[n % 2])),
    "absolute error": ("same", lambda x, n, y: F.l1_loss(x, y)),
    "smooth error": ("same", lambda x, n, y: F.smooth_l1_loss(x, y) if n % 2 else F.huber_loss(x, y, delta=0.5)),
    "cross entropy": ("labels", lambda x, n, y: F.cross_entropy(x, y, reduction=("mean", "sum")[n % 2])),
    "smoothed": ("labels", lambda x, n, y: F.cross_entropy(x, y, label_smoothing=0.1)),
    "cross entropy of some": ("labels", lambda x, n, y: F.cross_entropy(x, torch.where(y == 0, -100, y))),
    "likelihood": ("labels", lambda x, n, y: F.nll_loss(x.log_softmax(1), y, ignore_index=1)),
    "probabilities": ("same", lambda x, n, y: F.cross_entropy(x, y.softmax(1))),
    "binary": ("same", lambda x, n, y: F.binary_cross_entropy_with_logits(x, y.sigmoid())),
    "binary of probabilities": ("same", lambda x, n, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid())),
    "divergence": ("same", lambda x, n, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")),
    "margins": ("same same", lambda x, n, y, z: F.margin_ranking_loss(x, y, z.sign(), margin=0.1)),
    "triplets": ("same same", lambda x, n, y, z: F.triplet_margin_loss(x, y, z)),
    "cosines": ("same", lambda x, n, y: (1 - F.cosine_similarity(x, y, dim=-1)).mean()),
    "in-batch negatives": ("same", lambda x, n, y: F.cross_entropy(x @ y.mT * 5, torch.arange(x.shape[0]))),
    "classes": ("labels", lambda x, n, y: F.multi_margin_loss(x, y)),
    "soft margin": ("same", lambda x, n, y: F.soft_margin_loss(x, y.sign())),
    "counts": ("same", lambda x, n, y: F.poisson_nll_loss(x.clamp(max=3), y.abs())),
    "variances": ("same", lambda x, n, y: F.gaussian_nll_loss(x, y, y.abs() + 1)),
    "norm": ("", lambda x, n: x.norm() if n % 2 else x.square().sum().sqrt()),
    "logarithm of a sum": ("", lambda x, n: x.logsumexp(-1).mean() if n % 2 else x.reshape(-1).logsumexp(0)),
}  # fmt: skip
_NOISE = ("noise", "uniform noise", "drawn row", "drawn slopes")
"""Operators that draw other numbers in float64, so their bfloat16 has no measure."""


@dataclass(frozen=True)
class Leaf:
    """A tensor that a chain takes, of numbers, or of indices below `high`, or of truths where `high` is negative."""

    shape: Shape
    high: int = 0
    gradient: bool = False
    layout: int = 0

    def made(self, batch: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """Return it for a batch of that size: contiguous, transposed or expanded."""
        generator = torch.Generator().manual_seed(seed)
        shape = [_scaled(size, batch) for size in self.shape]
        if self.high > 0:
            return torch.randint(max(1, _scaled(self.high, batch)), shape, generator=generator)
        if self.high < 0:
            return torch.rand(shape, generator=generator) < 0.6
        value = torch.randn(shape, generator=generator).to(torch.bfloat16).to(dtype)  # the same in each type
        if self.layout == 1 and len(shape) > 1:
            value = value.mT.contiguous().mT
        elif self.layout == 2 and 0 not in shape:
            value = value[..., :1].expand(shape) if shape else value
        return value.requires_grad_(self.gradient)


def _scaled(size: int, batch: int) -> int:
    return size // BATCH * batch if size % BATCH == 0 else size


@dataclass(frozen=True)
class Step:
    """A row of a table with its random number, and the places of its leaves."""

    name: str
    function: Callable[..., torch.Tensor]
    number: int
    places: tuple[int, ...]

    def __call__(self, x: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the result for a value and the chain's leaves."""
        return self.function(x, self.number, *[leaves[place] for place in self.places])


@dataclass(frozen=True)
class Chain:
    """Operators and a loss, their leaves, of which the first is the input, and how the chain is called."""

    steps: tuple[Step, ...]
    leaves: tuple[Leaf, ...]
    dtype: torch.dtype
    dynamic: bool
    batches: tuple[int, ...]

    def __str__(self) -> str:
        names = " > ".join(f"{step.name} {step.number}" for step in self.steps)
        first = f"{tuple(self.leaves[0].shape)} in layout {self.leaves[0].layout}"
        return f"{first}: {names}; {self.dtype}, {'dynamic' if self.dynamic else 'static'}, batches {self.batches}"

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return the function to compile: of the leaves, to the loss and the value before it."""
        steps = self.steps

        def chain(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = leaves[0]
            for step in steps[:-1]:
                x = step(x, leaves)
            return steps[-1](x, leaves), x

        return chain


def make_chain(numbers: random.Random) -> Chain:
    """Return a chain that eager PyTorch can run with a batch of `BATCH`."""
    dtype = numbers.choice((torch.float32, torch.float32, torch.bfloat16))
    leaves = [Leaf(numbers.choice(_SHAPES), gradient=numbers.random() < 0.8, layout=numbers.choice((0, 0, 0, 1, 2)))]
    steps: list[Step] = []
    value, length = leaves[0].made(BATCH, 0, dtype), numbers.randint(2, 6)
    while len(steps) <= length:
        name = numbers.choice(list(OPERATORS if len(steps) < length else LOSSES))
        kinds, function = (OPERATORS if len(steps) < length else LOSSES)[name]
        if dtype is torch.bfloat16 and name in _NOISE:
            continue
        try:
            added = [_leaf(kind, tuple(value.shape), numbers) for kind in kinds.split()]
            step = Step(name, function, numbers.randrange(6), tuple(range(len(leaves), len(leaves) + len(added))))
            tensors = [leaf.made(BATCH, place, dtype) for place, leaf in enumerate((*leaves, *added))]
            result = step(value, tensors)
        except (RuntimeError, IndexError, ValueError, TypeError, ArithmeticError):
            continue  # not for this shape
        if result.numel() > _MOST_ELEMENTS or (len(steps) < length and not result.numel()):
            continue
        value, leaves = result.detach(), [*leaves, *added]
        steps.append(step)
    dynamic = numbers.random() < 0.5
    batches = tuple(numbers.choice(_BATCHES) for _ in range(1 + dynamic))
    chain = Chain(tuple(steps), tuple(leaves), dtype, dynamic, batches)
    fail = [batch for batch in batches if isinstance(run(chain, chain.function(), batch, dtype), Exception)]
    return make_chain(numbers) if fail and numbers.random() < 0.8 else chain  # most are not about errors


def _leaf(kind: str, shape: Shape, numbers: random.Random) -> Leaf:
    part = tuple(size if numbers.random() < 0.6 else 1 for size in shape)[numbers.choice((0, 0, 1)) :]
    match kind:
        case "mask":
            return Leaf(part, -1)
        case "full":
            return Leaf(shape, -1)
        case "ids":
            return Leaf((4,), shape[-1])
        case "first":
            return Leaf((3,), shape[0])
        case "places":
            return Leaf((*shape[:-1], 2), shape[-1])
        case "labels":
            return Leaf(shape[:1] + shape[2:] if len(shape) > 1 else (), shape[1] if len(shape) > 1 else shape[0])
    shapes = {"part": part, "same": shape, "one": (), "last": shape[-1:], "bias": (5,), "two": (*shape[:-1], 2)}
    shapes |= {"weight": (*shape[-1:], 5), "table": (*shape[-1:], 3), "filters": (3, *shape[1:2], 2)}
    return Leaf(shapes[kind], gradient=numbers.random() < 0.7, layout=numbers.choice((0, 0, 0, 1)))


Outcome = list[torch.Tensor | None] | Exception


def run(chain: Chain, function: Callable[..., Any], batch: int, dtype: torch.dtype, nudge: float = 0) -> Outcome:
    """Return results, gradients and the generator's state after a step, or the error that it raises."""
    leaves = [leaf.made(batch, place, dtype) for place, leaf in enumerate(chain.leaves)]
    for place, leaf in enumerate(leaves if nudge else []):
        if leaf.is_floating_point():
            leaves[place] = (leaf * (1 + nudge * torch.randn(leaf.shape))).detach().requires_grad_(leaf.requires_grad)
    torch.manual_seed(3)
    try:
        results = function(*leaves)
        if results[0].requires_grad:
            results[0].sum().backward()
    except Exception as error:  # noqa: BLE001 - whatever is raised is compared
        return error
    return [*(result.detach() for result in results), *(leaf.grad for leaf in leaves), torch.get_rng_state()]


def judge(chain: Chain) -> tuple[str, str]:
    """Return the verdict on a chain, and the reason; what PyTorch traces otherwise without us is PyTorch's."""
    backend = OrtBackend()
    verdict, reason = _compare(chain, backend)
    if reason and _compare(chain, "aot_eager")[0] == verdict:
        return "PyTorch's", reason
    ran = any(graph.report.partitions for graph in backend.graphs)
    return verdict or ("right" if ran else "right in PyTorch"), reason


def _compare(chain: Chain, backend: Any) -> tuple[str, str]:
    torch._dynamo.reset()  # noqa: SLF001 - PyTorch has no public name for it
    eager = chain.function()
    compiled = torch.compile(chain.function(), backend=backend, dynamic=chain.dynamic)
    for batch in chain.batches:
        theirs = run(chain, eager, batch, chain.dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = run(chain, compiled, batch, chain.dtype)
        if rewrites := [str(warning.message) for warning in caught if "graph rewrite" in str(warning.message)]:
            return "raw", rewrites[0]
        if isinstance(ours, Exception) or isinstance(theirs, Exception):
            if type(ours) is type(theirs):
                continue
            return "raw" if isinstance(
                ours, Exception
            ) else "wrong", f"batch {batch}: {ours!r:.300} for {theirs!r:.200}"
        sessions = [session for graph in getattr(backend, "graphs", []) for session in graph.sessions]
        if failures := [session.failure for session in sessions if session.failure]:
            return "raw", f"batch {batch}: a session fails: {failures[0]}"
        if why := _difference(chain, batch, ours, theirs):
            return "wrong", f"batch {batch}: {why}"
    return "", ""


def _difference(chain: Chain, batch: int, ours: list[Any], theirs: list[Any]) -> str:
    """Return how results differ by more than rounding; empty if they do not."""
    if not torch.equal(ours[-1], theirs[-1]):
        return "the generator has another state"
    exact: list[list[Any]] = []
    rounding = _ROUNDING[chain.dtype]
    for place, (our, their) in enumerate(zip(ours[:-1], theirs[:-1], strict=True)):
        if (our is None) != (their is None):
            return f"result {place} is {our} for {their}"
        if their is None or _is_within(our, their, [], rounding):
            continue
        if (our.shape, our.dtype) != (their.shape, their.dtype):
            return f"result {place} is {our.dtype} {tuple(our.shape)} for {their.dtype} {tuple(their.shape)}"
        if not exact:
            unit = torch.finfo(chain.dtype).eps
            outcomes = [run(chain, chain.function(), batch, torch.float64, nudge) for nudge in (0, unit, unit, unit)]
            exact = [outcome for outcome in outcomes if isinstance(outcome, list)]
        if not _is_within(our, their, [outcome[place] for outcome in exact], rounding):
            return f"result {place}: {our.flatten()[:6].tolist()} for {their.flatten()[:6].tolist()}"
    return ""


def _is_within(our: torch.Tensor, their: torch.Tensor, exact: list[torch.Tensor], rounding: float) -> bool:
    """Return whether our result is as close to the exact one, or to eager PyTorch's, as rounding explains."""
    if (our.shape, our.dtype) != (their.shape, their.dtype) or not our.dtype.is_floating_point:
        return bool(torch.equal(our, their))
    finite = their.isfinite()
    if not torch.equal(our[~finite].nan_to_num(), their[~finite].nan_to_num()) or not our[finite].isfinite().all():
        return False
    our, their, *exact = (tensor.double()[finite] for tensor in (our, their, *exact))
    if not our.numel():
        return True
    truth = exact[0] if exact else their
    measure = max(float((tensor - truth).abs().max()) for tensor in (their, *exact))
    allowed = rounding * max(1.0, float(their.abs().max())) + _MOST_TIMES * measure
    return bool((our - truth).abs().max() <= allowed)


def main() -> int:
    """Run the chains that the command line asks for; return 1 if one is wrong or raw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first chain")
    parser.add_argument("--count", type=int, default=3000, help="number of chains")
    options = parser.parse_args()
    torch.set_num_threads(2)
    torch._dynamo.config.specialize_int = True  # noqa: SLF001 - only the batch is dynamic, not a step's number
    logging.disable()
    counts: Counter[str] = Counter()
    for number in range(options.start, options.start + options.count):
        chain = make_chain(random.Random(f"{options.seed}-{number}"))  # noqa: S311 - no secrets
        verdict, reason = judge(chain)
        counts[verdict] += 1
        if reason:
            print(f"{verdict}: chain {number}: {chain}: {' '.join(reason.split())}", flush=True)
        if (number + 1) % 100 == 0 or number + 1 == options.start + options.count:
            print(f"{number + 1}: {', '.join(f'{count} {name}' for name, count in counts.most_common())}", flush=True)
    return int(bool(counts["wrong"] or counts["raw"]))


if __name__ == "__main__":
    sys.exit(main())
