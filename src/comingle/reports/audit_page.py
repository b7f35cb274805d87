"""The page of an audit: tables for the terminal, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from comingle.reports.audit import VIEWS, Audit, mean_told, reach_told, verdict
from comingle.reports.significance import interval
from comingle.tables.framing import Table
from comingle.utils.errors import RunError
from comingle.utils.records import plural, write_json, write_text
from comingle.utils.terminal import printable, words


def proof_rows(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Head and rows: what each view proves."""
    head = ["who looks", "guesses right", "epsilon at least", "provable so", "account says at most"]
    rows = [
        [
            VIEWS[proof.view],
            f"{proof.correct} of {proof.guesses}",
            f"{proof.epsilon:.2f}",
            f"{proof.provable:.2f}",
            "nothing" if proof.upper is None else f"{proof.upper:.2f}",
        ]
        for proof in audit.proofs
    ]
    return head, rows


def member_rows(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Head and rows: how well each user's training windows are told from others."""
    head = ["user", "members", "others", "AUC", "AUC of loss alone", "found at 1% false alarms"]
    rows = [
        [
            printable(one.user),
            str(one.members),
            str(one.others),
            f"{one.auc:.2f}",
            f"{one.auc_of_loss:.2f}",
            "too few others" if one.found is None else f"{one.found:.2f}",
        ]
        for one in audit.members
    ]
    found = [one.found for one in audit.members if one.found is not None]
    columns = ([one.auc for one in audit.members], [one.auc_of_loss for one in audit.members], found)
    rows.append(["mean", "", "", *map(_spread, columns)])
    return head, rows


def inversion_rows(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Head and rows: how near inputs come back out of an upload."""
    rows = [
        [one.what, str(len(one.errors)), mean_told(one.errors, 3), mean_told(one.guesses, 3)]
        for one in audit.inversions
    ]
    return ["upload of", "users", "relative error", "of the mean input"], rows


def shadow_rows(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Head and rows: how well windows are told apart with reference models."""
    head = ["user", "who looks", "members", "others", "AUC", "AUC without references", "found at 1% false alarms"]
    rows = []
    for view in VIEWS:
        of_view = [one for one in audit.shadowed if one.view == view]
        for one in of_view:
            found = "too few others" if one.found is None else f"{one.found:.2f}"
            counts = [str(one.members), str(one.others)]
            rows.append([printable(one.user), view, *counts, f"{one.auc:.2f}", f"{one.auc_of_scores:.2f}", found])
        found = [one.found for one in of_view if one.found is not None]
        columns = ([one.auc for one in of_view], [one.auc_of_scores for one in of_view], found)
        rows += [["mean", view, "", "", *map(_spread, columns)]] if of_view else []
    return head, rows


def recovery_rows(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Head and rows: how many of a batch's tokens an upload gives away."""
    rows = [
        [
            one.what,
            str(len(one.tokens)),
            f"{fmean(one.tokens):.0f}",
            mean_told(one.recovered, 2),
            mean_told(one.guesses, 2),
        ]
        for one in audit.recoveries
    ]
    return ["upload of", "users", "different tokens", "share recovered", "by guessing common ones"], rows


def _sections(audit: Audit) -> dict[str, tuple[list[str], list[list[str]]]]:
    """The tables by title."""
    if audit.inversions:
        return {"inputs out of one upload; 95%": inversion_rows(audit)}
    runs = f"{plural(audit.trials, 'run')}, {plural(audit.rounds, 'round')}"
    canaries = f"canaries: {runs}; {audit.confidence:.0%}, delta {audit.delta:g}"
    members = f"training {audit.windows}, by the final shared model; 95%"
    found = {canaries: proof_rows(audit), members: member_rows(audit)}
    if audit.shadowed:
        found[f"training {audit.windows}, with reference models: {audit.shadows} runs; 95%"] = shadow_rows(audit)
    if audit.recoveries:
        found["tokens out of one upload; 95%"] = recovery_rows(audit)
    return found


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    reach = interval(values)
    return f"{fmean(values):.2f}" + (f" ({reach_told(reach)})" if reach is not None else "")


def render_audit(audit: Audit) -> list[Table]:
    """The tables for the terminal."""
    tables = []
    for title, (head, rows) in _sections(audit).items():
        table = Table(title=title, title_justify="left", box=None)
        for name in head:
            table.add_column(name, no_wrap=name == "user")
        for row in rows:
            table.add_row(*map(words, row))
        tables.append(table)
    return tables


def markdown(audit: Audit) -> str:
    """The page."""
    lines = [f"# What leaks: {printable(audit.run)}", "", f"{audit.method}, {audit.users} users.", ""]
    lines += [line for said in verdict(audit) for line in (f"- {said}",)]
    for head, rows in _sections(audit).values():
        lines += ["", _line(head), _line(["---"] * len(head)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


FILES = ("audit.json", "audit.md")


def check_targets(folder: Path, *, force: bool) -> None:
    """Whether the page can be written to a folder.

    Raises:
        RunError: it is a file, or one of the page's files is there already, and ``force`` does not replace it.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --out names a folder")
    for name in FILES:
        if (folder / name).exists() and not force:
            raise RunError(f"{folder / name}: exists; give --force to replace it, or --out another folder")


def write_audit(folder: Path, audit: Audit) -> None:
    """The page, for people and for programs."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "audit.json", audit.as_dict())
    write_text(folder / "audit.md", markdown(audit))
