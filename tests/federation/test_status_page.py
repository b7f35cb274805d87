"""The status page of a server: who sees it, what it shows, and metrics."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.commands import comingle as comingle

from browsers import chromium
from comingle.federation.status_page import RunHistory, Status, serving_status
from comingle.utils.errors import RunError

pytest.importorskip("flwr")

HOSTILE = "<script>document.title='taken'</script>"


def write_run(folder: Path, *, rounds: int = 3, ended: bool = False) -> None:
    """A server's run folder: ann reports losses and scores, the other user is away and reports nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text("")
    common = {"epsilon": None, "counted": None}
    ann = {"state": "here", "round": rounds, "seen": time.time(), "upload_bytes": 2_000_000, "download_bytes": 1_000}
    other = {"state": "away", "round": 1, "seen": None, "upload_bytes": 0, "download_bytes": 0}
    users = {
        "ann": {**ann, "train_loss_nats": 1.5, "test": 2.25, "why": "", **common},
        HOSTILE: {**other, "train_loss_nats": None, "test": None, "why": "timed out", **common},
    }
    content = {"round": rounds, "rounds": 5, "measure": "loss", "users": users}
    (folder / "participants.json").write_text(json.dumps(content))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events(rounds)))
    if ended:
        (folder / "metrics.json").write_text("{}")


def events(rounds: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"event": "start", "rounds": 5, "users": ["ann", HOSTILE]}]
    for number in range(rounds + 1):
        if number:
            sizes = {"upload_bytes": 500_000, "download_bytes": 250_000}
            found.append({"event": "round", "round": number, "seconds": 2.5, "train_loss_nats": {"ann": 1.5}, **sizes})
        loss = 3.0 - 0.25 * number
        scores = {"users": {"ann": {"test_loss": loss}}, "mean_test_loss": loss}
        found.append({"event": "evaluation", "round": number, "iterations": number, **scores})
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """Port and key of the page of a federation."""
    write_run(tmp_path / "run")
    lines: list[str] = []
    with serving_status(tmp_path / "run", 0, lines.append):
        (line,) = lines
        port = int(line.split("127.0.0.1:")[1].split(";")[0])
        file = tmp_path / "run" / "flower" / "operator.key"
        assert str(file) in line
        assert file.stat().st_mode & 0o077 == 0
        yield port, file.read_text().strip()


def ask(
    port: int, path: str, headers: dict[str, str] | None = None, *, method: str = "GET", body: str | None = None
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def test_only_the_operator_sees_it(server: tuple[int, str]) -> None:
    port, key = server
    wrong = [{}, {"Authorization": "Bearer no"}, {"Authorization": key}, {"Cookie": "comingle_operator=no"}]
    wrong += [{"Authorization": "Bearer "}, {"Cookie": "comingle_operator="}, {"Cookie": ";;=\x7f"}]
    for path in ("/", "/metrics"):
        for headers in wrong:
            status, text, _ = ask(port, path, headers)
            assert (status, "ann" in text) == (401, False)
        for headers in ({"Authorization": f"Bearer {key}"}, {"Cookie": f"comingle_operator={key}"}):
            status, text, answered = ask(port, path, headers)
            assert (status, "ann" in text) == (200, True)
            assert answered["Cache-Control"] == "no-store"
    assert json.loads(ask(port, "/health")[1]) == {"status": "ok", "run": "running"}
    assert ask(port, "/elsewhere", {"Authorization": f"Bearer {key}"})[0] == 404


def test_a_page_of_another_site_reaches_nothing(server: tuple[int, str]) -> None:
    """Its name may have been bound to this machine's address."""
    port, key = server
    for path in ("/", "/metrics", "/health"):
        assert ask(port, path, {"Host": f"evil.example:{port}", "Authorization": f"Bearer {key}"})[0] == 403


def test_the_form_sets_a_cookie_that_scripts_cannot_read(server: tuple[int, str]) -> None:
    port, key = server
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    status, text, answered = ask(port, "/login", form, method="POST", body="key=wrong")
    assert (status, "Set-Cookie" in answered) == (401, False)
    assert "not the operator" in text
    status, _, answered = ask(port, "/login", form, method="POST", body=f"key={key}")
    assert (status, answered["Location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=Strict"} <= set(answered["Set-Cookie"].split("; "))
    assert ask(port, "/login", form, method="POST", body="key=" + "x" * 5000)[0] == 404
    assert ask(port, "/", form, method="POST", body=f"key={key}")[0] == 404


def test_metrics_are_those_of_the_newest_run(server: tuple[int, str], tmp_path: Path) -> None:
    port, key = server
    _, text, _ = ask(port, "/metrics", {"Authorization": f"Bearer {key}"})
    lines = set(text.splitlines())
    expected = {"comingle:rounds_done 3.0", "comingle:rounds 5.0", "comingle:runs 1.0"}
    expected |= {'comingle:users{state="away"} 1.0', 'comingle:user_upload_bytes{user="ann"} 2e+06'}
    expected |= {'comingle:user_test{user="ann"} 2.25'}
    assert expected <= lines
    assert not any(line.startswith("comingle:user_test{") and HOSTILE in line for line in lines)
    write_run(tmp_path / "run", rounds=4)
    assert "comingle:rounds_done 4.0" in ask(port, "/metrics", {"Authorization": f"Bearer {key}"})[1].splitlines()


def test_runs_of_a_continuous_federation_are_listed(tmp_path: Path) -> None:
    write_run(tmp_path / "0001", rounds=5, ended=True)
    write_run(tmp_path / "0002", rounds=1)
    (tmp_path / "0002.yaml").write_text("")  # its plan
    page = Status(tmp_path).page()
    assert page.index(">0002<") < page.index(">0001<")
    assert "running · round 1 of 5 · last round 2.5 s" in page
    assert "2.5 MB" in page  # five uploads of the first run
    assert "-8.3%" in page  # of ann: 3 to 2.75
    assert "gains" in page


def test_events_are_read_once_and_from_the_start_if_a_resumed_run_has_removed_some(tmp_path: Path) -> None:
    write_run(tmp_path, rounds=2)
    history = RunHistory(folder=tmp_path)
    history.update()
    assert [event["round"] for event in history.rounds] == [1, 2]
    with (tmp_path / "events.jsonl").open("a") as file:
        line = json.dumps(events(3)[-2]) + "\n"
        file.write(line[:20])
        file.flush()
        history.update()
        assert len(history.rounds) == 2  # the line is not complete yet
        file.write(line[20:])
    history.update()
    history.update()
    assert [event["round"] for event in history.rounds] == [1, 2, 3]
    write_run(tmp_path, rounds=1)
    history.update()
    assert [event["round"] for event in history.rounds] == [1]


def test_a_folder_without_a_run_is_shown(tmp_path: Path) -> None:
    page = Status(tmp_path).page()
    assert "waiting for users" in page
    assert "comingle:rounds 0.0" in Status(tmp_path).metrics().decode()


def test_a_port_in_use_and_a_damaged_key_are_one_line(tmp_path: Path, comingle: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=rf"{port}: cannot listen"), serving_status(tmp_path, port, print):
            pass
    (tmp_path / "flower" / "operator.key").write_text("short\n")
    with pytest.raises(RunError, match=r"operator\.key: has no key"), serving_status(tmp_path, 0, print):
        pass


@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_it(server: tuple[int, str], width: int) -> None:
    port, key = server
    with chromium() as browser:
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        browser.get(f"http://127.0.0.1:{port}/")
        browser.find_element("name", "key").send_keys(key)
        browser.find_element("tag name", "button").click()
        until = time.monotonic() + 20
        while not browser.find_elements("css selector", "tbody tr"):  # the next page is loading
            assert time.monotonic() < until
        rows = [row.text for row in browser.find_elements("css selector", "tbody tr")]
        assert any(row.startswith("ann") and "2.25" in row for row in rows)
        assert any(row.startswith(HOSTILE) for row in rows)
        assert browser.title == "comingle server"
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        problems = [entry["message"] for entry in browser.get_log("browser")]
        assert [problem for problem in problems if "favicon" not in problem and "401" not in problem] == []
