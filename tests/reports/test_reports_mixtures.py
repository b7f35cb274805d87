"""The heat map of users' mixtures: the numbers behind it, from a real run and from hand-made ones."""

from __future__ import annotations

import json
import random
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from comingle.cli import app
from comingle.config import load_recipe, parse_recipe
from comingle.reports.figures import Mixtures, adjusted_rand_index, mixtures_figure, order_by_cluster, read_mixtures
from comingle.runs.api import run

SGD = {"name": "sgd", "learning_rate": 0.1, "schedule": "constant", "weight_decay": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Synthetic linear for 16 rounds, which is enough for the routers to part the two clusters."""
    folder = tmp_path_factory.mktemp("mixtures") / "run"
    recipe = parse_recipe(
        {
            "base": "net:linear",
            "method": {"name": "floral", "clusters": 3},
            "data": {"task": {"name": "linear", "test_samples": 20}},
            "floral": {"rank": 1},
            "training": {"rounds": 16, "batch_size": 4, "weighting": "samples", "experts": SGD, "router": SGD},
            "evaluation": {"every": 2, "model": "exchanged"},
            "checkpoints": {"every": 16, "keep": 1},
        }
    )
    run(recipe, out=folder)
    return folder


def evaluations(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "evaluation"]


# ---------------------------------------------------------------- a real run


def test_users_are_sorted_and_rows_are_mixtures(trained: Path) -> None:
    found, events = read_mixtures(trained), evaluations(trained)
    assert found is not None
    assert found.rounds == (0, 2, 4, 6, 8, 10, 12, 14, 16)
    assert found.weights.shape == (9, 10, 3)
    assert np.allclose(found.weights.sum(-1), 1, atol=3e-6)  # they are written with six digits
    assert found.clusters == (0,) * 5 + (1,) * 5
    assert found.users == tuple(f"user-{k}" for k in (0, 2, 4, 6, 8, 1, 3, 5, 7, 9))
    for at, event in enumerate(events):
        for place, user in enumerate(found.users):
            own = event["mixtures"][user]
            assert [own[c] for c in found.component_ids] == found.weights[at, place].tolist()


def test_sets_stand_in_the_order_of_their_clusters(trained: Path) -> None:
    found = read_mixtures(trained)
    assert found is not None
    raw = found.weights[-1][:, np.argsort(found.component_ids)]
    weights = {
        order: raw[:5, order[0]].sum() + raw[5:, order[1]].sum() for order in permutations(range(3))
    }  # every assignment of two clusters to three sets
    assert weights[found.component_ids] == pytest.approx(max(weights.values()))
    assert found.learned
    assert found.rand_index is not None
    heaviest = found.weights[-1].argmax(1).tolist()
    assert found.rand_index[-1] == pytest.approx(naive_index(list(found.clusters or ()), heaviest))
    assert found.rand_index[0] == 0  # equal mixtures have one set on top, which tells nothing


def test_the_figure_shows_what_was_read(trained: Path) -> None:
    found = read_mixtures(trained)
    assert found is not None
    assert found.rand_index is not None
    figure = mixtures_figure(found)
    panels = [axis for axis in figure.axes if axis.get_xlabel() == "adaptor set"]
    shown = [0, 2, 3, 5, 6, 8]  # six of nine evaluations, the first and the last among them
    assert [axis.get_title(loc="left") for axis in panels] == [
        f"round {found.rounds[at]}\nARI {found.rand_index[at]:.2f}" for at in shown
    ]
    for axis, at in zip(panels, shown, strict=True):
        (image,) = axis.images
        assert np.array_equal(np.asarray(image.get_array()), found.weights[at])
        assert image.get_clim() == (0, 1)
        assert [label.get_text() for label in axis.get_xticklabels()] == [str(c) for c in found.component_ids]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["cluster 0", "cluster 1"]
    assert panels[0].get_yticks().tolist() == [2.0, 7.0]
    assert [line.get_ydata()[0] for line in panels[0].lines] == [4.5]


def test_plot_draws_it(trained: Path, tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["plot", str(trained), "--figure", "mixtures", "--out", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    assert {path.name for path in tmp_path.iterdir()} == {f"mixtures-floral.{kind}" for kind in ("png", "svg", "csv")}
    text = (tmp_path / "mixtures-floral.svg").read_text(encoding="utf-8")
    assert all(f">{word}<" in text for word in ("cluster 0", "cluster 1", "round 16", "adaptor set"))


@pytest.mark.slow
def test_the_page_shows_it(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    answer = CliRunner().invoke(app, ["report", str(trained), "--out", str(out)])
    assert answer.exit_code == 0, answer.output
    page, last = out.read_text(encoding="utf-8"), evaluations(trained)[-1]
    found = read_mixtures(trained)
    assert found is not None
    assert found.rand_index is not None
    assert f"<td>{found.rand_index[-1]:.2f}</td>" in page
    entropies = [event["router_entropy_nats"] for event in evaluations(trained)]
    assert f"<td>{entropies[0]:.2f} to {entropies[-1]:.2f}</td>" in page
    assert f"to {last['aggregation_mismatch']:.2f}</td>" in page
    assert f">ARI {found.rand_index[-1]:.2f}<" in page
    assert not [word for word in ("perplexity", "Token view", "Expert scores", "tokens/s") if word in page]


@pytest.mark.slow
def test_mixtures_on_a_language_model_have_no_true_clusters(write_recipe: Any, tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path)).with_changes({"method": {"name": "floral", "clusters": 2}})
    run(recipe, out=tmp_path / "run")
    out = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(out)]).exit_code == 0
    page = out.read_text(encoding="utf-8")
    assert "Test perplexity at the last evaluation (lower is better)" in page
    assert "Mixtures of users" in page
    assert "tokens/s" in page
    assert not [word for word in ("ARI", "true cluster", "Token view", "Expert scores", "samples") if word in page]


# ---------------------------------------------------------------- by hand


def hand_made(folder: Path, *, clusters: dict[str, int] | None, last: list[list[float]]) -> Path:
    names = ["ann", "bob", "cem"]
    folder.mkdir()
    start = {"event": "start", "method": "floral", "seed": 4, "base": "b", "rounds": 1, "users": dict.fromkeys(names)}
    event = {
        "event": "evaluation",
        "round": 1,
        "component": "adaptor set",
        "mixtures": dict(zip(names, last, strict=True)),
    }
    lines = [start, event | ({"clusters": clusters} if clusters else {})]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_swap_of_sets_is_undone(tmp_path: Path) -> None:
    last = [[0.1, 0.7, 0.2], [0.8, 0.1, 0.1], [0.0, 1.0, 0.0]]
    found = read_mixtures(hand_made(tmp_path / "run", clusters={"ann": 0, "bob": 1, "cem": 0}, last=last))
    assert found is not None
    assert (found.users, found.clusters, found.component_ids) == (("ann", "cem", "bob"), (0, 0, 1), (1, 0, 2))
    assert found.weights[0].tolist() == [[0.7, 0.1, 0.2], [1.0, 0.0, 0.0], [0.1, 0.8, 0.1]]
    assert found.rand_index == (1.0,)


def test_without_true_clusters_nothing_is_said_of_recovery(tmp_path: Path) -> None:
    last = [[0.1, 0.9], [0.6, 0.4], [0.0, 1.0]]
    found = read_mixtures(hand_made(tmp_path / "run", clusters=None, last=last))
    assert found is not None
    assert (found.users, found.clusters, found.rand_index) == (("ann", "bob", "cem"), None, None)
    assert found.component_ids == (1, 0)  # the one that is used more comes first
    (panel,) = [axis for axis in mixtures_figure(found).axes if axis.get_xlabel() == "adaptor set"]
    assert panel.get_title(loc="left") == "round 1"
    assert [label.get_text() for label in panel.get_yticklabels()] == ["ann", "bob", "cem"]


@pytest.mark.parametrize("told", ["model", None])
def test_events_say_what_is_mixed_whatever_the_method(tmp_path: Path, told: str | None) -> None:
    folder = hand_made(tmp_path / "run", clusters=None, last=[[0.1, 0.9], [0.6, 0.4], [0.0, 1.0]])
    path = folder / "events.jsonl"
    written = '"component": "adaptor set", '
    text = path.read_text()
    assert written in text
    path.write_text(text.replace(written, f'"component": "{told}", ' if told else ""))  # older runs do not say
    found = read_mixtures(folder)
    assert found is not None
    assert mixtures_figure(found).axes[0].get_xlabel() == (told or "component")


def test_a_single_evaluation_has_room(tmp_path: Path) -> None:
    found = read_mixtures(hand_made(tmp_path / "run", clusters=None, last=[[0.1, 0.9], [0.6, 0.4], [0.0, 1.0]]))
    assert found is not None
    figure = mixtures_figure(found)
    figure.draw_without_rendering()
    box = figure.axes[0].get_window_extent()
    assert box.width > 0.4 * figure.bbox.width
    assert box.height > 0.4 * figure.bbox.height


def test_weights_are_solid_or_let_the_page_through(tmp_path: Path) -> None:
    found = read_mixtures(hand_made(tmp_path / "run", clusters=None, last=[[1, 0], [1, 0], [0.25, 0.75]]))
    assert found is not None
    image = mixtures_figure(found).axes[0].images[0]
    alpha = image.cmap(image.norm(found.weights[0]))[..., 3]
    assert np.allclose(alpha, found.weights[0], atol=1 / 128)


def test_given_routers_have_learned_nothing(tmp_path: Path) -> None:
    clusters = {"ann": 0, "bob": 1, "cem": 0}
    found = read_mixtures(hand_made(tmp_path / "run", clusters=clusters, last=[[1, 0], [0, 1], [1, 0]]))
    assert isinstance(found, Mixtures)
    assert not found.learned


def test_fewer_sets_than_clusters_still_have_an_order() -> None:
    mixture = np.array([[0.1, 0.9], [0.9, 0.1], [0.4, 0.6]])
    assert order_by_cluster(mixture, [0, 1, 2]) == (1, 0)


def test_runs_without_mixtures_have_no_picture(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "evaluation", "round": 1}) + "\n")
    assert read_mixtures(tmp_path) is None


# ---------------------------------------------------------------- the index


def naive_index(one: list[Any], other: list[Any]) -> float:
    """Pair by pair: kept together by both, by the first, by the second."""
    pairs = list(combinations(range(len(one)), 2))
    both = sum(one[i] == one[j] and other[i] == other[j] for i, j in pairs)
    first, second = (sum(kept[i] == kept[j] for i, j in pairs) for kept in (one, other))
    chance, most = first * second / len(pairs), (first + second) / 2
    return 1.0 if most == chance else (both - chance) / (most - chance)


def test_the_index_equals_a_count_of_pairs() -> None:
    draw = random.Random(0)
    for _ in range(30):
        count = draw.randint(2, 12)
        one, other = ([draw.randint(0, 3) for _ in range(count)] for _ in range(2))
        assert adjusted_rand_index(one, other) == pytest.approx(naive_index(one, other))


def test_the_index_by_hand() -> None:
    # Contingency 2, 1; 0, 3: together 1 + 3 = 4, first 3 + 3, second 1 + 6, chance 6 * 7 / 15, most 6.5.
    assert adjusted_rand_index("aaabbb", "xxyyyy") == pytest.approx((4 - 2.8) / (6.5 - 2.8))
    assert adjusted_rand_index("aabb", [7, 7, 3, 3]) == 1.0
    assert adjusted_rand_index("abab", "aabb") == pytest.approx((0 - 2 / 3) / (2 - 2 / 3))
    assert adjusted_rand_index("aaaa", "aabb") == 0.0
    assert adjusted_rand_index("aaaa", "xxxx") == adjusted_rand_index("a", "b") == 1.0
