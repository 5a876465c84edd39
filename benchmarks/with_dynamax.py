"""What dynamax says of linear Gaussian systems: log likelihoods, and means and covariances given the whole series.

Needs the environment of requirements-dynamax.txt and nothing of this package. It writes results/kalman.json, systems and
answers, which tests/test_gpssm.py compares with ours.

There x_0 has an observation, here the first is of x_1; and there no observation can be missing. Both are weights of zero for
an observation of zero, whose log density under the noise alone is then subtracted again."""

import json
from importlib.metadata import version
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import numpy as np
from dynamax.linear_gaussian_ssm import lgssm_smoother
from dynamax.linear_gaussian_ssm.inference import make_lgssm_params

RESULTS = Path(__file__).parent / "results" / "kalman.json"


def system(seed, T, D, P, C, gaps):
    "x_t = F x_{t-1} + B c_t + b + noise of variances Q and y_t = U x_t + d + noise of variances R, from x_0 ~ N(m0, diag S0)."
    rng = np.random.default_rng(seed)
    p = dict(F=0.8 * np.linalg.qr(rng.normal(size=(D, D)))[0], B=rng.normal(size=(D, C)), b=0.3 * rng.normal(size=D),
             Q=rng.uniform(0.05, 0.3, D), U=rng.normal(size=(P, D)), d=0.3 * rng.normal(size=P), R=rng.uniform(0.05, 0.4, P),
             m0=rng.normal(size=D), S0=rng.uniform(0.5, 1.5, D), c=rng.normal(size=(T, C)))
    x, Y = p["m0"] + np.sqrt(p["S0"]) * rng.normal(size=D), []
    for c in p["c"]:
        x = p["F"] @ x + p["B"] @ c + p["b"] + np.sqrt(p["Q"]) * rng.normal(size=D)
        Y.append(p["U"] @ x + p["d"] + np.sqrt(p["R"]) * rng.normal(size=P))
    seen = rng.uniform(size=(T, P)) >= gaps
    if gaps:
        seen[T // 2] = False
    return p | dict(Y=np.array(Y), seen=seen)


def answer(p):
    seen = np.vstack([np.zeros_like(p["seen"][:1]), p["seen"]])
    weights = np.where(seen[:, :, None], p["U"], 0)
    y = np.where(seen, np.vstack([0 * p["d"], p["Y"] - p["d"]]), 0)
    params = make_lgssm_params(
        jnp.array(p["m0"]), jnp.diag(p["S0"]), jnp.array(p["F"]), jnp.diag(p["Q"]), jnp.array(weights), jnp.diag(p["R"]),
        dynamics_bias=jnp.array(p["b"]), dynamics_input_weights=jnp.array(p["B"]))
    inputs = np.vstack([np.zeros_like(p["c"][:1]), p["c"]])  # each leads to the state with its number
    found = lgssm_smoother(params, jnp.array(y), jnp.array(inputs))
    made_up = -0.5 * np.sum(np.where(seen, 0, np.log(2 * np.pi * p["R"])))
    return dict(log_likelihood=float(found.marginal_loglik) - made_up, mean=np.asarray(found.smoothed_means),
                cov=np.asarray(found.smoothed_covariances))


def main():
    systems = {"one state": system(0, 7, 1, 1, 0, 0.0), "two states, controls": system(1, 7, 2, 3, 1, 0.0),
               "two states, gaps": system(2, 7, 2, 3, 1, 0.3)}
    for p in systems.values():
        p["dynamax"] = answer(p)
        print(p["dynamax"]["log_likelihood"])
    versions = {package: version(package) for package in ("dynamax", "jax", "numpy")}
    RESULTS.write_text(json.dumps(dict(versions=versions, systems=systems), indent=1, default=np.ndarray.tolist) + "\n")


if __name__ == "__main__":
    main()
