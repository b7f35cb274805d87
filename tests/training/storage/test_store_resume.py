"""Users' tensors on disk outlive their process, whatever it was doing; what cannot be gone on with is one line."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from comingle.config import Recipe, load_recipe
from comingle.runs import api
from comingle.training.storage import files
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints, seal
from resuming import StoppedError, final, kill, stop_in_round_3, told

SETTINGS = {"training.participation": 0.6, "training.experts.clip_norm": 1.0, "runtime.store": "disk"}
MOMENTS = [
    "in round 1",
    "in round 3",
    "half of the tensors written",
    "written, not renamed",
    "half of an old one deleted",
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def recipe(stage: Path, write_recipe: Any) -> Path:
    path = write_recipe(stage)
    path.write_text(load_recipe(path).with_changes(SETTINGS).as_yaml())
    return path


@pytest.fixture(scope="module")
def whole(recipe: Path, stage: Path) -> Path:
    """The run that nothing interrupts."""
    api.run(recipe, out=stage / "whole")
    return stage / "whole"


@pytest.fixture(scope="module")
def killed(recipe: Path, stage: Path) -> Path:
    return kill(recipe, stage / "killed", *MOMENTS)


@pytest.fixture
def stopped(recipe: Path, tmp_path: Path) -> Path:
    """A run that stopped in its third round."""
    with pytest.raises(StoppedError):
        api.run(recipe, out=tmp_path / "run", observers=[stop_in_round_3])
    return tmp_path / "run"


def everything(folder: Path) -> dict[str, torch.Tensor]:
    clients = api.load(folder).federation.clients
    return clients.state.take(list(range(clients.num_rows))).tensors()


def require_same(folder: Path, whole: Path) -> None:
    assert final(folder) == final(whole)
    assert told(folder) == told(whole)
    expected, found = everything(whole), everything(folder)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_run_on_disk_is_one_in_memory(recipe: Path, whole: Path, stage: Path) -> None:
    memory = stage / "memory"
    api.run(load_recipe(recipe).with_changes({"runtime.store": "memory"}), out=memory)
    require_same(memory, whole)
    assert not (memory / "store").exists()


@pytest.mark.parametrize(
    "method",
    [{"name": "fedalt"}, {"name": "momentum-clustering", "clusters": 2, "quantile": 0.5}],
    ids=lambda m: m["name"],
)
@pytest.mark.slow
def test_servers_that_lay_tensors_side_by_side_go_on_with_them_in_order(
    recipe: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    """A file has them by name, the server as the model does."""
    changed = load_recipe(recipe).with_changes({"method": method})
    api.run(changed, out=tmp_path / "whole")
    with pytest.raises(StoppedError):
        api.run(changed, out=tmp_path / "run", observers=[stop_in_round_3])
    api.run(changed, out=tmp_path / "run", resume=True)
    require_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are killed after a fork")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(recipe: Path, whole: Path, killed: Path, moment: str) -> None:
    folder = killed / moment
    assert not (folder / "metrics.json").exists()
    api.run(recipe, out=folder, resume=True)
    require_same(folder, whole)


def test_a_checkpoint_names_nobody_and_holds_no_rows(whole: Path) -> None:
    newest = list_checkpoints(whole)[-1]
    assert json.loads((newest / "checkpoint.json").read_text())["trainers"] == []
    assert sum(path.stat().st_size for path in newest.iterdir()) < (whole / "store" / "params.bin").stat().st_size


@pytest.mark.slow
def test_places_are_used_again(recipe: Path, tmp_path: Path) -> None:
    """The file holds what two checkpoints and the round between them have, however many rounds there are."""
    sizes = []
    for rounds in (4, 12):
        api.run(load_recipe(recipe).with_changes({"training.rounds": rounds}), out=tmp_path / str(rounds))
        sizes.append((tmp_path / str(rounds) / "store" / "params.bin").stat().st_size)
    assert sizes[1] <= sizes[0] * 1.5


def test_opening_a_run_changes_nothing_of_it(whole: Path) -> None:
    before = {path.name: path.read_bytes() for path in (whole / "store").iterdir()}
    opened = api.load(whole)
    clients = opened.federation.clients
    part = clients.state.take([0, 1])
    part.rows += 1
    clients.state.put([0, 1], part)
    assert torch.equal(clients.state.take([0, 1]).rows, part.rows)
    assert {path.name: path.read_bytes() for path in (whole / "store").iterdir()} == before


# ---------------------------------------------------------------- faults


def resumed(recipe: Path | Recipe, folder: Path) -> str:
    with pytest.raises(RunError) as caught:
        api.run(recipe, out=folder, resume=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_full_disk_is_one_line_and_loses_nothing(
    recipe: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, left = os.pwrite, [12]

    def write(*args: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args)

    folder = tmp_path / "full"
    monkeypatch.setattr(files.os, "pwrite", write)
    with pytest.raises(RunError, match=r"store: .*No space left on device; .* --resume .*full`"):
        api.run(recipe, out=folder)
    monkeypatch.undo()
    assert list_checkpoints(folder)
    api.run(recipe, out=folder, resume=True)
    require_same(folder, whole)


def test_a_full_disk_of_temporary_files_is_not_taken_for_the_runs(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where users finetune before they are scored, what that makes of them lies elsewhere."""
    original, elsewhere = os.pwrite, tmp_path / "elsewhere"

    def write(handle: int, *args: Any) -> int:
        if os.readlink(f"/proc/self/fd/{handle}").startswith(str(elsewhere)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(handle, *args)

    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    monkeypatch.setattr(files.os, "pwrite", write)
    finetunes = load_recipe(recipe).with_changes({"method": "fedavg+"})
    with pytest.raises(RunError) as caught:
        api.run(finetunes, out=tmp_path / "run")
    assert str(caught.value).startswith(f"{elsewhere}: ")
    assert "No space left on device; " in str(caught.value)


def test_a_store_of_another_recipe_is_refused(recipe: Path, stopped: Path) -> None:
    other = load_recipe(recipe).with_changes({"adapters.rank": 3})
    assert re.search(f"^{re.escape(str(stopped))}: .*adapters.rank was 2 and is 3", resumed(other, stopped))


def test_a_store_of_another_run_is_refused(recipe: Path, stopped: Path, whole: Path) -> None:
    shutil.rmtree(stopped / "store")
    shutil.copytree(whole / "store", stopped / "store")
    assert re.search("store: .*round-0002", resumed(recipe, stopped))


@pytest.mark.parametrize("looked_at", [1, 1024], ids=["when it is read", "at the beginning"])
@pytest.mark.slow
def test_a_checkpoint_beside_a_store_that_has_gone_on_is_refused(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_at: int
) -> None:
    """It was put aside, and put back when its places had been used again."""
    monkeypatch.setattr(files, "MAX_RECORDS_VERIFIED_AT_LOAD", looked_at)
    run, aside = tmp_path / "run", tmp_path / "aside"
    longer = load_recipe(recipe).with_changes({"training.rounds": 8})
    with pytest.raises(StoppedError):
        api.run(longer, out=run, observers=[stop_in_round_3])
    shutil.copytree(run / "checkpoints" / "round-0002", aside)
    api.run(longer, out=run, resume=True)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(aside, run / "checkpoints" / "round-0002")
    told = r"store/params.bin: .*row \d .*checkpoint"
    assert re.search(told, resumed(longer, run))


@pytest.mark.parametrize("name", ["params.bin", "moments.bin"])
@pytest.mark.slow
def test_records_of_another_run_are_refused(recipe: Path, tmp_path: Path, name: str) -> None:
    """One file of its store, in which each record is whole and of the row that is looked for."""
    everybody = load_recipe(recipe).with_changes({"training.participation": 1.0})
    for run, seed in (("one", 0), ("other", 1)):
        with pytest.raises(StoppedError):
            api.run(everybody.with_changes({"seed": seed}), out=tmp_path / run, observers=[stop_in_round_3])
    shutil.copy(tmp_path / "other" / "store" / name, tmp_path / "one" / "store" / name)
    assert re.search(f"{name}: .*row 0 .*checkpoint", resumed(everybody, tmp_path / "one"))


def test_a_checkpoint_that_knows_no_sums_is_gone_on_with(recipe: Path, whole: Path, stopped: Path) -> None:
    """As versions of before have written it."""
    for checkpoint in list_checkpoints(stopped):
        table = checkpoint / "places.safetensors"
        save_file({name: t for name, t in load_file(table).items() if not name.startswith("sums/")}, table)
        assert set(load_file(table)) == {"rows", "versions", "params", "moments"}
        seal(checkpoint)
    api.run(recipe, out=stopped, resume=True)
    require_same(stopped, whole)


def test_a_file_of_records_that_is_cut_off_is_told_of(recipe: Path, stopped: Path) -> None:
    path = stopped / "store" / "params.bin"
    os.truncate(path, path.stat().st_size // 5)
    assert re.search(r"params.bin: damaged.* row \d", resumed(recipe, stopped))


def test_a_store_that_is_gone_is_said(recipe: Path, stopped: Path) -> None:
    (stopped / "store" / "moments.bin").unlink()
    assert "moments.bin: no such file" in resumed(recipe, stopped)
    shutil.rmtree(stopped / "store")
    assert "store.json: no such file" in resumed(recipe, stopped)


def test_a_damaged_record_is_told_of(recipe: Path, stopped: Path) -> None:
    path = stopped / "store" / "params.bin"
    content = bytearray(path.read_bytes())
    content[40::997] = bytes(len(content[40::997]))
    path.write_bytes(content)
    assert re.search(r"params.bin: damaged.* row \d", resumed(recipe, stopped))


def test_going_on_elsewhere_than_where_it_began_is_refused(recipe: Path, stopped: Path) -> None:
    memory = load_recipe(recipe).with_changes({"runtime.store": "memory"})
    assert re.search(f"^{re.escape(str(stopped))}: .*runtime.store: disk; got memory", resumed(memory, stopped))
    rounded = load_recipe(recipe).with_changes({"runtime.store": "disk-bf16"})
    assert re.search(r"round-0002: .*runtime.store or runtime.dtype", resumed(rounded, stopped))


BEST = {"evaluation.select": "best", "evaluation.every": 1, "training.experts.learning_rate": 0.05}


@pytest.mark.slow
def test_the_best_round_goes_on_too(recipe: Path, tmp_path: Path) -> None:
    """Stopped after the best round: it is there, in a store that holds two of everybody and no more."""
    choosing = load_recipe(recipe).with_changes(BEST | {"training.rounds": 7})
    api.run(choosing.with_changes({"runtime.store": "memory"}), out=tmp_path / "memory")
    api.run(choosing, out=tmp_path / "whole")
    with pytest.raises(StoppedError):
        api.run(choosing, out=tmp_path / "stopped", observers=[stop_in_round_3])
    api.run(choosing, out=tmp_path / "stopped", resume=True)
    assert 0 < final(tmp_path / "whole")["selected_round"] < 7
    for name in ("stopped", "memory"):
        require_same(tmp_path / name, tmp_path / "whole")
    longer = choosing.with_changes({"training.rounds": 14})
    api.run(longer, out=tmp_path / "longer")
    sizes = [(tmp_path / name / "store" / "params.bin").stat().st_size for name in ("whole", "longer")]
    assert sizes[1] <= sizes[0] * 1.25


@pytest.mark.slow
def test_moments_may_be_rounded(recipe: Path, whole: Path, tmp_path: Path) -> None:
    """Half as large; the model is near, and goes on where it stopped as if nothing had happened."""
    rounded = load_recipe(recipe).with_changes({"runtime.store": "disk-bf16"})
    api.run(rounded, out=tmp_path / "rounded")
    with pytest.raises(StoppedError):
        api.run(rounded, out=tmp_path / "stopped", observers=[stop_in_round_3])
    api.run(rounded, out=tmp_path / "stopped", resume=True)
    require_same(tmp_path / "stopped", tmp_path / "rounded")
    exact, near = final(whole)["mean_test_perplexity"], final(tmp_path / "rounded")["mean_test_perplexity"]
    assert near != exact
    assert near == pytest.approx(exact, rel=0.02)
