"`fit` against closed forms, SciPy and optax on their own, and every way it can be misused."

import logging
import os
import signal
import threading
import time
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from jax.flatten_util import ravel_pytree
from scipy.optimize import Bounds, minimize
from scipy.stats import norm
from threadpoolctl import threadpool_info, threadpool_limits

from gp_thesis import fitting
from gp_thesis.exact import GP, Exact, check_data
from gp_thesis.batches import CHUNK, minibatch
from gp_thesis.checkpoints import is_key
from gp_thesis.fitting import Fit, fit, negative_objective
from gp_thesis.kernels import RBF, Matern32, Matern52
from gp_thesis.likelihoods import Bernoulli, Gaussian
from gp_thesis.optimisers import FIRST_STEP, PAIRS, REACH
from gp_thesis.parameters import Parameter, cast, free, freeze, partition, positive, unwrap

ADAM, SLOW, QUICK = optax.adam(0.05), optax.adam(0.01), optax.adam(0.1)     # one object each, so that programs are shared
OPTIMISERS = {"scipy": "lbfgs", "optax": optax.lbfgs(), "adam": ADAM}


class Line(eqx.Module):
    "y = X w + noise, an approximation in ten lines."
    weights: Parameter
    likelihood: Gaussian

    def objective(self, X, y, *, num_data=None):
        line = unwrap(self)
        scale = 1 if num_data is None else num_data / len(y)
        return scale * jnp.sum(line.likelihood.log_density(X @ line.weights, y))


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3)) * [1.0, 0.7, 0.4]
    return jnp.asarray(X), jnp.asarray(X @ [1.0, -2.0, 0.5] + 0.5 * rng.normal(size=200))


@pytest.fixture
def line():
    return Line(free(np.zeros(3)), Gaussian(1.0))


@pytest.fixture(scope="module")
def regression():
    rng = np.random.default_rng(1)
    X = np.sort(rng.uniform(0, 6, 40))[:, None]
    return jnp.asarray(X), jnp.asarray(np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=40))


def test_a_first_fit_and_prediction_are_three_programs(caplog):
    "One for the fit, the posterior and the prediction each: compiling takes 10 to 30 ms even where two numbers are added."
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(37, 5)), rng.normal(size=37)                        # sizes that no other test has
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        fit(Exact(GP(RBF(np.ones(5)), Gaussian(0.1))), (X, y), steps=3, progress=False).approx.posterior(X, y).predict_y(X[:11])
    found = [record.getMessage().split(" with ")[0] for record in caplog.records if record.getMessage().startswith("Compiling")]
    assert sum("loss_and_gradient" in name for name in found) == 1 and len(found) <= 3, found


@eqx.filter_jit
def value_and_slope(trainable, rest, batch, num_data=None):
    "Of what `fit` makes small."
    return jax.value_and_grad(negative_objective)(trainable, rest, batch, num_data)


@eqx.filter_jit
def one_step(optimiser, trainable, rest, state, batch, num_data=None):
    "The step that everyone writes first: the objective before it, and parameters and state after it."
    value, gradient = value_and_slope(trainable, rest, batch, num_data)
    change, state = optimiser.update(gradient, state, trainable)
    return -value, optax.apply_updates(trainable, change), state


def weights_of(result):
    return np.asarray(unwrap(result.approx).weights)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_finds_the_least_squares_solution(line, data, name):
    result = fit(line, data, optimiser=OPTIMISERS[name], steps=3000)
    weights, residual, *_ = np.linalg.lstsq(*map(np.asarray, data), rcond=None)
    assert result.converged and type(result.approx) is Line and isinstance(result, Fit)
    assert np.allclose(weights_of(result), weights, atol=1e-4)
    assert np.isclose(result.approx.likelihood.variance.value, residual[0] / 200, rtol=1e-3)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_history_has_an_entry_for_the_start_and_for_each_step(line, data, name):
    result = fit(line, data, optimiser=OPTIMISERS[name], steps=30)
    objective, seconds = result.history
    assert len(objective) == len(seconds) == result.steps + 1 and result.steps <= 30
    assert np.isclose(objective[0], line.objective(*data)) and np.isclose(objective[-1], result.approx.objective(*data))
    assert np.all(np.diff(seconds) >= 0) and result.compile_seconds >= 0 and np.all(np.isfinite(objective))


@pytest.mark.parametrize("steps", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_exactly_as_many_steps_as_asked_for_whatever_the_chunk(line, data, steps):
    adam = SLOW
    result = fit(line, data, optimiser=adam, steps=steps)
    assert result.steps == steps and len(result.history.objective) == steps + 1
    assert not result.converged and result.message == "all steps were taken"
    trainable, rest = partition(line)
    state = adam.init(trainable)
    for _ in range(steps):
        _, trainable, state = one_step(adam, trainable, rest, state, data)
    assert np.allclose(weights_of(result), unwrap(eqx.combine(trainable, rest)).weights, rtol=1e-10)


def test_lbfgs_takes_scipys_steps(regression):
    approx = Exact(GP(RBF(), Gaussian()))
    trainable, rest = partition(approx)
    flat, unravel = ravel_pytree(trainable)
    path = []
    value_and_grad = jax.jit(jax.value_and_grad(lambda v: -eqx.combine(unravel(v), rest).objective(*regression)))
    scaled = lambda z: [c * np.asarray(a, float) for c, a in zip((1, FIRST_STEP), value_and_grad(FIRST_STEP * z))]
    begin = np.asarray(flat) / FIRST_STEP
    alone = minimize(scaled, begin, jac=True, method="L-BFGS-B", bounds=Bounds(begin - REACH / FIRST_STEP, np.inf),
                     callback=lambda v: path.append(v), options=dict(maxcor=PAIRS, ftol=1e-9, gtol=1e-9))
    result = fit(approx, regression)
    assert result.steps == alone.nit == len(path) and result.converged
    assert np.allclose(ravel_pytree(partition(result.approx)[0])[0], FIRST_STEP * alone.x, rtol=1e-6)
    assert np.isclose(result.history.objective[-1], -alone.fun)
    _, slope = value_and_slope(partition(result.approx)[0], rest, regression)
    assert np.linalg.norm(slope.model.kernel.lengthscale.unconstrained) < 1e-2


@pytest.mark.parametrize("name", ["scipy", "optax"])
def test_all_optimisers_reach_the_same_log_marginal_likelihood(regression, name):
    approx = Exact(GP(RBF(), Gaussian(0.5)))
    best = fit(approx, regression, tolerance=1e-13).history.objective[-1]
    assert abs(fit(approx, regression, optimiser=OPTIMISERS[name], steps=1500).history.objective[-1] - best) < 1e-5


@pytest.mark.parametrize("name", ["scipy", "adam"])
def test_frozen_parameters_do_not_move(regression, name):
    approx = Exact(GP(RBF(freeze(positive(0.8)), 2.0), Gaussian(0.5)))
    fitted = fit(approx, regression, optimiser=OPTIMISERS[name], steps=60).approx.model
    assert np.array_equal(unwrap(fitted.kernel.lengthscale), unwrap(approx.model.kernel.lengthscale))
    assert not np.isclose(unwrap(fitted.kernel.variance), 2.0) and not np.isclose(unwrap(fitted.likelihood.variance), 0.5)
    assert jax.tree.structure(fitted) == jax.tree.structure(approx.model)       # frozen still, and of the same make


@pytest.mark.parametrize("name", ["scipy", "adam"])
def test_a_prior_on_the_weights_makes_ridge_regression(data, name):
    X, y = map(np.asarray, data)
    ridge = Line(free(np.zeros(3), prior=dist.Normal(0.0, 0.1)), Gaussian(freeze(positive(0.25))))
    closed = np.linalg.solve(X.T @ X / 0.25 + np.eye(3) / 0.01, X.T @ y / 0.25)
    result = fit(ridge, data, optimiser=OPTIMISERS[name], steps=3000)
    assert np.allclose(weights_of(result), closed, atol=1e-4)
    prior = norm.logpdf(weights_of(result), 0.0, 0.1).sum()
    assert np.isclose(result.history.objective[-1], result.approx.objective(*data) + prior)     # history holds what was maximised


def test_map_is_the_mode_of_the_density_of_the_constrained_parameter(data):
    "Noise with an inverse gamma prior: the mode over the variance itself has a closed form, without a Jacobian."
    X, y = data
    weights = np.array([1.0, -2.0, 0.5])
    known = Line(freeze(free(weights)), Gaussian(positive(1.0, prior=dist.InverseGamma(50.0, 20.0))))
    mode = (0.5 * float(((y - X @ weights) ** 2).sum()) + 20.0) / (100.0 + 50.0 + 1.0)
    assert np.isclose(fit(known, data, tolerance=1e-14).approx.likelihood.variance.value, mode, rtol=1e-5)


def test_minibatch_gradients_average_to_the_full_one_over_all_batches(data):
    prior = Line(free(np.ones(3), prior=dist.Normal(0.0, 1.0)), Gaussian(0.7))               # the prior is not scaled
    trainable, rest = partition(prior)
    X, y = (np.asarray(array)[:4] for array in data)
    gradient = lambda *rows: np.concatenate([np.ravel(g) for g in jax.tree.leaves(value_and_slope(trainable, rest, *rows)[1])])
    batches = [[i, j] for i in range(4) for j in range(4)]
    assert np.allclose(np.mean([gradient((X[rows], y[rows]), 4) for rows in batches], 0), gradient((X, y)), rtol=1e-12)


def test_minibatches_are_uniform_keep_rows_together_and_depend_on_key_and_step_only():
    X, y = jnp.asarray(np.arange(10.0)[:, None]), jnp.asarray(np.arange(10.0) * 3)
    draw = jax.jit(lambda key, step: minibatch(key, step, (X, y), 7))
    counts = np.zeros(10)
    for step in range(600):
        Xb, yb = map(np.asarray, draw(jax.random.key(0), step))
        assert Xb.shape == (7, 1) and np.array_equal(3 * Xb[:, 0], yb)
        counts += np.bincount(np.asarray(Xb[:, 0], int), minlength=10)
    assert ((counts - 420) ** 2 / 420).sum() < 35                               # chi-squared with 9 degrees of freedom
    assert np.array_equal(draw(jax.random.key(0), 5)[1], draw(jax.random.key(0), 5)[1])
    assert not np.array_equal(draw(jax.random.key(0), 5)[1], draw(jax.random.key(0), 6)[1])
    assert not np.array_equal(draw(jax.random.key(0), 5)[1], draw(jax.random.key(1), 5)[1])


def test_minibatches_find_the_solution_and_the_key_decides_the_path(line, data):
    run = lambda key, steps=2000: fit(line, data, optimiser=schedule, steps=steps, batch_size=20, key=jax.random.key(key))
    schedule = optax.adam(optax.cosine_decay_schedule(0.05, 2000))
    result = run(0)
    assert result.steps == 2000 and not result.converged                       # noise never settles
    assert np.allclose(weights_of(result), np.linalg.lstsq(*map(np.asarray, data), rcond=None)[0], atol=0.1)
    again, other, begun = run(0), run(1), run(0, 70)
    assert np.array_equal(weights_of(result), weights_of(again))
    assert np.array_equal(result.history.objective, again.history.objective)
    assert not np.array_equal(weights_of(result), weights_of(other))
    assert np.array_equal(begun.history.objective, result.history.objective[:71])           # a short run is the start of a long one


def test_recorded_estimates_scatter_around_the_objective(line, data):
    result = fit(line, data, optimiser=optax.sgd(0.0), steps=2000, batch_size=10, key=jax.random.key(0))
    estimates = result.history.objective
    assert abs(estimates.mean() - line.objective(*data)) < 4 * estimates.std() / np.sqrt(len(estimates))
    assert estimates.std() > 1.0


@pytest.mark.parametrize("name", ["scipy", "optax"])
def test_single_precision(line, data, name):
    single = tuple(a.astype(jnp.float32) for a in data)
    result = fit(cast(line, jnp.float32), single, optimiser=OPTIMISERS[name], steps=2000)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(partition(result.approx)[0]))
    assert np.allclose(weights_of(result), np.linalg.lstsq(*map(np.asarray, data), rcond=None)[0], atol=2e-3) and result.converged


def test_a_fit_goes_on_from_a_fit(line, data):
    half = fit(line, data, steps=5)
    assert not half.converged and half.steps == 5
    whole = fit(half.approx, data)
    assert whole.converged and np.isclose(whole.history.objective[0], half.history.objective[-1])
    assert fit(whole.approx, data).steps <= 2                                   # there is nothing left to do


class Restless(Line):
    "A line whose slope never ends."

    def objective(self, X, y, **settings):
        return jnp.sum(unwrap(self).weights) + 0.0 * jnp.sum(y)


class Traced(Line):
    "A line that counts how often it is traced."
    calls: list = eqx.field(static=True)

    def objective(self, X, y, **settings):
        self.calls.append(1)
        return super().objective(X, y, **settings)


def test_the_second_fit_compiles_nothing(data):
    class Calls(list):
        __hash__, __eq__ = lambda self: 0, lambda self, other: True             # the same program, whatever it holds

    for optimiser in ("lbfgs", SLOW):
        calls = Calls()
        fit(Traced(free(np.zeros(3)), Gaussian(0.5), calls), data, optimiser=optimiser, steps=60)
        first = len(calls)
        fit(Traced(free(np.ones(3)), Gaussian(0.3), calls), (2 * data[0], data[1]), optimiser=optimiser, steps=90)
        assert first > 0 and len(calls) == first


@pytest.mark.parametrize("optimiser", [
    optax.sgd(1e-3, momentum=0.9), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.05)), optax.adadelta(1.0),
    optax.chain(ADAM, optax.contrib.reduce_on_plateau(patience=5)),
    optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20, store_grad=True)),
    optax.noisy_sgd(1e-4, 0.01, key=jax.random.key(0)),
], ids=["momentum", "clipped", "adadelta", "plateau", "backtracking", "noisy"])
def test_other_optax_optimisers_run_and_improve(line, data, optimiser):
    result = fit(line, data, optimiser=optimiser, steps=120)
    assert result.history.objective[-1] > result.history.objective[0] + 10


class Cliff(eqx.Module):
    "Largest at v = 2.99, not a number from 3 on."
    v: Parameter
    raises: bool = eqx.field(static=True, default=False)

    def objective(self, X, y, *, num_data=None):
        v = unwrap(self.v)
        if self.raises:
            v = eqx.error_if(v, v >= 3, "the matrix K is not positive definite")
        return v + 0.01 * jnp.log(3 - v)


@pytest.mark.parametrize("raises", [False, True])
def test_a_line_search_turns_back_from_values_that_are_not_finite(data, raises):
    result = fit(Cliff(free(0.0), raises), data)
    assert result.converged and np.isclose(result.approx.v.value, 2.99, atol=1e-4)
    assert np.all(np.isfinite(result.history.objective))


def test_a_value_that_is_not_finite_ends_the_run_and_says_when(data):
    cliff = Cliff(free(0.0))
    with pytest.raises(FloatingPointError, match="not finite after 7 steps.*last finite objective was.*smaller learning rate"):
        fit(cliff, data, optimiser=optax.sgd(0.5), steps=100)
    with pytest.raises(FloatingPointError, match=r"not finite after 0 to 50 steps \(the matrix K is not positive definite"):
        fit(Cliff(free(0.0), True), data, optimiser=optax.sgd(0.5), steps=100)
    for optimiser in OPTIMISERS.values():
        with pytest.raises(FloatingPointError, match="not finite after 0 steps"):
            fit(Cliff(free(4.0)), data, optimiser=optimiser)


def test_a_gradient_that_is_not_finite_is_no_result_either(data):
    class Kink(eqx.Module):
        v: Parameter

        def objective(self, X, y, *, num_data=None):
            return -jnp.sqrt(jnp.abs(unwrap(self.v)))

    for optimiser in OPTIMISERS.values():
        with pytest.raises(FloatingPointError, match="after 0 steps"):
            fit(Kink(free(0.0)), data, optimiser=optimiser)


def test_divergence_is_not_mistaken_for_convergence(data):
    known_noise = Line(free(np.zeros(3)), Gaussian(freeze(positive(1.0))))
    with pytest.raises(FloatingPointError):
        fit(known_noise, data, optimiser=optax.sgd(1.0))
    assert not fit(known_noise, data, optimiser=optax.sgd(1.0), steps=12).converged


def test_result_describes_itself(line, data):
    text = repr(fit(line, data))
    assert "Fit of Line: converged" in text and "steps in" in text and "objective from -" in text
    assert "not converged, all steps were taken. 3 steps" in repr(fit(line, data, steps=3))


@pytest.mark.parametrize("optimiser", ["lbfgs", SLOW], ids=["scipy", "adam"])
def test_progress_bar_only_when_asked(line, data, capsys, optimiser):
    fit(line, data, optimiser=optimiser, steps=5)
    assert capsys.readouterr().err == ""
    fit(line, data, optimiser=optimiser, steps=5, progress=True)
    shown = capsys.readouterr()
    assert "5/5" in shown.err and shown.out == ""



def recorder():
    "A callback that writes down what it is told, and its list."
    seen = []
    return lambda approx, steps, seconds: seen.append((approx, steps, seconds)), seen


@pytest.mark.parametrize("settings,expected", [
    (dict(optimiser=SLOW, steps=120, every=30), [0, 30, 60, 90, 120]),
    (dict(optimiser=SLOW, steps=130, every=64), [0, 64, 128, 130]),
    (dict(optimiser=SLOW, steps=3, every=1), [0, 1, 2, 3]),
    (dict(optimiser=SLOW, steps=70), [0, 70]),
    (dict(steps=7, every=3), [0, 3, 6, 7]),
    (dict(steps=6, every=3), [0, 3, 6]),
])
def test_the_callback_sees_the_start_all_multiples_and_the_end(line, data, settings, expected):
    partly = Line(line.weights, freeze(Gaussian(0.3)))
    callback, seen = recorder()
    result = fit(partly, data, callback=callback, **settings)
    assert [steps for _, steps, _ in seen] == expected and result.steps == expected[-1]
    for approx, steps, _ in seen:
        assert type(approx) is Line and np.isclose(approx.likelihood.variance.value, 0.3)
        assert np.isclose(approx.objective(*data), result.history.objective[steps], rtol=1e-10)
    seconds = [s for *_, s in seen]
    assert seconds[0] >= 0 and np.all(np.diff(seconds) > 0)
    assert np.array_equal(seen[-1][0].weights.value, result.approx.weights.value)


def test_blas_has_one_thread_during_a_fit_and_as_many_as_before_after_it(line, data):
    threads = lambda *_: [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    seen = []
    with threadpool_limits(2, user_api="blas"):
        before = threads()
        fit(line, data, steps=2, callback=lambda *_: seen.extend(threads()))
        assert seen and set(seen) == {1} and threads() == before


@pytest.mark.parametrize("optimiser", ["lbfgs", optax.lbfgs()], ids=["scipy", "optax"])
def test_a_fit_that_converges_shows_its_last_step_once(line, data, optimiser):
    callback, seen = recorder()
    result = fit(line, data, optimiser=optimiser, callback=callback, every=1)
    assert result.converged and [steps for _, steps, _ in seen] == list(range(result.steps + 1))


def test_looking_on_changes_nothing(line, data):
    settings = dict(optimiser=ADAM, steps=110, batch_size=20, key=jax.random.key(0))
    alone = fit(line, data, **settings)
    for every in (1, 7, CHUNK, 60):
        watched = fit(line, data, callback=lambda *_: None, every=every, **settings)
        assert np.array_equal(alone.history.objective, watched.history.objective)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_callbacks_own_time_is_not_training(line, data, name, monkeypatch):
    ticks, seen = [0.0], []

    def clock():
        ticks[0] += 1.0                                                         # it goes on by one when it is looked at
        return ticks[0]

    def callback(approx, steps, seconds):
        seen.append(seconds)
        ticks[0] += 1e6

    monkeypatch.setattr(fitting, "time", SimpleNamespace(perf_counter=clock))
    result = fit(line, data, optimiser=OPTIMISERS[name], steps=4, every=1, callback=callback)
    assert len(seen) == 5 and 0 <= seen[0] < max(seen) < 1e3 and result.history.seconds[-1] < 1e3


@pytest.mark.parametrize("answer", [True, np.True_, jnp.array(True)], ids=["bool", "numpy", "jax"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_callback_may_end_the_fit(line, data, name, answer):
    for at in (0, 3):
        result = fit(line, data, optimiser=OPTIMISERS[name], steps=200, every=3, callback=lambda a, steps, s: answer if steps >= at else None)
        assert result.steps == at and result.message == "the callback returned True" and not result.converged
        assert len(result.history.objective) == at + 1 == len(result.history.seconds)
        assert np.isclose(result.approx.objective(*data), result.history.objective[-1], rtol=1e-10)


def test_other_answers_do_not_end_the_fit_and_errors_come_through(line, data):
    for answer in (False, 1, 2.5, np.float64(3), jnp.array(1.0), "yes", (True,)):
        assert fit(line, data, optimiser=SLOW, steps=5, callback=lambda *_: answer).steps == 5

    def fails(approx, steps, seconds):
        raise KeyError("mine")

    for optimiser in OPTIMISERS.values():
        with pytest.raises(KeyError, match="mine"):
            fit(line, data, optimiser=optimiser, callback=fails)


@pytest.mark.parametrize("step", [0, 2])
def test_stop_iteration_of_a_callback_is_an_error_like_others(line, data, step):
    def runs_out(approx, steps, seconds):
        seen.append(steps)
        if steps == step:
            raise StopIteration("mine")

    for optimiser in OPTIMISERS.values():
        seen = []
        with pytest.raises(StopIteration, match="mine"):
            fit(line, data, optimiser=optimiser, callback=runs_out, every=1)
        assert seen[-1] == step == max(seen)


def test_optax_transformations_get_trees_with_the_structure_of_the_approximation(line, data):
    partly = Line(line.weights, freeze(Gaussian(0.25)))

    def update(gradients, state, params=None, **extra):
        for tree in (gradients, params):
            assert type(tree) is Line and isinstance(tree.weights, Parameter) and not jax.tree.leaves(tree.likelihood)
        return eqx.tree_at(lambda t: t.weights.unconstrained, gradients, -0.001 * gradients.weights.unconstrained), state

    special = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    plain = fit(partly, data, optimiser=optax.sgd(0.001), steps=60)
    assert np.array_equal(fit(partly, data, optimiser=special, steps=60).history.objective, plain.history.objective)


@pytest.fixture
def mapped(data, tmp_path):
    "The same data in files."
    for name, array in zip("Xy", data):
        np.save(tmp_path / f"{name}.npy", array)
    return tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "Xy")


STREAM = dict(optimiser=ADAM, key=jax.random.key(3))


@pytest.mark.parametrize("steps,batch_size,every", [(1, 20, 500), (CHUNK - 1, 20, 500), (CHUNK, 20, 500), (130, 20, 30), (20, 1, 1)])
def test_rows_on_disk_are_the_rows_in_memory(line, data, mapped, steps, batch_size, every):
    settings = STREAM | dict(steps=steps, batch_size=batch_size)
    held = fit(line, data, **settings)
    for streamed in (mapped, (mapped[0], data[1]), (np.asarray(data[0]), mapped[1])):
        result = fit(line, streamed, callback=lambda *_: None, every=every, **settings)
        assert np.array_equal(result.history.objective, held.history.objective)
        assert np.array_equal(weights_of(result), weights_of(held)) and result.message == held.message


def test_mapped_arrays_are_read_a_stack_at_a_time_and_converted(line, data, mapped, tmp_path, monkeypatch):
    from gp_thesis import batches

    single = cast(line, jnp.float32)
    np.save(tmp_path / "f.npy", np.asarray(mapped[0], np.float32)), np.save(tmp_path / "i.npy", np.arange(200) % 2)
    X, y = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "fi")
    with_floats = fit(single, (X, np.asarray(y, np.float32)), steps=70, batch_size=10, **STREAM)
    assert np.array_equal(with_floats.history.objective, fit(single, (X, y), steps=70, batch_size=10, **STREAM).history.objective)
    taken = []
    stack = batches.Stream.stack
    monkeypatch.setattr(batches.Stream, "stack", lambda self, rows, first: (taken.append((first, len(rows[0]))), stack(self, rows, first))[1])
    fit(line, mapped, steps=120, batch_size=10, **STREAM)
    assert taken == [(0, 500), (50, 500), (100, 210)]
    monkeypatch.setattr(batches, "STACK", 7 * 10 * 4 * 8)                       # seven batches of ten rows of four numbers
    taken.clear()
    fit(line, mapped, steps=20, batch_size=10, **STREAM)
    assert taken == [(0, 70), (7, 70), (14, 70)]


def by_hand(line, batches, optimiser, num_data):
    "The loop that everyone writes first: objectives at each batch, and the weights before the last."
    trainable, rest = partition(line)
    state, objectives = optimiser.init(trainable), []
    for X, y in batches:
        before = trainable
        value, trainable, state = one_step(optimiser, trainable, rest, state, (X, y), num_data)
        objectives.append(value)
    return np.array(objectives), unwrap(eqx.combine(before, rest)).weights


def in_batches(data, size):
    return [(data[0][i:i + size], data[1][i:i + size]) for i in range(0, len(data[0]), size)]


def test_an_iterable_is_started_again_and_its_shorter_last_batch_left_out(line, data):
    batches, adam = in_batches(data, 60), ADAM                      # 60, 60, 60, 20
    order = (batches[:3] * 3)[:8]
    result = fit(line, batches, optimiser=adam, steps=7, num_data=200)
    objectives, weights = by_hand(line, order, adam, 200)
    assert result.steps == 7 and np.allclose(result.history.objective, objectives, rtol=1e-12)
    assert np.allclose(weights_of(result), weights, rtol=1e-12)

    class Fresh:
        "Each epoch in another order."
        def __init__(self):
            self.random, self.data = np.random.default_rng(0), [np.asarray(a) for a in data]

        def __iter__(self):
            return iter(in_batches([a[self.random.permutation(200)] for a in self.data], 50))

    source = Fresh()
    expected = [batch for _ in range(16) for batch in source][:61]
    result = fit(line, Fresh(), optimiser=adam, steps=60, num_data=200)
    assert np.allclose(result.history.objective, by_hand(line, expected, adam, 200)[0], rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2])
def test_an_iterator_ends_the_fit_and_its_last_batch_is_evaluated(line, data, count):
    batches, adam = (in_batches(data, 20) * 6)[:count], ADAM
    callback, seen = recorder()
    result = fit(line, iter(batches), optimiser=adam, num_data=200, callback=callback)
    objectives, weights = by_hand(line, batches, adam, 200)
    assert result.steps == count - 1 == seen[-1][1] and result.message == "the batches ran out" and not result.converged
    assert np.allclose(result.history.objective, objectives, rtol=1e-12) and np.allclose(weights_of(result), weights, rtol=1e-12)


def test_an_iterator_that_is_long_enough_is_read_a_little_ahead_and_not_to_its_end(line, data):
    read = 0

    def forever():
        nonlocal read
        buffer = [np.empty((20, 3)), np.empty(20)]                              # used again for each batch
        for k in range(10**6):
            for into, array in zip(buffer, data):
                into[...] = array[20 * (k % 10):20 * (k % 10) + 20]
            read += 1
            yield tuple(buffer)

    steps_and_read = []
    adam = ADAM
    result = fit(line, forever(), optimiser=adam, steps=4 * CHUNK, num_data=200, every=CHUNK,
                 callback=lambda a, steps, s: steps_and_read.append((steps, read)))
    assert result.message == "all steps were taken" and read == 4 * CHUNK + 1 + 1
    assert all(now <= steps + 2 * CHUNK + 1 for steps, now in steps_and_read)
    assert np.allclose(result.history.objective, by_hand(line, (in_batches(data, 20) * 21)[:4 * CHUNK + 1], adam, 200)[0], rtol=1e-12)


def test_no_thread_is_left_behind(line, data, mapped):
    import threading

    def breaks():
        yield from in_batches(data, 20) * 12
        raise OSError("the disk is gone")

    before = threading.active_count()
    fit(line, mapped, steps=400, batch_size=10, callback=lambda a, steps, s: steps > 100, every=60, **STREAM)
    with pytest.raises(OSError, match="the disk is gone"):
        fit(line, breaks(), optimiser=ADAM, num_data=200)
    assert threading.active_count() == before


class Labelled(eqx.Module):
    "An approximation with a model, whose likelihood knows its labels."
    model: GP
    slope: Parameter

    def check(self, X, y):
        return check_data(self.model, X, y)

    def objective(self, X, y, *, num_data=None):
        return -jnp.mean((unwrap(self.slope) * X[:, 0] - y) ** 2)


def test_unusable_rows_of_a_stream_are_named_when_they_come(line, data, tmp_path):
    X, y = map(np.array, data)
    X[17, 1] = np.nan
    np.save(tmp_path / "X.npy", X)
    on_disk = np.load(tmp_path / "X.npy", mmap_mode="r")
    with pytest.raises(ValueError, match=r"data\[0\] must be finite, got NaN or infinity in .*rows are counted from the first of batch 0,"):
        fit(line, (on_disk, y), steps=500, batch_size=10, **STREAM)
    batches = [(X[20:40], y[20:40])] * 60 + [(X[:20], y[:20])]
    with pytest.raises(ValueError, match=r"data\[0\] must be finite.*first in row 217 \(rows are counted from the first of batch 50,"):
        fit(line, batches, optimiser=QUICK, num_data=200)
    labels = np.where(y > 0, 1.0, 0.0)
    labelled = Labelled(GP(RBF(), Bernoulli()), free(0.0))
    assert fit(labelled, in_batches((X[20:], labels[20:]), 20), optimiser=QUICK, steps=20, num_data=180).steps == 20
    labels[25] = 3.0
    with pytest.raises(ValueError, match=r"y must hold .* for the likelihood Bernoulli.*y\[5\] = 3.0"):
        fit(labelled, in_batches((X[20:], labels[20:]), 20), optimiser=QUICK, steps=20, num_data=180)


def equal(a, b):
    "Whether two results agree in every bit of parameters, of what the optimiser remembers, and of the history."
    numbers = lambda result: (partition(result.approx)[0], result.state._replace(reason=0), result.history.objective)
    plain = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(plain(x), plain(y)), numbers(a), numbers(b)))


class Shaken(Line):
    "An objective that draws samples."
    draws_samples = True

    def objective(self, X, y, *, num_data=None, key=None):
        noise = 0.1 * jax.random.normal(key, (3,))
        return Line(free(unwrap(self).weights + noise), self.likelihood).objective(X, y, num_data=num_data)


RUNS = {
    "whole": ("memory", dict(optimiser=ADAM)),
    "line search": ("memory", dict(optimiser=OPTIMISERS["optax"], tolerance=0.0)),
    "own key": ("memory", dict(optimiser=optax.noisy_sgd(1e-4, 0.01, key=jax.random.key(0)))),
    "memory": ("memory", dict(optimiser=ADAM, batch_size=20, key=jax.random.key(0))),
    "disk": ("disk", dict(optimiser=ADAM, batch_size=20, key=jax.random.key(0))),
    "epochs": ("epochs", dict(optimiser=ADAM, num_data=200)),
    "samples": ("memory", dict(optimiser=ADAM, key=jax.random.key(1))),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_cut_anywhere_and_resumed_is_the_run_without_a_cut(line, data, mapped, name, tmp_path):
    kind, settings = RUNS[name]
    rows = {"memory": data, "disk": mapped, "epochs": in_batches(data, 20)}[kind]
    start = Shaken(line.weights, line.likelihood) if name == "samples" else line
    steps = 12 if name == "line search" else 130
    whole = fit(start, rows, steps=steps, **settings)
    assert whole.steps == steps
    for cut in np.random.default_rng(3).choice(np.arange(1, steps), 3, replace=False).tolist() + [steps]:
        part = fit(start, rows, steps=cut, **settings)
        assert part.steps == cut and np.array_equal(part.history.objective, whole.history.objective[:cut + 1])
        assert equal(fit(start, rows, steps=steps, resume=part, **settings), whole)
    again = fit(part.approx, rows, steps=steps, resume=part, checkpoint=tmp_path, every=50, **settings)      # at the end already
    assert equal(again, whole) and np.all(np.diff(again.history.seconds) >= 0)


@pytest.mark.parametrize("name", RUNS)
def test_a_folder_takes_a_run_to_another_process(line, data, mapped, name, tmp_path):
    "Here: another call, after an error that nothing caught. The same files are read by other processes in test_checkpoints."
    kind, settings = RUNS[name]
    rows = {"memory": data, "disk": mapped, "epochs": in_batches(data, 20)}[kind]
    start = Shaken(line.weights, line.likelihood) if name == "samples" else line
    steps, every = (12, 5) if name == "line search" else (130, 26)
    seen = []

    def breaks(approx, step, seconds):
        seen.append(step)
        if step > steps // 2:
            raise RuntimeError("cut")

    folder = tmp_path / "run"
    call = lambda **more: fit(start, rows, **dict(steps=steps, checkpoint=folder, every=every) | settings | more)
    with pytest.raises(RuntimeError, match="cut"):
        call(callback=breaks)
    first = seen[-1]
    seen.clear()
    result = call(callback=lambda approx, step, seconds: seen.append(step))
    assert seen[0] == first - every and equal(result, fit(start, rows, steps=steps, **settings))
    assert sorted(int(path.name) for path in folder.iterdir()) == [steps - (steps % every or every), steps]
    longer = call(steps=steps + 7)
    assert equal(longer, fit(start, rows, steps=steps + 7, **settings))


def test_a_folder_of_another_fit_is_refused(line, data, tmp_path):
    settings = dict(optimiser=ADAM, steps=20, batch_size=20, key=jax.random.key(0), checkpoint=tmp_path)
    fit(line, data, **settings)
    for change, words in ((dict(batch_size=21), "the data"), (dict(key=jax.random.key(1)), "the data"), (dict(steps=19), "at least 20"),
                          (dict(approx=Line(free(np.ones(3)), Gaussian(1.0))), "the approximation"),
                          (dict(data=(2 * data[0], data[1])), "the data"), (dict(optimiser=optax.sgd(0.1)), "arrays differ: .*optimiser")):
        changed = dict(approx=line, data=data) | settings | change
        with pytest.raises(ValueError, match=words):
            fit(changed.pop("approx"), changed.pop("data"), **changed)


def test_a_folder_of_another_kernel_of_the_same_numbers_is_refused(tmp_path):
    data, settings = (np.arange(4.0)[:, None], np.ones(4)), dict(optimiser=ADAM, steps=2, checkpoint=tmp_path)
    fit(Exact(GP(Matern32(), Gaussian())), data, **settings)
    with pytest.raises(ValueError, match="differs in the approximation"):
        fit(Exact(GP(Matern52(), Gaussian())), data, **settings)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_ctrl_c_returns_what_was_reached(line, data, optimiser):
    def interrupt(approx, steps, seconds):
        if steps == 4:
            raise KeyboardInterrupt

    settings = dict(optimiser=OPTIMISERS[optimiser], tolerance=0.0)
    result = fit(line, data, callback=interrupt, every=1, steps=30, **settings)
    assert result.message == "interrupted" and not result.converged and result.steps == 4 and "interrupted" in repr(result)
    whole = fit(line, data, steps=30, **settings)
    assert np.array_equal(result.history.objective, whole.history.objective[:len(result.history.objective)])
    assert np.isclose(result.approx.objective(*data), whole.history.objective[4])
    if optimiser == "scipy":
        assert result.state is None and len(result.history.objective) == 5
    else:
        assert len(result.history.objective) == 4 and equal(fit(line, data, steps=30, resume=result, **settings), whole)


@pytest.mark.parametrize("optimiser", [ADAM, optax.lbfgs()], ids=["minibatches", "all rows"])
def test_ctrl_c_at_any_moment_loses_nothing_that_was_reached(line, data, optimiser):
    "A real signal comes in the middle of compiled code or of anything else, and is never lost."
    minibatches = dict(batch_size=20, key=jax.random.key(0)) if optimiser is ADAM else dict(tolerance=0.0)
    stubborn = line if optimiser is ADAM else Restless(line.weights, line.likelihood)
    for seconds in np.random.default_rng(0).uniform(0.0, 0.05, 20):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        result = fit(stubborn, data, optimiser=optimiser, steps=10**6, every=500, **minibatches,
                     callback=lambda approx, step, _: timer.start() if step == 500 else None)
        timer.join()
        assert result.message == "interrupted" and not result.converged
        assert 0 < result.steps == int(result.state.step) == len(result.history.objective)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait(line, data):
    def twice(approx, steps, seconds):
        if steps == 4:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0)                                                   # for Python to look at its signals
            raise AssertionError("went on")

    result = fit(line, data, optimiser=ADAM, callback=twice, every=1, steps=30)
    assert result.message == "interrupted" and result.steps == 4


def test_ctrl_c_before_anything_was_reached_ends_it_as_usual(line, data):
    with pytest.raises(KeyboardInterrupt):
        fit(line, data, optimiser=ADAM, callback=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))


@pytest.mark.parametrize("settings,words", [
    (dict(), "SciPy's L-BFGS keeps its state to itself.*optax.lbfgs"),
    (dict(optimiser=ADAM, num_data=200), "an iterator cannot be started again"),
])
def test_what_cannot_go_on_says_so(line, data, tmp_path, settings, words):
    rows = iter(in_batches(data, 20)) if "num_data" in settings else data
    for more in (dict(checkpoint=tmp_path / "new"), dict(resume=fit(line, data, optimiser=ADAM, steps=2))):
        with pytest.raises(ValueError, match=words):
            fit(line, rows, **settings | more)
    with pytest.raises(ValueError, match="SciPy's"):
        fit(line, data, optimiser=ADAM, resume=fit(line, data, steps=2))
    assert not (tmp_path / "new").exists()


def test_samples_get_a_key_of_their_own_in_each_step(line, data):
    shaken, key, rate = Shaken(line.weights, freeze(line.likelihood)), jax.random.key(5), 1e-4
    result = fit(shaken, data, optimiser=optax.sgd(rate), steps=60, key=key)
    (X, y), weights = map(np.asarray, data), np.zeros(3)
    branch, of_steps = jax.random.fold_in(key, np.uint32(2**32 - 1)), jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))
    noise = np.asarray(jax.jit(jax.vmap(lambda draw: jax.random.normal(draw, (3,))))(of_steps(branch, np.arange(60))))
    for step in range(60):
        weights = weights + rate * X.T @ (y - X @ (weights + 0.1 * noise[step]))
    assert np.allclose(weights_of(result), weights, rtol=1e-9) and result.message == "all steps were taken"
    rows, draws = (jax.random.key_data(of_steps(start, np.arange(60))) for start in (key, branch))
    assert len(np.unique(np.concatenate([rows, draws]), axis=0)) == 120         # none is used twice
    still = fit(shaken, data, optimiser=optax.sgd(0.0), steps=60, key=key)
    assert len(np.unique(still.history.objective)) == 61 and not still.converged
    with pytest.raises(ValueError, match="key must be .* since the objective of Shaken draws samples"):
        fit(shaken, data, optimiser=ADAM)
    with pytest.raises(ValueError, match="takes noise for curvature"):
        fit(shaken, data, key=key)


def test_what_needs_all_rows_refuses_a_part_of_them(line, data):
    class Needy(Line):
        needs_all_rows = True

    needy = Needy(line.weights, line.likelihood)
    assert fit(needy, data, optimiser=ADAM, steps=3).steps == 3
    for rows, settings in ((data, dict(batch_size=10, key=jax.random.key(0))), (in_batches(data, 20), dict(num_data=200))):
        with pytest.raises(ValueError, match="Needy needs all data at once"):
            fit(needy, rows, optimiser=ADAM, **settings)


def test_a_batch_may_be_numbers_of_rows_and_values(tmp_path):
    "Each row has a mean of its own: row numbers must come as integers, from memory, disk and batches."
    class Means(eqx.Module):
        means: Parameter

        def objective(self, rows, Y, *, num_data=None):
            assert jnp.issubdtype(rows.dtype, jnp.integer) and Y.shape == (*rows.shape, 2)
            return -jnp.sum((unwrap(self.means)[rows] - Y) ** 2) * (1 if num_data is None else num_data / len(rows))

    rows, Y = np.arange(12), np.random.default_rng(0).normal(size=(12, 2))
    np.save(tmp_path / "rows.npy", rows), np.save(tmp_path / "Y.npy", Y)
    files = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("rows", "Y"))
    start = Means(free(np.zeros((12, 2))))
    assert np.allclose(fit(start, (rows, Y)).approx.means.value, Y, atol=1e-4)
    settings = dict(optimiser=ADAM, steps=400)
    drawn = fit(start, (rows, Y), batch_size=4, key=jax.random.key(0), **settings).approx.means.value
    assert np.array_equal(drawn, fit(start, files, batch_size=4, key=jax.random.key(0), **settings).approx.means.value)
    listed = fit(start, [(rows[i::3], Y[i::3]) for i in range(3)], num_data=12, **settings).approx.means.value
    assert np.allclose(drawn, Y, atol=0.3) and np.allclose(listed, Y, atol=0.3)


def test_lbfgs_begins_anew_where_it_stopped_on_a_slope():
    "From starts far from the data's own scale it ended next to walls, or called what a bad memory gained settled."
    random = np.random.default_rng(0)
    X = np.sort(random.uniform(0, 6, (30, 1)), 0)
    y = np.sin(2 * X[:, 0]) + 0.2 * random.normal(size=30)
    for lengthscale in np.geomspace(20, 100, 12)[:6]:
        result = fit(Exact(GP(RBF(lengthscale), Gaussian())), (X, y), progress=False)
        v, restore = ravel_pytree(partition(result.approx)[0])
        loss = lambda v: negative_objective(restore(v), partition(result.approx)[1], (X, y), None)
        slope = np.abs(jax.grad(loss)(v) * np.maximum(1, np.abs(v))).max()
        assert result.converged and slope < 1e-3 * abs(result.history.objective[-1]), lengthscale


def test_lbfgs_never_calls_a_wall_a_result(data):
    "Uphill to the edge of what is finite: no NaN, no 'converged', and the best point that was seen."
    class Edge(eqx.Module):
        v: Parameter
        scale: float

        def objective(self, X, y, *, num_data=None):
            v = unwrap(self.v)
            return self.scale * jnp.where(v < 3, v, jnp.nan)

    for scale in (1e-8, 1.0, 1e8):
        result = fit(Edge(free(0.0), scale), data)
        assert not result.converged and 0 < result.approx.v.value < 3 and np.isfinite(result.history.objective).all()
        assert result.message.startswith(("the line search found no better point", "the objective is not finite next to"))
        assert result.history.objective[-1] == result.history.objective.max()


@pytest.mark.parametrize("unit", [1.0, 100.0, 1000.0])
def test_a_small_noise_variance_is_found_and_not_lost_in_any_unit(unit):
    "Without a bound it gets lost (163.4, 1e-149); with one at ten below a large v, the signal does (50.3, 8e-3)."
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 4))
    X = (X - X.mean(0)) / X.std(0)
    y = np.exp(1.5 * X[:, 0]) * (1 + 0.1 * X[:, 1])
    y = (y - y.mean()) / y.std() + 0.005 * rng.normal(size=80)
    start = Exact(GP(Matern52(unit * np.ones(4), unit**2), Gaussian(0.1 * unit**2)))
    result = fit(start, (unit * X, unit * y), progress=False)
    assert result.history.objective[-1] + 80 * np.log(unit) > 210
    assert 1e-6 < result.approx.model.likelihood.variance.value / unit**2 < 1e-4


@pytest.mark.parametrize("outlier", [1e4, 1e8, 1e12])
def test_an_outlier_gives_no_nan_and_no_false_claim(regression, outlier):
    X, y = map(np.array, regression)
    y[3] = outlier
    result = fit(Exact(GP(RBF(), Gaussian(0.01))), (X, y))
    leaves = jax.tree.leaves(partition(result.approx)[0])
    assert np.isfinite(leaves).all() and np.isfinite(result.history.objective).all()
    assert result.history.objective[-1] == result.history.objective.max() > result.history.objective[0]
    if result.message == "the gradient vanished":                               # in units of the parameters, not of one
        trainable, rest = partition(result.approx)
        _, slope = value_and_slope(trainable, rest, (X, y))
        assert all(np.abs(g * x) < 1e-6 for g, x in zip(*map(jax.tree.leaves, (slope, trainable))))


def test_two_starts_make_a_better_end_than_one(data):
    find = lambda **settings: fit(Hills(positive(np.exp(-2.0))), data, key=jax.random.key(1), progress=False, **settings)
    one, several = find(), find(restarts=12)
    assert one.restarts is None and np.isclose(np.log(one.approx.model.value), -1.675, atol=0.01)      # the lower of two hills
    assert len(several.restarts) == 12 and np.isclose(several.restarts[0], one.history.objective[-1])
    assert several.history.objective[-1] == several.restarts.max() > several.restarts.min() + 3
    assert np.isclose(np.log(several.approx.model.value), 2.214, atol=0.01)
    assert "the best of 12 starts, which ended between" in repr(several) and "starts" not in repr(one)
    assert np.array_equal(find(restarts=12).restarts, several.restarts)


def test_the_best_of_several_starts_goes_on_until_a_ridge_is_climbed(data):
    "Beside a large constant a step along the ridge gains less than the tolerance asks for."
    class Ridge(eqx.Module):
        model: Parameter

        def objective(self, X, y, *, num_data=None):
            a, b = jnp.log(unwrap(self.model))
            return 1e4 - 100 * (b - a**2) ** 2 - (1 - a) ** 2               # Rosenbrock's valley, upside down

    ridge = Ridge(positive(np.exp([-1.2, 1.0])))
    settle = lambda **settings: fit(ridge, data, progress=False, **settings)
    once, several = settle(tolerance=1e-6), settle(tolerance=1e-6, restarts=2, key=jax.random.key(0))
    assert once.converged and several.converged and several.history.objective[-1] == several.restarts.max() > once.history.objective[-1]
    assert 1e4 - several.restarts.max() < 1e-4 < 1e-2 < 1e4 - once.history.objective[-1]
    assert len(several.history.objective) == len(several.history.seconds) == several.steps + 1 and np.all(np.diff(several.history.seconds) >= 0)
    assert settle(tolerance=1e-6, restarts=2, key=jax.random.key(0), steps=once.steps).steps <= once.steps


def test_a_start_that_fails_does_not_end_the_run(data):
    fails = lambda start: fit(Hills(positive(np.exp(start)), edge=-2.5), data, key=jax.random.key(1), restarts=6, progress=False)
    result = fails(-2.0)
    failed = np.isnan(result.restarts)
    assert 0 < failed.sum() < 6 and result.history.objective[-1] == np.nanmax(result.restarts)
    assert f"but for {failed.sum()} that failed" in repr(result)
    with pytest.raises(FloatingPointError, match="not finite after 0 steps"):
        fails(-60.0)


def test_a_callback_of_several_starts_ends_them_all_and_its_errors_are_its_own(data):
    settings = dict(restarts=3, key=jax.random.key(0), every=1, progress=False)
    hills, seen = Hills(positive(np.exp(-2.0))), []

    def enough(approx, steps, seconds):
        seen.append(steps)
        return seen.count(0) == 2 and steps == 2

    ended = fit(hills, data, callback=enough, **settings)
    assert len(ended.restarts) == 2 == seen.count(0) and ended.history.objective[-1] == ended.restarts.max()

    def fails(approx, steps, seconds):
        raise FloatingPointError("mine")

    with pytest.raises(FloatingPointError, match="mine"):
        fit(hills, data, callback=fails, **settings)


@pytest.mark.parametrize("optimiser", ["lbfgs", ADAM], ids=["scipy", "adam"])
def test_restarts_of_a_noisy_fit_and_of_one_that_is_interrupted(data, optimiser):
    def second(approx, steps, seconds):
        calls.append(steps)
        if calls.count(0) == 2 and steps:
            raise KeyboardInterrupt

    calls, batches = [], dict(batch_size=20) if optimiser is ADAM else {}
    settings = dict(optimiser=optimiser, steps=40, restarts=3, key=jax.random.key(0), progress=False, **batches)
    whole = fit(Hills(positive(np.exp(-2.0))), data, **settings)
    assert np.isfinite(whole.restarts).all() and len(whole.restarts) == 3
    held = fit(Hills(positive(np.exp(-2.0))), data, callback=second, every=5, **settings)
    first = held.restarts[0], whole.restarts[0]                      # of one the best has gone on, perhaps by a rounding
    assert len(held.restarts) == 2 and np.isclose(*first, rtol=1e-12) and calls.count(0) == 2


def test_another_start_moves_what_a_model_is_made_of():
    import gp_thesis as gpt

    rng, prior = np.random.default_rng(0), dist.LogNormal(5.0, 0.1)
    X = rng.uniform(size=(50, 2))
    kernel = RBF(np.full(400, 2.0), freeze(positive(3.0))) * gpt.Matern32(positive(1.0, prior=prior))
    given = gpt.SVGP(GP(kernel, Gaussian(0.5), gpt.ConstantMean(0.3)), gpt.InducingPoints(X[:20] + 0.0))
    ends = eqx.tree_at(lambda a: a.model.kernel.kernels[0].lengthscale, given, positive(np.full(400, 8.0)))
    ends = eqx.tree_at(lambda a: a.model.likelihood.variance, ends, positive(1e-300))
    other = fitting.another_start(given, ends, rng, 0.5, X)
    old, new = unwrap(given.model), unwrap(other.model)
    logs = np.log(new.kernel.kernels[0].lengthscale)
    assert np.isclose(logs.mean(), np.log(8.0), atol=0.08) and np.isclose(logs.std(), 0.5, atol=0.05)
    assert new.kernel.kernels[0].variance == old.kernel.kernels[0].variance and np.isclose(np.log(new.kernel.kernels[1].lengthscale), 5.0, atol=0.4)
    assert 0.005 / 8 < new.likelihood.variance < 0.005 * 8 and new.mean.value == old.mean.value        # [·] in @eq-restart
    Z = np.asarray(other.inducing.Z.value)
    assert not np.isclose(Z, X[:20]).all(axis=1).all() and (Z >= X.min(0)).all() and (Z <= X.max(0)).all()
    assert jax.tree.all(jax.tree.map(np.array_equal, other.q, given.q))
    lengthscales = lambda approx: unwrap(approx.model.kernel.kernels[0].lengthscale)
    for second, expected in ((fitting.as_signal(given), 2.0), (fitting.as_signal(given, X), np.median(X.std(0)) * np.sqrt(2))):
        assert np.isclose(second.model.likelihood.variance.value, 0.05) and np.allclose(lengthscales(second), expected)
    each = fitting.as_signal(Exact(GP(RBF([1.0, 1.0]), Gaussian(0.5))), X * [1.0, 0.0])             # a column that is constant
    assert np.allclose(unwrap(each.model.kernel.lengthscale), [X[:, 0].std() * np.sqrt(2), 1.0])
    smooth, before = fitting.as_signal(given, X, smooth=5.0), fitting.as_signal(given, X)
    assert np.allclose(lengthscales(smooth), 5 * lengthscales(before))
    assert [float(k.variance.value) for k in smooth.model.kernel.kernels] == pytest.approx([3.0, 25.0])      # the first is frozen
    assert smooth.model.likelihood.variance.value == before.model.likelihood.variance.value
    single = fitting.another_start(cast(given, jnp.float32), cast(ends, jnp.float32), rng, 0.5, X)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(eqx.filter(single, eqx.is_inexact_array)))
    assert jax.tree.structure(single) == jax.tree.structure(given)


def test_no_start_makes_up_outputs():
    import gp_thesis as gpt

    rng = np.random.default_rng(0)
    X = np.stack([rng.uniform(0, 5, 30), np.arange(30) % 2], axis=1)             # an input, and the number of an output
    given = gpt.VFE(GP(RBF(active_dims=[0]) * gpt.Coregion(2, active_dims=[1]), Gaussian()), gpt.InducingPoints(X[:8]))
    Z = np.asarray(fitting.another_start(given, given, rng, 0.5, X).inducing.Z)
    assert np.array_equal(Z[:, 1], X[:8, 1]) and not np.isclose(Z[:, 0], X[:8, 0]).all()


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_a_second_start_finds_the_function_in_any_unit(unit):
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 10, (40, 2))
    y = np.sin(X[:, 0]) + 0.05 * rng.normal(size=40)
    start = Exact(GP(RBF([3.0, 3.0]), Gaussian(1.0)))
    ends = fit(start, (unit * X, y), restarts=2, key=jax.random.key(0), progress=False).restarts
    assert ends[1] > 20 and (unit == 1.0) == (ends[0] > 20)         # -40.5 where all is taken for noise


def test_each_of_three_starts_finds_the_smooth_function():
    rng = np.random.default_rng(27)
    X = 1.05 * rng.uniform(-1.7, 1.7, (60, 4))
    y = np.exp(X[:, 0] / 1.3125) + X[:, 1] * X[:, 2] / 2.205 + 0.1728 * X[:, 3] ** 3
    y = (y - y.mean()) / y.std() + 0.003 * rng.normal(size=60)
    ends = fit(Exact(GP(RBF(np.ones(4)), Gaussian(0.1))), (X, y), restarts=3, key=jax.random.key(0), progress=False).restarts
    assert ends.min() > 60                                           # without a bound the first two have a short lengthscale, and at most 50


class Hills(eqx.Module):
    "In x = log θ a low hill at -1.675 and a high one at 2.214, and nothing left of an edge."
    model: Parameter
    edge: float = -np.inf

    def objective(self, X, y, *, num_data=None):
        x = jnp.log(unwrap(self.model))
        return jnp.where(x > self.edge, x - (x**2 - 4) ** 2 / 8, jnp.nan)


STALLS = {
    "edge": lambda v: jnp.where(v < 3, v, jnp.nan),
    "no gradient": lambda v: 3 * v - v**2 - 1e-3 * jnp.sqrt(jnp.maximum(1 - v, 0)),    # NaN from one on, where the value is finite
    "too large": lambda v: 1e300 * v,
}


@pytest.mark.parametrize("name, optimiser", [(name, "lbfgs") for name in STALLS] + [(name, optax.lbfgs()) for name in ("edge", "too large")],
                         ids=lambda x: x if isinstance(x, str) else "optax")
def test_who_stands_still_on_a_slope_has_not_converged(data, name, optimiser):
    class Stalls(eqx.Module):
        v: Parameter

        def objective(self, X, y, *, num_data=None):
            return STALLS[name](unwrap(self.v))

    result = fit(Stalls(free(0.0)), data, optimiser=optimiser, steps=100, progress=False)
    assert not result.converged and np.isfinite(result.approx.v.value) and np.isfinite(result.history.objective).all()
    with pytest.raises(FloatingPointError, match="not finite after 0 steps"):
        fit(Stalls(free(4.0 if name != "too large" else 1e200)), data, optimiser=optimiser, progress=False)


@pytest.mark.parametrize("optimiser", ["lbfgs", optax.lbfgs()], ids=["scipy", "optax"])
def test_numbers_near_the_end_of_their_range(regression, optimiser):
    X, y = map(np.array, regression)
    result = fit(Exact(GP(RBF(), Gaussian(0.01))), (X, 1e150 * y), optimiser=optimiser, steps=30, progress=False)
    assert not result.converged and np.isfinite(jax.tree.leaves(partition(result.approx)[0])).all()
    assert np.isfinite(result.history.objective).all()


def test_single_precision_that_is_used_up_says_so(line, data):
    for dtype in (jnp.float32, jnp.float64):
        result = fit(cast(line, dtype), tuple(a.astype(dtype) for a in data), progress=False)
        assert result.steps < 1000 and ("float64: jax.config.update" in result.message) == (dtype == jnp.float32)
    assert "float64" not in fit(cast(line, jnp.float32), tuple(a.astype(jnp.float32) for a in data), steps=2, progress=False).message


DEVICES = """
import jax; jax.config.update("jax_enable_x64", True)
import numpy as np, optax, pytest, sys
sys.path.insert(0, {tests!r})
from test_fitting import Gaussian, Line, fit, free, in_batches

assert len(jax.devices()) == 2
random = np.random.default_rng(0)
X = random.normal(size=(200, 3)); y = X @ [1.0, -2.0, 0.5] + 0.5 * random.normal(size=200)
for name, array in (("X", X), ("y", y)):
    np.save({folder!r} + "/" + name + ".npy", array)
mapped = tuple(np.load({folder!r} + "/" + name + ".npy", mmap_mode="r") for name in "Xy")
line, key, adam = Line(free(np.zeros(3)), Gaussian(1.0)), jax.random.key(0), optax.adam(0.05)
shapes = set()
for data, settings in [((X, y), dict()), ((X, y), dict(optimiser=adam, batch_size=20, key=key)),
                       (in_batches((X, y), 40), dict(optimiser=adam, num_data=200))]:
    one, two = (fit(line, data, steps=70, devices=devices, **settings) for devices in (None, jax.devices()))
    assert one.steps == two.steps and np.allclose(one.history.objective, two.history.objective, rtol=1e-12)
    assert np.allclose(one.approx.weights.value, two.approx.weights.value, rtol=1e-9)
for data, settings in [((X[:199], y[:199]), dict()), ((X, y), dict(optimiser=adam, batch_size=21, key=key)),
                       (mapped, dict(optimiser=adam, batch_size=21, key=key)), (in_batches((X, y), 25), dict(optimiser=adam, num_data=200))]:
    with pytest.raises(ValueError, match="rows of a batch must divide evenly among the devices, got .* rows for 2 devices"):
        fit(line, data, devices=jax.devices(), **settings)

class Spied(Line):
    def objective(self, X, y, *, num_data=None):
        jax.debug.inspect_array_sharding(X, callback=lambda sharding: shapes.add(sharding.shard_shape(X.shape)))
        return super().objective(X, y, num_data=num_data)

fit(Spied(line.weights, line.likelihood), (X, y), optimiser=adam, steps=3, batch_size=20, key=key, devices=jax.devices())
assert shapes == {{(10, 3)}}, shapes
print("equal")
"""


def test_several_devices_share_the_rows_and_agree_with_one_to_rounding(tmp_path):
    import os
    import subprocess
    import sys
    from pathlib import Path

    code = DEVICES.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip().endswith("equal"), done.stdout + done.stderr


@pytest.mark.parametrize("change,words", [
    (dict(data=np.zeros((5, 1))), r"data must be a tuple of arrays .* such as \(X, y\), got ndarray"),
    (dict(data=(1, 2, 3)), r"must have the same number of rows"),
    (dict(data=[(np.zeros((5, 3)), np.zeros(5))]), r"an iterable of batches needs num_data"),
    (dict(data=(np.zeros((5, 3)), list("abcde"))), r"data must be arrays of numbers"),
    (dict(data=(np.zeros((5, 3)), np.zeros(4))), r"same number of rows, got the shapes \[\(5, 3\), \(4,\)\]"),
    (dict(data=(np.zeros((0, 3)), np.zeros(0))), r"data must have at least one row"),
    (dict(data=(np.full((5, 3), np.nan), np.zeros(5))), r"data\[0\] must be finite.*in 5 rows"),
    (dict(data=(np.zeros((5, 3)), np.full(5, np.inf))), r"data\[1\] must be finite"),
    (dict(optimiser="newton"), r"optimiser must be 'lbfgs' or an optax optimiser .* got 'newton'"),
    (dict(optimiser=optax.adam), r"optimiser must be"),
    (dict(steps=0), r"steps must be a positive integer, got 0"),
    (dict(steps=1e3), r"steps must be a positive integer, got 1000.0"),
    (dict(steps=True), r"steps must be a positive integer"),
    (dict(tolerance=-1.0), r"tolerance must be"),
    (dict(callback=3), r"callback must be a function of an approximation, steps and seconds, got 3"),
    (dict(every=0), r"every must be a positive integer, got 0"),
    (dict(devices=[0]), r"devices must be a list such as jax.devices\(\), got \[0\]"),
    (dict(devices=[]), r"devices must be a list"),
    (dict(num_data=0), r"num_data must be a positive integer, the number of rows .* got 0"),
    (dict(data=5, num_data=5, optimiser=QUICK), r"data must be an iterable of batches .* got int"),
    (dict(data=[], num_data=5, optimiser=QUICK), r"data must be an iterable with at least one batch, got none"),
    (dict(data=[np.zeros((5, 3))], num_data=5, optimiser=QUICK), r"data must be an iterable of batches .* but holds a ndarray"),
    (dict(data=[(np.zeros((5, 3)), np.zeros(4))], num_data=5, optimiser=QUICK), r"same number of rows, got the shapes \[\(5, 3\), \(4,\)\]"),
    (dict(data=[(np.zeros((5, 3)), np.zeros(5))], num_data=5), r"optimiser='lbfgs' takes noise for curvature"),
    (dict(data=[(np.zeros((5, 3)), np.zeros(5))], num_data=5, optimiser=QUICK, batch_size=5), r"batch_size must be None when num_data"),
    (dict(data=[(np.zeros((5, 3)), np.zeros(5)), (np.zeros((5, 2)), np.zeros(5))], num_data=5, optimiser=QUICK),
     r"batches must all have the shapes of the first, \[\(5, 3\), \(5,\)\], got \[\(5, 2\), \(5,\)\]"),
    (dict(data=[(np.zeros((n, 3)), np.zeros(n)) for n in (5, 4, 5)], num_data=5, optimiser=QUICK), r"only the last batch of an epoch may be shorter"),
    (dict(data=[(np.zeros((n, 3)), np.zeros(n)) for n in (4, 5)], num_data=5, optimiser=QUICK), r"batches must all have the shapes of the first"),
    (dict(batch_size=500), r"batch_size must be an integer from 1 to 200, .* got 500"),
    (dict(batch_size=0), r"batch_size must be an integer"),
    (dict(batch_size=50, key=jax.random.key(0)), r"optimiser='lbfgs' takes noise for curvature"),
    (dict(batch_size=50, optimiser=QUICK), r"key must be a JAX random key .* got None"),
    (dict(batch_size=50, optimiser=QUICK, key=3), r"key must be a JAX random key .* got 3"),
    (dict(approx=freeze(Line(free(np.zeros(3)), Gaussian()))), r"approx must have a parameter that is not frozen"),
    (dict(approx=RBF()), r"approx must be an approximation, a module with an objective\(X, y\), got RBF"),
    (dict(resume=3), r"resume must be a result of fit, got 3"),
    (dict(restarts=0), r"restarts must be a positive integer, got 0"),
    (dict(restarts=2), r"key must be a JAX random key .* to draw the starts of restarts=2 with, got None"),
    (dict(restarts=2, key=jax.random.key(0), optimiser=QUICK, checkpoint="folder"), r"restarts begin anew: they go with neither resume nor checkpoint"),
    (dict(restarts=2, key=jax.random.key(0), optimiser=QUICK, data=iter([(np.zeros((5, 3)), np.zeros(5))] * 2), num_data=5), r"restarts begin anew"),
])
def test_mistakes_are_named_before_anything_is_compiled(line, data, change, words):
    class Untouchable(Line):
        def objective(self, X, y, *, num_data=None):
            raise AssertionError("the objective was traced")

    settings = dict(approx=Untouchable(line.weights, line.likelihood), data=data) | change
    with pytest.raises(ValueError, match=words):
        fit(settings.pop("approx"), settings.pop("data"), **settings)


def test_many_fits_are_steps_in_a_vmap_and_fit_itself_refuses(regression):
    X, y = regression
    optimiser, start = optax.adam(0.1), lambda lengthscale: Exact(GP(RBF(lengthscale), Gaussian(0.1)))

    def steps(lengthscale):
        trainable, rest = partition(start(lengthscale))
        loss = lambda trainable: -eqx.combine(trainable, rest).objective(X, y)

        def step(state, _):
            trainable, memory = state
            updates, memory = optimiser.update(jax.grad(loss)(trainable), memory)
            return (optax.apply_updates(trainable, updates), memory), None

        (trainable, _), _ = jax.lax.scan(step, (trainable, optimiser.init(trainable)), length=20)
        return -loss(trainable)

    lengthscales = np.array([0.5, 2.0])
    ends = [fit(start(each), (X, y), optimiser=optimiser, steps=20, progress=False).history.objective[-1] for each in lengthscales]
    assert np.allclose(jax.jit(jax.vmap(steps))(lengthscales), ends)
    for inside in (lambda: jax.vmap(lambda each: fit(start(each), (X, y)).history)(lengthscales), lambda: jax.jit(lambda y: fit(start(1.0), (X, y)).history)(y)):
        with pytest.raises(ValueError, match="fit is a loop in Python and cannot be part of jax.jit, jax.vmap or jax.grad"):
            inside()


def test_values_are_checked_against_the_model_before_compilation(regression):
    X, y = regression
    approx = Exact(GP(RBF(), Gaussian()))
    with pytest.raises(ValueError, match=r"(y must hold finite|data\[1\] must be finite)"):
        fit(approx, (X, y.at[3].set(jnp.nan)))
    with pytest.raises(ValueError, match=r"40.*39"):
        fit(approx, (X, y[:-1]))


def test_the_exact_objective_refuses_minibatches(regression):
    with pytest.raises(ValueError, match="all data at once"):
        fit(Exact(GP(RBF(), Gaussian())), regression, optimiser=QUICK, batch_size=10, key=jax.random.key(0))
