"""Rows of files, folders and the hub, as ``datasets`` loads them.

The only module that imports ``datasets``, and only when rows are read. Local files are read through a private cache
that is deleted at once: private text leaves no copy in a shared cache, and a changed file is never read stale.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comingle.data.csv_files import read_csv
from comingle.data.files import check_regular
from comingle.data.formats import BUILDERS, COMPRESSIONS, builder_of, is_saved, looks_like_path
from comingle.data.hub import HUB_PREFIX, parse_hub_name
from comingle.data.rows import Rows, describe
from comingle.errors import DataError

_LOCAL_BUILDERS = ("json", "csv", "parquet", "text", "arrow")


def make_rows(columns: Mapping[str, Sequence[Any]]) -> Rows:
    """A data set of these columns, for packages that want one."""
    return _import_datasets().Dataset.from_dict(dict(columns))


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
        yield [
            pair
            for one in map(str, sources)
            for pair in (
                _load_hub(datasets, one, name, stream)
                if one.startswith(HUB_PREFIX)
                else _load(datasets, one, name, data_files, cache)
            )
        ]


def _load(datasets: Any, source: str, name: str | None, data_files: Any, cache: str) -> list[tuple[str, Rows]]:
    path = Path(source).expanduser()
    on_disk = os.path.exists(path)
    if on_disk:
        check_regular(path)
    local = on_disk or (source in _LOCAL_BUILDERS and data_files is not None)
    if not local and looks_like_path(source):
        raise DataError(f"{source}: no such file or folder")
    if path.is_file() and not builder_of(path):
        known = ", ".join(BUILDERS)
        raise DataError(f"{path}: not a file of rows; allowed: {known}, each also with {' or '.join(COMPRESSIONS)}")
    try:
        loaded = _load_any(datasets, path, source, name, data_files, {"cache_dir": cache} if local else {})
    except StopIteration:  # what ``datasets`` makes of a file without rows
        return []
    except Exception as error:  # datasets, pyarrow, pandas and the hub each have their own tree of errors
        raise DataError(f"{source}: cannot be loaded as a data set: {describe(error)}") from error
    return _as_splits(loaded, "train")


def _load_hub(datasets: Any, source: str, config: str | None, stream: bool) -> list[tuple[str, Rows]]:
    wanted = parse_hub_name(source)
    try:
        loaded = datasets.load_dataset(
            wanted.name, name=wanted.config or config, split=wanted.split, data_files=wanted.files, streaming=stream
        )
    except Exception as error:  # as in _load
        raise DataError(f"{source}: cannot be loaded as a data set: {describe(error)}") from error
    return _as_splits(loaded, wanted.split or "train")


def _as_splits(loaded: Any, name: str) -> list[tuple[str, Rows]]:
    return [(str(split), rows) for split, rows in loaded.items()] if isinstance(loaded, dict) else [(name, loaded)]


def _load_any(
    datasets: Any, path: Path, source: str, name: str | None, data_files: Any, where: dict[str, str]
) -> Rows | dict[str, Rows]:
    if path.is_dir() and is_saved(path):
        return datasets.load_from_disk(str(path))
    options = {"name": name, "data_files": data_files, **where}
    source = str(path) if os.path.exists(path) else source
    if path.is_file() and (builder := builder_of(path)):
        source, options = builder[0], {"data_files": glob.escape(str(path)), **builder[1], **where}
    if where and (found := datasets.load_dataset_builder(source, **options)).name == "csv":
        made, sep = datasets.IterableDataset.from_generator, found.config.sep
        splits = {str(split): [str(file) for file in files] for split, files in found.config.data_files.items()}
        if all(os.path.exists(file) for files in splits.values() for file in files):  # else addresses
            return {split: made(read_csv, gen_kwargs={"files": files, "sep": sep}) for split, files in splits.items()}
    return datasets.load_dataset(source, **options)


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
