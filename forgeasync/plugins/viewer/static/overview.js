// The first page: the state of every run, with the newest values of some metrics.

import { breakable, duration, fate, fill, h, link, number, runNames } from "./dom.js";

function tile(meaning, newest, lastStep) {
  return h("div", { class: "tile", title: meaning ?? "" },
    h("b", {}, number(newest.value)),
    h("span", {}, breakable(newest.key), newest.step !== lastStep && [h("br"), `at step ${number(newest.step)}`]));
}

function runPanel(run, index, name, meanings) {
  const progress = run.progress.filter((one) => one.unread > 1e6);
  const groups = Object.entries(run.groups);
  const steps = run.max_steps === null ? number(run.step) : `${number(run.step)} of ${number(run.max_steps)}`;
  return h("section", { class: "run" },
    h("h2", {}, name),
    h("p", { class: "small" }, h("b", {}, run.life), `: ${run.life_words} · `, h("span", { class: "soft mono" }, run.folder)),
    run.last_log_line && h("p", { class: "small soft mono" }, run.last_log_line),
    h("div", { class: "tiles" },
      h("div", { class: "tile" }, h("b", {}, steps), h("span", {}, "steps")),
      h("div", { class: "tile" }, h("b", {}, duration(run.elapsed_s)), h("span", {}, "run time at the last step")),
      run.left_s !== null && h("div", { class: "tile" }, h("b", {}, duration(run.left_s)), h("span", {}, "left, at the pace of the last steps")),
      h("div", { class: "tile" }, h("b", {}, duration(run.written_ago_s)), h("span", {}, "since the last write")),
      h("div", { class: "tile" }, h("b", {}, `${run.num_open_faults} of ${run.num_faults}`), h("span", {}, "faults are open")),
      Object.entries(run.metrics).map(([key, newest]) => tile(meanings[key], { key, ...newest }, run.step))),
    h("div", {}, run.verdict.map((words) => h("p", { class: "small" }, words))),
    groups.length > 0 && h("p", {}, "Groups: ", groups.map(([word, count], i) =>
      [i ? ", " : "", link("groups", { run: index, fate: word }, fate(word), ` ${number(count)}`)])),
    progress.map((one) => h("p", { class: "small soft" },
      `reading ${one.file}: ${(100 * one.read / (one.read + one.unread)).toFixed(0)} %`)),
    run.problems.length > 0 && h("div", { class: "notes" }, run.problems.map((words) => h("p", { class: "small" }, words))));
}

export async function overview(root, state) {
  const draw = () => {
    const { runs, meanings } = state.status;
    fill(root, runs.map((run, i) => runPanel(run, i, runNames(runs)[i], meanings)),
      h("p", { class: "soft" }, "For curves of all metrics: ", h("span", { class: "mono" }, "tensorboard --logdir RUN")));
  };
  draw();
  return draw;
}
