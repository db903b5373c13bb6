"""The logarithm of the gamma function and its derivatives, in double precision inside.

Digits that cancel, near zeros and poles, are then digits that a float32 does not have.
"""

from __future__ import annotations

import math

import torch

# B(2j) / (2j (2j - 1)), of Stirling's series; Abramowitz and Stegun, 6.1.40.
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)
# B(2j), of the asymptotic series of the polygamma functions; 6.3.18 and 6.4.11.
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_FAR = 10
"""From here on these series have double precision."""


def log_gamma(x: torch.Tensor) -> torch.Tensor:
    """Return log |gamma(x)|."""
    if x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    wide = x.double()
    reflected = wide < 0.5
    y = torch.where(reflected, 1 - wide, wide)
    # gamma(y) = gamma(y + 10) / (y (y + 1) ... (y + 9)): one logarithm of the product, of numbers near 1 as well.
    near = y < _FAR
    product = y
    for step in range(1, _FAR):
        product = product * (y + step)
    far = torch.where(near, y + _FAR, y)
    result = _stirling(far) - torch.where(near, torch.log(torch.where(near, product, torch.ones_like(y))), 0.0)
    fraction = wide - torch.floor(wide)
    sine = torch.sin(math.pi * torch.minimum(fraction, 1 - fraction))
    mirrored = math.log(math.pi) - torch.log(sine) - result
    result = torch.where(reflected, mirrored, result)
    return torch.where(x.isinf(), torch.full_like(wide, math.inf), result).to(x.dtype)


def digamma(x: torch.Tensor) -> torch.Tensor:
    """Return the derivative of `log_gamma`: an infinity at zero and NaN at the other poles, as PyTorch does."""
    if x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    wide = x.double()
    y = torch.where(wide <= 0, 1 - wide, wide)
    near = y < _FAR
    far = torch.where(near, y + _FAR, y)
    square = 1 / (far * far)
    series = torch.zeros_like(far)
    for place in reversed(range(len(_BERNOULLI))):
        series = (series + _BERNOULLI[place] / (2 * (place + 1))) * square
    result = torch.log(far) - 0.5 / far - series
    steps = 1 / y
    for step in range(1, _FAR):
        steps = steps + 1 / (y + step)
    result = result - torch.where(near, steps, torch.zeros_like(steps))
    fraction = wide - torch.trunc(wide)
    angle = math.pi * fraction
    mirrored = result - math.pi * torch.cos(angle) / torch.sin(angle)
    result = torch.where(wide < 0, mirrored, result)
    result = torch.where((wide < 0) & (fraction == 0), torch.full_like(wide, math.nan), result)
    # One over a zero has its sign.
    return torch.where(wide == 0, -1 / wide, result).to(x.dtype)


def polygamma(n: int, x: torch.Tensor) -> torch.Tensor:
    """Return the n-th derivative of `digamma`."""
    if x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    if n == 0:
        return digamma(x)
    sign = 1 if n % 2 else -1
    result = sign * math.factorial(n) * _hurwitz_zeta(n + 1, x.double())
    undefined = x == (-math.inf if n == 1 else math.inf)  # to PyTorch
    return torch.where(undefined, torch.full_like(result, math.nan), result).to(x.dtype)


def _stirling(x: torch.Tensor) -> torch.Tensor:
    inverse = 1 / x
    square = inverse * inverse
    series = torch.zeros_like(x)
    for coefficient in reversed(_STIRLING):
        series = series * square + coefficient
    return (x - 0.5) * torch.log(x) - x + 0.5 * math.log(2 * math.pi) + series * inverse


def _hurwitz_zeta(s: int, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of (x + k)^-s over all k from 0, which has no end, by Euler and Maclaurin's formula.

    Infinite at 0, -1, -2, ..., where one term is. Below zero the reflection formula of the polygamma functions
    (Abramowitz and Stegun, 6.4.7) serves, by derivatives of the cotangent.
    """
    below = x < 0
    y = torch.where(below, 1 - x, x)
    total = y**-s
    for step in range(1, _FAR):
        total = total + (y + step) ** -s
    far = y + _FAR
    total = total + far ** (1 - s) / (s - 1) + 0.5 * far**-s
    factor = float(s)
    for place, bernoulli in enumerate(_BERNOULLI):
        power = s + 2 * place + 1
        total = total + bernoulli / math.factorial(2 * place + 2) * factor * far**-power
        factor *= power * (power + 1)
    angle = math.pi * (x - torch.round(x))
    cotangent = torch.cos(angle) / torch.sin(angle)
    mirrored = torch.zeros_like(x)
    for coefficient in reversed(_cotangent_derivative(s - 1)):
        mirrored = mirrored * cotangent + coefficient
    mirrored = (-1) ** (s - 1) / math.factorial(s - 1) * math.pi**s * mirrored - (-1) ** s * total
    result = torch.where(below, mirrored, total)
    pole = (x <= 0) & (x == torch.floor(x))
    return torch.where(pole, torch.full_like(x, math.inf), result)


def _cotangent_derivative(order: int) -> list[int]:
    """Return a derivative of cot(t) as a polynomial in cot(t), lowest power first: the first one is -1 - cot^2."""
    polynomial = [0, 1]
    for _ in range(order):
        inner = [power * coefficient for power, coefficient in enumerate(polynomial)][1:]
        polynomial = [-a - b for a, b in zip([*inner, 0, 0], [0, 0, *inner], strict=True)]
    return polynomial
