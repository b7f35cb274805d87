"""Prompts with every token on the colour of its expert (CoMiGS, Figures 3 and 14 to 19)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from comingle.papers.reproduce.plan import Plan
from comingle.utils.errors import RunError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from comingle.reports.tokens import TokenView

LENGTH = 160
"""Tokens of a prompt at most."""


def draw_routes(plan: Plan, entries: Mapping[tuple[str, str], Any]) -> Iterator[tuple[str, Figure]]:
    """For each column and row the prompts of its data set, by the models of the first seed.

    Raises:
        RunError: users are not those whom there are prompts for.
    """
    from comingle.reports.tokens import own_texts_figure, tokens_figure

    plot = plan.experiment.plot
    assert plot is not None
    for (row, column), entry in entries.items():
        view = prompts_view(plan, column, entry)
        layers = list(dict.fromkeys(layer_of(name, view.layers) for name in plot.tokens))  # one of a single layer
        if plot.own:
            yield f"{column}-{row}", own_texts_figure(view, layers)
        else:
            for layer in layers:
                yield f"{column}-{row}-layer{layer}", tokens_figure(view, layer)


def layer_of(name: str, layers: int) -> int:
    """The number of the first, middle or last of so many layers; of twelve the paper shows 0, 5 and 11."""
    return {"first": 0, "middle": (layers - 1) // 2, "last": layers - 1}[name]


def prompts_view(plan: Plan, column: str, entry: Any) -> TokenView:
    """The prompts in everybody's model, each owned by the user who has text of its kind."""
    import comingle
    from comingle.runs.views import view_of

    run = comingle.load(entry.first.folder)
    prompts, users = (
        plan.study.prompts[plan.column_of(column).data],
        [user.name for user in run.federation.clients.users],
    )
    if len(prompts) != len(users):
        raise RunError(f"{plan.name}: prompts for {', '.join(prompts)}, and users {', '.join(users)}")
    view = view_of(run, entry.label, list(prompts.items()), users, LENGTH)
    owned = zip(view.texts, users, strict=True)  # names differ where text is from the hub, their order does not
    return replace(view, texts=tuple(replace(text, owner=user) for text, user in owned), in_distribution=True)
