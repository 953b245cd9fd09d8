"use strict";
// What all charts are made of. Text goes in as text nodes only: names come from files.
const data = JSON.parse(document.getElementById("data").textContent);
const place = (name) => document.querySelector(`[data-place="${name}"]`);
const store = {
  get(key) { try { return sessionStorage.getItem("gradsurg:" + key); } catch { return null; } },
  set(key, value) { try { sessionStorage.setItem("gradsurg:" + key, value); } catch { /* a private window keeps nothing */ } },
};

function node(space, tag, attributes, children) {
  const made = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}
const el = (tag, attributes, ...children) => node(null, tag, attributes, children);
const svg = (tag, attributes, ...children) => node("http://www.w3.org/2000/svg", tag, attributes, children);

const scale = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);

function ticks(low, high, count) {
  const rough = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= high; power++) if (power >= low - 1e-9) found.push(power);
  if (found.length >= 2) return found.filter((_, k) => k % Math.ceil(found.length / 6) === 0);
  const between = [-1, 0].flatMap((shift) => [1, 2, 5].map((k) => Math.floor(high) + shift + Math.log10(k))).filter((tick) => tick >= low && tick <= high);
  return between.length >= 2 ? between : ticks(low, high, 3);
}

function short(value, share) {
  if (value === null || value === undefined) return "–";
  if (share) return `${+(100 * value).toPrecision(4)}%`.replace("-", "−");
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(1).replace("e+", "e") : String(+value.toPrecision(3));
  return text.replace("-", "−");
}

// A line that is broken where a number is missing.
function line(xs, ys) {
  let path = "", down = false;
  xs.forEach((x, k) => {
    if (ys[k] === null || !Number.isFinite(ys[k])) { down = false; return; }
    path += `${down ? "L" : "M"}${x.toFixed(1)} ${ys[k].toFixed(1)}`;
    down = true;
  });
  return path;
}

// Numbers with none on either side: a line does not show them.
function lone(xs, ys, attributes) {
  const there = (k) => Number.isFinite(ys[k] ?? NaN);
  return xs.flatMap((x, k) => (there(k) && !there(k - 1) && !there(k + 1) ? [svg("circle", { ...attributes, cx: x.toFixed(1), cy: ys[k].toFixed(1) })] : []));
}

function band(xs, low, high) {
  const there = xs.map((_, k) => k).filter((k) => low[k] !== null && high[k] !== null && Number.isFinite(low[k] + high[k]));
  if (there.length < 2) return "";
  const up = there.map((k) => `${xs[k].toFixed(1)} ${high[k].toFixed(1)}`);
  const back = there.reverse().map((k) => `${xs[k].toFixed(1)} ${low[k].toFixed(1)}`);
  return `M${up.join("L")}L${back.join("L")}Z`;
}

const tip = document.getElementById("tip");
function showTip(text, x, y) {
  if (tip.textContent !== text) tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(6, y + 14 + box.height > innerHeight ? y - box.height - 10 : y + 14)}px`;
}
const hideTip = () => { tip.hidden = true; };

// Radio buttons in a row; what was chosen outlives a reload.
function choice(name, legend, options, change) {
  const kept = store.get(name);
  const first = options.some((option) => option.key === kept) ? kept : options[0].key;
  const box = el("fieldset", {}, el("legend", {}, legend), options.map((option) => el("label", {},
    el("input", { type: "radio", name, value: option.key, checked: option.key === first, onchange() { store.set(name, option.key); change(option.key); } }),
    el("span", {}, option.title))));
  return { box, value: first };
}

function table(caption, heads, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, el("table", {},
    el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows)));
}
const head = (text, cls) => el("th", { scope: "col", class: cls }, text);
const cell = (text, cls) => el("td", { class: cls }, text);
const runsOf = (n) => `${n} run${n === 1 ? "" : "s"}`;
const ofPlanned = (n, planned) => (n === planned ? `${n}` : `${n} of ${planned}`);
