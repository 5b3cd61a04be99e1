"""Groups over several hosts on one machine: `run_ranks`, with a place for each rank.

A host (`Hosts`, `run_on_hosts`) is a network, PID, mount, IPC and host name of its own; the ranks in it are forked from
the server of `tests.harness`, answer as its ranks do and are ended as they are. Where the user may not make namespaces,
tests marked `hosts` are skipped (they fail with EPEE_REQUIRE_HOSTS=1, as in CI); `run_on_loopbacks` needs no rights.

Processes, each the child of the one to its left; what ends takes all to its right with it:

    test - server of tests.harness - lab (`lab.py`) - first process of a host (`machine.py`) - ranks
"""

from .hosts import Hosts as Hosts
from .hosts import HostsError as HostsError
from .hosts import can_make_hosts as can_make_hosts
from .hosts import interface_bytes as interface_bytes
from .relay import Link as Link
from .run import num_hosts_of as num_hosts_of
from .run import run_on_hosts as run_on_hosts
from .run import run_on_loopbacks as run_on_loopbacks
from .run import started_on_hosts as started_on_hosts
