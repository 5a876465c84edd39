"Shapes and types in the package's signatures, checked by jaxtyping and beartype while it is used."
import os
import subprocess
import sys
import textwrap

from conftest import TOP

USE = """
import jax, jax.numpy as jnp, numpy as np, pytest
from jaxtyping import TypeCheckError, install_import_hook
jax.config.update("jax_enable_x64", True)
with install_import_hook("gp_thesis", "beartype.beartype"):
    import gp_thesis as gpt
    from gp_thesis import gaussians, linalg

rng = np.random.default_rng(0)
X, Xs = jnp.asarray(rng.uniform(0, 1, (12, 2))), jnp.asarray(rng.uniform(0, 1, (5, 2)))
kernels = [gpt.RBF(), gpt.Matern12([0.5, 1.0]), gpt.Matern32(), gpt.Matern52(), gpt.Exponential(), gpt.Cosine(), gpt.Periodic(),
           gpt.Linear(), gpt.Polynomial(), gpt.White(), gpt.Constant(), gpt.Wiener(active_dims=[0])]
for kernel in (*kernels, sum(kernels[1:], kernels[0]), kernels[0] * kernels[1] + 2.0):
    assert kernel(X).shape == (12, 12) and kernel(X, Xs).shape == (12, 5) and kernel.diag(X).shape == (12,)
for mean in (gpt.Zero(), gpt.ConstantMean(1.0), gpt.LinearMean([1.0, 2.0])):
    for y in (X[:, 0], X):
        approx = gpt.Exact(gpt.GP(gpt.RBF(), gpt.Gaussian(0.1), mean))
        assert approx.objective(X, y).shape == ()
        post, P = approx.posterior(X, y), y.shape[1:]
        assert post.mean(Xs).shape == (5, *P) and post.covariance(Xs, X).shape == (*P, 5, 12)
        assert post.sample(jax.random.key(0), Xs, 3).shape == (3, 5, *P)
        assert all(a.shape == (5, *P) for a in (*post.marginals(Xs), *post.predict_y(Xs), post.log_predictive_density(Xs, y[:5])))
assert gpt.sample_prior(jax.random.key(0), gpt.RBF(), X, 4).shape == (4, 12)
gpt.fit(approx, (X, X), steps=2, progress=False)
model, classes = gpt.GP(gpt.RBF(), gpt.Gaussian(0.1)), gpt.GP(gpt.RBF(), gpt.Bernoulli())
labels = jnp.asarray(rng.integers(0, 2, 12), float)
points, blocks = gpt.InducingPoints(X[:4]), [range(5), range(5, 12)]
for approx, y in ((gpt.VFE(model, points), X), (gpt.VFE(model, gpt.GaussianWindow(X[:4], 0.1)), X[:, 0]),
                  (gpt.VFE(model, gpt.Wavelet(X[:4], 0.1, [1.0, 2.0])), X), (gpt.FITC(model, points), X[:, 0]),
                  (gpt.DTC(model, points), X), (gpt.PowerEPRegression(model, points, 0.5, blocks), X)):
    assert approx.objective(X, y).shape == () and len(approx.evidence_interval(X, y)) == 2
    post, P = approx.posterior(X, y), y.shape[1:]
    assert post.covariance(Xs, X).shape == (*P, 5, 12) and post.sample(jax.random.key(0), Xs, 3).shape == (3, 5, *P)
    assert all(a.shape == (5, *P) for a in (*post.marginals(Xs), *post.predict_y(Xs)))
    assert gpt.uncollapsed_bound(post, X, y).shape == () and post.inducing_mean.shape == (4, *P)
for approx in (gpt.VGP(classes, 12), gpt.WhitenedVGP(classes, 12), gpt.MeanField(classes, 12)):
    assert approx.objective(X, labels).shape == ()
    post = approx.posterior(X, labels)
    assert post.covariance(Xs).shape == (5, 5) and post.sample(jax.random.key(0), Xs, 2).shape == (2, 5)
    assert all(a.shape == (5,) for a in (*post.marginals(Xs), *post.predict_y(Xs), post.log_predictive_density(Xs, labels[:5])))
three = gpt.GP(gpt.RBF(), gpt.RobustMax(3))
for approx, y in ((gpt.SVGP(classes, points), labels), (gpt.SVGP(classes, points, whiten=False), labels),
                  (gpt.SVGP(model, points, 2), X), (gpt.SVGP(model, [points, points]), X),
                  (gpt.SVGP(three, points), labels), (gpt.SVGP(three, [points] * 3, whiten=False), labels)):
    assert approx.objective(X, y).shape == approx.objective(X, y, num_data=20).shape == ()
    post, P = approx.posterior(), approx.q.m.value.shape[1:]
    assert post.covariance(Xs, X).shape == (*P, 5, 12) and post.sample(jax.random.key(0), Xs, 2).shape == (2, 5, *P)
    assert all(a.shape == (5, *P) for a in (*post.marginals(Xs), *post.predict_y(Xs)))
    assert post.log_predictive_density(Xs, y[:5]).shape == y[:5].shape
gpt.fit(gpt.SVGP(model, [points, points]), (X, X), optimiser=gpt.natural_gradient(0.5, gpt.adadelta()), steps=2, batch_size=4,
        key=jax.random.key(0), progress=False)
assert gpt.kmeans_centres(X, 3).shape == (3, 2)
with pytest.raises(TypeCheckError):
    linalg.log_determinant("not an array")   # the checks are on
"""


def test_every_public_piece_keeps_to_its_signature():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(USE)], cwd=TOP, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
