// A metric's curves as SVG: a line for each run or each group of seeds, with a band from lowest to highest.

import { duration, h, number, svg } from "./dom.js";

const HEIGHT = 150;
const EDGE = { left: 52, right: 8, top: 6, bottom: 20 };
// Lines differ in their dashes too: colours alone tell nothing to many.
const DASHES = ["", "6 3", "2 2", "10 3 2 3", "1 4", "12 4"];

export const stroke = (index) => ({ stroke: `var(--run-${index % 6})`, "stroke-dasharray": DASHES[index % 6] });

export function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => span / one <= count) ?? 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found.map((at) => (Math.abs(at) < step * 1e-9 ? 0 : at));
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function scales(lines, width) {
  const [x0, x1] = extent(lines.map((line) => line.x));
  let [y0, y1] = extent(lines.flatMap((line) => [line.low, line.high]));
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) * 0.1, y1 + (Math.abs(y1) || 1) * 0.1];
  const inner = { width: width - EDGE.left - EDGE.right, height: HEIGHT - EDGE.top - EDGE.bottom };
  const x = (value) => EDGE.left + (x1 === x0 ? 0.5 : (value - x0) / (x1 - x0)) * inner.width;
  const y = (value) => EDGE.top + (1 - (value - y0) / (y1 - y0)) * inner.height;
  return { x, y, x0, x1, y0, y1 };
}

const path = (xs, ys, scale) => xs.map((at, i) => `${i ? "L" : "M"}${scale.x(at).toFixed(1)} ${scale.y(ys[i]).toFixed(1)}`).join("");

function drawnLine(line, index, scale) {
  const backwards = line.x.map((_, i) => line.x.length - 1 - i);
  const edge = path(line.x, line.high, scale) +
    backwards.map((i) => `L${scale.x(line.x[i]).toFixed(1)} ${scale.y(line.low[i]).toFixed(1)}`).join("") + "Z";
  const isBand = line.low.some((low, i) => low !== line.high[i]);
  const style = stroke(index);
  const parts = [];
  if (isBand) parts.push(svg("path", { d: edge, fill: style.stroke, "fill-opacity": 0.18 }));
  parts.push(svg("path", { d: path(line.x, line.mean, scale), fill: "none", "stroke-width": 1.6, ...style }));
  if (line.x.length <= 40) {
    parts.push(line.x.map((at, i) => svg("circle", { cx: scale.x(at), cy: scale.y(line.mean[i]), r: 2, fill: style.stroke })));
  }
  return parts;
}

function axes(scale, width, isTime) {
  const bottom = HEIGHT - EDGE.bottom;
  const horizontal = ticks(scale.y0, scale.y1, 4).map((at) => [
    svg("line", { class: "axis", x1: EDGE.left, x2: width - EDGE.right, y1: scale.y(at), y2: scale.y(at) }),
    svg("text", { x: EDGE.left - 4, y: scale.y(at) + 4, "text-anchor": "end" }, number(at)),
  ]);
  const vertical = ticks(scale.x0, scale.x1, Math.max(2, Math.floor(width / 110))).map((at) =>
    svg("text", { x: scale.x(at), y: bottom + 14, "text-anchor": "middle" }, isTime ? duration(at) : number(at)));
  return [horizontal, vertical];
}

function nearest(xs, wanted) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= wanted) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - wanted) <= Math.abs(xs[high] - wanted) ? low : high;
}

function said(line, at, name, isTime) {
  const i = nearest(line.x, at);
  const band = line.low[i] === line.high[i] ? "" : ` (${number(line.low[i])} to ${number(line.high[i])})`;
  const where = isTime ? duration(line.x[i]) : `step ${number(Math.round(line.x[i]))}`;
  return `${where}: ${name} ${number(line.mean[i])}${band}`;
}

// A figure whose curves `draw` replaces; arrow keys or the pointer move along the curves.
export function chart(metric, names) {
  const canvas = h("div");
  const readout = h("div", { class: "readout soft", "aria-live": "polite" });
  const caption = h("figcaption", {},
    h("span", { class: "key" }, metric.key),
    h("p", { class: "small soft" }, metric.meaning ?? "not defined by this version of forgeasync"));
  const figure = h("figure", { tabindex: 0, "aria-label": `curve of ${metric.key}` }, caption, canvas, readout);
  let lines = [], isTime = false, scale = null, at = null;

  function point(value) {
    at = Math.min(scale.x1, Math.max(scale.x0, value));
    const cursor = canvas.querySelector(".cursor");
    cursor.setAttribute("x1", scale.x(at));
    cursor.setAttribute("x2", scale.x(at));
    cursor.setAttribute("visibility", "visible");
    readout.textContent = lines.map((line) => said(line, at, names(line.runs), isTime)).join("; ");
  }

  figure.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way || !lines.length) return;
    event.preventDefault();
    const xs = lines[0].x, i = at === null ? xs.length - 1 : nearest(xs, at) + way;
    point(xs[Math.min(xs.length - 1, Math.max(0, i))]);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!lines.length) return;
    const share = (event.offsetX - EDGE.left) / (canvas.clientWidth - EDGE.left - EDGE.right);
    point(scale.x0 + Math.min(1, Math.max(0, share)) * (scale.x1 - scale.x0));
  });

  figure.draw = (newLines, overTime) => {
    [lines, isTime] = [newLines, overTime];
    if (!lines.length) {
      canvas.replaceChildren(h("p", { class: "soft" }, "no values yet"));
      return;
    }
    const width = Math.max(240, canvas.clientWidth);
    scale = scales(lines, width);
    canvas.replaceChildren(svg("svg", { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": metric.key },
      axes(scale, width, isTime),
      lines.map((line) => drawnLine(line, line.runs[0], scale)),
      svg("line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" })));
    if (at !== null && figure.contains(document.activeElement)) point(at);
    else readout.textContent = `newest: ${lines.map((line) => said(line, line.x.at(-1), names(line.runs), isTime)).join("; ")}`;
  };
  return figure;
}

export function legend(groups, names) {
  return h("ul", { class: "legend" }, groups.map((group) =>
    h("li", {},
      svg("svg", { viewBox: "0 0 38 12", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 38, y1: 6, y2: 6, "stroke-width": 3, ...stroke(group[0]) })),
      names(group))));
}
