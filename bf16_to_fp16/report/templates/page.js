"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const table = find("site-table"), body = table.tBodies[0], rows = [...body.rows];
  const filter = find("filter"), problems = find("problems"), count = find("count");

  function show() {
    const words = filter.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const name = row.cells[0].textContent.toLowerCase();
      row.hidden = !words.every((word) => name.includes(word)) || (problems.checked && !row.classList.contains("broken"));
      shown += !row.hidden;
    }
    count.textContent = `${shown.toLocaleString("en-US")} of ${rows.length.toLocaleString("en-US")} shown`;
  }

  function sortBy(header) {
    const i = header.cellIndex, isNumber = header.classList.contains("n");
    // The first press brings what matters to the top: the largest values, the least headroom, names from A.
    const down = header.ariaSort ? header.ariaSort === "ascending" : isNumber && header.textContent !== "headroom";
    const value = (row) => (isNumber ? Number(row.cells[i].dataset.v) : row.cells[i].textContent);
    const absent = (row) => isNumber && row.cells[i].dataset.v === "";
    const compare = (a, b) => (isNumber ? value(a) - value(b) : value(a).localeCompare(value(b), "en", { numeric: true }));
    // What has no value stands last, whichever way.
    rows.sort((a, b) => absent(a) - absent(b) || (down ? compare(b, a) : compare(a, b)));
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.ariaSort = down ? "descending" : "ascending";
    body.append(...rows);
  }

  for (const header of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = header.textContent;
    button.addEventListener("click", () => sortBy(header));
    header.replaceChildren(button);
  }
  for (const control of [filter, problems]) control.addEventListener("input", show);
  document.querySelector(".controls").hidden = false;
  show();
})();
