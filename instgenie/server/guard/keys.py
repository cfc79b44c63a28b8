"""API keys and the tenant behind each. Keeps digests, never a key."""

import hashlib
import hmac
from collections.abc import Iterable

from instgenie.server.errors import ApiError

PUBLIC = "public"  # the tenant of all clients if the server needs no key


class ApiKeys:
    def __init__(self, keys: Iterable[str]) -> None:
        self.digests = [digest(key) for key in keys]

    def tenant(self, authorization: str | None) -> str:
        """Return the tenant for a header `Bearer KEY`, or raise 401. All keys are compared, so timing reveals none."""
        if not self.digests:
            return PUBLIC
        scheme, _, key = (authorization or "").partition(" ")
        given = digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self.digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise unauthorized(authorization)
        return given.hex()[:32]


def unauthorized(authorization: str | None) -> ApiError:
    found = "is unknown" if authorization else "is missing"
    message = f"The API key {found}: the header 'Authorization: Bearer KEY' is expected."
    return ApiError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
