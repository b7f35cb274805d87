"""What a user says of itself, for its own machine: its name, where its data is, and what it tells of itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from comingle.config.data import Count, Section
from comingle.utils.names import name_problem

ENDED = "the federation has ended"
"""How the last line begins that a user's node says."""

Tells = Literal["all", "scores", "losses", "nothing"]
"""Each has what those behind it have."""

SCORES: frozenset[Tells] = frozenset({"all", "scores"})
"""With these a user's test scores and amounts of data are told."""


class Own(Section):
    """A participant's own part.

    ``data`` is what a recipe has under ``data.users.NAME``, or a mapping with ``dataset`` of which the user takes its
    own rows. ``runtime`` are keys of a recipe's ``runtime``. ``tells`` says which numbers about the user the server
    may see: "all" (how its model shares the work out among experts or components too), "scores" (losses, test scores,
    amounts of data), "losses" or "nothing"; without it scores, in a federation with privacy nothing. ``base`` is where
    the base is on this machine, if not where the federation's recipe says. ``expects`` are digests without which the
    user takes no part: ``recipe``, ``base``. ``max_runs`` is how many runs may lie in its folder: a server that begins
    one after the other does not fill the disk.
    """

    name: str
    data: Any
    runtime: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    tells: Tells | None = None
    base: str | None = None
    expects: dict[Literal["recipe", "base"], str] = {}  # noqa: RUF012
    max_runs: Count = 20

    @field_validator("name")
    @classmethod
    def _a_name(cls, name: str) -> str:
        if problem := name_problem([name]):
            raise ValueError(problem)
        return name

    def data_section(self, public: dict[str, Any]) -> dict[str, Any]:
        """The section ``data`` of the user's own recipe, whose options are the public ones."""
        options = {key: value for key, value in public.items() if key != "given"}
        if isinstance(self.data, dict) and "dataset" in self.data:
            return {**options, "dataset": {**self.data["dataset"], "users": [self.name]}}
        return {**options, "users": {self.name: self.data}}
