"""The event log: whole lines, cut where a checkpoint says."""

from __future__ import annotations

import json
import math
from pathlib import Path

from comingle.engines.events import EventLog, tensorboard
from comingle.records import read_events


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


def test_a_log_that_lost_its_end_is_not_filled_up(tmp_path: Path) -> None:
    """After a power cut, or where somebody deleted it, the log may be shorter than the checkpoint remembers."""
    log = EventLog(tmp_path / "events.jsonl", keep_bytes=1000)
    log({"event": "round", "round": 3})
    log.close()
    assert list(read_events(tmp_path)) == [{"event": "round", "round": 3}]


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
