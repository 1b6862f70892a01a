"""The page of a server in Chromium: what it computes, what it shows of a real server, and when that has gone."""

import asyncio
import contextlib
import json
import os
import signal
import time
from urllib.parse import urlsplit

import pytest

pytest.importorskip("selenium.webdriver")

from tests.browser.chromium import ReportPage, start_chromium
from tests.browser.test_playground import CONTRAST
from tests.serving.server.servers import EMULATED, Load, serving

pytestmark = [pytest.mark.long, pytest.mark.browser]

HOSTILE = "<img src=x onerror=alert(1)>"
# A name that is a path is no model's name; everything else may be.
NAMED = EMULATED.replace('name = "m"', f'name = "{HOSTILE}"') + EMULATED[EMULATED.index("\n[[models]]") :]


@pytest.fixture(scope="module")
def browser():
    driver = start_chromium()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("dashboard"), NAMED, "--fronts", "2") as server:
        yield server


class Dashboard(ReportPage):
    """The page as a user has it."""

    def __init__(self, driver, port):
        super().__init__(driver, None)
        self.url = f"http://127.0.0.1:{port}/"

    def open(self, *, width=1240, height=900, scheme="light"):
        self.resize(width, height)
        self.media(**{"prefers-color-scheme": scheme})
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(self.url)
        self.wait("return typeof Dashboard === 'object' && Dashboard.page.count > 0")
        return self

    def text(self, selector):
        return self.script("return document.querySelector(arguments[0]).textContent", selector)

    def figure(self, name):
        return self.script(
            "const found = [...document.querySelectorAll('#figures .mw-figure')]"
            ".find((each) => each.querySelector('dt').textContent === arguments[0]);"
            "return found.querySelector('dd').textContent",
            name,
        )

    def rows(self, table):
        return self.script(
            "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
            ".map((row) => [...row.children].map((cell) => cell.textContent))",
            table,
        )


@pytest.fixture
def page(browser, server):
    return Dashboard(browser, server.admin).open()


def status(time_s, *, answers=0, done=0, late=0, batches=0, buckets=None, cpu_s=0.0, pid=7, **more):
    """A document of /status as far as the page computes with it."""
    model = {"name": "m", "slo_s": 0.1, "statuses": {"200": answers}, "fates": {"done": done, "late": late}}
    return {
        "time_s": time_s,
        "fronts_time_s": time_s,
        "scheduler_time_s": time_s,
        "models": [{**model, "num_batches": batches, "buckets": buckets or {}, "latency_ns": 0}],
        "processes": [{"name": "worker-0", "pid": pid, "starts": 3, "cpu_s": cpu_s, "resident_bytes": 2**20}],
        **more,
    }


def between(page, before, after):
    return page.script("return Dashboard.figures.between(arguments[0], arguments[1])", before, after)


def test_rows_are_what_has_come_between_two_documents(page):
    found = between(
        page,
        status(10, answers=100, done=90, late=10, batches=9, buckets={"96": 90}, cpu_s=1.0),
        status(12, answers=300, done=270, late=30, batches=29, buckets={"96": 190, "100": 80}, cpu_s=2.0),
    )
    (row,) = found["models"]
    assert row["requests_per_s"] == 100
    assert row["in_time_share"] == 0.9
    assert row["mean_batch"] == 9
    assert row["drops"] == [["late", 10]]
    # Bucket 96 is from 2^24 ns on, bucket 97 from 5/4 of that; 100 of the 180 are in it.
    assert row["p50_s"] == pytest.approx(2**24 * (1 + 0.25 * 90 / 100) / 1e9)
    assert row["p99_s"] == pytest.approx(2**25 * (1 + 0.25 * 78.2 / 80) / 1e9)
    assert found["total"] == {key: value for key, value in row.items() if key not in ("model", "slo_s")}
    assert found["processes"] == [
        {"process": "worker-0", "pid": 7, "cpu_share": 0.5, "memory_bytes": 2**20, "restarts": 2}
    ]


def test_what_begins_again_has_no_rates_and_is_never_negative(page):
    before = status(10, answers=100, done=90, batches=9, cpu_s=5.0)
    again = between(page, before, status(11, answers=3, done=2, batches=1, cpu_s=0.1, pid=8))
    assert again["models"][0]["requests_per_s"] is None
    assert again["models"][0]["in_time_share"] is None
    assert again["processes"][0]["cpu_share"] is None
    # Counts of the same moment say nothing of the time between two questions.
    same = between(page, before, {**before, "time_s": 11})
    assert same["is_new"] is False
    assert same["total"]["requests_per_s"] is None
    quiet = between(page, before, {**before, "time_s": 11, "fronts_time_s": 11, "scheduler_time_s": 11})
    assert quiet["total"] | {"drops": None} == {
        "requests_per_s": 0,
        "in_time_share": None,
        "p50_s": None,
        "p99_s": None,
        "mean_batch": None,
        "batches_per_s": 0,
        "drops": None,
    }


def test_lines_have_gaps_where_nothing_is_known(page):
    def path(values):
        return page.script("return Dashboard.sparkline.pathOf(arguments[0])", values)

    assert path([]) == path([None]) == ""
    assert path([1, 2, None, 4, 4]).count("M") == 2
    assert path([0, 0, 0]).endswith("L120.0 29.0")
    # A value alone is still seen.
    assert path([None, 3, None]).endswith("h0.5")


def test_the_page_follows_a_server_under_load(page, server):
    load = Load(server, 8)

    async def main():
        running = asyncio.create_task(load.run())
        await asyncio.sleep(6)
        try:
            return await asyncio.to_thread(
                lambda: (page.rows("models"), page.figure("In time"), page.rows("processes"))
            )
        finally:
            load.stop()
            await running

    models, share, processes = asyncio.run(main())
    names = [row[0] for row in models]
    assert names == [HOSTILE, "m"]
    asked = next(row for row in models if row[0] == "m")
    assert float(asked[2].replace(",", "")) > 20
    assert asked[4] == share == "100.0 %"
    assert asked[5].endswith(("ms", "µs"))
    assert {row[0] for row in processes} == {process["name"] for process in server.status()["processes"]}
    assert page.text("#state-words") == "Ready, policy eager"
    label = page.script("return document.querySelector('#figures svg').getAttribute('aria-label')")
    assert label.startswith("Requests per second in the last ")
    assert "now " in label
    # Names are text, whatever they hold.
    assert page.script("return document.querySelectorAll('img, script:not([src])').length") == 0
    assert page.errors() == []


def test_a_pause_stops_the_questions(page):
    page.script("document.getElementById('pause').focus()")
    page.press(" ")
    assert page.script("return document.getElementById('pause').getAttribute('aria-pressed')") == "true"
    time.sleep(0.3)
    count = page.script("return Dashboard.page.count")
    time.sleep(2.2)
    assert page.script("return Dashboard.page.count") == count
    page.press(" ")
    page.wait(f"return Dashboard.page.count > {count}")


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (420, "dark"), (420, "light")])
def test_nothing_is_wider_than_the_window_and_text_is_readable(browser, server, width, scheme):
    page = Dashboard(browser, server.admin).open(width=width, scheme=scheme)
    assert page.script("return document.documentElement.scrollWidth") <= width
    everything = CONTRAST.replace(CONTRAST[CONTRAST.index('"header *') : CONTRAST.index('";') + 1], '"body *"')
    assert page.script(everything) == []


def test_everything_that_can_be_used_has_a_name_and_the_keyboard_reaches_it(page):
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    used = {"button", "link", "img", "image", "region", "table"}
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in nodes
        if not node.get("ignored") and node.get("role", {}).get("value") in used
    ]
    assert len(named) > 10
    assert [item for item in named if not item[1]] == []
    reached = []
    page.script("document.body.tabIndex = -1; document.body.focus()")
    for _ in range(12):
        page.press("\ue004")
        reached.append(page.script("return document.activeElement.id || document.activeElement.textContent"))
    assert {"pause", "timeline", "Theme: auto", "Status as JSON"} <= set(reached)


def test_nothing_is_asked_of_any_other_machine(page, server):
    time.sleep(1.2)
    asked = set()
    for entry in page.driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.add(message["params"]["request"]["url"])
    asked = {url for url in asked if not url.startswith(("data:", "blob:", "about:", "chrome"))}
    assert {urlsplit(url).netloc for url in asked} == {f"127.0.0.1:{server.admin}"}
    assert {urlsplit(url).path for url in asked} == {"/", "/dashboard.js", "/dashboard.css", "/status"}


def test_a_server_that_has_gone_is_told_at_once_and_seen_again(browser, tmp_path):
    with serving(tmp_path, EMULATED) as server:
        page = Dashboard(browser, server.admin).open()
        assert not page.script("return document.querySelector('#message').checkVisibility()")
        end = time.monotonic() + 60
        # Each second the page asks, and may do so when all are there again.
        while page.script("return document.getElementById('state').dataset.state") != "not-ready":
            assert time.monotonic() < end
            for name, pid in server.pids().items():
                if name.startswith("worker-"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        page.wait("return document.getElementById('state').dataset.state === 'ready'")
        assert server.end() == 0
    page.wait("return document.getElementById('state').dataset.state === 'unreachable'")
    assert "has not answered since" in page.text("#message")
    assert page.script("return document.querySelector('#message').checkVisibility()")
    assert "db-stale" in page.script("return document.getElementById('answer').className")
    # The last figures stay, greyed.
    assert len(page.rows("processes")) == 5
