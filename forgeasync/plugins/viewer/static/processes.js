// What every process did and when: a lane for each, in one of eight states at every moment.

import { ask } from "./api.js";
import { duration, fill, h, runChoice, svg, table } from "./dom.js";

const HEIGHT = 22;

// States differ in height and hatching too: colors alone tell nothing to many.
const LOOKS = {
  "starting": { color: "var(--soft)", high: 0.5, hatched: true }, "swapping": { color: "var(--bad)", high: 1, hatched: true },
  "computing": { color: "var(--run-0)", high: 1, hatched: false }, "evaluating": { color: "var(--run-3)", high: 0.8, hatched: false },
  "publishing": { color: "var(--run-1)", high: 0.8, hatched: true }, "fetching": { color: "var(--run-2)", high: 0.6, hatched: true },
  "waiting for a batch": { color: "var(--soft)", high: 0.25, hatched: false }, "waiting for room": { color: "var(--run-4)", high: 0.25, hatched: false },
};

const patternOf = (place) => `state-${place}`;

function patterns(states) {
  return svg("defs", {}, states.map((state, place) => {
    const look = LOOKS[state];
    return svg("pattern", { id: patternOf(place), width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("rect", { width: 6, height: 6, fill: look.color, "fill-opacity": look.hatched ? 0.35 : 0.8 }),
      look.hatched && svg("rect", { width: 2.5, height: 6, fill: look.color }));
  }));
}

const box = (place, state, x, width) => {
  const high = Math.round(HEIGHT * LOOKS[state].high);
  return svg("rect", { x, width, y: HEIGHT - high, height: high, fill: `url(#${patternOf(place)})` });
};

function drawnLane(answer, lane, width) {
  const { states } = answer;
  return svg("svg", { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    patterns(states), lane.bars.map(([begin, length, state]) => box(state, states[state], begin, length)));
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

// The state at a place of the lane, and the shortest span around it.
function said(answer, lane, place, width) {
  const at = answer.begin_s + ((answer.end_s - answer.begin_s) * (place + 0.5)) / width;
  const bar = lane.bars.find(([begin, length]) => place >= begin && place < begin + length);
  const around = lane.spans.filter((one) => one.begin_s <= at && at <= one.begin_s + one.took_s).sort((one, other) => one.took_s - other.took_s);
  const span = around[0];
  const facts = span ? Object.entries(span.facts).map(([name, value]) => `${name} ${value}`).join(", ") : "";
  return `${lane.proc} after ${duration(at)}: ${bar ? answer.states[bar[2]] : "not there"}` +
    (span ? `; ${span.name}${facts && ` (${facts})`}, ${(1000 * span.took_s).toFixed(1)} ms` : "");
}

function lanePanel(answer, lane, width, readout) {
  const largest = lane.shares.map((share, place) => [share, answer.states[place]]).filter(([share]) => share > 0)
    .sort((one, other) => other[0] - one[0]).slice(0, 2).map(([share, state]) => `${state} ${percent(share)}`).join(", ");
  const canvas = h("div", {}, drawnLane(answer, lane, width));
  let place = width - 1;
  const point = (to) => {
    place = Math.min(width - 1, Math.max(0, to));
    readout.textContent = said(answer, lane, place, width);
  };
  return h("div", { class: "lane", tabindex: 0, role: "img", "aria-label": `${lane.proc}: ${largest}`,
    onkeydown: (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way) return;
      event.preventDefault();
      point(place + way * (event.shiftKey ? 20 : 1));
    },
    onpointermove: (event) => point(Math.floor((event.offsetX / canvas.clientWidth) * width)) },
  h("div", { class: "lane-name" }, h("b", {}, lane.proc), h("span", { class: "small soft" }, ` ${largest}`)), canvas);
}

function stepRuler(answer, width) {
  const scale = (at) => ((at - answer.begin_s) / (answer.end_s - answer.begin_s)) * width;
  let free = 0;
  const shown = answer.steps.filter(([, begin]) => {
    const hasRoom = scale(begin) >= free && scale(begin) <= width - 60;
    if (hasRoom) free = scale(begin) + 60;
    return hasRoom;
  });
  return svg("svg", { height: 18, viewBox: `0 0 ${width} 18`, preserveAspectRatio: "none", "aria-hidden": "true" },
    shown.map(([step, begin]) => [
      svg("line", { class: "axis", x1: scale(begin), x2: scale(begin), y1: 0, y2: 18 }),
      svg("text", { x: scale(begin) + 3, y: 13 }, `step ${step}`)]));
}

function legend(states) {
  return h("ul", { class: "legend" }, states.map((state, place) => h("li", {},
    svg("svg", { viewBox: `0 0 38 ${HEIGHT}`, "aria-hidden": "true" }, patterns(states), box(place, state, 0, 38)), state)));
}

function lanesPage(answer, width, readout) {
  if (!answer.lanes.length) return h("p", { class: "soft" }, "No process of this run left a trace of these steps (logs/*.trace.jsonl).");
  const rows = answer.lanes.map((lane) => [lane.proc, lane.pids.join(", "), ...answer.states.map((_, place) =>
    lane.shares.length ? percent(lane.shares[place]) : "-")]);
  return [
    h("p", { class: "soft" }, `From ${duration(answer.begin_s)} to ${duration(answer.end_s)} after the first process began. `,
      "Each bar shows the state that took most of its time. The controller's lane is its training loop."),
    legend(answer.states), stepRuler(answer, width),
    answer.lanes.map((lane) => lanePanel(answer, lane, width, readout)),
    h("h2", {}, "Shares of the time"), table(["process", "pids", ...answer.states], rows),
  ];
}

export async function processes(root, state, go) {
  const given = state.parameters;
  const set = (name) => (event) => go({ ...given, [name]: event.target.value });
  const content = h("div");
  const readout = h("div", { class: "readout soft", "aria-live": "polite" }, "Arrow keys, or the pointer, move along a lane.");
  fill(root, h("div", { class: "bar" }, runChoice(state, go),
    h("label", {}, "From step", h("input", { type: "number", min: 0, id: "search", value: given.first ?? "", onchange: set("first") })),
    h("label", {}, "to step", h("input", { type: "number", min: 0, value: given.last ?? "", onchange: set("last") }))),
  readout, content);
  const draw = async () => {
    const width = Math.max(200, Math.round(content.clientWidth));
    fill(content, lanesPage(await ask("lanes", { run: given.run, first: given.first, last: given.last, width }), width, readout));
  };
  await draw();
  return draw;
}
