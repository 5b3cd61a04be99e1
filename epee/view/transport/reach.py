"""Which hosts can be reached: what the control connections to the agents of other hosts have shown. No sockets here.

Each agent keeps a connection to each agent of another host, from the day that this is a member. What its kernel says
of it is noted here, by process:

    established    the other kernel answers. Its process may be stopped, or hold its GIL: that is no loss of a host
    proved         and it is the process that is meant
    ended          a reset, or the end of the stream; it is called again, every `AGAIN_S`
    refused        nobody listens there, or somebody else: the process has ended, or is about to
    no answer      to a call, in time
    silent         the kernel gave up a connection of which nothing came any more (keepalive, TCP_USER_TIMEOUT); it may
                   also say that it knows no way there

Beside that a small message goes out every `ping_s`: a cut in one direction is noticed by the side that sends, if it
does, as the kernel gives up when nothing confirms what it has sent.

Silence lasts `timeout_s` at most, from the last word that came: the first message that nothing confirms goes out
within `ping_s` of that, the kernel gives up `given_up_s` after it, then the process is called for `recall_s`, and the
three are `timeout_s` together. So half of that time is over before anything is given up, and a new call gets through
where the old connection had doubled its pauses too often.

A host is *lost* when none of its agents can be reached: each has been refused for `REFUSED_S`, silent and then not
there for `recall_s`, has ended a connection and answered no call for `UNANSWERED_S`, or has never answered within
`timeout_s`. That is a suspicion (`protocol/events.HostLost`): a host behind a cut cable may
live. A blip that is over before is none. What goes wrong on this side, such as no descriptor being left, says nothing.

Who calls: the agent thread. Nothing is shared, a crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.messages import Member

AGAIN_S = 0.1  # between two calls of one process
REFUSED_S = 0.5
UNANSWERED_S = 1.0  # two calls
ESTABLISHED, PROVED, ENDED, REFUSED, NO_ANSWER, SILENT, UNKNOWN = range(7)
NEVER = float("inf")


def ping_s(timeout_s: float) -> float:
    """Return how often a small message goes out."""
    return min(0.5, timeout_s / 8)


def recall_s(timeout_s: float) -> float:
    """Return how long a process is called whose connection the kernel has given up."""
    return timeout_s / 4


def given_up_s(timeout_s: float) -> float:
    """Return after what time the kernel is to give up a connection when nothing confirms what it has sent."""
    return timeout_s - ping_s(timeout_s) - recall_s(timeout_s)


class _Line:
    """What is known of the way to one process.

    Attributes:
        born: when the line was new; infinite once the other kernel has answered.
        ended, refused, silent: since when it has been so; infinite where it has not.
        call_at: when it is to be called; infinite while a connection is there or under way.
    """

    def __init__(self, member: Member, now: float) -> None:
        self.member = member
        self.is_up = False
        self.born = now
        self.ended = self.refused = self.silent = NEVER
        self.call_at = now

    def lost_at(self, timeout_s: float) -> float:
        """Return when it counts as unreachable if nothing changes."""
        if self.is_up:
            return NEVER
        ends = (self.refused + REFUSED_S, self.silent + recall_s(timeout_s), self.ended + UNANSWERED_S)
        return min(*ends, self.born + timeout_s)


class Reach:
    """See above.

    Args:
        host: key of the own host.
        timeout_s: EPEE_HOST_TIMEOUT_S.

    Attributes:
        ping_s: how often a small message is to go out on each connection.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host, self._timeout_s = host, timeout_s
        self.ping_s = ping_s(timeout_s)
        self._lines: dict[bytes, _Line] = {}

    def follow(self, members: Iterable[Member], now: float) -> None:
        """Keep a connection to each of these that runs on another host, and to nobody else."""
        theirs = {member.nonce: member for member in members if member.host != self._host}
        self._lines = {nonce: line for nonce, line in self._lines.items() if nonce in theirs}
        for nonce, member in theirs.items():
            self._lines.setdefault(nonce, _Line(member, now)).member = member

    def forget(self, nonce: bytes) -> None:
        """Keep no connection to a process that has ended."""
        self._lines.pop(nonce, None)

    def is_up(self, nonce: bytes) -> bool:
        """Return whether there is a connection to a process."""
        return nonce in self._lines and self._lines[nonce].is_up

    def up(self) -> list[Member]:
        """Return those to whom there is a connection."""
        return [line.member for line in self._lines.values() if line.is_up]

    def called(self, nonce: bytes) -> None:
        """A connection to a process is under way."""
        if nonce in self._lines:
            self._lines[nonce].call_at = NEVER

    def note(self, nonce: bytes, what: int, now: float) -> None:
        """Note what the kernel says of the connection to a process."""
        line = self._lines.get(nonce)
        if line is None:
            return
        was_up, line.is_up = line.is_up, what in (ESTABLISHED, PROVED)
        line.call_at = NEVER if line.is_up else now + AGAIN_S
        if line.is_up:
            line.ended = line.silent = line.born = NEVER
        if what == PROVED:
            line.refused = NEVER
        elif what == ENDED:
            line.ended = min(line.ended, now)
        elif what == REFUSED:
            line.refused = min(line.refused, now)
        elif what == SILENT or (what == NO_ANSWER and was_up):
            line.silent = min(line.silent, now)
        elif what == UNKNOWN:
            line.born = now if was_up or line.born < NEVER else NEVER
            line.ended, line.refused, line.silent = (
                at if at == NEVER else now for at in (line.ended, line.refused, line.silent)
            )

    def skip(self, seconds: float) -> None:
        """Let a time not count in which this process did not run: nobody was called, and no answer heard."""
        for line in self._lines.values():
            line.born, line.ended = line.born + seconds, line.ended + seconds  # what has not been stays infinite
            line.refused, line.silent = line.refused + seconds, line.silent + seconds

    def due(self, now: float) -> list[Member]:
        """Return whom to call now."""
        return [line.member for line in self._lines.values() if line.call_at <= now]

    def lost(self, now: float) -> list[str]:
        """Return the hosts of which nobody can be reached."""
        return [host for host, at in self._lost_at().items() if at <= now]

    def next(self, now: float) -> float:
        """Return when `due` or `lost` may say something new."""
        calls = [line.call_at for line in self._lines.values()]
        return min([*calls, *(at for at in self._lost_at().values() if at > now)], default=NEVER)

    def _lost_at(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for line in self._lines.values():
            host = line.member.host
            found[host] = max(found.get(host, 0.0), line.lost_at(self._timeout_s))
        return found
