"""The number of files and functions that a call enters, and the weight of the package: both may only fall.

The ceilings are what `python -m tests.paths` printed when they were written; whoever lowers a count lowers its ceiling.
Timing adds steps on a busy machine, so a case that is above a ceiling is measured again, and the smaller count stands.
"""

from __future__ import annotations

import shutil

import pytest

from tests.paths import code_lines, measure, package_code_lines

# call: (files, functions), from the slowest of several runs on a 2-core CPU machine
CEILINGS = {
    "cpu": {
        "dispatch cpu": (26, 98),
        "combine cpu": (25, 100),
        "all_reduce 16 B cpu": (12, 28),
        "all_reduce 16 MiB cpu": (24, 85),
    },
    "hosts": {
        "dispatch hosts": (45, 189),
        "combine hosts": (41, 162),
        "all_reduce 16 B hosts": (17, 42),
        "all_reduce 16 MiB hosts": (32, 141),
    },
    "cuda": {
        "dispatch cuda, first": (25, 125),
        # 40 and 162 where the other rank is as quick: the first one exchanges bytes by the engine, and waits for them
        "combine cuda, first": (48, 212),
        "dispatch cuda, repeated": (20, 78),
        "combine cuda, repeated": (21, 67),
        "latency dispatch cuda, first": (24, 83),
        "latency combine cuda, first": (20, 69),
        "latency dispatch cuda, repeated": (20, 44),
        "latency combine cuda, repeated": (17, 44),
    },
    # 487 to 491, and 503 to 505 where the agent still sends to the peer: it has not learnt of the death yet. On a busy
    # machine that was so in five runs of five.
    "kill": {"all_reduce, peer killed": (45, 505)},
}
MAX_CODE_LINES = 50_592
ATTEMPTS = 5


def fewest(case: str) -> dict[str, tuple[int, int]]:
    """Return the counts of each call of a case, measured again while one is above its ceiling."""
    counts: dict[str, tuple[int, int]] = {}
    for _ in range(ATTEMPTS):
        for call, (files, functions) in measure(case).items():
            before = counts.get(call, (len(files), functions))
            counts[call] = (min(before[0], len(files)), min(before[1], functions))
        if all(counts[call][i] <= ceiling[i] for call, ceiling in CEILINGS[case].items() for i in (0, 1)):
            break
    return counts


@pytest.mark.parametrize("case", CEILINGS)
def test_calls_enter_no_more_files_and_functions_than_before(case: str) -> None:
    """One test for all calls of a case: they are measured together, and each process of pytest would do it again."""
    if case == "cuda" and shutil.which("g++") is None:
        pytest.skip("no g++ here, and the emulated kernels need it")
    counts = fewest(case)
    above = {
        call: f"{counts[call]} files and functions, at most {ceiling}"
        for call, ceiling in CEILINGS[case].items()
        if counts[call][0] > ceiling[0] or counts[call][1] > ceiling[1]
    }
    assert not above


def test_the_package_grows_by_no_code_line() -> None:
    assert package_code_lines() <= MAX_CODE_LINES


def test_blanks_comments_and_docstrings_are_no_code_lines() -> None:
    module = '"""Module."""\n\n# why\nx = (\n    1,  # one\n)\n\n\n'
    text = module + 'def f():\n    """Doc\n    string."""\n    return """a\nb"""\n'
    assert code_lines(text) == 6
