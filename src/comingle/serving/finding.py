"""The run of which a model is wanted: a folder's own, or one of a comparison's."""

from __future__ import annotations

from pathlib import Path

from comingle.config import Recipe, load_recipe
from comingle.utils.errors import RunError, did_you_mean


def find_run(folder: Path, method: str | None = None, seed: int | None = None) -> Path:
    """A run's folder; within a comparison's, the run of ``method`` with ``seed``, or with the lowest.

    Raises:
        RunError: several methods and none is named, or there is no run of that method or seed.
    """
    if (folder / "recipe.yaml").exists() or not folder.is_dir():
        return _alone(folder, method, seed)
    recipes = [(load_recipe(path.parent), path.parent) for path in sorted(folder.glob("*/metrics.json"))]
    if not recipes:
        return folder  # refused where it is read
    runs = [(_label(recipe, path), recipe.seed, path) for recipe, path in recipes]
    known = list(dict.fromkeys(label for label, _, _ in runs))
    if method is None and len(known) > 1:
        raise RunError(f"{folder}: is a comparison; say which run with --method: {', '.join(known)}")
    name = method if method is not None else known[0]
    if name not in known:
        raise RunError(f"{folder}: no run of {name!r}; there are: {', '.join(known)}.{did_you_mean(name, known)}")
    by_seed = {number: path for label, number, path in runs if label == name}
    if seed is not None and seed not in by_seed:
        raise RunError(f"--seed: got {seed}; of {name} there are: {', '.join(map(str, sorted(by_seed)))}")
    return by_seed[min(by_seed) if seed is None else seed]


def _label(recipe: Recipe, path: Path) -> str:
    """Return a run's method, with its settings as its folder's name has them where a comparison has several."""
    name, own = path.name.rpartition("-seed")[0], recipe.method.name
    return f"{own}:{name.removeprefix(own + '-')}" if name.startswith(f"{own}-") and "=" in name else own


def _alone(folder: Path, method: str | None, seed: int | None) -> Path:
    """The folder of a single run, which a method and a seed may only confirm."""
    if method is None and seed is None:
        return folder
    recipe = load_recipe(folder)
    for option, wanted, got in (("--method", method, recipe.method.name), ("--seed", seed, recipe.seed)):
        if wanted not in (None, got):
            told = f"is a run with {option} {got}; it is not the folder of a comparison, so leave out {option}"
            raise RunError(f"{folder}: {told}")
    return folder
