"""The text of API keys: made, checked for typing errors, and turned into the digest that alone is stored.

Knows no store and nobody's rights.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import zlib
from dataclasses import dataclass

PREFIX = "sk-noria-"
ADMIN_PREFIX = "sk-noria-admin-"

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SECRET_BYTES = 32
_SECRET_LENGTH = 43  # 62 ** 43 > 2 ** 256
_CHECK_LENGTH = 6  # 62 ** 6 > 2 ** 32
MIN_PEPPER = 32
"""Characters that a pepper has at least."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A key that was just made. `value` is shown to its owner once and kept nowhere."""

    value: str

    @property
    def redacted(self) -> str:
        """What may be shown afterwards."""
        return redacted(self.value)

    def __repr__(self) -> str:
        return f"Secret({self.redacted})"


def new_secret(*, admin: bool = False) -> Secret:
    """`sk-noria-`, 256 random bits in base 62, and six characters of CRC-32 over all before them."""
    body = (ADMIN_PREFIX if admin else PREFIX) + _base62(
        int.from_bytes(secrets.token_bytes(_SECRET_BYTES), "big"), _SECRET_LENGTH
    )
    return Secret(body + _checksum(body))


def is_well_formed(key: str) -> bool:
    """Whether the text can be one of our keys at all, so that most wrong ones never cost a look at the store."""
    if not key.startswith(PREFIX) or not key.isascii():
        return False
    secret = key.removeprefix(ADMIN_PREFIX if key.startswith(ADMIN_PREFIX) else PREFIX)
    if len(secret) != _SECRET_LENGTH + _CHECK_LENGTH:
        return False
    return hmac.compare_digest(_checksum(key[:-_CHECK_LENGTH]), key[-_CHECK_LENGTH:])


def redacted(key: str) -> str:
    """The prefix with four characters, and the last four."""
    head = len(ADMIN_PREFIX if key.startswith(ADMIN_PREFIX) else PREFIX)
    return f"{key[: head + 4]}...{key[-4:]}"


class Pepper:
    """The secret of this installation. Without it the digests in the store are of no use to anybody."""

    def __init__(self, text: str) -> None:
        """Raises ValueError for one that is too short."""
        if len(text) < MIN_PEPPER:
            raise ValueError(f"the pepper of keys has at least {MIN_PEPPER} characters")
        self._pepper = text.encode()

    def digest(self, key: str) -> str:
        """HMAC-SHA-256 of the key, in hexadecimal: who looks keys up by it compares nothing that a sender chose."""
        return hmac.new(self._pepper, key.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()

    @property
    def fingerprint(self) -> str:
        """Tells two peppers apart and says nothing of either."""
        return self.digest("noria:pepper")[:16]

    def __repr__(self) -> str:
        return "Pepper(***)"


def same(digest: str, other: str) -> bool:
    """Compares in a time that does not depend on where they differ."""
    return hmac.compare_digest(digest, other)


def _checksum(text: str) -> str:
    return _base62(zlib.crc32(text.encode()), _CHECK_LENGTH)


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
