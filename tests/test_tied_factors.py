"The energy of one average factor, against natural parameters, quadrature, closed forms and the bound at its limit."
import equinox as eqx
import gp_thesis as gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gp_thesis.linalg import factor_or_nan, inverse_lower
from gp_thesis.parameters import free, lower_triangular, partition, unwrap
from gp_thesis.svgp import VariationalGaussian
from gp_thesis.tied_factors import log_determinant_near_one, tied_cavity
from scipy import integrate, stats

rng = np.random.default_rng(3)
N, M = 12, 4
X = np.sort(rng.uniform(0, 4, (N, 1)), axis=0)
f = np.sin(2 * X[:, 0])
Y = {"Gaussian": f + 0.3 * rng.normal(size=N), "Bernoulli": (f > 0).astype(float), "Poisson": rng.poisson(np.exp(f)).astype(float),
     "StudentT": f + 0.3 * rng.standard_t(3, N), "RobustMax": rng.integers(0, 3, N).astype(float)}
LIKELIHOODS = {"Gaussian": gpt.Gaussian(0.2), "Bernoulli": gpt.Bernoulli(), "Poisson": gpt.Poisson(),
               "StudentT": gpt.StudentT(0.3, df=3.0), "RobustMax": gpt.RobustMax(3)}
points = gpt.InducingPoints(np.linspace(0.3, 3.7, M)[:, None])


def model(kind):
    return gpt.GP(gpt.Matern52(0.9, 1.3), LIKELIHOODS[kind], gpt.ConstantMean(0.2))


def with_q(approx, q):
    return eqx.tree_at(lambda a: a.q, approx, VariationalGaussian(free(q.m), lower_triangular(q.S_factor)))


def some_q(P=None, spread=0.5):
    m, R = spread * rng.normal(size=(M, P or 1)), np.tril(0.2 * rng.normal(size=(P or 1, M, M)), -1) + 0.7 * np.eye(M)
    return VariationalGaussian(m if P else m[:, 0], R if P else R[0])


def log_integral(precision, shift):
    return 0.5 * shift @ np.linalg.solve(precision, shift) - 0.5 * np.linalg.slogdet(precision)[1]


def by_hand(approx, power):
    "The energy of N equal sites in natural parameters, one latent function at a time, with the package's tilted integrals."
    prior, inducing, q = unwrap((approx.model, approx.inducing, approx.q))
    Kuu, Kuf = inducing.covariance(prior.kernel), inducing.cross_covariance(prior.kernel, X)
    A = np.linalg.solve(np.linalg.cholesky(Kuu), Kuf)
    d, energy, moments = prior.kernel.evaluate_diag(X) - np.sum(A**2, axis=0), 0.0, []
    for m, R in [(q.m, q.S_factor)] if q.m.ndim == 1 else zip(q.m.T, q.S_factor):
        precision = np.linalg.inv(R @ R.T)
        T, nu = (precision - np.eye(M)) / N, precision @ m / N
        rest = np.eye(M) + (N - power) * T, (N - power) * nu
        G = log_integral(precision, N * nu)
        energy += G + N / power * (log_integral(*rest) - G)
        S = np.linalg.inv(rest[0])
        moments.append((0.2 + A.T @ S @ rest[1], d + np.sum(A * (S @ A), axis=0)))
    mean, var = (np.stack(a, axis=-1) if q.m.ndim > 1 else a[0] for a in zip(*moments))
    return energy + np.sum(prior.likelihood.log_tilted(mean, var, approx.check(X, Y[type(prior.likelihood).__name__])[1], power)) / power


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_energy_is_that_of_equal_sites(kind):
    P = 3 if kind == "RobustMax" else None
    q = some_q(P)
    for power in (0.3, 1.0):
        approx = with_q(gpt.ApproximatePowerEP(model(kind), points, power), q)
        assert np.isclose(approx.objective(X, Y[kind]), by_hand(approx, power), rtol=1e-8)


def test_cavity_and_divergence_by_quadrature():
    m, s, share = 0.7, 0.6, 0.3
    rest, divergence = tied_cavity(VariationalGaussian(np.array([m]), np.array([[s]])), share)
    log_q, log_p = stats.norm(m, s).logpdf, stats.norm(0, 1).logpdf
    mixed = lambda v: np.exp((1 - share) * log_q(v) + share * log_p(v))
    moment = lambda k: integrate.quad(lambda v: v**k * mixed(v), -12, 12, epsabs=1e-13)[0]
    mass, mean, square = map(moment, range(3))
    assert np.isclose(divergence, -np.log(mass) / share, rtol=1e-10)
    assert np.isclose(rest.m[0], mean / mass) and np.isclose(rest.S_factor[0, 0] ** 2, square / mass - (mean / mass) ** 2)


def test_a_cavity_is_lower_triangular_and_proper_for_any_q():
    for spread in (0.1, 30.0):
        R = np.tril(spread * rng.normal(size=(M, M)), -1) + spread * np.eye(M)
        for share in (1e-9, 0.5, 1.0):
            rest, divergence = tied_cavity(VariationalGaussian(rng.normal(size=M), R), share)
            precision = (1 - share) * np.linalg.inv(R @ R.T) + share * np.eye(M)
            assert np.allclose(rest.S_factor @ rest.S_factor.T @ precision, np.eye(M), atol=1e-7)
            assert np.allclose(np.triu(rest.S_factor, 1), 0) and np.all(np.diag(rest.S_factor) > 0) and divergence > -1e-9


@pytest.mark.parametrize("kind", ["Gaussian", "Bernoulli", "Poisson"])
def test_its_limit_at_power_zero_is_the_bound_with_its_gradients(kind):
    q, at, prior = some_q(), [], model(kind)

    @eqx.filter_jit
    def value_and_slopes(approx):
        moving, rest = partition(approx)
        return jax.value_and_grad(lambda moving: eqx.combine(moving, rest).objective(X, Y[kind]))(moving)

    for power in 0.002 * 0.5 ** np.arange(5):
        value, slopes = value_and_slopes(with_q(gpt.ApproximatePowerEP(prior, points, power), q))
        at.append(np.concatenate([[value], *(np.ravel(a) for a in jax.tree.leaves(slopes))]))
    for order in range(1, len(at)):
        at = [b + (b - a) / (2**order - 1) for a, b in zip(at, at[1:])]
    value, slopes = value_and_slopes(with_q(gpt.SVGP(prior, points), q))
    bound = np.concatenate([[value], *(np.ravel(a) for a in jax.tree.leaves(slopes))])
    assert np.allclose(at[0], bound, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rows", [[3], 7 * [3]], ids=["one", "alike"])
@pytest.mark.parametrize("power", [0.4, 1.0])
def test_one_row_and_rows_that_are_alike_are_power_ep(rows, power):
    few, seen, one = X[rows], Y["Gaussian"][rows], gpt.InducingPoints(np.array([[1.0]]))
    closed = gpt.PowerEPRegression(model("Gaussian"), one, power)
    best = closed.posterior(few, seen)
    q = VariationalGaussian(best.m, np.linalg.cholesky(best.S_factor @ best.S_factor.T))
    ours = with_q(gpt.ApproximatePowerEP(model("Gaussian"), one, power), q)
    moving, rest = partition(ours)
    value, slopes = jax.value_and_grad(lambda moving: eqx.combine(moving, rest).objective(few, seen))(moving)
    assert np.isclose(value, closed.objective(few, seen), rtol=1e-8, atol=1e-8)
    assert all(np.all(np.abs(slope) < 1e-8) for slope in jax.tree.leaves(slopes.q))
    if len(rows) > 1:
        found = gpt.fit(gpt.ApproximatePowerEP(gpt.freeze(model("Gaussian")), gpt.freeze(one), power), (few, seen),
                        progress=False, tolerance=1e-14).approx
        assert np.isclose(found.objective(few, seen), closed.objective(few, seen), rtol=1e-8)


@pytest.mark.parametrize("kind", ["Bernoulli", "Poisson", "StudentT"])
def test_one_row_is_power_ep_for_any_likelihood(kind):
    row, seen = X[[3]], Y[kind][[3]]
    untied = gpt.PowerEP(model(kind), points, 0.5, tolerance=1e-12)
    best = untied.posterior(row, seen)
    q = VariationalGaussian(best.m, np.linalg.cholesky(best.S_factor @ best.S_factor.T))
    moving, rest = partition(with_q(gpt.ApproximatePowerEP(model(kind), points, 0.5), q))
    value, slopes = jax.value_and_grad(lambda moving: eqx.combine(moving, rest).objective(row, seen))(moving)
    assert np.isclose(value, untied.objective(row, seen), rtol=0, atol=1e-8)
    assert all(np.all(np.abs(slope) < 1e-8) for slope in jax.tree.leaves(slopes.q))


def test_at_an_optimum_q_has_the_average_moments_of_the_tilted():
    "One inducing variable at the input of all rows, so that tilted distributions are in one dimension."
    power, z = 0.5, np.full((6, 1), 1.0)
    labels = np.array([0.0, 1, 1, 1, 0, 1])
    one = gpt.InducingPoints(np.array([[1.0]]))
    prior = gpt.freeze(gpt.GP(gpt.RBF(1.0, 1.0), gpt.Bernoulli()))
    found = gpt.fit(gpt.ApproximatePowerEP(prior, gpt.freeze(one), power), (z, labels), progress=False, tolerance=1e-15).approx
    q = unwrap(found.q)
    rest, _ = tied_cavity(q, power / 6)
    moments = []
    for label in labels:
        tilted = lambda v: stats.norm(rest.m[0], rest.S_factor[0, 0]).pdf(v) * stats.norm.cdf((2 * label - 1) * v) ** power
        moment = lambda k: integrate.quad(lambda v: v**k * tilted(v), -12, 12)[0]
        moments.append([moment(1) / moment(0), moment(2) / moment(0)])
    assert np.allclose(np.mean(moments, axis=0), [q.m[0], q.m[0] ** 2 + q.S_factor[0, 0] ** 2], atol=2e-6)


def test_the_precision_loses_the_squares_of_slopes_however_many_the_rows():
    "All rows at the one inducing input with Gaussian noise: a share 1 - power r² / noise of the precision is left."
    rows, noise, power = 4000, 0.2, 0.5
    seen, one = np.sqrt(noise) * rng.normal(size=rows), gpt.InducingPoints(np.array([[1.0]]))
    prior = gpt.freeze(gpt.GP(gpt.RBF(1.0, 1.0), gpt.Gaussian(noise)))
    approx = gpt.fit(gpt.ApproximatePowerEP(prior, gpt.freeze(one), power), (np.ones((rows, 1)), seen), progress=False, tolerance=1e-14).approx
    expected = rows / noise * (1 - power * np.var(seen) / noise)
    assert np.isclose(unwrap(approx.q).S_factor[0, 0] ** -2, expected, rtol=0.01)


def test_minibatches_are_unbiased_and_train():
    data = X, Y["Bernoulli"]
    approx = with_q(gpt.ApproximatePowerEP(model("Bernoulli"), points, 0.5), some_q())
    parts = [approx.objective(X[rows], Y["Bernoulli"][rows], num_data=N) for rows in (slice(0, 6), slice(6, 12))]
    assert np.isclose(np.mean(parts), approx.objective(*data), rtol=1e-10)
    start = gpt.ApproximatePowerEP(model("Bernoulli"), points, 0.5)
    for optimiser in (optax.adam(0.05), gpt.natural_gradient(0.3, optax.adam(0.01))):
        ended = gpt.fit(start, data, optimiser=optimiser, steps=60, batch_size=6, key=jax.random.key(0), progress=False).approx
        assert ended.objective(*data) > start.objective(*data) + 0.5
    post, like = ended.posterior(), with_q(gpt.SVGP(ended.model, ended.inducing), unwrap(ended.q)).posterior()
    assert np.allclose(post.marginals(X)[1], like.marginals(X)[1])


def test_single_precision_keeps_the_divergence_of_a_million_rows():
    E = rng.normal(size=(20, 20))
    E = E @ E.T / 20 - np.eye(20)
    for share in (1e-7, 1e-3, 0.3):
        small = (share * E).astype("float32")
        L = factor_or_nan(jnp.asarray(small) + jnp.eye(20, dtype="float32"))
        exact = np.sum(np.log1p(np.linalg.eigvalsh(small.astype(float))))
        assert np.isclose(log_determinant_near_one(small, L, inverse_lower(L)) / share, exact / share, rtol=2e-5, atol=2e-5)
    approx, single = with_q(gpt.ApproximatePowerEP(model("Bernoulli"), points, 0.5), some_q()), (X.astype("float32"), Y["Bernoulli"].astype("float32"))
    value = gpt.cast(approx, jnp.float32).objective(*single, num_data=10**6)
    assert value.dtype == jnp.float32 and np.isclose(value, approx.objective(X, Y["Bernoulli"], num_data=10**6), rtol=1e-5)


@pytest.mark.parametrize("power", [0, 0.0, -0.5, 1.5, np.nan, "1", None, True, [0.5, 1.0]])
def test_powers_there_are_not(power):
    with pytest.raises(ValueError, match=r"power must be a number above 0 and at most 1.*got"):
        gpt.ApproximatePowerEP(model("Gaussian"), points, power)


def test_what_cannot_work_is_refused():
    approx = gpt.ApproximatePowerEP(model("Bernoulli"), points, 0.5)
    with pytest.raises(ValueError, match="num_data must be at least 12"):
        approx.objective(X, Y["Bernoulli"], num_data=5)
    with pytest.raises(ValueError, match="labels 0 or 1"):
        approx.objective(X, Y["Gaussian"])
    with pytest.raises(ValueError, match="inducing must be inducing variables"):
        gpt.ApproximatePowerEP(model("Bernoulli"), X)
    with pytest.raises(ValueError, match="X must have 1 columns"):
        approx.objective(np.hstack([X, X]), Y["Bernoulli"])
