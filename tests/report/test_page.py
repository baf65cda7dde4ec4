"""The page says what the report says, whatever the report lacks and whatever names it has, and loads nothing."""

import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import fakes, pages, tiny
from support.contract import layout_of
from support.pages import Page, certified, finetuned, hostile, render, table, text_of

from bf16_to_fp16 import wording
from bf16_to_fp16.families.places import STACKS, places, stack_in
from bf16_to_fp16.families.signals import Kind
from bf16_to_fp16.families.wiring import Attention, Sublayer
from bf16_to_fp16.json_text import finite
from bf16_to_fp16.report import facts, page, terminal
from bf16_to_fp16.report import figures as pictures
from bf16_to_fp16.report import markdown as texts
from bf16_to_fp16.report.markdown import MOST_UNCERTIFIED
from bf16_to_fp16.report.page import MOST_ROWS
from bf16_to_fp16.report.schema import Report, SignalEntry, read
from bf16_to_fp16.results import BoundEntry, CertificateEntry

DRAWN = pytest.mark.usefixtures("pictures")
"""With pictures and rows of sites, which take most of a page's time."""


def bounds(sites: list[dict[str, Any]], stack: str) -> list[pictures.Point]:
    return pictures.bound_points([read(BoundEntry, site) for site in sites], stack)


@DRAWN
def test_a_whole_report_gives_every_section_with_its_exponents_counted_by_kind() -> None:
    page = Page(render(fakes.conversion()))
    assert page.open == []
    assert page.sections == ["results", "picture", "changes", "sites", "provenance"]
    assert "Safe in fp16: nothing overflowed on what was run; " in page.text
    assert len(page.labels) == 2
    assert "channels: 36 of 1,536 moved, by exponents −4 to +1" in page.text
    assert "whole signals: 1 by 2⁻²" in page.text


@DRAWN
def test_the_page_loads_nothing_and_forbids_loading() -> None:
    html = render(fakes.conversion(safe=False))
    assert pages.requests(html) == []
    assert pages.requests(html.replace("data:,", "https://example.org/icon.png")) == ["https://example.org/icon.png"]
    policy = next(a["content"] for _, a in Page(html).tags if a.get("http-equiv") == "Content-Security-Policy")
    parts = {part.split()[0]: part.split()[1:] for part in str(policy).split(";")}
    assert parts.pop("default-src") == parts.pop("base-uri") == parts.pop("form-action") == ["'none'"]
    assert parts == {"style-src": ["'unsafe-inline'"], "script-src": ["'unsafe-inline'"], "img-src": ["data:"]}
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", html))
    source = "https://huggingface.co/someone/summariser-large"  # a link
    assert addresses == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", source}


@DRAWN
def test_hostile_names_and_markdown_in_names_stay_text() -> None:
    for report in (fakes.conversion(), certified(top=1e6)):
        html = render(hostile(report))
        page = Page(html)
        assert page.open == [] and pages.requests(html) == []
        assert sum(tag == "script" for tag, _ in page.tags) == 1 and not any(tag == "img" for tag, _ in page.tags)
        assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
        assert "alert(" not in page.scripts[0] and pages.HOSTILE in "".join(page.words)
    report = fakes.conversion()
    report["source"]["config_changes"] = {"*a* `b` <i>c</i> [d](https://e.org)": {"before": 1, "after": 2}}
    page = Page(render(report))
    assert "*a* `b` <i>c</i> [d](https://e.org)" in page.text
    assert not any(attrs.get("href") == "https://e.org" for _, attrs in page.tags)


def test_the_provenance_says_where_from_by_what_and_where_it_ran() -> None:
    report = fakes.conversion()
    report["environment"] = {"versions": {"torch": "9.9", "numpy": None}, "devices": {"audit": ["cuda:0", "cpu"]}}
    text = Page(render(report)).text.rpartition("Provenance")[2]
    source, command = report["source"], report["command"]
    assert all(said in text for said in (source["path"], source["revision"], command, "9.9", "not installed"))
    assert "device of the audit" in text and "cuda:0, then cpu" in text


def test_an_unsafe_report_names_site_regime_and_remedy_and_one_with_a_thin_margin_is_not_called_unsafe() -> None:
    report = fakes.conversion(safe=False)
    page = Page(render(report))
    sentence = f"Unsafe in fp16: overflows in half, first at {fakes.BROKEN}; up to 1,200 values are inf or NaN and 34"
    # Joined without spaces: names may wrap behind their dots.
    assert facts.verdict_sentence(read(Report, report)) == f"{sentence} values saturate." in "".join(page.words)
    assert "What is unsafe" in page.text
    assert page.text.count(fakes.COMMAND) == 1 and f"<code>{fakes.COMMAND}</code>" in render(report)
    assert "No exponent brings these under their limit" in page.text


@DRAWN
def test_an_audit_has_a_page_without_plan_weights_and_fidelity() -> None:
    page = Page(render(fakes.audit()))
    assert page.sections == ["results", "sites", "provenance"]
    assert "bf16-to-fp16 convert SOURCE OUT" in page.text


@DRAWN
@pytest.mark.parametrize("missing", ["signals", "fidelity", "weights", "plan", "environment source output", "regimes"])
def test_a_missing_part_leaves_the_rest(missing: str) -> None:
    page = Page(render({key: value for key, value in fakes.conversion().items() if key not in missing.split()}))
    assert page.open == []
    assert "provenance" in page.sections and "Safe in fp16" in page.text


def test_drift_and_corrections_are_shown_where_there_are_some() -> None:
    report = fakes.conversion()
    drift: dict[str, float | None] = {"relative_error": 1e-4, "predicted_kl": 2e-7, "predicted_max_logit_error": 3e-3}
    drift |= {"measured_kl": 2.5e-7, "measured_max_logit_error": None}
    report["plan"] |= {"drift": drift, "eps": None, "gain_correction": {"a.weight": 1.01}, "untied_head": True}
    text = text_of(report)
    assert "predicted 2.00×10⁻⁷, measured 2.50×10⁻⁷" in text
    assert "separated from the embedding" in text and "changes in fp32 is measured below" in text


@DRAWN
def test_infinite_numbers_look_the_same_in_memory_and_from_json() -> None:
    report = certified(top=1e6) | {"signals": fakes.conversion()["signals"]}
    report["signals"][0] |= {"before": math.inf, "after": math.nan}
    report["regimes"]["amp"]["sites"][0] |= {"amax": math.inf, "headroom_bits": -math.inf}
    report["fidelity"] |= {"kl_fp16": math.inf, "max_logit_error_fp16": math.inf}
    report["certificate"]["sites"][0] |= {"bound": math.inf, "partial": math.inf, "headroom_bits": -math.inf}
    report["uncertified"][0] |= {"bound": math.inf, "excess_bits": math.inf}
    stored: Any = finite(report)
    assert stored["signals"][0]["before"] == sys.float_info.max
    text = text_of(stored)
    assert text_of(report) == text and "broken" in text and "∞" in text


@DRAWN
def test_a_page_of_eighteen_thousand_sites_is_cut_to_two_megabytes(tmp_path: Path) -> None:
    report = fakes.conversion(blocks=24)
    for name in report["regimes"]:
        at = "decoder.block.{}.layer.{}.EncDecAttention.relative_attention_bias:{} {}"
        found = [fakes.site(at.format(i % 24, i % 3, name, i), 1.0 + i) for i in range(6000)]
        report["regimes"][name] = fakes.regime(found[::-1])
    page.write_page(tmp_path / "page.html", read(Report, report))
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    html = (tmp_path / "page.html").read_text()
    assert len(table(html, 'id="site-table"')) == 1 + MOST_ROWS
    assert f"{18_000 - MOST_ROWS:,} sites with more headroom" in Page(html).text


@DRAWN
def test_every_site_is_in_the_table_in_the_regime_where_it_has_least_headroom() -> None:
    report = fakes.conversion()
    report["regimes"]["amp"]["sites"][5] |= {"amax": 6e4, "headroom_bits": 0.1}
    least = report["regimes"]["amp"]["sites"][5]["name"]
    _, *rows = table(render(report), 'id="site-table"')
    assert {row[0] for row in rows} == {s["name"] for r in report["regimes"].values() for s in r["sites"]}
    assert len(rows) == 2 * 9 * 16 + 1 and rows[0][:3] == [least, "amp", "60,000"]


@DRAWN
def test_a_picture_shows_the_largest_of_each_block_and_kind() -> None:
    report = certified()
    found = bounds(report["certificate"]["sites"], "encoder")
    assert len(found) == 3 * 5
    stream = {p.x: p for p in found if p.series.css == "stream"}
    assert (stream[2].lower, stream[2].upper) == (60_000.3 / 2, 60_000.3)
    assert {p.series.css for p in found} == {"stream", "attention", "added", "product", "scores"}
    (logits,) = [p for p in bounds(report["certificate"]["sites"], "decoder") if p.x == 3]
    assert (logits.lower, logits.upper) == (61.7, 123.4)
    first, second = Page(render(report)).labels
    assert first == "encoder, largest values: bound 60,001, found 30,000; the limit is 65,504"
    assert second.startswith("decoder, largest values: bound ")
    # Of a family with one stack.
    sites = [
        pages.bound("model.layers.1:add", "residual", 8.0, 4.0),
        pages.bound("model.layers.1:add#2", "residual", 7.0, 3.0),
        pages.bound("model.layers.1.self_attn.o_proj", "output", 5.0, 4.0),
        pages.bound("lm_head", "logits", 9.0, 4.0),
    ]
    drawn = {p.series.css: (p.x, p.lower, p.upper) for stack in STACKS for p in bounds(sites, stack)}
    assert drawn == {"stream": (1, 4.0, 8.0), "attention": (1, 4.0, 5.0), "scores": (2, 4.0, 9.0)}


@DRAWN
def test_bound_and_worst_found_stand_on_a_log2_axis_and_an_overflow_at_its_end() -> None:
    def heights(found: float, top: float) -> list[float]:
        sites = [pages.bound(f"encoder.block.{i}.layer.0:add", "residual", top, found) for i in range(2)]
        svg = str(pictures.bound_and_observed(read(CertificateEntry, pages.certificate() | {"sites": sites}))[0].svg)
        lines = re.findall(r'd="M [\d.]+ ([\d.]+) \nL [\d.]+ \1 \n" clip-path="[^"]*" style="[^"]*--stream', svg)
        assert len(lines) == 2
        return [float(y) for y in lines]

    bound, low = heights(16.0, 4096.0)
    same, middle = heights(1024.0, 4096.0)
    assert same == bound < middle < low
    assert (low - bound) / (middle - bound) == pytest.approx(8 / 2, rel=1e-3)
    bound, found = heights(65536.0, 1e6)
    assert found < bound


@DRAWN
def test_the_site_table_has_the_bound_of_every_site_that_has_one() -> None:
    report = certified()
    for site in report["regimes"]["half"]["sites"]:
        site |= {"headroom_bits": 0.01}
    in_fp32 = report["regimes"]["half"]["sites"][3]
    for regime in report["regimes"].values():
        regime["sites"][3] |= {"limit": None, "headroom_bits": None}
    bounds = {s["name"]: s for s in report["certificate"]["sites"]}
    headings, *rows = table(render(report), 'id="site-table"')
    assert headings == ["site", "regime", "max |x|", "headroom", "bound", *headings[5:]]
    assert headings[5:] == ["non-finite", "saturated", "dtype", "by design"]
    for row in rows:
        site = bounds.get(row[0])
        if site is None or row[0] == in_fp32["name"]:  # an fp32 value needs no bound
            assert row[4] == "–"
        else:
            assert row[1] == "half" and row[4] == wording.magnitude(site["bound"])
    assert sum(row[4] != "–" for row in rows) > 20


def test_what_is_not_certified_is_listed_with_reason_and_remedy() -> None:
    report = certified(top=900_000.0)
    html = render(report)
    shown = table(html, "bits over")
    assert shown[0] == ["site", "bound", "limit", "bits over", "reason"] and len(shown) == 1 + MOST_UNCERTIFIED
    for row, site in zip(shown[1:], report["uncertified"], strict=False):
        assert row == [site["name"], wording.bound_magnitude(site["bound"]), "65,504", row[3], site["reason"]]
        assert site["excess_bits"] <= float(row[3]) < site["excess_bits"] + 0.1001
    words, number = Page(html).text, len(report["uncertified"])
    assert f"The other {number - MOST_UNCERTIFIED} are in" in words
    assert all(words.count(f"{site['remedy']}.") == 1 for site in report["uncertified"])
    assert f"{number} of 37 bounds are over their limit" in words and "No input can make any operation" not in words
    # Where the whole has a next step, that is it.
    assert "What helps" not in text_of(report | {"next": "go on: c"})
    assert "over their limit" not in text_of(certified())


@pytest.mark.parametrize("kind", ["gemma3", "switch", "longt5", "bigbird_pegasus"])
def test_a_pictures_lines_are_of_the_stream_of_outputs_and_of_scores_by_block(kind: str) -> None:
    """Not of other norms' inputs, nor of what a norm gives; experts stand side by side, and the largest is drawn."""
    layout = layout_of(tiny.build(kind))
    place = places(layout)
    seen: list[dict[str, Any]] = [
        {"module": p.module, "side": p.side, "kind": str(signal.kind), "before": 2.0 + n, "after": 1.0}
        | place(p.module).to_json()
        for signal in layout.signals.values()
        if signal.kind is not Kind.LOGITS
        for n, p in enumerate(signal.seen)
    ]
    attentions = [w.at for w in layout.topology if isinstance(w, Attention)]
    scores = {"side": "output", "kind": "scores", "before": 2.0, "after": 1.0}
    seen += [{"module": at, **scores, **place(at).to_json()} for at in attentions]
    for stack in layout.stacks():
        name = STACKS[-1] if len(layout.stacks()) == 1 else stack.ends.at.rpartition(".")[2]
        sublayers = [w for w in layout.topology if isinstance(w, Sublayer) and stack_in(w.at, layout.family) == name]
        found = pictures.signal_points([read(SignalEntry, each) for each in seen], name)
        drawn = {line: [p for p in found if p.series is line] for line in pictures.SERIES}
        blocks = len({place(w.at).block for w in sublayers} - {None})
        assert [len(points) for points in drawn.values()] == [blocks + 1, *[blocks] * 4]
        outputs = {w.output for w in sublayers if isinstance(w, Attention)}
        own = {s["before"] for s in seen if s["module"] in outputs and s["side"] == "output"}
        assert {p.upper for p in drawn[pictures.ATTENTION]} <= own
        for line in (pictures.ATTENTION, pictures.FEED_FORWARD):
            assert {p.x for p in drawn[line]} <= {p.x for p in drawn[pictures.STREAM]}
        if kind == "switch":
            experts = [s["before"] for s in seen if f"{name}.block.0" in s["module"] and ".wo" in s["module"]]
            assert max((p.upper for p in drawn[pictures.FEED_FORWARD] if p.x < 1), default=0) in experts


def test_what_the_proof_covers_follows_its_arithmetic() -> None:
    def parts(report: dict[str, Any]) -> list[str]:
        said = text_of(report).partition("The bounds cover")[2].partition("Bound and observed")[0]
        return said.split("They say nothing")

    report = certified()
    report["certificate"]["headroom_bits"] = 0.2999
    text = text_of(report)
    assert "What is proven No input can make any operation overflow" in text
    assert "(0.29 bits) (proven; a proof needs no margin)" in text
    assert "What is proven" not in text_of(fakes.conversion())
    covers, leaves = parts(report)
    assert "up to 32,768 positions" in covers and "up to 8 partial sums" in covers
    assert "dropout (--target train)" not in covers and "with dropout ( --target train )" in leaves
    assert "--target norm-safe" in leaves and "the backward pass" in leaves
    report["certificate"] |= {"train_mode": True, "max_length": 512, "splits": 1}
    report["certificate"]["sites"].append(pages.bound("encoder.x (sum of squares)", "squares", 100.0))
    covers, leaves = parts(report)
    assert "up to 512 positions" in covers and "up to 1 partial sum " in covers
    assert "dropout at the config's rates" in covers and "square the residual stream" in covers
    assert leaves.count("--target") == 1


@DRAWN
def test_an_attack_has_its_figure_and_what_it_found() -> None:
    report = pages.attacked()
    page = Page(render(report))
    assert page.sections == ["results", "certificate", "sites", "provenance"]
    kept = wording.below_limit(report["attack"]["worst_headroom_bits"])
    assert f"The worst input that 20 gradient steps found is {kept}." in page.text
    assert "; solid: the worst found;" in page.text
    assert "other inputs may reach further" not in page.text
    report = pages.attacked(broken=True)
    name, found = report["attack"]["sites"][0]["name"], "100 on an input that 20 gradient steps of search found"
    assert facts.verdict_sentence(read(Report, report)) == f"Unsafe in fp16: overflows {name}: {found}."


@DRAWN
def test_a_value_over_its_limit_is_so_in_the_table_of_sites() -> None:
    report = fakes.audit()
    broken, passed, unlimited = report["regimes"]["half"]["sites"][:3]
    broken |= {"fp32": 308_000.0}
    unlimited |= {"limit": None, "headroom_bits": None, "nonfinite": 1, "amax": 65536.0}
    passed |= {"fp32": 500.0, "nonfinite": 3, "headroom_bits": -0.1, "benign": "the mask's minimum"}
    rows = {row[0]: row[1:] for row in table(render(report), 'id="site-table"')[1:4]}
    # What is broken beside what is so by design is not called by design.
    assert rows[passed["name"]][-1] == ""
    assert rows[broken["name"]][1:3] == ["308,000", "4.7 × over"] and rows[passed["name"]][1:3] == ["500", "passed on"]
    assert rows[unlimited["name"]][1:3] == ["overflow", "no limit"]  # in fp32, without a magnitude


def test_a_site_is_counted_once() -> None:
    report, name = fakes.conversion(), "decoder.block.1.layer.2.DenseReluDense.wi_0"
    gate = {"module": name, "side": "output", "kind": "fixed", "before": 4e5, "after": 4e5} | fakes.placed(name)
    head = {"module": "lm_head", "side": "output", "before": 3.5e5, "after": 3.5e5}
    report["signals"] += [gate, head | {"kind": "fixed"}, head | {"kind": "logits"}]
    over, of = sum(signal["before"] > 65504 for signal in report["signals"]) - 1, len(report["signals"]) - 1
    said = f"overflows fp16 at {over} of {of} sites that the plan watches, "
    assert said in terminal.source_line(read(Report, report)).plain


@DRAWN
def test_a_conversion_that_ran_nothing_shows_its_bounds() -> None:
    report = certified(found=False) | {"regimes": {}, "fidelity": None, "signals": []}
    html = render(report)
    page = Page(html)
    assert page.open == [] and page.sections == ["results", "certificate", "changes", "sites", "provenance"]
    proven = "Safe in fp16: proven for every input of up to 32,768 positions; nothing was audited."
    assert facts.verdict_sentence(read(Report, report)) == proven
    shown = table(html, 'id="site-table"')
    assert shown[0] == ["site", "headroom", "bound"] and len(shown) == 1 + len(report["certificate"]["sites"])
    assert shown[1] == ["encoder.block.2.layer.1:add", "1.09 × (0.12 bits)", "60,000"]
    assert "worst found" not in page.text and "Nothing was run" in page.text
    assert "Nothing was run" not in Page(render(certified())).text
    unsafe = certified(found=False, top=1e6) | {"regimes": {}, "verdict": "unsafe"}
    said = f"Unsafe in fp16: bounds exceed the limit at {len(unsafe['uncertified'])} sites."
    assert facts.verdict_sentence(read(Report, unsafe)) == said


def test_a_finetune_says_what_became_of_the_original() -> None:
    report = finetuned()
    page = Page(render(report))
    assert page.open == [] and "stay there" not in page.text
    assert "against the original in fp32" in page.text and "against the finetuned model in fp32" in page.text
    unmoved = text_of(report | {"finetune": report["finetune"] | {"kept": 0}})
    assert "kept step 0, so it changed no weight of its rescaled start: " in unmoved
    report["finetune"]["recipe"]["penalty"]["certify"] = True
    assert "to come under fp16's limit and stay there" in text_of(report)
    bare = {"steps": 3, "evaluations": []}
    assert Page(render(report | {"finetune": bare})).open == []


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


def test_a_finetune_says_whose_config_the_rescaling_changed() -> None:
    def changes(report: dict[str, Any]) -> str:
        return texts.changes_text(read(Report, report)).replace("\\", "")

    (key,) = fakes.conversion()["source"]["config_changes"]
    assert f"- config.json: {key}: " in changes(fakes.conversion())
    gemma = fakes.conversion() | {"family": "gemma3"}
    gemma["source"]["config_changes"] |= {"rope_theta": {"after": 1e6}, "pad_token_id": {"after": 0}}
    assert "- config.json: rope_theta: absent → 1000000.0, for transformers 4\n" in changes(gemma)
    assert "- config.json: pad_token_id: absent → 0\n" in changes(gemma)
    assert f"- config.json of the finetuned weights: {key}: " in changes(finetuned())


@pytest.mark.parametrize(
    ("write", "values", "said"),
    [
        (wording.about, (1.0, 2.34, 9.96), "about 1 ×; about 2.3 ×; about 10 ×"),
        (wording.about, (1584, 1e300, math.inf), "about 1,600 ×; over 1,000,000 ×; over 1,000,000 ×"),
        (wording.bits, (0.2087, 0.999, 1.0, 2.96, -0.5006), "0.20; 0.99; 1.0; 2.9; -0.6"),
        (wording.percent, (1.0, 0.99999999, 0.5, 1 - 2**-53, 0.99999871), "100%; 99.9999%; 50%; 99.9999%; 99.9998%"),
        (wording.percent, [i / 100 for i in range(101)], "; ".join(f"{i}%" for i in range(101))),
        (wording.headroom, (1.79999999, 0.2508, 0.3), "3.4 × (1.7 bits); 1.18 × (0.25 bits); 1.23 × (0.30 bits)"),
        (wording.headroom, (0.999, 1.0, 0.0), "1.99 × (0.99 bits); 2.0 × (1.0 bits); 1.00 × (0.00 bits)"),
        (wording.headroom, (math.log2(1.0601), 38.96), "1.06 × (0.08 bits); 534,722,712,246 × (38.9 bits)"),
        (wording.headroom, (math.log2(65504 / 65536), -1e-9), "none; none"),
        (wording.headroom, (None, math.inf, -math.inf), "no limit; all; none"),
        (wording.magnitude, (math.inf, sys.float_info.max), "∞; ∞"),
        (wording.bound_magnitude, (65503.2, 11.3191, 1.2341e9, 0.00123456), "65,504; 11.32; 1.24×10⁹; 1.24×10⁻³"),
        (wording.excess, (2.31, 0.0), "2.4; 0.0"),
        (partial(wording.excess, decimals=2), (0.0, 1e-5), "0.00; 0.01"),
    ],
)
def test_headroom_and_shares_are_rounded_down_bounds_and_costs_up(write: Any, values: Any, said: str) -> None:
    assert [str(write(value)) for value in values] == said.split("; ")


@DRAWN
def test_the_script_sorts_by_numbers() -> None:
    report = fakes.conversion(blocks=3)
    first = report["regimes"]["half"]["sites"][0]
    first |= {"headroom_bits": 0.25, "amax": 55_082.0}
    for regime in report["regimes"].values():
        regime["sites"][1] |= {"headroom_bits": None, "limit": None, "amax": math.inf}
    keys = re.findall(r'data-v="([^"]*)"', render(report))
    assert keys[:2] == ["55082", "0.25"] and "1e+308" in keys and "" in keys
