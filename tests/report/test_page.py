"""The page says what the report says, whatever the report lacks and whatever names it has, and loads nothing."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import browser, fakes, tiny
from support.contract import layout_of

from bf16_to_fp16.checkpoint.folder import finite
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.families.places import places
from bf16_to_fp16.families.roles import STACKS, stack_in
from bf16_to_fp16.families.types import Attention, Sublayer
from bf16_to_fp16.finetuning.log import MOST_POINTS, curves
from bf16_to_fp16.finetuning.recipe import parse_recipe
from bf16_to_fp16.finetuning.run import Run, lineage_of
from bf16_to_fp16.finetuning.trainer import Outcome
from bf16_to_fp16.losses.events import Curve
from bf16_to_fp16.losses.report import loss_report, write_loss_page
from bf16_to_fp16.report import card, page, terminal
from bf16_to_fp16.report import figures as pictures
from bf16_to_fp16.report.build import tiers_of
from bf16_to_fp16.report.schema import BoundEntry, CertificateEntry, FinetuneEntry, Report, SignalEntry, dump, read
from bf16_to_fp16.wording import (
    about,
    bits,
    bound_magnitude,
    excess,
    headroom,
    magnitude,
    percent,
    significant_bits,
    tightness,
    times,
)

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;{{ 7*7 }}"
VOID = {"wbr", "meta", "link", "input", "br", "hr", "img", "path", "use"}
LOADING = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "formaction"}


def render(report: dict[str, Any]) -> str:
    """Return the page of a report that is given as JSON data."""
    return page.render(read(Report, report))


def write_page(path: Path, report: dict[str, Any]) -> None:
    """Write that page to a file."""
    page.write_page(path, read(Report, report))


def figures(report: dict[str, Any]) -> list[page.Figure]:
    """Return the figures of its headline."""
    return page.figures(read(Report, report))


def verdict_sentence(report: dict[str, Any]) -> str:
    """Return its verdict in a sentence."""
    return page.verdict_sentence(read(Report, report))


def print_conversion(report: dict[str, Any], out: Path) -> None:
    """Print it as the command line does."""
    terminal.print_conversion(read(Report, report), out, verbose=True)


def brackets(sites: list[dict[str, Any]], stack: str) -> list[pictures.Bracket]:
    """Return the brackets of a certificate's sites."""
    return pictures.brackets([read(BoundEntry, site) for site in sites], stack)


def bracket_pictures(made: dict[str, Any]) -> list[pictures.Picture]:
    """Return the pictures of a certificate."""
    return pictures.bracket_pictures(read(CertificateEntry, made))


def curve_pictures(run: dict[str, Any]) -> list[pictures.Picture]:
    """Return the pictures of a finetune."""
    return pictures.curve_pictures(read(FinetuneEntry, run))


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
    assert "1.9 bits" in page.text and "about 40 × closer" in page.text and "99.9999%" in page.text
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
    # Joined without spaces: names may wrap behind their dots.
    assert verdict_sentence(report) == sentence and sentence in "".join(page.words)
    assert page.sections[0] == "unsafe"
    assert page.text.count(fakes.COMMAND) == 1 and f"<code>{fakes.COMMAND}</code>" in render(report)
    assert "No exponent brings these under their limit" in page.text
    assert figures(report)[0].value == "none"


def test_a_safe_report_with_a_thin_margin_is_not_called_unsafe() -> None:
    report = fakes.conversion() | {"close": [fakes.LIMIT | {"excess_bits": 0.4}]}
    text = Page(render(report)).text
    assert "What is close to its limit" in text and "What is unsafe" not in text
    assert "Under their limit by less than the margin" in text and "No exponent brings" not in text


def test_an_audit_has_a_page_without_plan_weights_and_fidelity() -> None:
    page = Page(render(fakes.audit()))
    assert page.sections == ["unsafe", "blocks", "regimes", "sites", "provenance"]
    assert "in training mode" in page.text and "bf16-to-fp16 convert SOURCE OUT" in page.text
    assert [f.name for f in figures(fakes.audit())] == [
        "headroom in pure fp16",
        "values not finite",
        "values saturated",
    ]


def test_an_audit_draws_what_each_block_reached_and_what_overflowed_as_large_as_in_fp32() -> None:
    def site(name: str, amax: float, fp32: float | None = None, benign: str | None = None) -> dict[str, Any]:
        entry = {"name": name, "amax": amax, "limit": 65504.0, "headroom_bits": 1.0, "nonfinite": int(amax == 65536)}
        return entry | {"saturated": 0, "benign": benign, "dtype": "float16"} | ({} if fp32 is None else {"fp32": fp32})

    found = [
        site("model.layers.0:add", 12.0),
        site("model.layers.1:add#2", 65536.0, 360_564.0),
        site("model.layers.1.self_attn:scores", 99.0),
        site("model.layers.1.self_attn:add", 65536.0, benign="the mask"),
        site("model.layers.1.mlp.down_proj", 40.0),
        site("model.norm:mul", 7e4),
    ]
    regime = fakes.regime(found) | {"nonfinite": 1, "headroom_bits": -1.0}
    report = {"verdict": "unsafe", "regimes": {"half": regime}, "attention": ["eager"]}
    page = Page(render(report))
    assert page.sections[:2] == ["unsafe", "blocks"]
    words = "model: the largest value is 360,564, at model.layers.1:add#2; the limit is 65,504"
    assert [a.get("aria-label") for t, a in page.tags if t == "svg"] == [words]
    assert "With eager attention." in page.text


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
        "encoder: the largest value is 290,000 before and 36,250 after; the limit is 65,504"
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
    assert 9_000 < rows < 18_000 and f"{18_000 - rows:,} sites with more headroom" in page.text


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
    assert headroom(0.999) == "1.99 × (0.99 bits)" and headroom(1.0) == "2.0 × (1.0 bits)"
    assert headroom(math.log2(65504 / 65536)) == "none"
    assert headroom(0.0) == "1.00 × (0.00 bits)" and headroom(math.log2(1.0601)) == "1.06 × (0.08 bits)"
    assert headroom(None) == "–" and headroom(math.inf) == "all" and headroom(-math.inf) == "none"
    assert magnitude(math.inf) == magnitude(sys.float_info.max) == "∞"


# --- the certificate -------------------------------------------------------------------------------------------------

GROWTH = {"SelfAttention:scores": 0.02, "SelfAttention.o": 0.2, "DenseReluDense:mul": 0.5, "DenseReluDense.wo": 0.7}
KINDS = {"SelfAttention:scores": "scores", "DenseReluDense:mul": "product"}


def bound(name: str, kind: str, value: float, found: float | None = None, **changes: Any) -> dict[str, Any]:
    """Return one site of a certificate."""
    entry: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "bound": value,
        "partial": value,
        "limit": 65504.0,
        "observed": found,
    }
    entry |= fakes.placed(name) | changes
    largest = max(entry["bound"], entry["partial"])
    return entry | {"headroom_bits": math.log2(entry["limit"] / largest), "holds": largest <= entry["limit"]}


def certificate(*, blocks: int = 3, top: float = 60_000.3, found: bool = True) -> dict[str, Any]:
    """Return the certificate of a model of ``fakes``, whose last residual is bounded by ``top``."""
    sites = []
    for stack in ("encoder", "decoder"):
        for i in range(blocks):
            level = top * 2.0 ** (i + 1 - blocks)
            for j, names in enumerate((("SelfAttention:scores", "SelfAttention.o"), tuple(GROWTH)[2:])):
                for name in names:
                    value = level * GROWTH[name]
                    site = f"{stack}.block.{i}.layer.{j}.{name}"
                    sites.append(bound(site, KINDS.get(name, "output"), value, value / 3 if found else None))
                top_here = level if j else 0.9 * level
                place = f"{stack}.block.{i}.layer.{j}:add"
                sites.append(bound(place, "residual", top_here, top_here / 2 if found else None))
    sites.append(bound("lm_head", "logits", 123.4, 61.7 if found else None))
    return {
        "holds": all(site["holds"] for site in sites),
        "headroom_bits": min(site["headroom_bits"] for site in sites),
        "max_length": 32768,
        "splits": 8,
        "train_mode": False,
        "cost_bits": 0.0,
        "sites": sites,
    }


def certified(**options: Any) -> dict[str, Any]:
    """Return the report of a conversion with a certificate and its precision."""
    made = certificate(**options)
    precision = [
        {"module": f"{stack}.{place}layer_norm", "bits": 10.999 - 0.25 * k}
        | fakes.placed(f"{stack}.{place}layer_norm")
        | ({"role": "cross-attention"} if (stack, place[-2:]) == ("decoder", "1.") else {})
        for stack, norms in (("encoder", 2), ("decoder", 3))
        for k, place in enumerate(["final_", *(f"block.{i}.layer.{j}." for i in range(2) for j in range(norms))])
    ]
    over = sorted((s for s in made["sites"] if not s["holds"]), key=lambda s: s["headroom_bits"])
    uncertified = [
        {"name": s["name"], "bound": s["bound"], "limit": s["limit"], "excess_bits": -s["headroom_bits"]}
        | {"reason": f"reason {i}", "remedy": f"remedy {i}"}
        for i, s in enumerate(over)
    ]
    proof = "certified" if made["holds"] else "observed"
    report = fakes.conversion(blocks=options.get("blocks", 3)) | {"certificate": made, "proof": proof}
    return report | {"precision": precision, "uncertified": uncertified, "signals": []}


def attacked(*, broken: bool = False) -> dict[str, Any]:
    """Return the report of an audit with an attack: nothing breaks in what was run, ``broken`` under the attack."""
    report, made = fakes.conversion(blocks=3), certificate()
    sites = [
        {"name": s["name"], "worst": s["observed"], "random": s["observed"] / 2, "limit": s["limit"]}
        | {"headroom_bits": math.log2(s["limit"] / s["observed"]), "gain": 2.0, "ids": None}
        | dict.fromkeys(("tokens", "embeddings", "half", "covered"), s["observed"])
        for s in made["sites"]
    ]
    if broken:
        sites[0] |= {"worst": math.inf, "headroom_bits": -math.inf}
    least = min(site["headroom_bits"] for site in sites)
    attack = {"steps": 20, "seed": 0, "worst_headroom_bits": least, "median_gain": 2.0, "sites": sites}
    for key in ("plan", "weights", "fidelity", "signals", "unsafe", "output", "command"):
        del report[key]
    return report | {"certificate": made, "attack": attack, "verdict": "unsafe" if broken else "safe"}


def table(html: str, name: str) -> list[list[str]]:
    """Return the text of the cells of a table by its id, or by a heading in it; the first row is the headings."""
    found = [t for t in re.findall(r"<table.*?</table>", html, re.DOTALL) if name in t]
    return [
        [unescape(re.sub(r"<[^>]*>", "", c)) for c in re.findall(r"<t[hd][ >].*?</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr.*?</tr>", found[0], re.DOTALL)
    ]


def test_the_tightest_bounds_are_those_of_the_report() -> None:
    report = certified()
    shown = table(render(report), 'id="bounds"')
    tightest = sorted(report["certificate"]["sites"], key=lambda s: s["headroom_bits"])[:8]
    assert shown[0][:5] == ["site", "what", "worst found", "bound", "bound / worst found"]
    assert [row[0] for row in shown[1:]] == [s["name"] for s in tightest]
    for row, site in zip(shown[1:], tightest, strict=True):
        assert float(row[3].replace(",", "")) - site["bound"] == pytest.approx(0.5, abs=0.5)
        assert float(row[4]) - site["bound"] / site["observed"] == pytest.approx(0.005, abs=0.005001)
        assert row[2] == magnitude(site["observed"]) and row[7] == headroom(site["headroom_bits"])
    assert shown[1][2:5] == ["30,000", "60,001", "2"]


def test_a_picture_shows_the_largest_of_each_block_and_kind() -> None:
    report = certified()
    found = brackets(report["certificate"]["sites"], "encoder")
    assert len(found) == 3 * 5
    stream = {b.block: b for b in found if b.series.css == "stream"}
    assert (stream[2].found, stream[2].bound) == (60_000.3 / 2, 60_000.3)
    assert {b.series.css for b in found} == {"stream", "attention", "added", "product", "scores"}
    logits = [b for b in brackets(report["certificate"]["sites"], "decoder") if b.block is None]
    assert [(b.found, b.bound) for b in logits] == [(61.7, 123.4)]
    labels = [a.get("aria-label") or "" for t, a in Page(render(report)).tags if t == "svg"]
    assert labels[0] == (
        "encoder: the largest value found is 30,000, the largest bound is 60,001; the limit is 65,504"
    ) and labels[1].startswith("decoder: the largest value found is 30,000")


def test_the_only_stack_of_a_family_has_its_brackets_and_its_head() -> None:
    sites = [
        bound("model.layers.1:add", "residual", 8.0, 4.0),
        bound("model.layers.1.self_attn.o_proj", "output", 5.0, 4.0),
        bound("lm_head", "logits", 9.0, 4.0),
    ]
    drawn = [b for stack in STACKS for b in brackets(sites, stack)]
    assert {b.series.css: (b.block, b.bound) for b in drawn} == {
        "stream": (1, 8.0),
        "attention": (1, 5.0),
        "scores": (None, 9.0),
    }


def test_pegasus_and_ungated_models_have_their_brackets() -> None:
    sites = [
        bound("model.encoder.layers.1:add", "residual", 8.0, 4.0),
        bound("model.encoder.layers.1.self_attn.out_proj", "output", 5.0, 4.0, partial=7.0),
        bound("model.encoder.layers.1.fc2", "output", 6.0, 4.0),
        bound("model.encoder.layers.1.activation_fn:relu", "activation", 7.0, 4.0),
        bound("model.encoder:add", "residual", 9.0, 4.0),
    ]
    found = {b.series.css: b for b in brackets(sites, "encoder")}
    assert {css: (b.block, b.bound) for css, b in found.items()} == {
        "stream": (1, 8.0),
        "attention": (1, 5.0),
        "added": (1, 6.0),
        "product": (1, 7.0),
    }
    assert found["attention"].partial == 7.0 and brackets(sites, "decoder") == []


def test_a_bracket_lies_between_the_worst_found_and_the_bound_on_a_log2_axis() -> None:
    def heights(found: float, top: float) -> list[float]:
        made = certificate(blocks=1) | {"sites": [bound("encoder.block.0.layer.0:add", "residual", top, found)]}
        svg = str(bracket_pictures(made)[0].svg)
        # Paths in the colour of the stream from one point to another are its brackets.
        paths = re.findall(r'd="M [\d.]+ ([\d.]+) \nL [\d.]+ ([\d.]+) \n" clip-path="[^"]*" style="[^"]*--stream', svg)
        assert len(paths) == 1
        return sorted(float(y) for y in paths[0])

    high, low = heights(16.0, 4096.0)
    top = heights(1024.0, 4096.0)
    assert top[0] == high and high < top[1] < low
    assert (low - high) / (top[1] - high) == pytest.approx(8 / 2, rel=1e-3)


def test_an_overflow_that_was_found_is_a_cross_where_the_bound_allows_it() -> None:
    def crosses(top: float) -> int:
        made = certificate(blocks=1) | {"sites": [bound("encoder.block.0.layer.0:add", "residual", top, 65536.0)]}
        return str(bracket_pictures(made)[0].svg).count("stroke: var(--limit); stroke-width: 1.3")

    assert crosses(1e6) > 0 and crosses(100.0) == 0
    report = certified(top=1e6)
    assert "crosses: an overflow" not in Page(render(certified())).text
    report["certificate"]["sites"][0]["observed"] = math.inf
    assert "crosses: an overflow" in Page(render(report)).text


def test_the_site_table_has_bound_and_tightness_of_every_site_that_has_one() -> None:
    report = certified()
    html = render(report)
    data = Page(html).data
    bounds = {s["name"]: s for s in report["certificate"]["sites"]}
    assert data["columns"] == [0, 1, 2, 3, 9, 10, 4, 5, 7]
    for row in data["rows"]:
        site = bounds.get(data["strings"][row[0]])
        if site is None:
            assert row[9:] == [None, None]
        else:
            assert 0 <= row[9] - site["bound"] <= max(1.0, site["bound"] / 1000) and row[9] >= site["bound"]
            assert row[10] == pytest.approx(site["bound"] / site["observed"], rel=0.01)
    shown = table(html, 'id="site-table"')
    assert shown[0] == [
        "site",
        "regime",
        "max |x|",
        "headroom",
        "bound",
        "bound / worst found",
        "non-finite",
        "saturated",
        "dtype",
    ]
    for row in shown[1:]:
        site = bounds.get(row[0])
        assert row[4:6] == (["–", "–"] if site is None else [bound_magnitude(site["bound"]), row[5]])
    assert sum(row[0] in bounds for row in shown) > 20


def test_a_fp32_value_needs_no_bound() -> None:
    report = certified()
    for site in report["regimes"]["amp"]["sites"]:
        site |= {"limit": None, "headroom_bits": None}
    data = Page(render(report)).data
    amp = data["strings"].index("amp")
    assert {(row[9], row[10]) for row in data["rows"] if row[1] == amp} == {(None, None)}
    assert any(row[9] for row in data["rows"] if row[1] != amp)


def test_what_is_not_certified_is_listed_with_reason_and_remedy() -> None:
    report = certified(top=900_000.0)
    assert not report["certificate"]["holds"]
    html = render(report)
    shown = table(html, 'id="unproven"')
    assert shown[0] == ["site", "bound", "limit", "bits over", "reason"] and len(shown) == 13
    for row, site in zip(shown[1:], report["uncertified"], strict=False):
        assert row == [site["name"], bound_magnitude(site["bound"]), "65,504", row[3], site["reason"]]
        assert site["excess_bits"] <= float(row[3]) < site["excess_bits"] + 0.1001
    words, rest = Page(html).text, len(report["uncertified"]) - 12
    assert f"{rest} more" in words and all(words.count(f"{site['remedy']}.") == 1 for site in report["uncertified"])
    assert f"Not proven: {rest + 12} of 37 sites" in words and "not certified" in words
    assert "It covers" not in words and "The bounds cover, until something overflows" in words
    assert (
        figures(report)[1].value == f"{rest + 12} sites" and report["uncertified"][0]["name"] in figures(report)[1].note
    )
    assert "Not proven" not in Page(render(certified())).text


def test_one_reason_for_all_is_said_once_and_very_many_sites_are_cut() -> None:
    report = certified(top=900_000.0)
    report["uncertified"] = [
        report["uncertified"][0] | {"name": f"place {i}", "reason": "too wide", "remedy": "finetune"}
        for i in range(450)
    ]
    text = Page(render(report)).text
    assert text.count("too wide") == 1 and "Why: too wide. What helps: finetune." in text
    # Where the whole has a next step, that is it.
    assert "What helps" not in Page(render(report | {"next": "go on: c"})).text
    assert "place 399" in text and "place 400" not in text and "50 more are in the JSON report only" in text


@pytest.mark.parametrize("kind", ["gemma3", "switch", "bigbird_pegasus"])
def test_a_pictures_lines_are_of_the_stream_at_sublayers_of_their_outputs_and_of_scores(kind: str) -> None:
    """Not of other norms' inputs; experts stand side by side, and the largest is drawn."""
    layout = layout_of(tiny.build(kind))
    place = places(layout)
    seen: list[dict[str, Any]] = [
        {"module": p.module, "side": p.side, "kind": str(signal.kind), "before": 2.0 + n, "after": 1.0}
        | place(p.module).to_json()
        for signal in layout.signals.values()
        for n, p in enumerate(signal.seen)
    ]
    attentions = [w.at for w in layout.topology if isinstance(w, Attention)]
    scores = {"side": "output", "kind": "scores", "before": 2.0, "after": 1.0}
    seen += [{"module": at, **scores, **place(at).to_json()} for at in attentions]
    for stack in layout.stacks():
        name = STACKS[-1] if len(layout.stacks()) == 1 else stack.ends.at.rpartition(".")[2]
        sublayers = [w for w in layout.topology if isinstance(w, Sublayer) and stack_in(w.at, layout.family) == name]
        found = pictures.points([read(SignalEntry, each) for each in seen], name)
        drawn = {line: [p for p in found if p.series is line] for line in pictures.SERIES}
        of_attention = sum(isinstance(w, Attention) for w in sublayers)
        assert len(drawn[pictures.STREAM]) == len(sublayers) + 1
        assert len(drawn[pictures.ATTENTION]) == len(drawn[pictures.SCORES]) == of_attention
        assert len(drawn[pictures.FEED_FORWARD]) == len(drawn[pictures.PRODUCT]) == len(sublayers) - of_attention
        for line in (pictures.ATTENTION, pictures.FEED_FORWARD):
            assert {p.x for p in drawn[line]} <= {p.x for p in drawn[pictures.STREAM]}
        if kind == "switch":
            experts = [s["before"] for s in seen if f"{name}.block.0" in s["module"] and ".wo" in s["module"]]
            assert max((p.before for p in drawn[pictures.FEED_FORWARD] if p.x < 1), default=0) in experts


def test_what_the_proof_covers_follows_its_arithmetic() -> None:
    report = certified()
    text = Page(render(report)).text
    covers, leaves = text.split("It covers")[1].split("It does not cover")
    assert "up to 32,768 positions" in covers and "up to 8 partial sums" in covers
    assert "dropout (--target train)" not in covers and "with dropout ( --target train )" in leaves
    assert "--target norm-safe" in leaves and "the backward pass" in leaves
    report["certificate"] |= {"train_mode": True, "max_length": 512, "splits": 1}
    report["certificate"]["sites"].append(bound("encoder.x (sum of squares)", "squares", 100.0))
    covers, leaves = Page(render(report)).text.split("It covers")[1].split("It does not cover")
    assert "up to 512 positions" in covers and "up to 1 partial sum " in covers
    assert "dropout at the config's rates" in covers and "square the residual stream" in covers
    assert leaves.split("The ways people run it")[0].count("--target") == 1


def test_precision_is_shown_for_every_norm() -> None:
    report = certified()
    html = render(report)
    for stack, norms in (("encoder", 2), ("decoder", 3)):
        shown = table(html, f"<th>{stack} block</th>")
        kept = {row["module"]: significant_bits(row["bits"]) for row in report["precision"]}
        assert [row[0] for row in shown[1:]] == ["0", "1", "final norm"]
        for i in range(2):
            assert shown[1 + i][1:] == [kept[f"{stack}.block.{i}.layer.{j}.layer_norm"] for j in range(norms)]
        assert shown[3][1] == "10.99"
    text = Page(html).text
    assert "at least 9.49 where each norm reads it, the fewest at decoder. block. 1. layer. 2. layer_norm" in text
    for row in report["precision"]:
        row["bits"] = 11 - 1e-12
    assert "keeps all 11 where each norm reads it" in Page(render(report)).text


def test_signals_under_the_normal_numbers_are_named() -> None:
    report = fakes.conversion()
    assert "smallest normal number" not in Page(render(report)).text
    report["regimes"]["half"]["underflow"] = [{"name": "encoder.block.0.layer.0.SelfAttention.q", "amax": 2.0**-15}]
    html = render(report)
    assert table(html, "smallest normal number")[1:] == [
        ["encoder.block.0.layer.0.SelfAttention.q", "half", "3.05×10⁻⁵"]
    ]


def test_an_attack_has_its_figure_and_what_it_found() -> None:
    report = attacked()
    page = Page(render(report))
    assert page.sections == ["certificate", "regimes", "sites", "provenance"]
    assert [f.name for f in figures(report)] == [
        "headroom in pure fp16",
        "headroom under attack",
        "headroom for any input",
        "values not finite",
    ]
    assert (
        figures(report)[1].value == headroom(report["attack"]["worst_headroom_bits"])
        and "20 gradient steps" in figures(report)[1].note
    )
    assert "worst found by 20 steps of gradient search and the probe" in page.text
    assert "other inputs may reach further" not in page.text


def test_a_value_over_its_limit_is_so_in_the_headline_and_in_the_table_of_sites() -> None:
    report = fakes.audit()
    broken, passed = report["regimes"]["half"]["sites"][:2]
    broken |= {"fp32": 308_000.0}
    report["regimes"]["half"]["sites"][2] |= {"limit": None, "headroom_bits": None, "nonfinite": 1, "amax": 65536.0}
    passed |= {"fp32": 500.0, "nonfinite": 3, "headroom_bits": -0.1, "benign": "the mask's minimum"}
    html = render(report)
    assert figures(report)[0].value == "4.7 × over"
    first, second, third = table(html, 'id="site-table"')[1:4]
    assert third[2:4] == ["overflow", "–"]  # in fp32, without a magnitude
    assert first[2:4] == ["308,000", "4.7 × over"] and second[2:4] == ["500", "passed on"]
    # What is broken beside what is so by design is not called by design.
    assert "by design" not in second[0]
    over = certified(top=400_000.0)
    assert "6.2 × over" in [row[7] for row in table(render(over), 'id="bounds"')]


def test_every_bound_names_the_target_that_it_is_for() -> None:
    text = Page(render(certified() | {"target": "norm-safe"})).text
    assert "by bounds at 37 sites (target norm-safe)" in text and "by their bounds (target norm-safe)" in text
    assert "(target" not in Page(render(certified())).text


def test_a_site_is_counted_once_and_a_caption_names_a_larger_one_that_is_not_drawn() -> None:
    report = fakes.conversion()
    gate = {"module": "decoder.block.1.layer.2.DenseReluDense.wi_0", "side": "output", "kind": "fixed"}
    gate |= fakes.placed(gate["module"])
    head = {"module": "lm_head", "side": "output", "before": 3.5e5, "after": 3.5e5}
    report["signals"] += [gate | {"before": 4e5, "after": 4e5}, head | {"kind": "fixed"}, head | {"kind": "logits"}]
    html = render(report)
    rows = [row[:2] for row in table(html, "before</th>")[1:]]
    assert rows[:2] == [[gate["module"], "fixed, output"], ["lm_head", "logits, output"]] and rows.count(rows[1]) == 1
    over = sum(signal["before"] > 65504 for signal in report["signals"]) - 1
    of = len(report["signals"]) - 1
    assert (
        f"overflows fp16 at {over} of {of} sites that the plan watches, "
        in terminal.source_line(read(Report, report)).plain
    )
    labels = [a.get("aria-label") or "" for t, a in Page(html).tags if t == "svg"]
    assert labels[1].endswith(f"65,504; not drawn: {gate['module']}, 400,000 before and 400,000 after")
    assert labels[0].endswith("the limit is 65,504")


def test_a_caption_names_what_is_bounded_and_not_drawn() -> None:
    made = certificate()
    squares = bound("encoder.block.2.layer.1.layer_norm (sum of squares)", "squares", 61_234.0)
    words = bracket_pictures(made | {"sites": [*made["sites"], squares]})[0].words
    assert words.endswith("the limit is 65,504; not drawn: squares, up to 61,234")


def test_an_attack_that_breaks_what_ran_clean_says_where() -> None:
    report = attacked(broken=True)
    name = report["attack"]["sites"][0]["name"]
    assert (
        verdict_sentence(report) == f"Unsafe in fp16: 20 gradient steps of search found an input that overflows {name}."
    )
    assert figures(report)[1].value == "none" and "overflow" in figures(report)[1].note


def test_a_conversion_that_ran_nothing_shows_its_bounds() -> None:
    report = certified(found=False) | {"regimes": {}, "fidelity": None, "signals": [], "precision": []}
    page = Page(render(report))
    assert page.open == [] and page.sections == ["certificate", "plan", "fidelity", "sites", "provenance"]
    assert verdict_sentence(report) == "Safe in fp16 for every input, by bounds from the weights; nothing was audited."
    assert page.data["columns"] == [0, 3, 9, 6] and len(page.data["rows"]) == len(report["certificate"]["sites"])
    shown = table(render(report), 'id="site-table"')
    assert shown[1] == ["encoder.block.2.layer.1:add", "1.09 × (0.12 bits)", "60,001", "65,504"]
    assert "worst found" not in page.text and "Nothing was run" in page.text
    assert 'class="key stream line"' in render(report) and "margin kept between bounds and limits" in page.text
    unsafe = certified(found=False, top=1e6) | {"regimes": {}, "verdict": "unsafe"}
    assert verdict_sentence(unsafe) == (
        f"Unsafe in fp16: nothing was audited, but bounds pass the limit at {len(unsafe['uncertified'])} sites."
    )


def test_a_deep_models_brackets_take_the_width_of_the_page() -> None:
    sizes = {}
    for blocks in (12, 24):
        made = bracket_pictures(certificate(blocks=blocks))
        assert [p.wide for p in made] == [blocks == 24] * 2
        box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', str(made[0].svg))
        assert box is not None
        sizes[blocks] = (float(box[1]), float(box[2]))
    assert sizes[24][0] == 2 * sizes[12][0] and sizes[24][1] == sizes[12][1]


def test_hostile_names_in_a_certificate_stay_text() -> None:
    report = certified(top=1e6)
    report["certificate"]["sites"][0] |= {"name": HOSTILE, "kind": HOSTILE}
    report["uncertified"][0] |= {"name": HOSTILE, "reason": HOSTILE, "remedy": HOSTILE}
    report["precision"].append({"module": f"encoder.{HOSTILE}", "bits": 1.0})
    report["regimes"]["half"]["underflow"] = [{"name": HOSTILE, "amax": 1e-5}]
    html = render(report)
    page = Page(html)
    assert page.open == [] and sum(tag == "script" for tag, _ in page.tags) == 2
    assert not any(tag == "img" for tag, _ in page.tags) and requests(html) == []


def test_an_infinite_bound_looks_the_same_in_memory_and_from_json() -> None:
    report = certified(top=1e6)
    report["certificate"]["sites"][0] |= {"bound": math.inf, "partial": math.inf, "headroom_bits": -math.inf}
    report["uncertified"][0] |= {"bound": math.inf, "excess_bits": math.inf}
    stored: Any = finite(report)
    assert Page(render(report)).text == Page(render(stored)).text and "∞" in Page(render(stored)).text


# --- the finetune ----------------------------------------------------------------------------------------------------


def finetuned(**changes: Any) -> dict[str, Any]:
    """Return the report of a finetune of 200 steps: headroom comes, the loss scale falls, two steps are skipped."""
    steps = list(range(10, 210, 10))
    scale: list[float | None] = [None] * 5 + [64.0] * 5 + [16.0] * 10
    run: dict[str, Any] = {
        "recipe": {
            "source": "summariser-large",
            "precision": ["bf16", "fp16"],
            "schedule": {"steps": 200, "learning_rate": 4e-3, "decay": "cosine"},
            "penalty": {"form": "smooth-max", "headroom_bits": 1.5},
        },
        "data": {"path": "texts.jsonl", "objective": "span-corruption"},
        "processes": 2,
        "steps": 200,
        "tokens": 376_000,
        "skipped": [{"step": 101, "loss_scale": 32.0, "examples": []}, {"step": 102, "loss_scale": 16.0}],
        "rewinds": [{"spike": 50, "noticed": 60, "back_to": 40, "steps_of_data_left_out": 30}],
        "evaluations": [
            {"step": 0, "held_out_loss": 2.0136, "held_out_divergence": 7.8e-5},
            {"step": 200, "held_out_loss": 2.0078, "held_out_divergence": 0.0174, "rougeL": 31.25}
            | {"worst_site": "decoder.block.1.layer.2.DenseReluDense.wi_0", "worst_headroom_bits": 1.6987},
        ],
        "curves": {
            "step": steps,
            "task_loss": [2.5 - 0.5 * k / len(steps) for k in range(len(steps))],
            "headroom_bits": [-1.5 + 3.25 * k / len(steps) for k in range(len(steps))],
            "loss_scale": scale,
        },
        "fidelity": {"measure": "kl", "kl_bf16": 1e-3, "kl_fp16": 5e-2, "top1_fp16": 0.95, "positions": 815}
        | {"max_logit_error_bf16": 0.5, "max_logit_error_fp16": 4.0},
    }
    return certified(top=900_000.0) | {"finetune": run | changes}


def test_a_finetune_has_its_curves_evaluations_and_what_became_of_the_original() -> None:
    report = finetuned()
    html = render(report)
    page = Page(html)
    assert page.open == [] and "finetune" in page.sections
    assert [p.words for p in curve_pictures(report["finetune"])] == [
        "task loss in nats per token: from 2.500 to 2.025 in training, from 2.014 to 2.008 on held-out data",
        "headroom of the tightest layer: from -1.5 to 1.5 bits; asked for: 1.5",
        "loss scale in fp16: from 64 to 16; 2 steps skipped",
    ]
    assert all(p.words in page.text for p in curve_pictures(report["finetune"]))
    assert table(html, 'id="evaluations"') == [
        ["step", "held-out loss", "divergence from the original", "headroom", "rougeL", "tightest"],
        ["0", "2.014", "7.80×10⁻⁵", "–", "–", "–"],
        ["200", "2.008", "0.0174", "3.2 × (1.6 bits)", "31.25", "decoder.block.1.layer.2.DenseReluDense.wi_0"],
    ]
    assert "376,000" in page.text and "bf16, then fp16" in page.text and "texts.jsonl, span-corruption" in page.text
    assert "smooth-max, for 1.5 bits of headroom" in page.text
    assert table(html, "against the original in fp32")[1:][0][1:] == ["1.00×10⁻³", "0.05"]
    # The figures of the headline are those of the weights that are shipped.
    assert [f.name for f in figures(report)][2:] == [
        "KL to the original",
        "rounding, fp16 against bf16",
    ]
    assert figures(report)[2].value == "0.0174"
    assert figures(report)[2].note == "nats per token on held-out data; 0.05 on the audit's inputs"
    assert "KL to the finetuned weights in fp32" in figures(report)[3].note and len(figures(report)) == 4
    moved = "KL to the original is 0.0174 nats per token on held-out data and 0.05 on the audit's inputs"
    assert f"changed the weights, and what they compute: {moved}." in page.text
    assert "against the finetuned model in fp32" in page.text and "finetuned fp32 weights" in page.text


def test_a_finetune_that_held_bounds_draws_them_and_says_so() -> None:
    plain = finetuned()
    assert "stay there" not in Page(render(plain)).text
    run = plain["finetune"]
    run["recipe"]["penalty"]["certify"] = True
    run["curves"]["bound_bits"] = [None] * 5 + [-3.2 + 0.24 * k for k in range(15)]
    run["evaluations"][1] |= {"bounds_over": 0, "bound_excess_bits": 0.0}
    text = Page(html := render(plain)).text
    assert "trained to come under fp16's limit and stay there" in text
    assert "dashed, that of the tightest bound: from -3.2 to 0.15" in text
    headings, _, last = table(html, 'id="evaluations"')
    assert headings[3:5] == ["bounds over", "most by (bits)"] and last[3:5] == ["0", "0"]


def test_a_curve_follows_its_values() -> None:
    svg = str(curve_pictures(finetuned()["finetune"])[1].svg)
    path = re.search(r'd="(M [^"]*)" clip-path="[^"]*" style="[^"]*--product', svg)
    assert path is not None
    points = [[float(x) for x in pair.split()] for pair in re.split(r"[ML]", path[1])[1:]]
    # A straight line with even steps: across to the right and up, since SVG counts downwards.
    assert points[0][0] < points[-1][0] and points[0][1] > points[-1][1]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    assert max(slopes) - min(slopes) < 1e-3


def test_a_finetune_without_a_log_keeps_the_curves_of_its_evaluations() -> None:
    run = finetuned(curves={})["finetune"]
    found = [p.stack for p in curve_pictures(run)]
    assert found == ["losses", "headroom"]
    bare = {"steps": 3, "evaluations": []}
    assert curve_pictures(bare) == [] and Page(render(finetuned() | {"finetune": bare})).open == []


def test_a_finetune_that_is_not_safe_is_not_sent_back_to_where_it_came_from() -> None:
    said = "go on: bf16-to-fp16 finetune recipe.yaml --set schedule.steps=400"
    found = [fakes.LIMIT | {"signal": f"a.{i}", "kind": "found", "reason": f"{i},000 on an input"} for i in (70, 80)]
    run = finetuned()["finetune"] | {"next": said}
    html = render(fakes.conversion(safe=False) | {"unsafe": found, "finetune": run, "next": said})
    assert html.count("bf16-to-fp16 finetune") == 1 and "RECIPE" not in html
    text = Page(html).text
    assert "What the search drove past its limit" in text and "No exponent" not in text
    # Not the same words for each.
    assert "on an input" not in text
    assert table(html, "reached</th>")[1:] == [["a.70", "overflow", "2.50"], ["a.80", "overflow", "2.50"]]


def test_curves_come_from_the_log_and_are_thinned(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert curves(log) == {}
    rows: list[dict[str, Any]] = [{"step": 0, "evaluation": {"step": 0, "held_out_loss": 1.0}}]
    for step in range(1, 1001):
        rows.append({"step": step, "task_loss": 1 / step, "penalty": 0.0, "loss_scale": None})
        if step % 2 == 0:
            rows[-1] |= {"headroom": {"encoder": 2.0, "decoder": step / 1000}}
    log.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1001, "task_lo')
    found = curves(log)
    assert found["step"][-1] == 1000 and 0 < len(found["step"]) <= MOST_POINTS
    assert {len(v) for v in found.values()} == {len(found["step"])}
    for k, at in enumerate(found["step"]):
        assert at is not None and found["task_loss"][k] == 1 / at
        assert found["headroom_bits"][k] == (at / 1000 if at % 2 == 0 else None)


def test_the_report_of_a_finetune_has_the_curves_of_its_log(tmp_path: Path) -> None:
    source = Path(str(files("bf16_to_fp16") / "demo_data" / "t5-gated-bytes"))
    recipe = parse_recipe({"source": str(source), "out": str(tmp_path / "out"), "data": {"path": "texts.jsonl"}})
    (tmp_path / "log.jsonl").write_text('{"step": 10, "task_loss": 2.5, "loss_scale": 64.0}\n')
    run = Run(tmp_path, Outcome(10, 100, (), (), ()), {}, 1, ["cpu"], None)
    found = dump(lineage_of(open_checkpoint(source), recipe, recipe.settled(in_parts=False), run).finetune)
    assert found["curves"]["step"] == [10] and found["curves"]["loss_scale"] == [64.0]
    assert [p.stack for p in curve_pictures(found)] == ["losses", "loss scale"]
    # What was written, and what became of it.
    assert found["recipe"]["penalty"]["certify"] is None and found["settled"] == {"penalty.certify": True}
    assert FinetuneEntry.model_validate(found).holds_bounds
    decided = recipe.model_copy(update={"penalty": recipe.penalty.model_copy(update={"certify": False})})
    written = lineage_of(open_checkpoint(source), decided, decided, run).finetune
    assert written.settled == {} and not written.holds_bounds


def test_a_finetune_says_whose_config_the_rescaling_changed() -> None:
    (key,) = fakes.conversion()["source"]["config_changes"]
    assert f"config.json: {key}" in dict(page.plan_rows(read(Report, fakes.conversion())))
    assert f"config.json of the finetuned weights: {key}" in dict(page.plan_rows(read(Report, finetuned())))


def test_the_legend_of_the_curves_names_every_line_that_is_drawn() -> None:
    report = finetuned()
    assert "headroom of the tightest layer" in render(report) and "of the tightest bound</li>" not in render(report)
    report["finetune"]["curves"]["bound_bits"] = [-1.0 + k / 16 for k in range(20)]
    html = render(report)
    assert '<i class="key dashed of-attention"></i>headroom of the tightest bound</li>' in html
    assert "that of the tightest bound: from -1.0 to 0.18" in Page(html).text


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (1.0, "about 1 ×"),
        (2.34, "about 2.3 ×"),
        (9.96, "about 10 ×"),
        (1584, "about 1,600 ×"),
        (4e9, "over 1,000,000 ×"),
    ],
)
def test_a_factor_that_was_measured_is_a_plain_number(ratio: float, said: str) -> None:
    assert about(ratio) == said


def test_bits_of_headroom_are_never_rounded_up() -> None:
    assert [bits(b) for b in (0.2087, 0.999, 1.0, 2.96, -0.5006)] == ["0.20", "0.99", "1.0", "2.9", "-0.6"]


def test_every_exponent_of_the_plan_is_listed() -> None:
    assert table(render(fakes.conversion()), 'id="exponents"')[1:] == [
        ["encoder.block.0.layer.0.SelfAttention.value", "−2 to +1", "12 of 512"],
        ["encoder.block.2.layer.1.DenseReluDense.neuron", "−4 to 0", "24 of 1,024"],
        ["decoder.block.1.layer.0.layer_norm", "−2", "all"],
    ]


def test_the_headline_is_headroom_the_proof_and_the_error() -> None:
    assert [f.name for f in figures(certified())] == [
        "headroom in pure fp16",
        "headroom for any input",
        "fp16 against bf16",
    ]
    assert figures(fakes.conversion())[2].name == "weights carried over bit for bit"


# --- in a browser ----------------------------------------------------------------------------------------------------

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


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    """Give a headless Chromium. Without one the tests of this section are skipped, or fail where
    ``NEED_BROWSER`` is set."""
    program = browser.executable()
    if program is None:
        (pytest.fail if os.environ.get("NEED_BROWSER") else pytest.skip)(browser.MISSING)
    running = browser.Browser(program)
    yield running
    running.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the pages as files."""
    folder = tmp_path_factory.mktemp("pages")
    for name, made in PAGES.items():
        write_page(folder / f"{name}.html", made())
    losses = (*(3 + math.sin(i / 9) for i in range(90)), 40.0, *(3.0 for _ in range(9)))
    curve = Curve(tuple(range(100)), losses, tuple(1024.0 for _ in losses))
    result, found = loss_report("run/log.jsonl", curve, z=6.0, window=16)
    write_loss_page(folder / "losses.html", result, curve, found)
    return {name: folder / f"{name}.html" for name in (*PAGES, "losses")}


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", [*PAGES, "losses"])
def test_a_page_holds_its_shape_and_says_nothing_to_the_console(
    chromium: browser.Browser, written: dict[str, Path], name: str, width: int
) -> None:
    papers = []
    for dark in (False, True):
        chromium.open(written[name], width=width, dark=dark)
        assert chromium.run("innerWidth") == width
        assert chromium.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert chromium.run(SPILLED) == [] and chromium.run(LABELS_CUT) == []
        assert chromium.run("[...document.querySelectorAll('figure:not(.wide) svg')].every(fits)".replace("fits", FITS))
        assert chromium.problems() == [] and chromium.requests() == []
        papers.append(chromium.run("getComputedStyle(document.body).backgroundColor"))
    assert papers[0] != papers[1]


def column(chromium: browser.Browser, number: int) -> list[str]:
    """Return the text of a column of the site table's rows."""
    rows = chromium.run(
        f"[...document.querySelectorAll('#site-table tbody tr')].map((row) => row.cells[{number}].textContent)"
    )
    return [str(row) for row in rows]


@pytest.mark.parametrize("width", [390, 1440])
def test_a_press_on_a_heading_sorts_by_it_and_another_turns_it_round(
    chromium: browser.Browser, written: dict[str, Path], width: int
) -> None:
    chromium.open(written["certified"], width=width)
    chromium.click('#site-table th[data-column="0"] button')
    names = column(chromium, 0)
    # A screenful or two on a phone, where a row takes five lines.
    assert (len(names) == 20 if width == 390 else len(names) > 60) and names == sorted(names, key=numbered)
    chromium.click('#site-table th[data-column="0"] button')
    backwards = column(chromium, 0)
    assert backwards == sorted(backwards, key=numbered, reverse=True) and backwards[0] != names[0]
    chromium.click('#site-table th[data-column="3"] button')
    kept = [float(bits.partition(" ")[0]) for bits in column(chromium, 3) if bits != "–"]
    assert kept == sorted(kept) and kept[0] < kept[-1]
    sorted_by = (
        "[...document.querySelectorAll('#site-table th[aria-sort]')].map((th) => [th.dataset.column, th.ariaSort])"
    )
    assert chromium.run(sorted_by) == [["3", "ascending"]]
    assert chromium.problems() == []


def numbered(name: str) -> list[tuple[int, int, str]]:
    """Return a key that orders names as people do: block 10 behind block 9, marks before digits before letters."""
    parts = re.findall(r"\d+|\D", name.lower())
    return [(1, int(p), "") if p.isdigit() else (2, 0, p) if p.isalpha() else (0, "_:.".index(p), "") for p in parts]


def test_the_filter_leaves_what_has_every_word_in_the_regime_that_is_chosen(
    chromium: browser.Browser, written: dict[str, Path]
) -> None:
    chromium.open(written["certified"], width=1440)
    everything = len(column(chromium, 0))
    chromium.type("#filter", "decoder.block.1 WO")
    found = column(chromium, 0)
    assert 0 < len(found) < everything and all("decoder.block.1" in n and "wo" in n.lower() for n in found)
    assert chromium.run("document.getElementById('count').textContent") == f"{len(found)} of {len(found)} shown"
    assert set(column(chromium, 1)) == {"half"}
    chromium.run("(s => { s.value = ''; s.dispatchEvent(new Event('input')); })(document.getElementById('regime'))")
    assert set(column(chromium, 1)) == {"stock", "amp", "half"} and len(column(chromium, 0)) == 3 * len(found)
    chromium.type("#filter", "no such place")
    assert column(chromium, 0) == []


def test_only_what_broke_is_left_where_that_is_asked(chromium: browser.Browser, written: dict[str, Path]) -> None:
    chromium.open(written["audit"], width=1440)
    chromium.click("#problems")
    assert column(chromium, 0) == [fakes.BROKEN]
    chromium.open(written["certified"], width=1440)
    before = len(column(chromium, 0))
    if chromium.run("!document.querySelector('.more').hidden"):
        chromium.click("#more")
        assert len(column(chromium, 0)) > before


@pytest.mark.parametrize("kind", ["audit", "bounds alone"])
def test_the_script_says_of_what_is_over_its_limit_what_the_page_says_without_it(
    chromium: browser.Browser, tmp_path: Path, kind: str
) -> None:
    if kind == "audit":
        report = fakes.audit()
        changes: list[dict[str, Any]] = [{"fp32": 308_000.4}, {"fp32": 9.9e7}, {"fp32": 40.0}, {"amax": 65504.0}, {}]
        changes[3] |= {"saturated": 2, "headroom_bits": 0.0}
        changes[4] |= {"limit": None, "headroom_bits": None, "amax": 65536.0}
        for site, change in zip(report["regimes"]["half"]["sites"], changes, strict=False):
            site |= {"nonfinite": 1, "headroom_bits": -0.0007, "amax": 65536.0} | change
        wanted = ["4.7 × over", "1,511 × over", "passed on", "1.00 × (0.00 bits)", "–"]
    else:
        report = certified(found=False, top=900_000.0) | {"regimes": {}, "verdict": "unsafe"}
        report["certificate"]["sites"][0] |= {"headroom_bits": -10.5}
        report["certificate"]["sites"][1] |= {"headroom_bits": -math.inf}
        wanted = ["none", "1,449 × over", "14 × over"]
    write_page(tmp_path / "page.html", report)
    rows = table((tmp_path / "page.html").read_text(), 'id="site-table"')
    number = rows[0].index("headroom")
    assert [row[number] for row in rows[1:]][: len(wanted)] == wanted
    chromium.open(tmp_path / "page.html", width=1440)
    shown = column(chromium, number)
    assert shown[:60] == [row[number] for row in rows[1:61]]
    if kind == "audit":
        assert column(chromium, rows[0].index("max |x|"))[:5] == [row[2] for row in rows[1:6]]
        assert [row[2] for row in rows[1:6]] == ["308,000", "9.90×10⁷", "40", "65,504", "overflow"]
    assert chromium.problems() == []


def test_without_scripts_the_tightest_sites_are_still_there(
    chromium: browser.Browser, written: dict[str, Path]
) -> None:
    chromium.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        chromium.open(written["certified"], width=1440)
        assert len(column(chromium, 0)) == 60
        hidden = "getComputedStyle(document.querySelector('.controls')).display"
        assert chromium.run(hidden) == "none"
    finally:
        chromium.command("Emulation.setScriptExecutionDisabled", value=False)


def test_it_prints_on_white_paper_without_controls(chromium: browser.Browser, written: dict[str, Path]) -> None:
    chromium.open(written["finetuned"], width=1440, dark=True)
    pdf = chromium.printed()
    assert pdf.startswith(b"%PDF") and 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) < 30
    chromium.open(written["finetuned"], width=718, dark=True)  # A4 less its margins
    chromium.command("Emulation.setEmulatedMedia", media="print")
    assert chromium.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert chromium.run("[...document.querySelectorAll('.controls label')].every((e) => !e.offsetHeight)")
    assert chromium.run("document.getElementById('count').offsetHeight") > 0  # how many of how many are on the paper
    # Chromium repeats a table's head on every page only where it holds no boxes.
    assert chromium.run("getComputedStyle(document.querySelector('th button')).display") == "contents"
    assert chromium.run("document.querySelector('details:not([open]) table').checkVisibility()")
    assert chromium.run("document.querySelector('details:not([open])').offsetHeight") > 100
    assert chromium.run(SPILLED) == []


# --- rounding --------------------------------------------------------------------------------------------------------


def test_headroom_and_shares_are_rounded_down_bounds_up() -> None:
    assert [headroom(x) for x in (1.79999999, 0.2508, 0.3, 0.0, -1e-9, 38.96)] == [
        "3.4 × (1.7 bits)",
        "1.18 × (0.25 bits)",
        "1.23 × (0.30 bits)",
        "1.00 × (0.00 bits)",
        "none",
        "534,722,712,246 × (38.9 bits)",
    ]
    assert all(percent(i / 100) == f"{i}%" for i in range(101))
    assert percent(1 - 2**-53) == "99.9999%" and percent(0.99999871) == "99.9998%"
    assert bound_magnitude(65503.2) == "65,504" and bound_magnitude(11.3191) == "11.32" and times(1.0301) == "1.04"
    assert bound_magnitude(1.2341e9) == "1.24×10⁹" and bound_magnitude(0.00123456) == "1.24×10⁻³"
    assert significant_bits(10.997) == "10.99" and significant_bits(11 - 1e-9) == "11"
    assert excess(2.31) == "2.4" and excess(0.0, 2) == "0.00" and excess(1e-5, 2) == "0.01"
    assert tightness(8.0, 2.0) == 4 and tightness(8.0, 65536.0) is None and tightness(8.0, None) is None


def test_terminal_page_and_card_say_the_same_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = certified()
    report["certificate"] |= {"headroom_bits": 0.2999}
    for regime in report["regimes"].values():
        regime["headroom_bits"] = 1.7999999
    report["weights"]["lossless_fraction"] = 0.99999899
    print_conversion(report, tmp_path)
    terminal = " ".join(capsys.readouterr().out.split())
    for view in (
        terminal,
        Page(render(report)).text,
        card.card_text(read(Report, report), "T5ForConditionalGeneration", licensed=False),
    ):
        for right, wrong in (
            ("1.7 bits", "1.8 bits"),
            ("1.23 × ", "1.24 × "),
            ("99.9998%", "99.9999%"),
            ("9.49", "9.50"),
        ):
            assert right in view and wrong not in view


def test_after_a_finetune_the_terminal_tells_the_original_from_the_finetuned_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = certified()
    print_conversion(report, tmp_path)
    plain = capsys.readouterr().out
    assert "KL to fp32, source in bf16" in plain and "original" not in plain
    print_conversion(report | {"finetune": {"fidelity": {"kl_fp16": 2.5}}}, tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "KL to fp32, finetuned weights in bf16" in said and "source in bf16" not in said
    assert "KL to fp32 of the original, output in fp16 2.50e+00" in said


def test_the_script_gets_numbers_that_it_cannot_round_otherwise_than_the_page() -> None:
    report = fakes.conversion(blocks=3)
    first, second = report["regimes"]["half"]["sites"][:2]
    first |= {"headroom_bits": 1.9999999, "amax": 12_344.5}
    second["amax"] = 369.25
    html = render(report)
    data = Page(html).data
    rows = [row for row in data["rows"] if row[1] == data["strings"].index("half")]
    assert rows[0][2:4] == [12_344, 1.9999] and rows[1][2] == 369.2
    shown = table(html, 'id="site-table"')
    assert shown[1][2:4] == ["12,344", "3.9 × (1.9 bits)"] and shown[2][2] == "369.2"
