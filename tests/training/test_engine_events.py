"""The event log: whole lines, cut where a checkpoint says."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from comingle.training.events import EventLog, tensorboard
from comingle.utils.records import read_events


def test_events_are_kept_in_order_and_steps_are_not(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for event in ({"event": "start"}, {"event": "step"}, {"event": "round", "loss": math.nan}, {"event": "end"}):
        log(event)
    log.close()
    assert list(read_events(tmp_path)) == [{"event": "start"}, {"event": "round", "loss": None}, {"event": "end"}]


def test_an_event_is_on_disk_at_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log({"event": "start"})
    assert log.size_bytes == len((tmp_path / "events.jsonl").read_bytes()) > 0
    assert [e["event"] for e in read_events(tmp_path)] == ["start"]
    log.close()


def test_resuming_cuts_the_log_at_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log({"event": "round", "round": 1})
    kept = log.size_bytes
    log({"event": "round", "round": 2, "user": "Zoë"})
    log.close()
    with path.open("a") as file:
        file.write('{"event": "rou')  # torn by a crash
    assert [e["round"] for e in read_events(tmp_path)] == [1, 2]
    log = EventLog(path, keep_bytes=kept)
    assert log.size_bytes == kept
    log({"event": "round", "round": 2, "again": True})
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"event": "round", "round": 1},
        {"event": "round", "round": 2, "again": True},
    ]


def test_a_new_run_starts_an_empty_log(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "old"}\n')
    EventLog(tmp_path / "events.jsonl").close()
    assert list(read_events(tmp_path)) == []


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the program says, and that nothing else is said."""
    patterns: list[str] = []
    yield patterns
    lines = [record.getMessage() for record in caplog.get_records("call")]
    assert len(lines) == len(patterns)
    assert all(re.search(pattern, line) for pattern, line in zip(patterns, lines, strict=True))


def test_a_log_that_is_gone_is_begun_anew_and_told_of(tmp_path: Path, told: list[str]) -> None:
    """After a power cut, or where somebody deleted it, the log may be shorter than the checkpoint remembers."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path, keep_bytes=1000)
    log({"event": "round", "round": 3})
    log.close()
    assert list(read_events(tmp_path)) == [{"event": "round", "round": 3}]
    told += [rf"^{path}: missing or empty.*\b1000 bytes"]


@pytest.mark.parametrize("lost", [1, 7, 20])
def test_a_log_that_lost_its_end_is_cut_at_its_last_whole_line(tmp_path: Path, told: list[str], lost: int) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log({"event": "round", "round": 1})
    first = log.size_bytes
    log({"event": "round", "round": 2})
    log.close()
    path.write_bytes(path.read_bytes()[:-lost])
    again = EventLog(path, keep_bytes=log.size_bytes)
    for number in (3, 4):
        again({"event": "round", "round": number})
    again.close()
    assert [event["round"] for event in read_events(tmp_path)] == [1, 3, 4]
    told += [rf"^{path}: .*\b{first} bytes.*\b{log.size_bytes} bytes"]


@pytest.mark.parametrize("damage", [b'{"event": "rou', b"\x00\x00\xff", b"[]", b'{"round": 2}'], ids=repr)
def test_a_damaged_line_hides_no_other_and_is_told_of(tmp_path: Path, told: list[str], damage: bytes) -> None:
    path = tmp_path / "events.jsonl"
    lines = [json.dumps({"event": "round", "round": number}).encode() for number in (1, 2, 3)]
    path.write_bytes(b"\n".join([lines[0], damage, lines[2], b""]))
    assert [event["round"] for event in read_events(tmp_path)] == [1, 3]
    told += [f"{path}: 1 of 3 events are damaged and skipped: line 2"]


def test_a_log_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        EventLog(tmp_path / "events.jsonl")
    assert (tmp_path / "precious").read_text() == "years of work"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NO /dev/full HERE")
def test_a_full_disk_is_no_secret(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log({"event": "start"})
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), log._file.fileno())
    with pytest.raises(OSError):
        log({"event": "round"})
    log.close()
    assert list(read_events(tmp_path)) == [{"event": "start"}]


def test_tensorboard_takes_every_event(tmp_path: Path) -> None:
    board = tensorboard(tmp_path / "tensorboard")
    if board is None:
        return  # the extra `reports` is not installed
    users = {"ann": {"test_perplexity": 2.0, "test_loss_nats": math.log(2)}}
    means = {"mean_test_perplexity": 2.0, "geometric_mean_test_perplexity": 2.0}
    routed = {"experts": {"ann": ["generalist", "specialist 1"]}, "expert_scores": {"ann": [[0.25, 0.75], [0.5, 0.5]]}}
    for event in (
        {"event": "start"},
        {"event": "step", "advance": 1, "round": 1},
        {"event": "round", "round": 1, "train_loss_nats": {"ann": 1.0}, "tokens": 10, "seconds": 2.0},
        {"event": "evaluation", "round": 1, "users": users, **means, **routed},
        {"event": "end", **means},
    ):
        board(event)
    board.close()
    (written,) = (tmp_path / "tensorboard").iterdir()
    content = written.read_bytes()
    tags = [b"train_loss_nats/ann", b"tokens_per_second", b"test_perplexity/ann", b"\x14mean_test_perplexity"]
    for tag in [*tags, b"geometric_mean_test_perplexity", b"expert_score/ann/specialist_1"]:
        assert tag in content
