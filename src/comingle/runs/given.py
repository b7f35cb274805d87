"""Objects that a program passes beside a recipe: users' data, a base, a function that makes nets, a method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
    """Objects that a program passes beside a recipe; None for those that it does not pass."""

    users: Mapping[str, Any] | None = None
    """Each user's data by name, of the kind that the recipe's ``data`` names."""
    language_model: tuple[PreTrainedModel, PreTrainedTokenizerBase | None] | None = None
    """A base for texts and conversations: a model and its tokenizer, which may be None."""
    make_net: Callable[..., Any] | None = None
    """A base for samples: a function that returns a user's net, an ``nn.Module``."""
    loss: Callable[..., Any] | None = None
    """Returns the loss of each sample."""
    method: Any = None
    date: str = ""
    """The date of the run to resume, for a chat template that writes the date; see :func:`with_date`."""
    loaded_bases: dict[Any, Base] | None = None
    """Base models that this process has loaded by name, by their settings; a base that is loaded later is added."""

    def check(self, recipe: Recipe) -> None:
        """Check that the program has passed all objects that the recipe expects, and none that it cannot use.

        Raises:
            DataError: The users are missing.
            BaseModelError: The base is missing, or does not fit the users' kind of data.
            RecipeError: A function that makes nets, or a loss function, is passed without users, or for users who have
                no samples.
        """
        if recipe.data.given and self.users is None:  # `data.given`: a program passes the users
            raise DataError(USERS_MISSING)
        self.check_base(recipe)
        how_to_use_net = "call NETS.register"  # end of the message if the recipe names a net that is not registered
        if self.users:
            how_to_use_net += ", or pass base=FUNCTION"
        self.check_net(recipe, in_python=how_to_use_net)
        if self.users is not None:
            return
        # If the recipe names the users, it must name their net and loss, too.
        only_with_users = "got a function for users of a recipe; allowed: only with users={...}"
        if self.make_net is not None:
            raise RecipeError(f"base: {only_with_users}, or {_REGISTERED}")
        if self.loss is not None:
            raise RecipeError(f"loss: {only_with_users}")

    def check_base(self, recipe: Recipe) -> None:
        """Check that the passed base and loss function fit the kind of data of a recipe.

        Texts and conversations need a language model and no loss function. Samples need a function that makes nets.

        Raises:
            BaseModelError: The base is missing, or does not fit the kind of data.
            RecipeError: There is a loss function, and the users have no samples.
        """
        needs_language_model = kind_of(recipe).needs_base
        if recipe.base == GIVEN and self.language_model is None:
            raise BaseModelError("base: a program passed it; pass base=(model, tokenizer) again, in Python")
        if needs_language_model and self.loss is not None:
            raise RecipeError(f"loss: got a function for {recipe.data.label}; allowed: only for samples")
        if needs_language_model and self.make_net is not None:
            raise BaseModelError(f"base: got a function for {recipe.data.label}; allowed: a name or (model, tokenizer)")
        if not needs_language_model and self.language_model is not None:
            raise BaseModelError(
                f"base: got a language model for {recipe.data.label}; allowed: a function that returns an nn.Module"
            )

    def check_net(self, recipe: Recipe, *, in_python: str) -> None:
        """Check that the net of a recipe's ``base: net:NAME`` is registered.

        Nothing is checked if a program passes a function that makes nets, since this function replaces the named net.

        Args:
            recipe: The recipe, which may name a net.
            in_python: The end of the error message: how a Python program can use a net of its own.

        Raises:
            RecipeError: No net is registered under this name.
        """
        if self.make_net is not None or kind_of(recipe).needs_base:  # text and conversations need a language model
            return
        # A recipe without ``base`` trains the data's own net.
        names_net = "base" in recipe.model_fields_set and recipe.base.startswith(NETS)
        if names_net:
            require_net(recipe.base.removeprefix(NETS), in_python=in_python)

    def load_base(self, recipe: Recipe) -> Base:
        """Return the passed language model, or load the recipe's, on the device and with the dtype of its runtime.

        If its chat template writes the current date, the base gets a fixed date, so that all prompts of a run are
        alike: the date of the start, also if the run is resumed.

        Raises:
            BaseModelError: The base cannot be used.
            RecipeError: The base's context is shorter than the recipe's windows, or a passed base is to be quantised.
        """
        self.check_base(recipe)
        settings = base_settings(recipe)
        if self.language_model is not None:
            if recipe.quantise != "none":
                raise RecipeError(f"quantise: got {recipe.quantise!r} for a base that a program passed; allowed: none")
            model, tokenizer = self.language_model
            base = given_base(model, tokenizer, **settings)
        else:
            base = self._load_named_base(recipe, settings)
        check_context_length("training.context", recipe.training.context, base.model)
        adds_bos = getattr(recipe.data, "add_bos_token", True)
        return replace(with_date(base, self.date), adds_bos=adds_bos)

    def _load_named_base(self, recipe: Recipe, settings: Mapping[str, Any]) -> Base:
        """Return the base that the recipe names: one of ``loaded_bases`` if it is there, otherwise load it.

        Args:
            recipe: The recipe, which names the base.
            settings: Options of :func:`load_base`: ``dtype``, ``device`` and ``attention``.
        """
        if self.loaded_bases is None:
            return load_base(recipe.base, quantise=recipe.quantise, **settings)
        key = base_key(recipe)
        if key not in self.loaded_bases:
            self.loaded_bases[key] = load_base(recipe.base, quantise=recipe.quantise, **settings)
        return self.loaded_bases[key]


def base_settings(recipe: Recipe) -> dict[str, str]:
    """Return the options of :func:`load_base` that a recipe sets for any base."""
    runtime = recipe.runtime
    return {"dtype": runtime.dtype, "device": runtime.device, "attention": runtime.attention}


def base_key(recipe: Recipe) -> tuple[str, ...]:
    """Return the key of a recipe's base in :attr:`Given.loaded_bases`."""
    return (recipe.base, recipe.quantise, *base_settings(recipe).values())


NOTHING = Given()
"""For runs to which a program passes no objects: everything comes from the names and paths in the recipe."""


def given_of(users: Mapping[str, Any] | None, base: Any, method: Any = None, loss: Any = None) -> Given:
    """Collect the arguments of a program that a recipe cannot contain, such as users' data or a loaded model.

    Args:
        users: Each user's data by name.
        base: A pair ``(model, tokenizer)``, or a function that returns an ``nn.Module``. A name, which a recipe can
            contain, and None are not stored.
        method: A method, in any form that :func:`comingle.run` accepts; None to use the recipe's.
        loss: A function of outputs and targets that returns one loss per sample; None to use the recipe's.

    Raises:
        BaseModelError: The base is none of these.
    """
    given = Given(users=users, method=method, loss=loss)
    if base is None or isinstance(base, str):
        return given
    if isinstance(base, tuple | list) and len(base) == 2:
        model, tokenizer = base
        return replace(given, language_model=(model, tokenizer))
    if callable(base) and not isinstance(base, nn.Module):
        return replace(given, make_net=base)
    raise BaseModelError(f"base: got {type(base).__name__}; allowed: {_BASES}{_hint_for_module(base)}")


def _hint_for_module(base: object) -> str:
    """Return a hint for a program that passed a module where a function that makes modules is needed, else ``""``."""
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

    Objects that the program passes cannot be part of a recipe. The recipe only says that there are such objects, as in
    ``data: {given: true}``, so that a run folder tells which ones to pass again.

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
    passes_net = given.make_net is not None

    def mark_given(content: object) -> Any:
        """Return a recipe's content that says that users are given, and that has no base if a net is passed."""
        if given.users is not None:
            content = _with_given_users(content, given.users, changes, passes_net=passes_net)
        if passes_net and isinstance(content, Mapping):
            return {key: value for key, value in content.items() if key != "base"}
        return content

    # Content is marked before it is parsed, since a recipe without users or base may be incomplete.
    if isinstance(recipe, str | Path):
        parsed = load_recipe(recipe, change=mark_given)
    elif isinstance(recipe, Recipe):
        parsed = recipe
        if given.users is not None or passes_net:
            parsed = parse_recipe(mark_given(recipe.model_dump(mode="json", exclude_unset=True)))
    else:
        parsed = parse_recipe(mark_given(recipe or {}))
    if given.users is not None and "data" in changes:  # the change may set options of `data`, but not other users
        marked_data = _with_given_users({"data": changes["data"]}, given.users, changes, passes_net=passes_net)
        changes = {**changes, **marked_data}
    all_changes: dict[str, Any] = {}
    if isinstance(base, str):
        all_changes["base"] = base
    elif given.language_model is not None:
        all_changes["base"] = GIVEN
    if method is not None:
        all_changes["method"] = method
    all_changes.update(complete_changes(parsed, changes))
    return parsed.with_changes(all_changes) if all_changes else parsed


def complete_changes(recipe: Recipe, changes: Mapping[str, object]) -> dict[str, Any]:
    """Return changes of a recipe, with the other keys of each changed section added, so that they are kept.

    ``training={"rounds": 5}`` becomes ``training={"rounds": 5, "batch_size": 4}`` if the recipe has that batch size.

    Some changes replace the whole section instead: another method, optimiser or aggregation rule, whose settings
    differ from the old one's; other users; and None, which resets a section to its defaults.

    Args:
        recipe: The recipe to change.
        changes: New values by dotted recipe key, such as ``training`` or ``training.rounds``.

    Returns:
        The complete new values by the same keys.
    """
    content = recipe.model_dump(mode="json", exclude_unset=True)
    completed: dict[str, Any] = {}
    for key, new in changes.items():
        if new is None and key in _SECTIONS:
            completed[key] = {}
        elif key == "method" or key.startswith("method."):  # settings of one method mean nothing to another
            completed[key] = new
        else:
            old = _value_at(content, key)
            completed[key] = _merge_sections(old, new)
    return completed


def _value_at(content: object, dotted_key: str) -> object:
    """Return 5 for ``{"training": {"rounds": 5}}`` and ``training.rounds``; None if there is no such key."""
    value: Any = content
    for part in dotted_key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _merge_sections(old: object, new: object) -> object:
    """Return a recipe's section with new values, and with the old ones where there are no new ones.

    The old ``{"name": "adamw", "lr": 1}`` and the new ``{"lr": 2}`` become ``{"name": "adamw", "lr": 2}``. Mappings
    inside are merged in the same way. A new mapping replaces the old one as a whole if it changes a key on which the
    others depend, such as ``name``. A new value that is not a mapping replaces the old one.
    """
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    changes_kind = any(key in new and new[key] != old.get(key) for key in _KIND_KEYS)
    if changes_kind:
        return new
    merged_section = dict(old)
    for key, value in new.items():
        if key == "users":  # old and new names must not mix
            merged_section[key] = value
        else:
            merged_section[key] = _merge_sections(old.get(key), value)
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
        data_of_split = data
        if isinstance(data, Mapping):  # such as {"train": data, "test": data}
            data_of_split = next(iter(data.values()), None)
        if isinstance(data_of_split, str | Path):
            path = str(data_of_split)
            raise DataError(
                f"users: {name!r}: got the path {path!r}; allowed: a torch Dataset or a pair of arrays; to read "
                f"folders, put data={{'kind': 'samples', 'users': {{{name!r}: {path!r}}}}} in "
                f"the recipe, and give {_REGISTERED}"
            )


def _with_given_users(content: Any, users: Mapping[str, Any], changes: Mapping[str, Any], *, passes_net: bool) -> Any:
    """Return a recipe's content whose section ``data`` says that a program passes the users (``given: true``).

    The section keeps its options, such as the sizes of splits, and loses the keys that say where data is read from.
    The program's changes of the recipe are not applied here.

    Args:
        content: The content of a recipe file; returned unchanged if it is not a mapping with a mapping ``data``.
        users: The passed users' data by name, which determines the kind of data together with the options.
        changes: The program's changes by recipe key. Changed options of ``data`` help to determine the kind of data.
        passes_net: Whether the program passes a function that makes nets, so that the data must be samples.

    Raises:
        DataError: Samples are given by a path, or the data is of no known kind, or of several.
    """
    if not isinstance(content, Mapping):
        return content
    data = content.get("data") or {}
    if not isinstance(data, Mapping):
        return content
    # The options as they will be after the changes: `data={...}` replaces all, `data.KEY=...` single ones.
    options = dict(data)
    if isinstance(changes.get("data"), Mapping):
        options = dict(changes["data"])
    for key, value in changes.items():
        if key.startswith("data."):
            options[key.removeprefix("data.")] = value
    if passes_net or options.get("kind") == "samples":
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
    """Register a method until ``stack`` is closed; return it as in a recipe, such as ``"fedavg"``.

    Args:
        stack: Unregisters the method when it is closed.
        method: A name, a method, a function that makes one, None, or a mapping of ``name`` to one of these and of
            settings.

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
    name = stack.enter_context(temporarily_registered(method["name"]))
    return {**method, "name": name}
