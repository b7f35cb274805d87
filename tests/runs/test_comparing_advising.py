"""Advice on populations whose truth is known: found where runs show it, and nothing is said beyond the intervals."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
from typing import Any

import pytest
from scipy import stats

import comingle as library
from comingle.reports.advice import (
    Advice,
    advise_on,
    gain_rows,
    harmed_by_all,
    helped_by_none,
    method_to_take,
    paragraph,
    partners,
    render_advice,
)
from comingle.runs.advise import advise_runs, groups_of
from comingle.runs.given import given_of, recipe_with
from comingle.runs.progress import reporting
from comingle.utils.errors import RecipeError

SETTINGS = {
    "base": "random:llama",
    "adapters": {"rank": 4},
    "training": {
        "rounds": 20,
        "local_steps": 3,
        "batch_size": 8,
        "context": 16,
        "experts": {"learning_rate": 0.02},
    },
    "evaluation": {"model": "exchanged", "every": 20, "first": False},
    "runtime": {"dtype": "float32", "device": "cpu", "compile": False},
}
ALL = (0, 1, 2, 3)


def user(language: int, parts: tuple[int, ...]) -> dict[str, list[str]]:
    """A language is four rings of letters; a user reads some of them, and is tested on all."""
    letters = list("abcdefghijklmnop")
    random.Random(language).shuffle(letters)
    rings = ["".join(letters[i : i + 4]) * 8 for i in range(0, 16, 4)]
    return {"train": ["".join(rings[p] for p in parts) * 3], "valid": ["".join(rings)], "test": ["".join(rings)]}


def advise(users: Mapping[str, Any], seeds: list[int], methods: tuple[str, ...] = ("fedavg",)) -> Advice:
    given = given_of(users, None)
    recipe = recipe_with(SETTINGS, given, base=None, method=None, changes={})
    with reporting(quiet=True) as reporter:
        return advise_runs(recipe, methods, seeds, reporter, given=given)


@pytest.mark.slow
def test_the_same_task_is_learnt_together() -> None:
    advice = advise({"ann": user(0, (0, 1)), "bob": user(0, (2, 3))}, [0, 1, 2, 3])
    assert method_to_take(advice) == "fedavg"
    assert (harmed_by_all(advice), helped_by_none(advice)) == ([], [])
    assert paragraph(advice).startswith("Take fedavg: ")


@pytest.mark.slow
def test_disjoint_languages_are_told_to_train_alone() -> None:
    advice = advise({"ann": user(0, ALL), "bob": user(1, ALL)}, [0, 1, 2, 3])
    assert method_to_take(advice) is None
    assert all(gain.verdict != "gained" for gain in advice.methods["fedavg"].values())
    assert "local, which sends nothing" in paragraph(advice)


@pytest.mark.slow
def test_two_clusters_find_each_other() -> None:
    """Six seeds: sixteen intervals that hold together reach, with four, over 0 where the gain is 27%."""
    people = {"ann": user(0, (0, 1)), "bob": user(0, (2, 3)), "cem": user(1, (0, 1)), "dan": user(1, (2, 3))}
    advice = advise(people, [0, 1, 2, 3, 4, 5])
    mates = {"ann": "bob", "bob": "ann", "cem": "dan", "dan": "cem"}
    for name, mate in mates.items():
        assert partners(advice, name)["gained"] == [mate]
        assert f"{name} gains from {mate}." in paragraph(advice)


# -------------------------------------------------------------------- of given numbers


def metrics(upload: float, **users: float) -> dict[str, Any]:
    of_users = {name: {"test_perplexity": value} for name, value in users.items()}
    mean = statistics.fmean(users.values())
    sent = {"upload_bytes_per_user_round": upload, "download_bytes_per_user_round": upload}
    return {"mean_test_perplexity": mean, "measure": "perplexity", "rounds": 2, "users": of_users, **sent}


LOCAL = {seed: metrics(0, ann=10.0, bob=20.0) for seed in range(3)}
CLOSE = {seed: metrics(10, ann=5.0 + 0.01 * seed, bob=10.0 + 0.01 * seed) for seed in range(3)}
CLOSE_AND_DEAR = {seed: metrics(99, ann=5.0 - 0.001 * seed, bob=10.0) for seed in range(3)}
HARM = {seed: metrics(1, ann=20.0 + 0.01 * seed, bob=30.0 + 0.01 * seed) for seed in range(3)}
NOISE = {seed: metrics(5, ann=9.0 + seed, bob=19.0 + seed) for seed in range(3)}


def test_a_method_that_its_privacy_budget_ended_is_said_to_have_trained_less() -> None:
    stopped = {seed: {**run, "rounds": 1, "planned_rounds": 2} for seed, run in HARM.items()}
    told = paragraph(advise_on(LOCAL, {"harm": stopped, "close": CLOSE}, {}, "close"))
    assert told.endswith("longer ones may differ. harm: the privacy budget was spent after 1 of 2 rounds.")
    assert "budget" not in paragraph(advise_on(LOCAL, {"close": CLOSE}, {}, "close"))


def test_only_the_first_column_does_not_wrap_whatever_the_users_are_named() -> None:
    local, close = ({seed: metrics(0, together=value, bob=value) for seed in range(3)} for value in (10.0, 5.0))
    table = render_advice(advise_on(local, {"close": close}, {}, "close"))
    assert [str(column.header) for column in table.columns][:2] == ["together", "together"]
    assert [column.no_wrap for column in table.columns] == [True, False, False, False, False, False]


def test_intervals_hold_together() -> None:
    advice = advise_on(LOCAL, {"close": CLOSE, "noise": NOISE}, {}, "close")
    ratios = [math.log(NOISE[seed]["users"]["ann"]["test_perplexity"] / 10) for seed in range(3)]
    naive = stats.t.interval(1 - 0.05 / 4, 2, loc=statistics.fmean(ratios), scale=stats.sem(ratios))
    assert advice.methods["noise"]["ann"].interval == pytest.approx([100 * (math.exp(end) - 1) for end in naive])
    assert advice.methods["noise"]["ann"].verdict == "level"


def test_of_methods_that_are_level_the_cheapest_is_taken() -> None:
    advice = advise_on(LOCAL, {"dear": CLOSE_AND_DEAR, "close": CLOSE}, {}, "dear")
    assert method_to_take(advice) == "close"
    assert "dear has the best mean, but is not shown to be better" in paragraph(advice)


def test_who_is_harmed_by_all_trains_alone() -> None:
    advice = advise_on(LOCAL, {"harm": HARM}, {("ann", "bob"): HARM}, "harm")
    assert method_to_take(advice) is None
    assert "Every method tried harms ann and bob: train alone." in paragraph(advice)
    assert "In pairs (harm) ann is harmed by bob." in paragraph(advice)


def test_what_is_level_is_not_told_as_a_gain() -> None:
    advice = advise_on(LOCAL, {"noise": NOISE}, {("ann", "bob"): NOISE}, "noise")
    told = paragraph(advice)
    assert "No method is shown to help ann and bob." in told
    assert "No smaller group (noise) " in told
    assert "Take" not in told


def test_one_seed_shows_nothing() -> None:
    one = [{0: runs[0]} for runs in (LOCAL, CLOSE)]
    advice = advise_on(one[0], {"close": one[1]}, {}, "close")
    assert paragraph(advice).startswith("With one seed there are no intervals, so nothing is shown")
    assert "hold together" not in paragraph(advice)
    assert "hold together" not in str(render_advice(advice).title)
    assert gain_rows(advice)[1][0][1] == "-50.0 lower (one seed)"


def test_one_round_in_which_nobody_hears_from_anybody_is_refused() -> None:
    people = {name: user(number, ALL) for number, name in enumerate(("ann", "bob"))}
    with pytest.raises(RecipeError, match=r"--rounds: got 1; .*evaluation\.model: local"):
        library.advise(SETTINGS, ["fedavg"], users=people, seeds=[0], rounds=1, **{"evaluation.model": "local"})


def test_records_are_the_advices_numbers() -> None:
    advice = advise_on(LOCAL, {"close": CLOSE, "noise": NOISE}, {("ann", "bob"): HARM}, "close")
    found = {(one["method"], one["together"], one["user"]): one for one in advice.records()}
    assert len(found) == advice.intervals == 6
    for (method, together, user), one in found.items():
        gain = (advice.methods[method] if together is None else advice.groups[together])[user]
        assert (one["low"], one["high"]) == gain.interval
        assert (one["change"], one["verdict"]) == (gain.change.mean, gain.verdict)
    single = advise_on({0: LOCAL[0]}, {"close": {0: CLOSE[0]}}, {}, "close").records()
    assert [(one["change"], one["low"]) for one in single] == [(-50.0, None), (-50.0, None)]


def test_python_advises_as_the_command_does() -> None:
    people = {name: user(number, ALL) for number, name in enumerate(("ann", "bob"))}
    short: dict[str, Any] = {"training.local_steps": 1}
    advice = library.advise(SETTINGS, ["fedavg"], users=people, seeds=[0, 1], rounds=2, **short)
    changes: dict[str, Any] = {**short, "training.rounds": 2, "evaluation.every": 2}
    runs = {
        method: {
            seed: library.run(SETTINGS, users=people, method=method, seed=seed, **changes).metrics for seed in (0, 1)
        }
        for method in ("local", "fedavg")
    }
    assert advice == advise_on(runs["local"], {"fedavg": runs["fedavg"]}, {}, "fedavg")
    assert str(advice) == paragraph(advice)


def test_smaller_groups() -> None:
    assert groups_of(2) == []
    assert groups_of(3) == [(0, 1), (0, 2), (1, 2)]
    assert groups_of(6)[0] == (1, 2, 3, 4, 5)
    assert groups_of(13) == []


@pytest.mark.parametrize(
    ("methods", "users", "said"),
    [
        (("local",), 2, "--methods: got only local"),
        (("comigs-2s",), 2, "comigs-2s shares nothing"),
        (("fedavg",), 1, "data: got 1 user"),
    ],
)
def test_what_nobody_could_advise_on(methods: tuple[str, ...], users: int, said: str) -> None:
    people = {name: user(0, ALL) for name in ("ann", "bob")[:users]}
    with pytest.raises(RecipeError, match=said):
        advise(people, [0], methods)


def accuracies(*values: float) -> dict[int, dict[str, Any]]:
    sent = {"upload_bytes_per_user_round": 1, "download_bytes_per_user_round": 1}
    return {
        seed: {"mean_test_accuracy": value, "rounds": 2, "users": {"ann": {"test_accuracy": value}}, **sent}
        for seed, value in enumerate(values)
    }


def test_accuracies_that_change_equally_with_all_seeds_give_no_verdict() -> None:
    """5 and 7 of 24 samples with two seeds, in place of 6 and 8: a difference of rounding remains."""
    advice = advise_on(accuracies(6 / 24, 8 / 24), {"fedavg": accuracies(5 / 24, 7 / 24)}, {}, "fedavg")
    for gain in (advice.methods["fedavg"]["ann"], advice.means["fedavg"]):
        assert (gain.verdict, gain.interval) == ("level", None)
    assert gain_rows(advice)[1][0][1] == "-4.2 level"


def test_intervals_of_accuracies_end_at_100_points() -> None:
    advice = advise_on(accuracies(0.5, 0.5), {"fedavg": accuracies(0.25, 0.75)}, {}, "fedavg")
    assert advice.methods["fedavg"]["ann"].interval == advice.means["fedavg"].interval == (-100, 100)
