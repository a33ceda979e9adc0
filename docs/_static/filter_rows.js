// Hides the rows of all tables below the box that do not contain its words, and the headings of empty sections.
const box = document.getElementById("row-filter");
const count = document.querySelector("output[for=row-filter]");
const isBelow = (element) => box.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING;
const tables = [...document.querySelectorAll("article table")].filter(isBelow);
const rows = tables.flatMap((table) => {
  const section = [...table.closest("section").querySelectorAll("h2, h3")].map((one) => one.textContent).join(" ");
  const heads = [...table.querySelectorAll("thead th")].map((one) => one.textContent.trim());
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
  for (const table of tables) {
    const isEmpty = ![...table.tBodies[0].rows].some((row) => !row.hidden);
    (table.closest(".pst-scrollable-table-container") ?? table).hidden = isEmpty;
  }
  for (const section of document.querySelectorAll("article section section")) {
    const inside = tables.filter((table) => section.contains(table));
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
