// Elements from values. Text is always text: nothing here reads markup from a string.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export const h = (tag, attributes = {}, ...children) =>
  filled(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

// Replace what is in an element; children as those of `h`.
export function fill(element, ...children) {
  element.replaceChildren();
  return filled(element, {}, children);
}

// A number as people read it; four digits that count.
export function number(value) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// A metric's name that may be broken where its words end.
export const breakable = (key) => key.split(/(?<=[/_])/).flatMap((part) => [part, h("wbr")]);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  const units = [["d", 86400], ["h", 3600], ["min", 60]];
  for (const [unit, length] of units) if (seconds >= length) return `${(seconds / length).toFixed(1)} ${unit}`;
  return `${seconds < 10 ? seconds.toFixed(1) : seconds.toFixed(0)} s`;
}

export const clock = (unixSeconds) => new Date(unixSeconds * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";

// A table; on narrow screens each row becomes a block with the columns' names.
export function table(names, rows, attributes = {}) {
  const body = rows.map((row) =>
    h("tr", { class: "row" }, row.map((cell, index) =>
      h("td", { "data-name": names[index], "data-empty": cell === "" || cell === "-" }, h("span", {}, cell)))));
  const head = h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name))));
  return h("div", { class: "wide" }, h("table", { class: "stack", ...attributes }, head, h("tbody", {}, body)));
}

export const FATE_MARKS = {
  sampling: "…", scoring: "?", waiting: "‖", trained: "✓", skipped: "∅", unknown: "~",
  filtered: "−", dropped: "✗", undone: "↺", unfinished: "○",
};

export const fate = (word, reason = null) =>
  h("span", { class: "fate", "data-mark": FATE_MARKS[word] ?? " " }, reason ? `${word}: ${reason}` : word);

export const runNames = (runs) => {
  const isTwice = (run) => runs.filter((one) => one.run === run.run).length > 1;
  return runs.map((run) => (isTwice(run) ? run.folder : run.run));
};

// Which of several runs a page shows.
export function runChoice(state, go) {
  if (state.status.runs.length < 2) return null;
  const chosen = (event) => go({ ...state.parameters, run: event.target.value, skip: null });
  return h("label", {}, "Run", h("select", { onchange: chosen }, runNames(state.status.runs).map((name, i) =>
    h("option", { value: i, selected: String(i) === (state.parameters.run ?? "0") }, name))));
}

export const link = (page, parameters, ...children) => h("a", { href: address(page, parameters) }, ...children);

export function address(page, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given).toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}
