"""The function that the ServerApp runs: the server of a federation's file, in its run folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comingle.federation.files import load_plan
from comingle.federation.flower.channel import Channel
from comingle.federation.run_folder import run_federation
from comingle.methods.user_files import load_files_of_command
from comingle.training.events import AN_EVENT
from comingle.utils.errors import RecipeError
from comingle.utils.records import expand_home


def run_federation_app(channel: Channel, config: Mapping[str, Any], folder: Path, say: Callable[[str], None]) -> None:
    """Run or resume the federation of the file ``config["federation"]``.

    Args:
        channel: Transport of messages to clients.
        config: Run config of the Flower app; ``continue_from`` has the folder of an earlier run to continue.
        folder: The run folder.
        say: Called with each line to show to the operator.

    Raises:
        ComingleError: The file or the folder cannot be used, or too few clients answered.
    """
    file = str(config.get("federation") or "").strip()
    if not file:
        raise RecipeError("run config: no 'federation'; give --run-config 'federation=\"FILE\"'")
    load_files_of_command()  # Python files with the user's own methods, given with ``--plugin``

    def show(event: Mapping[str, Any]) -> None:
        _show_event(say, event)

    has_begun = (folder / "recipe.yaml").exists()
    with _warnings_shown(say):
        plan = load_plan(expand_home(file), continue_from=str(config.get("continue_from") or ""))
        run_federation(plan, channel, folder, resume=has_begun, observers=[show])


class _WarningHandler(logging.Handler):
    """Shows warnings to the operator, except those that are also events."""

    def __init__(self, say: Callable[[str], None]):
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning, unless it is also an event of the run, which :func:`_show_event` shows."""
        is_event = any(hasattr(record, attribute) for attribute in AN_EVENT)  # logged with ``extra=AN_EVENT``
        if not is_event:
            self._say(record.getMessage())


@contextmanager
def _warnings_shown(say: Callable[[str], None]) -> Iterator[None]:
    """Show warnings of comingle to the operator while the block runs."""
    handler, logger = _WarningHandler(say), logging.getLogger("comingle")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _show_event(say: Callable[[str], None], event: Mapping[str, Any]) -> None:
    """Show an event of the run to the operator in one line, if it is of a kind that matters to an operator.

    Args:
        say: Called with the line.
        event: Line of ``events.jsonl``; its key ``event`` is the kind.
    """
    kind = event["event"]
    if kind == "joined":
        say(f"{event['user']} has joined")
    elif kind in ("failed", "rejected", "declined"):
        say(f"{event['user']}: {event['reason']}")
    elif kind == "no_sum":  # too few uploads of a round, so the model is unchanged
        say(str(event["reason"]))
    elif kind == "aggregation" and event.get("left_out"):
        say(f"round {event['round']}: {event['rule']} left out {', '.join(event['left_out'])}")
    elif kind == "round":
        say(f"round {event['round']}: {event['upload_bytes']:,} bytes up, {event['download_bytes']:,} down")
    elif kind == "evaluation" and event["users"]:  # Users with scores; without them there is no mean.
        say(f"after round {event['round']}: {_mean_score_text(event)}")


def _mean_score_text(event: Mapping[str, Any]) -> str:
    """Return the mean test score of an evaluation event as text, such as "mean test loss 2.1 over 3 users".

    The event has the mean under a key that ends with the name of the measure, such as "mean_test_loss".
    """
    prefix = "mean_test_"
    key = next(key for key in event if key.startswith(prefix))
    measure = key.removeprefix(prefix)
    return f"mean test {measure} {event[key]:.4g} over {len(event['users'])} users"
