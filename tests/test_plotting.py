"The posterior's picture holds the numbers it was given; the theme holds."

import subprocess
import sys

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from gp_thesis import plotting
from gp_thesis.plotting import plot_posterior, set_theme


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


x = np.linspace(-1, 1, 21)
mean, var = np.sin(x), 0.1 + x**2


def band(ax):
    "Lower and upper edge of the band at each x, from the polygon that was drawn."
    corners = ax.collections[0].get_paths()[0].vertices
    edges = [np.sort(corners[np.isclose(corners[:, 0], value), 1]) for value in x]
    return np.array([edge[0] for edge in edges]), np.array([edge[-1] for edge in edges])


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("order", [np.arange(21), np.random.default_rng(0).permutation(21)], ids=["sorted", "shuffled"])
def test_mean_and_band(ax, shape, order):
    assert plot_posterior(ax, x[order].reshape(shape), mean[order], var[order], label="here") is ax
    (line,) = ax.lines
    np.testing.assert_array_equal(line.get_xdata(), x)
    np.testing.assert_array_equal(line.get_ydata(), mean)
    assert line.get_label() == "here" and line.get_color() == plotting.POSTERIOR
    lower, upper = band(ax)
    np.testing.assert_allclose(lower, mean - 2 * np.sqrt(var))
    np.testing.assert_allclose(upper, mean + 2 * np.sqrt(var))


def test_data_and_samples(ax):
    samples = np.array([mean + 1, mean - 1, 2 * mean])
    plot_posterior(ax, x, mean, var, X=np.array([[0.5], [0.1]]), y=np.array([1.0, 2.0]), samples=samples)
    *drawn, line, dots = ax.lines
    assert len(drawn) == 3 and all(sample.get_color() == plotting.SAMPLES for sample in drawn)
    np.testing.assert_array_equal([sample.get_ydata() for sample in drawn], samples)
    np.testing.assert_array_equal(line.get_ydata(), mean)
    np.testing.assert_array_equal(np.c_[dots.get_xdata(), dots.get_ydata()], [[0.5, 1.0], [0.1, 2.0]])
    assert dots.get_color() == plotting.DATA


def test_rounding_below_zero_is_drawn_as_zero(ax):
    slipped = np.where(x == 0, -1e-12, var)
    plot_posterior(ax, x, mean, slipped)
    lower, upper = band(ax)
    assert lower[10] == upper[10] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(mean=mean[:-1]), r"mean has shape \(20,\); accepted: \(21,\)"),
        (dict(var=var[:, None] * np.ones(2)), r"var has shape \(21, 2\)"),
        (dict(var=var - 0.5), "var is negative"),
        (dict(mean=np.full(21, np.nan)), "mean .* finite"),
        (dict(Xs=np.zeros((21, 3))), r"Xs has shape \(21, 3\); accepted: \(N,\) or \(N, 1\), or \(N, 2\) for two inputs"),
        (dict(Xs=np.full((21, 2), np.nan)), r"Xs has shape \(21, 2\)"),
        (dict(Xs=np.c_[x, 2 * x]), "Xs must have three points that do not lie on one line"),
        (dict(Xs=np.c_[x, x**2], samples=[mean]), "samples can be drawn over one input only"),
        (dict(Xs=np.c_[x, x**2], X=[1.0], y=[1.0]), r"X has shape \(1,\); accepted: \(N, 2\)"),
        (dict(Xs=np.c_[x, x**2], X=[[1.0, 2.0]]), "X and y go together"),
        (dict(Xs=np.c_[x, x**2], var=var - 0.5), "var is negative"),
        (dict(Xs=np.c_[x, x**2], mean=mean[1:]), r"mean has shape \(20,\)"),
        (dict(samples=np.zeros((21, 3))), "samples has shape"),
        (dict(X=[1.0, 2.0], y=[1.0]), r"y has shape \(1,\); accepted: \(2,\)"),
        (dict(X=[1.0]), "X and y go together"),
        (dict(y=[1.0]), "X and y go together"),
    ],
)
def test_bad_input(ax, arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_posterior(ax, **(dict(Xs=x, mean=mean, var=var) | arguments))
    assert not ax.lines and not ax.collections  # nothing half drawn


def on_a_line(points, plane, value):
    "Whether points of contour lines lie where a plane has the value."
    return np.allclose(points @ plane, value, atol=1e-9)


def test_over_two_inputs_contours_follow_mean_and_deviation(ax):
    grid = np.stack(np.meshgrid(np.linspace(0, 1, 9), np.linspace(0, 2, 7)), -1).reshape(-1, 2)
    grid = grid[np.random.default_rng(0).permutation(len(grid))]
    slope, rise = np.array([1.0, 0.5]), np.array([0.25, 1.0])
    X, y = np.array([[0.2, 0.4], [0.9, 1.5]]), np.array([0.1, 3.0])
    assert plot_posterior(ax, grid, grid @ slope, (1 + grid @ rise) ** 2, X=X, y=y, label="mean") is ax
    filled, lines, dots = ax.collections
    assert np.isclose(filled.levels[0], 0) and np.isclose(filled.levels[-1], 3)         # the data are on the scale too
    for level, segments in zip(lines.levels, lines.allsegs):
        assert all(on_a_line(points, rise, level - 1) for points in segments if len(points))
    assert sum(len(segments) > 0 for segments in lines.allsegs) >= 3 and filled.norm.vmax == dots.norm.vmax == 3
    np.testing.assert_array_equal(dots.get_offsets(), X)
    np.testing.assert_array_equal(dots.get_array(), y)
    assert np.allclose(dots.to_rgba(y)[1], filled.cmap(1.0)) and ax.figure.axes[1].get_ylabel() == "mean"


def test_over_two_inputs_a_constant_mean_and_deviation_are_drawn_without_warning(ax, recwarn):
    grid = np.random.default_rng(0).uniform(size=(9, 2))
    plot_posterior(ax, grid, np.zeros(9), np.ones(9), color=plotting.INDUCING)
    ax.figure.canvas.draw()
    assert len(ax.collections) == 1 and not recwarn.list


def test_theme():
    with matplotlib.rc_context():
        set_theme(width=5.0)
        assert list(matplotlib.rcParams["figure.figsize"]) == [5.0, 3.2]
        assert not matplotlib.rcParams["axes.spines.top"]
        figure = plt.figure()
        assert figure.get_dpi() == 100
        plt.close(figure)


# what a reader without one kind of cone sees (Machado, Oliveira and Fernandes, 2009, full severity), in linear RGB
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


@pytest.mark.parametrize("kind", BLINDNESS)
def test_roles_can_be_told_apart(kind):
    roles = [plotting.DATA, plotting.POSTERIOR, plotting.SAMPLES, plotting.INDUCING, plotting.REFERENCE]
    linear = np.array([to_rgb(role) for role in roles]) ** 2.2
    seen = np.clip(linear @ np.array(BLINDNESS[kind]).T, 0, 1) ** (1 / 2.2)
    distances = np.linalg.norm(seen[:, None] - seen, axis=-1)[np.triu_indices(5, 1)]
    assert distances.min() > 0.2


def test_package_does_not_import_it():
    code = "import sys, gp_thesis; print(sorted({'matplotlib', 'seaborn', 'pandas', 'IPython'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
