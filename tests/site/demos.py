"""Slides and a live copy of a lesson in Chromium. Run by `make site ARGS=--check`, after browser.py.

Nothing is revealed before the Space key or a click asks for it, no slide is higher than the screen, and nothing is
fetched from outside.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import nbformat
import present
import pytest
import slides
from chromium import opened
from notebooks import ROOT, find

LESSON = "9.1.1"
INSIDE = r"(http|ws)s?://(127\.0\.0\.1|localhost)|data:|blob:"
# What a slide shows now: its text without what waits for the key, and how high it is.
STATE = """() => {
  const slide = Reveal.getCurrentSlide(), waits = [...slide.querySelectorAll('.fragment:not(.visible)')];
  const box = slide.getBoundingClientRect(), zoom = +(slide.style.zoom || 1);
  return {
    kind: slide.className.split(' ')[0], zoom, waiting: waits.length,
    seen: waits.filter(w => getComputedStyle(w).visibility != 'hidden' || +getComputedStyle(w).opacity > 0).length,
    high: slide.scrollHeight * zoom, wide: slide.scrollWidth - slide.clientWidth,
    'without alt': [...slide.querySelectorAll('img')].filter(i => !i.alt).length,
    notes: slide.querySelector('aside.notes') ? slide.querySelector('aside.notes').innerText : '',
    index: Reveal.getIndices().h, last: Reveal.isLastSlide(),
  };
}"""


@pytest.fixture(scope="module")
def deck(tmp_path_factory):
    """Slides of the lesson, with seconds as a rehearsal would note them."""
    folder = tmp_path_factory.mktemp("slides")
    path = present.lesson(LESSON)
    codes = [cell.id for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    slides.write(path, folder / "deck", dict.fromkeys(codes, 1.5))
    return folder / "deck"


def test_the_space_key_reveals_one_thing_at_a_time(browser, deck):
    base = present.serve(deck)
    page, wrong = opened(browser, base, width=1280)
    page.set_viewport_size({"width": 1280, "height": 720})
    page.goto(base)
    page.wait_for_function("Reveal.isReady() && MathJax.startup.promise")
    page.evaluate("MathJax.startup.promise")
    seen, notes, outputs = [], [], 0
    for _ in range(500):
        state = page.evaluate(STATE)
        assert state["seen"] == 0, f"slide {state['index'] + 1} shows what waits for the key"
        assert state["high"] <= 721, f"slide {state['index'] + 1} is {state['high']:.0f} pixels high"
        assert state["wide"] <= 0 and state["without alt"] == 0, state
        assert state["zoom"] >= 0.6, f"slide {state['index'] + 1} is shrunk to {state['zoom']:.0%}"
        outputs += state["kind"] == "code" and state["waiting"] > 0
        seen.append(state["index"])
        notes.append((state["kind"], state["notes"]))
        if state["last"] and not state["waiting"]:
            break
        page.keyboard.press("Space")
    assert sorted(set(seen)) == list(range(max(seen) + 1)), "the key leads through every slide"
    assert len(seen) > len(set(seen)) and outputs > 10
    assert any(kind == "code" and "1.5 s in the rehearsal" in text for kind, text in notes)
    assert all(text for kind, text in notes if kind == "predict"), "each question has its notes"
    assert any("The page guesses 257" in text and "256 + 1 = 256" in text for _, text in notes)
    assert not wrong, wrong
    print(f"\n{len(set(seen))} slides, {len(seen) - len(set(seen))} reveals, nothing early, nothing too high")


def test_no_slide_of_any_lesson_is_too_high(browser, tmp_path):
    low = {}
    for path in find([str(ROOT / "code-units")]):
        slides.write(path, tmp_path / "deck", {})
        page, wrong = opened(browser, tmp_path.as_uri())
        page.set_viewport_size({"width": 1280, "height": 720})
        page.goto((tmp_path / "deck" / "index.html").as_uri())
        page.wait_for_function("Reveal.isReady()")
        page.evaluate("MathJax.startup.promise")
        for place in range(page.evaluate("Reveal.getTotalSlides()")):
            page.evaluate(f"Reveal.slide({place}, 0, 99)")
            state = page.evaluate(STATE)
            if state["high"] > 721 or state["zoom"] < 0.6 or state["without alt"]:
                low[f"{path.parent.name}/{path.stem}, slide {place + 1}"] = state
        assert not wrong, (path, wrong)
        page.context.close()
    assert not low, json.dumps(low, indent=1)


def test_the_speakers_view_opens_and_shows_the_notes(browser, deck):
    base = present.serve(deck)
    page, wrong = opened(browser, base)
    page.goto(base)
    page.wait_for_function("Reveal.isReady()")
    place = page.evaluate("Reveal.getSlides().findIndex(s => s.classList.contains('predict'))")
    page.evaluate(f"Reveal.slide({place})")
    with page.context.expect_page() as popup:
        page.keyboard.press("s")
    speaker = popup.value
    speaker.wait_for_function(
        "document.querySelector('.speaker-controls-notes .value').innerText.includes('The page')"
    )
    assert not wrong, wrong


def answers(address: str) -> None:
    """Wait until an address answers."""
    proxy_free = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(150):
        with contextlib.suppress(urllib.error.URLError):
            return proxy_free.open(address, timeout=20).close()
        time.sleep(0.2)
    raise AssertionError(f"{address} does not answer")


def test_the_live_copy_reveals_nothing_early(browser, tmp_path):
    """In JupyterLab: no outputs, conclusions folded until a click, and nothing is fetched from outside."""
    path = present.lesson(LESSON)
    before = path.read_bytes()
    copy = present.live(path, present.copied(path, tmp_path))
    notebook = nbformat.read(copy, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", f"--config={ROOT}/tools/lab/config.py", "--no-browser"]
    command += [f"--port={port}", "--IdentityProvider.token=", f"--ServerApp.root_dir={tmp_path}"]
    command += [f"--LabApp.workspaces_dir={tmp_path / 'workspaces'}"]
    variables = {f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "RUNTIME", "DATA")}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **variables}, **quiet) as lab:
        try:
            base = f"http://127.0.0.1:{port}"
            answers(base + "/api")
            page, _ = opened(browser, base)
            page.context.unroute_all()
            asked = []
            page.on("request", lambda r: re.match(INSIDE, r.url) or asked.append(r.url))
            page.goto(f"{base}/lab/tree/{copy.relative_to(tmp_path).as_posix()}")
            page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
            page.locator(".jp-RenderedMarkdown h2", has_text="What it costs: a sum").scroll_into_view_if_needed()
            answer = next(
                source for kind, source, _ in slides.pieces(nbformat.read(path, as_version=4)) if kind == "answer"
            )
            plain = max(re.findall(r"[\w ,:]+", answer.split("\n\n")[0]), key=len).strip()
            folded = page.locator(".jp-RenderedMarkdown details", has_text=plain)
            folded.scroll_into_view_if_needed()
            assert not folded.locator("p").first.is_visible()
            folded.locator("summary").click()
            assert folded.locator("p").first.is_visible()
            assert not asked, asked
        finally:
            lab.send_signal(signal.SIGINT)
            lab.kill()
    assert path.read_bytes() == before
