"""API keys and the tenant behind each. Clients send their key as OpenAI's clients do, in `Authorization: Bearer KEY`,
or as Azure's do, in `api-key: KEY`. Digests are compared, and no key is ever shown."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from instgenie.errors import ConfigError
from instgenie.server.errors import ApiError

PUBLIC = "public"  # the tenant of all clients if the server needs no key
VALID_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class ApiKey:
    secret: str = field(repr=False)
    name: str | None = None  # of its tenant; None: the key is a tenant of its own

    @property
    def digest(self) -> bytes:
        return digest(self.secret)

    @property
    def tenant(self) -> str:
        """The owner of templates. Keys with one name share them, so that a key can be replaced."""
        return self.name or self.digest.hex()[:32]


class ApiKeys:
    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.tenants = {key.digest: key.tenant for key in keys}

    def tenant(self, headers: Headers) -> str:
        """Return the tenant of a request, or raise 401. All keys are compared, so timing reveals none."""
        if not self.tenants:
            return PUBLIC
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer.strip()] if scheme.lower() == "bearer" else []
        given += [headers["api-key"].strip()] if "api-key" in headers else []
        for sent in map(digest, given):
            found = [tenant for known, tenant in self.tenants.items() if hmac.compare_digest(sent, known)]
            if found:
                return found[0]
        raise unauthorized("authorization" in headers or "api-key" in headers)


def unauthorized(is_given: bool) -> ApiError:
    found = "is unknown" if is_given else "is missing"
    message = f"The API key {found}: the header 'Authorization: Bearer KEY' or 'api-key: KEY' is expected."
    return ApiError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse_key_file(text: str) -> list[ApiKey]:
    """Read one key per line: `KEY` or `NAME:KEY`. A key with a colon in it has a name or is written `:KEY`."""
    numbered = enumerate(map(str.strip, text.splitlines()), 1)
    return [parse_line(line, number) for number, line in numbered if line]


def parse_line(line: str, number: int) -> ApiKey:
    name, colon, secret = line.partition(":")
    if not colon:
        return ApiKey(line)
    if name and not VALID_NAME.fullmatch(name):
        raise ConfigError(
            f"line {number}: the name before the colon has up to 64 letters, digits, '.', '_' or '-'; a key that has a "
            "colon itself and no name begins with one (:KEY)"
        )
    if not secret.strip():
        raise ConfigError(f"line {number}: a key is expected after {name}:")
    return ApiKey(secret.strip(), name or None)


def check_keys(keys: Sequence[ApiKey]) -> None:
    """Refuse a key that belongs to two tenants."""
    tenants: dict[str, str | None] = {}
    for key in keys:
        if tenants.setdefault(key.secret, key.name) != key.name:
            owners = " and ".join(sorted(repr(name or "no name") for name in (tenants[key.secret], key.name)))
            raise ConfigError(f"one API key is given twice, with {owners}: each key has one tenant")
