"""comingle: many people fine-tune one small language model together, and each ends up with a model of their own.

The Python API is as short as the command line::

    import comingle

    run = comingle.run("recipes/demo.yaml", method="comigs-1g1s")
    print(run.metrics["mean_test_perplexity"])
    print(run.user("reference").generate("The with statement"))

Everything heavy (torch, transformers) is imported on first use.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from functools import cache, partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

SPINS = "2000"
"""How often a waiting thread of GNU's OpenMP looks for work before it sleeps.

Its default is 300,000 times, with which a run of two threads beside another on two processors took more than fifteen
times as long; 2,000 cost a run that is alone 2% to 7% (``benchmarks/crowded.py``).
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

_HOMES = {
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
    """Set GOMP_SPINCOUNT, which PyTorch reads when it is imported; a value that the user has set stays."""
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    if "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = SPINS
    elif sys.platform == "linux" and os.environ.get("OMP_NUM_THREADS") != "1":
        logging.getLogger(__name__).warning(
            "comingle: imported after torch, so threads wait by spinning, and runs beside other work may take many "
            "times as long; import comingle first, or set GOMP_SPINCOUNT=%s",
            SPINS,
        )


_prepare_threads()


@cache
def _moved() -> dict[str, str]:
    """Return the modules of version 0.1.0 by their names then, with their names now."""
    from pathlib import Path  # here, since only an import that fails needs it

    lines = Path(__file__).with_name("moved.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines)


class _MovedModules:
    """Importer of the modules of ``moved.txt``: each looks names up in the module that has them now, with a warning."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for a module, or a package of modules, that has moved."""
        loader: Any = self
        found = fullname.startswith("comingle.") and any(f"{old}.".startswith(f"{fullname}.") for old in _moved())
        return ModuleSpec(fullname, loader, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Have an empty module created."""

    def exec_module(self, module: ModuleType) -> None:
        """Look up names in the module that has them now."""
        if (new := _moved().get(module.__name__)) is None:
            return
        warnings.warn(f"{module.__name__} is now {new}", DeprecationWarning, stacklevel=2)
        vars(module)["__getattr__"] = partial(getattr, importlib.import_module(new))


sys.meta_path.append(_MovedModules())  # type: ignore[arg-type]


def __dir__() -> list[str]:
    return sorted(__all__)


def _home(name: str) -> str:
    """Where a name is; in one of several processes that a launcher has started, a run is one of all of them."""
    from comingle.training.backends.launched import find_place

    return "comingle.runs.distributed" if name == "run" and find_place() is not None else _HOMES[name]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'comingle' has no attribute {name!r}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, in a notebook without widgets
        return getattr(importlib.import_module(_home(name)), name)
