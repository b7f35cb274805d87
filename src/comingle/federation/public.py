"""The public part of a federation, which server and clients share, and a user's own settings."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from comingle import __version__
from comingle.config import Recipe, parse_recipe
from comingle.config.sections import with_older_defaults
from comingle.config.settings import MEMORY, values_in
from comingle.methods import make
from comingle.methods.base import Method
from comingle.models.base import Base, digests_of
from comingle.models.model import Model
from comingle.privacy.accounting import Work
from comingle.protocol.wire import FORMAT
from comingle.runs.folders import BOS
from comingle.training.kinds.base import RunData, check_recipe, kind_of, lazy_user
from comingle.training.plan import make_plan
from comingle.training.settings import RunPlan, work_of
from comingle.utils.errors import DataError, MessageError, RecipeError
from comingle.utils.names import name_problem
from comingle.utils.records import FEDERATION

ENDED = "the federation has ended"
"""Beginning of the last line that a client shows."""

KINDS = ("text", "conversations", "samples")
"""Kinds of data that can be on other machines."""


def tokens_of(digest: str) -> str:
    """Return the digest of a tokenizer without its chat template; older runs only have this."""
    return digest.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Public:
    """The part of a federation that server and clients share: recipe without data sources, users, and digests.

    Args:
        recipe: Content of the recipe, with ``data.given`` instead of sources.
        users: Names of the users.
        settings: Shapes and labels of networks.
        base: Digest of the base model; empty if users train networks from scratch.
        tokenizer: Digest of the tokenizer; empty if users train networks from scratch.
        version: Version of comingle.
        format: Version of the message format.
    """

    recipe: dict[str, Any]
    users: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    base: str = ""
    tokenizer: str = ""
    version: str = __version__
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """Digest of everything except the section ``runtime`` and the chat template: 16 hexadecimal digits."""
        content = self.as_dict()
        content["recipe"] = {key: value for key, value in self.recipe.items() if key != "runtime"}
        content["tokenizer"] = tokens_of(self.tokenizer)  # without the chat template
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Return the content for JSON."""
        return {**asdict(self), "users": list(self.users)}

    def check(self) -> None:
        """Check, on a client, that the server has the same version, and that the recipe suits remote clients.

        Raises:
            MessageError: A check fails.
        """
        for key, own_version in (("format", FORMAT), ("version", __version__)):
            server_version = getattr(self, key)
            if server_version != own_version:
                raise MessageError(
                    f"the federation: the server has {key} {server_version}, this client {own_version}; use the same"
                )
        try:
            recipe = self.whole_recipe()
            check_remote_clients(recipe)
        except RecipeError as error:  # about the server's recipe, so the server may read it
            raise MessageError(str(error)) from None
        continues = recipe.continue_from
        if continues is not None and not _RUN_NAME.fullmatch(continues.run):
            raise MessageError(
                f"the federation's recipe: continue_from.run: got {continues.run[:70]!r}; allowed: a name"
            )
        has_source = recipe.data.given is None  # `given` stands for sources in clients' files
        if has_source:
            raise MessageError("the federation's recipe: data: has a source; allowed: sources in clients' files only")

    def whole_recipe(self) -> Recipe:
        """Return the recipe, without data."""
        return parse_recipe(with_older_defaults(self.recipe), where="the federation's recipe")


_TYPES = {"recipe": dict, "users": list, "settings": dict, "base": str, "tokenizer": str, "version": str, "format": int}


def read_public(content: object) -> Public:
    """Return the public part that :meth:`Public.as_dict` has written, after checking its form.

    Args:
        content: Content from JSON, which may come from a faulty or hostile server.

    Raises:
        MessageError: The content has another form.
    """
    if not isinstance(content, Mapping) or "recipe" not in content or "users" not in content:
        raise MessageError("the federation: no recipe or no users")
    for key, value in content.items():
        if type(value) is not _TYPES.get(key):
            allowed = _TYPES[key].__name__ if key in _TYPES else f"only {', '.join(_TYPES)}"
            raise MessageError(f"the federation: {str(key)[:70]!r} is a {type(value).__name__}; allowed: {allowed}")
    names = content["users"]
    are_texts = all(isinstance(name, str) for name in names)
    if not names or not are_texts or name_problem(names):
        raise MessageError("the federation: users are not unique names")
    fields = dict(content)
    fields["users"] = tuple(names)
    return Public(**fields)


def public_part(recipe: Recipe, users: tuple[str, ...], settings: Mapping[str, Any], base: Base | None) -> Public:
    """Return the part of a federation that server and clients share: its recipe without data sources, and digests.

    Args:
        recipe: Settings of the run.
        users: Names of the users.
        settings: Shapes and labels of networks.
        base: The base; None if users train networks from scratch.

    Raises:
        RecipeError: The recipe needs all users' data in one place, or it sets a value by user name for an unknown user
            or not for all users.
    """
    check_remote_clients(recipe)
    recipe_with_lists = recipe.for_users(users)  # for example with "rank: [8, 4]" in place of {ada: 8, ben: 4}
    public_recipe = without_data(recipe_with_lists)
    data = public_recipe["data"]
    # The option for begin-of-text tokens is listed only if it is on. In this way, federations of older versions, which
    # lacked the option, keep their digests.
    data.pop(BOS, None)
    if getattr(recipe.data, BOS, False):
        data[BOS] = True
    data["given"] = True  # stands for sources in clients' files
    if recipe.continue_from is not None:  # clients know the earlier run by its name, and not by the server's path
        public_recipe["continue_from"]["run"] = run_name(Path(recipe.continue_from.run))
    public = Public(recipe=public_recipe, users=users, settings=dict(settings))
    return replace(public, **digests_of(base))


_RUN_NAME = re.compile(r"[0-9a-f]{16}")
"""Names of runs in messages. Clients have a folder for each run, so a name must not be a path."""


def run_name(run: Path) -> str:
    """Return the name in messages of a server's run.

    Args:
        run: The run folder of the server; a name is returned unchanged.

    Raises:
        RecipeError: The folder is not that of a federation's server.
    """
    if _RUN_NAME.fullmatch(str(run)):
        return str(run)
    try:
        return str(json.loads((run / FEDERATION).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError):
        raise RecipeError(
            f"continue_from.run: got {run}, no federation's server; allowed: a folder of `comingle server` or "
            "`comingle federate`"
        ) from None


def without_data(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe's content without users' data sources, which stay with the users, but with the kind of data."""
    content = recipe.model_dump(mode="json", exclude_unset=True)
    for source in ("users", "dataset", "given"):
        content["data"].pop(source, None)
    content["data"]["kind"] = recipe.data.kind  # the dump lacks it if the recipe leaves it to the default
    return content


def check_remote_clients(recipe: Recipe) -> None:
    """Check that a recipe can be run with clients on other machines, none of which has the data of other users.

    Raises:
        RecipeError: The kind of data, the method or an option of the data needs all users' data in one place.
    """
    method = check_recipe(recipe)
    kind, mixture = kind_of(recipe).name, method.placement.mixture
    if kind not in KINDS:
        raise RecipeError(f"data: got {kind}, which needs all users in one place; allowed: {', '.join(KINDS)}")
    if method.placement.pooled:
        raise RecipeError(f"method {method.name}: pools all users' data, but a federation leaves it with the users")
    uses_true_clusters = mixture is not None and mixture.optimal
    if uses_true_clusters:
        raise RecipeError(f"method {method.name}: needs users' true clusters, which clients do not report")
    if recipe.adapters.start is not None:
        raise RecipeError(f"adapters.start: got {recipe.adapters.start!r}; allowed in a federation: null")
    held_out = getattr(recipe.data, "held_out", None)  # some kinds of data do not have this option
    if held_out == "mixture":
        raise RecipeError("data.held_out: got mixture, which gives users' text to others; allowed: own")
    on_small_user = getattr(recipe.data, "on_small_user", None)
    if on_small_user == "skip":
        raise RecipeError("data.on_small_user: got skip, which needs all users' data; allowed: refuse")


# ---------------------------------------------------------------- derived from the public part


def plan_of(public: Public, recipe: Recipe) -> RunPlan:
    """Return the settings of a federation's run, as its server and each of its clients compute them."""
    method = make(recipe.method.name, **recipe.method.settings)
    plan = make_plan(recipe, method, list(public.users))
    # A client holds a single user, and the server none, so all tensors fit into memory whatever the recipe says.
    return plan.updated("runtime", store=MEMORY)


def remote_data(public: Public, recipe: Recipe, base: Base | None) -> RunData:
    """Return a run's data without the users' examples, which are on other machines: reading them raises an error.

    A server, or a client that holds one user's data, builds the model of all users from their names and settings.

    Args:
        public: Public part of the federation: users' names, and shapes and labels of networks.
        recipe: Settings of the run.
        base: The base; None if users train networks from scratch.
    """
    kind = kind_of(recipe)
    users = []
    for name in public.users:
        read_data = partial(_raise_not_here, name)
        users.append(lazy_user(kind.user, name, read_data))
    run_data = kind.reopened(base, tuple(users), public.settings)  # as for a finished run, which needs no examples
    return replace(run_data, here=())  # `here` lists the users whose data is on this machine


def _raise_not_here(name: str) -> Any:
    """Raise the error for reading the data of a user whose data is on another machine."""
    raise DataError(f"user {name!r}: the data is not on this machine")


def trains_whole_epochs(recipe: Recipe) -> bool:
    """Return whether a round of local steps is a number of passes over a user's data (``training.local_epochs``).

    Then the number of steps follows from the number of samples, which a user reports. Otherwise, as for text, the
    recipe sets it (``training.local_steps``).
    """
    keys_without_effect = type(recipe.data).unread  # keys of a recipe that this kind of data ignores
    return "training.local_steps" in keys_without_effect


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """Recipe, settings and data description of a run, as its server derives them from the public part.

    Args:
        recipe: The recipe, without data.
        plan: Settings of the run.
        data: All users; their data cannot be read here.
    """

    recipe: Recipe
    plan: RunPlan
    data: RunData

    @classmethod
    def of(cls, public: Public, base: Base | None) -> ServerContext:
        """Return the context of a federation, whose users' data is all on other machines.

        Args:
            public: What all users may know of the federation, such as its recipe and their names.
            base: The base model; None if users train networks from scratch.
        """
        recipe = public.whole_recipe()
        return cls(
            recipe=recipe,
            plan=plan_of(public, recipe),
            data=remote_data(public, recipe, base),
        )

    @property
    def method(self) -> Method:
        """The method of the run."""
        return self.plan.method

    def model(self) -> Model:
        """Return the model of all users."""
        return self.data.kind.model(self.recipe, self.data, self.plan)

    @property
    def planned_rounds(self) -> int:
        """Number of rounds in the recipe; 0 for a method without training."""
        return self.plan.training.rounds if self.method.trains else 0

    def most_steps(self, max_samples: int, user: str | None = None) -> int:
        """Return the largest number of local steps per round that a user with at most ``max_samples`` samples takes.

        Args:
            max_samples: Largest number of samples or conversations that the user may have; not used for text, for which
                the recipe sets the number of local steps.
            user: Name of the user; None for the maximum over users.
        """
        training, plan = self.plan.training, self.plan
        if not trains_whole_epochs(self.recipe):
            return training.most_local_steps if user is None else plan.local_steps_of(user)
        smallest_batch = min(values_in(training.batch_size))  # of all users; it takes the most steps
        batch_size = smallest_batch if user is None else plan.batch_size_of(user)
        num_batches = max(1, -(-max_samples // batch_size))  # rounded up
        return training.local_epochs * num_batches

    def check_steps(self, steps: int, max_samples: int) -> None:
        """Check the number of local steps per round that a user reports.

        Args:
            steps: The number.
            max_samples: Largest number of samples or conversations that a user may have.

        Raises:
            MessageError: The number differs from the recipe's or, if the recipe does not set it, is too large.
        """
        most_steps = self.most_steps(max_samples)
        recipe_sets_steps = not trains_whole_epochs(self.recipe)
        if recipe_sets_steps and steps != most_steps:
            raise MessageError(f"answer: got {steps:,} local steps; allowed: {most_steps:,}, as in the recipe")
        if steps > most_steps:
            limit = f"up to {most_steps:,} (network.max_samples is {max_samples:,})"
            raise MessageError(f"answer: got {steps:,} local steps; allowed: {limit}")

    def work_by_user(self, examples: Mapping[str, int]) -> dict[str, Work]:
        """Return each user's work, from which the epsilon of DP-SGD follows: examples, batch size, steps and rounds.

        Args:
            examples: Number of examples by user.
        """
        work = {}
        for name, num_examples in examples.items():
            num_steps = self.most_steps(num_examples, name)  # a user with this many examples takes exactly these
            work[name] = work_of(self.plan, name, examples=num_examples, local_steps=num_steps)
        return work
