"A module in a file and back, bit by bit; files that are damaged, foreign, from strangers or of another precision."
import json
import pickle
import subprocess
import sys
import warnings
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints

import gp_thesis as gpt
from gp_thesis import cox, gpssm
from gp_thesis.checkpoints import FORMAT, load, save, thing_of
from gp_thesis.parameters import Fixed, Parameter, free, freeze, positive
from test_contracts import APPROXIMATIONS, X

Xs = np.linspace(0.3, 3.7, 3)[:, None]


def there_and_back(module, folder):
    save(folder / "file.gpt", module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(folder / "file.gpt")


def assert_same(one, other):
    "The same classes and static fields, and arrays of the same kind with the same bits."
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert type(a) is type(b)
        if isinstance(a, (jax.Array, np.ndarray)):
            assert a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        else:
            assert a == b


@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_approximations_and_posteriors_come_back_bit_by_bit(name, tmp_path):
    approx, y = APPROXIMATIONS[name]
    back = there_and_back(approx, tmp_path)
    assert_same(approx, back)
    assert np.array_equal(approx.objective(X, y), back.objective(X, y))
    post = approx.posterior(X, y)
    again = there_and_back(post, tmp_path)
    assert_same(post, again)
    for a, b in zip(post.marginals(Xs), again.marginals(Xs)):
        assert np.array_equal(a, b)


KERNELS = (gpt.RBF(gpt.positive(0.5, prior=dist.LogNormal(0.0, 1.0))) * gpt.Periodic() + gpt.Linear(active_dims=[0, 2]) + 2.0)
AVERAGE, POINTS, Y = positive(1.0, prior=dist.Gamma(2.0, 2.0)), gpt.InducingPoints(X[::3]), np.sin(np.arange(6.0))[:, None]
SERIES = gpt.StateSpace(gpt.Process(gpt.RBF(), gpt.IdentityMean()), gpt.LinearEmission([[1.0]]))
MODULES = {
    "kernel": KERNELS,
    "model": freeze(gpt.GP(KERNELS, gpt.StudentT(0.3, df=5.0), gpt.LinearMean([1.0, 2.0, 3.0]))),
    "rates": gpt.GP(gpt.Wiener(), gpt.Poisson(None)),
    "classes": gpt.GP(gpt.White(), gpt.RobustMax(4, 0.01)),
    "outputs": gpt.GP(gpt.Coregion(3, rank=2, active_dims=[1]) * gpt.RationalQuadratic(active_dims=[0]), gpt.NegativeBinomial()),
    "two functions": gpt.GP(gpt.Independent([gpt.RBF(), gpt.Matern12()]), gpt.Heteroscedastic()),
    "order": gpt.GP(gpt.RBF(), gpt.Ordinal([-1.0, 0.0, 2.0])),
    "trials": gpt.GP(gpt.RBF(), gpt.Binomial(None, "logit")),
    "waves": gpt.Wavelet(X, [0.5], 2.0),
    "power by block": gpt.PowerEPRegression(gpt.GP(gpt.RBF(), gpt.Gaussian()), gpt.InducingPoints(X), [0.2, 0.7], [[0, 2], [1, 3]]),
    "any power": gpt.PowerEP(gpt.GP(gpt.RBF(), gpt.Poisson()), gpt.InducingPoints(X), 0.3, rate=0.5, sequential=True),
    "power one, all inputs": gpt.EP(gpt.GP(gpt.RBF(), gpt.Bernoulli()), rounds=50),
    "tied": gpt.ApproximatePowerEP(gpt.GP(gpt.RBF(), gpt.Softmax(3)), gpt.InducingPoints(X), 0.7),
    "chains": gpt.GPMC(gpt.GP(gpt.RBF(AVERAGE), gpt.Poisson()), len(X)),
    "chains, inducing points": gpt.SGPMC(gpt.GP(gpt.RBF(AVERAGE), gpt.Bernoulli()), POINTS),
    "events": cox.CoxSVGP(gpt.GP(gpt.RBF(AVERAGE), cox.PoissonProcess([[0.0, 4.0]])), POINTS),
    "events, chains": cox.CoxSGPMC(gpt.GP(gpt.RBF(AVERAGE), cox.PoissonProcess([[0.0, 4.0]], "exp", nodes=20)), POINTS),
    "states": gpt.GPSSM(SERIES, POINTS, gpt.MarkovStates(Y)),
    "states, drawn": gpt.GPSSM(SERIES, POINTS, gpt.FactorisedStates(Y), through=gpt.Draws(5)),
    "states, linearised": gpt.GPSSM(SERIES, POINTS, gpt.FactorisedStates(np.zeros((len(Y), 1))), through=gpssm.linear),
    "states, best q(u)": gpt.CollapsedGPSSM(SERIES, POINTS, gpt.MarkovStates(Y)),
    "states, any power": gpt.PowerGPSSM(SERIES, POINTS, len(Y), 0.5),
    "states, tied": gpt.ApproximatePowerGPSSM(SERIES, POINTS, gpt.FactorisedStates(Y), 0.5),
    "states in a chain, any power": gpt.PowerChainGPSSM(SERIES, POINTS, len(Y), 0.5),
    "states by particles": gpt.ParticleGPSSM(SERIES, POINTS, len(Y), number=7),
    "states that follow the function": gpt.ApproximatePowerCoupledGPSSM(SERIES, POINTS, gpt.PriorStates(Y[0], len(Y)), 0.5),
    "states that know the function": gpt.CoupledGPSSM(SERIES, POINTS, gpt.CoupledStates(Y)),
    "single precision": gpt.cast(gpt.GP(gpt.Matern32([0.1, 0.3]), gpt.Beta()), jnp.float32),
}


@pytest.mark.parametrize("name", MODULES)
def test_models_and_their_parts(name, tmp_path):
    assert_same(MODULES[name], there_and_back(MODULES[name], tmp_path))


@pytest.mark.parametrize("prior", [
    dist.Gamma(2.0, 3.0), dist.Uniform(0.0, 2.0), dist.HalfNormal(1.0), dist.InverseGamma(2.0, 1.0),
    dist.TruncatedNormal(1.0, 0.5, low=0.0), dist.LogNormal(jnp.zeros(2), 1.0).to_event(1), dist.Exponential(2.0).expand([2]),
], ids=lambda prior: type(prior).__name__)
def test_priors(prior, tmp_path):
    back = there_and_back(positive([0.5, 1.5] if prior.shape() else 0.5, prior=prior), tmp_path)
    assert np.array_equal(gpt.unwrap(back.prior).log_prob(back.value), prior.log_prob(back.value))
    assert gpt.unwrap(back.prior).batch_shape == prior.batch_shape and gpt.unwrap(back.prior).event_shape == prior.event_shape


class Everything(eqx.Module):
    "All that a file can hold."
    a: dict
    b: tuple
    c: Parameter
    d: Fixed
    e: object
    f: object = eqx.field(static=True)
    g: object = eqx.field(static=True)


def everything(**changed):
    shared = np.array([[1.5, np.nan], [-np.inf, -0.0]])
    parts = dict(
        a={"x": shared, "y": {(2, "z"): None, (1, "y"): [True, -3, "words", 0.1, float("inf")]}},
        b=(shared, np.float32(0.1), np.arange(3, dtype=np.int8), jnp.array([True, False]), np.asfortranarray(np.ones((2, 3)))),
        c=gpt.unit_interval(0.3), d=Fixed(np.array(2)), e=freeze(free([1.0, 2.0])),
        f=(jax.nn.softplus, jnp.tanh, constraints.open_interval(0.0, 2.0)), g=None)
    return Everything(**(parts | changed))


def test_what_a_file_can_hold(tmp_path):
    one = everything()
    back = there_and_back(one, tmp_path)
    assert_same(one, back)
    assert back.f[0] is jax.nn.softplus and type(back.b[1]) is np.float32 and back.a["x"] is back.b[0]
    names = zipfile.ZipFile(tmp_path / "file.gpt").namelist()
    assert sum(name.endswith(".npy") for name in names) == 8                # what stands in two places is written once
    save(tmp_path / "again", back)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file.gpt").read_bytes()


@pytest.mark.parametrize("part, words", [
    (lambda x: x, r"module\.e is <function .*, which cannot be saved"), (np.array([object()]), r"module\.e is an array of object"),
    (np.array(["a"]), r"module\.e is an array of <U1"), (jax.random.key(0), r"module\.e is an array of key"),
    ([1, {"k": {1}}], r"module\.e\[1\]\['k'\] is \{1\}, which cannot be saved"), (subprocess.run, "cannot be saved"),
], ids=["lambda", "object", "text", "key", "set", "function of another package"])
def test_what_a_file_cannot_hold_is_refused_by_its_place_and_leaves_no_file(part, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        save(tmp_path / "file", everything(e=part))
    assert not list(tmp_path.iterdir())


def test_only_modules_are_saved_and_not_while_they_are_traced(tmp_path):
    class Local(eqx.Module):
        pass

    for other in ({"a": 1}, gpt.RBF, None):
        with pytest.raises(ValueError, match="module must be .* save result.approx, of what `sample` returns run.posterior; got"):
            save(tmp_path / "file", other)
    with pytest.raises(ValueError, match="cannot be saved"):
        save(tmp_path / "file", Local())
    with pytest.raises(ValueError, match="is traced: save outside of jit"):
        jax.jit(lambda x: save(tmp_path / "file", gpt.unwrap(eqx.tree_at(lambda k: k.variance.unconstrained, gpt.RBF(), x))))(1.0)
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path):
    save(file := tmp_path / "file", gpt.RBF(1.0))
    before = file.read_bytes()
    with pytest.raises(ValueError):
        save(file, everything(e={1}))
    assert file.read_bytes() == before
    save(str(file), gpt.RBF(2.0))
    assert float(load(str(file)).lengthscale.value) == pytest.approx(2.0) and [file] == list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "other")


def rewritten(file, **changed):
    "The file with another head."
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    head = json.loads(parts.pop("head.json")) | changed
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("head.json", json.dumps(head))
        for name, content in parts.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("cut", [0.0, 0.2, 0.6, 0.99])
def test_a_truncated_file(cut, tmp_path):
    save(file := tmp_path / "cut.gpt", MODULES["model"])
    file.write_bytes(file.read_bytes()[: int(cut * file.stat().st_size)])
    with pytest.raises(ValueError, match="cut.gpt is not a whole file"):
        load(file)


def test_any_changed_byte_of_an_array_is_noticed(tmp_path):
    save(file := tmp_path / "flip.gpt", gpt.InducingPoints(np.arange(512.0)[:, None]))
    content = bytearray(file.read_bytes())
    content[content.index(np.arange(200.0, 202.0).tobytes())] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="flip.gpt is not a whole file"):
        load(file)


def test_foreign_files(tmp_path):
    file = tmp_path / "foreign"
    foreign = [lambda: file.write_text("words"), lambda: file.write_bytes(pickle.dumps(3)), lambda: np.savez(file.open("wb"), a=1),
               lambda: (save(file, gpt.RBF()), rewritten(file, tree={"class": "gp_thesis.kernels:RBF"})),
               lambda: (save(file, gpt.RBF()), rewritten(file, tree={"code": "1 + 1"})),
               lambda: (save(file, gpt.RBF()), rewritten(file, arrays=["numpy"])),
               lambda: (save(file, gpt.RBF()), rewritten(file, arrays=["jax"] * 9))]
    for write in foreign:
        write()
        with pytest.raises(ValueError, match="foreign is not a whole file that gp_thesis.save wrote"):
            load(file)


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_another_format(other, tmp_path):
    save(file := tmp_path / "another", gpt.RBF())
    rewritten(file, format=other, version="9.0")
    with pytest.raises(ValueError, match=f"another has format {other}, .* reads format {FORMAT}: load it with .* version 9.0"):
        load(file)


def test_a_folder_that_is_not_there_is_named_as_it_was_given(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder for .*nowhere/kernel"):
        save(tmp_path / "nowhere" / "kernel", gpt.RBF())


@pytest.mark.parametrize("name", [
    "os:system", "builtins:eval", "subprocess:Popen", "antigravity:fly", "test_saving:nothing", "numpy:ndarray", "jax:jit",
    "gp_thesis.nothing:Kernel", "gp_thesis.kernels:RBF.covariance", "gp_thesis..os:system", "gp_thesis.checkpoints:os.system"])
def test_a_strangers_file_names_only_what_a_module_is_made_of(name, tmp_path):
    save(file := tmp_path / "stranger", gpt.RBF())
    for tree in ({"class": name, "fields": {"args": "true"}}, {"function": name}):
        if name in ("jax:jit", "gp_thesis.kernels:RBF.covariance") and "function" in tree:
            continue                                                        # functions of JAX and of this package
        rewritten(file, tree=tree)
        with pytest.raises(ValueError, match="is in the file and not known here: import or define"):
            load(file)
    assert "antigravity" not in sys.modules


def test_a_class_that_is_not_imported_or_has_changed(tmp_path):
    save(file := tmp_path / "file", everything())
    code = f"import jax; jax.config.update('jax_enable_x64', True); import gp_thesis as gpt; gpt.load({str(file)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ValueError" in done.stderr and "test_saving:Everything is in the file and not known here: import" in done.stderr
    save(file, gpt.Gaussian())
    rewritten(file, tree={"class": "gp_thesis.likelihoods:Gaussian", "fields": {"scale": 1.0}})
    with pytest.raises(ValueError, match=r"has the fields \['scale'\] in the file and \['variance'\] here: .* another version"):
        load(file)


def test_a_module_of_this_package_need_not_be_imported(tmp_path):
    save(file := tmp_path / "file", gpt.SVGP(gpt.GP(gpt.RBF(), gpt.Bernoulli()), gpt.InducingPoints(X)))
    code = ("import jax, sys; jax.config.update('jax_enable_x64', True); from gp_thesis.checkpoints import load\n"
            f"print(type(load({str(file)!r})).__name__)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "SVGP", done.stderr
    assert thing_of("gp_thesis.svgp:SVGP") is gpt.SVGP


def test_another_precision_is_said(tmp_path):
    save(double := tmp_path / "double", gpt.RBF())
    save(narrow := tmp_path / "narrow", gpt.cast(gpt.RBF(), jnp.float32))
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match="double holds float64 numbers, and JAX would make them float32: .*jax_enable_x64.*cast"):
            load(double)
        single = load(narrow)
        assert single.lengthscale.unconstrained.dtype == jnp.float32
        save(made := tmp_path / "made", gpt.RBF())
        save(whole := tmp_path / "whole", everything(a=None, b=(np.arange(3),), d=None, c=None, e=None, f=None))
        load(made), load(whole)                                             # NumPy's integers stay what they are
    with pytest.warns(UserWarning, match="made was saved in single precision .float32., and JAX now works in double"):
        back = load(made)
    assert back.variance.unconstrained.dtype == jnp.float32
