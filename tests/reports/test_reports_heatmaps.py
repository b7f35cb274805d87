"""The heat maps of expert scores."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib", reason="NO FIGURES: pip install comingle[reports]")

from matplotlib.figure import Figure

from comingle.reports.figures import _paint_heatmap  # pyright: ignore[reportPrivateUsage]
from comingle.reports.runs import Curve, ExpertCurves, Spread


@pytest.mark.parametrize("layers", [1, 2, 12])
def test_layers_are_whole_numbers(layers: int) -> None:
    """Also where there is one, which has no second tick to be given."""
    axis = Figure().subplots()
    curve = Curve(iterations=(0, 10), values=(Spread(mean=0.5), Spread(mean=0.4)))
    _paint_heatmap(
        axis,
        expert=ExpertCurves(name="generalist", layers=(curve,) * layers),
        title="",
        round_by_iterations={0: 0, 10: 1},
    )
    low, high = sorted(axis.get_ylim())
    ticks = [tick for tick in axis.get_yticks() if low <= tick <= high]
    assert ticks
    assert all(tick == int(tick) for tick in ticks), ticks
