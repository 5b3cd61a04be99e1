"""Mooncake's names (`pg`, `ep`) over epee's backend: change `from mooncake import pg` to
`from epee.compat.mooncake import pg`.

Importing either module registers the backends `mooncake` and `mooncake-cpu`. Their groups are epee's, in mask mode.
docs/backend.md lists what differs. `install_as_mooncake` lets code that says `import mooncake` find them.
"""

from epee.compat.names import take_place

__all__ = ["install_as_mooncake"]


def install_as_mooncake() -> None:
    """Let `import mooncake.pg`, `.ep`, `.mooncake_ep_buffer`, `.mooncake_elastic_buffer` find epee in this process.

    Other modules of `mooncake` (its store, its transfer engine) stay those of the real package, if it is installed.

    Raises:
        InvalidState: one of these modules has been imported already from another package.
    """
    take_place("mooncake")
