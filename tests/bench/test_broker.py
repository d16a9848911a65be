"""The store's memory is bounded: what requests leave behind is nothing."""

from bench.broker import soak
from bench.store import running_store


async def test_the_keys_return_to_the_resting_set():
    with running_store() as store:
        before, after = await soak(store.url, 500)
    assert before == after
