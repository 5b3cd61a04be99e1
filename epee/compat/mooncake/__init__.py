"""Mooncake's names (`pg`, `ep`) over epee's backend: change `from mooncake import pg` to
`from epee.compat.mooncake import pg`.

Importing either module registers the backends `mooncake` and `mooncake-cpu`. Their groups are epee's, in mask mode.
docs/backend.md lists what differs.
"""
