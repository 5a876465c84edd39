"Parameters: bijections, freezing, priors, dtypes."
import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.integrate
from hypothesis import given
from hypothesis import strategies as st

from gp_thesis.parameters import (CORNER, Fixed, as_float, cast, free, freeze, log_prior, log_prior_unconstrained, lower_triangular,
                                  partition, positive, softplus, unfreeze, unit_interval, unwrap)


class Model(eqx.Module):
    a: object
    b: object
    fixed: str = eqx.field(static=True, default="text")


@given(st.floats(1e-6, 1e6))
def test_positive_round_trip(value):
    assert np.isclose(positive(value).value, value, rtol=1e-9)


@given(st.floats(1e-6, 1 - 1e-6))
def test_unit_interval_round_trip(value):
    assert np.isclose(unit_interval(value).value, value, rtol=1e-9)


def test_lower_triangular_round_trip_batched():
    L = np.tril(np.random.default_rng(0).normal(size=(3, 4, 4)))
    L[:, range(4), range(4)] = np.abs(L[:, range(4), range(4)]) + 0.1
    assert np.allclose(lower_triangular(L).value, L, atol=1e-12)
    assert lower_triangular(L).unconstrained.shape == (3, 10)


@pytest.mark.parametrize("make, value", [
    (positive, 0.0), (positive, -1.0), (positive, np.nan), (positive, np.inf), (positive, [1.0, -2.0]), (positive, "x"), (positive, None),
    (positive, 1j), (unit_interval, 0.0), (unit_interval, 1.0), (unit_interval, 2.0), (free, np.nan),
    (lower_triangular, [[1.0, 1.0], [0.0, 1.0]]), (lower_triangular, [[-1.0, 0.0], [0.0, 1.0]])])
def test_bad_values_are_refused_by_name(make, value):
    with pytest.raises(ValueError, match="gadget"):
        make(value, name="gadget")


def test_a_step_in_unconstrained_space_stays_in_the_set():
    for parameter, low, high in ((positive(1e-3), 0, np.inf), (unit_interval(0.5), 0, 1)):
        for step in (-30.0, 30.0):
            moved = eqx.tree_at(lambda p: p.unconstrained, parameter, parameter.unconstrained + step)
            assert low <= moved.value <= high and np.isfinite(moved.value)


def test_parameters_made_inside_jit():
    made = jax.jit(lambda x: positive(x).value + positive(2.0).value)(3.0)
    assert np.isclose(made, 5.0)


def test_no_weak_types():
    assert not positive(1.0).unconstrained.weak_type and not free(1).unconstrained.weak_type


def test_dtypes_are_kept_and_cast():
    assert as_float(np.float32(1)).dtype == jnp.float32 and as_float(1).dtype == jnp.float64
    model = cast(Model(positive(1.0, prior=dist.Gamma(2.0, 1.0)), free(np.zeros(3))), jnp.float32)
    assert unwrap(model).a.dtype == jnp.float32 and unwrap(model).b.dtype == jnp.float32


def test_frozen_parameters_do_not_move_and_thaw():
    model = Model(freeze(positive(1.0, prior=dist.Gamma(2.0, 1.0))), free(2.0))
    trainable, rest = partition(model)
    assert len(jax.tree.leaves(trainable)) == 1
    gradient = jax.grad(lambda t: jnp.sum(unwrap(eqx.combine(t, rest)).a * unwrap(eqx.combine(t, rest)).b))(trainable)
    assert np.isclose(jax.tree.leaves(gradient)[0], 1.0)
    assert len(jax.tree.leaves(partition(unfreeze(model))[0])) == 2
    assert np.isclose(log_prior(unfreeze(model)), dist.Gamma(2.0, 1.0).log_prob(1.0)) and log_prior(model) == 0


def test_what_a_method_is_neither_moves_nor_thaws():
    tree = {"power": Fixed(np.array(0.5)), "a": freeze(free(3.0))}
    assert not jax.tree.leaves(partition(tree)[0]) and len(jax.tree.leaves(partition(unfreeze(tree))[0])) == 1
    assert unwrap(unfreeze(tree))["power"] == 0.5


def test_combine_inverts_partition():
    model = Model(positive([1.0, 2.0]), freeze(free(3.0)))
    assert eqx.tree_equal(eqx.combine(*partition(model)), model)


@pytest.mark.parametrize("make, prior", [(positive, dist.Gamma(3.0, 2.0)), (positive, dist.LogNormal(0.0, 1.0)),
                                         (unit_interval, dist.Beta(2.0, 3.0)), (free, dist.Normal(1.0, 2.0))])
def test_prior_in_unconstrained_space_integrates_to_one(make, prior):
    parameter = make(0.5, prior=prior)
    density = jax.jit(lambda v: jnp.exp(log_prior_unconstrained(eqx.tree_at(lambda p: p.unconstrained, parameter, v))))
    total, _ = scipy.integrate.quad(lambda v: float(density(v)), -80, 200, limit=500, points=[-5, 0, 5])
    assert np.isclose(total, 1.0, atol=1e-6)


def test_prior_parameters_are_not_trainable():
    assert len(jax.tree.leaves(partition(positive(1.0, prior=dist.Gamma(2.0, 1.0)))[0])) == 1


def test_every_kind_of_parameter_keeps_its_precision():
    parameters = [positive(2.0), unit_interval(0.3), free([1.0, -2.0]), lower_triangular(jnp.tril(jnp.ones((3, 3))))]
    for parameter in parameters:
        single = cast(parameter, jnp.float32)
        assert single.value.dtype == jnp.float32 and jnp.allclose(single.value, parameter.value, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_softplus_and_its_derivatives_keep_their_digits_from_end_to_end(dtype):
    "Against forms in which nothing cancels, in the longest floats that NumPy has."
    v = np.array([-80.0, -30.0, -3.0, -1e-4, 0.0, 1e-4, 0.7, 3.0, 30.0, 1e4], dtype)
    long, eps = v.astype(np.longdouble), np.finfo(dtype).eps
    e = np.exp(-abs(long))
    expected = np.maximum(long, 0) + np.log1p(e), np.where(long < 0, e, 1) / (1 + e), e / (1 + e) ** 2
    functions = softplus, jax.grad(softplus), jax.grad(jax.grad(softplus))
    for function, wanted, lost in zip(functions, expected, (0, 0, eps)):  # the slope of a slope of almost 1 is a difference
        found = jax.jit(jax.vmap(function))(v)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, wanted.astype(dtype), rtol=4 * eps, atol=lost)
    ends = softplus(jnp.array([-np.inf, np.inf, np.nan], dtype))
    assert ends[0] == 0 and ends[1] == np.inf and np.isnan(ends[2])


def test_vmap_and_second_derivatives_go_through_the_bijections():
    "The chain rule for a quadratic function of the values, against softplus and a triangle filled by hand."
    C, D = np.array([[2.0, 0.5], [0.5, 1.0]]), np.random.default_rng(0).normal(size=(4, 4))
    model = Model(positive([0.3, 2.0]), lower_triangular([[0.7, 0.0], [-0.4, 1.5]]))
    trainable, rest = partition(model)
    v, restore = jax.flatten_util.ravel_pytree(trainable)

    def through_parameters(v):
        values = unwrap(eqx.combine(restore(v), rest))
        return values.a @ C @ values.a + jnp.ravel(values.b) @ D @ jnp.ravel(values.b)

    def by_hand(v):
        a = jnp.log1p(jnp.exp(v[:2]))
        softplus = lambda v: jnp.log1p(jnp.exp(CORNER * v)) / CORNER
        L = jnp.array([[softplus(v[4]), 0.0], [v[3], softplus(v[2])]])
        return a @ C @ a + jnp.ravel(L) @ D @ jnp.ravel(L)

    vs = v + jnp.array([[0.0], [-0.6], [1.1]])
    hessians = jax.jit(jax.vmap(jax.hessian(through_parameters)))(vs)
    np.testing.assert_allclose(hessians, jax.jit(jax.vmap(jax.hessian(by_hand)))(vs), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(jax.jit(jax.vmap(through_parameters))(vs), [through_parameters(v) for v in vs], rtol=1e-12)


@pytest.mark.parametrize("size", [1, 64, 4096])
def test_an_array_that_is_changed_later_changes_nothing_made_from_it(size):
    array = aligned_ones(size)
    lengthscale, X = positive(array), as_float(array)
    array[0] = 7.0
    assert lengthscale.value[0] == pytest.approx(1.0) and X[0] == 1.0


def aligned_ones(size):
    "Ones in memory that JAX might share instead of copying."
    raw = np.ones(size + 64)
    start = -raw.ctypes.data % 64 // 8
    return raw[start:start + size]


def test_a_parameter_is_read_as_numbers():
    for one in (positive(0.5), freeze(positive(0.5)), unit_interval(np.float32(0.5)), free(0.5)):
        assert isinstance(float(one), float) and np.isclose(float(one), 0.5)
    several = np.array([1.0, 2.0])
    for parameter in (positive(several), freeze(positive(several))):
        assert type(np.asarray(parameter)) is np.ndarray and np.allclose(parameter, several) and np.shape(parameter) == (2,)
        with pytest.raises(TypeError, match=r"float needs a parameter that is one number, got shape \(2,\)"):
            float(parameter)
    assert np.asarray(positive(several), dtype=np.float32).dtype == np.float32
    for read in (float, np.asarray):
        with pytest.raises(TypeError):                                       # a value that is being differentiated has no digits yet
            jax.grad(lambda v: jnp.sum(read(positive(v))))(1.0)
