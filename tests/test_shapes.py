"Shapes and types in the package's signatures, checked by jaxtyping and beartype while it is used."
import os
import subprocess
import sys
import textwrap

from conftest import TOP

USE = """
import gc
gc.set_threshold(100_000, 50, 100)
import jax, jax.numpy as jnp, numpy as np, pytest
from jaxtyping import TypeCheckError, install_import_hook
jax.config.update("jax_enable_x64", True)
with install_import_hook("gp_thesis", "beartype.beartype"):
    import gp_thesis as gpt
    from gp_thesis import gaussians, linalg

rng = np.random.default_rng(0)
X, Xs = jnp.asarray(rng.uniform(0, 1, (12, 2))), jnp.asarray(rng.uniform(0, 1, (5, 2)))


def shapes(function, *arguments):
    "The shapes of what it returns, traced: the checks look at shapes and types, and nothing is compiled."
    return [result.shape for result in jax.tree.leaves(jax.eval_shape(function, *arguments))]


kernels = [gpt.RBF(), gpt.Matern12([0.5, 1.0]), gpt.Matern32(), gpt.Matern52(), gpt.Exponential(), gpt.Cosine(), gpt.Periodic(),
           gpt.Linear(), gpt.Polynomial(), gpt.White(), gpt.Constant(), gpt.Wiener(active_dims=[0]), gpt.RationalQuadratic(),
           gpt.RBF(active_dims=[0]) * gpt.Coregion(2, active_dims=[1])]
for kernel in (*kernels, sum(kernels[1:], kernels[0]), kernels[0] * kernels[1] + 2.0):
    assert shapes(lambda X, Xs: (kernel(X), kernel(X, Xs), kernel.diag(X)), X, Xs) == [(12, 12), (12, 5), (12,)]


several = gpt.Independent(kernels[:3])
assert shapes(lambda X, Xs: (several(X), several(X, Xs), several.diag(X)), X, Xs) == [(3, 12, 12), (3, 12, 5), (12, 3)]
assert shapes(lambda X: gpt.sample_prior(jax.random.key(0), several, X, 4), X) == [(4, 12, 3)]


def check(approx, y, *queries):
    "Objective, posterior, and its answers: marginals, predictions, covariances, draws, and others."
    def everything(X, y, Xs):
        post = approx.posterior(X, y)
        return (approx.objective(X, y), post.mean(Xs), post.covariance(Xs, X), post.covariance(Xs),
                post.sample(jax.random.key(0), Xs, 3), post.marginals(Xs), post.predict_y(Xs), *(query(post) for query in queries))

    P = (approx.q.m.value if isinstance(approx, gpt.SVGP) else y).shape[1:]
    answer = (5, *P)
    found = shapes(everything, X, y, Xs)
    assert found[:9] == [(), answer, (*P, 5, 12), (*P, 5, 5), (3, *answer), *4 * [answer]]
    return found[9:]


for mean in (gpt.Zero(), gpt.ConstantMean(1.0), gpt.LinearMean([1.0, 2.0])):
    for y in (X[:, 0], X):
        approx = gpt.Exact(gpt.GP(gpt.RBF(), gpt.Gaussian(0.1), mean))
        assert check(approx, y, lambda post: post.log_predictive_density(Xs, y[:5])) == [y[:5].shape]
post = approx.posterior(X, X)                                            # once with numbers, as users do
assert approx.objective(X, X).shape == () and post.mean(Xs).shape == (5, 2) and kernels[0](X).shape == (12, 12)
assert shapes(lambda X: gpt.sample_prior(jax.random.key(0), gpt.RBF(), X, 4), X) == [(4, 12)]
gpt.fit(approx, (X, X), steps=2, progress=False)
model, classes = gpt.GP(gpt.RBF(), gpt.Gaussian(0.1)), gpt.GP(gpt.RBF(), gpt.Bernoulli())
labels = jnp.asarray(rng.integers(0, 2, 12), float)
points, blocks = gpt.InducingPoints(X[:4]), [range(5), range(5, 12)]
for approx, y in ((gpt.VFE(model, points), X), (gpt.VFE(model, gpt.GaussianWindow(X[:4], 0.1)), X[:, 0]),
                  (gpt.VFE(model, gpt.Wavelet(X[:4], 0.1, [1.0, 2.0])), X), (gpt.FITC(model, points), X[:, 0]),
                  (gpt.DTC(model, points), X), (gpt.PowerEPRegression(model, points, 0.5, blocks), X)):
    P = y.shape[1:]
    assert check(approx, y, lambda post: post.inducing_mean, lambda post: gpt.uncollapsed_bound(post, X, y),
                 lambda post: approx.evidence_interval(X, y)) == [(4, *P), (), (), ()]
for approx in (gpt.VGP(classes, 12), gpt.WhitenedVGP(classes, 12), gpt.MeanField(classes, 12)):
    def everything(X, y, Xs):
        post = approx.posterior(X, y)
        return (approx.objective(X, y), post.covariance(Xs), post.sample(jax.random.key(0), Xs, 2), post.marginals(Xs),
                post.predict_y(Xs), post.log_predictive_density(Xs, y[:5]))
    assert shapes(everything, X, labels, Xs) == [(), (5, 5), (2, 5), *5 * [(5,)]]
three = gpt.GP(gpt.RBF(), gpt.RobustMax(3))
for approx, y in ((gpt.SVGP(classes, points), labels), (gpt.SVGP(classes, points, whiten=False), labels),
                  (gpt.SVGP(model, points, 2), X), (gpt.SVGP(model, [points, points]), X),
                  (gpt.SVGP(three, points), labels), (gpt.SVGP(three, [points] * 3, whiten=False), labels),
                  *((gpt.SVGP(gpt.GP(gpt.RBF(), likelihood), points), labels)
                    for likelihood in (gpt.Poisson(), gpt.NegativeBinomial(), gpt.Binomial(3), gpt.Ordinal([0.0, 1.0])))):
    assert check(approx, y, lambda post: post.log_predictive_density(Xs, y[:5]),
                 lambda post: approx.objective(X, y, num_data=20)) == [y[:5].shape, ()]
noisy = gpt.SVGP(gpt.GP(gpt.Independent(kernels[:2]), gpt.Heteroscedastic(), gpt.ConstantMean([0.0, -1.0])), points)
found = shapes(lambda X, y, Xs: (noisy.objective(X, y), (post := noisy.posterior()).marginals(Xs), post.covariance(Xs), post.predict_y(Xs),
                                 post.log_predictive_density(Xs, y[:5])), X, X[:, 0], Xs)
assert found == [(), (5, 2), (5, 2), (2, 5, 5), (5,), (5,), (5,)]
gpt.fit(gpt.SVGP(model, [points, points]), (X, X), optimiser=gpt.natural_gradient(0.5, gpt.adadelta()), steps=2, batch_size=4,
        key=jax.random.key(0), progress=False)
assert gpt.kmeans_centres(X, 3).shape == (3, 2)
with pytest.raises(TypeCheckError):
    linalg.log_determinant("not an array")   # the checks are on
"""


def test_every_public_piece_keeps_to_its_signature():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(USE)], cwd=TOP, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
