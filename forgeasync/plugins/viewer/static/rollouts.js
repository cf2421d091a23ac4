// Rollouts of a step, and one of them with its text.

import { ask } from "./api.js";
import { fill, h, link, number, runChoice, table } from "./dom.js";
import { tokenSection, worstTable } from "./tokens.js";

const versions = (spans) => {
  const found = (Array.isArray(spans) ? spans : []).map((span) => span[0]);
  if (!found.length) return "-";
  const low = Math.min(...found), high = Math.max(...found);
  return low === high ? number(low) : `${number(low)} to ${number(high)}`;
};

const yesNo = (value) => (value === true ? "yes" : value === false ? "no" : "-");

export function rolloutTable(answer, run) {
  const rows = answer.rollouts.map((one) => one.problem
    ? [String(one.number), one.problem, "", "", "", "", "", "", ""]
    : [
      link("rollout", { run, number: one.number }, String(one.number)), link("group", { run, group: one.group }, String(one.group)),
      number(one.step), number(one.episode ?? 0), number(one.reward), yesNo(one.is_correct),
      number(one.response_tokens), versions(one.version_spans), String(one.finish_reason ?? "-"),
    ]);
  const more = answer.num_rollouts - answer.rollouts.length;
  return [
    table(["rollout", "group", "step", "episode", "reward", "correct", "tokens", "versions", "ended by"], rows),
    more > 0 && h("p", { class: "soft" }, `and ${number(more)} more`),
  ];
}

export async function rollouts(root, state, go) {
  const run = state.parameters.run ?? 0;
  const step = state.parameters.step ?? state.status.runs[run].step;
  const [answer, worst] = await Promise.all([ask("rollouts", { run, step }), ask("worst", { run, step })]);
  fill(root, 
    h("div", { class: "bar" }, runChoice(state, go),
      h("label", {}, "Step", h("input", { type: "number", min: 1, id: "search", value: step,
        onchange: (event) => go({ ...state.parameters, step: event.target.value }) }))),
    h("p", { class: "soft" }, `${number(answer.num_rollouts)} rollouts of step ${number(Number(step))} were written`),
    h("div", {}, answer.num_rollouts > 0 && rolloutTable(answer, run)),
    h("h3", {}, "Worst tokens"),
    h("p", { class: "small soft" }, "The tokens of the step with the largest mismatch. A rank links to the token's rollout if its text was written."),
    h("div", {}, worstTable(worst, run)));
  return null;
}

// The response's tokens by the version that sampled them, in order; a change is a swap of weights on the way.
function versionStrip(spans, trainedVersion) {
  if (!Array.isArray(spans) || !spans.length) return null;
  const words = ([version, start, end]) =>
    `version ${version}: ${end - start} token${end - start > 1 ? "s" : ""}, age ${trainedVersion - version}`;
  const parts = spans.map((span) => {
    const part = h("div", { title: words(span) }, `version ${span[0]}`);
    part.style.flexGrow = span[2] - span[1];
    return part;
  });
  const swaps = spans.length - 1;
  return [h("h3", {}, "Tokens by version"), h("div", { class: "spans" }, parts),
    h("p", { class: "small soft" }, `${swaps === 0 ? "no swap" : swaps === 1 ? "one swap" : `${swaps} swaps`} of weights while it was sampled. ${spans.map(words).join("; ")}`)];
}

function responseText(record) {
  if (!record.response_parts) return h("div", { class: "text" }, record.response ?? "");
  return h("div", { class: "text" }, record.response_parts.map((part) => part.value === null ? part.text
    : [h("span", { class: "step-part" }, part.text), h("span", { class: "step-value" }, number(part.value))]));
}

function message(one) {
  const facts = [one.role, one.name, one.version !== undefined && one.version !== null && `version ${one.version}`,
    one.num_tokens !== undefined && one.num_tokens !== null && `${number(one.num_tokens)} tokens`, one.finish_reason && `ended by ${one.finish_reason}`];
  const calls = (one.tool_calls ?? []).map((call) => {
    const given = call.function?.arguments;
    return h("div", { class: "text" }, `calls ${call.function?.name}(${typeof given === "string" ? given : JSON.stringify(given)})`);
  });
  const content = typeof one.content === "string" ? one.content : one.content ? JSON.stringify(one.content, null, 1) : "";
  return h("section", {}, h("h3", {}, facts.filter(Boolean).join(" · ")),
    one.reasoning_content && h("details", {}, h("summary", {}, "reasoning"), h("div", { class: "text" }, one.reasoning_content)),
    content && h("div", { class: "text" }, content), calls);
}

function episode(record) {
  return (record.agents ?? []).map((agent) => [
    h("h2", {}, `Agent ${agent.name}`),
    (agent.branches ?? []).map((branch, i, all) => h("details", { open: i === 0 },
      h("summary", {}, `branch ${i + 1} of ${all.length}, ${branch.length} messages`), branch.map(message))),
  ]);
}

const EXTRA = ["score_status", "scorer", "scorer_version", "has_answer", "parts", "penalties"];

export async function rollout(root, state) {
  const run = state.parameters.run ?? 0;
  const { rollout: record } = await ask("rollout", { run, number: state.parameters.number });
  const [tokensDrawn, tokens] = tokenSection(run, record.number);
  const fact = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
  fill(root, 
    h("h2", {}, `Rollout ${record.number}`),
    h("p", {}, link("group", { run, group: record.group_id }, `group ${record.group_id}`), " · ",
      link("rollouts", { run, step: record.step }, `step ${record.step}`), " · ",
      record.number > 0 && [link("rollout", { run, number: record.number - 1 }, "previous"), " · "],
      link("rollout", { run, number: record.number + 1 }, "next")),
    h("dl", { class: "facts" },
      fact("task", record.task_id ?? "-"), fact("reward", number(record.reward)), fact("correct", yesNo(record.is_correct)),
      record.answer && fact("answer", record.answer), fact("tokens", `${number(record.prompt_tokens)} of prompt, ${number(record.response_tokens)} of response`),
      fact("ended by", record.finish_reason ?? "-"),
      EXTRA.filter((name) => record[name] !== undefined && record[name] !== null).map((name) => {
        const value = record[name];
        return fact(name, typeof value === "object" ? Object.entries(value).map(([key, one]) => `${key} ${number(one)}`).join(", ") || "none" : String(value));
      })),
    h("div", {}, versionStrip(record.version_spans, record.step - 1)),
    record.episode_record
      ? h("div", {}, episode(record.episode_record))
      : h("div", {}, h("h3", {}, "Prompt"), h("div", { class: "text" }, record.prompt ?? ""), h("h3", {}, "Response"), responseText(record)),
    tokens);
  await tokensDrawn;
  return null;
}
