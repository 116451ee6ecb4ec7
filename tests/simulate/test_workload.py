from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cacheflow_sgl.core.simulator.requests import Found, Request
from cacheflow_sgl.simulate.workload import Prompts, Trace, prompts

LENGTHS = st.lists(st.integers(512, 4096), min_size=1, max_size=4, unique=True)


@given(LENGTHS, st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True))
def test_every_length_goes_with_every_batch(lengths, batches):
    found = list(prompts(lengths, 64, batches))
    assert Counter((set(each.prefix_tokens).pop(), len(each.prefix_tokens)) for each in found) == (
        Counter((length, batch) for length in lengths for batch in batches)
    )
    assert all(len(set(each.prefix_tokens)) == 1 for each in found)


@given(LENGTHS, st.integers(1, 20), st.integers(0, 5))
def test_a_mixed_batch_has_equal_shares_of_all_lengths(lengths, batch, seed):
    (mixed,) = prompts(lengths, 64, [batch], mixed=True, seed=seed)
    counts = [Counter(mixed.prefix_tokens)[length] for length in lengths]
    assert sum(counts) == batch
    assert max(counts) - min(counts) <= 1
    assert [mixed] == list(prompts(lengths, 64, [batch], mixed=True, seed=seed))


def test_the_seed_decides_the_order():
    orders = {next(prompts([512, 1024], 64, [12], mixed=True, seed=seed)) for seed in range(5)}
    assert len(orders) > 1


def test_a_prefix_comes_back_in_whole_chunks():
    given = Prompts((1500, 600), 64)
    assert given.name == "600-1500 x 2"
    assert [request.prompt_tokens for request in given.requests] == [1564, 664]
    assert {request.at_s for request in given.requests} == {0.0}
    assert given.chunk(256) == 256
    places = given.residency(256)
    assert [places.find(request) for request in given.requests] == [
        Found(0, (0,) * 5),
        Found(0, (0,) * 2),
    ]


def test_what_the_device_evicts_lies_in_the_tier():
    request = Request(0, 0.0, 2000, blocks=(1, 2, 3, 4))
    other = Request(1, 1.0, 2000, blocks=(5, 6, 7, 8))
    trace = Trace("t", [request, other], 512, device_tokens=1536, tier_tokens=None)
    assert trace.chunk(64) == 512
    places = trace.residency(512)
    places.prefilled(request)
    assert places.find(request) == Found(1536, ())
    places.prefilled(other)
    assert places.find(request) == Found(0, (0, 0, 0))
    assert trace.residency(512).find(request) == Found(0, ()), "every run starts empty"
