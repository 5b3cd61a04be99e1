"""Hooks of mkdocs (mkdocs.yml): a page as the site needs it, where a viewer of files needs something else."""

from __future__ import annotations

import posixpath
import re
from typing import Any

PAGES = {"epee/view/protocol/PROTOCOL.md": "docs/protocol.md"}  # pages of the site that include such a file
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")
FENCE_WITH_TEST = re.compile(r"^(```\w+) \(.*\)$", re.MULTILINE)
PAGE_IN_DOCSTRING = re.compile(r"\bdocs/([\w-]+)\.md")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name the files outside docs/ instead of linking to them, and drop the name of a test behind a fence."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def shown(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return match[0]
        if path in PAGES:
            return f"[{text}]({posixpath.relpath(PAGES[path], folder)})"
        return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"

    return FENCE_WITH_TEST.sub(r"\1", LINK.sub(shown, markdown))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Link the pages that docstrings name, in the reference."""
    if not page.file.src_uri.startswith("reference-"):
        return html
    return PAGE_IN_DOCSTRING.sub(r'<a href="\1.html">\1.md</a>', html)
