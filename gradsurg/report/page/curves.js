// Learning curves: a panel for each arm, its control behind it, one scale for all.
const CW = 400, CH = 210, CLEFT = 52, CBOTTOM = 26;

function drawCurves(key) {
  const metric = data.curveMetrics.find((one) => one.key === key), log = document.getElementById("log").checked;
  const own = data.curves.filter((curve) => curve.metric === key), byArm = new Map(own.map((curve) => [curve.arm, curve]));
  const alone = !data.arms.some((arm, k) => !arm.isControl && byArm.has(k));
  const shown = own.filter((curve) => alone || !data.arms[curve.arm].isControl);
  const over = (value) => (value === null || (log && value <= 0) ? null : log ? Math.log10(value) : value);
  const last = Math.max(...own.flatMap((curve) => curve.steps));
  const axes = (curves) => {
    // A tenth at each end may leave the scale: one arm that explodes would flatten all others.
    const means = curves.flatMap((curve) => curve.mean).map(over).filter((v) => v !== null).sort((a, b) => a - b);
    const some = means.length ? means : curves.flatMap((curve) => curve.runs.flatMap((run) => run.y)).map(over).filter((v) => v !== null).sort((a, b) => a - b);
    const [first, end] = [0.1, 0.9].map((part) => some[Math.round(part * (some.length - 1))] ?? 0), room = end - first || 1;
    let low = Math.max(some[0] ?? 0, first - room / 2), high = Math.min(some.at(-1) ?? 1, end + room / 2);
    const ends = curves.flatMap((curve) => [...curve.low, ...curve.high]).map(over).filter((v) => v !== null && v > low - room / 8 && v < high + room / 8);
    [low, high] = [Math.min(low, ...ends), Math.max(high, ...ends)];
    if (!log && (means[0] ?? -1) >= 0) low = Math.max(low, 0);
    if (metric.share) [low, high] = [Math.max(low, 0), Math.min(high, 1)];
    if (high === low) high = low + 1;
    const x = scale(0, last, CLEFT, CW - 6), yy = scale(low, high, CH - CBOTTOM, 8);
    const y = (value) => { const v = over(value); return v === null ? null : Math.max(2, Math.min(CH - CBOTTOM + 2, yy(v))); };
    const yTicks = log ? logTicks(low, high).map((t) => [t, short(10 ** t)]) : ticks(low, high, 4).map((t) => [t, short(Math.abs(t) < 1e-12 ? 0 : t, metric.share)]);
    return { x, y, yy, yTicks, last };
  };
  const shared = axes(own), apart = document.getElementById("apart").checked;
  const behind = (curve) => byArm.get(data.arms[curve.arm].control);
  place("curves").replaceChildren(...shown.map((curve) => curvePanel(curve, behind(curve), metric, apart ? axes([curve, behind(curve)].filter(Boolean)) : shared)));
}

const counts = (curve) => { const own = curve.n.filter((n) => n > 0); if (!own.length) return "n = 0"; const a = Math.min(...own), b = Math.max(...own); return a === b ? `n = ${a}` : `n = ${a} to ${b}`; };

function curvePanel(curve, control, metric, axes) {
  const { x, y } = axes, name = data.arms[curve.arm].name, both = control && control !== curve ? [control, curve] : [curve];
  const end = (c) => c.mean.findLast((v) => v !== null) ?? null;
  const label = `${metric.title} of ${name} over steps (${counts(curve)}), last mean ${short(end(curve), metric.share)}` + (both.length > 1 ? `; control ${short(end(control), metric.share)} (${counts(control)})` : "") + ". Arrow keys read the steps.";
  const art = svg("svg", { viewBox: `0 0 ${CW} ${CH}`, "aria-hidden": "true" },
    axes.yTicks.map(([tick, text]) => [svg("line", { class: "gridline", x1: CLEFT, x2: CW, y1: axes.yy(tick), y2: axes.yy(tick) }), svg("text", { x: CLEFT - 6, y: axes.yy(tick) + 4, "text-anchor": "end" }, text)]),
    ticks(0, axes.last, 4).map((tick) => svg("text", { x: x(tick), y: CH - 8, "text-anchor": "middle" }, String(tick))));
  for (const one of both) {
    const cls = one === curve ? "" : " control", xs = one.steps.map(x);
    art.append(svg("path", { class: "band" + cls, d: band(xs, one.low.map(y), one.high.map(y)) }), svg("path", { class: "mean" + cls, d: line(xs, one.mean.map(y)) }), ...lone(xs, one.mean.map(y), { class: "lone" + cls, r: 3.5 }));
  }
  for (const run of curve.runs) art.append(svg("path", { class: `seed ${run.state}`, d: line(curve.steps.map(x), run.y.map(y)) }), ...lone(curve.steps.map(x), run.y.map(y), { class: `seed ${run.state}`, r: 1.6 }));
  const cursor = svg("line", { class: "cursor", y1: 4, y2: CH - CBOTTOM, visibility: "hidden" });
  art.append(cursor);
  let at = curve.steps.length - 1;
  const say = (k) => {
    const value = (v) => short(v, metric.share), lines = [`${name}, step ${curve.steps[k]}`];
    if (curve.n[k]) lines.push(`mean ${value(curve.mean[k])}` + (curve.low[k] === null ? "" : ` (${value(curve.low[k])} to ${value(curve.high[k])})`) + `, n = ${curve.n[k]}`);
    const behind = both.length > 1 ? control.steps.indexOf(curve.steps[k]) : -1;
    if (behind >= 0 && control.n[behind]) lines.push(`control ${value(control.mean[behind])}, n = ${control.n[behind]}`);
    const seeds = curve.runs.filter((run) => run.y[k] !== null);
    lines.push("seeds " + seeds.slice(0, 12).map((run) => `${run.seed}: ${value(run.y[k])}${run.state === "finished" ? "" : ` ${run.state}`}`).join(", ") + (seeds.length > 12 ? ", …" : ""));
    return lines.join("\n");
  };
  const point = (k, clientX, clientY) => {
    at = Math.max(0, Math.min(curve.steps.length - 1, k));
    cursor.setAttribute("x1", x(curve.steps[at])); cursor.setAttribute("x2", x(curve.steps[at])); cursor.setAttribute("visibility", "visible");
    const box = art.getBoundingClientRect();
    showTip(say(at), clientX ?? box.left + (x(curve.steps[at]) / CW) * box.width, clientY ?? box.top + 20);
  };
  const leave = () => { cursor.setAttribute("visibility", "hidden"); hideTip(); };
  const panel = el("div", { class: "panel", tabindex: "0", role: "img", "aria-label": label, onpointerleave: leave, onblur: leave,
    onpointermove(event) {
      const box = art.getBoundingClientRect(), step = ((((event.clientX - box.left) / box.width) * CW - CLEFT) / (CW - 6 - CLEFT)) * axes.last;
      let best = 0;
      curve.steps.forEach((s, k) => { if (Math.abs(s - step) < Math.abs(curve.steps[best] - step)) best = k; });
      point(best, event.clientX, event.clientY);
    },
    onkeydown(event) {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (event.key === "Escape") leave();
      if (move) { event.preventDefault(); point(at + move); }
    } }, art);
  const off = curve.runs.filter((run) => run.state !== "finished").length;
  return el("figure", {}, el("figcaption", {}, el("b", {}, name), ` · ${counts(curve)}` + (off ? `, ${off} not finished` : "")), panel);
}

function curves() {
  const choices = document.querySelector('[data-choices="curve"]');
  if (!data.curves.length) { place("curves").append(el("p", {}, "Nothing has been logged yet.")); return; }
  const log = el("input", { type: "checkbox", id: "log", checked: store.get("log") === "1", onchange() { store.set("log", log.checked ? "1" : "0"); drawCurves(chosen()); } });
  const apart = el("input", { type: "checkbox", id: "apart", checked: store.get("apart") === "1", onchange() { store.set("apart", apart.checked ? "1" : "0"); drawCurves(chosen()); } });
  const chosen = () => choices.querySelector("input[name=curve]:checked, select").value;
  if (data.curveMetrics.length <= 5) choices.append(choice("curve", "Metric", data.curveMetrics, drawCurves).box);
  else {
    const kept = store.get("curve"), pick = el("select", { id: "curve", onchange() { store.set("curve", pick.value); drawCurves(pick.value); } }, data.curveMetrics.map((one) => el("option", { value: one.key, selected: one.key === kept }, one.title)));
    choices.append(el("label", { class: "line" }, "Metric ", pick));
  }
  choices.append(el("label", { class: "line" }, log, "log scale"), el("label", { class: "line" }, apart, "a scale for each panel"), el("p", { class: "key" }, el("span", {}, el("i", {}), "treated"), data.arms.some((arm) => arm.isControl) && el("span", {}, el("i", { class: "control" }), "control")));
  drawCurves(chosen());
}
