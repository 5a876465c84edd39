"""Chapter 52's verdicts in the catalogue are those of its records, which apply the chapter's rule; and its statistics
by hand, by tables and on data whose answer is known."""
import json
import tomllib

import numpy as np
import pytest
from conftest import TOP
from scipy import stats

ENTRIES = tomllib.loads((TOP / "nbs" / "catalogue.toml").read_text())["entry"]
WORDS = {"agrees": "agrees", "differs": "differs by", "contradicts": "contradicts"}


def test_verdicts_are_those_of_the_rule():
    seen = 0
    for entry in (entry for entry in ENTRIES if entry["id"] in ("B-F2.4", "B-F2.6")):
        values = json.loads((TOP / "nbs" / "results" / f"{entry['id']}.json").read_text())["values"]
        for name, verdict in values.items():
            comparison, _, what = name.rpartition(", ")
            if what != "verdict":
                continue
            low, high = values[f"{comparison}, interval"]
            theirs, ours, seen = values[f"{comparison}, published"], values[comparison], seen + 1
            if low <= theirs <= high:
                assert verdict == "agrees", comparison
            else:
                apart = (ours - 0.5) * (theirs - 0.5) < 0 and not low <= 0.5 <= high
                assert verdict == ("contradicts" if apart else "differs"), comparison
            claim = next(claim for claim in entry["claim"] if f"{{{comparison}|" in claim["here"])
            assert claim["verdict"] == WORDS[verdict], comparison
    assert seen == 7


def test_no_critical_difference_between_powers_on_labels():
    values = json.loads((TOP / "nbs" / "results" / "B-F2.6.json").read_text())["values"]
    for name in ("error", "NLL"):
        ranks = values[f"{name}: average ranks by power"]
        assert max(ranks) - min(ranks) < values[f"{name}: critical difference"]


@pytest.fixture(scope="module")
def chapter():
    "The chapter's functions of scores, from its cells."
    cells = json.loads((TOP / "nbs" / "52_which_power.ipynb").read_text())["cells"]
    names = {"np": np, "stats": stats, "Markdown": str}
    for cell in cells:
        source = "".join(cell["source"])
        if any(f"def {name}(" in source for name in ("table_of", "compare_powers", "ranks_of")):
            exec(source, names)
    return names


DESIGN = {"sets": ("a", "b"), "splits": 3, "inducing": (5, 9), "powers": (0.0, 0.5, 1.0)}


def test_scores_find_their_places(chapter):
    fits = {("b", 2, 9, 0.5): [0.1, 7.0], ("a", 0, 5, 1.0): [np.nan, 8.0]}
    table = chapter["table_of"](fits, DESIGN, 0)
    assert table.shape == (2, 3, 2, 3) and np.isnan(table).sum() == table.size - 2
    assert table[1, 2, 1, 1] == 0.1 and table[0, 0, 0, 2] == np.inf
    assert chapter["table_of"](fits, DESIGN, 1)[1, 2, 1, 1] == 7


def test_wins_by_hand(chapter):
    first, second = np.array([1.0, 2.0, 3.0, np.nan, np.inf]), np.array([2.0, 2.0, 1.0, 1.0, np.inf])
    assert np.array_equal(chapter["won"](first, second), [1, 0.5, 0, np.nan, 0.5], equal_nan=True)
    wins = np.full((2, 3, 2), np.nan)
    wins[0, :, 0], wins[0, 0, 1], wins[1, 0, 0] = (1, 1, 0), 0, 1  # means 2/3, 0, 1: sizes with more splits count no more
    with np.errstate(invalid="ignore"):
        assert np.isclose(chapter["mean_of_means"](wins), 5 / 9)


def test_intervals_cover_what_they_should(chapter):
    "Sets differ in how often they are won: the interval holds the world's average in about 95 % of worlds, no less than 85."
    rng, held = np.random.default_rng(0), 0
    for world in range(60):
        rates = rng.beta(4, 2, size=20)  # 2/3 on average
        wins = (rng.random((20, 8, 2)) < rates[:, None, None]).astype(float)
        low, high = chapter["interval"](wins, draws=200, seed=world)
        held += low <= 2 / 3 <= high
    assert 51 <= held <= 60


def test_a_set_counts_once_however_many_splits_it_has(chapter):
    wins = np.full((2, 4, 1), np.nan)
    wins[0], wins[1, 0] = 1, 0
    low, high = chapter["interval"](wins, draws=400)
    assert (low, high) == (0, 1)


@pytest.mark.parametrize("ours, low, high, theirs, said", [
    (0.6, 0.4, 0.8, 0.7, "agrees"), (0.9, 0.8, 0.95, 0.7, "differs"), (0.6, 0.4, 0.7, 0.3, "differs"),
    (0.8, 0.7, 0.9, 0.3, "contradicts"), (0.2, 0.1, 0.3, 0.7, "contradicts"), (0.6, 0.4, 0.8, None, "nothing published")])
def test_the_rule(chapter, ours, low, high, theirs, said):
    assert chapter["verdict"](ours, low, high, theirs) == said


def test_comparisons_of_made_up_fits(chapter):
    fits = {(name, split, M, power): [abs(power - 0.5) + 0.01 * split, power]
            for name in DESIGN["sets"] for split in range(3) for M in DESIGN["inducing"] for power in DESIGN["powers"]}
    published = {"SMSE": {(0.5, 0.0): 0.67, (1.0, 0.0): 0.36}, "SMLL": {(0.5, 0.0): 0.93}}
    rows = chapter["compare_powers"](fits, DESIGN, ["SMSE", "SMLL"], published)
    assert [row[2] for row in rows] == [1.0, 0.5, 0.0]
    assert [row[-1] for row in rows] == ["differs", "differs", "contradicts"]


def test_ranks_and_critical_differences(chapter):
    "Against Demšar's table 5 (q = 2.343 for three methods, 2.569 for four) and his worked example (four on 14 sets: 1.25)."
    ranks = chapter["ranks_of"](np.array([[0.3, 0.1, 0.2], [0.1, 0.1, 0.5], [np.nan, 1, 2]]))
    assert np.array_equal(ranks, [[3, 1, 2], [1.5, 1.5, 3], [np.nan] * 3], equal_nan=True)
    assert np.isclose(chapter["critical_difference"](3, 8), 2.343 * (3 * 4 / (6 * 8)) ** 0.5, rtol=1e-3)
    assert np.isclose(chapter["critical_difference"](4, 14), 1.25, atol=0.01)
    fits = {(name, split, M, power): [power + 0.001 * split]
            for name in DESIGN["sets"] for split in range(3) for M in DESIGN["inducing"] for power in DESIGN["powers"]}
    average, (low, high), difference, p = chapter["average_ranks"](fits, DESIGN, 0)
    assert np.array_equal(average, [1, 2, 3]) and np.array_equal(low, high) and np.isclose(p, np.exp(-2))
    assert np.isclose(difference, chapter["critical_difference"](3, 2))
