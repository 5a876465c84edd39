"""The built site in a headless browser with the network off: what a reader without a connection sees.

`make test` builds the site first. Without a browser these tests are skipped, except in continuous integration.
"""

import functools
import http.server
import os
import re
import shutil
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe

from tools.crossref import LABEL
from tools.site import listed

TOP = Path(__file__).resolve().parent.parent
SITE = TOP / "_docs"
SIDEBAR = yaml.safe_load((TOP / "_quarto.yml").read_text())["website"]["sidebar"]["contents"]
PAGES = [Path(name).with_suffix(".html").name for name in listed(SIDEBAR)]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
FORMULAS = """async () => {
  if (window.MathJax?.startup) await MathJax.startup.promise;
  const visible = [...document.querySelectorAll('main .math')].filter(e => e.getClientRects().length);
  const drawn = visible.filter(e => [...e.querySelectorAll('mjx-container svg')].some(s => {
    const box = s.getBoundingClientRect(); return box.width > 2 && box.height > 2; }));
  const raw = visible.filter(e => /\\\\[(\\[]/.test(e.textContent));
  return {visible: visible.length, drawn: drawn.length, raw: raw.length,
          wrong: document.querySelectorAll('mjx-merror, [data-mml-node="merror"]').length};
}"""
FIGURES = """() => [...document.querySelectorAll('main img')].filter(e => e.getClientRects().length).map(e => (
  {natural: e.complete ? e.naturalWidth : 0, shown: e.getBoundingClientRect().width}))"""

CUT = """() => [...document.querySelectorAll('main pre, main .math.display, main mjx-container[display]')]
  .filter(e => e.getClientRects().length && e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 80))"""
REDRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def unavailable(reason):
    "Skip, or fail where continuous integration must not skip."
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture(scope="module")
def site():
    if not (SITE / "index.html").exists():
        unavailable("the site is not built: make site")
    return SITE


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
    if not program:
        unavailable("no Chromium on the path")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        with playwright.chromium.launch(executable_path=program, args=ARGUMENTS) as running:
            yield running


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server(site):
    "The address of a local server of the site."
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture
def page(browser):
    "An empty tab that keeps what it asks for and what goes wrong."
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    tab.asked, tab.wrong = [], []
    tab.on("request", lambda request: tab.asked.append(request.url))
    tab.on("requestfailed", lambda request: tab.wrong.append(f"failed: {request.url}"))
    tab.on("response", lambda response: response.status < 400 or tab.wrong.append(f"{response.status}: {response.url}"))
    tab.on("console", lambda message: message.type == "error" and tab.wrong.append(message.text))
    tab.on("pageerror", lambda error: tab.wrong.append(str(error)))
    yield tab
    tab.close()


def test_every_page_of_the_sidebar_is_built(site):
    assert set(PAGES) <= {path.name for path in site.glob("*.html")}


def serious(page, **options):
    "What axe finds serious or critical. The strokes of formulas, thousands on a page, are taken out of it before."
    page.evaluate("document.querySelectorAll('mjx-container').forEach(formula => formula.replaceChildren())")
    found = Axe().run(page, context={"exclude": [["mjx-container"]]}, options={"resultTypes": ["violations"], **options}).response
    return [(violation["id"], violation["nodes"][0]["html"][:120]) for violation in found["violations"]
            if violation["impact"] in ("serious", "critical")]


def test_a_pale_link_is_found(page, server):
    page.goto(f"{server}/references.html")
    page.add_style_tag(content="main a { color: #aaa !important; }")
    assert "color-contrast" in dict(serious(page))


@pytest.mark.parametrize("name", PAGES)
def test_page_opens_offline_with_formulas_and_figures(page, server, name):
    page.goto(f"{server}/{name}", wait_until="load")
    assert page.locator("h1.title").inner_text().strip()
    formulas = page.evaluate(FORMULAS)
    assert formulas["drawn"] == formulas["visible"] and formulas["raw"] == formulas["wrong"] == 0, formulas
    for figure in page.evaluate(FIGURES):
        assert figure["natural"] > 0 and 0 < figure["shown"] <= figure["natural"] + 1, figure
    assert page.wrong == []
    assert [url for url in page.asked if not url.startswith((server, "data:"))] == []
    page.set_viewport_size({"width": 1280, "height": 900})
    page.evaluate(REDRAWN)                                                          # formulas are fitted anew
    assert page.evaluate(CUT) == []                                                 # of code, printed text and formulas, on a laptop
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate(TOO_WIDE) == 0                                             # on a phone only parts of a page scroll sideways
    page.set_viewport_size({"width": 1280, "height": 900})
    assert serious(page) == []
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.documentElement.classList.contains('quarto-dark') && !document.getAnimations().length")
    assert serious(page, runOnly=["color-contrast"]) == []                          # in another theme only colours are others


def test_a_chapter_has_equations_code_reference_and_figure(page, server):
    page.goto(f"{server}/12_regression.html")
    formulas = page.evaluate(FORMULAS)
    assert formulas["drawn"] > 20
    assert page.locator("mjx-labels, mjx-container [data-mml-node=mlabeledtr]").count() > 0      # numbers beside equations
    assert page.locator("pre.cell-code").count() > 5
    assert page.locator(".reference a").count() > 2
    assert page.locator("main figure img").count() > 0
    colab, download = (page.locator("a.colab").nth(k).get_attribute("href") for k in range(2))
    assert colab.endswith("/nbs/12_regression.ipynb") and download == "notebooks/12_regression.ipynb"


def test_the_reference_has_what_a_chapter_exports(page, server):
    page.goto(f"{server}/30_classification.html")
    page.locator(".reference a", has_text="SVGP").first.click()
    page.wait_for_url("**/api.html#svgp.SVGP")
    entry = page.locator("section", has=page.locator("[id='svgp.SVGP']")).last
    assert "SVGP(model: GP, inducing" in entry.inner_text() and "jaxtyping" not in page.locator("main").inner_text()


def test_a_solution_unfolds_with_its_output(page, server):
    page.goto(f"{server}/30_classification.html")
    folded = page.locator("details.solution").first
    assert not folded.locator(".cell-output").first.is_visible()
    folded.locator("summary").first.click()
    assert folded.locator(".cell-output").first.is_visible()


def test_references_in_code_are_links(site):
    for path in site.glob("*.html"):
        code = " ".join(re.findall(r"<pre[\s\S]*?</pre>", path.read_text()))
        assert not re.search(rf"@{LABEL}|\[@[a-z]+\d{{4}}", code), path.name


def test_a_page_weighs_little(site):
    assert {path.name for path in site.glob("*.html") if path.stat().st_size > 1.5e6} == set()


@pytest.mark.parametrize(("term", "place"), [
    ("SVGP", "api.html#svgp.SVGP"), ("cavity", "31_expectation_propagation.html"),
    ("natural gradients", "30_classification.html#natural-gradients"), ("robust max", "11_likelihoods.html#the-largest-wins")])
def test_search_begins_with_the_section_of_a_term(page, server, term, place):
    page.goto(f"{server}/index.html")
    page.locator("#quarto-search input").fill(term)
    first = page.locator(".search-result").first
    first.wait_for(timeout=10_000)
    assert place in first.get_attribute("href")


def test_a_phone_has_the_contents_of_the_page(page, server):
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(f"{server}/12_regression.html")
    menu = page.locator(".page-menu")
    menu.locator("summary").click()
    menu.locator("a", has_text="What to remember").click()
    page.wait_for_url("**#what-to-remember")
    assert page.locator("#quarto-header").bounding_box()["height"] < 80


@pytest.mark.parametrize("served", [True, False], ids=["served", "from the folder"])
def test_search_finds_a_term_and_goes_there(page, server, site, served):
    page.goto(f"{server}/index.html" if served else (site / "index.html").as_uri())
    page.locator("#quarto-search input").fill("Cholesky")
    result = page.locator(".search-result", has_text="Linear algebra").first
    result.wait_for(timeout=10_000)
    result.click()
    page.wait_for_url("**/02_linalg.html*")
    assert page.locator("h1.title").inner_text() == "2 Linear algebra"
    assert page.wrong == []


def test_the_list_of_references_has_what_chapters_cite(page, server):
    page.goto(f"{server}/12_regression.html")
    link = page.locator("main a[href*='references.html#ref-']").first
    key = link.get_attribute("href").split("#")[1]
    link.click()
    page.wait_for_url("**/references.html*")
    assert page.locator(f"#{key}").inner_text().endswith(".")


def test_the_page_is_dark_for_who_prefers_it(browser, server):
    def background(scheme):
        with browser.new_context(color_scheme=scheme) as context:
            tab = context.new_page()
            tab.goto(f"{server}/index.html")
            return sum(map(int, re.findall(r"\d+", tab.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]))

    assert background("light") > 600 > 200 > background("dark")


class Links(HTMLParser):
    "The ids of a page and where its links go."

    def __init__(self, text):
        super().__init__()
        self.ids, self.hrefs = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.add(attrs.get("id"))
        if tag == "a" and attrs.get("href"):
            self.hrefs.add(attrs["href"])


def test_no_link_within_the_site_is_broken(site):
    pages = {path.name: Links(path.read_text()) for path in site.glob("*.html")}
    broken = []
    for name, links in pages.items():
        for href in links.hrefs:
            where, _, fragment = href.partition("#")
            if re.match(r"[a-z]+:", href) or href in ("", "#"):
                continue
            where = where.removeprefix("./") or name
            target = pages.get(where)
            if not (site / where).exists() or (fragment and target and fragment not in target.ids):
                broken.append(f"{name} -> {href}")
    assert not broken


def test_nothing_is_loaded_from_outside_by_any_file(site):
    for path in [*site.glob("*.html"), *site.rglob("*.css")]:
        assert not re.search(r"@import[^;]*//|url\(\s*[\"']?(?:https?:)?//", path.read_text()), path.name
