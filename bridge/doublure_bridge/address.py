"""Trainer addresses, and the rule that nothing leaves this machine without keys."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from .errors import AddressError

__all__ = ["Address", "parse_address"]

_TCP = re.compile(r"^tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):(\d+|\*)$")
_FORM = "tcp://HOST:PORT, for example tcp://127.0.0.1:5570"


class Address(NamedTuple):
    """A parsed ``tcp://host:port``; port 0 lets the system pick."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        """As ZeroMQ spells it; port 0 becomes ``*``."""
        return f"tcp://{self.host}:{self.port or '*'}"

    @property
    def loopback(self) -> bool:
        """Whether it stays on this machine. Names other than localhost count as remote."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """Read ``tcp://host:port``, and refuse what is not on this machine.

    Raises:
        AddressError: Not of that form, a port out of range, or an address beyond loopback:
            traffic that leaves the machine needs CURVE keys, which this version does not carry.
    """
    match = _TCP.match(text) if isinstance(text, str) else None
    if match is None:
        raise AddressError("trainer address", expected=_FORM, got=repr(text))
    port = 0 if match[2] == "*" else int(match[2])
    if port > 65535:
        raise AddressError("trainer address", expected="a port in 0..65535", got=port)
    # libzmq resolves localhost to an interface it may not be bound on; the number is unambiguous.
    host = "127.0.0.1" if match[1] == "localhost" else match[1]
    address = Address(host, port)
    if not address.loopback:
        raise AddressError(
            "trainer address",
            expected="a loopback address (127.0.0.1 or [::1]); beyond it traffic needs keys",
            got=text,
            next_step="forward the port, for example "
            f"`ssh -L 5570:127.0.0.1:{port or 5570} {match[1]}`, and use tcp://127.0.0.1:5570",
        )
    return address
