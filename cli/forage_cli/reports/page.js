"use strict";
// Tables sort by a column's cells: by number where both have one, else by text; cells without a value stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const value = (row, at) => row.cells[at].dataset.value ?? row.cells[at].textContent.trim();
  heads.forEach((head, at) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const none = text => text === "" || text === "–";
    body.append(...[...body.rows].sort((one, other) => {
      const [a, b] = [value(one, at), value(other, at)];
      if (none(a) || none(b)) return none(a) - none(b);
      const difference = a - b || (isNaN(a - b) ? a.localeCompare(b) : 0);
      return up ? difference : -difference;
    }));
  }));
}
// Filters hide what does not contain every word.
for (const input of document.querySelectorAll("input[data-filter]")) {
  const items = [...document.querySelectorAll(input.dataset.filter)], count = input.closest("p").querySelector("output");
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const item of items) item.hidden = !words.every(word => item.textContent.toLowerCase().includes(word));
    count.textContent = words.length ? `${items.filter(item => !item.hidden).length} of ${items.length}` : "";
  });
}
for (const button of document.querySelectorAll("button[data-fold]")) {
  button.addEventListener("click", () => {
    for (const fold of document.querySelectorAll(button.dataset.fold)) fold.open = "open" in button.dataset;
  });
}
