"""Rows of files, folders and the hub, as ``datasets`` loads them.

The only module that imports ``datasets``, and only when rows are read. Local files are read through a private cache
that is deleted at once: private text leaves no copy in a shared cache, and a changed file is never read stale.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comingle.data.csv_files import columns_of, read_csv, reads
from comingle.data.files import check_regular
from comingle.data.formats import BUILDERS, COMPRESSIONS, builder_of, is_saved, looks_like_path
from comingle.data.hub import HUB_PREFIX, parse_hub_name
from comingle.data.rows import Rows, describe
from comingle.errors import DataError

_LOCAL_BUILDERS = ("json", "csv", "parquet", "text", "arrow")


@contextmanager
def open_splits(
    source: str | Path | Sequence[str | Path], *, name: str | None = None, data_files: Any = None, stream: bool = False
) -> Iterator[list[tuple[str, Rows]]]:
    """The splits of a source while the context lasts; each of several files is loaded by itself.

    Files of one data set may differ in columns that nobody asked for, which ``datasets`` would refuse in one table.
    Only sources named as ``hub:NAME`` are streamed.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    datasets = _import_datasets()
    with _quietly(datasets), tempfile.TemporaryDirectory(prefix="comingle-") as cache:
        yield [pair for one in map(str, sources) for pair in _load(datasets, one, name, data_files, cache, stream)]


def _load(
    datasets: Any, source: str, name: str | None, data_files: Any, cache: str, stream: bool
) -> list[tuple[str, Rows]]:
    hub = parse_hub_name(source) if source.startswith(HUB_PREFIX) else None
    try:
        if hub is not None:
            options = {"split": hub.split, "data_files": hub.files, "streaming": stream}
            loaded = datasets.load_dataset(hub.name, name=hub.config or name, **options)
        else:
            loaded = _load_any(datasets, source, name, data_files, cache)
    except StopIteration:  # what ``datasets`` makes of a file without rows
        return []
    except DataError:
        raise
    except Exception as error:  # datasets, pyarrow, pandas and the hub each have their own tree of errors
        raise DataError(f"{source}: cannot be loaded as a data set: {describe(error)}") from error
    splits = loaded if isinstance(loaded, dict) else {hub.split if hub and hub.split else "train": loaded}
    return [(str(split), rows) for split, rows in splits.items()]


def _load_any(datasets: Any, source: str, name: str | None, data_files: Any, cache: str) -> Rows | dict[str, Rows]:
    path, builder = Path(source).expanduser(), builder_of(Path(source))
    local = (on_disk := os.path.exists(path)) or (source in _LOCAL_BUILDERS and data_files is not None)
    options: dict[str, Any] = {"name": name, "data_files": data_files}
    if on_disk:
        check_regular(path)
        source = str(path)
    elif not local and looks_like_path(source):
        raise DataError(f"{source}: no such file or folder")
    if path.is_dir() and is_saved(path):
        return datasets.load_from_disk(str(path))
    if path.is_file() and not builder:
        known = ", ".join(BUILDERS)
        raise DataError(f"{path}: not a file of rows; allowed: {known}, each also with {' or '.join(COMPRESSIONS)}")
    if path.is_file() and builder:
        source, options = builder[0], {"data_files": glob.escape(str(path)), **builder[1]}
    if not local:
        return datasets.load_dataset(source, **options)
    options["cache_dir"] = cache
    if (found := datasets.load_dataset_builder(source, **options)).name == "csv":
        splits = {str(split): [str(file) for file in files] for split, files in found.config.data_files.items()}
        if reads(found.config, splits):
            return {split: _read_csv(datasets, files, found.config.sep) for split, files in splits.items()}
    found.download_and_prepare()
    return found.as_dataset()


def _read_csv(datasets: Any, files: Sequence[str], sep: str) -> Rows:
    features = datasets.Features({column: datasets.Value("string") for column in columns_of(files, sep)})
    given = {"files": files, "sep": sep}
    return datasets.IterableDataset.from_generator(read_csv, gen_kwargs=given, features=features)


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "reading rows (.jsonl, .csv, .parquet, hub) needs the package datasets: pip install 'comingle[data]'"
        ) from error
    return datasets


@contextmanager
def _quietly(datasets: Any) -> Iterator[None]:
    """No progress bars and no log lines from ``datasets``; what it has to say comes as our error."""
    bars, verbosity = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
