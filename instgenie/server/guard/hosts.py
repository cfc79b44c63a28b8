"""Host names that the server answers to, and web pages that may call it. Knows two headers, no route.

A page of a foreign site can send requests from the browser of somebody who can reach the server. The browser says in
`Origin` which page sends them. A page whose own host name is re-pointed to this server (DNS rebinding) has a matching
origin; but then `Host` is a name that the operator has not given to the server.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from instgenie.server.errors import NO_RETRY, ApiError, echo

ANY = "*"
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
ORIGIN = re.compile(r"(https?)://([^/]+)")
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class HostGuard:
    bound: str  # the address that the server listens on
    allowed_hosts: Sequence[str]
    allowed_origins: Sequence[str]
    has_keys: bool

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raise 403 if a request names a foreign host or comes from a foreign page. Clients that are no browsers send
        no origin, and the oldest send no host."""
        for host in headers.getlist("host"):
            if not self.answers_to(host, scope):
                raise foreign_host(host)
        for origin in headers.getlist("origin"):
            if not self.may_call(origin, headers.get("host", "")):
                raise foreign_origin(origin)

    def answers_to(self, host: str, scope: Scope) -> bool:
        if ANY in self.allowed_hosts:
            return True
        if self.has_keys and not self.allowed_hosts:
            return True  # a page that takes over a name still has no key
        if not (parts := HOST.fullmatch(host)):
            return False
        name = parts[1].lower().rstrip(".")
        return self.is_own(name, scope) or any(matches(name, allowed) for allowed in self.allowed_hosts)

    def is_own(self, name: str, scope: Scope) -> bool:
        """True for loopback names, the bound address and the address that the connection has reached. A server that
        listens on all addresses is known by others than its own, for example behind the ports of a container; any
        address will do, since only names can be re-pointed."""
        if name == "localhost" or name.endswith(".localhost") or name == self.bound.lower():
            return True
        address = read_address(name)
        if address is None:
            return False
        bound = read_address(self.bound)
        reached = read_address((scope.get("server") or ("",))[0])
        listens_on_all = bound is not None and bound.is_unspecified
        return listens_on_all or address.is_loopback or address in (bound, reached)

    def may_call(self, origin: str, host: str) -> bool:
        if ANY in self.allowed_origins or origin.lower() in map(str.lower, self.allowed_origins):
            return True
        parts = ORIGIN.fullmatch(origin)
        return parts is not None and with_port(parts[2], parts[1]) == with_port(host, parts[1]) is not None


def matches(name: str, allowed: str) -> bool:
    """Compare a name with an allowed one; `*.example.com` allows every name that ends so."""
    allowed = allowed.lower().rstrip(".")
    return name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed


def with_port(host: str, scheme: str) -> tuple[str, int] | None:
    """Split a host into its name and its port, which may be left out if it is the scheme's own."""
    parts = HOST.fullmatch(host)
    return (parts[1].lower().rstrip("."), int(parts[2] or DEFAULT_PORTS[scheme])) if parts else None


def read_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def foreign_host(host: str) -> ApiError:
    message = (
        f"The server does not answer to the host {echo(host)}: start it with --allowed-hosts NAME if this is its name "
        "(* = any), or with an API key."
    )
    return ApiError(403, message, "host_not_allowed", headers=NO_RETRY)


def foreign_origin(origin: str) -> ApiError:
    message = f"Web pages of {echo(origin)} may not call this server: start it with --allowed-origins to allow them."
    return ApiError(403, message, "origin_not_allowed", headers=NO_RETRY)
