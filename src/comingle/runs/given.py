"""Objects that a program passes beside a recipe: users' data, a base, a function that makes nets, a method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from comingle.config import Recipe, load_recipe, parse_recipe
from comingle.config.settings import KINDS
from comingle.methods import Make, temporarily_registered
from comingle.methods.base import Method
from comingle.models.base import Base, with_date
from comingle.models.generation import check_context_length
from comingle.models.loading import GIVEN, given_base, load_base
from comingle.models.nets import require_net
from comingle.models.pretrained import PreTrainedModel, PreTrainedTokenizerBase
from comingle.training.kinds.base import NETS, kind_of, kind_of_users
from comingle.utils.errors import BaseModelError, DataError, RecipeError

AnyRecipe = Recipe | str | Path | Mapping[str, Any]
"""A recipe, the path of a recipe file or run folder, or the content of a recipe file."""
AnyBase = str | tuple[PreTrainedModel, PreTrainedTokenizerBase | None] | Callable[..., nn.Module]
"""A name, a model of transformers with its tokenizer, or a function that makes an ``nn.Module`` for a user."""
AnyMethod = str | Method | Make | Mapping[str, Any]
"""A name, a method, a function that makes one, or ``{"name": one of these, "setting": value}``."""

Loss = Callable[..., Tensor]
"""A function of outputs and targets that returns one number per sample."""

USERS_MISSING = "users: a program passed them, so the recipe has no paths; pass users={...} again, in Python"
_REGISTERED = "base='net:NAME' of a net registered with comingle.models.nets.NETS.register(NAME, FUNCTION)"
_BASES = "a name, (model, tokenizer) of transformers, or a function that returns an nn.Module"


@dataclass(frozen=True, kw_only=True)
class Given:
    """Objects that a program passes; None where it does not."""

    users: Mapping[str, Any] | None = None
    """Each user's data by name, of the kind that the recipe's ``data`` names."""
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase | None] | None = None
    """The base as a pair of a language model and its tokenizer; the tokenizer may be None."""
    net: Callable[..., Any] | None = None
    """The base as a function that returns an ``nn.Module``."""
    loss: Callable[..., Any] | None = None
    """Returns the loss of each sample."""
    method: Any = None
    date: str = ""
    """The date of the run to resume, for a chat template that writes the date; see :func:`with_date`."""
    bases: dict[Any, Base] | None = None
    """Named base models that this process has loaded, by their settings. A base that is not among them is added."""

    def check(self, recipe: Recipe) -> None:
        """Check that the program has passed all objects that the recipe expects, and none that it cannot use.

        Raises:
            DataError: The users are missing.
            BaseModelError: The base is missing, or does not fit the users' kind of data.
            RecipeError: A function that makes nets or a loss function is passed for users whose data the recipe names,
                or for users who have no samples.
        """
        if recipe.data.given and self.users is None:  # the recipe marks its users as passed by a program
            raise DataError(USERS_MISSING)
        self.check_base(recipe)
        self.check_net(recipe, in_python="call NETS.register" + (", or pass base=FUNCTION" if self.users else ""))
        for name, function in {"base": self.net, "loss": self.loss}.items():
            if function is not None and self.users is None:
                # A recipe can name a registered net, but not a loss.
                registered = f", or {_REGISTERED}" if name == "base" else ""
                raise RecipeError(
                    f"{name}: got a function for users of a recipe; allowed: only with users={{...}}{registered}"
                )

    def check_base(self, recipe: Recipe) -> None:
        """Check that the passed base and loss function fit a recipe.

        Users who have samples train nets of their own and no language model. Other users train a language model, and
        need no loss function.

        Raises:
            BaseModelError: The base is missing, or does not fit the users' kind of data.
            RecipeError: There is a loss function, and the users have no samples.
        """
        needs_base = kind_of(recipe).needs_base
        if recipe.base == GIVEN and self.loaded is None:
            raise BaseModelError("base: a program passed it; pass base=(model, tokenizer) again, in Python")
        if needs_base and self.loss is not None:
            raise RecipeError(f"loss: got a function for {recipe.data.label}; allowed: only for samples")
        if needs_base and self.net is not None:
            raise BaseModelError(f"base: got a function for {recipe.data.label}; allowed: a name or (model, tokenizer)")
        if not needs_base and self.loaded is not None:
            raise BaseModelError(
                f"base: got a language model for {recipe.data.label}; allowed: a function that returns an nn.Module"
            )

    def check_net(self, recipe: Recipe, *, in_python: str) -> None:
        """Check that the net that a recipe names is registered.

        Nothing is checked if a program passes a function that makes nets, since this function replaces the named net.

        Args:
            recipe: The recipe.
            in_python: The end of the error message: how a Python program can use a net of its own.

        Raises:
            RecipeError: No net is registered under this name.
        """
        # `base` is "net:NAME" for a registered net, and the name of a language model for other kinds of data.
        is_named = "base" in recipe.model_fields_set and recipe.base.startswith(NETS)
        if is_named and self.net is None and not kind_of(recipe).needs_base:
            require_net(recipe.base.removeprefix(NETS), in_python=in_python)

    def load_base(self, recipe: Recipe) -> Base:
        """Return the passed base, or else the recipe's, on the device and with the dtype of its runtime.

        If the base's chat template writes the current date, the base gets a fixed date, so that all prompts of a run
        are alike: the date of the start, also if the run is resumed.

        Raises:
            BaseModelError: The base cannot be used.
            RecipeError: The base's context is shorter than the recipe's windows, or a passed base is to be quantised.
        """
        runtime, loaded = recipe.runtime, self.loaded
        self.check_base(recipe)
        if loaded is not None and recipe.quantise != "none":
            raise RecipeError(f"quantise: got {recipe.quantise!r} for a base that a program passed; allowed: none")
        load = partial(given_base, *loaded) if loaded else partial(load_base, recipe.base, quantise=recipe.quantise)
        settings = {"dtype": runtime.dtype, "device": runtime.device, "attention": runtime.attention}
        if loaded or self.bases is None:
            base = load(**settings)
        else:  # reuse a base that this process has loaded for the same recipe keys
            key = (recipe.base, recipe.quantise, *settings.values())
            if key not in self.bases:
                self.bases[key] = load(**settings)
            base = self.bases[key]
        check_context_length("training.context", recipe.training.context, base.model)
        return replace(with_date(base, self.date), adds_bos=getattr(recipe.data, "add_bos_token", True))


NOTHING = Given()


def given_of(users: Mapping[str, Any] | None, base: Any, method: Any = None, loss: Any = None) -> Given:
    """Collect the arguments of a program that a recipe cannot contain, such as users' data or a loaded model.

    Args:
        users: Each user's data by name.
        base: One of three forms, or None to use the recipe's base. A name is not stored in the result, because a recipe
            can contain it. A pair ``(model, tokenizer)`` becomes :attr:`Given.loaded`. A function that returns an
            ``nn.Module`` becomes :attr:`Given.net`.
        method: A method, in any form that :func:`comingle.run` accepts; None to use the recipe's.
        loss: A function of outputs and targets that returns one loss per sample; None to use the recipe's.

    Raises:
        BaseModelError: The base has none of these forms.
    """
    if base is None or isinstance(base, str):
        return Given(users=users, method=method, loss=loss)
    if isinstance(base, tuple | list) and len(base) == 2:
        return Given(users=users, method=method, loss=loss, loaded=(base[0], base[1]))
    if callable(base) and not isinstance(base, nn.Module):
        return Given(users=users, method=method, loss=loss, net=base)
    raise BaseModelError(f"base: got {type(base).__name__}; allowed: {_BASES}{_hint_for_module(base)}")


def _hint_for_module(base: object) -> str:
    """Return the end of the error about a wrong base: a hint if a program passed a module, otherwise empty.

    Each user needs a net of its own, so a program passes a function that makes nets, such as the class of a net.
    """
    if not isinstance(base, nn.Module):
        return ""
    is_class_of_torch = type(base).__module__.startswith("torch.")
    if is_class_of_torch:  # such as nn.Linear, which cannot make a net without arguments
        return "; pass a function that makes one"
    return f"; pass the class {type(base).__name__}, or a function that makes one"


def recipe_with(
    recipe: AnyRecipe | None, given: Given, *, base: Any, method: Any, changes: Mapping[str, Any]
) -> Recipe:
    """Return a program's recipe with its changes.

    Objects that the program passes, such as users' data, cannot be part of a recipe. The recipe only says that they are
    given, so that a run folder tells which objects to pass again.

    Args:
        recipe: A recipe, the path of one, its content, or None for defaults.
        given: The objects that the program passes. Passed users replace those of the recipe, and a function that makes
            nets replaces its base.
        base: The base that the program passes. A name replaces the recipe's base. If the base is a pair ``(model,
            tokenizer)``, the recipe says that a program passes it. None keeps the recipe's base.
        method: The name or mapping of a method, which replaces the recipe's; None keeps it.
        changes: New values by dotted recipe key; they are applied last.

    Raises:
        RecipeError: A key of the recipe is wrong.
        DataError: The users' data is of no known kind, or of several.
    """
    has_net = given.net is not None

    def mark_given(content: object) -> Any:
        """Return a recipe's content that says that users are given, and that has no base if a net is passed."""
        if given.users is not None:
            content = _with_given_users(content, given.users, changes, nets=has_net)
        if has_net and isinstance(content, Mapping):  # the net replaces a base by name
            return {key: value for key, value in content.items() if key != "base"}
        return content

    # Content is marked before it is parsed, since a recipe without users or base may be incomplete.
    if isinstance(recipe, str | Path):
        parsed = load_recipe(recipe, change=mark_given)
    elif isinstance(recipe, Recipe) and given.users is None and given.net is None:
        parsed = recipe
    else:
        content = recipe.model_dump(mode="json", exclude_unset=True) if isinstance(recipe, Recipe) else recipe or {}
        parsed = parse_recipe(mark_given(content))
    if given.users is not None and "data" in changes:  # the change may set options of `data`, but not other users
        changes = {**changes, **_with_given_users({"data": changes["data"]}, given.users, changes, nets=has_net)}
    all_changes: dict[str, Any] = {}
    if isinstance(base, str) or given.loaded is not None:
        all_changes["base"] = base if isinstance(base, str) else GIVEN
    if method is not None:
        all_changes["method"] = method
    all_changes |= merged(parsed, changes)
    return parsed.with_changes(all_changes) if all_changes else parsed


def merged(recipe: Recipe, changes: Mapping[str, object]) -> dict[str, Any]:
    """Return changes of a recipe in which sections are complete.

    A changed section keeps the recipe's keys that the change does not mention. For example, the change
    ``training={"rounds": 5}`` keeps the other keys of ``training``.

    Some changes replace the whole section. If a mapping names another method, optimiser or aggregation rule, the
    recipe's other keys are settings of the old one. Other users replace the old users. None as the value of a section
    resets the section to its defaults.

    Args:
        recipe: The recipe.
        changes: New values by dotted recipe key, such as ``training`` or ``training.rounds``.

    Returns:
        The full new values by the same keys.
    """
    content, full_changes = recipe.model_dump(mode="json", exclude_unset=True), dict[str, Any]()
    for key, value in changes.items():
        old: Any = content  # becomes the recipe's value of the key; None if the recipe does not set it
        for part in key.split("."):
            old = old.get(part) if isinstance(old, Mapping) else None
        if value is None and key in _SECTIONS:
            full_changes[key] = {}
        elif key.partition(".")[0] == "method":  # settings of one method mean nothing to another
            full_changes[key] = value
        else:
            full_changes[key] = _merge_sections(old, value)
    return full_changes


def _merge_sections(old: object, new: object) -> object:
    """Return an old value with a new one merged into it, mapping by mapping; other values are replaced.

    A mapping is replaced as a whole if it changes a key that determines the meaning of the others, such as the name of
    an optimiser, and under ``users``, where old and new names must not mix.
    """
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    if any(key in new and new[key] != old.get(key) for key in _KIND_KEYS):
        return new
    merged_section = dict(old)
    for key, value in new.items():
        merged_section[key] = value if key == "users" else _merge_sections(old.get(key), value)
    return merged_section


# Sections in which every key has a default.
_SECTIONS = ("adapters", "floral", "training", "evaluation", "aggregation", "checkpoints", "runtime")
_KIND_KEYS = ("name", "rule", "mechanism", "kind", "users", "dataset", "task", "questions", "tasks")
"""Keys that determine the meaning of the others in their section."""


def _refuse_paths(users: Mapping[str, object]) -> None:
    """Check that a program has passed the samples of its users as objects, not as paths of folders.

    Only a recipe can name folders of samples.

    Raises:
        DataError: A user's data is a path, or a mapping of splits to paths; the message says how to read folders.
    """
    if not isinstance(users, Mapping):  # a wrong type is reported by another check
        return
    for name, data in users.items():
        # Of a mapping from splits to data, the first value shows whether the values are paths.
        path = next(iter(data.values()), None) if isinstance(data, Mapping) else data
        if isinstance(path, str | Path):
            raise DataError(
                f"users: {name!r}: got the path {str(path)!r}; allowed: a torch Dataset or a pair of arrays; to read "
                f"folders, put data={{'kind': 'samples', 'users': {{{name!r}: {str(path)!r}}}}} in "
                f"the recipe, and give {_REGISTERED}"
            )


def _with_given_users(content: Any, users: Mapping[str, Any], changes: Mapping[str, Any], *, nets: bool) -> Any:
    """Return a recipe's content whose section ``data`` says that a program passes the users (``given: true``).

    The section keeps its options, such as the sizes of splits. It loses the keys that say where data is read from, and
    gets the ``kind`` of the passed data. The program's changes of the recipe are not applied here.

    Args:
        content: The content of a recipe file; returned unchanged if it is not a mapping with a mapping ``data``.
        users: The passed users' data by name, which determines the kind of data together with the options.
        changes: The program's changes by recipe key. Changed options of ``data`` help to determine the kind of data.
        nets: Whether the program passes a net, which trains on samples; samples must not be given by a path.

    Raises:
        DataError: Samples are given by a path, or the data is of no known kind, or of several.
    """
    if not isinstance(content, Mapping) or not isinstance(data := content.get("data") or {}, Mapping):
        return content
    # The options as they will be after the changes: `data={...}` replaces all, `data.KEY=...` single ones.
    section = changes["data"] if isinstance(changes.get("data"), Mapping) else data
    changed_keys = {key.removeprefix("data."): value for key, value in changes.items() if key.startswith("data.")}
    options = {**section, **changed_keys}
    if nets or options.get("kind") == "samples":
        _refuse_paths(users)
    kind = kind_of_users(users, options)
    source_keys = {"users", "dataset", *KINDS[kind].marks}  # keys that say where data is read from
    kept_options = {key: value for key, value in data.items() if key not in source_keys}
    return {**content, "data": {**kept_options, "kind": kind, "given": True}}


@contextmanager
def registered_methods(methods: Sequence[object]) -> Iterator[list[object]]:
    """Register the methods that a program passes, so that recipes can name them; unregister them on exit.

    Args:
        methods: Each is a name, a method, a function that returns one, a mapping of ``name`` and settings, or None.

    Yields:
        Each method as in a recipe: its name, or a mapping of ``name`` and settings. None stays None.

    Raises:
        PluginError: Another method has the same name.
        RecipeError: A function does not return a method.
    """
    with ExitStack() as stack:
        yield [_with_registered_method(stack, method) for method in methods]


def _with_registered_method(stack: ExitStack, method: Any) -> Any:
    """Return a method as recipes name it, and register it until ``stack`` is closed.

    Args:
        stack: Unregisters the method when it is closed.
        method: A name, a method, a function that makes one, a mapping with such a ``name`` and settings, or None.

    Raises:
        PluginError: Another method has the same name.
        RecipeError: A mapping has no ``name``, or a function does not return a method.
    """
    if method is None:
        return None
    if not isinstance(method, Mapping):
        return stack.enter_context(temporarily_registered(method))
    if "name" not in method:
        raise RecipeError("method: got a mapping without name; allowed: {'name': a name or a method, 'setting': value}")
    return {**method, "name": stack.enter_context(temporarily_registered(method["name"]))}
