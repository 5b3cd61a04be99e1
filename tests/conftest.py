"""What all tests share: examples of hypothesis have no time limit, so that a busy machine fails nothing.

Nothing here imports torch before there are tests to collect: the process that only deals them out to others has none.
"""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

settings.register_profile("epee", settings.default, deadline=None)
settings.load_profile("epee")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this suite."""
    parser.addoption(
        "--poisoned-defaults",
        action="store_true",
        help='run public calls of epee under the default device "meta" and dtype float64 (tests/defaults.py)',
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what makes no sense under foreign defaults; `tests.defaults.NOT_RUN` says why."""
    if config.getoption("--poisoned-defaults"):
        from tests import defaults

        left_out = [item for item in items if item.nodeid.startswith(tuple(defaults.NOT_RUN))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Leave what the tests have imported out of all collections of garbage: each would take a fifth of a second.

    Many tests collect before and after, to see what stays open.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests for which this machine lacks hosts or NIXL, with the reason; with EPEE_REQUIRE_...=1 they fail."""
    for mark in item.iter_markers("hosts"):
        from tests.hosts import can_make_hosts

        reason = can_make_hosts(*mark.args)
        if reason and os.environ.get("EPEE_REQUIRE_HOSTS") == "1":
            pytest.fail(f"no hosts can be made here, and EPEE_REQUIRE_HOSTS=1: {reason}", pytrace=False)
        if reason:
            pytest.skip(f"no hosts can be made here: {reason}")
    if item.get_closest_marker("nixl"):
        from epee.link.nixl.library import why_missing

        reason = why_missing()
        if reason and os.environ.get("EPEE_REQUIRE_NIXL") == "1":
            pytest.fail(f"no NIXL here, and EPEE_REQUIRE_NIXL=1: {reason}", pytrace=False)
        if reason:
            pytest.skip(f"no NIXL here: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    """Tell the processes of the harness what is asked for, before there is any."""
    if config.getoption("--poisoned-defaults"):
        from tests import defaults

        os.environ[defaults.ASKED] = "1"
        defaults.install_if_asked()
