"""comingle: many users fine-tune one small language model together, and each of them gets a personal model.

The Python API is as short as the command line::

    import comingle

    run = comingle.run("recipes/demo.yaml", method="comigs-1g1s")
    print(run.metrics["mean_test_perplexity"])
    print(run.user("reference").generate("The with statement"))

Everything heavy (torch, transformers) is imported on first use.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from functools import cache, partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

SPINS = "2000"
"""Number of times that a waiting thread of GNU OpenMP polls for work before it sleeps.

With the default of 300,000, a run of two threads beside another one on two processors took more than fifteen times as
long. 2,000 costs a run that has the machine to itself 2% to 7% (``benchmarks/crowded.py``).
"""

if TYPE_CHECKING:
    from comingle.audits.auditing import audit as audit
    from comingle.config import Recipe as Recipe
    from comingle.models.floral.wrapper import floral as floral
    from comingle.runs.api import load as load
    from comingle.runs.api import run as run
    from comingle.runs.comparison import advise as advise
    from comingle.runs.comparison import compare as compare
    from comingle.runs.join import join as join
    from comingle.runs.views import report as report
    from comingle.utils.errors import ComingleError as ComingleError

_MODULES = {
    "ComingleError": "comingle.utils.errors",
    "Recipe": "comingle.config",
    "advise": "comingle.runs.comparison",
    "audit": "comingle.audits.auditing",
    "compare": "comingle.runs.comparison",
    "floral": "comingle.models.floral.wrapper",
    "join": "comingle.runs.join",
    "load": "comingle.runs.api",
    "report": "comingle.runs.views",
    "run": "comingle.runs.api",
}

__all__ = [
    "ComingleError",
    "Recipe",
    "__version__",
    "advise",
    "audit",
    "compare",
    "floral",
    "join",
    "load",
    "report",
    "run",
]


def _prepare_threads() -> None:
    """Let waiting threads of PyTorch's OpenMP sleep early, so that concurrent runs do not slow each other down.

    Sets GOMP_SPINCOUNT, which is read when PyTorch is imported; a value that the user has set stays.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    if "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = SPINS
    elif sys.platform == "linux" and os.environ.get("OMP_NUM_THREADS") != "1":
        import logging  # imported here, as it takes longer than the rest of this module

        logging.getLogger(__name__).warning(
            "comingle: imported after torch, so waiting threads busy-wait, and concurrent runs may take many times as "
            "long; import comingle first, or set GOMP_SPINCOUNT=%s",
            SPINS,
        )


_prepare_threads()


@cache
def _moved() -> dict[str, str]:
    """Return the current name of each module that has moved since version 0.1.0."""
    from pathlib import Path  # imported here, as only failed imports need it

    lines = Path(__file__).with_name("moved.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines)


class _MovedModules:
    """Importer of the modules of ``moved.txt``, which forwards to their new modules and warns."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec if ``fullname`` is the old name of a module that has moved, or a package above such a name.

        Python calls it for modules that it has not found; ``path`` and ``target`` are not needed.
        """
        loader: Any = self
        found = fullname.startswith("comingle.") and any(f"{old}.".startswith(f"{fullname}.") for old in _moved())
        return ModuleSpec(fullname, loader, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, which creates an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill the empty module of an old name: warn, and forward its attributes to the module of the current name."""
        if (new := _moved().get(module.__name__)) is None:  # a package of modules that have moved, which stays empty
            return
        warnings.warn(f"{module.__name__} is now {new}", DeprecationWarning, stacklevel=2)
        vars(module)["__getattr__"] = partial(getattr, importlib.import_module(new))


sys.meta_path.append(_MovedModules())  # type: ignore[arg-type]


def __dir__() -> list[str]:
    return sorted(__all__)


def _module_of(name: str) -> str:
    """Return the module that defines a public name of this package.

    In a process that a launcher such as torchrun has started, ``run`` is the function that trains in several processes.
    """
    from comingle.training.backends.launched import find_place

    return "comingle.runs.distributed" if name == "run" and find_place() is not None else _MODULES[name]


def __getattr__(name: str) -> Any:
    """Import a public name, such as ``run``, on first use, so that ``import comingle`` is fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'comingle' has no attribute {name!r}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")  # from tqdm, in a notebook without widgets
        return getattr(importlib.import_module(_module_of(name)), name)
