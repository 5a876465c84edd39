"GPClassifier keeps scikit-learn's rules, and its probabilities are those of the book's methods and near the truth."
import warnings

import jax
import numpy as np
import pytest
from scipy.special import ndtr
from sklearn.utils.estimator_checks import check_estimator

import gp_thesis as gpt
from gp_thesis.estimators import GPClassifier

rng = np.random.default_rng(0)
X = rng.uniform(-3, 3, (400, 2)) * [1.0, 100.0]
truth = ndtr(2 * np.sin(1.5 * X[:, 0]))
y = np.where(rng.uniform(size=400) < truth, "yes", "no")

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def test_scikit_learns_own_checks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(GPClassifier(max_iter=5, num_inducing=10))         # few, to share programs


def test_two_classes_of_any_name():
    classifier = GPClassifier(gpt.RBF([0.7, 3.0]), max_iter=30).fit(X, y)
    p = classifier.predict_proba(X)
    assert classifier.classes_.tolist() == ["no", "yes"] and classifier.method_ == "vgp"
    assert p.shape == (400, 2) and np.allclose(p.sum(axis=1), 1)
    assert np.array_equal(classifier.predict(X), np.where(p[:, 1] > 0.5, "yes", "no"))
    assert np.abs(p[:, 1] - truth).mean() < 0.1                             # and not only nearer than a coin
    standard = (X - X.mean(axis=0)) / X.std(axis=0)
    assert np.allclose(p[:, 1], classifier.result_.approx.posterior(standard).predict_y(standard)[0])


def test_a_column_of_ones_does_not_end_at_chance():
    "Hyperparameters that moved while q knew nothing ended at a kernel without variance, where the bound is N log ½."
    random = np.random.default_rng(0)
    random.dirichlet(np.ones(4), size=120)
    x = random.uniform(-2, 2, 120)
    y = np.sin(3 * x) + 0.3 * random.normal(size=120) > 0
    ends = [GPClassifier(random_state=0).fit(X[:60], y[:60]) for X in (x[:, None], np.c_[x, np.ones(120)])]
    alone, beside = (end.result_.history.objective[-1] for end in ends)
    assert np.isclose(alone, beside, atol=0.01) and beside > 60 * np.log(0.5) + 15
    assert ends[1].method_ == "vgp" and ends[1].score(np.c_[x, np.ones(120)][60:], y[60:]) > 0.9


def test_inducing_points_for_two_classes_and_for_three():
    few = GPClassifier(gpt.RBF([0.7, 3.0]), method="svgp", num_inducing=30, max_iter=20, random_state=0).fit(X, y)
    assert few.method_ == "svgp" and np.abs(few.predict_proba(X)[:, 1] - truth).mean() < 0.12
    band = np.digitize(X[:, 0], [-1.0, 1.0]) * 10
    three = GPClassifier(num_inducing=20, max_iter=10, random_state=0).fit(X, band)
    p = three.predict_proba(X[:50])
    assert p.shape == (50, 3) and np.allclose(p.sum(axis=1), 1) and three.classes_.tolist() == [0, 10, 20]
    assert three.score(X, band) > 0.95 and three.method_ == "svgp"
    with pytest.raises(ValueError, match="method must be None or one of 'svgp', got 'vgp'"):
        GPClassifier(method="vgp").fit(X, band)


def test_labels_that_are_none():
    with pytest.raises(ValueError, match="at least two classes, got one class: 'no'"):
        GPClassifier().fit(X, np.full(400, "no"))
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        GPClassifier().fit(X, truth)


@pytest.mark.parametrize("rows, steps, double", [(400, 50, False), (400, 50, True), (6000, 1000, True)])
def test_several_classes_in_both_precisions_and_by_minibatches(rows, steps, double):
    "With the robust maximum natural steps led far below the prior, where fits then ended: two thirds of labels wrong in float32."
    X = np.random.default_rng(0).uniform(-3, 3, (rows, 2)) * [1.0, 100.0]
    band = np.digitize(X[:, 0], [-1.0, 1.0])
    with jax.enable_x64(double):
        classifier = GPClassifier(num_inducing=30, max_iter=steps, random_state=0).fit(X, band)
        assert classifier.score(X, band) > 0.98
    assert classifier.result_.history.objective[-100:].mean() > -0.3 * rows * np.log(3)    # that of the prior is below -rows log 3


def test_probabilities_where_classes_overlap():
    rng = np.random.default_rng(3)
    which = rng.integers(3, size=1000)
    X = np.array([[0.0, 0.0], [1.5, 0.0], [0.0, 1.5]])[which] + rng.normal(size=(1000, 2))
    p = GPClassifier(max_iter=50, random_state=0).fit(X[:400], which[:400]).predict_proba(X[400:])
    density = np.exp(-0.5 * np.sum((X[400:, None] - np.array([[0.0, 0.0], [1.5, 0.0], [0.0, 1.5]])) ** 2, axis=-1))
    best = density / density.sum(axis=1, keepdims=True)
    loss = lambda p: -np.mean(np.log(p[np.arange(600), which[400:]]))
    assert loss(best) - 0.02 < loss(p) < loss(best) + 0.05                  # the robust maximum: 1.2 more
