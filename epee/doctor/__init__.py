"""Capabilities and limits of this machine for epee: `epee doctor`.

Checks are plain functions that try something and return a `Finding` (`finding.py`): about versions and the machine
(`machine.py`), memory shared between processes (`sharing.py`, with real children), memory of buffers (`buffers.py`),
groups over several hosts (`hosts/network.py`), settings (`settings.py`), and GPUs (`gpu.py`, in a process of its own,
because a driver may hang or crash). `report.py` runs them all. Nothing is changed and nothing is left behind; every
check is bounded in time, and none raises.

Separate commands are `hang.py`: the state of the ranks of a running job (`epee doctor --pid`), and `hosts/reach.py`:
whether another host is reached (`epee doctor --listen` there, `--peer` here).
"""
