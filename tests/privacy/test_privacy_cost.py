"""``comingle cost`` answers before training: epsilon for a noise, noise for an epsilon."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

PRIVACY = ["--set", "privacy.accountant=rdp", "--set", "training.participation=0.5"]


def found(comingle: Any, recipe: Path, *sets: str) -> dict[str, Any]:
    words = [word for one in sets for word in ("--set", one)]
    answer = comingle("cost", recipe, "--json", *PRIVACY, *words)
    assert answer.code == 0, answer.err
    return json.loads(answer.out)["methods"][0]["privacy"]


@pytest.mark.slow
def test_what_it_says_is_what_a_run_spends(comingle: Any, recipe_file: Path) -> None:
    said = found(comingle, recipe_file, "privacy.noise_multiplier=1.5")
    sets = [*PRIVACY, "--set", "privacy.noise_multiplier=1.5"]
    answer = comingle("run", recipe_file, "--out", recipe_file.parent / "run", *sets)
    assert answer.code == 0, answer.err
    spent = json.loads((recipe_file.parent / "run" / "metrics.json").read_text())["privacy"]
    assert {key: said[key] for key in ("epsilon", "delta", "noise_multiplier", "releases", "accountant")} == {
        key: spent[key] for key in ("epsilon", "delta", "noise_multiplier", "releases", "accountant")
    }


@pytest.mark.slow
def test_there_and_back(comingle: Any, recipe_file: Path) -> None:
    noise = found(comingle, recipe_file, "privacy.epsilon=4")["noise_multiplier"]
    assert found(comingle, recipe_file, f"privacy.noise_multiplier={noise}")["epsilon"] == pytest.approx(4, rel=1e-3)


@pytest.mark.slow
def test_a_budget_says_how_many_rounds_it_is_enough_for(comingle: Any, recipe_file: Path) -> None:
    said = found(comingle, recipe_file, "privacy.epsilon=4", "privacy.noise_multiplier=1.5", "training.rounds=40")
    assert said["epsilon"] <= 4
    assert 0 < said["releases"] < said["planned_releases"] == 39


@pytest.mark.slow
def test_it_is_said_in_words(comingle: Any, recipe_file: Path) -> None:
    sets = ["--set", "privacy.mechanism=local", "--set", "privacy.noise_multiplier=2"]
    answer = comingle("cost", recipe_file, "--method", "fedavg,local", *PRIVACY, *sets)
    assert re.search(r"^fedavg: epsilon [\d.]+ at delta 1e-05, local noise of 2 times", answer.out, re.MULTILINE)
    assert "local: epsilon 0 at delta 1e-05" in answer.out


def test_mistakes_are_one_line(comingle: Any, recipe_file: Path) -> None:
    for sets, line in (
        (["privacy.mechanism=local"], "give noise_multiplier, or epsilon"),
        (["privacy.noise_multiplier=1", "privacy.clip_norm=big"], "privacy.clip_norm"),
        (
            ["privacy.noise_multiplier=1", "method=fedmerge"],
            "privacy: method fedmerge: its server (Merge)",
        ),
    ):
        answer = comingle("run", recipe_file, *[word for one in sets for word in ("--set", one)])
        assert answer.code == 2
        assert line in answer.err
        assert "Traceback" not in answer.err


@pytest.mark.slow
def test_a_run_in_which_nobody_is_ever_drawn_ends_and_is_shown(comingle: Any, recipe_file: Path) -> None:
    sets = ["privacy.noise_multiplier=9", "privacy.accountant=rdp", "training.participation=0.000001"]
    folder = recipe_file.parent / "run"
    answer = comingle("run", recipe_file, "--out", folder, *[word for one in sets for word in ("--set", one)])
    assert answer.code == 0, answer.err
    assert any("round 1/4 · no participants" in line for line in answer.progress)
    assert json.loads((folder / "metrics.json").read_text())["privacy"]["releases"] == 3
    for verb in (["show", folder], ["report", folder, "--out", recipe_file.parent / "report"]):
        answer = comingle(*verb)
        assert answer.code == 0, answer.err
