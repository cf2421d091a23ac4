// Pages of tables: faults and processes, configs, the glossary.

import { ask } from "./api.js";
import { clock, duration, fill, h, number, runChoice, runNames, table } from "./dom.js";

export async function faults(root, state, go) {
  const content = h("div");
  async function draw() {
    const answer = await ask("faults", { run: state.parameters.run });
    const rows = [...answer.faults].reverse().map((one) => [
      number(one.number), clock(one.detected_s), one.role, `${one.who} ${one.what}`,
      one.how === null ? h("span", { class: "bad" }, "not recovered from") : one.how, one.took_s === null ? "-" : duration(one.took_s),
    ]);
    const procs = answer.procs.map((one) => [one.role, number(one.rank), String(one.pid), one.host, clock(one.since_s)]);
    fill(content, 
      h("h2", {}, "Faults, the newest first"),
      rows.length ? table(["number", "detected", "role", "what", "recovery", "after"], rows) : h("p", { class: "soft" }, "Nothing has failed."),
      h("h2", {}, "Processes of the run"),
      procs.length ? table(["role", "rank", "process", "host", "since"], procs) : h("p", { class: "soft" }, "procs.json names none."));
  }
  fill(root, h("div", { class: "bar" }, runChoice(state, go)), content);
  await draw();
  return draw;
}

export async function config(root, state, go) {
  const answer = await ask("settings");
  const names = runNames(state.status.runs);
  const wanted = (state.parameters.q ?? "").toLowerCase();
  const rows = (found) => Object.entries(found).filter(([key]) => key.toLowerCase().includes(wanted)).map(([key, values]) =>
    [h("span", { class: "key" }, key), ...values.map((value) => h("span", { class: "mono" }, value ?? "(not there)"))]);
  const differing = rows(answer.differing);
  fill(root, 
    h("div", { class: "bar" }, h("label", {}, "Keys with", h("input", { type: "search", id: "search", value: state.parameters.q ?? "",
      onchange: (event) => go({ ...state.parameters, q: event.target.value }) }))),
    h("div", {}, names.length > 1 && [h("h2", {}, "Differences between the runs"),
      differing.length ? table(["key", ...names], differing) : h("p", { class: "soft" }, "None.")]),
    h("h2", {}, "All keys"), table(["key", ...names], rows(answer.all)));
  return null;
}

export async function glossary(root, state, go) {
  const answer = await ask("glossary");
  const wanted = (state.parameters.q ?? "").toLowerCase();
  const sections = answer.topics.map((topic) => {
    const found = topic.metrics.filter((one) => `${one.key} ${one.meaning}`.toLowerCase().includes(wanted));
    return found.length > 0 && h("section", {}, h("h2", {}, topic.heading), topic.note && h("p", {}, topic.note),
      table(["metric", "meaning", "on lines of"], found.map((one) => [h("span", { class: "key" }, one.key), one.meaning, one.when])));
  });
  fill(root, 
    h("div", { class: "bar" }, h("label", {}, "Metrics whose name or meaning has", h("input", { type: "search", id: "search",
      value: state.parameters.q ?? "", onchange: (event) => go({ ...state.parameters, q: event.target.value }) }))),
    h("div", {}, sections));
  return null;
}
