"""The page of ``afterplay show --html`` in a real browser: Chromium without a window, driven by the WebDriver protocol.

Needs Debian's packages ``chromium`` and ``chromium-driver`` (or any Chromium with its driver on the path).
"""

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from pipeline.cli.replay import open_run
from pipeline.schema import Failure
from pipeline.store.queries import Filters
from pipeline.views import page
from pipeline.views.page import write_page
from pipeline.views.reader import RunReader
from pipeline.views.vocabulary import Vocabulary
from tests.unit.show.making import Rollout, make_run

BROWSER = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if b), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None,
        reason="the page is not tried: no chromium and chromedriver (Debian: apt-get install chromium chromium-driver)",
    ),
    pytest.mark.timeout(300),
]
START_SECONDS_MAX = 60.0
HOSTILE = (
    "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'><!--<b>bold</b>"
    "<svg onload=window.broken=3>&lt;i&gt; \u2028 \u202e ${1} %%DATA%%"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1366,768",
)  # fmt: skip
ROLLOUTS = (
    Rollout(0, 0, 1.0, "game/0", step=1, traced=True, stored=False, versions=((1, 3), (2, 10**6)),
            said=(("first question", "naïve €uro answer"), ("second", "a longer answer " * 8)), branches=(0, 1)),
    Rollout(0, 1, 0.0, "game/1", step=2, stored=True),
    Rollout(1, 0, None, "game/2", state="dropped", reason="failed", step=None, traced=True, stored=False,
            failure=Failure("environment step", "TimeoutError", HOSTILE, "Traceback")),
    Rollout(2, 0, 0.25, "game/3", step=3, replays=(5,), stored=False),
    Rollout(3, 0, -1.0, HOSTILE.replace("\u2028", "").replace("\u202e", ""), step=4, traced=True,
            said=((HOSTILE, HOSTILE),), extra={"tool": HOSTILE}),
)  # fmt: skip


class Browser:
    """A session of a driver."""

    def __init__(self, url: str, profile: str) -> None:
        self._base = url
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{answer['sessionId']}"

    def open(self, path, **options) -> None:
        query = "&".join(f"{k}={v}" for k, v in options.items())
        self._call("POST", f"{self._session}/url", {"url": f"file://{path}?{query}"})
        self.wait("document.body && document.body.dataset.ready")

    def run(self, script: str, *arguments):
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def value(self, expression: str):
        return self.run(f"return {expression}")

    def wait(self, expression: str) -> None:
        """Until it is true in the page; asks the browser to tell."""
        script = f"""const done = arguments[0];
            const test = () => ({expression}) ? done(true) : requestAnimationFrame(test); test();"""
        self._call("POST", f"{self._session}/execute/async", {"script": script, "args": []})

    def keys(self, text: str) -> None:
        actions = [{"type": kind, "value": c} for c in text for kind in ("keyDown", "keyUp")]
        self._call("POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})

    def choose(self, element: str, value) -> None:
        """As a person would change a control."""
        self.run(
            "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event(e.tagName === 'SELECT' ? 'change' : 'input'))",
            element,
            value,
        )

    def complaints(self) -> list:
        return self._call("POST", f"{self._session}/se/log", {"type": "browser"})

    def texts(self, selector: str) -> list[str]:
        return self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")

    def close(self) -> None:
        self._call("DELETE", self._session)

    def _call(self, method: str, path: str, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()[:800]) from error


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    profile = tmp_path_factory.mktemp("profile")
    log = (profile / "driver.log").open("wb")
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    driver = subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
    )
    try:
        port = _port_of(driver)
        session = Browser(f"http://127.0.0.1:{port}", str(profile / "data"))
        yield session
        session.close()
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait(10)
        driver.stdout.close()
        log.close()


def _port_of(driver) -> int:
    deadline = time.monotonic() + START_SECONDS_MAX
    for line in driver.stdout:
        if "successfully on port" in line:
            return int(line.rstrip().rstrip(".").rsplit(" ", 1)[1])
        if time.monotonic() > deadline:
            break
    raise AssertionError("chromedriver did not say its port")


def written(folder, rollouts=ROLLOUTS):
    reader = RunReader(*open_run(make_run(folder / "run", rollouts)))
    listing = reader.listing(Filters(), "oldest")
    write_page(folder / "page.html", reader, listing, None, Vocabulary.read(reader.model))
    return folder / "page.html"


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    return written(tmp_path_factory.mktemp("page"))


@pytest.fixture
def opened(browser, html):
    browser.open(html, theme="light", colour="logprob")
    yield browser
    severe = [entry["message"] for entry in browser.complaints() if entry["level"] == "SEVERE"]
    assert severe == []


def painted(browser) -> int:
    """Sampled tokens with a colour of their own."""
    return browser.value(
        "[...document.querySelectorAll('.sampled .t')].filter((e) => /^rgba?\\(/.test(e.style.background) || "
        "/^hsl/.test(e.style.background)).length"
    )


def test_every_rollout_is_listed_and_the_first_is_shown_with_its_tokens(opened):
    assert len(opened.texts(".row")) == len(ROLLOUTS)
    assert opened.texts("h2") == ["g000000.0.0"]
    shown = opened.value("""[...document.querySelectorAll('.sampled')].map((card) =>
        [...card.querySelectorAll('.t:not(.part)')].map((e) => e.textContent).join(''))""")
    assert shown == [answer + "<|end|>" for _, answer in ROLLOUTS[0].said]
    assert "€" in "".join(opened.texts(".t")) and "‹E2›" in opened.texts(".t.part")
    assert len(opened.texts(".branch")) == 1


def test_the_page_opens_on_a_rollout_that_was_trained(browser, tmp_path):
    waiting = Rollout(0, 0, 1.0, "game/0", state="held", step=None)
    browser.open(written(tmp_path, (waiting, Rollout(1, 0, 1.0, "game/1", step=1, traced=True))))
    assert browser.texts("h2") == ["g000001.0.0"]


def test_a_compressed_page_shows_the_same(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PLAIN_BYTES_MAX", 10)
    browser.open(written(tmp_path))
    assert browser.value("document.getElementById('data').dataset.kind") == "gzip"
    assert len(browser.texts(".row")) == len(ROLLOUTS)
    assert ROLLOUTS[0].said[1][1] in "".join(browser.texts(".t"))


def test_what_a_rollout_says_never_becomes_markup_or_program(opened):
    for _ in ROLLOUTS:
        opened.keys("jx")
        opened.keys("x")
    assert opened.texts("h2") == ["g000003.0.0"]
    for scope in ("#rollout", "#list"):
        assert (
            opened.value(f"document.querySelectorAll('{scope} :is(script, img, svg, b b, i, iframe, a)').length") == 0
        )
    assert opened.value("[document.scripts.length, window.broken ?? null]") == [2, None]
    told = HOSTILE.replace("\u202e", "‹U+202E›")  # what turns the direction of text is shown and turns nothing
    assert told in opened.texts(".message.context .text")
    assert "".join(opened.texts(".sampled .t:not(.part)")) == told + "<|end|>"


def test_the_page_asks_nothing_of_a_network(opened):
    assert opened.value("performance.getEntriesByType('resource').length") == 0
    refused = opened.value("fetch('http://127.0.0.1:9/').then(() => 'asked', () => 'refused')")
    assert refused == "refused"
    assert any("Content Security Policy" in entry["message"] for entry in opened.complaints())


@pytest.mark.parametrize("colour", ["logprob", "ratio", "entropy", "advantage", "version", "mask"])
def test_sampled_tokens_take_every_colour_that_was_recorded(opened, colour):
    opened.choose("colour", colour)
    n = opened.value("document.querySelectorAll('.sampled .t').length")
    assert painted(opened) == n > 100
    assert opened.value("document.getElementById('notice').hidden") is True
    assert opened.value("document.getElementById('legend').textContent.length") > 3
    assert opened.value("document.querySelectorAll('.context .t').length") == 0


def test_what_was_not_recorded_is_said_and_not_painted(opened):
    opened.keys("j")
    assert opened.texts("h2") == ["g000000.1.0"] and painted(opened) > 0
    opened.choose("colour", "entropy")
    assert painted(opened) == 0
    assert "No entropy was recorded" in opened.texts("#notice")[0]
    disabled = opened.value("[...document.querySelectorAll('#colour option:disabled')].map((o) => o.value)")
    assert disabled == ["ratio", "entropy", "advantage", "mask"]
    opened.keys("jj")
    assert "its tokens are not kept" in opened.texts(".empty")[0]


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("reward>0", ["g000000.0.0", "g000002.0.0"]),
        ("-reward>0 step:1-4", ["g000000.1.0", "g000003.0.0"]),
        ("failed", ["g000001.0.0"]),
        ("replayed", ["g000002.0.0"]),
        ("step:5", ["g000002.0.0"]),
        ("status:error", ["g000001.0.0"]),
        ("version:2", ["g000000.0.0"]),
        ("text:longer", ["g000000.0.0"]),
        ("learner task:game", ["g000000.0.0"]),
        ("nothing-like-this", []),
    ],
)
def test_a_filter_leaves_what_fits(opened, typed, names):
    opened.choose("filter", typed)
    assert opened.texts(".row .id") == names
    assert opened.texts("h2") == names[:1]


def test_a_filter_that_is_not_understood_is_marked(opened):
    opened.choose("filter", "reward>x")
    assert opened.value("document.getElementById('filter').classList.contains('wrong')") is True
    assert len(opened.texts(".row")) == len(ROLLOUTS)


def test_it_is_sorted_by_what_is_asked_with_the_unknown_last(opened):
    opened.choose("sort", "reward")
    assert opened.texts(".row .id")[0] == "g000000.0.0" and opened.texts(".row .id")[-1] == "g000001.0.0"
    opened.run("document.getElementById('direction').click()")
    assert opened.texts(".row .id")[0] == "g000003.0.0" and opened.texts(".row .id")[-1] == "g000001.0.0"


def test_keys_go_through_rollouts_and_tokens(opened):
    opened.keys("\ue014\ue014")  # right, right
    tip = opened.texts("#tip")[0]
    assert opened.value("document.getElementById('tip').hidden") is False
    for part in ("token id", "log μ", "ratio π/μ", "entropy", "advantage", "trained", "version"):
        assert part in tip, part
    opened.keys("\ue015j")
    assert opened.texts("h2") == ["g000001.0.0"]
    opened.keys("k/game")
    assert opened.value("document.getElementById('filter').value") == "game"


def test_exact_tokens_show_what_the_engine_saw(opened):
    opened.keys("x")
    assert "".join(opened.texts(".message.context")[0:1]).count("<|user|>") == 1
    assert opened.value("document.querySelectorAll('.context .t').length") > 10


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_on_its_background(browser, html, theme):
    """WCAG 2's contrast of the ink on cards and on the page."""
    browser.open(html, theme=theme)
    ratio = browser.run("""
        const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
            .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        const of = (e, name) => light(getComputedStyle(document.querySelector(e))[name]);
        return [contrast(of('body', 'color'), of('body', 'backgroundColor')),
                contrast(of('.lead', 'color'), of('body', 'backgroundColor')),
                contrast(of('.row .low', 'color'), of('.row.picked', 'backgroundColor'))];""")
    assert min(ratio) >= 4.5, ratio
