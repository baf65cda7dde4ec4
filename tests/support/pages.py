"""Reports with a certificate, an attack or a finetune, and pages taken apart, for the tests of what is made of them."""

import math
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

from bf16_to_fp16.report import page
from bf16_to_fp16.report.remedies import overflowing
from bf16_to_fp16.report.schema import Report, read
from bf16_to_fp16.results import AttackEntry, dump

from . import fakes

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;{{ 7*7 }}"
VOID = {"wbr", "meta", "link", "input", "br", "hr", "img", "path", "use"}
LOADING = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "formaction"}
GROWTH = {"SelfAttention:scores": 0.02, "SelfAttention.o": 0.2, "DenseReluDense:mul": 0.5, "DenseReluDense.wo": 0.7}
KINDS = {"SelfAttention:scores": "scores", "DenseReluDense:mul": "product"}


def render(report: dict[str, Any]) -> str:
    return page.render(read(Report, report))


def text_of(report: dict[str, Any]) -> str:
    return Page(render(report)).text


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
    def labels(self) -> list[str]:
        return [attrs.get("aria-label") or "" for tag, attrs in self.tags if tag == "svg"]


def requests(html: str) -> list[str]:
    loading = [attrs for tag, attrs in Page(html).tags if tag != "a"]  # a link is followed by nobody but the reader
    found = [v for attrs in loading for k, v in attrs.items() if k in LOADING and v and v[0] != "#"]
    found += [u for u in re.findall(r"url\(([^)]*)\)", html) if not u.strip("\"'").startswith("#")]
    return [address for address in found if address != "data:,"] + re.findall(r"@import[^;]*", html)


def table(html: str, name: str) -> list[list[str]]:
    """Return the text of the cells of a table by its id, or by a heading in it; the first row is the headings."""
    found = next(t for t in re.findall(r"<table.*?</table>", html, re.DOTALL) if name in t)
    return [
        [unescape(re.sub(r"<[^>]*>", "", c)) for c in re.findall(r"<t[hd][ >].*?</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr.*?</tr>", found, re.DOTALL)
    ]


def bound(name: str, kind: str, value: float, found: float | None = None, **changes: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "kind": kind, "bound": value, "partial": value, "limit": 65504.0}
    entry |= {"observed": found} | fakes.placed(name) | changes
    largest = max(entry["bound"], entry["partial"])
    return entry | {"headroom_bits": math.log2(entry["limit"] / largest), "holds": largest <= entry["limit"]}


def certificate(*, blocks: int = 3, top: float = 60_000.3, found: bool = True) -> dict[str, Any]:
    """Return the certificate of a model of ``fakes``, whose last residual is bounded by ``top``."""
    sites = []
    for stack in ("encoder", "decoder"):
        for i in range(blocks):
            level = top * 2.0 ** (i + 1 - blocks)
            for j, names in enumerate((tuple(GROWTH)[:2], tuple(GROWTH)[2:])):
                at = f"{stack}.block.{i}.layer.{j}"
                for name in names:
                    value = level * GROWTH[name]
                    kind = KINDS.get(name, "output")
                    sites.append(bound(f"{at}.{name}", kind, value, value / 3 if found else None))
                top_here = level if j else 0.9 * level
                sites.append(bound(f"{at}:add", "residual", top_here, top_here / 2 if found else None))
    sites.append(bound("lm_head", "logits", 123.4, 61.7 if found else None))
    totals = {"max_length": 32768, "splits": 8, "train_mode": False, "sites": sites}
    least = min(site["headroom_bits"] for site in sites)
    return {"holds": all(site["holds"] for site in sites), "headroom_bits": least} | totals


def certified(**options: Any) -> dict[str, Any]:
    made = certificate(**options)
    over = sorted((s for s in made["sites"] if not s["holds"]), key=lambda s: s["headroom_bits"])
    uncertified = [
        {"name": s["name"], "bound": s["bound"], "limit": s["limit"], "excess_bits": -s["headroom_bits"]}
        | {"reason": f"reason {i}", "remedy": f"remedy {i}"}
        for i, s in enumerate(over)
    ]
    report = fakes.conversion(blocks=options.get("blocks", 3)) | {"certificate": made}
    proof = "certified" if made["holds"] else "observed"
    return report | {"proof": proof, "uncertified": uncertified, "signals": []}


def attacked(*, broken: bool = False) -> dict[str, Any]:
    """Return the report of an audit with an attack: nothing breaks in what was run, ``broken`` under the attack."""
    report, made = fakes.conversion(blocks=3), certificate()
    sites = [
        {"name": s["name"], "worst": s["observed"], "random": s["observed"] / 2, "limit": s["limit"]}
        | {"headroom_bits": math.log2(s["limit"] / s["observed"]), "ids": None}
        | dict.fromkeys(("tokens", "embeddings", "half"), s["observed"])
        for s in made["sites"]
    ]
    if broken:
        sites[0] |= {"worst": math.inf, "headroom_bits": -math.inf}
    least = min(site["headroom_bits"] for site in sites)
    attack = {"steps": 20, "seed": 0, "worst_headroom_bits": least, "sites": sites}
    for key in ("plan", "weights", "fidelity", "signals", "unsafe", "output", "command"):
        del report[key]
    unsafe = overflowing(read(AttackEntry, attack)) if broken else []
    report |= {"unsafe": [dump(entry) for entry in unsafe], "verdict": "unsafe" if broken else "safe"}
    return report | {"certificate": made, "attack": attack}


def finetuned(**changes: Any) -> dict[str, Any]:
    """Return the report of a finetune of 200 steps: headroom comes, the loss scale falls, two steps are skipped."""
    recipe: dict[str, Any] = {"source": "summariser-large", "precision": "fp16"}
    recipe |= {"schedule": {"steps": 200, "learning_rate": 4e-3}}
    recipe |= {"penalty": {"form": "smooth-max", "headroom_bits": 1.5}}
    last: dict[str, Any] = {"step": 200, "held_out_loss": 2.0078, "held_out_divergence": 0.0174, "score": 31.25}
    last |= {"worst_site": "decoder.block.1.layer.2.DenseReluDense.wi_0", "worst_headroom_bits": 1.6987}
    fidelity = {"measure": "kl", "kl_bf16": 1e-3, "kl_fp16": 5e-2, "top1_fp16": 0.95, "positions": 815}
    run: dict[str, Any] = {"recipe": recipe, "data": {"path": "texts.jsonl", "objective": "span-corruption"}}
    run |= {"processes": 2, "steps": 200, "tokens": 376_000}
    run |= {"skipped": [{"step": 101, "loss_scale": 32.0, "examples": []}, {"step": 102, "loss_scale": 16.0}]}
    run |= {"evaluations": [{"step": 0, "held_out_loss": 2.0136, "held_out_divergence": 7.8e-5}, last]}
    run |= {"fidelity": fidelity | {"max_logit_error_bf16": 0.5, "max_logit_error_fp16": 4.0}}
    return certified(top=900_000.0) | {"finetune": run | changes}


def hostile(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with a hostile name wherever a name from outside can stand."""
    source = report["source"]
    source |= {"path": HOSTILE, "revision": HOSTILE, "dtype": HOSTILE, "made": [HOSTILE], "carried_over": [HOSTILE]}
    source |= {"sha256": {HOSTILE: HOSTILE}, "dropped": {HOSTILE: HOSTILE}, "left_out": [HOSTILE]}
    source["config_changes"] = {HOSTILE: {"before": HOSTILE, "after": HOSTILE}}
    report |= {"family": HOSTILE, "command": HOSTILE, "verdict": "unsafe", "next": f"{HOSTILE}: {HOSTILE}"}
    report["unsafe"] = [{"signal": HOSTILE, "excess_bits": 1.0, "remedy": HOSTILE}]
    report["plan"]["exponents"] = {HOSTILE: [1, 2], f"{HOSTILE}.value": 3}
    report["environment"] = {"versions": {HOSTILE: HOSTILE}, HOSTILE: HOSTILE}
    report["signals"].append({"module": HOSTILE, "side": HOSTILE, "kind": HOSTILE, "before": 1e9, "after": 1.0})
    broken = {"nonfinite": 1, "benign": HOSTILE, "dtype": HOSTILE, "headroom_bits": -1e-3}
    for name, entry in report["regimes"].items():
        report["regimes"][name] = fakes.regime([fakes.site(HOSTILE, 65536.0, **broken), *entry["sites"]])
    report["regimes"][HOSTILE] = report["regimes"].pop("amp")
    if "certificate" in report:
        report["certificate"]["sites"][0] |= {"name": HOSTILE, "kind": HOSTILE, "role": HOSTILE}
        report["uncertified"][0] |= {"name": HOSTILE, "reason": HOSTILE, "remedy": HOSTILE}
    return report
