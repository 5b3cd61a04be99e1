"""Plain technical English: the private words that the package still uses, and docstrings that open with a question.

The counts may only fall (docs/design.md has the glossary): new text uses the field's words, and whoever changes a file
renames what it still holds. In names every part counts; in prose a word that everybody uses in its ordinary sense does
not.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRIVATE = frozenset(
    [
        "told",
        "teller",
        "telling",
        "untold",
        "lane",
        "lanes",
        "glance",
        "calm",
        "quiet",
        "born",
        "birth",
        "founding",
        "heed",
        "insist",
        "withdraw",
        "withdrawal",
        "disown",
        "survival",
        "judge",
        "occupants",
        "roster",
        "seat",
        "bell",
        "letter",
        "parcel",
        "gear",
        "mail",
        "mailroom",
        "keeper",
        "heir",
        "ear",
        "haunted",
        "ghost",
        "zombie",
        "bury",
        "mourn",
        "newcomer",
        "entrant",
        "patience",
        "flight",
        "flights",
        "box",
        "boxes",
        "news",
        "door",
    ]
)
IN_NAMES = frozenset(
    [
        "look",
        "looks",
        "half",
        "halves",
        "again",
        "lately",
        "bear",
        "course",
        "wish",
        "ways",
        "facts",
        "known",
        "gone",
        "home",
        "place",
        "places",
    ]
)
QUESTION = re.compile(r"(who|what|how|which|where|whoever|whatever|see above)\b", re.IGNORECASE)
WORD = re.compile(r"\w+")
NAME_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
MAX_IN_PACKAGE = 3_671
MAX_IN_DOCS = 569
MAX_IN_USER_PAGES = 0
NO_USER_PAGES = ("decisions.md", "design.md", "dependencies.md", "glossary.md")  # the glossary names these words
MAX_OPENINGS = 0


def private_words(text: str) -> int:
    """Return the number of private words in the comments, docstrings and names of a Python source."""
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))
        if token.type == tokenize.COMMENT or is_docstring:
            count += sum(word.lower() in PRIVATE for word in WORD.findall(token.string))
        elif token.type == tokenize.NAME:
            parts = {part.lower() for part in NAME_PART.findall(token.string)}
            count += len(parts & (PRIVATE | IN_NAMES))
    return count


def docstrings(text: str) -> Iterator[str]:
    """Yield the docstrings of a Python source."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found = ast.get_docstring(node)
            if found:
                yield found


def sources() -> list[str]:
    """Return the text of every Python source of the package."""
    return [path.read_text() for path in sorted((ROOT / "epee").rglob("*.py"))]


def test_the_package_uses_no_more_private_words_than_before() -> None:
    assert sum(map(private_words, sources())) <= MAX_IN_PACKAGE


def test_docs_and_kernels_use_no_more_private_words_than_before() -> None:
    paths = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "epee").rglob("*.cuh")]
    words = (word.lower() for path in paths for word in WORD.findall(path.read_text()))
    assert sum(word in PRIVATE for word in words) <= MAX_IN_DOCS


def test_pages_for_users_use_no_more_private_words_than_before() -> None:
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.name not in NO_USER_PAGES)]
    words = (word.lower() for page in pages for word in WORD.findall(page.read_text()))
    assert sum(word in PRIVATE for word in words) <= MAX_IN_USER_PAGES


def test_no_more_docstrings_open_with_a_question_word_than_before() -> None:
    openings = sum(bool(QUESTION.match(found)) for text in sources() for found in docstrings(text))
    assert openings <= MAX_OPENINGS


def test_private_words_are_counted_in_names_comments_and_docstrings() -> None:
    assert private_words('"""A lane of places."""\nOldPlace = told_twice = 1  # news of a half\n') == 4
