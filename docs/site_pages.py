"""mkdocs hook: add pages that live outside ``docs`` and reference pages generated from the code.

README, the change log, the pages of ``papers/docs`` and others become pages of the site without a copy. Links from
and to them are rewritten to the pages of the site.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[1]

ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "LICENSE": "LICENSE",
    "CITATION.cff": "CITATION.cff",
    "examples/README.md": "examples.md",
    "examples/federation/README.md": "examples/federation.md",
    "examples/services/README.md": "examples/services.md",
    **{f"papers/docs/{path.name}": path.name for path in sorted((REPOSITORY / "papers" / "docs").glob("*.md"))},
    **{f"examples/{path.name}": f"examples/{path.name}" for path in sorted((REPOSITORY / "examples").glob("*.*y*"))},
    **{
        f"examples/{folder}/{path.name}": f"examples/{folder}/{path.name}"
        for folder in ("federation", "living", "services")
        for path in sorted((REPOSITORY / "examples" / folder).glob("[!R_]*"))
        if path.is_file()
    },
}
"""Files outside ``docs`` and their pages in the site."""

LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))|(^\[[^\]]+\]: )([^\s:#]+)()", re.MULTILINE)
"""A link to another file of the repository."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that live outside ``docs``."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(REPOSITORY / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository as links between pages, and append generated text.

    Args:
        markdown: Text of the page.
        page: The page.
        config: Configuration of the site.
        files: Files of the site.
    """
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation"]  # the home page has no neighbours
    source = next((source for source, uri in ELSEWHERE.items() if uri == here), f"docs/{here}")

    def rewrite_link(found: re.Match[str]) -> str:
        before, target, after = found.groups()[:3] if found[1] else found.groups()[3:]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        uri = ELSEWHERE.get(wanted, wanted.removeprefix("docs/") if wanted.startswith("docs/") else None)
        return found[0] if uri is None else before + posixpath.relpath(uri, posixpath.dirname(here) or ".") + after

    written = WRITTEN.get(here, list)()
    return "\n".join([LINK.sub(rewrite_link, markdown), "", *written])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove Sphinx roles and double colons, which docstrings have and Markdown does not know.

    Args:
        html: Content of the page.
        page: The page.
        config: Configuration of the site.
        files: Files of the site.
    """
    return re.sub(r":\w+:(?=<code>)", "", html).replace("::</p>", ":</p>")


# ---------------------------------------------------------------- generated from the code


def commands() -> Iterator[str]:
    """Yield the help of each command as Markdown."""
    import typer

    from comingle.cli import app

    group: Any = typer.main.get_command(app)
    for name in group.commands:
        command = group.get_command(None, name)  # a plug-in's is imported here
        context = command.make_context(f"comingle {name}", [], resilient_parsing=True)
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        yield f"## {context.command_path}\n\n{inspect.cleandoc(command.help)}\n\n```text\n{usage}\n```\n"
        yield "| argument or option | meaning |\n|---|---|"
        for parameter in command.get_params(context):
            if (told := parameter.get_help_record(context)) and parameter.name != "help":
                yield f"| `{cell(told[0])}` | {cell(told[1])} |"
        yield ""


def cell(text: str) -> str:
    """Escape text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def methods() -> Iterator[str]:
    """Yield the docstring and settings of each method as Markdown."""
    from comingle.methods import REGISTRY, settings_of

    for name, make in REGISTRY.items():
        title, _, rest = inspect.getdoc(make).partition("\n")  # type: ignore[union-attr]
        yield f"## {name}\n\n{title}\n"
        body, _, arguments = rest.strip().partition("\n\nArgs:\n")
        for paragraph in re.split(r"\n\s*\n", body):
            yield from (f"{line}  " for line in fields(paragraph))
            yield ""
        meanings = {key: " ".join(text.split()) for key, text in ARGUMENT.findall(arguments.partition("\n\n")[0])}
        settings = settings_of(name)
        if settings and meanings:
            yield "| setting | default | meaning |\n|---|---|---|"
            yield from (f"| `{key}` | `{value}` | {cell(meanings.get(key, ''))} |" for key, value in settings.items())
            yield ""
        elif settings:
            yield "| setting | default |\n|---|---|"
            yield from (f"| `{key}` | `{value}` |" for key, value in settings.items())
            yield ""


ARGUMENT = re.compile(r"^ {4}(\w+): (.+(?:\n {8,}.+)*)", re.MULTILINE)
"""An entry of a docstring's ``Args:``, with its continuation lines."""

FIELD = re.compile(r"(?:(?<=^)|(?<=\n)|(?<=  ))((?:Source|Shared|Local|Frozen|Client|Server|Differs from the paper):)")
"""Label of a field in a method's docstring."""


def fields(paragraph: str) -> list[str]:
    """Split a paragraph of a docstring into one line per field."""
    parts = FIELD.split(paragraph)
    lines = [parts[0], *(f"**{label}**{text}" for label, text in zip(parts[1::2], parts[2::2], strict=True))]
    return [" ".join(line.split()) for line in lines if line.strip()]


WRITTEN = {"reference/cli.md": commands, "reference/methods.md": methods}
"""Pages with text generated from the code."""
