"""Gaussian processes: models, approximations, posteriors and how to fit them.

A model says what you believe, an approximation how you will compute, a posterior
answers questions, `fit` turns knobs:

    import gp_thesis as gpt
    model = gpt.GP(gpt.RBF(), gpt.Gaussian())
    result = gpt.fit(gpt.Exact(model), (X, y))
    mean, var = result.approx.posterior(X, y).marginals(Xs)

Importing this package leaves JAX's configuration as it is and loads no notebook or
plotting library.
"""

import gc as _gc
import json as _json
import sys as _sys
from contextlib import contextmanager as _contextmanager
from importlib import import_module as _import_module
from operator import attrgetter as _attrgetter
from pathlib import Path as _Path


@_contextmanager
def _no_search_for_garbage():
    """While modules load, which are none: a sixth of the time of an import.
    They count as old at the end, for the collector to pass over."""
    collecting, frozen = _gc.isenabled(), _gc.get_freeze_count()
    _gc.disable()
    try:
        yield
    finally:
        if not frozen:
            _gc.freeze(), _gc.unfreeze()
        if collecting:
            _gc.enable()


with _no_search_for_garbage():
    import equinox as _eqx

    from .checkpoints import load, save
    from .ep import EP, GFITC, PowerEP, SparseMeanField, WeakBound, weak_bound
    from .exact import (
        GP, Approximation, Exact, ExactPosterior, GaussianPosterior, Posterior)
    from .fitting import Fit, fit
    from .inducing import (
        GaussianWindow, InducingPoints, InducingPosterior, InducingVariables,
        Wavelet)
    from .kernels import (
        RBF, Constant, ConstantMean, Coregion, Cosine, Exponential, IdentityMean,
        Independent, Kernel, Linear, LinearMean, Matern12, Matern32, Matern52, Mean,
        Periodic, Polynomial, Process, Product, RationalQuadratic, Sum, White,
        Wiener, Zero, sample_prior)
    from .likelihoods import (
        Bernoulli, Beta, Binomial, Gamma, Gaussian, Heteroscedastic, Likelihood,
        NegativeBinomial, Ordinal, Poisson, RobustMax, Softmax, StudentT)
    from .linalg import kept_memory, nan_on_failure, one_blas_thread
    from .parameters import (
        Parameter, cast, free, freeze, log_prior, log_prior_unconstrained,
        lower_triangular, partition, positive, unfreeze, unit_interval, unwrap)
    from .sparse import (
        DTC, FITC, PITC, VFE, EvidenceInterval, PowerEPRegression, Statistics,
        uncollapsed_bound)
    from .svgp import (
        SVGP, VariationalGaussian, adadelta, kmeans_centres, natural_gradient)
    from .tied_factors import ApproximatePowerEP
    from .variational import VGP, MeanField, PointPosterior, WhitenedVGP


def _explain():
    """For `help()`: docstrings with equations and works by number and year, and what
    the comments beside arguments say, in the place of those of the source."""
    texts = _json.loads(_Path(__file__).with_name("help.json").read_text("utf-8"))
    for module, members in texts.items():
        loaded = _sys.modules.get(f"{__name__}.{module}")
        for name, text in members.items() if loaded else ():
            try:
                member = _attrgetter(name)(loaded)
            except AttributeError:  # renamed, and tools.help has not run since
                continue
            member = getattr(member, "__func__", member)  # of a method of the class
            frozen = isinstance(member, _eqx.Module)      # a compiled function
            (object.__setattr__ if frozen else setattr)(member, "__doc__", text)


_WHEN_ASKED_FOR = {
    **dict.fromkeys(("GPRegressor", "GPClassifier"), "estimators"),
    **dict.fromkeys(("GPMC", "SGPMC", "Mixture", "Run", "calibrate", "sample"), "mcmc"),
    **dict.fromkeys((
        "GPLVM", "ApproximatePowerGPLVM", "CollapsedGPLVM", "Latents", "PointGPLVM",
        "PowerGPLVM", "infer_rows", "predict_rows", "principal_components",
        "row_log_density"),
        "gplvm"),
    **dict.fromkeys((
        "ApproximatePowerGPSSM", "CollapsedGPSSM", "CoupledGPSSM", "CoupledStates",
        "Draws", "FactorisedStates", "GPSSM", "LinearEmission", "MarkovStates",
        "PowerChainGPSSM", "PowerGPSSM", "PriorStates", "StateSpace", "coupled",
        "series"), "gpssm"),
    **dict.fromkeys(("ApproximatePowerCoupledGPSSM", "ParticleGPSSM", "by_particles"),
                    "particles")}


def __getattr__(name):
    "What not every user needs, when asked for."
    if name in _WHEN_ASKED_FOR:
        module = _import_module(f".{_WHEN_ASKED_FOR[name]}", __name__)
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

_explain()
