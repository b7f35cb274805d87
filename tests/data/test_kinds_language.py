"""``runtime.compile: auto``: compiled where a run is long enough to pay for it, and not before."""

from __future__ import annotations

from typing import Any

import pytest

from comingle.config import parse_recipe
from comingle.methods import make
from comingle.models.loading import load_base
from comingle.training.kinds import base as language

SMALL, LARGER = "random:llama?layers=5&dim=64", "random:llama?layers=4&dim=256&mlp=1024&vocab=8192"


@pytest.mark.parametrize(
    ("base", "tokens", "compiles"),
    [(SMALL, 300_000, False), (SMALL, 900_000, True), (LARGER, 100_000, False), (LARGER, 500_000, True)],
)
def test_auto_compiles_from_where_it_was_measured_to_pay(
    base: str, tokens: int, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    as_it_is = language.adapt

    def adapt(*given: Any, compiled: bool, **options: Any) -> Any:
        asked.append(compiled)
        return as_it_is(*given, compiled=False, **options)

    monkeypatch.setattr(language, "adapt", adapt)
    recipe = parse_recipe({"base": base, "method": "fedavg", "data": {"users": {"a": "a.txt", "b": "b.txt"}}})
    loaded = load_base(base, dtype="float32", device="cpu")
    language.adapt_base(recipe, loaded, make("fedavg"), num_trainers=2, num_tokens=tokens)
    language.adapt_base(recipe, loaded, make("pretrained"), num_trainers=2, num_tokens=tokens)
    assert asked == [compiles, False]  # what does not train is never worth it
