"""The built site in Chromium: every page in light, dark and narrow. Run by `make site ARGS=--check`.

Nothing is fetched from outside, nothing goes wrong in the console, every picture has words, nothing is wider than the
screen, axe finds nothing serious, search finds and copying gives code that runs. Skipped where there is no Chromium.
"""

import ast
import functools
import http.server
import importlib.util
import json
import threading
import time
from pathlib import Path

import pytest
from chromium import opened
from notebooks import ROOT

SITE = ROOT / "build" / "site"
WAYS = {"light": ("light", 1280), "dark": ("dark", 1280), "narrow": ("light", 390)}
LOOK = """() => {
  const article = document.querySelector('article') || document.body;
  const wide = document.documentElement.scrollWidth - innerWidth;
  const images = [...article.querySelectorAll('img')];
  return {
    wide: Math.max(0, wide),
    'without alt': images.filter(i => !i.alt.trim() || /\\.(png|svg|jpe?g)$/.test(i.alt)).map(i => i.src.slice(-60)),
    broken: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src.slice(-60)),
    'raw formulas': [...document.querySelectorAll('.math')].filter(m => !m.querySelector('svg')).length,
  };
}"""


# Serious findings of axe. Contrast is slow to compute: one element stands for all that look the same.
AXE = """async () => {
  const rules = {'color-contrast': {enabled: false}};
  const found = (await axe.run(document, {resultTypes: ['violations'], rules})).violations;
  const kinds = new Map();
  for (const one of document.body.querySelectorAll('*:not(svg *, mjx-container *)')) {
    if (![...one.childNodes].some(child => child.nodeType == 3 && child.data.trim())) continue;
    const places = [one, one.parentElement, one.parentElement.parentElement];
    const look = places.map(place => place && place.tagName + '.' + place.className).join();
    if (!kinds.has(look) && one.checkVisibility()) kinds.set(look, one);
  }
  const contrast = await axe.run({include: [...kinds.values()]}, {runOnly: ['color-contrast']});
  return [...found, ...contrast.violations].filter(rule => ['serious', 'critical'].includes(rule.impact))
    .map(rule => [rule.id, rule.nodes.length, rule.nodes[0].html.slice(0, 150)]);
}"""


@pytest.fixture(scope="module", autouse=True)
def built():
    if not SITE.exists():
        pytest.skip("the site was not built here: make site builds it")


@pytest.fixture(scope="module")
def address():
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ready(page) -> None:
    """Wait until formulas are drawn."""
    page.wait_for_function("!window.MathJax || (MathJax.startup && MathJax.startup.promise)")
    page.evaluate("window.MathJax && MathJax.startup.promise")


def names() -> list[str]:
    return sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if "_static" not in path.parts)


def axe() -> str:
    return (Path(importlib.util.find_spec("axe_playwright_python").origin).parent / "axe.min.js").read_text()


@pytest.mark.parametrize("way", WAYS)
def test_every_page_reads_well(browser, address, way):
    scheme, width = WAYS[way]
    page, wrong = opened(browser, address, scheme, width)
    found, script = {}, axe()
    for name in names():
        page.goto(f"{address}/{name}", wait_until="load")
        ready(page)
        seen = {key: value for key, value in page.evaluate(LOOK).items() if value}
        page.evaluate(script)
        serious = page.evaluate(AXE)
        if serious:
            seen["axe"] = serious
        if wrong:
            seen["wrong"] = list(wrong)
            wrong.clear()
        if seen:
            found[name] = seen
    print(f"\n{way}: {len(names())} pages looked at, {len(found)} with findings")
    assert not found, json.dumps(found, indent=1)


@pytest.mark.parametrize("words, page_found", [("autocast", "9.1-mixed-precision"), ("checkpointing", "9.6-memory")])
def test_search_finds(browser, address, words, page_found):
    for base in (address, SITE.as_uri()):
        page, wrong = opened(browser, base)
        page.goto(f"{base}/search.html?q={words}")
        page.wait_for_selector("#search-results li a")
        page.wait_for_function("document.querySelectorAll('#search-results li').length > 3")
        links = page.eval_on_selector_all("#search-results li a", "all => all.map(a => a.getAttribute('href'))")
        assert any(page_found in link for link in links), base
        page.wait_for_timeout(300)
        assert not wrong, (base, wrong)


def test_copying_gives_code_that_runs(browser, address):
    """Each copy button of a lesson gives what the cell holds: Python without prompts, outputs or line numbers."""
    name = "code-units/9.6-memory/1-where-memory-goes"
    cells = json.loads((ROOT / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]).strip() for cell in cells if cell["cell_type"] == "code"]
    page, _ = opened(browser, address, permissions=["clipboard-read", "clipboard-write"])
    page.goto(f"{address}/{name}.html")
    buttons = page.locator("div.cell_input button.copybtn")
    assert buttons.count() == len(sources)
    for place, source in enumerate(sources):
        buttons.nth(place).click(force=True)
        copied = page.evaluate("navigator.clipboard.readText()").strip()
        assert copied == source
        ast.parse(copied)


def test_solutions_and_answers_open_at_a_click(browser, address):
    page, _ = opened(browser, address)
    page.goto(f"{address}/exercises/exercise-6-memory.html")
    solution = page.locator("details", has=page.locator("summary", has_text="Solution")).first
    inside = solution.locator("div.cell_input").first
    assert not inside.is_visible()
    solution.locator("summary").click()
    assert inside.is_visible()


def test_the_first_view_comes_from_disk_within_a_second(browser):
    page, _ = opened(browser, SITE.as_uri())
    page.goto(f"{SITE.as_uri()}/index.html")
    largest = max((SITE / name for name in names()), key=lambda path: path.stat().st_size)
    times = {}
    for path in (SITE / "index.html", largest):
        begin = time.perf_counter()
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length > 0")
        times[path.name] = time.perf_counter() - begin
    print(f"\nfirst view: {', '.join(f'{name} {seconds:.2f} s' for name, seconds in times.items())}")
    assert max(times.values()) < 1 or min(times.values()) > 0.7, "slow on this page only, so it is not the machine"


def test_the_calculator_follows_what_is_typed(browser, address):
    """The page shows what its formulas give, says what is wrong with an input, and keeps working."""
    page, wrong = opened(browser, address)
    page.goto(f"{address}/calculator.html")
    answer = page.locator("#one-answer")
    assert "22.3 GiB" in answer.inner_text(), "the default view of lesson 9.6.1's widget"
    page.fill("#one [name=batch]", "32")
    assert "12.8 GiB" in answer.inner_text()
    page.fill("#one [name=batch]", "")
    assert "images on each GPU" in answer.inner_text()
    page.fill("#one [name=batch]", "64")
    page.check("#one [name=checkpointing]")
    assert "fits a card of 8 GiB" in answer.inner_text()
    page.fill("#many [name=pipeline]", "3")
    assert "3 stages cannot share 32 layers" in page.inner_text("#many-answer")
    page.select_option("#bill [name=source]", "own")
    page.fill("#bill [name=ownSeconds]", "3.6")
    page.fill("#bill [name=steps]", "1000")
    assert "1 hours" in page.inner_text("#bill-answer") and "0.84 kWh" in page.inner_text("#bill-answer")
    assert not wrong
