"use strict";
// Draws the charts (Vega-Lite, by vega-embed) and the table of runs; theme and updates of the page.
const page = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement, byId = (id) => document.getElementById(id);
const all = (css, within = document) => [...within.querySelectorAll(css)];
const store = {
  get(key) { try { return JSON.parse(sessionStorage.getItem("gradsurg:" + key)); } catch { return null; } },
  set(key, value) { try { sessionStorage.setItem("gradsurg:" + key, JSON.stringify(value)); } catch { /* private window */ } },
};
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);

// Text goes in as text nodes only: names come from files.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

async function draw(place) {
  const number = place.dataset.chart, key = (name) => `${number}:${name}`;
  const shade = (_, value) => (isDark() && page.dark[value]) || value;
  const spec = JSON.parse(JSON.stringify(page.charts[number]), shade);
  const inputs = (spec.params ?? []).filter((one) => one.bind && !one.select);
  for (const one of inputs) {
    const stored = store.get(key(one.name));
    if (one.bind.options.includes(stored)) one.value = stored; // a choice outlives a reload and a change of theme
  }
  Object.assign(spec.config, { background: null, axisY: { labelLimit: place.clientWidth < 480 ? 110 : 260 } });
  if (root.clientWidth < 480) Object.assign(spec.config.legend, { columns: 1 });
  if (spec.layer || spec.mark) Object.assign(spec, { width: "container", autosize: { type: "fit-x", contains: "padding" } });
  const inner = el("div", { "aria-hidden": "true" });
  place.replaceChildren(inner);
  // The interpreter of expressions works without eval, which the page's policy forbids.
  const options = { mode: "vega-lite", actions: false, renderer: "svg", ast: true, bind: place.previousElementSibling };
  place.previousElementSibling.replaceChildren();
  const { view } = await vegaEmbed(inner, spec, { ...options, tooltip: { theme: isDark() ? "dark" : "light" } });
  for (const one of inputs) view.addSignalListener(one.name, (name, value) => store.set(key(name), value));
}

let queue = Promise.resolve();
function update() {
  root.dataset.drawn = "";
  for (const place of all("[data-chart]")) queue = queue.then(() => draw(place));
  queue = queue.then(() => { root.dataset.drawn = "all"; });
}

// The table of runs: filtered by text, state and arm; sorted by its heads. Missing numbers stay last.
function runs() {
  const { columns, planned, notes, shares } = page.runs, { arms: armNames, common, configs } = page, [names, arms, , states, done] = columns;
  const body = document.querySelector("#runs tbody"), heads = all("#runs thead th"), dialog = byId("config"), MOST = 500;
  const why = (k) => notes.texts[notes.at[k]];
  const number = (column, value) => (value === null ? "\u2013" : shares.includes(column) ? `${(100 * value).toFixed(2)}%` : String(value));
  const searched = names.map((name, k) => `${name} ${armNames[arms[k]]} ${states[k]} ${why(k)}`.toLowerCase());
  const order = names.map((_, k) => k);
  let most = MOST;
  const line = (k) => {
    const cells = columns.map((values, c) => (c === 1 ? armNames[arms[k]] : c === 4 && done[k] !== planned[k] ? `${done[k]} of ${planned[k]}` : number(c, values[k])));
    const row = cells.slice(1).map((text, c) => el("td", { class: c + 1 === 1 || c + 1 === 3 ? "" : "num" }, text));
    row[2].replaceChildren(el("span", { class: `state ${states[k]}` }, states[k]), ...(why(k) ? [el("span", { class: "reason" }, why(k))] : []));
    const show = el("button", { type: "button", "data-run": k, "aria-label": `Show the config of ${names[k]}` }, "Show");
    const link = el("a", { href: `../${encodeURIComponent(names[k])}/config.yaml`, "aria-label": `config.yaml of ${names[k]}` }, "config.yaml");
    return el("tr", {}, el("th", { scope: "row" }, cells[0]), ...row, el("td", { class: "links" }, link, show));
  };
  const fill = () => {
    const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean), state = byId("by-state").value, arm = byId("by-arm").value;
    const shown = order.filter((k) => (!state || states[k] === state) && (!arm || arms[k] === +arm) && words.every((word) => searched[k].includes(word)));
    body.replaceChildren(...shown.slice(0, most).map(line));
    byId("shown").textContent = `${shown.length} of ${names.length} runs${shown.length > most ? `; the first ${most} are shown` : ""}`;
    byId("next").hidden = shown.length <= most;
  };
  const sort = (place, down) => {
    const values = place === 1 ? arms.map((arm) => armNames[arm]) : columns[place], sign = down ? -1 : 1;
    const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
    order.sort((a, b) => (values[a] === null) - (values[b] === null) || (values[a] === null ? 0 : sign * compare(values[a], values[b])));
    for (const other of heads) other.removeAttribute("aria-sort");
    heads[place].setAttribute("aria-sort", down ? "descending" : "ascending");
    store.set("sort", [place, down]);
  };
  heads.slice(0, -1).forEach((head, place) => head.firstChild.addEventListener("click", () => { sort(place, head.getAttribute("aria-sort") === "ascending"); fill(); }));
  for (const id of ["find", "by-state", "by-arm"]) {
    const input = byId(id), stored = store.get(id);
    if (stored && (id === "find" || [...input.options].some((one) => one.value === stored))) input.value = stored;
    input.addEventListener("input", () => { store.set(id, input.value); most = MOST; fill(); });
  }
  byId("next").addEventListener("click", () => { most += MOST; fill(); });
  body.addEventListener("click", (event) => {
    const run = event.target.dataset.run;
    if (run === undefined) return;
    byId("config-name").textContent = `${names[run]}, seed ${columns[2][run]}`;
    dialog.querySelector("pre").textContent = Object.entries({ ...common, ...configs[arms[run]] }).map((pair) => pair.join(": ")).join("\n");
    dialog.showModal();
  });
  byId("config-close").addEventListener("click", () => dialog.close());
  const [place, down] = store.get("sort") ?? [];
  if (heads[place]) sort(place, down);
  fill();
}

function theme() {
  const button = byId("theme"), name = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  const stored = store.get("theme");
  if (stored) root.dataset.theme = stored;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; store.set("theme", root.dataset.theme); name(); update(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); update(); });
  name();
}

// A page from a file cannot ask for changes: in watch mode it reloads, unless someone is using it.
function watch() {
  if (!page.refresh) return;
  const pause = byId("pause"), paused = () => pause.getAttribute("aria-pressed") === "true";
  const set = (on) => { pause.setAttribute("aria-pressed", String(on)); pause.textContent = on ? "Resume updates" : "Pause updates"; store.set("paused", on); };
  pause.hidden = false;
  set(store.get("paused") === true);
  pause.addEventListener("click", () => set(!paused()));
  const busy = () => paused() || document.hidden || byId("config").open || document.activeElement.matches("input, select, summary") || document.querySelector("#vg-tooltip-element.visible");
  history.scrollRestoration = "manual";
  const restore = () => scrollTo({ top: store.get("scroll") ?? 0, behavior: "instant" });
  restore();
  const reached = scrollY;
  // The page grows while its charts are drawn: the old position may be out of reach before, and a reload would lose it.
  queue.then(() => {
    if (scrollY === reached) restore();
    addEventListener("pagehide", () => store.set("scroll", scrollY));
    setInterval(() => { if (!busy()) location.reload(); }, 1000 * page.refresh);
  });
}

theme();
runs();
update();
watch();
