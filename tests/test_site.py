"""The site of the documentation: it builds without a network and without a warning, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import epee

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BUILD = """
import socket, sys
def refuse(*_, **__):
    raise AssertionError("the build of the site uses the network")
socket.socket.connect = socket.socket.sendto = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--quiet", "--site-dir", sys.argv[1]])
"""

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None, reason="mkdocs is missing; the extra `docs` installs it"
    ),
]


class Page(HTMLParser):
    """The anchors of a page, its links, and the addresses from which a browser would load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") != "canonical" and "href" in found:
            self.loaded.append(found["href"])
        elif "src" in found:
            self.loaded.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


def test_links_of_the_site_lead_to_a_page_and_an_anchor(pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            found = (path.parent / unquote(target)).resolve() if target else path
            missing = not found.exists() or (found in pages and anchor and unquote(anchor) not in pages[found].anchors)
            if missing:
                dead.append(f"{path.name}: {link}")
    assert not dead


def test_links_of_the_readme_lead_to_an_anchor_of_the_site(pages: dict[Path, Page], site: Path) -> None:
    links = re.findall(r"\]\(docs/([\w/-]+)\.md(?:#([^)]+))?\)", README.read_text())
    assert links
    dead = [
        f"docs/{name}.md#{anchor}"
        for name, anchor in links
        if anchor and anchor not in pages[site / f"{name}.html"].anchors
    ]
    assert not dead


def test_a_page_loads_nothing_from_elsewhere(pages: dict[Path, Page]) -> None:
    assert not {address for page in pages.values() for address in page.loaded if re.match(r"([a-z]+:)?//", address)}


def test_every_public_name_is_in_the_reference(pages: dict[Path, Page]) -> None:
    anchors = {anchor for page in pages.values() for anchor in page.anchors}
    public = {f"epee.{name}" for name in epee.__all__} - {"epee.__version__", "epee.errors", "epee.nn"}
    public |= {f"epee.nn.{name}" for name in epee.nn.__all__}
    named = {name for name in public if name in anchors or f"epee.errors.{name.removeprefix('epee.')}" in anchors}
    assert named == public
