"""Check docstrings, comments and documentation for sentence openers, banned words and missing ``Args:`` sections.

Run ``python .ci/prose.py [PATH ...]`` from the root of the repository; paths limit the check to files below them.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = ("src", "papers/src", "benchmarks", "papers/benchmarks", "examples", "docs", ".ci")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs", "examples", "papers", "benchmarks")
RECORDS = ("docs/decisions/", "papers/docs/log.md", "papers/docs/results.md")
"""Documents that keep the words in which they were written."""

COMMANDS = ("src/comingle/cli/", "papers/src/comingle_papers/cli.py")
SELF = ".ci/prose.py"

BANNED = re.compile(
    r"\b(everybody|everybody's|nobody|nobody's|somebody|anybody|whoever|whomever|whom|so many|is told|are told|was told"
    r"|goes on from|go on from|one's own|those who|more seldom)\b",
    re.IGNORECASE,
)
OPENERS = re.compile(
    r"^(What|Whom|Whose|Who|Which|By|Of|Those|Where|When|Whether|How|Why|That|The|A|An|In|On|With|To|For|From|At|As|If"
    r"|One|All|Each|Every|Some|Such|So|It|Its|There|These|They|Here|Both|Only|Nothing|Everything|More|Most|Many)\b"
)
"""First words of a function's docstring that are not an imperative verb."""

SENTENCE_OPENERS = re.compile(r"(?:^|(?<=[.!?:;] ))(What|Whom|By which|Of which|Those who|Whoever)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Classes:
    """Base classes and methods of every class, by the class's name."""

    bases: dict[str, set[str]] = field(default_factory=dict)
    methods: dict[str, set[str]] = field(default_factory=dict)

    def add(self, tree: ast.Module) -> None:
        """Add the classes of a module."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                self.bases.setdefault(node.name, set()).update(names)
                self.methods.setdefault(node.name, set()).update(
                    item.name for item in node.body if isinstance(item, Function)
                )

    def overrides(self, owner: str, method: str) -> bool:
        """Return whether a base class of ``owner`` defines ``method``."""
        seen, names = {owner}, set(self.bases.get(owner, ()))
        while names:
            seen |= names
            if any(method in self.methods.get(name, ()) for name in names):
                return True
            names = set().union(*(self.bases.get(name, set()) for name in names)) - seen
        return False


def find_problems(root: Path, within: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a line for each problem below ``root``, in files whose path starts with one of ``within``."""
    sources = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for folder in SOURCES
        for path in sorted((root / folder).rglob("*.py"))
    }
    classes = Classes()
    for text in sources.values():
        classes.add(ast.parse(text))
    for name, text in sources.items():
        if name != SELF and name.startswith(within or ("",)):
            is_commands = name.startswith(COMMANDS)
            yield from (f"{name}:{line}: {problem}" for line, problem in check_source(text, classes, is_commands))
    for given in DOCUMENTS:
        for path in sorted((root / given).rglob("*.md")) or [root / given]:
            name = path.relative_to(root).as_posix()
            if path.is_file() and not name.startswith(RECORDS) and name.startswith(within or ("",)):
                text = path.read_text(encoding="utf-8")
                yield from (f"{name}:{line}: {problem}" for line, problem in check_document(text))


def check_source(text: str, classes: Classes, is_commands: bool = False) -> Iterator[tuple[int, str]]:
    """Yield line and problem of a module's docstrings and comments.

    Args:
        text: The module's source.
        classes: Classes of all modules, among which overridden methods are looked up.
        is_commands: Whether the module has commands, whose parameters are described by their options' help texts.
    """
    for owner, node in find_functions(ast.parse(text)):
        doc = ast.get_docstring(node)
        if doc is None or any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        if OPENERS.match(doc):
            yield node.lineno, f"docstring does not open with an imperative verb: {doc.splitlines()[0]}"
        if not is_commands and needs_args(owner, node, classes) and "Args:" not in doc:
            yield node.lineno, f"{node.name} has three or more parameters and no Args: section"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_doc = token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))
        if is_doc or token.type == tokenize.COMMENT:
            yield from check_prose(token.start[0], re.sub(r"(?m)``[^`]*``|^ +\w+:", "``", token.string))


def find_functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Yield (name of the class or "", function) for functions and methods, not for functions inside functions."""
    for node in tree.body:
        if isinstance(node, Function):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, item) for item in node.body if isinstance(item, Function))


def needs_args(owner: str, node: Function, classes: Classes) -> bool:
    """Return whether a function is public, has three or more parameters and has no other place that describes them.

    A method that overrides another one is described there.
    """
    if node.name.startswith("_") or owner.startswith("_") or classes.overrides(owner, node.name):
        return False
    if any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
        return False
    parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([parameter for parameter in parameters if parameter.arg not in ("self", "cls")]) >= 3


def check_document(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and problem of a Markdown page, without its code and headings."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if not in_code and not line.startswith("#"):
            yield from check_prose(number, re.sub(r"`[^`]*`", "``", line))


def check_prose(line: int, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and problem for banned words and sentence openers in a text that starts at ``line``."""
    for offset, part in enumerate(text.splitlines()):
        for found in [*BANNED.finditer(part), *SENTENCE_OPENERS.finditer(part.strip('"# '))]:
            yield line + offset, f"banned: {found[0]}"


def main() -> int:
    """Print the problems; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="check only files whose path starts with one of these")
    problems = list(find_problems(Path.cwd(), tuple(parser.parse_args().paths)))
    print("\n".join(problems) or "prose: no problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
