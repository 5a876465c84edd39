"""What GPy says of small problems: its Power EP for regression, its EP, and its EP with the prior of DTC.

Needs the environment of requirements-gpy.txt and nothing of this package. It writes results/gpy.json, problems and answers,
which tests/test_gpy.py compares with ours."""

import json
from pathlib import Path

import GPy
import numpy as np
import paramz
import scipy

RESULTS = Path(__file__).parent / "results" / "gpy.json"
POWERS = (0.01, 0.2, 0.5, 0.8, 1.0)
EXACT = dict(epsilon=1e-24, max_iters=1000)  # EP goes on until its sites stand still


def problem(seed, rows, dimensions, inducing):
    "Inputs, a smooth function with noise, its signs, inducing inputs and test inputs."
    rng = np.random.default_rng(seed)
    X, Xs = rng.uniform(-2, 2, (rows, dimensions)), rng.uniform(-2.5, 2.5, (5, dimensions))
    f = np.sin(2 * X[:, 0]) + 0.5 * X[:, -1]
    y = f + 0.3 * rng.standard_normal(rows)
    label = (f + 0.5 * rng.standard_normal(rows) > 0).astype(float)
    lengthscale, variance = rng.uniform(0.7, 1.5, dimensions), 1.3
    return dict(X=X, y=y, label=label, Z=X[rng.choice(rows, inducing, replace=False)], Xs=Xs,
                lengthscale=lengthscale, variance=variance, noise=0.15)


def kernel(p):
    return GPy.kern.RBF(p["X"].shape[1], variance=p["variance"], lengthscale=p["lengthscale"], ARD=True)


def answer(k, p, posterior, log_marginal):
    "The log marginal likelihood, and moments of f at the test inputs."
    inputs = p["Z"] if posterior.woodbury_vector.shape[0] == len(p["Z"]) else p["X"]
    mean, var = posterior._raw_predict(k, p["Xs"], inputs)
    return dict(log_marginal=np.sum(log_marginal).item(), mean=mean[:, 0], var=var[:, 0])


def pep(p, power):
    method = GPy.inference.latent_function_inference.pep.PEP(power)
    method.const_jitter = 0.0  # else 1e-6 on the diagonal of the kernel matrix of Z
    k, noise = kernel(p), GPy.likelihoods.Gaussian(variance=p["noise"])
    posterior, value, _ = method.inference(k, p["X"], p["Z"], noise, p["y"][:, None])
    return answer(k, p, posterior, value)


def observed(p):
    return paramz.ObsAr(p["label"][:, None])


def ep(p):
    method = GPy.inference.latent_function_inference.EP(**EXACT)
    k = kernel(p)
    posterior, value, _ = method.inference(k, p["X"], GPy.likelihoods.Bernoulli(), observed(p))
    return answer(k, p, posterior, value)


def ep_dtc(p):
    "Its log marginal likelihood has the price of VFE in it, sum τ_n d_n / 2, and that of EP has not."
    method = GPy.inference.latent_function_inference.EPDTC(**EXACT)
    k = kernel(p)
    posterior, value, _ = method.inference(k, p["X"], p["Z"], GPy.likelihoods.Bernoulli(), observed(p))
    precision = method._ep_approximation[1].tau
    return answer(k, p, posterior, value) | dict(precision=precision)


def main():
    problems = [problem(0, 40, 1, 8), problem(2, 90, 3, 20)]
    for p in problems:
        p["gpy"] = {f"PEP {power:g}": pep(p, power) for power in POWERS} | {"EP": ep(p), "EPDTC": ep_dtc(p)}
    versions = {package.__name__: package.__version__ for package in (GPy, np, scipy, paramz)}
    text = json.dumps(dict(versions=versions, problems=problems), indent=1, default=np.ndarray.tolist)
    RESULTS.write_text(text + "\n")
    for p in problems:
        print({name: round(found["log_marginal"], 8) for name, found in p["gpy"].items()})


if __name__ == "__main__":
    main()
