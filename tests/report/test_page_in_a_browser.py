"""The page in a browser: it holds its shape, its table sorts and filters, and its script says what the page says.

Chromium is driven through its DevTools protocol over a pipe: no port, no driver, no network. Its ``--window-size`` is
not what a page sees (390 gives an inner width of 500), so widths are set as device metrics.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import fakes, tiny
from support.contract import layout_of
from support.pages import certified, finetuned, hostile, render

from bf16_to_fp16.report.regimes import tiers_of
from bf16_to_fp16.results import dump

pytestmark = pytest.mark.usefixtures("pictures")

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
PATIENCE = 60.0  # seconds to wait for an answer


class Browser:
    """One page of a headless Chromium, with what it logged, threw and asked for since the last ``open``."""

    def __init__(self, program: str) -> None:
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        # Its protocol speaks through descriptors 3 and 4, which a shell puts there from wherever they are.
        redirected = f'exec "$@" 3<&{commands} 4>&{answers}'
        options += ["--remote-debugging-pipe", f"--user-data-dir={self.profile}", "about:blank"]
        started: list[str] = ["bash", "-c", redirected, "bash", program, *options]
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.process = subprocess.Popen(started, pass_fds=(commands, answers), **streams)
        os.close(commands)
        os.close(answers)
        os.set_blocking(self._read, False)
        self._count, self._buffer, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            try:
                read = os.read(self._read, 1 << 20)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("the browser does not answer") from None
                time.sleep(0.005)
                continue
            if not read:
                raise EOFError("the browser has ended")
            self._buffer += read
        message, self._buffer = self._buffer.split(b"\0", 1)
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result; events that come meanwhile are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._count:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a local page at an inner width of ``width`` CSS pixels, in light or dark, and wait until it stands."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.events.clear()
        self.command("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def run(self, expression: str) -> Any:
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("text", "") + str(answer["result"].get("description")))
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        self.run(f"(e => {{ e.focus(); e.select(); }})(document.querySelector({json.dumps(selector)}))")
        self.command("Input.insertText", text=text)

    def problems(self) -> list[str]:
        self.run("1")
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith(("file:", "data:"))]

    def printed(self) -> bytes:
        pdf = self.command("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)
        return base64.b64decode(pdf["data"])

    def close(self) -> None:
        try:
            self.command("Browser.close")
            self.process.wait(20)
        except (OSError, EOFError, RuntimeError, TimeoutError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self.profile, ignore_errors=True)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Give a headless Chromium. Without one the tests of this section are skipped, or fail where
    ``NEED_BROWSER`` is set."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        (pytest.fail if os.environ.get("NEED_BROWSER") else pytest.skip)(MISSING)
    running = Browser(program)
    yield running
    running.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, made in PAGES.items():
        (folder / f"{name}.html").write_text(render(made()), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in PAGES}


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_holds_its_shape_and_says_nothing_to_the_console(
    chromium: Browser, written: dict[str, Path], name: str, width: int
) -> None:
    papers = []
    for dark in (False, True):
        chromium.open(written[name], width=width, dark=dark)
        assert chromium.run("innerWidth") == width
        assert chromium.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert chromium.run(SPILLED) == [] and chromium.run(LABELS_CUT) == []
        assert chromium.run("[...document.querySelectorAll('figure svg')].every(fits)".replace("fits", FITS))
        assert chromium.problems() == [] and chromium.requests() == []
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
def test_a_press_on_a_heading_sorts_by_it_and_another_turns_it_round(
    chromium: Browser, written: dict[str, Path], width: int
) -> None:
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
    assert chromium.problems() == []


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
    pdf = chromium.printed()
    assert pdf.startswith(b"%PDF") and 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) < 30
    chromium.open(written["finetuned"], width=718, dark=True)  # A4 less its margins
    chromium.command("Emulation.setEmulatedMedia", media="print")
    assert chromium.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert chromium.run("[...document.querySelectorAll('.controls label')].every((e) => !e.offsetHeight)")
    # Chromium repeats a table's head on every page only where it holds no boxes.
    assert chromium.run("getComputedStyle(document.querySelector('th button')).display") == "contents"
    assert len(column(chromium, 0)) == 60
    assert chromium.run(SPILLED) == []
