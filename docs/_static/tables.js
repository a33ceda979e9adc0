// A click on the head of a column sorts the rows of its table. A paragraph of class "row-filter" becomes a box that hides
// all rows below it that do not contain its words, and what is empty without them.
const tables = [...document.querySelectorAll("article table")].filter((table) => table.tHead && table.tBodies.length);

const numberIn = (cell) => Number.parseFloat(cell.textContent.trim().replaceAll(",", "").replace("\u2212", "-"));
const isEmpty = (cell) => ["", "-"].includes(cell.textContent.trim());

function compare(one, other) {
  if (isEmpty(one) || isEmpty(other)) return isEmpty(one) - isEmpty(other); // in both directions
  const [left, right] = [numberIn(one), numberIn(other)];
  return Number.isNaN(left - right) ? one.textContent.localeCompare(other.textContent, "en", { numeric: true }) : left - right;
}

function sort(table, index, descending) {
  const rows = [...table.tBodies[0].rows];
  rows.sort((one, other) => {
    const order = compare(one.cells[index], other.cells[index]);
    const keepsLast = isEmpty(one.cells[index]) || isEmpty(other.cells[index]);
    return descending && !keepsLast ? -order : order;
  });
  table.tBodies[0].append(...rows);
  [...table.tHead.rows[0].cells].forEach((head) => head.removeAttribute("aria-sort"));
  table.tHead.rows[0].cells[index].setAttribute("aria-sort", descending ? "descending" : "ascending");
}

for (const table of tables.filter((one) => one.tHead.rows.length === 1 && one.tBodies[0].rows.length > 4)) {
  [...table.tHead.rows[0].cells].forEach((head, index) => {
    const button = document.createElement("button");
    button.className = "sort";
    button.title = "Sort by this column";
    button.append(...(head.querySelector("p") ?? head).childNodes);
    button.addEventListener("click", () => sort(table, index, head.getAttribute("aria-sort") === "ascending"));
    (head.querySelector("p") ?? head).append(button);
  });
}

function addFilter(place) {
  place.innerHTML = `<label for="row-filter">Show rows with</label>
    <input id="row-filter" type="search" autocomplete="off"> <output for="row-filter"></output>`;
  const box = place.querySelector("input");
  const count = place.querySelector("output");
  box.placeholder = place.dataset.example;
  const isBelow = (element) => place.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING;
  const below = tables.filter(isBelow);
  const rows = below.flatMap((table) => {
    const section = [...table.closest("section").querySelectorAll("h2, h3")].map((one) => one.textContent).join(" ");
    const heads = [...table.tHead.rows[0].cells].map((one) => one.textContent.trim());
    return [...table.tBodies[0].rows].map((row) => {
      const cells = [...row.cells].map((one, index) => `${heads[index]}=${one.textContent.trim()}`);
      return { row, text: `${row.textContent} ${cells.join(" ")} ${section}`.toLowerCase() };
    });
  });

  function filter() {
    const words = box.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
    let shown = 0;
    for (const { row, text } of rows) {
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    for (const table of below) {
      const isBare = ![...table.tBodies[0].rows].some((row) => !row.hidden);
      (table.closest(".pst-scrollable-table-container") ?? table).hidden = isBare;
      const folded = table.closest("details");
      if (folded) [folded.open, folded.hidden] = [words.length > 0, isBare];
    }
    for (const section of document.querySelectorAll("article section section")) {
      const inside = below.filter((table) => section.contains(table));
      section.hidden = words.length > 0 && isBelow(section) && inside.every((table) => table.closest("[hidden]"));
    }
    count.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
    const address = new URL(location);
    words.length ? address.searchParams.set("rows", box.value) : address.searchParams.delete("rows");
    history.replaceState(null, "", address);
  }

  box.value = new URL(location).searchParams.get("rows") ?? "";
  box.addEventListener("input", filter);
  if (box.value) filter();
}

document.querySelectorAll("p.row-filter").forEach(addFilter);
