// The first page (state of every run, first curves) and the page of all curves.

import { ask } from "./api.js";
import { chart, legend } from "./chart.js";
import { breakable, duration, fate, fill, h, link, number } from "./dom.js";

const WIDTH = 420;
// Curves that are drawn at once; a run has two hundred metrics.
const MAX_CHARTS = 30;

export const runNames = (runs) => {
  const isTwice = (run) => runs.filter((one) => one.run === run.run).length > 1;
  return runs.map((run) => (isTwice(run) ? run.folder : run.run));
};

const groupName = (runs) => (group) => {
  const names = runNames(runs);
  return group.length === 1 ? names[group[0]] : `${names[group[0]]} and ${group.length - 1} more seed${group.length > 2 ? "s" : ""}`;
};

function choices(state, go) {
  const set = (name) => (event) => go({ ...state.parameters, [name]: event.target.checked ? 1 : null });
  const box = (name, words) => h("label", { class: "inline" },
    h("input", { type: "checkbox", checked: state.parameters[name] === "1", onchange: set(name) }), words);
  const hasSeeds = state.status.seed_groups.some((group) => group.length > 1);
  return [box("time", "over time"), hasSeeds && box("seeds", "each seed by itself")];
}

async function drawAll(figures, state) {
  const keys = [...figures.keys()];
  if (!keys.length) return;
  const overTime = state.parameters.time === "1";
  const bands = state.parameters.seeds === "1" ? 0 : 1;
  const { curves } = await ask("curves", { key: keys, width: WIDTH, time: overTime ? 1 : 0, bands });
  for (const curve of curves) figures.get(curve.key).draw(curve.lines, overTime);
}

function shownGroups(state) {
  return state.parameters.seeds === "1" ? state.status.runs.map((_, i) => [i]) : state.status.seed_groups;
}

function tile(metric, newest, lastStep) {
  return h("div", { class: "tile", title: metric?.meaning ?? "" },
    h("b", {}, number(newest.value)),
    h("span", {}, breakable(newest.key), newest.step !== lastStep && [h("br"), `at step ${number(newest.step)}`]));
}

function runPanel(run, index, name, metrics) {
  const progress = run.progress.filter((one) => one.unread > 1e6);
  const groups = Object.entries(run.groups);
  const steps = run.max_steps === null ? number(run.step) : `${number(run.step)} of ${number(run.max_steps)}`;
  return h("section", { class: "run" },
    h("h2", {}, name),
    h("p", { class: "small" }, h("b", {}, run.life), `: ${run.life_words} · `, h("span", { class: "soft mono" }, run.folder)),
    run.last_log_line && h("p", { class: "small soft mono" }, run.last_log_line),
    h("div", { class: "tiles" },
      h("div", { class: "tile" }, h("b", {}, steps), h("span", {}, "steps made")),
      h("div", { class: "tile" }, h("b", {}, duration(run.elapsed_s)), h("span", {}, "on the run's clock, to the last step")),
      run.left_s !== null && h("div", { class: "tile" }, h("b", {}, duration(run.left_s)), h("span", {}, "left, by the last steps")),
      h("div", { class: "tile" }, h("b", {}, duration(run.written_ago_s)), h("span", {}, "since it last wrote")),
      h("div", { class: "tile" }, h("b", {}, `${run.num_open_faults} of ${run.num_faults}`), h("span", {}, "faults not recovered from")),
      Object.entries(run.metrics).map(([key, newest]) => tile(metrics.get(key), { key, ...newest }, run.step))),
    h("div", {}, run.verdict.map((words) => h("p", { class: "small" }, words))),
    groups.length > 0 && h("p", {}, "Groups: ", groups.map(([word, count], i) =>
      [i ? ", " : "", link("groups", { run: index, fate: word }, fate(word), ` ${number(count)}`)])),
    progress.map((one) => h("p", { class: "small soft" },
      `reading ${one.file}: ${(100 * one.read / (one.read + one.unread)).toFixed(0)} %`)),
    run.problems.length > 0 && h("div", { class: "notes" }, run.problems.map((words) => h("p", { class: "small" }, words))));
}

export async function overview(root, state, go) {
  const { headlines, metrics } = await ask("metrics");
  const byKey = new Map(metrics.map((one) => [one.key, one]));
  const panels = h("div");
  const name = groupName(state.status.runs);
  const figures = new Map(headlines.map((key) => [key, chart(byKey.get(key), name)]));
  const drawPanels = () => fill(panels, state.status.runs.map((run, i) =>
    runPanel(run, i, runNames(state.status.runs)[i], byKey)));
  drawPanels();
  fill(root, panels, h("h2", {}, "Curves"), h("div", { class: "bar" }, choices(state, go)),
    legend(shownGroups(state), name), h("div", { class: "charts" }, [...figures.values()]),
    h("p", {}, link("curves", {}, "All metrics")));
  await drawAll(figures, state);
  return async () => { drawPanels(); await drawAll(figures, state); };
}

export async function curves(root, state, go) {
  const { metrics } = await ask("metrics");
  const wanted = (state.parameters.q ?? "").toLowerCase();
  const found = metrics.filter((one) => `${one.key} ${one.meaning ?? ""} ${one.topic ?? ""}`.toLowerCase().includes(wanted));
  const name = groupName(state.status.runs);
  const skip = Number(state.parameters.skip ?? 0);
  const shown = found.slice(skip, skip + MAX_CHARTS);
  const figures = new Map(shown.map((one) => [one.key, chart(one, name)]));
  const search = h("input", { type: "search", id: "search", value: state.parameters.q ?? "",
    onchange: (event) => go({ ...state.parameters, q: event.target.value, skip: null }) });
  fill(root, 
    h("div", { class: "bar" }, h("label", {}, "Metrics whose name or meaning has", search), choices(state, go)),
    h("p", { class: "soft" }, `${number(found.length)} of ${number(metrics.length)} metrics`,
      found.length > MAX_CHARTS && `; ${skip + 1} to ${skip + shown.length} are drawn. `,
      skip > 0 && link("curves", { ...state.parameters, skip: skip - MAX_CHARTS }, "before "), " ",
      skip + MAX_CHARTS < found.length && link("curves", { ...state.parameters, skip: skip + MAX_CHARTS }, "next")),
    legend(shownGroups(state), name), h("div", { class: "charts" }, [...figures.values()]));
  await drawAll(figures, state);
  return () => drawAll(figures, state);
}
