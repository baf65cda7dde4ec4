"""What ``bf16-to-fp16 advise`` prints: tables of updates that vanish, initialisations, numbers and loss curves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..families.known import FAMILIES
from ..losses.events import Curve, Event
from ..losses.report import event_in_words, sparkline, steps_in_words
from ..report.screen import console
from ..wording import counted, rounded_up
from .configs import FAR


def table(*columns: str, title: str | None = None) -> Table:
    """Return a table whose columns after the first are numbers."""
    rows = Table(*columns, title=title, title_justify="left")
    for column in rows.columns[1:]:
        column.justify = "right"
    return rows


def share(fraction: float) -> str:
    """Return a share in percent with one decimal; 0 and 100 only where it is exactly that."""
    if 0 < fraction < 0.001:
        return "under 0.1%"
    if 0.999 < fraction < 1:
        return "over 99.9%"
    return f"{100 * fraction:.1f}%"


# ---- updates --------------------------------------------------------------------------------------------------------


def print_updates(result: Mapping[str, Any]) -> None:
    """Print what would not move, layer by layer and in all, and what to do about it."""
    screen = console()
    screen.print(what_was_asked(result), markup=False)
    wanted = f"{result['share']:.0%} move from lr"
    rows = table("layer", "weights", "no update", "would not move", wanted)
    for row in (*result["layers"], result["total"]):
        rate = row["rate_for_share"]
        if row is result["total"]:
            rows.add_section()
        rows.add_row(
            row["name"],
            f"{row['elements']:,}",
            share(row["no_update"] / max(1, row["elements"])),
            share(row["stalled_fraction"]),
            "-" if rate is None else f"{rounded_up(rate, 3):.3g}",
        )
    screen.print(rows)
    if overflow := result["total"]["overflow"]:
        screen.print(f"{counted(overflow, 'weight')} not finite in {result['dtype']}, counted as without update")
    if not result["advice"]:
        moving = share(1 - result["total"]["stalled_fraction"])
        screen.print(f"{moving} of the weights move, at least the {result['share']:.0%} asked for: nothing to do")
        return
    screen.print("What helps, best first:")
    for number, item in enumerate(result["advice"], 1):
        screen.print(f"{number}. {item['why']}", markup=False)


def what_was_asked(result: Mapping[str, Any]) -> str:
    """Return in a sentence whose updates were looked at."""
    rate, dtype = result["learning_rate"], result["dtype"]
    if result["gradients"] is not None:
        given = result["gradients"]
        where = f"step {given['steps']} with gradients on {given['data']}"
        source = f"{result['optimizer']} at learning rate {rate:g}, {where}"
    elif result["relative_update"] is not None:
        source = (
            f"updates of {result['relative_update']:g} of each tensor's root mean square, at learning rate {rate:g}"
        )
    else:
        size = " times each tensor's root mean square" if result["optimizer"] == "adafactor" else ""
        source = f"{result['optimizer']} at learning rate {rate:g}, every update of that size{size}"
    return f"{dtype} weights rounded to nearest, {source}"


# ---- initialisation -------------------------------------------------------------------------------------------------


def print_init(result: Mapping[str, Any]) -> None:
    """Print the rules for a hidden size and, layer by layer, how far a checkpoint is from its own."""
    screen = console()
    rules = result["rules"]
    hidden = rules["hidden_size"]
    known = table("rule", f"standard deviation at h = {hidden:,}")
    known.add_row("Transformers without Tears, √(2/(5h))", f"{rules['small']:.3g}")
    known.add_row("MT-NLG 530B, √(1/(3h))", f"{rules['megatron']:.3g}")
    by_rule: dict[str, list[str]] = {}
    for family in FAMILIES:
        own = rules[family.name]
        rule = f"{own:g}" if not isinstance(own, Mapping) else ", ".join(f"{name} {x:.3g}" for name, x in own.items())
        by_rule.setdefault(rule, []).append(family.title)
    for rule, (title, *others) in by_rule.items():
        size = " (heads of 64, 4h neurons)" if "," in rule else ""
        more = f" and {counted(len(others), 'other')}" if others else ""
        known.add_row(f"{title}{more}{size}", rule)
    screen.print(known)
    if result["source"] is None:
        return
    screen.print(config_in_words(result["config"]), markup=False)
    if not result["tensors"]:
        return
    layers: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["tensors"]:
        if row["own_rule"] is not None:
            layers.setdefault(row["name"].removesuffix(".weight").rpartition(".")[0] or "ends", []).append(row)
    rows = Table(
        "layer",
        f"root mean square (times {result['family']}'s own rule; far ones marked !)",
        title=result["source"],
        title_justify="left",
    )
    for layer, tensors in layers.items():
        cells = []
        for row in tensors:
            module = row["name"].removesuffix(".weight").rpartition(".")[2]
            mark = "!" if row["far"] else ""
            cells.append(f"{module} {row['rms']:.3g} ({ratio_text(row['times'])}×{mark})")
        rows.add_row(layer, ", ".join(cells))
    screen.print(rows)
    far = [row for row in result["tensors"] if row["far"]]
    if not far:
        screen.print(f"all within {FAR:g} times the rule of the family")
    if broken := [row for row in far if row["nonfinite"]]:
        most = max(broken, key=lambda row: row["nonfinite"])
        holds = f"{counted(len(broken), 'tensor')} with inf or NaN, most {most['name']}"
        screen.print(f"{holds}: {counted(most['nonfinite'], 'weight')}", markup=False)
    for word, sign in (("larger", 1), ("smaller", -1)):
        times = {r["name"]: max(r["times"], 1e-300) ** sign for r in far if r["times"] is not None}
        times = {name: value for name, value in times.items() if value > FAR}
        if times:
            worst = max(times, key=times.__getitem__)
            what = f"{counted(len(times), 'tensor')} over {FAR:g} times {word} than drawn"
            screen.print(f"{what}, most {worst}: {times[worst]:.3g} times", markup=False)
    if any((row["times"] or 0) > FAR for row in far):
        screen.print("Large weights that write the residual stream make it large: bf16-to-fp16 certify says how large.")


def config_in_words(config: Mapping[str, Any]) -> str:
    """Return what a config's way of drawing weights is beside the rule for its width."""
    whose = "" if config["stated"] else " (its class's default)"
    goes = config["fits"] is None
    drawn = f" draws with {config['deviation']:.3g}, which" if goes else ""
    fits = "as at every width" if goes else f"and fits h = {config['fits']:,}"
    times, other = (ratio_text(config[key]) for key in ("times_megatron", "times_small"))
    text = (
        f"{config['key']} {config['value']:g}{whose}{drawn} is {times} times MT-NLG's rule at"
        f" h = {config['hidden_size']:,} ({other} times the other), {fits}"
    )
    if not config["far"]:
        return text
    return f"{text}: over {FAR:g} times off; for new weights set {config['key']} to {config['wanted']:.3g}"


def ratio_text(value: float) -> str:
    """Return a ratio with two digits, and without a power of ten where it is large."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}"


# ---- formats --------------------------------------------------------------------------------------------------------


def print_format(result: Mapping[str, Any]) -> None:
    """Print what the formats make of numbers."""
    screen = console()
    for entry in result["numbers"]:
        print_number(screen, entry)


def print_number(screen: Console, entry: Mapping[str, Any]) -> None:
    """Print a number in both formats."""
    formats = entry["formats"]
    value = exact(entry["value"])
    shown = table(value if entry["number"] == value else f"{entry['number']} = {value}", *formats)

    def row(what: str, key: str) -> None:
        shown.add_row(what, *(exact(f[key]) if f.get(key) is not None else "-" for f in formats.values()))

    row("value", "value")
    shown.add_row("relative error", *(error(f) for f in formats.values()))
    row("gap to the next value", "gap")
    row("half a gap", "half_gap")
    row("next below", "below")
    row("next above", "above")
    row("changes when this is added, or more", "adding_from")
    row("changes when this is taken, or more", "subtracting_from")
    screen.print(shown)
    for name, f in formats.items():
        if f["overflow"]:
            screen.print(f"{name}: overflows to {f['value']}")
        elif f["value"] == 0 != entry["value"]:
            screen.print(f"{name}: rounds to 0")
        elif f.get("subnormal"):
            screen.print(f"{name}: subnormal, with fewer significant bits the smaller it is")
    if entry["to_nan"]:
        print_chain(screen, entry)


def print_chain(screen: Console, entry: Mapping[str, Any]) -> None:
    """Print what becomes of a number past fp16's range in a layer."""
    rows = table(f"from inf to NaN, with x = {exact(abs(entry['value']))}", "in fp16", "in bf16", "true value")
    for row in entry["to_nan"]:
        shown = ("NaN" if math.isnan(row[key]) else f"{row[key]:.5g}" for key in ("fp16", "bf16", "true"))
        rows.add_row(row["operation"], *shown)
    screen.print(rows)
    screen.print(
        "inf - inf, 0 * inf and inf / inf are NaN; a token that is NaN makes those that attend to it NaN, then the"
        " loss, and a step of the optimizer the weights."
    )


def exact(value: float) -> str:
    """Return a number with up to ten digits."""
    return f"{value:.10g}"


def error(number: Mapping[str, Any]) -> str:
    """Return how far a value is from the exact one."""
    if number["exact"]:
        return "exact"
    return "-" if number["relative_error"] is None else f"{number['relative_error']:.2g}"


# ---- loss curves ----------------------------------------------------------------------------------------------------


def print_losses(result: Mapping[str, Any], curve: Curve, curve_events: Sequence[Event]) -> None:
    """Print the curve as a line, and each event with its steps and usual cause."""
    screen = console()
    span = f"steps {result['first_step']:,} to {result['last_step']:,}"
    screen.print(f"{result['log']}: {result['losses']:,} losses, {span}", markup=False)
    bars, letters = sparkline(curve, curve_events, min(100, screen.width))
    screen.print(bars, markup=False)
    if letters:
        screen.print(letters, markup=False)
    if not result["events"]:
        screen.print("no spike, no divergence, no plateau, no bump after a resume, no collapse of the loss scale")
        return
    rows = Table("event", "steps", "loss or scale", "usual cause, and what helps")
    for event in result["events"]:
        name = re.sub(r"(?<!^)(?=[A-Z])", " ", event["kind"]).lower()
        rows.add_row(name, steps_in_words(event), event_in_words(event), event["cause"])
    screen.print(rows)
