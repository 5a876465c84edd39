"Chapter 63: the neuron's simulator, what the model sees of it, horizons, forecasts given f, and the verdicts."
import json
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

from conftest import TOP

NOTEBOOK = TOP / "nbs" / "63_dynamics.ipynb"
RESULTS = TOP / "nbs" / "results"


@pytest.fixture(scope="module")
def chapter():
    "Names that cells of the chapter define, up to the numbers of its first experiment; no fit."
    cells = {cell["id"]: "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"}
    names = {}
    for id in ("d002", "d003", "d011", "d012", "d013", "d015", "d020", "d030", "d031", "d060", "d061", "d080", "d082", "d083"):
        exec(compile(cells[id], id, "exec"), names)
    return names


def test_a_cell_at_rest_stays_there(chapter):
    rest, neuron = chapter["rest"], chapter["neuron"]
    assert np.abs(neuron(rest, 0.0)).max() < 1e-12
    assert np.abs(chapter["simulate"](rest, jnp.zeros(5000)) - rest).max() < 1e-9
    assert -65.1 < rest[0] < -64.9 and ((rest[1:] > 0) & (rest[1:] < 1)).all()


@pytest.mark.parametrize("V, rate, limit", [(-40.0, 0, 1.0), (-55.0, 2, 0.1)])
def test_rates_have_their_limits_where_the_formula_has_none(chapter, V, rate, limit):
    for step in (0.0, 1e-9, 1e-5, -1e-5):
        assert chapter["opening"](jnp.asarray(V + step))[0][rate] == pytest.approx(limit, rel=1e-6)
    assert np.isfinite(jax.jacfwd(lambda V: chapter["opening"](V)[0])(jnp.asarray(V))).all()


def test_gates_stay_between_closed_and_open_and_charge_is_kept(chapter):
    path, I, neuron = chapter["recorded"], chapter["injected"], chapter["neuron"]
    assert ((path[:, 1:] > 0) & (path[:, 1:] < 1)).all()
    fine = np.asarray(chapter["simulate"](chapter["rest"], np.full(2000, 10.0)))
    slopes = np.asarray(jax.vmap(lambda x: neuron(x, 10.0))(fine))
    charge = 0.01 * np.cumsum((slopes[1:] + slopes[:-1])[:, 0] / 2)                        # ∫ dV/dt dt, by trapezia
    assert np.abs(charge - (fine[1:, 0] - fine[0, 0])).max() < 5e-2 and len(path) == len(I)


def test_a_gate_alone_relaxes_exponentially(chapter):
    "Where dV/dt is held at nothing: d z/dt = α - (α + β) z."
    V = jnp.asarray(-50.0)
    up, down = chapter["opening"](V)
    slope = chapter["neuron"](jnp.array([-50.0, 0.2, 0.3, 0.4]), 0.0)[1:]
    assert slope == pytest.approx(np.asarray(up - (up + down) * jnp.array([0.2, 0.3, 0.4])), rel=1e-12)


def test_the_error_falls_with_the_fourth_power_of_the_step(chapter):
    last = lambda step: np.asarray(chapter["simulate"](chapter["rest"], np.full(round(5 / step), 12.0), step))[-1]
    exact = last(0.00125)
    errors = [np.abs(last(step) - exact).max() for step in (0.02, 0.01)]
    assert errors[0] / errors[1] > 12                                                      # at least: 16 in the limit


def test_the_simulator_agrees_with_scipy(chapter):
    neuron = jax.jit(chapter["neuron"])
    found = solve_ivp(lambda t, x: np.asarray(neuron(x, 12.0)), (0, 10), np.asarray(chapter["rest"]), method="DOP853", rtol=1e-10, atol=1e-12)
    ours = chapter["record_neuron"](chapter["rest"], np.full(100, 12.0))[-1]
    assert ours == pytest.approx(found.y[:, -1], rel=1e-6)


def test_the_simulator_agrees_with_brian(chapter):
    theirs = json.loads((TOP / "benchmarks" / "results" / "hodgkin_huxley.json").read_text())
    ours = chapter["record_neuron"](theirs["start"], chapter["current"](theirs["pieces"], theirs["duration"]))
    apart = np.abs(ours[4::5] - theirs["states"]).max(axis=0)
    assert apart[0] < 1e-3 and apart[1:].max() < 1e-5 and np.ptp(np.array(theirs["states"])[:, 0]) > 100
    assert [tuple(piece) for piece in theirs["pieces"]] == chapter["SEEN"] and theirs["start"] == pytest.approx(np.asarray(chapter["rest"]), abs=1e-8)


def test_what_the_model_sees(chapter):
    (Y, c), thin = chapter["train"], chapter["THIN"]
    assert len(Y) == len(c) == len(chapter["recorded"]) // thin
    assert Y.mean(axis=0) == pytest.approx(0, abs=1e-12) and Y.std(axis=0) == pytest.approx(1) and c.std() == pytest.approx(1)
    assert Y[6] * chapter["SCALE"] + chapter["CENTRE"] == pytest.approx(chapter["recorded"][7 * thin - 1])
    assert c[60] * chapter["UNIT"] == pytest.approx(2) and c[59] == 0                      # 30 ms: the first step of the current
    first = chapter["current"]([(1, 2, 0, 10), (3, 4, 5, 5)], 5)
    assert len(first) == 50 and first[10:20] == pytest.approx(np.arange(10.0)) and (first[30:40] == 5).all() and first[40:].sum() == 0


def test_distances_and_horizons(chapter):
    first, second = (np.zeros((3, 2)), np.ones((3, 2))), (np.full((3, 2), 3.0), np.full((3, 2), 5.0))
    assert chapter["distance"](first, second) == pytest.approx([25.0] * 3)
    squares = np.r_[np.zeros(100), np.ones(300)]
    assert chapter["horizon"](squares, 0.5) == 106 and chapter["horizon"](squares, 2.0) == 400    # seven ones of 25 are above a quarter
    assert chapter["horizon"](squares, 1.0) == 400 and chapter["horizon"](np.ones(5), 0.5) == 0


def test_machines_are_in_units_of_the_training_half_and_begin_at_their_outputs(chapter):
    for name in chapter["SYSTEMS"]:
        try:
            raw = chapter["system_identification"](name).outputs
        except FileNotFoundError:
            pytest.skip(f"{name} is not in $GP_THESIS_DATA")
        y, u, y_next, u_next, unit = chapter["task"](name)
        assert y.mean() == pytest.approx(0, abs=1e-9) and y.std() == pytest.approx(1) and u.std() == pytest.approx(1)
        assert len(y_next) == len(u_next) == chapter["machine_design"]["ahead"]
        assert unit * (y_next[3] - y_next[2]) == pytest.approx(raw[len(y) + 3] - raw[len(y) + 2])
        x = chapter["first_states"](y, u, 4, seed=1)
        assert x.shape == (len(y) + 1, 4) and (x[1:, :1] == y).all() and np.corrcoef(x[1:].T) == pytest.approx(np.eye(4), abs=0.1)
    assert (chapter["windows"](np.arange(5.0)[:, None], 3) == [[0, 0, 0], [1, 0, 0], [2, 1, 0], [3, 2, 1], [4, 3, 2]]).all()


def test_without_files_the_quick_profile_simulates_and_the_paper_profile_stops(chapter, monkeypatch):
    def missing(name):
        raise FileNotFoundError(name)

    monkeypatch.setitem(chapter, "system_identification", missing)
    with pytest.warns(UserWarning, match="no file of dryer"):
        y, u, y_next, u_next, unit = chapter["task"]("dryer")
    assert y.shape == u.shape == (500, 1) and np.isfinite(y).all() and y.std() == pytest.approx(1)
    monkeypatch.setitem(chapter, "profile", lambda: "paper")
    with pytest.raises(FileNotFoundError):
        chapter["task"]("dryer")


def test_forecasts_given_f_are_exact_for_a_linear_function(chapter, monkeypatch):
    "x_t = a x_{t-1} + c_t + noise, whose covariances are known."
    a, q, v, S = 0.8, 0.3, 0.2, 6
    monkeypatch.setitem(chapter, "columns", lambda post, X: (a * X[:, :1] + X[:, 1:], jnp.full((len(X), 1), v)))
    c = jnp.linspace(-1, 1, S)
    mean, cov = chapter["linearised"](None, q, (0.5, 0.7), c)
    powers = np.tril(a ** np.maximum(np.subtract.outer(np.arange(S), np.arange(S)), 0))
    start = a ** np.arange(1, S + 1)
    assert mean == pytest.approx(powers @ np.asarray(c) + 0.5 * start)
    assert cov == pytest.approx((q + v) * powers @ powers.T + 0.7 * np.outer(start, start))


def test_gains_are_the_information_of_a_linear_gaussian_model(chapter):
    rng, K, S = np.random.default_rng(0), 4000, 3
    A, C = rng.normal(size=(S, 2)), 0.5 * np.eye(S)
    mean = jnp.asarray(rng.normal(size=(K, 2)) @ A.T)[None]
    exact = 0.5 * (np.linalg.slogdet(A @ A.T + C)[1] - np.linalg.slogdet(C)[1])
    cov = jnp.broadcast_to(C, (1, K, S, S))
    assert chapter["gaussian_gain"](mean, cov)[0] == pytest.approx(exact, abs=0.05)
    three = chapter["gaussian_gain"](mean[0, :3999].reshape(1333, 3, S), jnp.broadcast_to(C, (1333, 3, S, S)))
    assert three.mean() < exact - 0.1                                                      # of few draws, on average
    few = chapter["nested_gain"](jax.random.key(0), mean[:, :500], cov[:, :500])[0]
    assert few == pytest.approx(exact, abs=0.1)
    apart = chapter["nested_gain"](jax.random.key(0), 100 * mean[:, :8], cov[:, :8])[0]
    assert apart == pytest.approx(np.log(8), abs=1e-6)                                     # it was told which of eight it is
    same = jnp.zeros_like(mean[:, :8])
    assert chapter["nested_gain"](jax.random.key(0), same, cov[:, :8])[0] == pytest.approx(0, abs=1e-9)
    assert chapter["gaussian_gain"](same, cov[:, :8])[0] == pytest.approx(0, abs=1e-9)


def test_verdicts_are_those_of_the_rules():
    entries = {entry["id"]: entry for entry in tomllib.loads((TOP / "nbs" / "catalogue.toml").read_text())["entry"]}
    words = {"agrees": "agrees", "differs": "differs by", "contradicts": "contradicts"}
    for name in ("B-F3.12", "B-F3.13"):
        values = json.loads((RESULTS / f"{name}.json").read_text())["values"]
        said = [words[value] for key, value in values.items() if key.startswith("verdict, ")]
        assert sorted(claim["verdict"] for claim in entries[name]["claim"]) == sorted(said)
    values = json.loads((RESULTS / "B-F3.12.json").read_text())["values"]
    low, high = values["power 0.2, matched 1, tenth"], values["power 0.2, matched 1, ninetieth"]
    assert values["verdict, about 100 steps"] == ("agrees" if low <= 100 <= high else "differs")
