"""Records that prove their writer: data that goes through a store, where any process may write, under the job's token.

A store has no users: any process that reaches it may set any key, before or after the rank whose key it is. So a record
is accepted only with a MAC (HMAC-SHA256 under the job's token, `view/transport/auth.py`), which covers the purpose of
the record (an attempt, a rank) and everything that the ranks had sent each other before (`transcript`). Every rank's
greeting has random bytes, so a record of an earlier attempt or of another group fits nowhere else, and a greeting that
was exchanged on the way is noticed with the first record.

The token itself never goes through a store. It lies in the job's folder, which only this user can read (0700, checked
when it is opened), and a rank learns from the store which folder that is. A wrong one leads to another job of the same
user, whose token fits no MAC, or is refused because another user could write there. Greetings are read before there
is a token; they cause nothing to be opened but that folder.

A process that can write into the store can still prevent the creation of a group; the ranks then fail with an error.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import Any

from ...errors import AuthError, ProtocolError
from ...view.transport.auth import Token

_MAC_DIGITS = 64


def transcript(number: int, told: Sequence[bytes]) -> bytes:
    """Return 32 bytes that represent attempt `number` and everything in `told`, in its order."""
    digest = hashlib.sha256(number.to_bytes(8, "little"))
    for part in told:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def prove(token: Token, text: str, purpose: bytes) -> str:
    """Return a record of `text` that holds for `purpose` only."""
    return json.dumps({"record": text, "mac": token.derive(b"record", _covered(text, purpose)).hex()})


def proved(token: Token, fields: dict[str, Any], purpose: bytes, whose: str) -> str:
    """Return the text of a record that was read.

    Raises:
        ProtocolError: it is no record.
        AuthError: no process of the job has written it, or it was meant for something else.
    """
    text, mac = fields.get("record"), fields.get("mac")
    if len(fields) != 2 or not isinstance(text, str) or not isinstance(mac, str) or len(mac) != _MAC_DIGITS:
        raise ProtocolError(
            f"{whose} record in the store cannot be read (fields {list(fields)[:9]}); does another job use this store, "
            "and do the ranks run one version of epee?"
        )
    if not hmac.compare_digest(
        token.derive(b"record", _covered(text, purpose)).hex().encode(), mac.encode(errors="replace")
    ):
        raise AuthError(
            f"{whose} record in the store does not fit the job's token (MAC): somebody else writes into the store, or "
            "what the ranks told each other was changed; give the job a store of its own and start it again"
        )
    return text


def _covered(text: str, purpose: bytes) -> bytes:
    return len(purpose).to_bytes(8, "little") + purpose + text.encode(errors="surrogatepass")
