"""The status page of a federation's server: users, rounds, bytes, losses, privacy and gains, for its operator.

The page, ``/metrics`` and ``/health`` are served on this machine by a thread of ``comingle server``, which reads the
files of the run folder. The page and the metrics need the operator's key.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from rich.table import Table

from comingle.federation.flower.processes import FOLDER, LOOPBACK
from comingle.reports.formatting import html_of
from comingle.reports.tables import read_participants, render_participants, runs_table
from comingle.serving.access import METRICS_EXTRA, hostname, is_loopback, listen, read_operator_key, url_of
from comingle.utils.records import (
    MEASURES,
    JsonObject,
    RunSummary,
    measure_of,
    number,
    numbered_runs,
    parse_event,
    summarize_run,
)
from comingle.utils.terminal import literal_text, printable

KEY_FILE = "operator.key"
"""File in the folder ``flower`` of the run folder with the operator's key."""

REFRESH_SECONDS = 5
_REQUEST_SECONDS = 10.0
"""Time limit for the bytes of a request, so that an idle connection does not keep a thread."""
_POLL_SECONDS = 1.0
_MAX_FORM_BYTES = 1000
_COOKIE = "comingle_operator"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(kw_only=True)
class RunHistory:
    """Events of a run folder; each update reads only the lines that are new.

    Args:
        folder: The run folder.
        start: The newest event "start"; empty before it.
        rounds: Events "round".
        evaluations: Events "evaluation".
    """

    folder: Path
    start: JsonObject = field(default_factory=dict)
    rounds: list[JsonObject] = field(default_factory=list)
    evaluations: list[JsonObject] = field(default_factory=list)
    _read_bytes: int = 0

    def update(self) -> None:
        """Read the lines that were added to the file of events since the last call."""
        path = self.folder / "events.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            if path.stat().st_size < self._read_bytes:  # a resumed run has removed events after its checkpoint
                self.start, self.rounds, self.evaluations, self._read_bytes = {}, [], [], 0
            file.seek(self._read_bytes)
            new_bytes = file.read()
        complete, _, _ = new_bytes.rpartition(b"\n")
        self._read_bytes += len(complete) + 1 if complete else 0
        lists = {"round": self.rounds, "evaluation": self.evaluations}
        for line in complete.splitlines():
            event = parse_event(line)
            if event is None:
                continue
            if event["event"] == "start":
                self.start = event
            elif event["event"] in lists:
                lists[event["event"]].append(event)

    @property
    def state(self) -> str:
        """ "finished", "running", or "waiting for users" before the first event."""
        if (self.folder / "metrics.json").exists():
            return "finished"
        return "running" if self.start else "waiting for users"

    @property
    def measure(self) -> str:
        """The measure of test results, such as "perplexity"; empty before the first evaluation."""
        return measure_of(self.evaluations[-1]) if self.evaluations else ""

    @property
    def line(self) -> str:
        """State, rounds that are done, and the duration of the last one."""
        text = self.state
        if self.start:
            done = self.rounds[-1]["round"] if self.rounds else 0
            text += f" · round {done} of {self.start['rounds']}"
        if self.rounds and self.rounds[-1].get("seconds"):
            text += f" · last round {self.rounds[-1]['seconds']:.3g} s"
        return text


class Status:
    """State of a server's folder, read anew for each request.

    The folder is a run folder, or that of a continuous federation with the run folders 0001, 0002, and so on.
    """

    def __init__(self, folder: Path) -> None:
        """Create the state of a folder, which may not have a run yet."""
        self._folder = folder
        self._histories: dict[Path, RunHistory] = {}
        self._summaries: dict[Path, RunSummary] = {}  # of runs that are done
        self._lock = threading.Lock()  # requests are answered in threads

    def histories(self) -> list[RunHistory]:
        """Return the events of the folder's runs, the newest last; at least one, which may be empty."""
        runs = numbered_runs(self._folder) or [self._folder]
        with self._lock:
            self._histories = {run: self._histories.get(run) or RunHistory(folder=run) for run in runs}
            for history in self._histories.values():
                history.update()
            return list(self._histories.values())

    def page(self) -> str:
        """Return the status page."""
        histories = self.histories()
        newest = histories[-1]
        tables = [render_participants(newest.folder, all_users=True)]
        if newest.evaluations:
            tables.append(_gains_table(newest))
        if len(histories) > 1 or newest.folder != self._folder:
            tables.append(self._runs_table([history.folder for history in histories]))
        name = escape(printable(self._folder.absolute().name))
        body = "".join(f'<div class="scroll">{html_of([table])}</div>' for table in tables)
        chart = _chart(newest)
        return _document(f"<h1>{name}</h1><p>{escape(newest.line)}</p>{chart}{body}", refreshes=True)

    def _runs_table(self, runs: Sequence[Path]) -> Table:
        """Return the table of the runs, the newest first; events of runs that are done are read once.

        Args:
            runs: The run folders, the oldest first.
        """
        *earlier, newest = runs
        for run in earlier:
            if run not in self._summaries:
                self._summaries[run] = summarize_run(run)
        summaries = {run.name: self._summaries[run] for run in reversed(earlier)}
        return runs_table({newest.name: summarize_run(newest), **summaries})

    def metrics(self) -> bytes:
        """Return the state in the Prometheus text format.

        Raises:
            ImportError: prometheus-client is not installed.
        """
        from prometheus_client import CollectorRegistry, Gauge, generate_latest

        registry = CollectorRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"comingle:{name}", text, labels, registry=registry)

        histories = self.histories()
        newest = histories[-1]
        gauge("runs", "Runs of the federation.").set(len(histories))
        gauge("rounds_done", "Rounds of the newest run that are done.").set(
            newest.rounds[-1]["round"] if newest.rounds else 0
        )
        gauge("rounds", "Rounds of the newest run.").set(newest.start.get("rounds", 0))
        content = read_participants(newest.folder)
        users: Mapping[str, Any] = content.get("users", {})
        states = gauge("users", "Users by state: expected, here or away.", ("state",))
        for state in ("expected", "here", "away"):
            states.labels(state).set(sum(user["state"] == state for user in users.values()))
        by_user = {
            "upload_bytes": gauge("user_upload_bytes", "Bytes of a user's messages in the run.", ("user",)),
            "download_bytes": gauge("user_download_bytes", "Bytes of messages to a user in the run.", ("user",)),
            "train_loss_nats": gauge("user_train_loss_nats", "Last training loss of a user who reports it.", ("user",)),
            "test": gauge("user_test", "Last test score of a user who reports it.", ("user",)),
            "epsilon": gauge("user_epsilon", "Privacy budget that a user has spent in the run.", ("user",)),
        }
        for name, user in users.items():
            for key, metric in by_user.items():
                if user.get(key) is not None:
                    metric.labels(name).set(user[key])
        return generate_latest(registry)


def _gains_table(history: RunHistory) -> Table:
    """Return a table of users' first and newest test results, as far as they report them."""
    measure = history.measure
    key = f"test_{measure}"
    table = Table("user", title=f"test {measure} ({MEASURES[measure]} is better)", box=None)
    first: dict[str, float] = {}
    newest: dict[str, float] = {}
    for event in history.evaluations:
        for name, scores in event["users"].items():
            if scores.get(key) is not None:
                first.setdefault(name, scores[key])
                newest[name] = scores[key]
    for heading in (f"round {history.evaluations[0]['round']}", "newest", "change", ""):
        table.add_column(heading, justify="right")
    sign = 1 if MEASURES[measure] == "higher" else -1
    for name, before in first.items():
        change = newest[name] - before
        verdict = "gains" if sign * change > 0 else "loses" if change else ""
        relative = f"{100 * change / abs(before):+.1f}%" if before else ""
        table.add_row(literal_text(name), number(before, measure), number(newest[name], measure), relative, verdict)
    return table


def _chart(history: RunHistory) -> str:
    """Return an SVG of the mean test result by round; empty with fewer than two evaluations."""
    key = f"mean_test_{history.measure}"
    points = [(event["round"], event[key]) for event in history.evaluations if event.get(key) is not None]
    if len(points) < 2:
        return ""
    rounds, values = zip(*points, strict=True)
    width, height, margin = 600, 120, 6
    spread = max(values) - min(values) or 1.0
    length = rounds[-1] - rounds[0] or 1
    coordinates = " ".join(
        f"{margin + (width - 2 * margin) * (at - rounds[0]) / length:.1f},"
        f"{margin + (height - 2 * margin) * (max(values) - value) / spread:.1f}"
        for at, value in points
    )
    title = f"mean test {history.measure}: {number(values[0], history.measure)} → {number(values[-1], history.measure)}"
    return (
        f'<p>{escape(title)}</p><svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f'<polyline points="{coordinates}" fill="none" stroke="currentColor" stroke-width="2"/></svg>'
    )


_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; padding: 1rem; }
h1 { font-size: 1.3rem; margin: 0; overflow-wrap: anywhere; }
p { margin: .4rem 0; }
svg { display: block; height: auto; max-width: 37.5rem; width: 100%; color: #3367d6; }
.scroll { margin-top: 1.2rem; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #8884; padding: .3rem .6rem; white-space: nowrap; }
th { font-weight: 600; }
td:first-child, td:last-child { max-width: 16rem; min-width: 4rem; overflow-wrap: anywhere; white-space: normal; }
input, button { font: inherit; padding: .4rem; }
input { box-sizing: border-box; max-width: 100%; width: 22rem; }
"""


def _document(body: str, *, refreshes: bool) -> str:
    """Return an HTML document.

    Args:
        body: HTML of the body.
        refreshes: Whether the browser loads the page anew every few seconds.
    """
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if refreshes else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>comingle server</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{refresh}<style>{_STYLE}</style></head>'
        f"<body>{body}</body></html>"
    )


def _login_page(message: str = "") -> str:
    """Return the page with the form for the operator's key.

    Args:
        message: Why the key is asked for again; empty at first.
    """
    return _document(
        f"<h1>comingle server</h1><p>{escape(message)}</p>"
        '<form method="post" action="/login"><input name="user" value="operator" autocomplete="username" hidden>'
        "<p><label>Operator's key<br>"
        '<input name="key" type="password" autocomplete="current-password" autofocus></label></p>'
        "<p><button>Show the status</button></p></form>",
        refreshes=False,
    )


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    timeout = _REQUEST_SECONDS
    server_version, sys_version = "comingle", ""

    def do_GET(self) -> None:
        """Answer with the page, the metrics, or whether the server is alive."""
        if not self._is_for_this_machine():
            return
        if self.path == "/health":
            newest = self._page_server.status.histories()[-1]
            self._send(200, json.dumps({"status": "ok", "run": newest.state}), "application/json")
        elif self.path not in ("/", "/metrics"):
            self._send(404, "not found\n", "text/plain")
        elif not self._has_key():
            if self.path == "/":
                self._send(401, _login_page(), "text/html")
            else:
                self._send(401, "the operator's key is needed: Authorization: Bearer KEY\n", "text/plain")
        elif self.path == "/":
            self._send(200, self._page_server.status.page(), "text/html")
        else:
            try:
                self._send(200, self._page_server.status.metrics().decode(), "text/plain; version=0.0.4")
            except ImportError:
                self._send(501, f"/metrics {METRICS_EXTRA}\n", "text/plain")

    def do_POST(self) -> None:
        """Compare the key of the form with the operator's, and set the cookie."""
        if not self._is_for_this_machine():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/login" or not length.isdecimal() or int(length) > _MAX_FORM_BYTES:
            self.close_connection = True  # the body is not read
            self._send(404, "not found\n", "text/plain")
            return
        form = parse_qs(self.rfile.read(int(length)).decode("utf-8", "replace"))
        given = form.get("key", [""])[0].strip()
        if not self._is_key(given):
            self._send(401, _login_page("This is not the operator's key."), "text/html")
            return
        cookie = f"{_COOKIE}={given}; HttpOnly; SameSite=Strict; Path=/"
        self._send(303, "", "text/plain", {"Location": "/", "Set-Cookie": cookie})

    @property
    def _page_server(self) -> _StatusServer:
        """The server, which has the status and the operator's key."""
        assert isinstance(self.server, _StatusServer)
        return self.server

    def _is_for_this_machine(self) -> bool:
        """Return whether the request names this machine; refuse it if not, as of a page whose name was bound to it."""
        if is_loopback(hostname(self.headers.get("Host", ""))):
            return True
        self.close_connection = True
        self._send(403, "the status page answers only this machine\n", "text/plain")
        return False

    def _has_key(self) -> bool:
        """Return whether the request has the operator's key, as a bearer token or in the cookie."""
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._is_key(token.strip())
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return False
        return _COOKIE in cookie and self._is_key(cookie[_COOKIE].value)

    def _is_key(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._page_server.key.encode())  # in constant time

    def _send(self, status: int, text: str, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        """Send a response.

        Args:
            status: HTTP status.
            text: The body.
            content_type: Its media type.
            headers: Further headers.
        """
        body = text.encode()
        self.send_response(status)
        media = content_type if content_type == "application/json" else f"{content_type}; charset=utf-8"
        for name, value in {"Content-Type": media, **_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: requests are no events of the federation."""


class _StatusServer(ThreadingHTTPServer):
    """HTTP server of the status page."""

    daemon_threads = True

    def __init__(self, port: int, status: Status, key: str) -> None:
        """Listen on the loopback interface.

        Args:
            port: Port; 0 for any free one.
            status: Reads the runs that the page shows.
            key: Key of the operator, without which the page is not shown.
        """
        super().__init__((LOOPBACK, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listen(LOOPBACK, port)
        self.status, self.key = status, key

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a connection that breaks; the federation goes on whatever becomes of its page."""


@contextmanager
def serving_status(folder: Path, port: int | None, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the status page of a server's folder within the block.

    Args:
        folder: The run folder, or that of a continuous federation.
        port: Port on this machine; 0 for a free one, None for no page.
        say: Called with the address and the file of the operator's key.

    Raises:
        RunError: The port is in use, or the key cannot be read.
    """
    if port is None:
        yield
        return
    path = folder / FOLDER / KEY_FILE
    server = _StatusServer(port, Status(folder), read_operator_key(path, "--status-port"))
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="status page", daemon=True)
    thread.start()
    say(f"status page at {url_of(server.socket)}; its key is in {path}")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
