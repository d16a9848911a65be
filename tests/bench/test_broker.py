"""The store's memory is bounded: what requests leave behind is nothing."""

from bench.broker import private_store, soak


async def test_the_keys_return_to_the_resting_set():
    with private_store() as url:
        before, after = await soak(url, 500)
    assert before == after
