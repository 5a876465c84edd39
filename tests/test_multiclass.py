"Several classes through the whole chain: likelihood, inducing points, minibatches, optimiser, prediction."
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gp_thesis.exact import GP
from gp_thesis.fitting import fit
from gp_thesis.inducing import InducingPoints
from gp_thesis.kernels import RBF, White
from gp_thesis.likelihoods import RobustMax, Softmax
from gp_thesis.svgp import SVGP, adadelta

CLASSES, rng = 3, np.random.default_rng(0)
X, y = jnp.asarray(rng.normal(size=(30, 2))), jnp.asarray(rng.integers(CLASSES, size=30))
M = 6


def approximation(likelihood, scale=1.0, m=None, factors=None):
    "An SVGP whose q is not the prior."
    approx = SVGP(GP(RBF(0.8, scale) + White(0.1 * scale), likelihood), InducingPoints(X[:M]))
    own = np.random.default_rng(1)
    m = own.normal(size=(M, CLASSES)) if m is None else m
    factors = 0.3 * own.normal(size=(CLASSES, M * (M + 1) // 2)) if factors is None else factors
    return eqx.tree_at(lambda a: (a.q.m.unconstrained, a.q.S_factor.unconstrained), approx, (jnp.asarray(m), jnp.asarray(factors)))


def kl(m, R):
    "KL[N(m, R Rᵀ) ‖ N(0, I)] from the textbook formula."
    S = R @ R.T
    return 0.5 * (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1])


@pytest.mark.parametrize("likelihood", [RobustMax(CLASSES), Softmax(CLASSES)], ids=["robust max", "softmax"])
def test_the_bound_is_what_draws_from_q_say(likelihood):
    approx = approximation(likelihood)
    mean, var = map(np.asarray, approx.posterior().marginals(X))
    f = mean + np.sqrt(var) * np.random.default_rng(2).normal(size=(20_000, *mean.shape))
    if isinstance(likelihood, RobustMax):
        log_p = np.log(np.where(f.argmax(-1) == y, 1 - likelihood.epsilon, likelihood.epsilon / (CLASSES - 1)))
    else:
        log_p = np.take_along_axis(f, np.asarray(y)[None, :, None], -1)[..., 0] - np.log(np.exp(f).sum(-1))
    penalty = sum(kl(m, R) for m, R in zip(np.asarray(approx.q.m.value).T, np.asarray(approx.q.S_factor.value)))
    simulated, error = log_p.sum(1).mean() - penalty, log_p.sum(1).std() / np.sqrt(len(f))
    bound = float(approx.objective(X, y))
    if isinstance(likelihood, RobustMax):
        assert abs(bound - simulated) < 5 * error + 0.05
    else:  # a lower bound, and a close one
        assert simulated - 0.05 * len(X) < bound < simulated + 5 * error


def test_the_robust_max_does_not_see_the_scale_of_the_kernel():
    bounds = [float(approximation(RobustMax(CLASSES), scale).objective(X, y)) for scale in (1.0, 9.0)]
    assert np.isclose(*bounds, rtol=1e-7)
    assert not np.isclose(*[float(approximation(Softmax(CLASSES), scale).objective(X, y)) for scale in (1.0, 9.0)], rtol=1e-3)


@pytest.mark.parametrize("likelihood", [RobustMax(CLASSES), Softmax(CLASSES)], ids=["robust max", "softmax"])
def test_the_names_of_the_classes_do_not_matter(likelihood):
    approx, order = approximation(likelihood), np.array([2, 0, 1])
    m, factors = approx.q.m.unconstrained, approx.q.S_factor.unconstrained
    renamed = approximation(likelihood, m=m[:, order], factors=factors[order])
    assert np.isclose(float(renamed.objective(X, jnp.asarray(np.argsort(order))[y])), float(approx.objective(X, y)), rtol=1e-9)


@pytest.mark.parametrize("likelihood", [RobustMax(CLASSES), Softmax(CLASSES)], ids=["robust max", "softmax"])
def test_batches_that_miss_a_class_average_to_the_whole(likelihood):
    approx, order = approximation(likelihood), np.argsort(np.asarray(y))  # each batch of five has one class or two
    batches = [approx.objective(X[rows], y[rows], num_data=30) for rows in order.reshape(6, 5)]
    assert np.isclose(np.mean(batches), float(approx.objective(X, y)), rtol=1e-9)


@pytest.mark.parametrize("likelihood", [RobustMax(CLASSES), Softmax(CLASSES)], ids=["robust max", "softmax"])
def test_probabilities_add_up_and_agree_with_the_density(likelihood):
    post = approximation(likelihood).posterior()
    p, _ = post.predict_y(X)
    log_p = jnp.stack([post.log_predictive_density(X, jnp.full(30, c)) for c in range(CLASSES)], axis=1)
    assert p.shape == (30, CLASSES) and jnp.allclose(p.sum(1), 1, atol=5e-3)
    assert jnp.allclose(jnp.log(p), log_p, atol=1e-6)


@pytest.mark.parametrize("label", [-1, CLASSES, 0.5])
def test_labels_outside_the_classes_are_refused(label):
    with pytest.raises(ValueError, match=r"0, ..., 2"):
        approximation(RobustMax(CLASSES)).objective(X, y.astype(float).at[4].set(label))


def test_training_separates_three_blobs():
    centres = 4.0 * jnp.array([[0.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    labels = jnp.arange(60) % CLASSES
    inputs = centres[labels] + 0.5 * jax.random.normal(jax.random.key(0), (60, 2))
    approx = SVGP(GP(RBF(2.0) + White(0.01), RobustMax(CLASSES)), InducingPoints(inputs[:6]))
    fitted = fit(approx, (inputs, labels), optimiser=adadelta(0.1), steps=150, batch_size=20, key=jax.random.key(1), progress=False)
    p, _ = fitted.approx.posterior().predict_y(inputs)
    assert jnp.all(jnp.argmax(p, axis=1) == labels)
    assert fitted.approx.objective(inputs, labels) > approx.objective(inputs, labels) + 50
