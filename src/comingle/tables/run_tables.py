"""Tables of one run: its users and its learning curve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from comingle.tables.crowds import FEW, MOST_ROWS, QUANTILES, at_share, best_first
from comingle.tables.framing import Table
from comingle.tables.measures import byte_unit, rule
from comingle.utils.errors import list_names
from comingle.utils.records import geometric, measure_of, number, privacy_told, sample_told
from comingle.utils.terminal import words

MOST_USERS = 8
"""The largest number of users that get a column each."""


def _title_of(measure: str) -> str:
    return f"test {measure} ({rule(measure)})"


def megabytes(count: float | int) -> str:
    """Bytes as megabytes."""
    return f"{count / 1e6:,.2f} MB"


def sizes(counts: Sequence[float | None]) -> list[str]:
    """Bytes of a column, all in the unit of the largest; a dash where nothing is known."""
    unit, name = byte_unit(max((count for count in counts if count is not None), default=0))
    digits = 0 if name == "B" else 2
    return ["–" if count is None else f"{count / unit:,.{digits}f} {name}" for count in counts]


def seconds_text(value: float) -> str:
    """Return seconds as text, with one digit below 10 s."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def render_run(metrics: dict[str, Any], *, everybody: bool = False) -> Table:
    """The users of a run, and their mean; of many, unless ``everybody`` is asked for, the best and the worst."""
    measure, unit = measure_of(metrics), metrics.get("unit", "tokens")
    title = f"{metrics['method']}, seed {metrics['seed']}: {_title_of(measure)}"
    table = Table("user", title=title, title_justify="left", box=None, show_footer=True)
    means = {"mean": metrics[f"mean_test_{measure}"], **_geometric(metrics["users"], measure)}
    table.columns[0].footer = "\n".join(means)
    table.add_column(
        measure, justify="right", footer="\n".join(_told(mean, metrics, measure) for mean in means.values())
    )
    for name in (f"test {unit}", "trainable", "one upload"):  # in comparisons rounds without one count, too
        table.add_column(name, justify="right")
    if everybody or len(metrics["users"]) <= MOST_ROWS:
        _add_users(table, metrics, list(metrics["users"]))
    else:
        _add_crowd(table, metrics, measure)
    table.caption = caption = words(_circumstances(metrics, unit), "table.caption")
    table.caption_justify = "left"
    if privacy := metrics.get("privacy"):
        caption.append(f"\nprivacy: {privacy_told(privacy)}")
    for warning in metrics.get("warnings", ()):
        caption.append(f"\nwarning: {warning}", "yellow")
    if sample := sample_told(metrics):
        caption.append(f"\n{sample}")
    if planned := metrics.get("planned_rounds"):
        caption.append(f"\nthe privacy budget was spent after round {metrics['rounds']} of {planned}")
    if untold := metrics.get("untold"):
        caption.append(f"\nnot told to the server: results of {list_names(untold)}")
    if (chosen := metrics.get("selected_round", metrics["rounds"])) != metrics["rounds"]:
        told = f"\nmodels of round {chosen} of {metrics['rounds']}, whose validation loss is the lowest"
        caption.append(told)
    return table


def _told(mean: float | None, record: dict[str, Any], measure: str) -> str:
    """A mean over users, of whom there may be none who tells."""
    return number(mean, measure) if record["users"] else "not told"


def _circumstances(metrics: dict[str, Any], unit: str) -> str:
    rate = metrics[f"{unit}_per_second"]
    idle = "speed not told" if metrics.get("untold") or not metrics["users"] else "no training"
    speed = f"{rate:,.0f} {unit}/s" if rate else idle
    peak = f"{metrics['peak_memory_bytes'] / 1e9:.1f} GB"
    place = f"{metrics['dtype']} on {metrics['device']}"
    return f"{metrics['base']} · {place} · {speed} · {seconds_text(metrics['wall_seconds'])} s · peak memory {peak}"


def _add_users(table: Table, metrics: dict[str, Any], names: Sequence[str]) -> None:
    """A row for each of some users."""
    measure, unit = measure_of(metrics), metrics.get("unit", "tokens")
    users = [metrics["users"][name] for name in names]
    sent = sizes([user["upload_bytes_per_round"] for user in users])
    for name, user, upload in zip(names, users, sent, strict=True):
        table.add_row(
            words(name),
            number(user[f"test_{measure}"], measure),
            f"{user[f'test_{unit}']:,}",
            f"{user['trainable_parameters']:,}",
            upload,
        )


def _add_crowd(table: Table, metrics: dict[str, Any], measure: str) -> None:
    """The best users, how everybody's results are spread, and the worst users."""
    scores = {name: user[f"test_{measure}"] for name, user in metrics["users"].items()}
    ordered = best_first(scores, measure)
    table.add_row(words(f"best {FEW} of {len(ordered)} (--all shows everybody)", "dim"))
    _add_users(table, metrics, ordered[:FEW])
    table.add_row(words("from best to worst", "dim"))
    for label, share in QUANTILES.items():
        table.add_row(label, number(scores[at_share(ordered, share)], measure))
    table.add_row(words(f"worst {FEW}", "dim"))
    _add_users(table, metrics, ordered[-FEW:])


def render_curve(events: list[dict[str, Any]]) -> Table:
    """Mean and per-user result at each evaluation."""
    evaluations = [e for e in events if e["event"] == "evaluation"]
    measure = measure_of(evaluations[0]) if evaluations else "perplexity"
    whole = ["mean", *(_geometric(evaluations[0]["users"], measure) if evaluations else {})]
    table = Table("round", *whole, title=f"test {measure} by round", title_justify="left", box=None)
    names = users_with_column(dict.fromkeys(name for e in evaluations for name in e["users"]))
    for name in names:
        table.add_column(words(name), justify="right")
    for e in evaluations:
        scores = [number(e["users"][n][f"test_{measure}"], measure) if n in e["users"] else "not told" for n in names]
        means = [e[f"mean_test_{measure}"], *_geometric(e["users"], measure).values()]
        table.add_row(str(e["round"]), *(_told(mean, e, measure) for mean in means), *scores)
    return table


def _geometric(users: dict[str, dict[str, Any]], measure: str) -> dict[str, float | None]:
    """The geometric mean over users under the name that it has in tables; for perplexities alone."""
    return dict(zip(["geometric mean"], geometric(users, measure).values(), strict=False))


def users_with_column(names: Iterable[str]) -> list[str]:
    """Return the names if each user gets a column; an empty list for more than :data:`MOST_USERS` users."""
    names = list(names)
    return names if len(names) <= MOST_USERS else []
