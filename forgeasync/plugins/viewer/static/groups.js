// The table of groups, and the history of one.

import { ask } from "./api.js";
import { duration, fate, FATE_MARKS, fill, h, link, number, runChoice, table } from "./dom.js";
import { rolloutTable } from "./rollouts.js";

const PAGE = 50;

// What a group does between two events.
const PHASES = { submitted: ["queued", "waits to start"], started: ["sampling", "is sampled"],
  sampled: ["scoring", "is scored"], scored: ["waiting", "waits for the trainer"], restored: ["waiting", "waits for the trainer"] };

const eventOf = (group, names) => group.events.find((one) => names.includes(one.what));

function age(group) {
  const begin = eventOf(group, ["started", "restored"]);
  return group.step === null || !begin ? "-" : number(group.step - 1 - begin.num_steps_made);
}

export async function groups(root, state, go) {
  const given = state.parameters;
  const skip = Number(given.skip ?? 0);
  const run = given.run ?? 0;
  const set = (name) => (event) => go({ ...given, [name]: event.target.value, skip: null });
  const find = h("input", { type: "number", min: 0, id: "search" });
  const bar = h("form", { class: "bar", onsubmit: (event) => {
    event.preventDefault();
    if (find.value !== "") location.hash = `#/group?run=${run}&group=${find.value}`;
  } },
    runChoice(state, go),
    h("label", {}, "Find group", find), h("button", {}, "Open"),
    h("label", {}, "Fate", h("select", { onchange: set("fate") }, ["", ...Object.keys(FATE_MARKS)].map((word) =>
      h("option", { value: word, selected: word === (given.fate ?? "") }, word || "any")))),
    h("label", {}, "Trained in step", h("input", { type: "number", min: 0, value: given.step ?? "", onchange: set("step") })));
  const content = h("div");
  fill(root, bar, content);
  const draw = async () => fill(content, groupPage(await ask("groups", {
    run: given.run, fate: given.fate, reason: given.reason, step: given.step, skip, limit: PAGE }), given, run, skip));
  await draw();
  return draw;
}

function groupPage(answer, given, run, skip) {
  const rows = answer.groups.map((group) => {
    const begin = eventOf(group, ["started", "restored"]);
    return [
      link("group", { run, group: group.group }, String(group.group)), String(group.prompt), number(group.attempt),
      fate(group.fate, group.reason), group.is_resubmitted ? "yes" : "", group.step === null ? "-" : number(group.step),
      begin ? number(begin.num_steps_made) : "-", age(group), duration(begin?.about_s ?? null),
    ];
  });
  const names = ["group", "prompt", "lost before", "fate", "comes again", "step", "started after step", "versions made since", "start time"];
  return [
    h("p", { class: "soft" }, `${number(answer.num_groups)} groups, the newest first`,
      rows.length > 0 && `; ${number(skip + 1)} to ${number(skip + rows.length)}. `,
      skip > 0 && link("groups", { ...given, skip: Math.max(0, skip - PAGE) }, "newer "), " ",
      skip + PAGE < answer.num_groups && link("groups", { ...given, skip: skip + PAGE }, "older")),
    rows.length > 0 && table(names, rows),
  ];
}

// Places on the track: seconds where all events have them, else lines of the ledger.
function track(group) {
  const hasTimes = group.events.every((one) => one.about_s !== null);
  const place = (one) => (hasTimes ? one.about_s : one.line);
  const parts = group.events.slice(0, -1).map((one, i) => {
    const [kind, words] = PHASES[one.what] ?? ["queued", one.what];
    const length = place(group.events[i + 1]) - place(one);
    const shown = hasTimes ? duration(length) : `${number(length)} lines`;
    const part = h("div", { class: `p-${kind}`, title: `${words}: ${shown}` }, h("span", {}, `${words} ${shown}`));
    part.style.flexGrow = Math.max(length, 1e-3);
    part.style.flexBasis = "0";
    return part;
  });
  const said = group.events.map((one) => one.what).join(", then ");
  return h("div", { class: "life" },
    parts.length > 0 && h("div", { class: "track", role: "img", "aria-label": said }, parts),
    h("p", { class: "small soft" }, hasTimes ? "Lengths are times on the run's clock, accurate to one step." : "Lengths are lines of the ledger: not all events have a time yet."));
}

function historyPanel(group, isNewest) {
  const rows = group.events.map((one, i) => {
    const before = group.events[i - 1];
    const passed = before && one.about_s !== null && before.about_s !== null ? duration(one.about_s - before.about_s) : "-";
    return [one.what, number(one.num_steps_made), duration(one.about_s), passed, number(one.line)];
  });
  return h("section", {},
    h("h3", {}, isNewest ? "" : "Undone by a resumption: ", fate(group.fate, group.reason),
      group.step !== null && ` in step ${number(group.step)}`, group.is_resubmitted && ", its prompt comes again"),
    track(group),
    table(["event", "steps made by then", "time", "since the previous event", "line of ledger.jsonl"], rows));
}

export async function group(root, state) {
  const run = state.parameters.run ?? 0;
  const answer = await ask("group", { run, group: state.parameters.group });
  const newest = answer.histories[0];
  const others = answer.attempts.filter((one) => one.group !== answer.group);
  fill(root, 
    h("h2", {}, `Group ${answer.group}`),
    h("p", {}, link("groups", { run }, "all groups"), " · ",
      answer.group > 0 && [link("group", { run, group: answer.group - 1 }, "previous"), " · "],
      link("group", { run, group: answer.group + 1 }, "next")),
    h("dl", { class: "facts" },
      newest && [h("dt", {}, "prompt"), h("dd", {}, String(newest.prompt), `, attempt ${newest.attempt} (${newest.attempt} lost before)`)],
      answer.task_id !== null && [h("dt", {}, "task"), h("dd", { class: "mono" }, answer.task_id, ` (${answer.source})`)],
      newest?.step != null && [h("dt", {}, "trained"), h("dd", {}, `by step ${newest.step}, on weights of version ${newest.step - 1}; a token's age is that less its own version`)],
      others.length > 0 && [h("dt", {}, "other attempts"), h("dd", {}, others.map((one, i) =>
        [i ? ", " : "", link("group", { run, group: one.group }, `group ${one.group}`), ` (${one.fate})`]))]),
    answer.histories.map((group, i) => historyPanel(group, i === 0)),
    h("h3", {}, "Rollouts"),
    answer.num_rollouts === 0
      ? h("p", { class: "soft" }, "None of its rollouts is in rollouts.jsonl: a run writes logging.rollouts_per_step of each step.")
      : rolloutTable(answer, run));
  return ["sampling", "scoring", "waiting"].includes(newest?.fate) ? () => group(root, state) : null;
}
