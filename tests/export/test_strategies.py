"""Strategies are tried in an order that gives the most useful file that is right."""

from __future__ import annotations

from onnxtool.export.modalities.sizes import Axis
from onnxtool.export.strategies import strategies_for

BATCH = Axis("batch_size", 2, 3, may_fail=False, when_fixed=1)
SHORT = Axis("sequence", 8, 11, is_covered=True, when_fixed=512)
ENDLESS = Axis("sequence", 8, 11, is_covered=False, when_fixed=512)


def names(exporter: str, *axes: Axis, attention: str | None = "sdpa") -> list[str]:
    return [strategy.name for strategy in strategies_for(exporter, axes, attention)]


def test_torchscript_comes_first_where_the_longest_input_is_verified() -> None:
    """What it baked in would show there."""
    assert names("auto", BATCH, SHORT)[0] == "torchscript with eager attention"


def test_dynamo_comes_first_where_sizes_have_no_bound() -> None:
    """Its guards hold beyond what was tried."""
    assert names("auto", BATCH, ENDLESS)[:3] == [
        "dynamo",
        "dynamo with eager attention",
        "torchscript with eager attention",
    ]


def test_without_verification_dynamo_comes_first() -> None:
    """Nothing would show what TorchScript baked in."""
    assert next(strategies_for("auto", (BATCH, SHORT), "sdpa", verified=False)).name == "dynamo"


def test_the_time_limit_ends_only_where_another_strategy_is_left() -> None:
    """Who asks for one exporter waits for it, and the last strategies are not given up."""
    strategies = list(strategies_for("auto", (BATCH, ENDLESS), "sdpa"))
    assert [strategy.timeout_s is None for strategy in strategies] == [bool(strategy.fixed) for strategy in strategies]
    assert all(strategy.timeout_s is None for strategy in strategies_for("dynamo", (BATCH, ENDLESS), "sdpa"))


def test_fixed_axes_come_last_and_the_batch_after_all() -> None:
    """A fixed length costs padding, a fixed batch more."""
    assert names("dynamo", BATCH, SHORT) == [
        "dynamo",
        "dynamo with eager attention",
        "dynamo, sequence fixed to 512",
        "dynamo, sequence fixed to 512, batch_size fixed to 1",
    ]


def test_eager_attention_is_not_tried_twice() -> None:
    """Some models have no other."""
    assert "dynamo with eager attention" not in names("auto", BATCH, SHORT, attention="eager")


def test_an_exporter_that_is_asked_for_is_the_only_one() -> None:
    """Who names one wants that one."""
    assert all(name.startswith("torchscript") for name in names("torchscript", BATCH, ENDLESS))
