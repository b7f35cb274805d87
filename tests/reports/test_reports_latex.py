"""LaTeX tables: read by a parser of their own, and compiled where there is pdflatex."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from comingle.reports.comparisons import compare_metrics, read_baseline_comparison, verdict_rows, with_baseline
from comingle.reports.tables import comparison_note, escape_latex, latex, markdown
from comingle.runs.comparison import Comparison
from comingle.utils.errors import RecipeError, RunError

HOSTILE = r"[b]*_o&b% $1 #2 {x} \input{/etc/passwd} ~^ <a|b> `c' ?` -- \\ {"
NAMED = {
    "textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textless": "<", "textgreater": ">",
    "textbar": "|", "textasciigrave": "`", "textdagger": "†", "textdaggerdbl": "‡", "textendash": "–",
    "textperiodcentered": "·",
}  # fmt: skip


def metrics(method: str, seed: int, scores: dict[str, float | None], measure: str = "perplexity") -> dict[str, Any]:
    known = [score for score in scores.values() if score is not None]
    users = {name: {f"test_{measure}": score, "test_loss_nats": 1.0} for name, score in scores.items()}
    return {
        "method": method, "seed": seed, "rounds": 2, "users": users, "trainable_parameters": 1234, "wall_seconds": 3.0,
        f"mean_test_{measure}": sum(known) / len(known) if len(known) == len(scores) else None,
        "upload_bytes_per_user_round": 2_500_000, "tokens_per_second": 10.0, "base": "random:llama",
    }  # fmt: skip


def plain(text: str) -> str:
    """Return what LaTeX typesets of escaped text; raise for anything that it would obey."""
    found, rest = "", text
    while rest:
        if named := re.match(r"\\([a-zA-Z]+)\{\}", rest):
            found += NAMED[named[1]]
        elif named := re.match(r"\\([&%$#_{}])|\{([\[*])\}|(\$\\pm\$)|\$\\times\$", rest):
            found += named[1] or named[2] or ("±" if named[3] else "×")
        elif named := re.match(r"([-'])\{\}(?=\1)|\$(-[\d.]+)\$", rest):
            found += named[1] or named[2]
        elif named := re.match(r"[^\\{}$&#^_~%<>|`\[*]", rest):
            found += named[0]
        else:
            raise ValueError(f"not escaped: {rest!r}")
        rest = rest[named.end() :]
    return found


def split_cells(line: str) -> list[str]:
    assert line.endswith(r" \\"), line
    return re.split(r"(?<!\\) & ", line.removesuffix(r" \\"))


def tables_in(source: str) -> list[tuple[str, list[str], list[list[tuple[str, bool]]]]]:
    """Return caption, head and rows of each tabular; a cell is its text and whether it is bold."""
    found = []
    bold = re.compile(r"\\textbf\{(.*)\}")
    for body in re.findall(r"\\begin\{table\}\n(.*?)\\end\{table\}", source, re.DOTALL):
        assert len(re.findall(r"^ *\\label\{tab:[\w.-]+\}$", body, re.MULTILINE)) == 1
        (caption,) = re.findall(r"^ *\\caption\{(.*)\}$", body, re.MULTILINE)
        tabulars = re.findall(r"\\begin\{tabular\}\{(l?r*)\}\n(.*?)\\end\{tabular\}", body, re.DOTALL)
        assert body.count("tabular}") == 2 * len(tabulars) > 0
        for columns, inside in tabulars:
            top, first, middle, *lines, bottom = [line.strip() for line in inside.strip().splitlines()]
            assert [top, middle, bottom] == [r"\toprule", r"\midrule", r"\bottomrule"]
            head, rows = [plain(cell) for cell in split_cells(first)], [split_cells(line) for line in lines]
            assert {len(row) for row in rows} | {len(head)} == {len(columns)}
            told = [
                [(plain(m[1]), True) if (m := bold.fullmatch(c)) else (plain(c), False) for c in row] for row in rows
            ]
            found.append((plain(caption), head, told))
    return found


def of(*runs: dict[str, Any]) -> dict[str, Any]:
    return compare_metrics([(run["method"], run) for run in runs])


def compile_latex(source: str, folder: Path) -> None:
    """Compile a document with the source in it, where there is a compiler."""
    program = shutil.which("pdflatex")
    if program is None:
        return
    document = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n" + source + "\\end{document}\n"
    (folder / "page.tex").write_text(document, encoding="utf-8")
    command = [program, "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "page.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (folder / "page.pdf").stat().st_size > 0


RUNS = (
    metrics("local", 0, {"ann": 4.0, HOSTILE: 9.0}), metrics("local", 1, {"ann": 6.0, HOSTILE: 9.0}),
    metrics("fed_avg", 0, {"ann": 5.0, HOSTILE: 7.0}), metrics("fed_avg", 1, {"ann": 5.001, HOSTILE: 8.0}),
    metrics("half", 0, {"ann": 8.0, HOSTILE: None}),
)  # fmt: skip


def test_means_over_seeds_with_the_best_of_each_column_in_bold(tmp_path: Path) -> None:
    source = latex(of(*RUNS))
    (caption, head, rows), (_, costs, costly), _ = tables_in(source)
    assert head == ["method", "ann", HOSTILE, "mean", "geometric mean"]
    assert [row[0][0] for row in rows] == ["local", "fed_avg", "half"]
    # 5.0 and 5.0005 are printed alike; sample deviations by hand
    assert [row[1] for row in rows] == [("5.00 ± 1.41", True), ("5.00 ± 0.00", True), ("8.00", False)]
    assert [row[2] for row in rows] == [("9.00 ± 0.00", False), ("7.50 ± 0.71", True), ("not finite", False)]
    assert costs == ["method", "trainable", "upload / round", "seconds"]
    assert [row[0][0] for row in costly] == ["local", "fed_avg", "half"]
    assert not any(bold for row in costly for _, bold in row)
    assert "mean ± std over seeds 0, 1" in caption
    assert "best in bold" in caption
    compile_latex(source, tmp_path)


def test_higher_accuracies_are_the_best() -> None:
    runs = [metrics(name, 0, {"ann": score}, "accuracy") for name, score in (("local", 0.5), ("fedavg", 0.75))]
    ((caption, head, rows),) = tables_in(latex(of(*runs)))
    assert head == ["method", "ann", "mean", "trainable", "upload / round", "seconds"]
    assert [row[head.index("ann")] for row in rows] == [("50.0%", False), ("75.0%", True)]
    assert "higher is better" in caption


def test_one_method_has_nothing_in_bold(tmp_path: Path) -> None:
    source = latex(of(RUNS[0]))
    assert r"\textbf" not in source
    compile_latex(source, tmp_path)


def test_of_many_users_each_has_a_row_if_asked_for(tmp_path: Path) -> None:
    names = [f"user_{i}" for i in range(30)]
    runs = [
        metrics("local", 0, {name: 5.0 + i for i, name in enumerate(names)}),
        metrics("fedavg", 0, dict.fromkeys(names, 20.0)),
    ]
    assert len(tables_in(latex(of(*runs)))) == 1
    source = latex(of(*runs), all_users=True)
    (_, head, _), (_, wide, rows) = tables_in(source)
    assert head[1:4] == ["best", "median", "worst"]
    assert wide == ["user", "local", "fedavg"]
    assert [row[0][0] for row in rows] == names
    assert [[bold for _, bold in row[1:]] for row in rows] == [[i <= 15, i >= 15] for i in range(30)]
    compile_latex(source, tmp_path)


def test_few_users_have_no_second_table() -> None:
    assert latex(of(*RUNS), all_users=True) == latex(of(*RUNS))


def test_budgets_that_differ_are_noted(tmp_path: Path) -> None:
    runs = [metrics(name, 0, {"ann": 5.0}) for name in ("a", "b", "c")]
    runs[2]["trainable_parameters"] = 99_999
    source = latex(of(*runs))
    assert r"99,999 \textdagger{}" in source
    assert r"\footnotesize \textdagger{} trains over 10\% more" in source
    compile_latex(source, tmp_path)


def test_settings_and_untrained_routers_are_noted(tmp_path: Path) -> None:
    runs = [metrics(name, 0, {"ann": 5.0}) for name in ("local", "comigs", "ifca:models=3")]
    runs[1] |= {"untrained": ["router"], "method_settings": {"router_every": 40}}
    runs[2] |= {"method_settings": {"models": 3, "weight": 0.5}}
    table = of(*runs)
    source = latex(table)
    assert r"comigs \textdaggerdbl{} &" in source
    assert source.count(r"\textdaggerdbl{}") == 2
    note = comparison_note(table)
    assert "comigs router_every=40, ifca:models=3 weight=0.5" in note
    assert note.count("‡ router") == 1
    assert "| comigs ‡ |" in markdown(table)
    compile_latex(source, tmp_path)


@pytest.mark.parametrize(
    "text", [HOSTILE, "---", "a-b", "50%", "\\", "line\nbreak\x1b[31m", "''", "it's", "Zoë · †–±×"]
)
def test_escaped_text_is_typeset_as_it_is(text: str) -> None:
    escaped = escape_latex(text)
    assert "\n" not in escaped
    assert plain(escaped) == text.replace("\n", "\\n").replace("\x1b", "\\x1b")


@pytest.mark.parametrize(("measure", "unit"), [("perplexity", "%"), ("loss", "×"), ("accuracy", "points")])
def test_verdicts_are_a_table_of_their_own(measure: str, unit: str, tmp_path: Path) -> None:
    scores = {"local": (0.4, 0.41), "fed_avg": (0.5, 0.52), "half": (0.6, 0.61)}
    runs = [
        metrics(name, seed, {"ann": score, HOSTILE: score + 0.1, "cem": score + 0.2}, measure)
        for name, by_seed in scores.items()
        for seed, score in enumerate(by_seed)
    ]
    table = with_baseline(of(*runs), "fed_avg")
    source = latex(table, name="a_b", require_verdicts=True)
    *results, (caption, head, rows) = tables_in(source)
    assert results == tables_in(latex({**table, "against": None}))
    assert re.findall(r"label\{(.*)\}", source) == ["tab:a-b", "tab:a-b-verdicts"]
    assert "$-" in source or unit == "×"
    comparison = read_baseline_comparison(table)
    assert comparison is not None
    printed_head, printed = verdict_rows(comparison)
    assert (head, [[cell for cell, _ in row] for row in rows]) == (printed_head, printed)
    assert unit in rows[0][1][0]
    assert caption.lower().startswith("against fed_avg: ")
    compile_latex(source, tmp_path)


def test_no_verdicts_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"--against: got 2 methods with seeds 0.*2 seeds"):
        latex(with_baseline(of(RUNS[0], RUNS[2]), None), require_verdicts=True)


def test_a_comparison_in_python_has_the_same_table() -> None:
    compared = Comparison(folder=None, metrics={(run["method"], run["seed"]): run for run in RUNS})
    assert compared.to_latex() == latex(of(*RUNS))
    assert compared.to_latex(against="fed_avg") == latex(with_baseline(of(*RUNS), "fed_avg"))
    with pytest.warns(DeprecationWarning, match="all_users"):
        assert compared.to_latex(everybody=True) == compared.to_latex(all_users=True)
    with pytest.raises(RunError, match="to_latex"):
        Comparison(folder=None, metrics={}).to_latex()
