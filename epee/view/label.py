"""The name of a group or a buffer, as errors and hang reports show it.

torch names a group after it has made it, and a buffer's number is agreed on while it is made. Code that may have to
name one therefore holds a `Label`, whose text may become known, or change, at any time. A row of the board shows the
same text.
"""

from __future__ import annotations

from typing import Any

_UNNAMED = ("", "undefined")  # torch's description of a group that the user gave none


class Label:
    """The name of one group or buffer.

    Attributes:
        text: "group default_pg", "Buffer 2 of group default_pg"; empty while it is not known.
    """

    __slots__ = ("text",)

    def __init__(self, text: str = "") -> None:
        self.text = text


def group_label(name: str, desc: str) -> str:
    """Return the text of a group: torch's description where the user gave one, else torch's name for it."""
    known = name if desc in _UNNAMED else desc
    return f"group {known}" if known else ""


def label_of(group: Any) -> str:
    """Return the text of any process group of torch."""
    return group_label(str(getattr(group, "group_name", "")), str(getattr(group, "group_desc", "")))
