"""What whoever has started a server is told: events, and warnings that are none, each once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.federation.direct import Direct, nodes_of
from tests.federation.test_federation_coordinator import UPLOADS, Lying
from tests.federation.tiny import tiny

from comingle.config import parse_recipe
from comingle.federation.files import save_plan
from comingle.federation.flower.channel import Channel
from comingle.federation.server_app import run_federation_app

pytestmark = pytest.mark.usefixtures("shared_base", "asked_again_soon")


def lines_of(folder: Path, make: type[Direct], *arguments: object, **changes: object) -> list[str]:
    plan, nodes = nodes_of(parse_recipe(tiny(folder, "fedavg", users=3, **changes)), folder / "users")
    save_plan(folder / "federation.yaml", plan)
    lines: list[str] = []
    channel: Channel = make(nodes, *arguments)
    run_federation_app(channel, {"federation": str(folder / "federation.yaml")}, folder / "server", lines.append)
    assert not [one for one in logging.getLogger("comingle").handlers if type(one).__name__ == "_Relay"]
    return lines


def test_what_is_an_event_is_told_once(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, Lying, UPLOADS["NaN"], "upload", training__rounds=2)
    assert len([line for line in lines if line.startswith("bob: ")]) == 1
    assert not [line for line in lines if "is left out of round" in line]


def test_warnings_that_are_no_events_are_told_too(tmp_path: Path) -> None:
    rule = {"rule": "median"}
    lines = lines_of(tmp_path, Lying, UPLOADS["NaN"], "upload", training__rounds=2, aggregation=rule)
    assert len([line for line in lines if "too few for median" in line]) == 1
