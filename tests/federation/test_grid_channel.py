"""Bytes by name over Flower's grid, inside one process: the real ClientApp, ServerApp and channel."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from tests.federation.grid import LocalGrid, run_app

from comingle.federation.flower.channel import Channel, GridChannel, MessageSender
from comingle.federation.flower.client_app import User, make_client_app
from comingle.federation.flower.processes import read_status
from comingle.federation.flower.server_app import make_server_app
from comingle.utils.errors import MessageError


@pytest.fixture
def grid() -> LocalGrid:
    return LocalGrid()


def shout(user: User, request: bytes, deadline: float) -> bytes:
    return user.name.encode() + b": " + request.upper()


def join(
    grid: LocalGrid,
    folder: Path,
    name: str,
    ask: Callable[[User, bytes, float], bytes] = shout,
    refuse: Callable[[str], None] = print,
    **how: Any,
) -> int:
    return grid.join(make_client_app(ask, refuse), name=name, state=str(folder / name), **how)


def talk(
    grid: LocalGrid, requests: Mapping[str, bytes], *, timeout: float = 10, **settings: Any
) -> dict[str, bytes | str]:
    channel = GridChannel(grid, lambda line: None, **settings)
    channel.present()
    return dict(channel.exchange(requests, timeout=timeout))


def test_each_user_gets_its_own_request(grid: LocalGrid, tmp_path: Path) -> None:
    for name in ("ada", "bob"):
        join(grid, tmp_path, name)
    assert talk(grid, {"ada": b"one", "bob": b"two"}) == {"ada": b"ada: ONE", "bob": b"bob: TWO"}


def test_the_app_runs_a_coordinator_and_says_how_it_fares(grid: LocalGrid, tmp_path: Path) -> None:
    join(grid, tmp_path, "ada")
    got = {}

    def coordinate(channel: Channel, config: Mapping[str, Any], folder: Path, say: Callable[[str], None]) -> None:
        assert channel.present() == ["ada"]
        got.update(channel.exchange({"ada": config["word"].encode()}, timeout=10))

    run_app(make_server_app(coordinate), grid, out=str(tmp_path / "run"), word="hello")
    assert got == {"ada": b"ada: HELLO"}
    state = read_status(tmp_path / "run")
    assert state is not None
    assert state.state == "finished"


@pytest.mark.parametrize(("error", "state"), [(MessageError("no such base"), "failed"), (KeyError("x"), "broken")])
def test_a_persons_mistake_is_told_from_another(grid: LocalGrid, tmp_path: Path, error: Exception, state: str) -> None:
    def coordinate(*_: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        run_app(make_server_app(coordinate), grid, out=str(tmp_path))
    found = read_status(tmp_path)
    assert found is not None
    assert found.state == state


def test_a_refusal_of_the_node_is_one_line_and_final(grid: LocalGrid, tmp_path: Path) -> None:
    asked = []

    def refuse(user: User, request: bytes, deadline: float) -> bytes:
        asked.append(request)
        raise MessageError("round 3: comes\ntoo late")

    join(grid, tmp_path, "ada", refuse)
    assert talk(grid, {"ada": b""}) == {"ada": "round 3: comes too late"}
    assert len(asked) == 1


def test_after_an_accident_the_request_is_sent_again_but_not_for_ever(grid: LocalGrid, tmp_path: Path) -> None:
    asked = []

    def break_off(user: User, request: bytes, deadline: float) -> bytes:
        asked.append(user.name)
        if user.name == "ada" and asked.count("ada") == 2:
            return b"at last"
        raise RuntimeError(f"{user.name}: ended in the middle")

    for name in ("ada", "bob"):
        join(grid, tmp_path, name, break_off)
    assert talk(grid, {"ada": b"", "bob": b""}) == {"ada": b"at last", "bob": "bob: ended in the middle"}
    assert (asked.count("ada"), asked.count("bob")) == (2, 3)


def test_a_user_who_comes_back_under_another_number_gets_the_request_again(grid: LocalGrid, tmp_path: Path) -> None:
    begun = threading.Event()

    def hang(user: User, request: bytes, deadline: float) -> bytes:
        begun.set()
        time.sleep(60)
        return b"never heard"

    first = join(grid, tmp_path, "ada", hang)

    def restart() -> None:
        begun.wait()
        join(grid, tmp_path, "ada")  # the dead node is still listed for a while
        time.sleep(1)
        grid.leave(first)

    threading.Thread(target=restart, daemon=True).start()
    assert talk(grid, {"ada": b"again"}, timeout=20) == {"ada": b"ada: AGAIN"}


@pytest.mark.slow
def test_who_does_not_answer_in_time_holds_nobody_up(grid: LocalGrid, tmp_path: Path) -> None:
    join(grid, tmp_path, "ada")
    join(grid, tmp_path, "bob", lambda *_: time.sleep(30) or b"")
    channel = GridChannel(grid, lambda line: None)
    channel.present()
    began = time.monotonic()
    answers = channel.exchange({"ada": b"x", "bob": b"x"}, timeout=3)
    assert next(answers) == ("ada", b"ada: X")
    assert time.monotonic() - began < 2
    assert list(answers) == [("bob", "no reply within 3 s")]
    assert time.monotonic() - began < 4


def test_requests_that_become_due_meanwhile_are_sent_and_those_that_are_gone_are_not_waited_for(
    grid: LocalGrid, tmp_path: Path
) -> None:
    join(grid, tmp_path, "ada")
    join(grid, tmp_path, "bob", lambda *_: time.sleep(30) or b"")
    channel, began = GridChannel(grid, lambda line: None), time.monotonic()
    channel.present()
    requests, got = {"ada": b"join", "bob": b"join"}, list[tuple[str, bytes | str]]()
    for name, reply in channel.exchange(requests, timeout=20):
        got.append((name, reply))
        if reply == b"ada: JOIN":
            requests["ada"] = b"task"
        else:
            requests.clear()
    assert got == [("ada", b"ada: JOIN"), ("ada", b"ada: TASK")]
    assert time.monotonic() - began < 15


def test_a_node_that_never_says_its_name_is_not_waited_for_again_and_again(grid: LocalGrid, tmp_path: Path) -> None:
    join(grid, tmp_path, "ada")
    silent = grid.join(make_client_app(shout, print), name="bob", state=str(tmp_path / "bob"))
    grid._deliver, deliver = (
        lambda name, number, message: number == silent or deliver(name, number, message),
        grid._deliver,
    )  # type: ignore[method-assign]
    channel = GridChannel(grid, lambda line: None, name_seconds=1.0)
    assert list(channel.present()) == ["ada"]
    began = time.monotonic()
    assert list(channel.present()) == ["ada"]
    assert time.monotonic() - began < 0.8


def test_reading_the_requests_does_not_wait_for_new_nodes(grid: LocalGrid, tmp_path: Path) -> None:
    """Requests are computed from who is present, at each step of an exchange: such a step waits for nobody."""
    join(grid, tmp_path, "ada")
    channel = GridChannel(grid, lambda line: None)
    assert channel.present() == ["ada"]
    waits, request = list[bool](), b"one"

    class Computed(UserDict[str, bytes]):
        def __iter__(self) -> Iterator[str]:
            waits.append(channel._may_wait_for_names)
            return super().__iter__()

    assert dict(channel.exchange(Computed(ada=request), timeout=10)) == {"ada": b"ada: ONE"}
    assert waits
    assert not any(waits)
    assert channel._may_wait_for_names


@pytest.mark.slow
def test_a_reply_to_an_older_request_is_never_yielded(grid: LocalGrid, tmp_path: Path) -> None:
    def slow(user: User, request: bytes, deadline: float) -> bytes:
        time.sleep(2 if request == b"first" else 0)
        return request

    join(grid, tmp_path, "ada", slow)
    channel = GridChannel(grid, lambda line: None)
    channel.present()
    assert dict(channel.exchange({"ada": b"first"}, timeout=1)) == {"ada": "no reply within 1 s"}
    time.sleep(1.5)
    assert dict(channel.exchange({"ada": b"second"}, timeout=5)) == {"ada": b"second"}


def test_who_never_comes_is_given_up(grid: LocalGrid, tmp_path: Path) -> None:
    began = time.monotonic()
    assert talk(grid, {"ada": b""}, timeout=60, grace=1.0) == {"ada": "unreachable for 1 s"}
    assert time.monotonic() - began < 3


class TestNames:
    def look(self, grid: LocalGrid, **settings: Any) -> tuple[list[str], list[str]]:
        said: list[str] = []
        channel = GridChannel(grid, said.append, **settings)
        return list(channel.present()), [line for line in said if line.startswith("refused")]

    def test_two_users_of_one_name(self, grid: LocalGrid, tmp_path: Path) -> None:
        reasons: list[str] = []
        join(grid, tmp_path / "one", "ada", refuse=reasons.append)
        join(grid, tmp_path / "two", "ada", refuse=reasons.append)
        names, refused = self.look(grid)
        assert names == ["ada"]
        (line,) = refused
        assert re.match("refused: ada: .*connected client", line)
        time.sleep(0.5)
        assert [f"refused: {reason}" for reason in reasons] == refused

    @pytest.mark.slow
    def test_the_other_one_may_come_when_the_first_has_gone(self, grid: LocalGrid, tmp_path: Path) -> None:
        first = join(grid, tmp_path / "one", "ada", lambda *_: b"first")
        channel = GridChannel(grid, lambda line: None)
        channel.present()
        join(grid, tmp_path / "two", "ada", lambda *_: b"second")
        time.sleep(0.6)
        channel.present()
        assert dict(channel.exchange({"ada": b""}, timeout=5)) == {"ada": b"first"}
        grid.leave(first)
        time.sleep(0.6)
        assert dict(channel.exchange({"ada": b""}, timeout=5)) == {"ada": b"second"}

    def test_a_key_is_registered_for_another_name(self, grid: LocalGrid, tmp_path: Path) -> None:
        join(grid, tmp_path, "ada", registered="bob")
        names, refused = self.look(grid)
        assert names == []
        (line,) = refused
        assert re.match("refused: ada: .*'bob'", line)

    def test_a_name_that_is_not_of_the_federation(self, grid: LocalGrid, tmp_path: Path) -> None:
        join(grid, tmp_path, "eve")
        names, refused = self.look(grid, allowed=["bob", "ada"])
        assert names == []
        (line,) = refused
        assert re.match("refused: eve: .*allowed: ada, bob$", line)

    def test_a_node_without_a_name(self, grid: LocalGrid) -> None:
        grid.join(make_client_app(shout, print))
        names, refused = self.look(grid)
        assert names == []
        (line,) = refused
        assert re.match('refused: node-config: .*name="NAME"', line)

    def test_name_and_state_may_stand_in_the_participants_file(self, grid: LocalGrid, tmp_path: Path) -> None:
        (tmp_path / "ada.yaml").write_text("name: ada\nstate: private\n")
        grid.join(make_client_app(shout, print), config=str(tmp_path / "ada.yaml"))
        assert talk(grid, {"ada": b"x"}) == {"ada": b"ada: X"}
        assert (tmp_path / "private" / "instance").is_file()


def test_a_large_message_is_not_much_larger_on_the_wire(grid: LocalGrid, tmp_path: Path) -> None:
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    data = random.Random(7).randbytes(20_000_000)
    join(grid, tmp_path, "ada", lambda user, request, deadline: request)
    assert talk(grid, {"ada": data}) == {"ada": data}
    request = next(message for message in grid.sent if message.metadata.message_type == "train")
    sent = sum(len(part.deflate()) for part in get_all_nested_objects(request).values())
    assert len(data) < sent < 1.001 * len(data)


def replying(hello: Callable[[], RecordDict], train: Callable[[], RecordDict]) -> ClientApp:
    """An app that is not comingle's, though it answers to the same kinds of messages."""
    made = ClientApp()
    made.query("hello")(lambda message, context: Message(hello(), reply_to=message))
    made.query("refused")(lambda message, context: Message(RecordDict(), reply_to=message))
    made.train()(lambda message, context: Message(train(), reply_to=message))
    return made


def hello_of(**changes: Any) -> RecordDict:
    return RecordDict({"hello": ConfigRecord({"name": "bob", "instance": "1", "format": 1} | changes)})


def array_of(key: str) -> RecordDict:
    return RecordDict({"message": ArrayRecord({key: Array("uint8", (1,), "comingle", b"x")})})


LONG = "x" * 1_000_000
ODD_REPLIES: dict[str, Callable[[], RecordDict]] = {
    "nothing": RecordDict,
    "no line": lambda: RecordDict({"line": ConfigRecord({"accident": False})}),
    "no kind": lambda: RecordDict({"line": ConfigRecord({"line": "no"})}),
    "line of numbers": lambda: RecordDict({"line": ConfigRecord({"line": [1, 2], "accident": [3]})}),
    "long line": lambda: RecordDict({"line": ConfigRecord({"line": LONG, "accident": False})}),
    "control characters": lambda: RecordDict({"line": ConfigRecord({"line": "no\n\x1b[2J", "accident": False})}),
    "another array": lambda: array_of("other"),
    "long names": lambda: RecordDict({LONG: ConfigRecord({})}),
    "a line that is an array": lambda: RecordDict({"line": array_of("line").array_records["message"]}),
}
ODD_HELLOS: dict[str, Callable[[], RecordDict]] = {
    **{what: reply for what, reply in ODD_REPLIES.items() if what != "no kind"},
    "long name": lambda: hello_of(name=LONG),
    "name of numbers": lambda: hello_of(name=[1, 2]),
    "name of control characters": lambda: hello_of(name="\x1b[2J"),
    "no name": lambda: hello_of(name=""),
    "long instance": lambda: hello_of(instance=LONG),
    "format as text": lambda: hello_of(format="new"),
    "another format": lambda: hello_of(format=2),
}


@pytest.mark.parametrize("what", ODD_REPLIES)
@pytest.mark.sampled(1)
def test_a_reply_that_is_not_comingles_is_one_short_line(what: str, grid: LocalGrid, tmp_path: Path) -> None:
    join(grid, tmp_path, "ada")
    grid.join(replying(hello_of, ODD_REPLIES[what]))
    got = talk(grid, {"ada": b"x", "bob": b"x"})
    assert got["ada"] == b"ada: X"
    assert isinstance(got["bob"], str)
    assert got["bob"].isprintable()
    assert 0 < len(got["bob"]) < 600


@pytest.mark.parametrize("what", ODD_HELLOS)
@pytest.mark.sampled(2)
def test_a_node_that_does_not_say_who_it_is_is_not_let_in(what: str, grid: LocalGrid, tmp_path: Path) -> None:
    join(grid, tmp_path, "ada")
    grid.join(replying(ODD_HELLOS[what], RecordDict))
    said: list[str] = []
    channel = GridChannel(grid, said.append)
    assert channel.present() == ["ada"]
    (refused,) = [line for line in said if line.startswith("refused: ")]
    assert refused.isprintable()
    assert len(refused) < 600
    assert dict(channel.exchange({"ada": b"x"}, timeout=10)) == {"ada": b"ada: X"}


def test_an_error_of_flowers_own_is_said_in_plain_words(grid: LocalGrid, tmp_path: Path) -> None:
    made = make_client_app(shout, print)
    lost = ClientApp()
    lost.query("hello")(lambda message, context: made(message, context))
    lost.train()(lambda message, context: Message(Error(ErrorCode.NODE_UNAVAILABLE, "Error: Node"), reply_to=message))
    grid.join(lost, name="ada", state=str(tmp_path / "ada"))
    assert talk(grid, {"ada": b""}) == {"ada": "connection lost"}


class _SlowCount(int):
    """A number whose sums and differences take so long that other threads run in between."""

    def __add__(self, other: int) -> _SlowCount:
        time.sleep(0.01)
        return _SlowCount(int(self) + other)

    def __sub__(self, other: int) -> _SlowCount:
        return self + -other


class _RefusingGrid:
    """A grid that accepts no message."""

    def push_messages(self, messages: list[Message]) -> list[str]:
        return []


def test_messages_in_flight_are_counted_when_threads_interleave() -> None:
    sender = MessageSender(_RefusingGrid())  # type: ignore[arg-type]
    sender._num_in_flight = _SlowCount(0)
    before = set(threading.enumerate())
    for _ in range(8):
        sender.send(RecordDict(), node=1, kind="query.hello", seconds=1.0, tag=None, on_reply=lambda _: None)
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert sender._num_in_flight == 0
