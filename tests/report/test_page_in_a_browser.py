"""The page in a browser: it holds its shape, its table sorts and filters, and its script says what the page says.

Chromium is driven through its DevTools protocol over a pipe. Its ``--window-size`` is not what a page sees, so widths
are set as device metrics.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import brief, fakes, tiny
from support.contract import layout_of
from support.pages import certified, finetuned, hostile, render

from bf16_to_fp16.report.observed_tiers import tiers_of
from bf16_to_fp16.results import dump

HOLDING = {"torch": True, "norm-fp16": True, "fp16-accumulate": False}
TIER_ENTRIES = tiers_of(layout_of(tiny.build("t5-encoder")), HOLDING, {})
PAGES = {
    "certified": lambda: certified(blocks=11) | {"tiers": {name: dump(entry) for name, entry in TIER_ENTRIES.items()}},
    "finetuned": finetuned,
    "unsafe": lambda: hostile(fakes.conversion(safe=False)),
    "audit": fakes.audit,
}
SPILLED = """(() => {
  const wide = document.documentElement.clientWidth;
  const scrolls = (e) => e && (getComputedStyle(e).overflowX === "auto" || scrolls(e.parentElement));
  return [...document.querySelectorAll("main *")]
    .filter((e) => !e.closest("svg") && !scrolls(e) && e.getClientRects().length)
    .filter((e) => { const r = e.getBoundingClientRect(); return r.left < -0.5 || r.right > wide + 0.5; })
    .map((e) => e.outerHTML.slice(0, 120));
})()"""
FITS = "(e) => e.getBoundingClientRect().right <= innerWidth"
LABELS_CUT = """[...document.querySelectorAll("figure svg")].flatMap((svg) => {
  const frame = svg.closest("section").getBoundingClientRect();
  return [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()])
    .filter(([, r]) => r.left < frame.left + 6 || r.right > frame.right - 6 || r.bottom > frame.bottom)
    .map(([text]) => text);
})"""


NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = "needs a headless browser: install chromium (Debian, Ubuntu: apt-get install chromium)"


class Browser:
    """One page of a headless Chromium, with what it logged, threw and asked for since the last ``open``."""

    def __init__(self, program: str, profile: Path) -> None:
        read, write = os.pipe(), os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        # Its protocol speaks through descriptors 3 and 4, which a shell puts there from wherever they are.
        started = ["bash", "-c", f'exec "$@" 3<&{read[0]} 4>&{write[1]}', "bash", program, *options]
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.process = subprocess.Popen(started, pass_fds=(read[0], write[1]), **streams)
        os.close(read[0])
        os.close(write[1])
        self.commands, self.answers = os.fdopen(read[1], "wb", 0), os.fdopen(write[0], "rb")
        self.count, self.session = 0, {}
        self.events: list[dict[str, Any]] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def message(self) -> Any:
        found = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            found += byte
        return json.loads(found)

    def command(self, method: str, **params: Any) -> Any:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params} | self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self.message()).get("id") != self.count:
            self.events.append(answer)
        return answer["result"]

    def open(self, page: Path, *, width: int, dark: bool = False) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.events.clear()
        self.command("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.message())

    def run(self, expression: str) -> Any:
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.command("Input.insertText", text=text)

    def disturbances(self) -> list[dict[str, Any]]:
        """Return what the page threw and logged, and what it asked for beyond itself."""
        self.run("1")
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        beyond = [event for event in sent if not event["params"]["request"]["url"].startswith(("file:", "data:"))]
        return [event for event in self.events if event.get("method") in kinds] + beyond


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Give a headless Chromium. Without one the tests are skipped, or fail where ``NEED_BROWSER`` is set."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        (pytest.fail if os.environ.get("NEED_BROWSER") else pytest.skip)(MISSING)
    running = Browser(program, tmp_path_factory.mktemp("chromium"))
    watchdog = threading.Timer(600, running.process.kill)
    watchdog.start()
    yield running
    watchdog.cancel()
    running.command("Browser.close")
    running.process.wait(20)


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory, brief_runs: tuple[pytest.MonkeyPatch, pytest.MonkeyPatch]
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    brief_runs[0].undo()  # with pictures
    for name, made in PAGES.items():
        (folder / f"{name}.html").write_text(render(made()), encoding="utf-8")
    brief.draw_nothing(brief_runs[0])
    return {name: folder / f"{name}.html" for name in PAGES}


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", ["certified", "finetuned", "unsafe"])
def test_a_page_holds_its_shape_silently(chromium: Browser, written: dict[str, Path], name: str, width: int) -> None:
    papers = []
    for dark in (False, True):
        chromium.open(written[name], width=width, dark=dark)
        assert chromium.run("innerWidth") == width
        assert chromium.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert chromium.run(SPILLED) == [] and chromium.run(LABELS_CUT) == []
        assert chromium.run("[...document.querySelectorAll('figure svg')].every(fits)".replace("fits", FITS))
        assert chromium.disturbances() == []
        papers.append(chromium.run("getComputedStyle(document.body).backgroundColor"))
    assert papers[0] != papers[1]


def column(chromium: Browser, number: int) -> list[str]:
    shown = "[...document.querySelectorAll('#site-table tbody tr')].filter((row) => row.checkVisibility())"
    rows = chromium.run(f"{shown}.map((row) => row.cells[{number}].textContent)")
    return [str(row) for row in rows]


def press(chromium: Browser, title: str) -> int:
    headings = chromium.run("[...document.querySelectorAll('#site-table th')].map((th) => th.textContent)")
    number = [str(heading) for heading in headings].index(title)
    chromium.click(f"#site-table th:nth-child({number + 1}) button")
    return number


@pytest.mark.parametrize("width", [390, 1440])
def test_a_press_on_a_heading_sorts_by_it(chromium: Browser, written: dict[str, Path], width: int) -> None:
    chromium.open(written["certified"], width=width)
    press(chromium, "site")
    names = column(chromium, 0)
    assert len(names) > 60 and names == sorted(names, key=numbered)
    press(chromium, "site")
    backwards = column(chromium, 0)
    assert backwards == sorted(backwards, key=numbered, reverse=True) and backwards[0] != names[0]
    shown = column(chromium, press(chromium, "headroom"))
    kept = [float(bits.partition(" ")[0].replace(",", "")) for bits in shown if bits[0].isdigit()]
    assert kept == sorted(kept) and kept[0] < kept[-1]
    bounds = column(chromium, press(chromium, "bound"))
    number = bounds.index("–")  # what has no bound stands last
    assert set(bounds[number:]) == {"–"} and bounds[0] == "60,000"
    sorted_by = "[...document.querySelectorAll('#site-table th[aria-sort]')].map((th) => [th.textContent, th.ariaSort])"
    assert chromium.run(sorted_by) == [["bound", "descending"]]
    assert chromium.disturbances() == []


def numbered(name: str) -> list[tuple[int, int, str]]:
    """Return a key that orders names as people do: block 10 behind block 9, marks before digits before letters."""
    parts = re.findall(r"\d+|\D", name.lower())
    return [(1, int(p), "") if p.isdigit() else (2, 0, p) if p.isalpha() else (0, "_:.".index(p), "") for p in parts]


def test_the_filter_leaves_what_has_every_word_or_what_broke(chromium: Browser, written: dict[str, Path]) -> None:
    chromium.open(written["certified"], width=1440)
    everything = len(column(chromium, 0))
    chromium.type("#filter", "decoder.block.1 WO")
    found = column(chromium, 0)
    assert 0 < len(found) < everything and all("decoder.block.1" in n and "wo" in n.lower() for n in found)
    assert chromium.run("document.getElementById('count').textContent") == f"{len(found)} of {everything} shown"
    chromium.type("#filter", "no such place")
    assert column(chromium, 0) == []
    chromium.open(written["audit"], width=1440)
    chromium.click("#problems")
    assert column(chromium, 0) == [fakes.BROKEN]


def test_without_scripts_the_whole_table_is_still_there(chromium: Browser, written: dict[str, Path]) -> None:
    chromium.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        chromium.open(written["certified"], width=1440)
        assert len(column(chromium, 0)) > 300
        hidden = "getComputedStyle(document.querySelector('.controls')).display"
        assert chromium.run(hidden) == "none"
    finally:
        chromium.command("Emulation.setScriptExecutionDisabled", value=False)


def test_it_prints_on_white_paper_without_controls(chromium: Browser, written: dict[str, Path]) -> None:
    chromium.open(written["finetuned"], width=1440, dark=True)
    answer = chromium.command("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)
    pdf = base64.b64decode(answer["data"])
    assert pdf.startswith(b"%PDF") and 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) < 30
    chromium.open(written["finetuned"], width=718, dark=True)  # A4 less its margins
    chromium.command("Emulation.setEmulatedMedia", media="print")
    assert chromium.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert chromium.run("[...document.querySelectorAll('.controls label')].every((e) => !e.offsetHeight)")
    # Chromium repeats a table's head on every page only where it holds no boxes.
    assert chromium.run("getComputedStyle(document.querySelector('th button')).display") == "contents"
    assert len(column(chromium, 0)) == 60
    assert chromium.run(SPILLED) == []
