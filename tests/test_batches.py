"Sources of batches: what is drawn, where it is cut, and what is refused. Fits that use them are in test_fitting."

from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gp_thesis import batches
from gp_thesis.batches import ROUNDS, CHUNK, as_batches, check_rows, minibatch, minibatch_rows, shuffled, spans

KEY = jax.random.key(0)
ROWS = np.arange(40), np.arange(80.0).reshape(40, 2)


def seen(source, first=0, steps=70, every=500):
    "The batches that a loop from step `first` on gets to see."
    found = []
    for supply, span in source.supplies(spans(first, steps, source.length, every)):
        found += [supply.batch(step, span.first) for step in range(span.first, span.stop)]
    return found


@pytest.fixture
def files(tmp_path):
    for name, array in zip("ab", ROWS):
        np.save(tmp_path / f"{name}.npy", array)
    return tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "ab")


@pytest.mark.parametrize("first,steps,length,every", [(0, 120, 50, 40), (0, 1, 50, 500), (37, 101, 7, 10), (50, 50, 50, 25)])
def test_spans_cover_each_step_once_and_end_at_multiples(first, steps, length, every):
    cuts = list(spans(first, steps, length, every))
    assert [step for cut in cuts for step in range(cut.first, cut.stop)] == list(range(first, steps + 1))
    assert all(cut.stop - cut.first <= length and cut.last == steps for cut in cuts)
    assert {k for k in range(first + 1, steps + 1) if k % every == 0} <= {cut.first for cut in cuts}


def test_batch_k_is_the_same_from_memory_from_disk_and_in_whichever_run(files):
    held, mapped = (as_batches(rows, batch_size=6, key=KEY) for rows in (ROWS, files))
    from_memory, from_disk = seen(held), seen(mapped)
    for step, (a, b) in enumerate(zip(from_memory, from_disk)):
        numbers = minibatch_rows(KEY, step, 40, 6)
        for array, x, y in zip(ROWS, a, b):
            assert np.array_equal(x, array[numbers]) and np.array_equal(x, y) and x.dtype == y.dtype == array.dtype
    later = seen(as_batches(files, batch_size=6, key=KEY), first=33, every=10)
    assert len(later) == 38 and all(np.array_equal(x[1], y[1]) for x, y in zip(later, from_disk[33:]))
    listed = seen(as_batches(from_memory, num_data=40), first=33)
    assert all(np.array_equal(x[0], y[0]) for x, y in zip(listed, from_disk[33:]))


@pytest.mark.parametrize("num_data", [1, 2, 7, 64, 65, 1000])
def test_an_order_has_each_row_once_and_its_places_can_be_asked_for_alone(num_data):
    keys = jax.random.bits(KEY, (ROUNDS,), jnp.uint32)
    order = np.asarray(shuffled(np.arange(num_data), num_data, keys))
    assert sorted(order) == list(range(num_data))
    assert int(shuffled(num_data - 1, num_data, keys)) == order[-1]


@pytest.mark.parametrize("num_data", [4, 5])
def test_all_orders_are_equally_likely_and_each_row_in_each_place(num_data):
    count = 24_000
    keys = jax.random.bits(KEY, (count, ROUNDS), jnp.uint32)
    orders = np.asarray(jax.vmap(lambda keys: shuffled(jnp.arange(num_data), num_data, keys))(keys))
    orders = [*map(tuple, orders)]
    found = np.array([orders.count(order) for order in permutations(range(num_data))])
    freedom, expected = len(found) - 1, count / len(found)
    assert abs(((found - expected) ** 2 / expected).sum() - freedom) < 4 * (2 * freedom) ** 0.5     # chi-squared


@pytest.mark.parametrize("num_data,batch_size", [(40, 8), (40, 6), (7, 10)])
def test_an_epoch_has_each_row_once_in_an_order_of_its_own(num_data, batch_size):
    steps = 6 * num_data // batch_size + 1
    rows = np.concatenate([minibatch_rows(KEY, step, num_data, batch_size) for step in range(steps)])
    epochs = rows[:6 * num_data].reshape(6, num_data)
    assert (np.sort(epochs) == np.arange(num_data)).all() and len({*map(tuple, epochs)}) == 6
    assert not np.array_equal(minibatch_rows(jax.random.key(1), 0, num_data, batch_size), rows[:batch_size])


def test_the_number_of_a_step_may_be_any_integer():
    late = minibatch_rows(KEY, 3_000_000_000, 1_000_000, 1000)       # place 3e12 of an endless row
    assert len(np.unique(late)) == 1000 and 0 <= late.min() and late.max() < 1_000_000


def test_the_sources_say_what_they_are(files):
    pair = [tuple(array[:4] for array in ROWS)]
    expected = {"whole": (False, None, True), "drawn": (True, 40, True), "mapped": (True, 40, True), "list": (True, 9, True),
                "iterator": (True, 9, False)}
    sources = {"whole": as_batches(ROWS), "drawn": as_batches(ROWS, batch_size=4, key=KEY),
               "mapped": as_batches(files, batch_size=4, key=KEY), "list": as_batches(pair, num_data=9),
               "iterator": as_batches(iter(pair), num_data=9)}
    for name, source in sources.items():
        assert (source.noisy, source.num_data, source.resumable) == expected[name], name
        supply, _ = next(iter(source.supplies(spans(0, 0, source.length, 1))))
        assert (supply.noisy, supply.num_data, supply.length) == (*expected[name][:2], source.length)
        assert 1 <= source.length <= CHUNK
    prints = [source.fingerprint for source in sources.values()]
    assert len(set(prints[:4])) == 4
    assert as_batches(ROWS, batch_size=4, key=jax.random.key(1)).fingerprint not in prints
    assert as_batches((ROWS[0] + 1, ROWS[1])).fingerprint not in prints and as_batches(ROWS).fingerprint == prints[0]


def test_a_stack_has_one_length_and_zeros_where_nothing_is_looked_at(files):
    source = as_batches(files, batch_size=5, key=KEY)
    supply, span = next(iter(source.supplies(spans(0, 2, source.length, 500))))
    assert span.stop == 3 and [array.shape for array in supply.data] == [(CHUNK, 5), (CHUNK, 5, 2)]
    assert not np.any(supply.data[1][3:]) and np.array_equal(supply.data[0][2], minibatch(KEY, 2, ROWS, 5)[0])


def test_a_check_of_ones_own_sees_every_row_once(files):
    numbers = []

    def check(a, b):
        numbers.append(np.asarray(a))
        return check_rows(a, b)

    source = as_batches(files, check, batch_size=5, key=KEY)
    assert np.concatenate(numbers).tolist() == [0]                                # one row, before anything runs
    drawn = seen(source, steps=60)
    assert np.array_equal(np.concatenate(numbers[1:]), np.concatenate([batch[0] for batch in drawn]))


@pytest.mark.parametrize("batch,words", [
    ((), "tuple of arrays"), (((1, 2), (3, 4)), "needs num_data"), ((np.ones(3), 4.0), "same number of rows"),
    ((np.ones(3), np.ones(4)), r"got the shapes \[\(3,\), \(4,\)\]"), ((np.ones((0, 2)),), "at least one row"),
    ((np.ones(3), np.array(["a", "b", "c"])), "arrays of numbers"), ((np.array([1.0, np.nan, np.inf]),), r"data\[0\].*in 2 rows, first in row 1"),
])
def test_what_no_approximation_can_use_is_named(batch, words):
    with pytest.raises(ValueError, match=words):
        check_rows(*batch)


def test_any_number_of_arrays_and_dtypes_pass_as_they_are():
    arrays = np.arange(3), np.ones((3, 2, 2), np.float32), np.array([True, False, True]), [1, 2, 3]
    checked = check_rows(*arrays)
    assert [array.dtype.kind for array in checked] == list("ifbi") and checked[1].dtype == jnp.float32
    assert len(check_rows(np.ones(4))) == 1


def test_stacks_are_short_where_batches_are_large(monkeypatch, files):
    monkeypatch.setattr(batches, "STACK", 3 * 5 * (8 + 16))
    assert as_batches(files, batch_size=5, key=KEY).length == 3
