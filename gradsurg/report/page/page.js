"use strict";
// Draws the charts (Vega-Lite, by vega-embed) and the table of runs; theme of the page.
const page = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement, byId = (id) => document.getElementById(id);
const all = (css) => [...document.querySelectorAll(css)];
const store = {
  get(key) { try { return JSON.parse(sessionStorage.getItem("gradsurg:" + key)); } catch { return null; } },
  set(key, value) { try { sessionStorage.setItem("gradsurg:" + key, JSON.stringify(value)); } catch { /* a private window */ } },
};
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

// Text goes in as text nodes only: names come from files.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

async function draw(place) {
  const number = place.dataset.chart, inputs = place.previousElementSibling, inner = el("div", { "aria-hidden": "true" });
  const spec = JSON.parse(JSON.stringify(page.charts[number]), (_, value) => (isDark() && page.dark[value]) || value);
  const bound = (spec.params ?? []).filter((one) => one.bind?.options);
  for (const one of bound) { // a choice outlives a reload and a change of the theme
    const stored = store.get(`${number}:${one.name}`);
    if (one.bind.options.includes(stored)) one.value = stored;
  }
  Object.assign(spec.config, { background: null, axisY: { labelLimit: place.clientWidth < 480 ? 110 : 260 } });
  if (place.clientWidth < 480) spec.config.legend.columns = 1;
  place.replaceChildren(inner);
  inputs.replaceChildren();
  // Vega-Lite warns of a fitted width beside rows of one height, which Vega itself can draw.
  const fit = { autosize: { type: "fit-x", contains: "padding" }, width: place.clientWidth };
  const patch = (vega) => (spec.layer || spec.mark ? { ...vega, ...fit } : vega);
  // The interpreter of expressions works without eval, which the page's policy forbids.
  const options = { mode: "vega-lite", actions: false, renderer: "svg", ast: true, bind: inputs, patch };
  const { view } = await vegaEmbed(inner, spec, { ...options, tooltip: { theme: isDark() ? "dark" : "light" } });
  for (const one of bound) view.addSignalListener(one.name, (name, value) => store.set(`${number}:${name}`, value));
}

let queue = Promise.resolve();
function update() {
  byId("theme").textContent = isDark() ? "Light theme" : "Dark theme";
  root.dataset.drawn = "";
  for (const place of all("[data-chart]")) queue = queue.then(() => draw(place));
  queue = queue.then(() => { root.dataset.drawn = "all"; });
}

function theme() {
  if (store.get("theme")) root.dataset.theme = store.get("theme");
  byId("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; store.set("theme", root.dataset.theme); update(); });
  prefersDark.addEventListener("change", update);
  let width = innerWidth, timer = 0;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; clearTimeout(timer); timer = setTimeout(update, 200); } });
}

// The table of runs: filtered by text, state and arm; sorted by its heads. Missing numbers stay last.
const { arms, common, configs } = page, { columns, planned, notes, shares, states } = page.runs, [names, homes, seeds, at, done] = columns;
const MOST = 500;
const order = names.map((_, run) => run), heads = all("#runs thead th"), choices = ["find", "by-state", "by-arm"];
let most = MOST;

// A number with so many digits, also those that are 0.
const digits = (value, many) => (value === 0 ? "0" : value.toFixed(Math.min(20, Math.max(0, many - 1 - Math.floor(Math.log10(Math.abs(value)))))));

function cell(column, run) {
  const value = columns[column][run];
  if (column === 1) return arms[value];
  if (column === 3) return states[value];
  if (column === 4 && value !== planned[run]) return `${value} of ${planned[run]}`;
  if (value === null) return "\u2013";
  if (shares.includes(column)) return `${(100 * value).toFixed(2)}%`;
  return column < 5 ? String(value) : digits(value, column === columns.length - 1 ? 2 : 4);
}

// A narrow window has the name, the arm, the state and the first outcome.
const kind = (column) => `${column > 3 || column === 2 ? "num" : ""} ${[0, 1, 3, 5].includes(column) ? "" : "more"}`;

function row(run) {
  const name = names[run], note = el("span", { class: "reason" }, notes.texts[notes.at[run]]);
  const [, ...cells] = columns.map((_, k) => el("td", { class: kind(k), "data-head": heads[k].textContent }, cell(k, run)));
  cells[2].replaceChildren(el("span", { class: states[at[run]] }, states[at[run]]), note);
  const link = el("a", { href: `../${encodeURIComponent(name)}/config.yaml`, "aria-label": `config.yaml of ${name}` }, "config.yaml");
  const button = el("button", { type: "button", "data-run": run, "aria-label": `Show the config of ${name}` }, "Show");
  return el("tr", {}, el("th", { scope: "row" }, name), ...cells, el("td", { class: "links" }, ...(configs[homes[run]] ? [link, button] : ["\u2013"])));
}

function fill() {
  const [find, state, arm] = choices.map((id) => byId(id).value), words = find.toLowerCase().split(/\s+/);
  const searched = (run) => `${names[run]} ${arms[homes[run]]} ${states[at[run]]} ${notes.texts[notes.at[run]]}`.toLowerCase();
  const shown = order.filter((run) => (!state || states[at[run]] === state) && (!arm || homes[run] === +arm) && words.every((word) => searched(run).includes(word)));
  document.querySelector("#runs tbody").replaceChildren(...shown.slice(0, most).map(row));
  byId("shown").textContent = `${shown.length} of ${names.length} runs${shown.length > most ? `; the first ${most} are shown` : ""}`;
  byId("next").hidden = shown.length <= most;
}

function sort(column, down) {
  const text = column < 2 || column === 3, key = (run) => (text ? cell(column, run) : columns[column][run]);
  const compare = (a, b) => (text ? a.localeCompare(b, "en", { numeric: true }) : a - b) * (down ? -1 : 1);
  order.sort((a, b) => (key(a) === null) - (key(b) === null) || compare(key(a), key(b)));
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  store.set("sort", [column, down]);
}

function showConfig(run) {
  byId("config-name").textContent = `${names[run]}, seed ${seeds[run]}`;
  byId("config-text").textContent = Object.entries({ ...common, ...configs[homes[run]] }).map((pair) => pair.join(": ")).join("\n");
  byId("config").showModal();
}

function runs() {
  byId("by-arm").append(...arms.map((name, place) => el("option", { value: place }, name)));
  byId("by-state").append(...states.map((name) => el("option", {}, name)));
  for (const input of choices.map(byId)) {
    const stored = store.get(input.id);
    if (stored && (!input.options || [...input.options].some((one) => one.value === stored))) input.value = stored;
    for (const event of ["input", "change"]) input.addEventListener(event, () => { store.set(input.id, input.value); most = MOST; fill(); });
  }
  for (const [column, head] of heads.slice(0, -1).entries()) {
    head.className = kind(column);
    head.firstChild.addEventListener("click", () => { sort(column, head.getAttribute("aria-sort") === "ascending"); fill(); });
  }
  byId("next").addEventListener("click", () => { most += MOST; fill(); });
  byId("runs").addEventListener("click", ({ target }) => { if (target.dataset.run) showConfig(+target.dataset.run); });
  byId("config-close").addEventListener("click", () => byId("config").close());
  const [column, down] = store.get("sort") ?? [];
  if (heads[column + 1]) sort(column, down);
  fill();
}

theme();
runs();
update();
