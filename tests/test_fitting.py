"`fit` against closed forms, SciPy and optax on their own, and every way it can be misused."

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize

from gp_thesis.exact import GP, Exact
from gp_thesis.fitting import CHUNK, Fit, fit, minibatch, negative_objective
from gp_thesis.kernels import RBF
from gp_thesis.likelihoods import Bernoulli, Gaussian
from gp_thesis.parameters import Parameter, cast, free, freeze, partition, positive, unwrap

OPTIMISERS = {"scipy": "lbfgs", "optax": optax.lbfgs(), "adam": optax.adam(0.05)}


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
    adam = optax.adam(0.01)
    result = fit(line, data, optimiser=adam, steps=steps)
    assert result.steps == steps and len(result.history.objective) == steps + 1
    assert not result.converged and result.message == "all steps were taken"
    trainable, rest = partition(line)
    state = adam.init(trainable)
    for _ in range(steps):                                    # the loop that everyone writes first
        gradient = jax.grad(negative_objective)(trainable, rest, data)
        change, state = adam.update(gradient, state, trainable)
        trainable = optax.apply_updates(trainable, change)
    assert np.allclose(weights_of(result), unwrap(eqx.combine(trainable, rest)).weights, rtol=1e-10)


def test_lbfgs_takes_scipys_steps(regression):
    approx = Exact(GP(RBF(), Gaussian()))
    trainable, rest = partition(approx)
    flat, unravel = ravel_pytree(trainable)
    path = []
    value_and_grad = jax.jit(jax.value_and_grad(lambda v: -eqx.combine(unravel(v), rest).objective(*regression)))
    alone = minimize(lambda v: [np.asarray(a, float) for a in value_and_grad(v)], np.asarray(flat), jac=True, method="L-BFGS-B",
                     callback=lambda v: path.append(v), options=dict(ftol=1e-9, gtol=1e-9))
    result = fit(approx, regression)
    assert result.steps == alone.nit == len(path) and result.converged
    assert np.allclose(ravel_pytree(partition(result.approx)[0])[0], alone.x, rtol=1e-6)
    assert np.isclose(result.history.objective[-1], -alone.fun)
    assert np.linalg.norm(jax.grad(negative_objective)(partition(result.approx)[0], rest, regression).model.kernel.lengthscale.unconstrained) < 1e-2


@pytest.mark.parametrize("name", OPTIMISERS)
def test_all_optimisers_reach_the_same_log_marginal_likelihood(regression, name):
    approx = Exact(GP(RBF(), Gaussian(0.5)))
    best = fit(approx, regression, tolerance=1e-13).history.objective[-1]
    assert abs(fit(approx, regression, optimiser=OPTIMISERS[name], steps=1500).history.objective[-1] - best) < 1e-5


@pytest.mark.parametrize("name", OPTIMISERS)
def test_frozen_parameters_do_not_move(regression, name):
    approx = Exact(GP(RBF(freeze(positive(0.8)), 2.0), Gaussian(0.5)))
    fitted = fit(approx, regression, optimiser=OPTIMISERS[name], steps=60).approx.model
    assert np.array_equal(unwrap(fitted.kernel.lengthscale), unwrap(approx.model.kernel.lengthscale))
    assert not np.isclose(unwrap(fitted.kernel.variance), 2.0) and not np.isclose(unwrap(fitted.likelihood.variance), 0.5)
    assert jax.tree.structure(fitted) == jax.tree.structure(approx.model)       # frozen still, and of the same make


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_prior_on_the_weights_makes_ridge_regression(data, name):
    X, y = map(np.asarray, data)
    ridge = Line(free(np.zeros(3), prior=dist.Normal(0.0, 0.1)), Gaussian(freeze(positive(0.25))))
    closed = np.linalg.solve(X.T @ X / 0.25 + np.eye(3) / 0.01, X.T @ y / 0.25)
    result = fit(ridge, data, optimiser=OPTIMISERS[name], steps=3000)
    assert np.allclose(weights_of(result), closed, atol=1e-4)
    prior = dist.Normal(0.0, 0.1).log_prob(weights_of(result)).sum()
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
    X, y = data[0][:4], data[1][:4]
    gradient = lambda *batch: ravel_pytree(jax.grad(negative_objective)(trainable, rest, batch, 4))[0]
    full = ravel_pytree(jax.grad(negative_objective)(trainable, rest, (X, y)))[0]
    rows = [jnp.array([i, j]) for i in range(4) for j in range(4)]
    assert np.allclose(np.mean([gradient(X[r], y[r]) for r in rows], 0), full, rtol=1e-12)


def test_minibatches_are_uniform_keep_rows_together_and_depend_on_key_and_step_only():
    X, y = jnp.arange(10.0)[:, None], jnp.arange(10.0) * 3
    draw = jax.jit(lambda key, step: minibatch(key, step, (X, y), 7))
    counts = np.zeros(10)
    for step in range(600):
        Xb, yb = draw(jax.random.key(0), step)
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


@pytest.mark.parametrize("name", OPTIMISERS)
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


def test_the_second_fit_compiles_nothing(line, data):
    for optimiser in ("lbfgs", optax.adam(0.01)):
        first = fit(line, data, optimiser=optimiser, steps=60)
        other = Line(free(np.ones(3)), Gaussian(0.3))
        assert fit(other, (2 * data[0], data[1]), optimiser=optimiser, steps=90).compile_seconds < max(0.1, 0.5 * first.compile_seconds)


@pytest.mark.parametrize("optimiser", [
    optax.sgd(1e-3, momentum=0.9), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.05)), optax.adadelta(1.0),
    optax.chain(optax.adam(0.05), optax.contrib.reduce_on_plateau(patience=5)),
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


@pytest.mark.parametrize("optimiser", ["lbfgs", optax.adam(0.01)], ids=["scipy", "adam"])
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
    (dict(optimiser=optax.adam(0.01), steps=120, every=30), [0, 30, 60, 90, 120]),
    (dict(optimiser=optax.adam(0.01), steps=130, every=64), [0, 64, 128, 130]),
    (dict(optimiser=optax.adam(0.01), steps=3, every=1), [0, 1, 2, 3]),
    (dict(optimiser=optax.adam(0.01), steps=70), [0, 70]),
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
    assert seconds[0] == pytest.approx(0.0, abs=1e-3) and np.all(np.diff(seconds) > 0)
    assert np.array_equal(seen[-1][0].weights.value, result.approx.weights.value)


@pytest.mark.parametrize("optimiser", ["lbfgs", optax.lbfgs()], ids=["scipy", "optax"])
def test_a_fit_that_converges_shows_its_last_step_once(line, data, optimiser):
    callback, seen = recorder()
    result = fit(line, data, optimiser=optimiser, callback=callback, every=1)
    assert result.converged and [steps for _, steps, _ in seen] == list(range(result.steps + 1))


def test_looking_on_changes_nothing(line, data):
    settings = dict(optimiser=optax.adam(0.05), steps=110, batch_size=20, key=jax.random.key(0))
    alone = fit(line, data, **settings)
    for every in (1, 7, CHUNK, 60):
        watched = fit(line, data, callback=lambda *_: None, every=every, **settings)
        assert np.array_equal(alone.history.objective, watched.history.objective)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_callbacks_own_time_and_compilation_are_not_training(line, data, name):
    import time

    seen = []
    fit(line, data, optimiser=OPTIMISERS[name], steps=4)                        # compiles what is small and compiled anywhere
    result = fit(line, data, optimiser=OPTIMISERS[name], steps=4, every=1,
                 callback=lambda approx, steps, seconds: (seen.append(seconds), time.sleep(0.5))[:0])
    assert len(seen) == 5 and max(seen) < 0.5 and result.history.seconds[-1] < 0.5


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
        assert fit(line, data, optimiser=optax.adam(0.01), steps=5, callback=lambda *_: answer).steps == 5

    def fails(approx, steps, seconds):
        raise KeyError("mine")

    for optimiser in OPTIMISERS.values():
        with pytest.raises(KeyError, match="mine"):
            fit(line, data, optimiser=optimiser, callback=fails)


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


STREAM = dict(optimiser=optax.adam(0.05), key=jax.random.key(3))


@pytest.mark.parametrize("steps,batch_size,every", [(1, 7, 500), (CHUNK - 1, 20, 500), (CHUNK, 20, 500), (130, 200, 30), (120, 1, 1)])
def test_rows_on_disk_are_the_rows_in_memory(line, data, mapped, steps, batch_size, every):
    settings = STREAM | dict(steps=steps, batch_size=batch_size)
    held = fit(line, data, **settings)
    for streamed in (mapped, (mapped[0], data[1]), (np.asarray(data[0]), mapped[1])):
        result = fit(line, streamed, callback=lambda *_: None, every=every, **settings)
        assert np.array_equal(result.history.objective, held.history.objective)
        assert np.array_equal(weights_of(result), weights_of(held)) and result.message == held.message


def test_mapped_arrays_are_read_a_stack_at_a_time_and_converted(line, data, mapped, tmp_path, monkeypatch):
    from gp_thesis import fitting

    single = cast(line, jnp.float32)
    np.save(tmp_path / "f.npy", np.asarray(mapped[0], np.float32)), np.save(tmp_path / "i.npy", np.arange(200) % 2)
    X, y = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "fi")
    with_floats = fit(single, (X, np.asarray(y, float)), steps=70, batch_size=10, **STREAM)
    assert np.array_equal(with_floats.history.objective, fit(single, (X, y), steps=70, batch_size=10, **STREAM).history.objective)
    taken = []
    stack = fitting._Stream.stack
    monkeypatch.setattr(fitting._Stream, "stack", lambda self, rows, first: (taken.append((first, len(rows[0]))), stack(self, rows, first))[1])
    fit(line, mapped, steps=120, batch_size=10, **STREAM)
    assert taken == [(0, 500), (50, 500), (100, 500)]
    monkeypatch.setattr(fitting, "STACK", 7 * 10 * 4 * 8)                       # seven batches of ten rows of four numbers
    taken.clear()
    fit(line, mapped, steps=20, batch_size=10, **STREAM)
    assert taken == [(0, 70), (7, 70), (14, 70)]


def by_hand(line, batches, optimiser, num_data):
    "The loop that everyone writes first: objectives at each batch, and the weights before the last."
    trainable, rest = partition(line)
    state, objectives = optimiser.init(trainable), []
    for X, y in batches:
        before = trainable
        value, gradient = jax.value_and_grad(negative_objective)(trainable, rest, (X, y), num_data)
        objectives.append(-value)
        change, state = optimiser.update(gradient, state, trainable)
        trainable = optax.apply_updates(trainable, change)
    return np.array(objectives), unwrap(eqx.combine(before, rest)).weights


def in_batches(data, size):
    return [(data[0][i:i + size], data[1][i:i + size]) for i in range(0, len(data[0]), size)]


def test_an_iterable_is_started_again_and_its_shorter_last_batch_left_out(line, data):
    batches, adam = in_batches(data, 60), optax.adam(0.05)                      # 60, 60, 60, 20
    order = (batches[:3] * 3)[:8]
    result = fit(line, batches, optimiser=adam, steps=7, num_data=200)
    objectives, weights = by_hand(line, order, adam, 200)
    assert result.steps == 7 and np.allclose(result.history.objective, objectives, rtol=1e-12)
    assert np.allclose(weights_of(result), weights, rtol=1e-12)

    class Fresh:
        "Each epoch in another order."
        def __init__(self):
            self.random = np.random.default_rng(0)

        def __iter__(self):
            return iter(in_batches([np.asarray(a)[self.random.permutation(200)] for a in data], 50))

    source = Fresh()
    expected = [batch for _ in range(16) for batch in source][:61]
    result = fit(line, Fresh(), optimiser=adam, steps=60, num_data=200)
    assert np.allclose(result.history.objective, by_hand(line, expected, adam, 200)[0], rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2])
def test_an_iterator_ends_the_fit_and_its_last_batch_is_evaluated(line, data, count):
    batches, adam = (in_batches(data, 20) * 6)[:count], optax.adam(0.05)
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
    adam = optax.adam(0.05)
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
        fit(line, breaks(), optimiser=optax.adam(0.05), num_data=200)
    assert threading.active_count() == before


class Labelled(eqx.Module):
    "An approximation with a model, whose likelihood knows its labels."
    model: GP
    slope: Parameter

    def objective(self, X, y, *, num_data=None):
        return -jnp.mean((unwrap(self.slope) * X[:, 0] - y) ** 2)


def test_unusable_rows_of_a_stream_are_named_when_they_come(line, data, tmp_path):
    X, y = map(np.array, data)
    X[17, 1] = np.nan
    np.save(tmp_path / "X.npy", X)
    on_disk = np.load(tmp_path / "X.npy", mmap_mode="r")
    with pytest.raises(ValueError, match="X must be finite, got NaN or infinity in .*rows are counted from the first of batch 0,"):
        fit(line, (on_disk, y), steps=500, batch_size=10, **STREAM)
    batches = [(X[20:40], y[20:40])] * 60 + [(X[:20], y[:20])]
    with pytest.raises(ValueError, match=r"X must be finite.*first in row 217 \(rows are counted from the first of batch 50,"):
        fit(line, batches, optimiser=optax.adam(0.1), num_data=200)
    labels = np.where(y > 0, 1.0, 0.0)
    labelled = Labelled(GP(RBF(), Bernoulli()), free(0.0))
    assert fit(labelled, in_batches((X[20:], labels[20:]), 20), optimiser=optax.adam(0.1), steps=20, num_data=180).steps == 20
    labels[25] = 3.0
    with pytest.raises(ValueError, match=r"y must hold .* for the likelihood Bernoulli.*y\[5\] = 3.0"):
        fit(labelled, in_batches((X[20:], labels[20:]), 20), optimiser=optax.adam(0.1), steps=20, num_data=180)


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
for data, settings in [((X, y), dict()), ((X, y), dict(optimiser=adam)), ((X, y), dict(optimiser=adam, batch_size=20, key=key)),
                       (mapped, dict(optimiser=adam, batch_size=20, key=key)), (in_batches((X, y), 40), dict(optimiser=adam, num_data=200))]:
    one, two = (fit(line, data, steps=70, devices=devices, **settings) for devices in (None, jax.devices()))
    assert one.steps == two.steps and np.allclose(one.history.objective, two.history.objective, rtol=1e-12)
    assert np.allclose(one.approx.weights.value, two.approx.weights.value, rtol=1e-9)
    assert fit(two.approx, data, steps=3, **settings).steps <= 3
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
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip().endswith("equal"), done.stdout + done.stderr


@pytest.mark.parametrize("change,words", [
    (dict(data=np.zeros((5, 1))), r"data must be a pair \(X, y\), got ndarray"),
    (dict(data=(1, 2, 3)), r"data must be a pair \(X, y\), got tuple of length 3"),
    (dict(data=(np.zeros((5, 3)), np.zeros(4))), r"y must have shape .*N = 5.* got \(4,\)"),
    (dict(data=(np.zeros(5), np.zeros(5))), r"X must have shape \(N, D\), got \(5,\)"),
    (dict(data=(np.zeros((0, 3)), np.zeros(0))), r"X must have at least one row"),
    (dict(data=(np.full((5, 3), np.nan), np.zeros(5))), r"X must be finite"),
    (dict(data=(np.zeros((5, 3)), np.full(5, np.inf))), r"y must be finite"),
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
    (dict(data=5, num_data=5, optimiser=optax.adam(0.1)), r"data must be an iterable of batches .* got int"),
    (dict(data=[], num_data=5, optimiser=optax.adam(0.1)), r"data must be an iterable with at least one batch, got none"),
    (dict(data=[np.zeros((5, 3))], num_data=5, optimiser=optax.adam(0.1)), r"data must be an iterable of batches .* item of type ndarray"),
    (dict(data=[(np.zeros((5, 3)), np.zeros(4))], num_data=5, optimiser=optax.adam(0.1)), r"y must have shape .*N = 5.* got \(4,\)"),
    (dict(data=[(np.zeros((5, 3)), np.zeros(5))], num_data=5), r"optimiser='lbfgs' takes noise for curvature"),
    (dict(data=[(np.zeros((5, 3)), np.zeros(5))], num_data=5, optimiser=optax.adam(0.1), batch_size=5), r"batch_size must be None when num_data"),
    (dict(data=[(np.zeros((5, 3)), np.zeros(5)), (np.zeros((5, 2)), np.zeros(5))], num_data=5, optimiser=optax.adam(0.1)),
     r"batches must all have the shapes of the first, \[\(5, 3\), \(5,\)\], got \[\(5, 2\), \(5,\)\]"),
    (dict(data=[(np.zeros((n, 3)), np.zeros(n)) for n in (5, 4, 5)], num_data=5, optimiser=optax.adam(0.1)), r"only the last batch of an epoch may be shorter"),
    (dict(data=[(np.zeros((n, 3)), np.zeros(n)) for n in (4, 5)], num_data=5, optimiser=optax.adam(0.1)), r"batches must all have the shapes of the first"),
    (dict(batch_size=500), r"batch_size must be an integer from 1 to 200, .* got 500"),
    (dict(batch_size=0), r"batch_size must be an integer"),
    (dict(batch_size=50), r"optimiser='lbfgs' takes noise for curvature"),
    (dict(batch_size=50, optimiser=optax.adam(0.1)), r"key must be a JAX random key .* got None"),
    (dict(batch_size=50, optimiser=optax.adam(0.1), key=3), r"key must be a JAX random key .* got 3"),
    (dict(approx=freeze(Line(free(np.zeros(3)), Gaussian()))), r"approx must have a parameter that is not frozen"),
    (dict(approx=RBF()), r"approx must be an approximation, a module with an objective\(X, y\), got RBF"),
])
def test_mistakes_are_named_before_anything_is_compiled(line, data, change, words):
    class Untouchable(Line):
        def objective(self, X, y, *, num_data=None):
            raise AssertionError("the objective was traced")

    settings = dict(approx=Untouchable(line.weights, line.likelihood), data=data) | change
    with pytest.raises(ValueError, match=words):
        fit(settings.pop("approx"), settings.pop("data"), **settings)


def test_values_are_checked_against_the_model_before_compilation(regression):
    X, y = regression
    approx = Exact(GP(RBF(), Gaussian()))
    with pytest.raises(ValueError, match=r"y must hold finite real numbers .*y\[3\] = nan"):
        fit(approx, (X, y.at[3].set(jnp.nan)))
    with pytest.raises(ValueError, match="40 and 39"):
        fit(approx, (X, y[:-1]))


def test_the_exact_objective_refuses_minibatches(regression):
    with pytest.raises(ValueError, match="all data at once"):
        fit(Exact(GP(RBF(), Gaussian())), regression, optimiser=optax.adam(0.1), batch_size=10, key=jax.random.key(0))


def test_the_loop_is_at_least_nine_tenths_as_fast_as_a_bare_step(line, data):
    "A loose bound: a bare compiled step called from Python, against the same inside `fit`; the best of three each."
    import time

    adam, key = optax.adam(0.01), jax.random.key(0)
    trainable, rest = partition(line)

    @jax.jit
    def bare_step(trainable, state, step):
        gradient = jax.grad(negative_objective)(trainable, rest, minibatch(key, step, data, 64), len(data[0]))
        change, state = adam.update(gradient, state, trainable)
        return optax.apply_updates(trainable, change), state

    def bare():
        here, state = trainable, adam.init(trainable)
        start = time.perf_counter()
        for step in range(1000):
            here, state = bare_step(here, state, step)
        jax.block_until_ready(here)
        return time.perf_counter() - start

    bare()
    run = lambda: fit(line, data, optimiser=adam, steps=1000, batch_size=64, key=key)
    assert min(run().history.seconds[-1] for _ in range(3)) < min(bare() for _ in range(3)) / 0.9
