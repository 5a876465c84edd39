"GPy's Power EP for regression, its EP and its EPDTC: benchmarks/results/gpy.json, made by benchmarks/with_gpy.py."
import json

import jax.numpy as jnp
import numpy as np
import pytest

from conftest import TOP
from gp_thesis.ep import EP, PowerEP, ep_evidence, prior_of, rounds_of, settle, sites_to_posterior
from gp_thesis.exact import GP
from gp_thesis.inducing import InducingPoints
from gp_thesis.kernels import RBF
from gp_thesis.likelihoods import Bernoulli, Gaussian
from gp_thesis.parameters import unwrap
from gp_thesis.sparse import PowerEPRegression

PROBLEMS = json.loads((TOP / "benchmarks" / "results" / "gpy.json").read_text())["problems"]
POWERS = sorted(name for name in PROBLEMS[0]["gpy"] if name.startswith("PEP"))


def arrays(problem):
    return {name: np.asarray(value) for name, value in problem.items() if name != "gpy"}


def model(p, likelihood):
    return GP(RBF(p["lengthscale"], p["variance"].item()), likelihood)


def agree(value, posterior, Xs, theirs):
    mean, var = posterior.marginals(Xs)
    np.testing.assert_allclose(value, theirs["log_marginal"], rtol=1e-6)
    np.testing.assert_allclose(mean, theirs["mean"], atol=1e-6)
    np.testing.assert_allclose(var, theirs["var"], atol=1e-6)


@pytest.mark.parametrize("name", POWERS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["1-d", "3-d"])
def test_regression(problem, name):
    p = arrays(problem)
    approx = PowerEPRegression(model(p, Gaussian(p["noise"].item())), InducingPoints(p["Z"]), float(name.split()[1]))
    agree(approx.objective(p["X"], p["y"]), approx.posterior(p["X"], p["y"]), p["Xs"], problem["gpy"][name])


@pytest.mark.parametrize("problem", PROBLEMS, ids=["1-d", "3-d"])
def test_labels(problem):
    p = arrays(problem)
    approx = EP(model(p, Bernoulli()), tolerance=1e-10)
    agree(approx.objective(p["X"], p["label"]), approx.posterior(p["X"], p["label"]), p["Xs"], problem["gpy"]["EP"])


@pytest.mark.parametrize("problem", PROBLEMS, ids=["1-d", "3-d"])
def test_labels_with_the_prior_of_dtc(problem):
    "Ours with D = 0. Their log marginal likelihood subtracts Σ τ_n D_n / 2 as if the sites were Gaussian noise of VFE."
    p, theirs = arrays(problem), problem["gpy"]["EPDTC"]
    approx = unwrap(PowerEP(model(p, Bernoulli()), InducingPoints(p["Z"]), tolerance=1e-10))
    prior = prior_of(approx, jnp.asarray(p["X"]))
    theta = prior._replace(D=jnp.zeros_like(prior.D)), approx.model.likelihood, jnp.asarray(p["label"]), None
    settled = settle(rounds_of(approx), theta)
    np.testing.assert_allclose(settled.sites.precision, theirs["precision"], atol=1e-6)
    priced = ep_evidence(settled, theta) - 0.5 * jnp.sum(settled.sites.precision * prior.D)
    agree(priced, sites_to_posterior(approx, jnp.asarray(p["X"]), settled.sites), p["Xs"], theirs)
    unpriced = ep_evidence(settled, theta)
    assert abs(unpriced - priced) > 1e-3
