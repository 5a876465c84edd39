"Draws from posteriors: densities, chains, mixtures, diagnostics, and what happens when something is wrong."
import os
import signal
import subprocess
import sys
import time
import warnings
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from numpyro.infer import HMC

import gp_thesis as gpt
from gp_thesis import mcmc
from gp_thesis.parameters import partition
from gp_thesis.variational import conditional

rng = np.random.default_rng(0)
X = np.sort(rng.uniform(0, 4, (12, 1)), axis=0)
Z = np.linspace(0, 4, 5)[:, None]
Y = np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=12)
COUNTS = rng.poisson(np.exp(np.sin(X[:, 0]))).astype(float)


def positive(value, prior=dist.Gamma(2.0, 1.0)):
    return gpt.positive(value, prior=prior)


def regression():
    "Nothing but v is free."
    return gpt.freeze(gpt.GP(gpt.RBF(0.8, 1.2), gpt.Gaussian(0.1)))


def counts(prior=dist.Gamma(2.0, 1.0)):
    return gpt.GP(gpt.Matern52(positive(1.0, prior), positive(0.8, prior)), gpt.Poisson())


@pytest.fixture(scope="module")
def run():
    "Two short chains with hyperparameters, for what needs draws and not their quality."
    return gpt.sample(gpt.SGPMC(counts(), gpt.InducingPoints(Z)), (X, COUNTS), key=jax.random.key(1), warmup=150, samples=60, chains=2)


def test_moments_are_those_of_the_best_q_for_a_gaussian_likelihood():
    model, inducing = regression(), gpt.InducingPoints(Z)
    best = gpt.VFE(model, inducing).posterior(X, Y)
    found = gpt.sample(gpt.SGPMC(model, inducing), (X, Y), key=jax.random.key(0), warmup=300, samples=1500, chains=2)
    v = np.asarray(found.draws.v).reshape(-1, len(Z))
    ess = found.summary().bulk[:len(Z)].min()
    assert found.summary().rhat.max() < 1.01 and ess > 500 and not found.diverging.any()
    Xs = np.linspace(-0.5, 4.5, 7)[:, None]
    mean, var = best.marginals(Xs)
    mixture_mean, mixture_var = found.posterior.marginals(Xs)
    of_v = best.S_factor @ best.S_factor.T
    assert np.all(np.abs(v.mean(0) - best.m) < 5 * np.sqrt(np.diag(of_v) / ess))
    assert np.all(np.abs(v.var(0) / np.diag(of_v) - 1) < 5 * np.sqrt(2 / ess))
    assert np.all(np.abs(mixture_mean - mean) < 5 * np.sqrt(var / ess))
    assert np.all(np.abs(mixture_var / var - 1) < 5 * np.sqrt(2 / ess))


@pytest.mark.parametrize("likelihood, y", [(gpt.Gaussian(0.2), Y), (gpt.Poisson(), COUNTS), (gpt.Bernoulli(), (COUNTS > 1) * 1.0)])
def test_inducing_points_at_all_inputs_give_the_density_of_the_full_model(likelihood, y):
    model = gpt.GP(gpt.Matern32(0.7, 1.3), likelihood, gpt.ConstantMean(0.4))
    v = gpt.free(rng.normal(size=len(X)))
    full, sparse = gpt.GPMC(model, len(X)), gpt.SGPMC(model, gpt.InducingPoints(X))
    full, sparse = (eqx.tree_at(lambda a: a.v, a, v) for a in (full, sparse))
    f = jnp.linalg.cholesky(model.kernel(X)) @ v.value + 0.4
    by_hand = jnp.sum(gpt.unwrap(model).likelihood.log_density(f, y)) + jnp.sum(dist.Normal().log_prob(v.value))
    assert np.isclose(full.objective(X, y), by_hand, rtol=1e-9)
    assert np.isclose(sparse.objective(X, y), by_hand, rtol=1e-7)


def test_several_functions_each_with_a_kernel_of_its_own():
    kernel = gpt.Independent([gpt.RBF(0.5), gpt.RBF(1.5)])
    model = gpt.GP(kernel, gpt.Heteroscedastic())
    full, sparse = gpt.GPMC(model, len(X)), gpt.SGPMC(model, gpt.InducingPoints(X))
    v = gpt.free(rng.normal(size=(len(X), 2)))
    full, sparse = (eqx.tree_at(lambda a: a.v, a, v) for a in (full, sparse))
    assert np.isclose(full.objective(X, Y), sparse.objective(X, Y), rtol=1e-5)
    f = np.stack([np.linalg.cholesky(k(X) + 1e-13 * np.eye(len(X))) @ v.value[:, p] for p, k in enumerate(kernel.kernels)], 1)
    assert np.allclose(full.posterior(X).mean(X), f, atol=1e-4)


def test_the_objective_is_the_bound_of_a_q_without_spread_and_its_own_penalty():
    "E_q of @eq-sparse-density plus the entropy of q is SVGP's bound, for any q."
    model, inducing = counts(), gpt.InducingPoints(Z)
    svgp, sparse = gpt.SVGP(model, inducing), gpt.SGPMC(model, inducing)
    draws = rng.normal(size=(4000, len(Z)))
    value = jax.jit(lambda v: eqx.tree_at(lambda a: a.v, sparse, gpt.free(v)).objective(X, COUNTS))
    values = np.array([value(v) for v in draws[:500]])
    entropy = 0.5 * len(Z) * (1 + np.log(2 * np.pi))
    assert abs(values.mean() + entropy - svgp.objective(X, COUNTS)) < 4 * values.std() / 500 ** 0.5


def flat_density(approx, *batch):
    trainable, rest = partition(mcmc.held(approx))
    flat, unravel = ravel_pytree(trainable)
    return flat, jax.jit(lambda z: mcmc.log_joint(eqx.combine(unravel(z), rest), *batch))


def test_the_gradient_agrees_with_finite_differences():
    approx = gpt.SGPMC(counts(), gpt.InducingPoints(Z))
    z, density = flat_density(approx, jnp.asarray(X), jnp.asarray(COUNTS))
    z = z + 0.3 * rng.normal(size=z.shape)
    step = 1e-5 * np.eye(len(z))
    numeric = [(density(z + e) - density(z - e)) / 2e-5 for e in step]
    assert np.allclose(jax.grad(density)(z), numeric, rtol=1e-5, atol=1e-6)


def test_the_jacobian_is_that_of_a_numeric_change_of_variables():
    approx = gpt.SGPMC(counts(), gpt.InducingPoints(Z))
    z, density = flat_density(approx, jnp.asarray(X), jnp.asarray(COUNTS))
    constrained = lambda a: np.array([p.value for p in mcmc.parameters_of(a).values()])
    trainable, rest = partition(mcmc.held(approx))
    unravel = ravel_pytree(trainable)[1]
    theta = lambda z: constrained(eqx.combine(unravel(z), rest))
    plain = approx.objective(X, COUNTS) + gpt.log_prior(approx)
    slopes = (theta(z + 1e-6) - theta(z - 1e-6)) / 2e-6
    assert np.isclose(density(z), plain + np.log(slopes).sum(), rtol=1e-8)


def test_whitening_leaves_only_the_prior_of_v():
    "p(v) = p(u) |det L|, with a numeric determinant of u = L v."
    K = np.asarray(gpt.Matern32(0.7, 1.3)(Z))
    v, to_u = rng.normal(size=len(Z)), lambda v: np.linalg.cholesky(K) @ v
    J = np.stack([(to_u(v + e) - to_u(v - e)) / 2e-6 for e in 1e-6 * np.eye(len(Z))], 1)
    log_u = dist.MultivariateNormal(jnp.zeros(len(Z)), jnp.asarray(K)).log_prob(to_u(v))
    assert np.isclose(mcmc.log_standard_normal(v), log_u + np.linalg.slogdet(J)[1], rtol=1e-6)


def test_a_parameter_without_a_prior_is_named():
    model = gpt.GP(gpt.RBF(positive(1.0), 1.0), gpt.Poisson())
    with pytest.raises(ValueError, match=r"model\.kernel\.variance has no prior.*variance=gp_thesis.positive.*freeze"):
        gpt.sample(gpt.GPMC(model), (X, COUNTS), key=jax.random.key(0))
    level = gpt.GP(gpt.freeze(gpt.RBF()), gpt.Poisson(), gpt.ConstantMean(0.5))          # any sign
    with pytest.raises(ValueError, match=r"model\.mean\.value has no prior.*value=gp_thesis.free.*Normal.*freeze"):
        gpt.sample(gpt.GPMC(level), (X, COUNTS), key=jax.random.key(0))
    frozen = eqx.tree_at(lambda m: m.kernel.variance, model, replace_fn=gpt.freeze)
    assert list(mcmc.parameters_of(gpt.GPMC(frozen))) == ["kernel.lengthscale"]


def test_a_prior_where_the_parameter_cannot_be_is_refused():
    nowhere = dist.TruncatedNormal(-3.0, 1.0, high=-1.0)
    with pytest.raises(ValueError, match=r"model\.kernel\.lengthscale is 1\.0, where its prior, .* no density"):
        gpt.sample(gpt.GPMC(counts(nowhere)), (X, COUNTS), key=jax.random.key(0))
    with pytest.raises(ValueError, match="prior with a density"):
        gpt.sample(gpt.GPMC(counts(dist.Poisson(2.0))), (X, COUNTS), key=jax.random.key(0))


def test_outside_of_a_priors_support_the_density_is_zero():
    approx = gpt.SGPMC(counts(dist.Uniform(0.5, 2.0)), gpt.InducingPoints(Z))
    z, density = flat_density(approx, jnp.asarray(X), jnp.asarray(COUNTS))
    assert np.isfinite(density(z)) and density(z.at[0].set(5.0)) == -jnp.inf


@pytest.mark.parametrize("change, words", [
    ({"chains": 0}, "chains must be a positive integer"), ({"key": 3}, "key must be a JAX random key"),
    ({"samples": 5, "thin": 2}, "at least four times thin"), ({"kernel": "NUTS"}, "kernel must be a class of numpyro"),
    ({"approx": gpt.SVGP(regression(), gpt.InducingPoints(Z))}, "approx must be one to draw from"),
    ({"data": (X, None)}, "data must be whole"), ({"data": (X, Y[:3])}, "same number of rows"),
    ({"start": gpt.VGP(regression(), len(X))}, "start must be a fitted SVGP"),
    ({"start": gpt.SVGP(regression(), gpt.InducingPoints(Z[:3]))}, r"values of shape \(5,\)"),
])
def test_bad_settings_are_named(change, words):
    settings = {"approx": gpt.SGPMC(regression(), gpt.InducingPoints(Z)), "data": (X, Y), "key": jax.random.key(0)} | change
    with pytest.raises(ValueError, match=words):
        gpt.sample(settings.pop("approx"), settings.pop("data"), **settings)


def test_gpmc_says_when_it_has_no_v():
    with pytest.raises(ValueError, match=r"GPMC\(model, num_data=12\)"):
        gpt.GPMC(regression()).objective(X, Y)


def test_fit_of_the_full_model_is_the_mode():
    "For Gaussian noise the mode of v is the posterior mean."
    model = regression()
    found = gpt.fit(gpt.GPMC(model, len(X)), (X, Y), steps=300).approx
    assert np.allclose(found.posterior(X).mean(X), gpt.Exact(model).posterior(X, Y).mean(X), atol=1e-3)


def test_a_run_whose_trajectories_all_diverge_warns_and_says_so():
    kernel = partial(HMC, step_size=1e4, num_steps=3, adapt_step_size=False, adapt_mass_matrix=False)
    with pytest.warns(UserWarning, match="every one of 40 trajectories diverged"):
        lost = gpt.sample(gpt.SGPMC(counts(), gpt.InducingPoints(Z)), (X, COUNTS), key=jax.random.key(0), warmup=10, samples=20,
                          chains=2, kernel=kernel)
    assert lost.diverging.all() and "every one of 40" in repr(lost.summary())


def test_the_mixture_is_what_its_members_make(run):
    post, Xs = run.posterior, np.linspace(0, 5, 6)[:, None]
    members = [post.member(jax.tree.map(lambda a: a[k], post.draws)) for k in range(len(post))]
    means, variances = (np.array(a) for a in zip(*(m.marginals(Xs) for m in members)))
    mean, var = post.marginals(Xs)
    assert len(post) == 120 and np.allclose(mean, means.mean(0)) and np.allclose(post.mean(Xs), mean)
    assert np.allclose(var, variances.mean(0) + means.var(0))
    covariances = np.array([m.covariance(Xs, Xs[:2]) for m in members]).mean(0)
    apart = means - means.mean(0)
    assert np.allclose(post.covariance(Xs, Xs[:2]), covariances + apart.T @ apart[:, :2] / len(post))
    y_means, y_variances = (np.array(a) for a in zip(*(m.predict_y(Xs) for m in members)))
    assert np.allclose(post.predict_y(Xs)[1], y_variances.mean(0) + y_means.var(0))
    ys = np.arange(6.0)
    densities = np.exp([m.log_predictive_density(Xs, ys) for m in members])
    assert np.allclose(post.log_predictive_density(Xs, ys), np.log(densities.mean(0)))
    draws = post.sample(jax.random.key(3), Xs, 4000)
    assert np.all(np.abs(draws.mean(0) - mean) < 6 * np.sqrt(np.asarray(var) / 4000) + 6 * means.std(0) / 4000 ** 0.5)
    assert np.allclose(draws.var(0), var, rtol=0.15)


def test_a_member_is_the_conditional_at_its_draw(run):
    draw = jax.tree.map(lambda a: a[7], run.posterior.draws)
    kernel = gpt.Matern52(draw.model.kernel.lengthscale, draw.model.kernel.variance)
    L, Xs = jnp.linalg.cholesky(kernel(Z)), X[:4] + 0.1
    mean, var = conditional(L, kernel(Z, Xs), kernel.diag(Xs), draw.v, jnp.zeros((5, 5)))
    found = run.posterior.member(draw).marginals(Xs)
    assert np.allclose(found[0], mean, atol=1e-6) and np.allclose(found[1], var, atol=1e-6)


def test_thinning_keeps_every_so_manieth_draw_and_all_diagnostics(run):
    same = partial(gpt.sample, gpt.SGPMC(counts(), gpt.InducingPoints(Z)), (X, COUNTS), key=jax.random.key(1), warmup=150, samples=60,
                   chains=2)
    thinned = same(thin=10)
    assert thinned.draws.v.shape == (2, 6, 5) and len(thinned.posterior) == 12
    assert np.array_equal(thinned.draws.v, run.draws.v[:, 9::10])
    assert np.array_equal(thinned.summary().bulk, run.summary().bulk) and thinned.log_p.shape == (2, 60)


def test_inducing_inputs_stay_and_draws_are_what_was_free(run):
    assert np.array_equal(gpt.unwrap(run.approx.inducing).Z, Z)
    shapes = {name: x.shape for name, x in jax.tree_util.tree_flatten_with_path(run.draws)[0] for name in [jax.tree_util.keystr(name)]}
    assert shapes == {".model.kernel.lengthscale": (2, 60), ".model.kernel.variance": (2, 60), ".v": (2, 60, 5)}
    assert set(run.summary().names) == {"kernel.lengthscale", "kernel.variance", "log p", *(f"v[{k}]" for k in range(5))}
    k = run.summary().names.index("kernel.variance")
    assert np.isclose(run.summary().mean[k], run.draws.model.kernel.variance.mean())


def test_a_start_from_an_svgp_is_where_the_svgp_was():
    model, inducing = counts(), gpt.InducingPoints(Z)
    svgp = gpt.fit(gpt.SVGP(model, inducing), (X, COUNTS), steps=200).approx
    approx = mcmc.held(gpt.SGPMC(model, inducing))
    many = mcmc._from_fit(approx, svgp, jax.random.key(0), 2000, (jnp.asarray(X), jnp.asarray(COUNTS)))
    q = gpt.unwrap(svgp.q)
    assert np.allclose(many.v.unconstrained.mean(0), q.m, atol=0.1)
    assert np.allclose(np.cov(many.v.unconstrained.T), q.S_factor @ q.S_factor.T, atol=0.1)
    assert np.allclose(jax.nn.softplus(many.model.kernel.variance.unconstrained), svgp.model.kernel.variance.value)
    full = mcmc.held(gpt.GPMC(model, len(X)))
    v = mcmc._from_fit(full, svgp, jax.random.key(0), 500, (jnp.asarray(X), jnp.asarray(COUNTS))).v.unconstrained
    L = jnp.linalg.cholesky(svgp.model.kernel(X))
    mean, var = svgp.posterior().marginals(X)
    assert np.allclose((v @ L.T).mean(0), mean, atol=5 * np.sqrt(np.max(var) / 500)) and np.abs(v).max() < 10


SEGMENTS = """
import sys, jax
jax.config.update("jax_enable_x64", True)
import numpy as np
sys.path.insert(0, {tests!r})
import test_mcmc as t
run = t.gpt.sample(t.gpt.SGPMC(t.counts(), t.gpt.InducingPoints(t.Z)), (t.X, t.COUNTS), key=jax.random.key(1), warmup=150, samples=60,
                   chains=2, checkpoint={folder!r}, every=1 if {slow} else 50)
np.save({out!r}, np.asarray(run.draws.v))
"""


def test_a_run_that_is_killed_goes_on_with_the_same_draws(run, tmp_path, top):
    folder, out = tmp_path / "states", tmp_path / "v.npy"
    code = partial(SEGMENTS.format, tests=str(top / "tests"), folder=str(folder), out=str(out))
    first = subprocess.Popen([sys.executable, "-c", code(slow=True)], cwd=top, stderr=subprocess.PIPE)
    while first.poll() is None and not any(path.name.isdigit() and int(path.name) > 20 for path in folder.glob("*")):
        time.sleep(0.02)
    assert first.poll() is None, first.stderr.read().decode()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    first.stderr.close()
    assert not out.exists()
    done = subprocess.run([sys.executable, "-c", code(slow=False)], cwd=top, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(out), run.draws.v)


def test_normal_scores_and_effective_sizes_know_independent_draws_from_others():
    x = rng.normal(size=(4, 500, 1))
    slow = np.empty_like(x)
    slow[:, 0] = x[:, 0]
    for t in range(1, 500):
        slow[:, t] = 0.9 * slow[:, t - 1] + np.sqrt(1 - 0.81) * x[:, t]
    assert 1500 < mcmc.effective_sizes(x)[0][0] < 2600 and 1200 < mcmc.effective_sizes(np.exp(x))[1][0]
    assert np.isclose(mcmc.effective_sizes(x)[0], mcmc.effective_sizes(np.exp(5 * x))[0])       # only ranks count
    assert mcmc.effective_sizes(slow)[0][0] < 2.5 * 2000 / 19
    shifted = x + np.array([0, 0, 0, 1.0])[:, None, None]
    wider = x * np.array([1, 1, 1, 4.0])[:, None, None]
    assert mcmc.split_rhat(x) < 1.01 and mcmc.split_rhat(shifted) > 1.05 and mcmc.split_rhat(wider) > 1.05


def test_ranks_are_uniform_for_exact_draws_and_not_for_narrow_ones():
    model = gpt.GP(gpt.RBF(1.0), gpt.Gaussian(0.5))
    approx = gpt.GPMC(gpt.freeze(model))

    def exact(narrow, key, data):
        mean, var = gpt.Exact(model).posterior(*data).marginals(X[6:7])
        return {"f": mean + narrow * jnp.sqrt(var) * jax.random.normal(key, (99, 1))}

    right, wrong = (gpt.calibrate(approx, X, key=jax.random.key(0), replications=200, infer=partial(exact, s)) for s in (1.0, 0.6))
    assert right.ranks["f"].shape == (200, 1) and right.draws == 99
    assert right.p_values["f"] > 0.01 > 1e-4 > wrong.p_values["f"]


def test_calibration_by_sampling_covers_parameters_and_functions():
    found = gpt.calibrate(gpt.SGPMC(counts(), gpt.InducingPoints(Z)), X, key=jax.random.key(0), replications=3, rows=(0, 6), warmup=150,
                          samples=20, chains=2, thin=2)
    assert {name: r.shape for name, r in found.ranks.items()} == {"kernel.lengthscale": (3,), "kernel.variance": (3,), "f": (3, 2)}
    assert found.draws == 20 and found.rhat.shape == found.divergences.shape == found.longer.shape == (3,)
    assert f"R-hat at most {found.rhat.max():.4f}, {found.divergences.sum()} divergences, 0 runs made longer" in repr(found)
    assert all(np.all((0 <= r) & (r <= 20)) for r in found.ranks.values())


def test_a_calibration_goes_on_from_the_file_that_it_kept(tmp_path):
    model = gpt.GP(gpt.RBF(1.0), gpt.Gaussian(0.5))
    asked = []

    def infer(key, data):
        asked.append(key)
        return {"f": jax.random.normal(key, (9, 1))}

    calibrate = partial(gpt.calibrate, gpt.GPMC(gpt.freeze(model)), X, key=jax.random.key(0), infer=infer)
    once, file = calibrate(replications=5), tmp_path / "ranks.jsonl"
    calibrate(replications=3, kept=file)
    asked.clear()
    again = calibrate(replications=5, kept=file)
    assert len(asked) == 2 and len(file.read_text().splitlines()) == 5
    assert np.array_equal(again.ranks["f"], once.ranks["f"]) and again.draws == once.draws == 9


def test_a_run_that_has_not_mixed_goes_on_and_keeps_its_number_of_draws():
    approx, key, settings = gpt.SGPMC(counts(), gpt.InducingPoints(Z)), jax.random.key(4), {"warmup": 150, "chains": 2}
    longer, times = mcmc._until_mixed(approx, (X, COUNTS), key, 20, 2, 2, settings)
    once = gpt.sample(approx, (X, COUNTS), key=key, samples=20, progress=False, **settings)
    assert np.max(once.table.rhat) > 1.01 and times >= 1                       # ten draws of a chain have never mixed
    assert longer.log_p.shape == (2, 20 * 2**times) and longer.draws.v.shape == (2, 10, 5)
    assert np.array_equal(longer.log_p[:, :20], once.log_p)
    assert times == 2 or np.max(longer.table.rhat) < 1.01


def test_a_likelihood_that_draws_nothing_cannot_be_calibrated():
    class Silent(gpt.Poisson):
        simulate = gpt.Likelihood.simulate

    with pytest.raises(NotImplementedError, match="Silent defines no simulate"):
        gpt.calibrate(gpt.GPMC(gpt.freeze(gpt.GP(gpt.RBF(), Silent()))), X, key=jax.random.key(0), replications=1)


def test_single_precision():
    model = gpt.cast(counts(), jnp.float32)
    found = gpt.sample(gpt.SGPMC(model, gpt.InducingPoints(Z.astype(np.float32))), (X.astype(np.float32), COUNTS.astype(np.float32)),
                       key=jax.random.key(0), warmup=20, samples=20, chains=1)
    assert found.draws.v.dtype == jnp.float32 and np.isfinite(found.posterior.mean(X.astype(np.float32))).all()


def test_a_posterior_of_draws_can_be_saved(run, tmp_path):
    gpt.save(tmp_path / "post.gpt", run.posterior)
    assert np.array_equal(gpt.load(tmp_path / "post.gpt").mean(X), run.posterior.mean(X))


def test_functions_drawn_from_the_full_model_are_known_at_the_data():
    found = gpt.sample(gpt.GPMC(regression()), (X, Y), key=jax.random.key(1), warmup=50, samples=20, chains=1)
    f = found.posterior.sample(jax.random.key(0), X, 20)
    each = np.array([found.posterior.member(jax.tree.map(lambda a: a[k], found.posterior.draws)).mean(X) for k in range(20)])
    order = lambda a: a[np.argsort(a[:, 0])]
    assert f.shape == (20, 12) and np.allclose(order(np.asarray(f)), order(each), atol=1e-3)
