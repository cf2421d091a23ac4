// Which page is shown, keys, and looking for news.

import { ask } from "./api.js";
import { address, h } from "./dom.js";
import { config, faults, glossary } from "./facts.js";
import { group, groups } from "./groups.js";
import { overview } from "./overview.js";
import { processes } from "./processes.js";
import { rollout, rollouts } from "./rollouts.js";

const LOOK_MS = 2000;

const PAGES = { overview, groups, rollouts, processes, faults, config, glossary, group, rollout };
const IN_NAV = ["overview", "groups", "rollouts", "processes", "faults", "config", "glossary"];

const KEYS = [
  ["1 to 7", "the pages, in the order of the navigation"], ["/", "the page's search field"],
  ["j, k", "the next and the previous row, or lane"], ["Enter", "opens the row"],
  ["←, →", "move along a lane or the tokens of a response"], ["w", "the next of the worst tokens, from any token"], ["Backspace", "back"], ["?", "this list"],
];

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const help = document.getElementById("help");
const problem = document.getElementById("problem");

let refresh = null, shownHash = null, isBusy = false, seen = "";

function where() {
  const [page, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: page in PAGES ? page : "overview", parameters: Object.fromEntries(new URLSearchParams(query)) };
}

function say(error) {
  problem.hidden = error === null;
  problem.textContent = error === null ? "" : error.message;
}

function drawNav(page) {
  const current = { group: "groups", rollout: "rollouts" }[page] ?? page;
  nav.replaceChildren(...IN_NAV.map((name) =>
    h("a", { href: address(name), "aria-current": name === current ? "page" : null }, name)));
}

async function show() {
  const hash = location.hash;
  const { page, parameters } = where();
  drawNav(page);
  main.setAttribute("aria-busy", "true");
  try {
    const status = await ask("runs");
    const state = { page, parameters, status };
    const root = h("div");
    // In the page before it is filled: lanes take the width that they find.
    main.replaceChildren(root);
    const newer = await PAGES[page](root, state, (changed) => { location.hash = address(page, changed); });
    if (location.hash !== hash) return;
    refresh = newer && ((news) => { Object.assign(state.status, news); return newer(); });
    say(null);
    if (shownHash !== null && shownHash.split("?")[0] !== hash.split("?")[0]) main.focus();
    shownHash = hash;
    document.title = `${page} · forgeasync runs`;
  } catch (error) {
    if (location.hash === hash) say(error);
  } finally {
    if (location.hash === hash) main.setAttribute("aria-busy", "false");
  }
}

// What has changed since the last look; times that pass by themselves do not count.
const news = (status) => JSON.stringify(status.runs.map((run) => [run.step, run.life, run.groups, run.num_faults, run.num_open_faults, run.progress]));

async function look() {
  if (isBusy || document.hidden) return;
  isBusy = true;
  try {
    const status = await ask("runs");
    const now = news(status);
    if (problem.hidden === false) await show();
    else if (now !== seen && refresh) await keepingFocus(() => refresh(status));
    seen = now;
  } catch (error) {
    say(error);
  } finally {
    isBusy = false;
  }
}

// What is drawn anew keeps the focus on the link that had it.
async function keepingFocus(draw) {
  const href = document.activeElement.getAttribute("href");
  await draw();
  if (href === null || document.activeElement !== document.body) return;
  [...main.querySelectorAll("a")].find((one) => one.getAttribute("href") === href)?.focus();
}

function move(way) {
  const stops = [...main.querySelectorAll("tr.row a:first-of-type, .lane[tabindex]")].filter((one) => one.tagName !== "A" || one.closest("td")?.cellIndex === 0);
  if (!stops.length) return;
  const next = stops.indexOf(document.activeElement) + way;
  stops[Math.min(stops.length - 1, Math.max(0, next))].focus();
}

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (isTyping) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const index = Number(event.key) - 1;
  if (Number.isInteger(index) && IN_NAV[index]) location.hash = address(IN_NAV[index]);
  else if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "Backspace") history.back();
  else if (event.key === "?") help.showModal();
  else if (event.key === "/") {
    const search = document.getElementById("search");
    if (!search) return;
    event.preventDefault();
    search.focus();
  }
});

document.getElementById("help-button").addEventListener("click", () => help.showModal());
document.getElementById("help-keys").append(...KEYS.flatMap(([key, words]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, words)]));
window.addEventListener("hashchange", show);
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) show();
  width = window.innerWidth;
});
show();
setInterval(look, LOOK_MS);
