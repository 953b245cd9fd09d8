// How tasks conflict: a row for each arm, and by a slider its map, its weights, what others would do.
const VW = 400, VH = 210, VLEFT = 52, VBOTTOM = 26;
const pairName = (one, [a, b]) => `${one.tasks[a]} ~ ${one.tasks[b]}`;

// Blue where gradients agree, orange where they conflict; one scale for all arms.
function cosineColours() {
  const sizes = data.conflicts.flatMap((one) => one.cosines.flat()).filter((v) => v !== null).map(Math.abs);
  const reach = Math.min(1, Math.max(0.2, Math.ceil(10 * Math.max(0, ...sizes)) / 10));
  return { ramp: [...TURN].reverse(), ends: [-reach, 0, reach].map((v) => short(v)), of: (v) => mix(TURN, 0.5 - v / (2 * reach)) };
}

function conflictMap(one) {
  const names = one.pairs.map((pair) => pairName(one, pair)), longest = Math.max(...names.map((name) => name.length));
  const left = Math.min(300, 12 + 6.3 * longest), W = 900, h = names.length > 15 ? 15 : 22, H = names.length * h + 26, count = one.ends.length, w = (W - left) / count, colour = cosineColours();
  const cut = (name) => (name.length > 46 ? name.slice(0, 45) + "…" : name);
  const label = `Cosine of the gradients of two tasks, ${names.length} pairs by ${count} intervals of steps; means over the whole training: ` + names.slice(0, 12).map((name, k) => `${name} ${short(one.overall[k])}`).join(", ");
  const art = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label });
  names.forEach((name, row) => {
    art.append(svg("text", { class: "name", x: left - 8, y: row * h + h / 2 + 4, "text-anchor": "end" }, cut(name)));
    one.cosines[row].forEach((value, k) => art.append(svg("rect", { x: (left + k * w).toFixed(2), y: row * h, width: (w + 0.3).toFixed(2), height: h - 1, fill: value === null ? "var(--none)" : colour.of(value), "data-at": `${row},${k}` })));
  });
  const every = Math.ceil(count / 8);
  one.ends.forEach((step, k) => { if (k + 1 === count || ((k + 1) % every === 0 && k + 1 + every / 2 < count)) art.append(svg("text", { x: left + (k + 1) * w, y: H - 8, "text-anchor": k + 1 === count ? "end" : "middle" }, k + 1 === count ? `step ${step}` : String(step))); });
  art.addEventListener("pointermove", (event) => {
    const at = event.target.dataset && event.target.dataset.at;
    if (!at) { hideTip(); return; }
    const [row, k] = at.split(",").map(Number);
    showTip(`${names[row]}\nup to step ${one.ends[k]}\ncosine ${short(one.cosines[row][k])}, n = ${runsOf(one.n)}`, event.clientX, event.clientY);
  });
  art.addEventListener("pointerleave", hideTip);
  const more = one.of > names.length ? `; of ${one.of} pairs those that conflict most` : "";
  const legend = el("div", { class: "legend" }, el("span", {}, colour.ends[0]), el("span", { class: "ramp", style: `background: linear-gradient(90deg, ${colour.ramp.join(", ")})`, role: "img", "aria-label": `Colours from ${colour.ends[0]} to ${colour.ends[2]}` }), el("span", {}, colour.ends[2]), el("span", {}, `cosine of the gradients of two tasks${more}`));
  return [el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Conflict map" }, el("div", { style: "min-width: 34rem" }, art)), legend];
}

// A line for each task with its interval; the arrow keys read the steps.
function taskPanel(one, lines, title) {
  const tasks = one.shown.map((task) => one.tasks[task]), some = lines.mean.flat().filter((v) => v !== null);
  let [low, high] = [Math.min(0, ...some), Math.max(0, ...some)];
  const room = (high - low || 1) / 4, ends = [...lines.low.flat(), ...lines.high.flat()].filter((v) => v !== null && v > low - room && v < high + room);
  [low, high] = [Math.min(low, ...ends), Math.max(high, ...ends)];
  if (high === low) high = low + 1;
  const last = one.ends.at(-1), first = Math.min(one.ends[0], last - 1), x = scale(first, last, VLEFT, VW - 6), yy = scale(low, high, VH - VBOTTOM, 8), y = (v) => (v === null ? null : Math.max(2, Math.min(VH - VBOTTOM + 2, yy(v)))), xs = one.ends.map(x);
  const end = tasks.map((task, k) => `${task} ${short(lines.mean[k].findLast((v) => v !== null) ?? null)}`).join(", ");
  const art = svg("svg", { viewBox: `0 0 ${VW} ${VH}`, "aria-hidden": "true" },
    ticks(low, high, 4).map((tick) => [svg("line", { class: Math.abs(tick) < 1e-12 ? "zero" : "gridline", x1: VLEFT, x2: VW, y1: yy(tick), y2: yy(tick) }), svg("text", { x: VLEFT - 6, y: yy(tick) + 4, "text-anchor": "end" }, short(Math.abs(tick) < 1e-12 ? 0 : tick))]),
    ticks(first, last, 4).filter(Number.isInteger).map((tick) => svg("text", { x: x(tick), y: VH - 8, "text-anchor": "middle" }, String(tick))));
  tasks.forEach((_, k) => art.append(svg("path", { class: `taskband t${k}`, d: band(xs, lines.low[k].map(y), lines.high[k].map(y)) })));
  tasks.forEach((_, k) => art.append(svg("path", { class: `task t${k}`, d: line(xs, lines.mean[k].map(y)) }), ...lone(xs, lines.mean[k].map(y), { class: `taskdot t${k}`, r: 3.5 })));
  const cursor = svg("line", { class: "cursor", y1: 4, y2: VH - VBOTTOM, visibility: "hidden" });
  art.append(cursor);
  let at = one.ends.length - 1;
  const point = (k, clientX, clientY) => {
    at = Math.max(0, Math.min(one.ends.length - 1, k));
    cursor.setAttribute("x1", xs[at]); cursor.setAttribute("x2", xs[at]); cursor.setAttribute("visibility", "visible");
    const box = art.getBoundingClientRect(), between = (j) => (lines.low[j][at] === null ? "" : ` (${short(lines.low[j][at])} to ${short(lines.high[j][at])})`);
    showTip([`${title}, up to step ${one.ends[at]}`, ...tasks.map((task, j) => `${task} ${short(lines.mean[j][at])}${between(j)}`), `n = ${runsOf(one.n)}`].join("\n"), clientX ?? box.left + (xs[at] / VW) * box.width, clientY ?? box.top + 20);
  };
  const leave = () => { cursor.setAttribute("visibility", "hidden"); hideTip(); };
  return el("figure", {}, el("figcaption", {}, el("b", {}, title), ` · ${one.name}, n = ${one.n}`), el("div", { class: "panel", tabindex: "0", role: "img", "aria-label": `${title} of ${one.name} over steps, at the end: ${end}. Arrow keys read the steps.`, onpointerleave: leave, onblur: leave,
    onpointermove(event) {
      const box = art.getBoundingClientRect(), wanted = ((event.clientX - box.left) / box.width) * VW;
      let best = 0;
      xs.forEach((v, k) => { if (Math.abs(v - wanted) < Math.abs(xs[best] - wanted)) best = k; });
      point(best, event.clientX, event.clientY);
    },
    onkeydown(event) {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (event.key === "Escape") leave();
      if (move) { event.preventDefault(); point(at + move); }
    } }, art));
}

const taskKey = (one) => el("p", { class: "key" }, one.shown.map((task, k) => el("span", {}, el("i", { class: `t${k}` }), one.tasks[task])), one.shown.length < one.tasks.length && el("span", {}, `the ${one.shown.length} of ${one.tasks.length} tasks that gain least and most`));

function perTask(one) {
  const { norm, weight, decrease, lost } = one.perTask;
  return el("div", {}, table("Tasks", [head("task"), head("norm", "num"), head("weight", "num"), head("decrease", "num"), head("would have lost", "num")],
    one.tasks.map((task, k) => el("tr", {}, el("th", { scope: "row" }, task), [norm[k], weight[k], decrease[k]].map((v) => cell(short(v), "num")), cell(short(lost[k], true), "num")))), el("p", { class: "how" }, `${one.about}.`));
}

function others(one) {
  if (!one.others.length) return null;
  const tasks = one.tasks.length <= 8 ? one.tasks : [];
  return el("div", {}, el("h3", {}, "What the others would have done"), el("p", { class: "how" }, `From the same gradients, each at its first step: the cosine of its update to that of ${one.name}${tasks.length ? ", and its weight of each task" : ""}. Means over steps and runs.${one.others.some(([name]) => name.includes("*")) ? " *: at some of these steps alone." : ""}`),
    table("What the others would have done", [head("aggregator"), head("cosine", "num"), ...tasks.map((task) => head(task, "num"))],
      one.others.map(([name, cosine, weights]) => el("tr", {}, el("th", { scope: "row" }, name), cell(short(cosine), "num"), tasks.map((_, k) => cell(short(weights[k]), "num"))))));
}

function overviewOfConflicts() {
  const shown = data.conflicts.filter((one) => one.first);
  const several = shown.length < data.conflicts.length && el("p", { class: "how" }, "Of several groups the one with the sharpest conflict is shown; most often lost is of all.");
  return el("div", {}, table("Conflict of each arm", [head("arm"), head("n", "num"), head("conflict rate", "num"), head("sharpest pair", "word"), head("cosine", "num"), head("norm spread", "num"), head("norm to mean", "num"), head("most often lost", "word")],
    shown.map((one) => el("tr", {}, el("th", { scope: "row" }, one.name), cell(one.n, "num"), cell(short(one.single.conflict_rate, true), "num"), cell(one.sharpest ? pairName(one, one.sharpest) : "–", "word"), cell(short(one.sharpest && one.sharpest[2]), "num"), cell(short(one.single.norm_spread), "num"), cell(short(one.single.norm_to_mean), "num"), cell(one.lost, "word")))), several);
}

function conflicts() {
  if (!data.conflicts.length) return;
  document.getElementById("conflicts").hidden = false;
  if (data.maps.every((map) => map.transform === "none")) document.getElementById("effects").hidden = true;
  const last = data.conflicts.length - 1, out = el("output", { id: "conflict-name", for: "conflict" }), art = el("div");
  const draw = () => {
    const one = data.conflicts[slider.value], name = `${one.name}, n = ${runsOf(one.n)}, ${one.measured}`;
    slider.setAttribute("aria-valuetext", name);
    out.textContent = name;
    const panels = [one.weights && taskPanel(one, one.weights, "Weight"), taskPanel(one, one.decrease, "Decrease")];
    art.replaceChildren(...[...conflictMap(one), !one.weights && el("p", { class: "muted" }, `${one.name} has no weights: it does not sum gradients as wholes.`), taskKey(one), el("div", { class: "panels" }, panels), perTask(one), data.arms[one.arm].isControl ? null : others(one)].filter(Boolean));
  };
  const slider = el("input", { type: "range", id: "conflict", min: 0, max: last, step: 1, value: Math.min(last, Number(store.get("conflict") || 0)), oninput() { store.set("conflict", slider.value); draw(); } });
  place("conflicts").append(overviewOfConflicts(), el("div", { class: "slider" }, el("label", { for: "conflict" }, data.conflicts.every((one) => one.first) ? "Arm" : "Arm and group"), slider, out), art);
  draw();
}
