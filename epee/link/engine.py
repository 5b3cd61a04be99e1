"""The choice of the engine that moves the bytes of links, and the creation of links from connections.

`EPEE_LINK` names the engine, alike on all ranks of a group (`bootstrap/record.py` of the backend compares): `tcp`, or
`nixl` where the extra is installed. The meeting of the ranks is the same for both, and so is the code above the seam.
"""

from __future__ import annotations

from .. import env
from ..errors import EpeeError, expected
from .frames import FrameOpener, FrameSealer
from .meeting import Connected
from .nixl.agent import NixlAgent
from .nixl.link import NixlLink
from .stream import FrameSink
from .tcp import TcpLink, set_up

MAX_LEFT = 8  # links that have left an agent which still gets new ones: as many rings without a reader


def chosen_engine() -> str:
    """Return the name of the engine for groups that are made from now on: tcp or nixl."""
    return str(env.get("EPEE_LINK"))


class LinkMaker:
    """Factory of the links of one group.

    Args:
        covers_payloads: payloads have trailers.
        engine: its name.

    Raises:
        UnsupportedError, ForkError, ResourceError: it cannot be used here (`nixl/agent.py`).
    """

    def __init__(self, covers_payloads: bool, engine: str = "tcp") -> None:
        self._covers_payloads = covers_payloads
        self._agent = NixlAgent() if engine == "nixl" else None
        if self._agent is not None:
            self._agent.join(self)

    def make(self, peer: int, met: Connected, sink: FrameSink) -> TcpLink:
        """Return the link to `peer` over a connection, which it owns from now on.

        Raises:
            ResourceError: no memory can be registered; the connection is closed.
        """
        connection, out_key, in_key = met
        set_up(connection)
        covers, agent = self._covers_payloads, self._agent
        if agent is None:
            return TcpLink(peer, connection, FrameSealer(out_key, covers), FrameOpener(in_key, covers), sink)
        try:
            return NixlLink(peer, met, covers, sink, self._renewed(agent))
        except expected(EpeeError):
            connection.close()
            raise

    def _renewed(self, agent: NixlAgent) -> NixlAgent:
        """Return the agent for the next link: another one, where too many links have left this one."""
        if agent.num_left >= MAX_LEFT:
            self._agent = NixlAgent()
            self._agent.join(self)
            agent.leave(self)
        return self._agent or agent

    def close(self) -> None:
        """Make no more links; idempotent. Existing links continue, and the last one that ends drops the agent."""
        if self._agent is not None:
            self._agent.leave(self)
