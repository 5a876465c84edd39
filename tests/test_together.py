"Fits whose losses and gradients are one program."

import csv

import jax
import numpy as np
import pytest

from gp_thesis import GP, RBF, Gaussian, InducingPoints, Matern52, PowerEPRegression, data, fit, optimisers
from tools.together import SharedError, Together, add_together, go_on_together, groups, run_together

NAMES = ("set", "split", "power")


def problem(split, rows=30):
    x = np.sort(np.random.default_rng(split).uniform(size=(rows, 1)), axis=0)
    return x, np.sin(6 * x[:, 0]) + 0.1 * np.random.default_rng(split + 10).normal(size=rows)


def learn(name, split, power, rows=30):
    if name == "none":
        raise RuntimeError("no such set")
    X, y = problem(split, rows)
    kernel = Matern52(0.3) if name == "rough" else RBF(0.3)
    approx = PowerEPRegression(GP(kernel, Gaussian(0.1)), InducingPoints(X[::6].copy()), power)
    result = fit(approx, (X, y), steps=3 + split, progress=False)
    post = result.approx.posterior(X, y)
    return float(result.history.objective[-1]), result.steps, float(post.mean(X[:1])[0])


KEYS = [("sine", split, 0.5) for split in range(3)]


def test_fits_that_share_programs_end_where_they_end_alone():
    alone = {key: learn(*key) for key in KEYS}
    together = Together(KEYS)
    shared = {key: future.result() for key, future in run_together(learn, KEYS, together)}
    for key in KEYS:
        np.testing.assert_allclose(shared[key], alone[key], rtol=1e-9)  # so few steps that rounding has not grown
    longest = max(steps for _, steps, _ in alone.values())
    assert longest <= together.calls < sum(steps for _, steps, _ in alone.values())
    assert optimisers.loss_and_gradient.__module__ == "gp_thesis.optimisers"  # all is as it was


def test_nobody_waits_for_who_has_failed():
    ends = dict(run_together(learn, [*KEYS[:2], ("none", 0, 0.5)]))
    with pytest.raises(RuntimeError, match="no such set"):
        ends["none", 0, 0.5].result()
    assert all(np.isfinite(ends[key].result()).all() for key in KEYS[:2])


@pytest.mark.parametrize("other, words", [(("rough", 1, 0.5), "arrays only"), (("sine", 1, 0.5, 36), "same shape")])
def test_what_differs_in_more_than_numbers_is_an_error_of_all(other, words):
    ends = dict(run_together(learn, [KEYS[0], other]))
    for future in ends.values():
        with pytest.raises(SharedError, match=words):
            future.result()


def test_a_program_that_fails_makes_no_rows(tmp_path, monkeypatch):
    "Memory that is short is a RuntimeError of JAX; as a row of NaN it would be a fit that has lost."
    monkeypatch.setenv("GP_THESIS_PROFILE", "paper")
    monkeypatch.setattr(data, "_results", lambda: tmp_path)

    def short(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr("tools.together._losses_and_gradients", short)
    with pytest.raises(SharedError, match="RESOURCE_EXHAUSTED"):
        add_together("X", learn, KEYS, NAMES, ("objective", "steps", "mean"))
    assert not list(tmp_path.iterdir())


def test_a_start_without_a_value_fails_alone():
    def spoilt(name, split, power):
        X, y = problem(split)
        approx = PowerEPRegression(GP(RBF(0.3), Gaussian(0.1)), InducingPoints(X[::6].copy()), power)
        return fit(approx, (X, y * (1e200 if split == 1 else 1)), steps=3, progress=False).history.objective[-1]

    alone, ends = spoilt(*KEYS[0]), dict(run_together(spoilt, KEYS))
    assert isinstance(ends[KEYS[1]].exception(), FloatingPointError)
    assert np.isclose(ends[KEYS[0]].result(), alone, rtol=1e-8) and np.isfinite(ends[KEYS[2]].result())


def test_only_splits_are_fitted_together():
    order = [(name, split, power) for split in range(2) for name in "ab" for power in (0.0, 1.0)]
    found = groups(order[1:], NAMES)
    assert sorted(map(len, found)) == [1, 2, 2, 2] and sum(found, []) != order[1:]
    assert all(len({(name, power) for name, _, power in keys}) == 1 for keys in found)


def test_rows_are_made_once_and_in_time(tmp_path, monkeypatch):
    monkeypatch.setenv("GP_THESIS_PROFILE", "paper")
    monkeypatch.setattr(data, "_results", lambda: tmp_path)
    order, columns = [*KEYS[:2], ("none", 0, 0.5)], ("objective", "steps", "mean")
    assert not go_on_together(data.go_on, 0.0)("X", learn, order, NAMES, columns, None)
    add_together("X", learn, order[:1], NAMES, columns)
    rows = go_on_together(data.go_on, 60.0)("X", learn, order, NAMES, columns, None)
    header, *lines = csv.reader(open(tmp_path / "X.csv"))
    assert header == [*NAMES, *columns, "seconds"] and len(lines) == 3 and list(rows) == order
    assert np.isnan(rows["none", 0, 0.5][:3]).all() and rows[KEYS[1]][1] == learn(*KEYS[1])[1]
    assert jax.tree.reduce(np.minimum, [row[-1] for row in rows.values()]) >= 0
