"""The playground in Chromium: every control is moved by keys and clicks, and the page follows."""

import itertools
import json
import shutil
import threading
import time
from dataclasses import replace
from urllib.parse import parse_qsl, quote, urlsplit

import pytest

from meshwright.planner import predict_step_interval
from meshwright.playground import PlaygroundServer, Service, from_query, jobs
from meshwright.spec import GradientExchange
from tests.playground.examples import let_hosts_issue_at_once, make_bench, make_state

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service as Chromedriver  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.browser]

START = make_state(num_nodes=2, devices_per_node=4, num_stages=3, global_batch=48, microbatch_size=2)


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        let_hosts_issue_at_once(patch)
        # Loops that were never compiled on this machine take longer than a page is waited for.
        make_bench().answer(START)
        server = PlaygroundServer(Service(make_bench(), START))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        server.service.close()
        server.server_close()


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--window-size=1400,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Chromedriver(shutil.which("chromedriver")))
    driver.set_page_load_timeout(30)
    yield driver
    driver.quit()


class Page:
    """The page as a user has it."""

    def __init__(self, driver, url):
        self.driver = driver
        self.url = url

    def open(self, query=""):
        self.driver.get("about:blank")
        self.driver.get(self.url + query)
        self.wait("return typeof Playground === 'object' && Playground.last.number > 0")
        return self

    def wait(self, script):
        return WebDriverWait(self.driver, 20, 0.02).until(lambda driver: driver.execute_script(script))

    def script(self, text, *arguments):
        return self.driver.execute_script(text, *arguments)

    def find(self, name):
        return self.driver.find_element(By.ID, name)

    def text(self, name):
        return self.find(name).get_attribute("textContent")

    @property
    def step_time(self):
        return self.text("figure-step_time_s")

    @property
    def link(self):
        return urlsplit(self.driver.current_url).query

    @property
    def state(self):
        pairs = [pair for pair in parse_qsl(self.link) if pair[0] != "pinned"]
        return from_query("&".join(f"{name}={quote(value)}" for name, value in pairs))

    def after(self, action):
        """Do something and wait for the answer that follows."""
        number = self.script("return Playground.last.number")
        action()
        self.wait(f"return Playground.last.number > {number}")

    def type(self, name, text):
        field = self.find(f"control-{name}")
        field.send_keys(Keys.CONTROL, "a")
        self.after(lambda: field.send_keys(text))
        self.wait(f"return document.getElementById('control-{name}').value === {json.dumps(text)}")
        self.settle()

    def settle(self):
        """Until nothing is under way any more."""
        known = -1
        while known != (known := self.script("return Playground.last.number")):
            time.sleep(0.15)

    def wait_for_interval(self):
        self.wait("return document.getElementById('interval').textContent.includes(' to ')")

    def choose(self, name, value):
        self.after(lambda: Select(self.find(f"control-{name}")).select_by_value(value))

    def errors(self):
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture
def page(browser, server):
    browser.get_log("browser")
    shown = Page(browser, server.url)
    shown.open()
    yield shown
    assert shown.errors() == []


def test_the_page_shows_the_first_state_and_all_its_parts(page):
    assert page.state == START
    answer = make_bench().answer(START)
    assert f"{1e6 * answer.simulation.step_time_s:.3g} µs" == page.step_time
    for part in ("timeline", "memory", "cluster", "schedule", "explanation"):
        assert page.find(f"mw-{part}").is_displayed()
    assert page.find("timing").text.startswith("Answered in ")
    assert "chain on 2x4xA100" in page.driver.title


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("batch", "96", "global_batch", 96),
        ("nodes", "1", "num_nodes", 1),
        ("devices", "2", "devices_per_node", 2),
        ("stages", "2", "num_stages", 2),
        ("replicas", "1,2,1", "replicas", (1, 2, 1)),
        ("microbatch", "4", "microbatch_size", 4),
    ],
)
def test_a_number_that_is_typed_changes_the_step_time(page, name, text, field, value):
    before = page.step_time
    page.type(name, text)
    assert getattr(page.state, field) == value
    assert page.step_time != before


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("model", "tied", "model"),
        ("kind", "H100", "kind"),
        ("precision", "bfloat16", "precision"),
        ("optimizer", "sgd", "optimizer"),
        ("layout", "replica-major", "layout"),
        ("schedule", "gpipe", "schedule"),
    ],
)
def test_a_choice_changes_the_picture(page, name, value, field):
    before = page.step_time, page.text("mw-memory"), page.text("mw-cluster")
    page.choose(name, value)
    assert getattr(page.state, field) == value
    assert (page.step_time, page.text("mw-memory"), page.text("mw-cluster")) != before


@pytest.mark.parametrize(
    ("name", "field"), [("slowdown", "slowdown"), ("link", "link_slowdown"), ("nic", "nic_slowdown")]
)
def test_a_slider_is_moved_by_keys_and_slows_the_step_down(page, name, field):
    step = make_bench().answer(START).simulation.step_time_s
    slider = page.find(f"control-{name}")
    for _ in range(12):
        page.after(lambda: slider.send_keys(Keys.ARROW_RIGHT))
    page.settle()
    assert getattr(page.state, field) > 2
    assert "slower" in page.find("controls").text
    assert make_bench().answer(page.state).simulation.step_time_s > step


def test_the_overlap_switch_and_the_bucket_are_in_the_state(page):
    page.after(lambda: page.find("control-overlap").click())
    assert not page.state.overlap
    page.type("bucket", "0.25")
    assert page.state.bucket_mib == 0.25


def test_scenario_numbers_are_in_the_state(page):
    page.type("slow", "3")
    page.type("nics", "1")
    page.type("memory", "16")
    assert (page.state.slow_rank, page.state.num_nics, page.state.memory_gib) == (3, 1, 16)
    limit = make_bench().answer(page.state).ranked.memory_limit_bytes[0]
    assert limit < 16 * 2**30
    assert f"of {limit / 2**30:.3g} GiB" in page.find("figures").text


def test_a_choice_deals_stages_out_splits_ops_and_shares_states_out(page):
    page.type("stages", "2")
    page.choose("schedule", "zb-v")
    page.script("for (const part of document.querySelectorAll('details')) part.open = true")
    page.type("zero", "1")
    page.type("tensor", "2")
    assert (page.state.schedule, page.state.zero, page.state.tensor) == ("zb-v", 1, 2)
    assert not page.find("control-chunks").is_displayed()
    page.choose("schedule", "interleaved")
    assert page.find("control-chunks").is_displayed()
    assert "Every rank stands for 2 devices" in page.text("mw-explanation")
    assert "on 8 devices" in page.text("figures")


def test_the_interval_of_the_step_time_follows_the_figures(page):
    page.wait_for_interval()
    assert page.find("interval").text.startswith("80 %: ")
    assert "80 % interval" in page.find("interval").get_attribute("title")
    answer = make_bench().answer(START)
    found = predict_step_interval(answer.plan, answer.graph, answer.cluster, answer.cost)
    assert f"{1e6 * found.low_s:.3g} µs" in page.find("interval").text


def test_the_page_says_that_an_answer_is_computed(page, server, monkeypatch):
    answers, free = server.service._posts["/answer"], threading.Event()

    def late(data):
        free.wait(20)
        return answers(data)

    busy = "return [document.getElementById('busy').textContent, document.getElementById('answer').ariaBusy].join()"
    assert page.script(busy) == ",false"
    monkeypatch.setitem(server.service._posts, "/answer", late)
    page.after(
        lambda: (page.find("control-batch").send_keys("6"), page.wait(f"{busy} === 'computing …,true'"), free.set())
    )
    page.settle()
    page.wait(f"{busy} === ',false'")


def test_what_no_control_says_is_offered_as_in_the_plan(browser):
    bench = make_bench()
    plan = bench.answer(START).plan
    odd = replace(plan.stages[0], ranks=tuple(reversed(plan.stages[0].ranks)))
    plan = replace(plan, stages=(odd, *plan.stages[1:]), exchange=GradientExchange(clip_norm=True))
    service = Service(bench, bench.open_plan(plan, START))
    server = PlaygroundServer(service)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        page = Page(browser, server.url).open()
        assert "clip_norm = True" in page.text("basis")
        assert page.find("control-layout").get_property("value") == "as-planned"
        page.script("for (const part of document.querySelectorAll('details')) part.open = true")
        page.choose("rest", "none")
        assert "clip_norm" not in page.text("basis")
        page.type("stages", "2")
        assert "Choose another layout" in page.find("message").text
        page.choose("layout", "stage-major")
        assert not page.find("message").is_displayed()
        page.after(lambda: page.find("reset").click())
        assert bench.answer(page.state).plan == plan
        assert page.errors() == []
        # Other tests look at what this page asked.
        browser.get("about:blank")
        browser.get_log("performance")
    finally:
        server.shutdown()
        service.close()
        server.server_close()


def test_a_cut_is_moved_by_keys_and_balanced_again(page):
    handles = page.driver.find_elements(By.CSS_SELECTOR, "[role=slider][data-cut]")
    assert [handle.get_attribute("aria-valuenow") for handle in handles] == ["4", "8"]
    before = page.step_time
    page.after(lambda: handles[0].send_keys(Keys.ARROW_LEFT))
    page.settle()
    # The handle keeps the focus although the bar is drawn anew.
    page.after(lambda: page.driver.switch_to.active_element.send_keys(Keys.ARROW_LEFT))
    page.settle()
    assert page.state.cuts == (2, 8)
    assert page.step_time != before
    page.after(lambda: page.find("balance").click())
    assert page.state.cuts == ()
    assert page.step_time == before


def test_a_cut_is_dragged(page):
    handle = page.driver.find_element(By.CSS_SELECTOR, "[data-cut='1']")
    width = page.find("cuts").size["width"]
    page.after(lambda: ActionChains(page.driver).drag_and_drop_by_offset(handle, width // 6, 0).perform())
    page.settle()
    assert page.state.cuts[0] == 4
    assert page.state.cuts[1] in (9, 10, 11)


def test_a_link_gives_the_same_page(page):
    page.type("stages", "2")
    page.choose("schedule", "gpipe")
    page.find("control-slowdown").send_keys(Keys.ARROW_RIGHT)
    page.settle()
    page.after(lambda: page.driver.find_element(By.CSS_SELECTOR, "[data-cut='0']").send_keys(Keys.ARROW_RIGHT))
    page.after(lambda: page.find("pin").click())
    page.type("batch", "24")
    page.settle()
    page.wait_for_interval()
    link, shown = (
        page.link,
        [page.text(part) for part in ("figures", "pinned", "cuts-words", "mw-explanation", "mw-cluster")],
    )
    page.open(f"?{link}")
    page.settle()
    page.wait_for_interval()
    assert page.link == link
    assert [page.text(part) for part in ("figures", "pinned", "cuts-words", "mw-explanation", "mw-cluster")] == shown
    assert page.find("control-batch").get_property("value") == "24"


def test_a_link_keeps_values_between_the_steps_of_a_slider(page):
    page.open("?slowdown=1.2345&stages=2")
    assert page.state.slowdown == 1.2345
    page.type("batch", "24")
    assert page.state.slowdown == 1.2345


def test_the_pinned_state_is_compared_recalled_and_let_go(page):
    assert not page.find("pinned").is_displayed()
    first = page.step_time
    page.after(lambda: page.find("pin").click())
    page.type("batch", "96")
    assert "loses" in page.text("pinned")
    assert "worse" in page.text("figures")
    page.after(lambda: page.find("recall").click())
    assert page.step_time == first
    assert "as pinned" in page.text("figures")
    page.after(lambda: page.find("unpin").click())
    assert not page.find("pinned").is_displayed()
    assert "pinned" not in page.link


def test_a_link_that_leaves_values_out_takes_them_from_the_start_of_the_page(page):
    page.open("?slowdown=8")
    assert page.state == replace(START, slowdown=8.0)
    assert "chain on 2x4xA100" in page.driver.title
    assert page.find("control-stages").get_property("value") == "3"
    # A pinned link is read in the same way.
    page.open(f"?stages=2&pinned={quote('slowdown=8')}")
    assert page.state == replace(START, num_stages=2)
    page.after(lambda: page.find("recall").click())
    assert page.state == replace(START, slowdown=8.0)


def test_a_link_to_other_stages_does_not_take_the_cuts_of_the_start(browser, server, monkeypatch):
    monkeypatch.setattr(server.service, "_start", replace(START, cuts=(3, 6)))
    page = Page(browser, server.url).open("?slowdown=8")
    assert page.state == replace(START, cuts=(3, 6), slowdown=8.0)
    page.open("?stages=2")
    assert page.state == replace(START, num_stages=2)
    assert page.errors() == []


@pytest.mark.parametrize(("query", "wrong"), [("bogus=1", "is not a control"), ("stages=2&stages=3", "twice")])
def test_a_link_with_a_wrong_name_says_so(page, query, wrong):
    page.open(f"?{query}")
    assert wrong in page.find("message").text


def test_a_state_without_a_picture_cannot_be_pinned(page):
    page.type("stages", "-3")
    assert page.find("message").is_displayed()
    assert not page.find("pin").is_enabled()
    page.find("pin").click()
    assert "pinned" not in page.link
    page.type("stages", "2")
    assert not page.find("message").is_displayed()
    page.after(lambda: page.find("pin").click())
    assert "Pinned: " in page.find("pinned").text


@pytest.mark.parametrize("pinned", ["garbage", "stages=-3", "stages=99", "x" * 9_000])
def test_a_pinned_state_that_does_not_work_is_told_and_let_go(page, pinned):
    page.open(f"?pinned={quote(pinned)}")
    assert page.find("pinned").is_displayed()
    page.after(lambda: page.find("unpin").click())
    assert not page.find("pinned").is_displayed()
    assert not page.find("message").is_displayed()
    assert page.state == START
    page.type("stages", "2")
    assert "pinned" not in page.link


def test_a_pinned_state_can_be_let_go_where_nothing_is_compared(page):
    page.after(lambda: page.find("pin").click())
    page.open(f"?{page.link.replace('stages=3', 'stages=99', 1)}")
    assert "A state is pinned" in page.find("pinned").text
    page.after(lambda: page.find("unpin").click())
    assert not page.find("pinned").is_displayed()
    assert "pinned" not in page.link


def test_an_impossible_state_says_what_to_change_and_greys_the_last_picture(page):
    before = page.step_time
    page.type("replicas", "99")
    assert "at most 2 replicas per stage" in page.find("message").text
    assert page.step_time == before
    assert "pg-stale" in page.find("answer").get_attribute("class")
    assert page.find("save-plan.json").get_attribute("href") is None
    page.type("replicas", "2")
    assert not page.find("message").is_displayed()
    assert "pg-stale" not in page.find("answer").get_attribute("class")
    assert "plan.json?" in page.find("save-plan.json").get_attribute("href")


def test_too_little_memory_is_told(page):
    page.type("memory", "0.0001")
    assert "Does not fit: rank" in page.find("message").text
    assert page.find("mw-memory").is_displayed()


@pytest.mark.parametrize(
    "query",
    [
        "?stages=<img src=x onerror=alert(1)>",
        "?<script>alert(1)</script>=1",
        "?model=</script><script>alert(1)</script>",
        "?stages=1&stages=2",
        "?cuts=1,2,3,4,5,6,7,8,9",
        "?pinned=%00%ff",
        "?stages=" + "9" * 300,
        "?slowdown=1e999&memory=NaN",
    ],
)
def test_a_hostile_link_gives_a_message_and_a_page_that_works(browser, server, query):
    page = Page(browser, server.url).open(quote(query, safe="?=&%,"))
    assert page.find("message").is_displayed() or page.find("pinned").is_displayed()
    assert page.script("return document.querySelectorAll('img, script:not([src])').length") == 0
    page.after(lambda: page.find("reset").click())
    page.settle()
    assert page.state == START
    assert not page.find("message").is_displayed()
    assert page.errors() == []


def test_a_search_is_followed_and_its_plan_shown(page):
    page.type("nodes", "1")
    page.find("search-start").click()
    page.wait("return document.getElementById('search-results') !== null")
    best = page.driver.find_element(By.CSS_SELECTOR, "#search-results tbody td:nth-child(4)").text
    page.after(lambda: page.driver.find_element(By.CSS_SELECTOR, "[aria-label='Show plan 1']").click())
    assert page.step_time == best


def test_a_search_is_stopped(page):
    page.type("nodes", "16")
    page.type("batch", "1024")
    page.find("search-start").click()
    page.wait("return document.getElementById('search-stop') !== null")
    page.find("search-stop").click()
    page.wait("return document.getElementById('search').textContent.includes('Stopped')")
    page.find("search-close").click()
    assert not page.find("search-section").is_displayed()


# Counts what the page asks about searches; an answer to /progress comes late where `late_ms` says so.
WATCH = """
const send = window.fetch, lateMs = arguments[0];
window.asked = [];
window.fetch = async (path, ...rest) => {
  window.asked.push([path, performance.now()]);
  const reply = await send(path, ...rest);
  if (path === 'progress') await new Promise((resolve) => setTimeout(resolve, lateMs));
  return reply;
};
"""


def search_without_end(_, __, limits):
    while True:
        limits.events.progress("layers", 1, 2)
        time.sleep(0.01)


@pytest.mark.parametrize("late_ms", [0, 400])
def test_a_search_that_is_started_again_is_the_only_one_that_is_followed(page, monkeypatch, late_ms):
    monkeypatch.setattr(jobs, "search_plans", search_without_end)
    page.script(WATCH, late_ms)
    for _ in range(4):
        page.find("search-start").click()
        page.wait("return document.getElementById('search-stop') !== null")
        # So late that a question about this search is under way when the next one starts.
        time.sleep(0.3)
    time.sleep(1.5)
    assert page.text("search-task") == "Searching: layers"
    times = [moment for path, moment in page.script("return window.asked") if path == "progress"]
    since = times[-1] - 1000
    # One question every 250 ms at most.
    assert 1 <= sum(moment > since for moment in times) <= 5
    page.find("search-stop").click()
    page.wait("return document.getElementById('search').textContent.includes('Stopped')")
    page.find("search-close").click()


# Counts how often an element is asked for its width, which may lay the whole page out.
COUNT_WIDTHS = """
const width = Object.getOwnPropertyDescriptor(Element.prototype, 'clientWidth');
window.widths = { canvas: 0, grid: 0 };
Object.defineProperty(Element.prototype, 'clientWidth', { configurable: true, get() {
  if (this.closest('.mw-timeline canvas')) window.widths.canvas += 1;
  if (this.matches('.mw-grid')) window.widths.grid += 1;
  return width.get.call(this);
} });
"""


def test_an_answer_asks_for_widths_a_few_times_however_many_spans_it_has(page):
    page.script("document.getElementById('mw-timeline').scrollIntoView()")
    page.settle()
    page.script(COUNT_WIDTHS)
    page.type("bucket", "12")
    widths = page.script("return window.widths")
    num_answers = 2  # "1" and "12"
    assert 0 < widths["canvas"] <= 100 * num_answers
    assert widths["grid"] == 0


@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (420, "dark"), (420, "light")])
def test_nothing_is_wider_than_the_window_and_text_is_readable(page, width, theme):
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    page.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    try:
        page.open("?slowdown=2")
        assert page.script("return document.documentElement.scrollWidth") <= width
        poor = page.script(CONTRAST)
        assert poor == []
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


# Contrast by WCAG 2.2, 1.4.3, of texts on one-coloured grounds; 4.5 is its bound for text.
CONTRAST = """
const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const luminance = ([r, g, b]) => [r, g, b].map((part) => part / 255)
  .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
  .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const found = parse(getComputedStyle(at).backgroundColor);
    if (found.length === 3 || found[3] > 0) return found;
  }
  return [255, 255, 255];
};
const says = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
const colour = (element) => parse(getComputedStyle(element).color);
const shown = "header *, .pg-headline *, .pg-controls *, .pg-cuts p, .pg-search *, .pg-pinned *";
return [...document.querySelectorAll(shown)]
  .filter((element) => says(element) && element.offsetParent)
  .map((element) => [luminance(colour(element)), luminance(ground(element)), element.textContent])
  .map(([a, b, text]) => [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text])
  .filter(([ratio]) => ratio < 4.5);
"""


def test_everything_that_can_be_used_has_a_name_and_the_keyboard_reaches_it(page):
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    used = {"button", "link", "textbox", "spinbutton", "combobox", "slider", "checkbox", "progressbar", "img", "image"}
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in nodes
        if not node.get("ignored") and node.get("role", {}).get("value") in used
    ]
    assert len(named) > 25
    assert [item for item in named if not item[1]] == []
    headings = page.script(
        "return [...document.querySelectorAll('h1,h2,h3,h4')].map((item) => Number(item.tagName[1]))"
    )
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(next_ <= level + 1 for level, next_ in itertools.pairwise(headings))
    reached = set()
    page.script("document.body.tabIndex = -1; document.body.focus()")
    for _ in range(90):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(page.script("return document.activeElement.id || document.activeElement.dataset.cut || ''"))
    for name in (
        "pin",
        "copy-link",
        "reset",
        "control-model",
        "control-replicas",
        "control-memory",
        "0",
        "1",
        "search-start",
    ):
        assert name in reached, name


def test_nothing_is_asked_of_any_other_machine(page, server):
    page.type("stages", "2")
    asked = []
    for entry in page.driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
    asked = [url for url in asked if not url.startswith(("data:", "blob:", "about:", "chrome"))]
    assert asked
    assert {urlsplit(url).netloc for url in asked} == {f"127.0.0.1:{server.server_port}"}
