"""One tree of loggers, and EPEE_LOG, which shows it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from epee import log
from epee.errors import InvalidArgument

SOURCES = sorted((Path(__file__).resolve().parents[1] / "epee").rglob("*.py"))


def test_every_logger_stands_in_one_tree() -> None:
    found = [(path.name, name) for path in SOURCES for name in re.findall(r"getLogger\((.*?)\)", path.read_text())]
    assert len(found) > 10
    assert {name for _, name in found} == {"__name__", '"epee"'}


@pytest.fixture
def tree() -> Iterator[logging.Logger]:
    logger = logging.getLogger("epee")
    before = list(logger.handlers), logger.level, logger.propagate
    yield logger
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.mark.parametrize(("level", "shown"), [("info", 1), ("debug", 2)])
def test_the_level_is_shown_with_rank_and_process(
    level: str, shown: int, tree: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EPEE_LOG", level)
    log.configure()
    log.configure()
    logging.getLogger("epee.jit.cache").info("told %s", "once")
    logging.getLogger("epee").debug("details")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == shown
    assert re.search(r"epee\[rank -, pid \d+\] INFO epee\.jit\.cache: told once$", lines[0])


def test_without_it_the_programs_logging_decides(tree: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPEE_LOG", raising=False)
    before = list(tree.handlers)
    log.configure()
    assert tree.handlers == before
    assert tree.propagate


def test_another_level_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_LOG", "loud")
    with pytest.raises(InvalidArgument, match="EPEE_LOG: must be info or debug, got 'loud'"):
        log.configure()
