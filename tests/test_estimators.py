"GPRegressor keeps scikit-learn's rules, gives the predictions of its hyperparameters, and chooses its method by size."
import pickle
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.gaussian_process import GaussianProcessRegressor, kernels
from sklearn.utils.estimator_checks import check_estimator

import gp_thesis as gpt
from gp_thesis import estimators
from gp_thesis.estimators import REGRESSION, SEVERAL_CLASSES, TWO_CLASSES, GPRegressor, method_for, predicted

rng = np.random.default_rng(0)
X = rng.uniform(0, 1, (40, 2)) * [10.0, 0.1] + [100.0, 0.0]
y = 5e3 * np.sin(X[:, 0]) + 2e4 + 200 * rng.normal(size=40)
Xs = X[:7] + [0.3, 0.01]

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def regressor():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return GPRegressor(max_iter=30, random_state=0).fit(X, y)


def test_scikit_learns_own_checks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(GPRegressor(max_iter=10))


def test_predictions_are_those_of_the_fitted_hyperparameters_in_the_units_of_the_data(regressor):
    model, X_scale, y_scale = gpt.unwrap(regressor.result_.approx.model), X.std(axis=0), y.std()
    theirs = GaussianProcessRegressor(
        float(model.kernel.variance * y_scale**2) * kernels.RBF(np.asarray(model.kernel.lengthscale) * X_scale)
        + kernels.WhiteKernel(float(model.likelihood.variance * y_scale**2)), optimizer=None, alpha=0.0)
    mean, sd = theirs.fit(X, y - y.mean()).predict(Xs, return_std=True)
    ours = regressor.predict(Xs, return_std=True)
    assert np.allclose(ours[0], mean + y.mean(), rtol=1e-8) and np.allclose(ours[1], sd, rtol=1e-7)
    assert np.array_equal(regressor.predict(Xs), ours[0]) and regressor.method_ == "exact"
    there = theirs.log_marginal_likelihood_value_ + 40 * np.log(y_scale)
    assert np.isclose(regressor.result_.history.objective[-1], there, rtol=1e-8)


def test_units_are_no_matter(regressor):
    other = GPRegressor(max_iter=30).fit(X * [1e-3, 1e5] - 7, 1e-6 * y + 3)
    mean, sd = other.predict(Xs * [1e-3, 1e5] - 7, return_std=True)
    ours = regressor.predict(Xs, return_std=True)
    assert np.allclose(1e6 * (mean - 3), ours[0], rtol=1e-4) and np.allclose(1e6 * sd, ours[1], rtol=1e-3)


def test_the_method_follows_from_the_rows_or_the_name():
    assert [method_for(None, N, REGRESSION) for N in (1, 2000, 2001, 20_000, 20_001, 10**7)] == ["exact"] * 2 + ["vfe"] * 2 + ["svgp"] * 2
    assert [method_for(None, N, TWO_CLASSES) for N in (1000, 1001)] == ["vgp", "svgp"]
    assert method_for(None, 3, SEVERAL_CLASSES) == "svgp" and method_for("vfe", 3, REGRESSION) == "vfe"
    for method in ("Exact", 3, ["vfe"]):
        with pytest.raises(ValueError, match="method must be None or one of 'exact', 'vfe', 'svgp', got"):
            GPRegressor(method=method).fit(X, y)


@pytest.mark.parametrize("method, rows", [("vfe", 5000), ("svgp", 5000), ("svgp", 20)])
def test_other_methods_come_near_the_exact_one(method, rows, regressor, monkeypatch):
    monkeypatch.setattr(estimators, "ALL_ROWS", rows)                 # the last one in minibatches
    monkeypatch.setattr(estimators, "MOST_CLUSTERED", 30)
    other = GPRegressor(method=method, num_inducing=25, max_iter=30 if rows > 40 else 400, random_state=0)
    if rows < 40:
        monkeypatch.setattr(estimators, "fit", lambda *a, batch_size=None, **k: gpt.fit(*a, batch_size=batch_size and 20, **k))
    other.fit(X, y)
    assert other.method_ == method and other.score(X, y) > 0.9
    assert type(other.result_.approx).__name__ == {"vfe": "PowerEPRegression", "svgp": "SVGP"}[method]
    error = np.sqrt(np.mean((other.predict(Xs) - regressor.predict(Xs)) ** 2))
    assert error < 0.35 * y.std()
    assert np.array_equal(clone(other).fit(X, y).predict(Xs), other.predict(Xs))      # the same random state


def test_columns_of_y_are_functions_with_their_own_units():
    Y = np.c_[y, -1e-3 * y, rng.normal(size=40)]
    both = GPRegressor(max_iter=5).fit(X, Y)
    mean, sd = both.predict(Xs, return_std=True)
    assert mean.shape == sd.shape == (7, 3) and np.allclose(mean[:, 1], -1e-3 * mean[:, 0]) and np.allclose(sd[:, 1], 1e-3 * sd[:, 0])
    column = GPRegressor(max_iter=5).fit(X, y[:, None])
    assert column.predict(Xs).shape == (7, 1) and np.allclose(column.predict(Xs)[:, 0], GPRegressor(max_iter=5).fit(X, y).predict(Xs))


def test_predictions_in_chunks_are_those_of_single_rows(regressor, monkeypatch):
    many = rng.normal(size=(150, 2))
    whole = predicted(regressor.posterior_, many)
    monkeypatch.setattr(estimators, "CHUNK", 64)
    for one, other, direct in zip(predicted(regressor.posterior_, many), whole, regressor.posterior_.predict_y(many)):
        assert one.shape == (150,) and np.allclose(one, other, rtol=1e-10) and np.allclose(one, direct, rtol=1e-10)


def test_parameters():
    kernel = gpt.Matern32([0.5, 2.0])
    regressor = GPRegressor(kernel, num_inducing=7)
    assert regressor.get_params() == dict(kernel=kernel, method=None, num_inducing=7, max_iter=None, restarts=1,
                                          random_state=None)
    assert "Matern32" in repr(regressor) and clone(regressor).num_inducing == 7
    assert regressor.set_params(max_iter=2, kernel=gpt.RBF()).fit(X, y).n_iter_ == 2
    assert isinstance(regressor.result_.approx.model.kernel, gpt.RBF)
    single = gpt.cast(gpt.RBF(), jnp.float32)
    assert GPRegressor(single, max_iter=2).fit(X, y).posterior_.L.dtype == float    # in the precision that JAX computes in
    with pytest.raises(ValueError, match="kernel must be a gp_thesis Kernel"):
        GPRegressor("rbf").fit(X, y)
    for bad in (dict(max_iter=0), dict(restarts=0), dict(method="vfe", num_inducing=0)):
        with pytest.raises(ValueError, match="steps must be|restarts must be|num_inducing must be"):
            GPRegressor(**bad).fit(X, y)
    with pytest.raises(NotFittedError):
        GPRegressor().predict(X)


def test_y_that_is_no_number_is_shown():
    import pandas as pd
    gap = pd.Series(np.arange(40), name="price").astype("Int64")
    gap[29] = pd.NA
    for wrong, message in ((["a", *y[1:]], "y must be a number or an array of numbers, got .* with 'a' in it"),
                           (np.full(40, "a"), "y must be a number or an array of numbers, got ndarray with 'a' in it"),
                           (gap, "column 'price' has NaN or infinity, first in row 29"),
                           (pd.Series(["a"] * 40, name="price"), "y must be numbers without gaps, but column 'price' is"),
                           (pd.Series(np.where(np.arange(40) == 3, np.nan, y), name="price"), "column 'price' has NaN or infinity, first in row 3")):
        with pytest.raises(ValueError, match=message):
            GPRegressor(max_iter=1).fit(X, wrong)
        if isinstance(wrong, pd.Series):
            with pytest.raises(ValueError, match=message):
                gpt.Exact(gpt.GP(gpt.RBF(), gpt.Gaussian())).objective(X, wrong)
    assert GPRegressor(max_iter=1).fit(X, gap.fillna(2).astype(object)).method_ == "exact"


def test_of_several_starts_the_best_is_kept():
    slow = gpt.RBF([100.0, 100.0])     # from here one climb takes the sine for noise
    once, several = (GPRegressor(slow, restarts=n, random_state=0).fit(X, y) for n in (1, 4))
    ends, best = several.result_.restarts, several.result_.history.objective[-1]
    assert once.result_.restarts is None and ends.shape == (4,)
    assert ends[0] == once.result_.history.objective[-1] and ends.max() == best > ends[0] + 5
    assert several.score(X, y) > once.score(X, y) + 0.1


def test_tables_are_taken_and_columns_without_numbers_are_named(regressor):
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame(X, columns=["a", "b"]).assign(c=pd.array([0, 1] * 20, "Int64"), d=[True, False] * 20)
    fitted = GPRegressor(max_iter=2).fit(table, pd.Series(y))
    assert list(fitted.feature_names_in_) == ["a", "b", "c", "d"] and fitted.predict(table[:7]).shape == (7,)
    for column, wrong in ((["x", "y"] * 20, "is (str|object)"), (pd.array([1, None] * 20, "Int64"), "is Int64|has NaN"), ([1, np.nan] * 20, "has NaN")):
        for estimator in (GPRegressor(), estimators.GPClassifier()):
            with pytest.raises(ValueError, match=f"X must have columns of numbers without gaps, but column 'c' ({wrong})"):
                estimator.fit(table.assign(c=column), np.arange(40) % 2)
        with pytest.raises(ValueError, match="column 'c'"):
            fitted.predict(table.assign(c=column))


def test_another_precision_is_said(regressor):
    restored = pickle.loads(pickle.dumps(regressor))
    assert np.array_equal(restored.predict(Xs), regressor.predict(Xs))
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match="GPRegressor was fitted in float64, and JAX would make it float32: .*jax_enable_x64"):
            pickle.loads(pickle.dumps(regressor)).predict(Xs)
        single = GPRegressor(max_iter=5).fit(X, y)
    assert np.isfinite(single.predict(Xs)).all()


def test_a_fit_that_ends_early_says_so():
    with pytest.warns(ConvergenceWarning, match="Exact has not converged: all steps were taken. A larger max_iter"):
        GPRegressor(max_iter=2).fit(X, y)


def test_the_package_gives_them_on_demand_and_does_not_import_scikit_learn(top):
    assert gpt.GPRegressor is GPRegressor and gpt.GPClassifier is estimators.GPClassifier
    with pytest.raises(AttributeError, match="no attribute 'GPNothing'"):
        gpt.GPNothing
    code = "import sys, gp_thesis; assert 'sklearn' not in sys.modules; gp_thesis.GPRegressor; print('sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=top, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
