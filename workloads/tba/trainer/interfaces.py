"""Which network interface gloo and NCCL use."""

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s24x")
_ADDRESS = slice(20, 24)
_IPV6_TABLE = Path("/proc/net/if_inet6")


def use_interface_of(host: str) -> None:
    """Have ranks of this process and its children talk over the interface that has this address, unless the user chose
    one: gloo looks its own host name up otherwise, and NCCL takes the first interface that is up."""
    name = interface_of(host)
    if name is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)


def interface_of(host: str) -> str | None:
    """Name of the interface with this address, IPv4 or IPv6; null: none has it. Any loopback address is `lo`'s."""
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return "lo"
    found = _ipv4_names() if address.version == 4 else _ipv6_names()
    return found.get(address.packed)


def _ipv4_names() -> dict[bytes, str]:
    found: dict[bytes, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address of this family
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, _IFREQ.pack(name.encode()))
                found[answer[_ADDRESS]] = name
    return found


def _ipv6_names() -> dict[bytes, str]:
    """A line: address in hex without colons, index, prefix, scope, flags, name."""
    lines = _IPV6_TABLE.read_text().splitlines() if _IPV6_TABLE.exists() else []
    return {bytes.fromhex(fields[0]): fields[5] for fields in map(str.split, lines)}
