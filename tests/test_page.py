"""The page says what the report says, whatever the report lacks and whatever names it has, and loads nothing."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fakes
import pytest

from bf16_to_fp16.folder import finite
from bf16_to_fp16.page import bits, figures, magnitude, percent, render, verdict_sentence, write_page

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;{{ 7*7 }}"
VOID = {"wbr", "meta", "link", "input", "br", "hr", "img", "path", "use"}
LOADING = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "formaction"}


class Page(HTMLParser):
    """A parsed page: its tags with attributes, its text, the ids of its sections, and whether its tags balance."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def sections(self) -> list[str | None]:
        return [attrs.get("id") for tag, attrs in self.tags if tag == "section"]

    @property
    def data(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.scripts[0])
        return parsed


def requests(html: str) -> list[str]:
    """Return every address that a browser would load for the page."""
    page = Page(html)
    found = [v for _, attrs in page.tags for k, v in attrs.items() if k in LOADING and v and not v.startswith("#")]
    found += [u for u in re.findall(r"url\(([^)]*)\)", html) if not u.strip("\"'").startswith("#")]
    return [address for address in found if address != "data:,"] + re.findall(r"@import[^;]*", html)


def test_a_whole_report_gives_every_section() -> None:
    page = Page(render(fakes.conversion()))
    assert page.open == []
    assert page.sections == ["picture", "regimes", "plan", "fidelity", "sites", "provenance"]
    assert "Safe in fp16: nothing overflowed or saturated in stock, amp and half" in page.text
    assert "1.9 bits" in page.text and "40× closer" in page.text and "99.9999%" in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 2


def test_the_page_loads_nothing_and_forbids_loading() -> None:
    html = render(fakes.conversion(safe=False))
    assert requests(html) == []
    assert requests(html.replace("data:,", "https://example.org/icon.png")) == ["https://example.org/icon.png"]
    policy = next(a["content"] for _, a in Page(html).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';")
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", html))
    assert addresses == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def hostile(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with a hostile name wherever a name from outside can stand."""
    source = report["source"]
    source |= {"path": HOSTILE, "revision": HOSTILE, "dtype": HOSTILE, "made": [HOSTILE], "carried_over": [HOSTILE]}
    source |= {"sha256": {HOSTILE: HOSTILE}, "dropped": {HOSTILE: HOSTILE}, "left_out": [HOSTILE]}
    source["config_changes"] = {HOSTILE: {"before": HOSTILE, "after": HOSTILE}}
    report |= {
        "family": HOSTILE,
        "command": HOSTILE,
        "unsafe": [{"signal": HOSTILE, "excess_bits": 1.0, "remedy": HOSTILE}],
    }
    report["plan"]["exponents"] = {HOSTILE: [1, 2], f"{HOSTILE}.value": 3}
    report["plan"]["notes"] = [HOSTILE]
    report["environment"] = {"versions": {HOSTILE: HOSTILE}, HOSTILE: HOSTILE}
    report["signals"].append({"module": HOSTILE, "side": HOSTILE, "kind": HOSTILE, "before": 1e9, "after": 1.0})
    for name, entry in report["regimes"].items():
        entry["sites"] = [
            fakes.site(HOSTILE, 65536.0, nonfinite=1, benign=HOSTILE, dtype=HOSTILE, headroom_bits=-1e-3),
            *entry["sites"],
        ]
        report["regimes"][name] = fakes.regime(entry["sites"])
    report["regimes"][HOSTILE] = report["regimes"].pop("amp")
    return report | {"verdict": "unsafe"}


def test_hostile_names_stay_text() -> None:
    html = render(hostile(fakes.conversion()))
    page = Page(html)
    assert page.open == []
    assert sum(tag == "script" for tag, _ in page.tags) == 2 and not any(tag == "img" for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert "alert(" not in page.scripts[1]
    assert HOSTILE in page.data["strings"]
    assert HOSTILE in "".join(page.words)


def test_an_unsafe_report_names_the_site_its_regime_and_the_remedy() -> None:
    report = fakes.conversion(safe=False)
    page = Page(render(report))
    sentence = (
        "Unsafe in fp16: up to 1,200 values are inf or NaN and 34 values saturate in half, first at "
        + fakes.BROKEN
        + "."
    )
    assert verdict_sentence(report) == sentence and sentence in page.text
    assert page.sections[0] == "unsafe"
    assert "Nothing broke in stock and amp: use it that way" in page.text
    assert "finetune it" in page.text
    assert figures(report)[0].value == "none"


def test_a_safe_report_with_a_thin_margin_is_not_called_unsafe() -> None:
    report = fakes.conversion() | {"unsafe": [{"signal": "lm_head (output)", "excess_bits": 0.4, "remedy": "finetune"}]}
    text = Page(render(report)).text
    assert "What is close to its limit" in text and "What is unsafe" not in text


def test_an_audit_has_a_page_without_plan_weights_and_fidelity() -> None:
    page = Page(render(fakes.audit()))
    assert page.sections == ["unsafe", "regimes", "sites", "provenance"]
    assert "in training mode" in page.text and "bf16-to-fp16 convert SOURCE OUT" in page.text
    assert [f.name for f in figures(fakes.audit())] == ["headroom in half", "values not finite", "values saturated"]


@pytest.mark.parametrize(
    "missing", ["signals", "fidelity", "weights", "plan", "environment", "source", "output", "regimes"]
)
def test_a_missing_part_leaves_the_rest(missing: str) -> None:
    report = fakes.conversion()
    del report[missing]
    page = Page(render(report))
    assert page.open == []
    assert "provenance" in page.sections and "Safe in fp16" in page.text


def test_an_encoder_has_one_picture_and_no_kl() -> None:
    page = Page(render(fakes.conversion(stacks=("encoder",))))
    assert [a.get("aria-label", "") for t, a in page.tags if t == "svg"] == [
        "encoder: the largest value is 290,000 before and 36,250 after; the limit is 65504"
    ]
    assert "relative squared error to the fp32 source" in page.text
    assert "KL" not in page.text and "same best token" not in page.text


def test_drift_and_corrections_are_shown_where_there_are_some() -> None:
    report = fakes.conversion()
    drift: dict[str, float | None] = {"relative_error": 1e-4, "predicted_kl": 2e-7, "predicted_max_logit_error": 3e-3}
    drift |= {"measured_kl": 2.5e-7, "measured_max_logit_error": None}
    report["plan"] |= {"drift": drift, "eps": None, "gain_correction": {"a.weight": 1.01}, "untied_head": True}
    text = Page(render(report)).text
    assert "predicted 2.00×10⁻⁷, measured 2.50×10⁻⁷" in text and "1 norm weights" in text
    assert "separated from the embedding" in text and "what is not exact is listed" in text


def test_infinite_numbers_look_the_same_in_memory_and_from_json() -> None:
    report = fakes.conversion(safe=False)
    report["signals"][0] |= {"before": math.inf, "after": math.nan}
    report["regimes"]["amp"]["sites"][0] |= {"amax": math.inf, "headroom_bits": -math.inf}
    report["fidelity"] |= {"kl_fp16": math.inf, "max_logit_error_fp16": math.inf}
    stored: Any = finite(report)
    assert stored["signals"][0]["before"] == sys.float_info.max
    assert Page(render(report)).text == Page(render(stored)).text
    assert "broken" in Page(render(stored)).text


def test_a_page_of_eighteen_thousand_sites_is_cut_to_two_megabytes(tmp_path: Path) -> None:
    report = fakes.conversion(blocks=24)
    for name in report["regimes"]:
        found = [
            fakes.site(
                f"decoder.block.{i % 24}.layer.{i % 3}.EncDecAttention.relative_attention_bias:{name} {i}", 1.0 + i
            )
            for i in range(6000)
        ]
        report["regimes"][name] = fakes.regime(found[::-1])
    write_page(tmp_path / "page.html", report)
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    page = Page((tmp_path / "page.html").read_text())
    rows = len(page.data["rows"])
    assert 9_000 < rows < 18_000 and f"{18_000 - rows:,} operations with more headroom" in page.text


def test_every_site_is_in_the_data_of_the_table() -> None:
    report = fakes.conversion()
    data = Page(render(report)).data
    shown = {(data["strings"][row[0]], data["strings"][row[1]]) for row in data["rows"]}
    assert shown == {(s["name"], name) for name, r in report["regimes"].items() for s in r["sites"]}
    assert len(shown) == 3 * (2 * 9 * 16 + 1)
    assert data["shown"] == "half"


def test_exponents_are_counted_by_kind() -> None:
    text = Page(render(fakes.conversion())).text
    assert "12 of 512 channels moved, by exponent −2 3 +1 9" in text
    assert "24 of 1,024 channels moved, by exponent −4 4 −1 20" in text
    assert "whole signals: 1 by 2⁻²" in text


def test_numbers_never_flatter() -> None:
    assert percent(1.0) == "100%" and percent(0.99999999) == "99.9999%" and percent(0.5) == "50%"
    assert bits(0.999) == "0.9" and bits(math.log2(65504 / 65536)) == "none" and bits(0.0) == "0.0"
    assert bits(None) == "–" and bits(math.inf) == "all" and bits(-math.inf) == "none"
    assert magnitude(math.inf) == magnitude(sys.float_info.max) == "∞"
