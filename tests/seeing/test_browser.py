"""The page in a real browser: a frozen worker is named on screen, also without a mouse."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal

import pytest

CHROMIUM = shutil.which("chromium")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
MILLISECONDS = 60_000

pytestmark = [
    pytest.mark.needs_browser,
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and importlib.util.find_spec("playwright")),
        reason="chromium or playwright is not installed",
    ),
]

SHIFTS = """() => {
  window.shifted = [];
  new PerformanceObserver(list => {
    for (const { node, previousRect, currentRect } of list.getEntries().flatMap(e => e.sources))
      if (previousRect.top !== currentRect.top)  // not a number that got another digit
        window.shifted.push(node?.parentElement?.innerText);
  }).observe({ type: "layout-shift" });
}"""

CONTRASTS = """selectors => selectors.map(selector => {
  const channels = color => color.match(/[\\d.]+/g).map(Number);
  const light = color => {
    const [r, g, b] = channels(color).map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let element = document.querySelector(selector), below = element;
  while (channels(getComputedStyle(below).backgroundColor)[3] === 0) below = below.parentElement;
  const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(below).backgroundColor)];
  return [selector, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
})"""  # noqa: E501

NAMELESS = """() => [
  ...document.querySelectorAll("button, [role=button], [role=region], pre")
].filter(
  e => !(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.textContent.trim())
).map(e => e.outerHTML)"""


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


@pytest.fixture(params=["light", "dark"])
def scheme(request):
    return request.param


@pytest.fixture
def window(browser, job, scheme):
    """The page of the job; nothing that it logs or fetches elsewhere goes unseen."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1440, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(MILLISECONDS)
    said, fetched = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(job.page.url)
    page.wait_for_selector("#link.live")
    yield page
    context.close()
    assert said == []
    assert [url for url in fetched if not url.startswith((job.page.url, "data:"))] == []


def shown(window, selector):
    return window.locator(selector).all_inner_texts()


def test_a_frozen_worker_is_named_on_screen(window, frozen):
    window.wait_for_selector("#verdict.bad")
    text = window.inner_text("#verdict")
    (row,) = shown(window, "#workers tr.bad")

    assert text == "w2 does not answer; w0 and w1 wait for it"
    assert row.split()[:2] == ["w2", "silent"]
    assert window.text_content("#graph .silent").startswith("w2silent")
    assert any("it is silent" in wait for wait in shown(window, "#waits tr.bad"))


def test_waits_and_functions_are_on_screen(window):
    window.wait_for_selector("#verdict.slow, #verdict:not(.bad)")

    assert [text.split()[:3] for text in shown(window, "#waits tr")] == [
        ["w0", "→", "w1"],
        ["w1", "→", "w2"],
    ]
    assert sorted(text.split()[1] for text in shown(window, "#served tr")) == ["hold", "pass_on"]
    assert window.locator("#graph .wait").count() == 2


def test_stacks_of_both_ends_are_shown_without_a_mouse(window):
    window.locator("#waits button").nth(1).focus()
    window.keyboard.press("Enter")
    window.wait_for_function(
        "() => left.textContent.includes(' in pass_on') && right.textContent.includes(' in hold')"
    )

    assert window.inner_text("#left-title") == "w1"
    assert window.inner_text("#right-title") == "w2"
    first = window.inner_text("#right .users >> nth=0")
    assert "page_program.py" in first

    arrow = window.locator("#graph .wait").nth(0)
    arrow.focus()
    window.keyboard.press("Enter")
    window.wait_for_function("() => left.textContent.includes(' in main')")


def test_a_worker_that_serves_the_page_and_is_frozen_is_named_too(window, job):
    os.kill(job.page.pid, signal.SIGSTOP)
    try:
        window.wait_for_selector("#link.lost")
        assert window.inner_text("#link").startswith("w0, which serves this page, does not answer")
    finally:
        os.kill(job.page.pid, signal.SIGCONT)
    window.wait_for_selector("#link.live")


def test_a_recording_says_where_the_time_went_without_a_mouse(window):
    window.locator("#record").focus()
    window.keyboard.press("Enter")
    window.wait_for_selector("#recording pre:not(:empty)")

    text = window.inner_text("#went")
    assert text.splitlines()[0].endswith("over 3 workers (one clock)")
    assert window.evaluate("document.activeElement.id") == "record"
    with window.expect_download() as saved:
        window.locator("#file").click()
    assert saved.value.suggested_filename == "step.json.gz"


def test_updates_keep_the_focus_and_move_nothing(window):
    window.locator("#waits button").nth(1).focus()
    window.evaluate(SHIFTS)
    before = window.inner_text("#waits tr >> nth=1")

    window.wait_for_function(
        "text => document.querySelectorAll('#waits tr')[1].innerText !== text", arg=before
    )
    window.wait_for_timeout(1200)

    assert window.evaluate("document.activeElement.textContent") == "w1 → w2"
    assert window.evaluate("window.shifted") == []


def test_everything_can_be_read_and_has_a_name(window, scheme):
    is_dark = window.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (is_dark == "rgb(13, 18, 24)") is (scheme == "dark")

    texts = ["h1", "#about", "#verdict", "th", "#workers td", ".dim", "#link", "small", "pre"]
    low = [(name, ratio) for name, ratio in window.evaluate(CONTRASTS, texts) if ratio < 4.5]

    assert low == []
    assert window.evaluate(NAMELESS) == []


def test_a_narrow_window_needs_no_scrolling_to_the_side(window):
    window.set_viewport_size({"width": 420, "height": 900})

    width = window.evaluate("document.documentElement.scrollWidth")

    assert width <= 420
