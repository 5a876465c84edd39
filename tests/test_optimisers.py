"L-BFGS with walls, and the inner loop, on functions that everybody knows."

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gp_thesis import optimisers as why
from gp_thesis.kernels import RBF
from gp_thesis.optimisers import (
    FIRST_LOOK, REACH, _from_here, _power, _root, _Search, _wall, cut_like, descend, end_to_end, failure, initial_state, lbfgs, positive_entries)
from gp_thesis.parameters import free, partition, positive, unwrap


def minimise(loss, start, steps=200, tolerance=1e-12, **stop):
    path = []
    note = lambda point, value: (path.append((np.asarray(point()), value)), stop.get("at") == len(path))[1]
    return lbfgs(loss, jnp.asarray(start), (), note, steps, tolerance), path


def test_a_tree_becomes_a_vector_and_comes_back_as_it_was():
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.float32(0.1), "none": jnp.zeros((0, 2)), "c": jnp.array(7.0)}
    v = end_to_end(tree)
    assert v.dtype == np.float64 and np.allclose(v, [*range(6), 0.1, 7])
    back = cut_like(tree, v)
    v[:] = np.nan                                                                 # nothing of it is shared
    same = lambda a, b: a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    assert jax.tree.all(jax.tree.map(same, tree, back))
    assert end_to_end({}).shape == (0,) and cut_like({}, end_to_end({})) == {}


def test_the_wall_is_a_parabola_whose_minimum_is_a_quarter_of_the_way():
    rng = np.random.default_rng(0)
    start, slope, step = rng.normal(size=3), rng.normal(size=3), rng.normal(size=3)
    step *= -np.sign(step @ slope)                                                # downhill
    for scale in (1e-3, 1.0, 1e9):
        value, gradient = _wall(start + step, start, 5.0 * scale, slope * scale)
        r = -step @ slope * scale
        assert np.isclose(value - 5.0 * scale, r) and np.isclose(gradient @ step, 3 * r)
        a, b = value - 5.0 * scale + r, -r                                        # a t^2 + b t through both ends
        assert np.isclose(2 * a + b, gradient @ step) and np.isclose(-b / (2 * a), 0.25)


@pytest.mark.parametrize("offset", [0.0, 1e17])
def test_a_wall_is_higher_than_where_one_stood_whatever_the_scale(offset):
    value, _ = _wall(np.array([1.0]), np.array([0.0]), offset, np.array([-1e-9]))
    assert value > offset


def test_lbfgs_finds_minima_next_to_walls_and_names_its_reasons():
    well = lambda v: jnp.sum(v) - jnp.sum(jnp.log(jnp.where(v > 0, v, jnp.nan)))   # smallest at 1; nothing below 0
    reason, path = minimise(well, np.array([8.0, 0.01]))
    assert reason in (why.SETTLED, why.FLAT) and np.allclose(path[-1][0], 1, atol=1e-5)
    assert np.all(np.diff([value for _, value in path]) <= 0)
    edge = lambda v: jnp.where(v < 3, -v, jnp.nan)
    reason, path = minimise(edge, 0.0)
    assert reason in (why.NO_BETTER, why.WALLED) and 2 < path[-1][0] < 3
    assert minimise(edge, 4.0) == (why.NOT_FINITE, [])
    assert minimise(well, np.array([8.0, 0.01]), steps=2)[0] == why.TAKEN
    reason, path = minimise(well, np.array([8.0, 0.01]), at=3)
    assert len(path) == 3


def test_the_first_step_is_an_eighth_long_whatever_the_scales():
    for scale in (1e-6, 1.0, 1e6):
        places = []
        function = lambda v: (places.append(v.copy()), (scale * np.sum((v - 3) ** 2), 2 * scale * (v - 3)))[1]
        search = _Search(function, lambda point, value: False, 1e-12, np.zeros(2, bool))
        search.evaluate(np.array([0.3, -1.7]))
        search.step()
        _from_here(search, 1, 1e-12)
        assert np.array_equal(places[0], places[1])                              # the way to SciPy and back loses no digit
        assert np.isclose(np.linalg.norm(places[2] - places[0]), 1 / 8)
        assert np.allclose(search.point[2], 2 * scale * (search.point[0] - 3), rtol=1e-12)


def test_whoever_wants_to_go_further_down_than_the_first_search_does_so_in_the_next():
    away = lambda v: jnp.sum((v + jnp.array([25.0, 3.0])) ** 2)
    reason, path = minimise(away, np.zeros(2))
    assert reason in (why.SETTLED, why.FLAT) and np.allclose(path[-1][0], [-25, -3], atol=1e-3)
    assert any(place[0] == -REACH for place, _ in path)


def test_a_parameter_far_out_moves_in_units_of_its_own_size():
    curvature = jnp.array([1.0, 3.0, 10.0, 30.0, 100.0])
    loss = lambda v: 500 + 0.1 * (jnp.log(v[0]) - 11) ** 2 + 0.5 * jnp.sum(curvature * (v[1:] - 1) ** 2)  # smallest at 59874
    reason, path = minimise(loss, np.array([3000.0] + [0.0] * 5), tolerance=1e-9)
    assert reason in (why.SETTLED, why.FLAT) and path[-1][1] < 500 + 1e-6                        # one unit for all: 500.9, at 3000


def test_the_scale_of_roots_is_smooth_where_it_begins_and_has_the_slope_that_is_said():
    v = np.array([-20.0, -1.0, 0.5, 1.0, 1.0 + 1e-9, 2.0, 100.0, 1e12])
    for bent in (np.ones(8, bool), np.zeros(8, bool), np.arange(8) % 2 == 0):
        z = _root(v, bent)
        back, slope = _power(z, bent)
        assert np.allclose(back, v, rtol=1e-14) and np.array_equal(z[~bent | (v <= 1)], v[~bent | (v <= 1)])
        assert np.array_equal(slope[~bent | (v <= 1)], np.ones(np.sum(~bent | (v <= 1))))
        h = 1e-4 * abs(z).clip(1)
        assert np.allclose((_power(z + h, bent)[0] - _power(z - h, bent)[0]) / (2 * h), slope, rtol=1e-4)


def test_which_numbers_stand_for_positive_ones_end_to_end():
    tree = {"a": free(np.zeros((2, 3))), "kernel": RBF(np.ones(3), 2.0), "plain": jnp.ones(2), "z": positive(np.ones((2, 2)))}
    trainable, _ = partition(tree)
    found = positive_entries(trainable)
    assert found.dtype == bool and found.shape == end_to_end(trainable).shape
    assert found.tolist() == [False] * 6 + [True] * 4 + [False] * 2 + [True] * 4
    assert positive_entries({}).shape == (0,)


def test_long_lengthscales_are_reached_in_fewer_steps_than_numbers_of_the_same_size():
    size = jnp.exp(jnp.linspace(4, 9, 60))
    valley = lambda theta: 100 + jnp.sum((jnp.log1p(theta) - jnp.log1p(size)) ** 2)

    def way(start, loss, most=1000):
        path = []
        reason = lbfgs(loss, start, (), lambda point, value: path.append((point(), value)), most, 1e-9)
        return reason, path

    plain = way(jnp.ones(60), lambda v: valley(jax.nn.softplus(v)))
    bent = way(positive(np.log1p(np.e) * np.ones(60)), lambda tree: valley(unwrap(tree)))
    assert all(reason in (why.SETTLED, why.FLAT) for reason, _ in (plain, bent))
    assert bent[1][-1][1] < 100 + 1e-5 and np.allclose(unwrap(bent[1][-1][0]), size, rtol=0.01)
    assert len(bent[1]) < 0.5 * len(plain[1]), (len(bent[1]), len(plain[1]))
    values = [[value for _, value in path[:FIRST_LOOK + 1]] for _, path in (plain, bent)]
    assert np.allclose(*values, rtol=1e-9)                                  # the first look is the same
    assert [len(path) for _, path in (way(positive(np.ones(60)), lambda tree: valley(unwrap(tree)), FIRST_LOOK),)] == [FIRST_LOOK + 1]


def test_walls_stand_on_the_scale_of_roots_too(monkeypatch):
    size = jnp.exp(jnp.linspace(4, 6, 5))

    def valley(tree):
        theta = unwrap(tree)
        return jnp.sum(jnp.where(theta < 1.01 * size, (jnp.log(theta) - jnp.log(size)) ** 2, jnp.nan))

    path, met = [], []
    monkeypatch.setattr(why, "_wall", lambda *a: (met.append(len(path)), _wall(*a))[1])
    reason = lbfgs(valley, positive(np.ones(5)), (), lambda point, value: path.append(point()), 1000, 1e-12)
    assert max(met) > FIRST_LOOK and reason != why.NOT_FINITE                   # some after the search handed over
    assert np.allclose(unwrap(path[-1]), size, rtol=1e-3), (why.REASONS[reason], unwrap(path[-1]) / size)


def test_a_stride_without_end_meets_a_wall_that_can_be_told():
    "On the scale of roots its fourth power was infinite, and so the slope there no number."
    for z in (1e30, 1e100, 1e300):
        with np.errstate(over="raise", invalid="raise"):
            place, slope = _power(np.array([z, 2.0]), np.array([True, True]))
            value, gradient = _wall(place, np.ones(2), 5.0, np.array([-1.0, 3.0]))
            assert np.isfinite([value, *slope * gradient]).all() and value > 5 and (slope * gradient)[0] > 0


def test_with_a_pair_for_each_parameter_the_way_is_shorter_than_with_scipys_ten():
    from scipy.optimize import minimize as scipy
    curvature = 10.0 ** np.linspace(0, 4, 14)
    loss = lambda v: 0.5 * jnp.sum(curvature * v**2)
    ten = scipy(lambda v: (0.5 * np.sum(curvature * v**2), curvature * v), np.ones(14), jac=True, method="L-BFGS-B", options=dict(ftol=1e-12, gtol=0))
    reason, path = minimise(loss, np.ones(14))
    assert reason in (why.SETTLED, why.FLAT) and path[-1][1] < 1e-8 and len(path) - 1 < 0.8 * ten.nit, (len(path), ten.nit)


def test_an_error_in_the_loss_is_a_wall_too_and_tells_its_name_when_asked():
    import equinox as eqx

    loss = lambda v: eqx.error_if(v, v >= 3, "the matrix K is too large") * 1.0
    downhill = lambda v: -loss(v) - 0.01 * jnp.log(3 - v)
    reason, path = minimise(downhill, 0.0)
    assert np.isclose(path[-1][0], 2.99, atol=1e-4) and reason in (why.SETTLED, why.FLAT)
    assert minimise(downhill, 4.0)[0] == why.NOT_FINITE
    assert "(the matrix K is too large" in str(failure(0, [], downhill, jnp.array(4.0)))
    assert "after 7 steps. The last finite objective was 2." in str(failure(7, [1.0, 2.0], jnp.sum, jnp.ones(3)))


def test_chunks_of_any_length_make_the_same_run():
    loss = lambda v, step: jnp.sum((v - jnp.sin(step)) ** 2)                        # another one in each step
    adam = optax.adam(0.1)
    chunk = jax.jit(lambda state, stop: descend(loss, adam, state, 20, stop, 40, -1.0, True))
    ends = []
    for cuts in ((20, 40, 41), (1, 2, 13, 33, 40, 41)):
        state = initial_state(jnp.ones(3), adam)
        for stop in cuts:
            state, losses = chunk(state, stop)
        ends.append(state)
    assert jax.tree.all(jax.tree.map(np.array_equal, *ends)) and int(ends[0].step) == 40 and int(ends[0].reason) == why.TAKEN
    v, memory = jnp.ones(3), adam.init(jnp.ones(3))
    for step in range(40):
        change, memory = adam.update(jax.grad(loss)(v, step), memory, v)
        v = optax.apply_updates(v, change)
    assert np.allclose(v, ends[0].trainable, rtol=1e-12)
