"""Keys as texts: their entropy, their checksum, their digest, and what is shown of them."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from noria.gateway.tenancy.credentials import ADMIN_PREFIX, Pepper, is_well_formed, new_secret, redacted


def test_keys_are_random_well_formed_and_never_shown_by_accident():
    keys = {new_secret().value for _ in range(200)} | {new_secret(admin=True).value for _ in range(200)}
    assert len(keys) == 400 and all(map(is_well_formed, keys))
    assert all(key.startswith("sk-noria-") for key in keys)
    secret = new_secret()
    assert secret.value not in repr(secret) and secret.redacted.endswith(secret.value[-4:])
    assert len(secret.redacted) < 25


@pytest.mark.parametrize("place", [9, 20, 51, -1, -6])
def test_one_wrong_character_is_noticed_without_the_store(place):
    key = new_secret().value
    wrong = list(key)
    wrong[place] = "A" if wrong[place] != "A" else "B"
    assert not is_well_formed("".join(wrong))


@pytest.mark.parametrize(
    "text", ["", "sk-noria-", "sk-x", "sk-noria-" + "ü" * 49, ADMIN_PREFIX + "0" * 48, "x" * 10_000]
)
def test_what_is_no_key_is_told(text):
    assert not is_well_formed(text)


def test_digests_are_hmacs_under_the_pepper():
    pepper = "p" * 32
    key = new_secret().value
    assert Pepper(pepper).digest(key) == hmac.new(pepper.encode(), key.encode(), hashlib.sha256).hexdigest()
    assert Pepper("q" * 32).digest(key) != Pepper(pepper).digest(key)
    assert "p" * 32 not in repr(Pepper(pepper))
    with pytest.raises(ValueError, match="32"):
        Pepper("short")


def test_an_admin_key_shows_its_kind():
    key = new_secret(admin=True).value
    assert redacted(key).startswith(ADMIN_PREFIX)
