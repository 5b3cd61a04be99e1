"""`python -m epee.compat -- CMD ...`: run a command whose processes find epee as `deep_ep` and `mooncake`.

The command replaces this process. All settings are in the environment, so they reach every process that is started
below, by a shell, by torchrun or by a spawning library: the folders of the stand-ins at the head of PYTHONPATH, and the
switches that the stand-ins read. A Python that ignores its environment (`-I`, `-E`) does not find epee.
"""

from __future__ import annotations

import argparse
import os
import sys

from .. import env
from .names import SHIMS

_WAYS = {"deep_ep": "EPEE_AS_DEEP_EP", "mooncake": "EPEE_AS_MOONCAKE"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m epee.compat",
        usage="python -m epee.compat [--deep-ep] [--mooncake] -- CMD ...",
        description="Run a command whose processes, and all below them, find epee as deep_ep and as mooncake.",
    )
    parser.add_argument("--deep-ep", action="store_true", help="as deep_ep only, if --mooncake is not given as well")
    parser.add_argument("--mooncake", action="store_true", help="as mooncake only, likewise")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD ...", help="the command and its arguments")
    return parser


def environment(names: list[str]) -> dict[str, str]:
    """Return the environment of a command whose processes find epee under these names ("deep_ep", "mooncake")."""
    switches = {switch: str(int(name in names)) for name, switch in _WAYS.items()}
    return {**env.for_child(*(SHIMS / f"for_{name}" for name in names)), **switches}


def main(arguments: list[str]) -> None:
    """Run the command instead of this process; exit with 127 if it is not found."""
    parser = _parser()
    given = parser.parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("give a command behind --, such as: python -m epee.compat -- vllm serve MODEL")
    names = [name for name in _WAYS if getattr(given, name)] or list(_WAYS)
    try:
        os.execvpe(command[0], command, environment(names))
    except OSError as error:
        sys.stderr.write(f"python -m epee.compat: {command[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1:])
