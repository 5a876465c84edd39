"Chapter 52's verdicts in the catalogue are those of its records, which apply the chapter's rule."
import json
import tomllib

from conftest import TOP

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
