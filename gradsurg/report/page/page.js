"use strict";
// Glue between the page's inputs, its charts (Vega-Lite, drawn by vega-embed) and its tables.
const page = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement, all = (css, within = document) => [...within.querySelectorAll(css)];
const store = {
  get(key) { try { return sessionStorage.getItem("gradsurg:" + key); } catch { return null; } },
  set(key, value) { try { sessionStorage.setItem("gradsurg:" + key, value); } catch { /* a private window stores nothing */ } },
};
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);

// Text goes in as text nodes only: names come from files.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function short(value) {
  if (value === null || value === undefined) return "\u2013";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  return (size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(+value.toPrecision(4))).replace("-", "\u2212");
}

// Rows of a table that is written as columns, or as matrices (see Grid in charts.py).
function rows(table) {
  const names = Object.keys(table.labels ?? table), columns = table.labels ?? table;
  const lines = columns[names[0]].map((_, k) => Object.fromEntries(names.map((name) => [name, columns[name][k]])));
  if (!table.labels) return lines;
  return lines.flatMap((line, k) => table.steps.map((step, j) => ({ ...line, step, ...Object.fromEntries(Object.entries(table.values).map(([name, matrix]) => [name, matrix[k][j]])) })));
}

function tableOf(table, columns) {
  const lines = rows(table), names = columns ?? Object.keys(lines[0] ?? {});
  const cls = (name) => (lines.every((line) => line[name] === null || typeof line[name] === "number") ? "num" : "");
  return el("table", {}, el("thead", {}, el("tr", {}, ...names.map((name) => el("th", { scope: "col", class: cls(name) }, name)))),
    el("tbody", {}, ...lines.map((line) => el("tr", {}, ...names.map((name, k) => (k ? el("td", { class: cls(name) }, short(line[name])) : el("th", { scope: "row" }, short(line[name]))))))));
}

// What is chosen: the value of each input, by its name. A key such as "effect|{map}" is filled with it.
const choices = {};
const fill = (key) => key.replace(/\{(\w+)\}/g, (_, name) => choices[name]);
const chartOf = (key) => { const chart = page.charts[key]; return chart && chart.like ? { ...page.charts[chart.like], ...chart } : chart; };

// The chart of all arms with those that are checked.
function onlyArms(chart) {
  if (!chart?.data.curves && chart?.data.curves !== 0) return chart;
  const off = new Set(all("[data-arm]").filter((box) => !box.checked).map((box) => box.value)), arms = chart.limits.arms;
  const left = (items) => items.filter((_, k) => !off.has(arms[k]));
  return { ...chart, off, limits: { ...chart.limits, arms: left(arms), colours: left(chart.limits.colours), dashes: left(chart.limits.dashes) } };
}

async function draw(place) {
  const key = fill(place.dataset.chart), chart = onlyArms(chartOf(key)), drawn = `${key} ${isDark()} ${chart?.limits.arms}`;
  if (place.dataset.drawn === drawn) return;
  place.closest("figure").hidden = !chart;
  if (!chart || !place.offsetParent) return;
  place.dataset.drawn = drawn;
  place.setAttribute("aria-label", chart.summary);
  place.style.minHeight = `${chart.height + 44}px`;
  const caption = place.closest("figure").querySelector("figcaption");
  caption.textContent = chart.title;
  const shade = (value) => (isDark() && page.dark[value]) || value;
  const limit = (value) => (Array.isArray(value) ? value.map(shade) : value);
  const spec = JSON.parse(JSON.stringify({ config: page.config, ...page.views[chart.view] }), (_, value) =>
    (value && value.expr in chart.limits ? limit(chart.limits[value.expr]) : shade(value)));
  if (place.clientWidth < 480) spec.config.axis.labelLimit = 110;
  if (root.clientWidth < 480) spec.config.axisX = { titleAnchor: "end" }; // a long title in the middle would leave the page
  const datasets = Object.fromEntries(Object.entries(chart.data).map(([name, k]) => [name, rows(page.tables[k]).filter((row) => !chart.off?.has(row.arm))]));
  Object.assign(spec, { datasets, width: "container", height: chart.height, background: null, padding: 2, autosize: { type: "fit-x", contains: "padding" } });
  const inner = el("div", { "aria-hidden": "true" });
  place.replaceChildren(inner);
  // The interpreter of expressions works without eval, which the page's policy forbids.
  await window.vegaEmbed(inner, spec, { mode: "vega-lite", actions: false, renderer: "svg", ast: true, tooltip: { theme: isDark() ? "dark" : "light" } });
}

let queue = Promise.resolve();
function update() {
  root.dataset.drawn = "";
  for (const part of all("[data-when]")) part.hidden = choices[part.dataset.when] !== part.dataset.is;
  for (const place of all("[data-text]")) {
    place.textContent = page.texts[fill(place.dataset.text)] ?? "";
    if (place.id) all(`input[data-names="${place.id}"]`).forEach((input) => input.setAttribute("aria-valuetext", place.textContent));
  }
  for (const place of all("[data-table]")) {
    const found = page.shown[fill(place.dataset.table)];
    place.hidden = !found;
    place.querySelector(".scroll").replaceChildren(...(found === undefined ? [] : [tableOf(page.tables[found])]));
  }
  for (const details of all("details.numbers")) numbers(details);
  for (const place of all("[data-chart]")) queue = queue.then(() => draw(place));
  queue = queue.then(() => { root.dataset.drawn = "all"; });
}

// The numbers of a chart as a table, made when it is opened.
function numbers(details) {
  const key = fill(details.dataset.of), chart = chartOf(key);
  if (!details.open || !chart) return;
  const [table, columns] = chart.numbers;
  details.querySelector(".scroll").replaceChildren(tableOf(page.tables[table], columns));
}

function read(input) {
  if (input.type === "checkbox") choices[input.name] = input.checked ? input.value : input.dataset.off;
  else if (input.type !== "radio" || input.checked) choices[input.name] = input.value;
}

function inputs() {
  for (const input of all("[data-choice]")) {
    const stored = store.get(input.name);
    if (stored !== null && input.type === "radio") input.checked = stored === input.value || (input.checked && !all(`[name="${input.name}"]`).some((one) => one.value === stored));
    else if (stored !== null && input.type === "checkbox") input.checked = stored === input.value;
    else if (stored !== null && (input.tagName !== "SELECT" || [...input.options].some((one) => one.value === stored))) input.value = stored;
    read(input);
    input.addEventListener("input", () => { read(input); store.set(input.name, choices[input.name]); update(); });
  }
  for (const box of all("[data-arm]")) box.addEventListener("change", update);
  for (const details of all("details.numbers")) details.addEventListener("toggle", () => numbers(details));
}

// The table of runs: filtered by text, state and arm; sorted by its heads. Missing numbers stay last.
function runs() {
  const body = document.querySelector("#runs tbody"), lines = all("tr", body), text = (id) => document.getElementById(id).value;
  const searched = new Map(lines.map((line) => [line, `${line.textContent} ${page.configs[line.dataset.run] ?? ""}`.toLowerCase()]));
  const filter = () => {
    const words = text("find").toLowerCase().split(/\s+/).filter(Boolean);
    const shown = lines.filter((line) => {
      line.hidden = !((!text("by-state") || line.dataset.state === text("by-state")) && (!text("by-arm") || line.dataset.arm === text("by-arm")) && words.every((word) => searched.get(line).includes(word)));
      return !line.hidden;
    });
    document.getElementById("shown").textContent = `${shown.length} of ${lines.length} runs`;
  };
  for (const id of ["find", "by-state", "by-arm"]) {
    const input = document.getElementById(id), stored = store.get(id);
    if (stored && (id === "find" || [...input.options].some((one) => one.value === stored))) input.value = stored;
    for (const event of ["input", "change"]) input.addEventListener(event, () => { store.set(id, input.value); filter(); });
  }
  const sort = (head, down) => {
    const place = [...head.parentNode.children].indexOf(head), value = (line) => line.children[place].dataset.value ?? line.children[place].textContent;
    const missing = (line) => value(line) === "", number = head.classList.contains("num");
    const order = (a, b) => missing(a) - missing(b) || (down ? -1 : 1) * (number ? value(a) - value(b) : value(a).localeCompare(value(b), "en", { numeric: true }));
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...lines.sort(order));
    store.set("sort", `${place},${down ? 1 : 0}`);
  };
  for (const button of all("#runs th button")) {
    const head = button.closest("th");
    button.addEventListener("click", () => sort(head, head.getAttribute("aria-sort") === "ascending"));
  }
  const [place, down] = (store.get("sort") ?? "").split(",").map(Number), heads = all("#runs thead th");
  if (store.get("sort") && heads[place]) sort(heads[place], down === 1);
  filter();
  const dialog = document.getElementById("config");
  body.addEventListener("click", (event) => {
    if (!event.target.matches("button")) return;
    const run = event.target.closest("tr").dataset.run;
    document.getElementById("config-name").textContent = run;
    dialog.querySelector("pre").textContent = page.configs[run];
    dialog.showModal();
  });
  document.getElementById("config-close").addEventListener("click", () => dialog.close());
}

function theme() {
  const button = document.getElementById("theme"), name = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  const stored = store.get("theme");
  if (stored === "dark" || stored === "light") root.dataset.theme = stored;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; store.set("theme", root.dataset.theme); name(); update(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); update(); });
  name();
}

// A page from a file cannot ask for changes: in watch mode it reloads, unless someone is using it.
function watch() {
  if (!page.refresh) return;
  const pause = document.getElementById("pause"), paused = () => pause.getAttribute("aria-pressed") === "true";
  const set = (on) => { pause.setAttribute("aria-pressed", String(on)); pause.textContent = on ? "Resume updates" : "Pause updates"; store.set("paused", on ? "1" : "0"); };
  pause.hidden = false;
  set(store.get("paused") === "1");
  pause.addEventListener("click", () => set(!paused()));
  const busy = () => paused() || document.hidden || document.getElementById("config").open || document.activeElement.matches("input, select, summary") || document.querySelector("#vg-tooltip-element.visible");
  history.scrollRestoration = "manual";
  const scroll = Number(store.get("scroll")), restore = () => scrollTo({ top: scroll, behavior: "instant" });
  restore();
  const reached = scrollY;
  // The page grows while its charts are drawn: the old position may be out of reach before, and a reload would lose it.
  queue.then(() => {
    if (scrollY === reached) restore();
    addEventListener("pagehide", () => store.set("scroll", String(scrollY)));
    setInterval(() => { if (!busy()) location.reload(); }, 1000 * page.refresh);
  });
}

theme();
inputs();
runs();
update();
watch();
