// The text of a rollout token by token, colored by a value, and the worst tokens of a step.

import { ask } from "./api.js";
import { fill, h, link, number, table } from "./dom.js";

// Values that have two sides of 0 (or of 1) have a color for each; the others go from pale to strong.
const VALUES = {
  mismatch: ["the trainer's log-probability minus the generator's, in nats", "signed"],
  ratio: ["importance ratio as the loss uses it; colors follow its logarithm", "ratio"],
  advantage: ["advantage", "signed"],
  entropy: ["entropy of the distribution that the token was drawn from, in nats", "size"],
  version: ["policy version that sampled the token", "range"],
  kept: ["number of tokens that sampling kept; the whole vocabulary is strongest", "kept"],
  disagreement: ["share of the MoE layers, or one layer, in which the trainer's gate would have chosen other experts", "size"],
};
const LEVELS = 4;

// How far a value is from nothing, for its color.
function strength(kind, value) {
  if (value === null) return null;
  if (kind === "ratio") return Math.log(Math.max(value, 1e-9));
  if (kind === "kept") return value === 0 ? Infinity : Math.log(value);
  return value;
}

// Of a text such as "01-": the share of the layers with a record, or one layer.
function disagreement(signs, layer) {
  if (signs === null) return null;
  const known = [...(layer === "all" ? signs : signs[layer])].filter((sign) => sign !== "-");
  return known.length ? known.filter((sign) => sign === "1").length / known.length : null;
}

function expertWords(signs) {
  const others = [...signs].flatMap((sign, layer) => sign === "1" ? [layer] : []);
  const numKnown = [...signs].filter((sign) => sign !== "-").length;
  return `other experts in ${others.length} of ${numKnown} layers with a record${others.length ? `: layer ${others.join(", ")}` : ""}`;
}

// Each token's level, -LEVELS to LEVELS, by the largest value on the page; null where it has none.
function levelsOf(kind, values) {
  const strengths = values.map((value) => strength(kind, value));
  const finite = strengths.filter((value) => value !== null && Number.isFinite(value));
  const low = kind === "range" ? Math.min(...finite) : 0;
  const most = Math.max(...finite.map((value) => Math.abs(value - low)), 0);
  const level = (value) => value === Infinity ? LEVELS : most === 0 ? 0
    : Math.sign(value - low) * Math.ceil(LEVELS * Math.abs(value - low) / most - 1e-9);
  return strengths.map((value) => value === null ? null : level(value));
}

function pieceText(piece) {
  if (typeof piece === "string") return piece;
  if (piece.special !== undefined) return piece.special;
  return `\u27e8${piece.bytes.match(/../g).join(" ")}\u27e9${piece.text}`;
}

// A token with something to see in it: spaces and line breaks by themselves would have no width.
function tokenContent(piece) {
  const text = pieceText(piece);
  return text.replace(/\n/g, "\u21b5\n") || "\u2205";
}

function words(page, index) {
  const piece = page.pieces[index];
  const name = typeof piece === "string" ? JSON.stringify(piece) : piece.special !== undefined
    ? `${piece.special}, which adds no text` : `bytes ${piece.bytes}, which add ${JSON.stringify(piece.text)}`;
  const place = `token ${page.skip + index}: ${name}`;
  if (!page.is_trained[index]) return `${place}; not trained on`;
  const of = (value) => number(page.values[value][index]);
  const rank = page.worst.find(([at]) => at === page.skip + index);
  const signs = page.disagreement[index];
  return [place, rank && `number ${rank[1]} of the step's worst`, `mismatch ${of("mismatch")}`,
    `log-probability ${of("logprob")}, the generator's ${of("behavior")}`, `ratio ${of("ratio")}`, `advantage ${of("advantage")}`,
    `entropy ${of("entropy")}`, `version ${of("version")}`,
    page.values.kept[index] === 0 ? "the whole vocabulary kept" : `${of("kept")} tokens kept`,
    signs !== null && expertWords(signs),
  ].filter(Boolean).join("; ");
}

function legend(kind, values) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return "no token on this page has this value";
  const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  const swatch = (level, text) => h("span", { class: "token", "data-level": level }, text);
  const twoSided = kind === "signed" || kind === "ratio";
  return [`from ${number(low)} to ${number(high)}: `, twoSided && [swatch(-LEVELS, "lowest"), " "],
    swatch(0, twoSided ? (kind === "ratio" ? "1" : "0") : "least"), " ", swatch(LEVELS, twoSided ? "highest" : "most"), "; ",
    h("span", { class: "token", "data-level": "none" }, "no value"), "; ",
    h("span", { class: "token worst", "data-rank": "1" }, "one of the step's worst")];
}

function tokenPanel(page, rollout, draw) {
  const readout = h("p", { class: "readout", role: "status" }, "Move to a token with the mouse, or Tab and the arrow keys.");
  const about = h("p", { class: "small soft" });
  const key = h("p", { class: "small token-legend" });
  const tokens = page.pieces.map((piece, index) => {
    const rank = page.worst.find(([at]) => at === page.skip + index);
    return h("span", { class: rank ? "token worst" : "token", "data-rank": rank && rank[1], "data-index": index, tabindex: -1 }, tokenContent(piece));
  });
  const tell = (token) => { readout.textContent = words(page, Number(token.dataset.index)); };
  const go = (index) => {
    tokens.forEach((token) => { token.tabIndex = -1; });
    tokens[index].tabIndex = 0;
    tokens[index].focus();
  };
  const ranked = page.worst.map(([at]) => at - page.skip);
  const text = h("div", { class: "text tokens", role: "group", "aria-label": "Response, token by token",
    onkeydown: (event) => {
      const here = Number(event.target.dataset?.index);
      if (Number.isNaN(here) || event.ctrlKey || event.altKey || event.metaKey) return;
      const next = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tokens.length - 1,
        w: ranked[(ranked.indexOf(here) + 1) % ranked.length] }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      if (tokens[next]) go(next);
    },
    onfocusin: (event) => event.target.dataset?.index && tell(event.target),
    onmouseover: (event) => event.target.dataset?.index && tell(event.target) }, tokens);
  if (tokens.length) tokens[0].tabIndex = 0;
  const layers = h("select", { onchange: () => paint("disagreement") }, ["all", ...Array(page.num_layers).keys()].map((one) =>
    h("option", { value: one }, one === "all" ? "all" : `layer ${one}`)));
  const layerLabel = h("label", {}, "Layers", layers);
  const names = Object.keys(VALUES).filter((name) => name !== "disagreement" || page.num_layers > 0);
  const buttons = names.map((name) => h("button", { type: "button", onclick: () => paint(name), "data-value": name }, name));
  function paint(name) {
    const [meaning, kind] = VALUES[name];
    const values = name === "disagreement" ? page.disagreement.map((signs) => disagreement(signs, layers.value)) : page.values[name];
    const levels = levelsOf(kind, values);
    tokens.forEach((token, index) => { token.dataset.level = levels[index] === null ? "none" : levels[index]; });
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.value === name)));
    layerLabel.hidden = name !== "disagreement";
    about.textContent = `${name}: ${meaning}`;
    fill(key, legend(kind, values));
  }
  paint("mismatch");
  const end = page.skip + page.pieces.length, size = page.pieces.length;
  const pages = (page.skip > 0 || end < page.num_tokens) && h("p", { class: "small" },
    `tokens ${number(page.skip)} to ${number(end - 1)} of ${number(page.num_tokens)} `,
    page.skip > 0 && h("button", { type: "button", onclick: () => draw(page.branch, Math.max(0, page.skip - page.page_size)) }, "before"), " ",
    end < page.num_tokens && size > 0 && h("button", { type: "button", onclick: () => draw(page.branch, end) }, "after"));
  const branches = page.num_branches > 1 && h("label", {}, "Branch", h("select",
    { onchange: (event) => draw(Number(event.target.value), 0) }, [...Array(page.num_branches).keys()].map((one) =>
      h("option", { value: one, selected: one === page.branch }, `${one + 1} of ${page.num_branches}`))));
  return [h("div", { class: "bar", role: "group", "aria-label": "Value" }, branches, buttons, layerLabel), about, key, pages, readout, text];
}

// The section of a rollout's page.
export function tokenSection(run, rollout) {
  const content = h("div");
  const draw = async (branch, skip) => {
    const page = await ask("tokens", { run, number: rollout, branch, skip });
    if (page.problem !== null) fill(content, h("p", { class: "soft" }, page.problem));
    else if (page.pieces === null) fill(content, h("p", { class: "soft" }, "The run keeps no texts (serving.keep_texts)."));
    else fill(content, tokenPanel(page, rollout, draw));
  };
  return [draw(0, 0), h("section", {}, h("h3", {}, "Response by token"), content)];
}

export function worstTable(answer, run) {
  if (answer.problem !== null) return h("p", { class: "soft" }, answer.problem);
  if (!answer.worst.length) return h("p", { class: "soft" }, "No token of this step has values.");
  const rows = answer.worst.map((one, index) => [
    one.rollout === null ? String(index + 1) : link("rollout", { run, number: one.rollout }, String(index + 1)),
    one.piece === null ? "-" : h("code", { class: "mono" }, pieceText(one.piece) || "\u2205"),
    number(one.mismatch), number(one.logprob), number(one.behavior), number(one.ratio), number(one.advantage), number(one.entropy),
    number(one.version), link("group", { run, group: one.group_id }, String(one.group_id)), number(one.episode), number(one.agent),
    `${number(one.position)}${one.branch ? ` of branch ${one.branch + 1}` : ""}`,
  ]);
  return table(["rank", "token", "mismatch", "log-probability", "generator's", "ratio", "advantage", "entropy", "version", "group", "episode", "agent", "token's place"], rows);
}
