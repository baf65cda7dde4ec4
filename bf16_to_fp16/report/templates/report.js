"use strict";
(() => {
  const NAME = 0, REGIME = 1, AMAX = 2, BITS = 3, NONFINITE = 4, SATURATED = 5, LIMIT = 6, DTYPE = 7, BENIGN = 8, BOUND = 9, TIGHTNESS = 10;
  const STEP = matchMedia("(max-width: 720px)").matches ? 20 : 100, FP16_MAX = 65504;
  const data = JSON.parse(document.getElementById("site-data").textContent);
  const find = (id) => document.getElementById(id);
  const table = find("site-table"), body = table.tBodies[0];
  const filter = find("filter"), regime = find("regime"), problems = find("problems"), count = find("count"), more = find("more");
  const headers = [...table.tHead.rows[0].cells];
  const order = { column: null, down: false };
  let shown = STEP;

  const text = (pointer) => (pointer === null ? "" : data.strings[pointer]);
  const integer = (n) => n.toLocaleString("en-US");
  const magnitude = (x) => {
    if (x >= 1e308) return "∞";
    if (x >= 1000 && x < 1e7) return integer(Math.round(x));
    if (x === 0 || (x >= 0.01 && x < 1000)) return String(Number(x.toPrecision(4)));
    const [digits, exponent] = x.toExponential(2).split("e");
    return digits + "×10" + exponent.replace("+", "").replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
  };
  const amax = (row) => {
    const x = row[AMAX];
    // Beyond fp16 it is what fp32 reached, where that is known; 65536 stands for an overflow of unknown size.
    if ((row[LIMIT] !== null || row[NONFINITE]) && (x === null || x >= 1e308 || (x > FP16_MAX && x <= 65536))) return "overflow";
    return x === null ? "NaN" : magnitude(x);
  };
  const floored = (x, decimals) => (Math.floor(x * 10 ** decimals) / 10 ** decimals).toFixed(decimals);
  const factor = (x) => (x >= 100 ? integer(Math.floor(x)) : floored(x, x < 2 ? 2 : 1));
  const bits = (b) => {
    if (b === null || b < 0 || b > 39) return b === null ? "no limit" : b < 0 ? "none" : "all";
    return factor(2 ** b) + " × (" + floored(b, b < 1 ? 2 : 1) + " bits)";
  };
  // Up to two digits, whole numbers with all of theirs.
  const over = (ratio) => (ratio < 99.5 ? String(Number(ratio.toPrecision(2))) : integer(Math.round(ratio))) + " × over";
  const raised = (ratio) => (ratio < 10 ? Math.ceil(ratio * 10) / 10 : Math.ceil(ratio));
  const headroom = (row) => {
    const [b, x, limit] = [row[BITS], row[AMAX], row[LIMIT]];
    if (row[REGIME] === null && b < 0 && b >= -23) return integer(raised(2 ** -b)) + " × over";
    if (b === null || limit === null || x === null || x >= 1e308 || (x > FP16_MAX && x <= 65536)) return bits(b);
    if (x > limit) return over(x / limit);
    return b < 0 ? "passed on" : bits(b);
  };

  // Numbers come rounded as in the tables; text stays as short as in the table that stands without scripts.
  const show = (row, column) => {
    if (column === AMAX) return amax(row);
    if (column === BITS) return headroom(row);
    if (column === REGIME || column === DTYPE) return text(row[column]);
    if (column === NONFINITE || column === SATURATED) return integer(row[column]);
    return row[column] === null ? "–" : magnitude(row[column]);
  };

  function cell(row, content, label, name) {
    const td = row.insertCell();
    td.textContent = content;
    if (label) td.dataset.label = label;
    if (name) td.className = name;
    return td;
  }

  function draw() {
    const wanted = filter.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const rows = data.rows.filter((row) => {
      const name = text(row[NAME]).toLowerCase();
      return (regime.value === "" || text(row[REGIME]) === regime.value)
        && (!problems.checked || row[NONFINITE] > 0 || row[SATURATED] > 0)
        && wanted.every((word) => name.includes(word));
    });
    if (order.column !== null) {
      const isText = [NAME, REGIME, DTYPE].includes(order.column);
      const key = (row) => (isText ? text(row[order.column]) : row[order.column] ?? -Infinity);
      // What has no limit (constants, fp32) does not compare with what has one: last, whichever way.
      const unlimited = (row) => ([AMAX, BITS].includes(order.column) && row[LIMIT] === null)
        || ([BOUND, TIGHTNESS].includes(order.column) && row[order.column] === null);
      const compare = isText
        ? (a, b) => key(a).localeCompare(key(b), "en", { numeric: true })
        : (a, b) => (key(a) === key(b) ? 0 : key(a) < key(b) ? -1 : 1);
      rows.sort((a, b) => unlimited(a) - unlimited(b) || (order.down ? compare(b, a) : compare(a, b)));
    }
    const fresh = document.createElement("tbody");
    for (const row of rows.slice(0, shown)) {
      const tr = fresh.insertRow();
      if (row[NONFINITE] || row[SATURATED]) tr.className = "broken";
      const name = cell(tr, "", "", "site");
      text(row[NAME]).split(/(?<=\.)/).forEach((part, i) => name.append(...(i ? [document.createElement("wbr")] : []), part));
      if (row[BENIGN] !== null) {
        const reason = document.createElement("span");
        reason.className = "sub";
        reason.textContent = "by design: " + text(row[BENIGN]);
        name.append(reason);
      }
      for (const header of headers.slice(1)) {
        cell(tr, show(row, Number(header.dataset.column)), header.textContent, header.className);
      }
    }
    body.replaceChildren(...fresh.rows);
    count.textContent = integer(Math.min(shown, rows.length)) + " of " + integer(rows.length) + " shown";
    more.parentElement.hidden = rows.length <= shown;
  }

  function sortBy(header) {
    const column = Number(header.dataset.column);
    // The first press brings what matters to the top: the largest values, the least headroom, names from A.
    const first = [AMAX, NONFINITE, SATURATED, BOUND, TIGHTNESS].includes(column);
    order.down = order.column === column ? !order.down : first;
    order.column = column;
    for (const other of headers) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order.down ? "descending" : "ascending");
    shown = STEP;
    draw();
  }

  for (const header of headers) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = header.textContent;
    button.addEventListener("click", () => sortBy(header));
    header.replaceChildren(button);
  }
  regime.add(new Option("all", ""));
  for (const name of data.regimes) regime.add(new Option(name, name, name === data.shown, name === data.shown));
  for (const control of [filter, regime, problems]) {
    control.addEventListener("input", () => { shown = STEP; draw(); });
  }
  more.addEventListener("click", () => { shown += 4 * STEP; draw(); });
  document.querySelector(".controls").hidden = false;
  draw();
})();
