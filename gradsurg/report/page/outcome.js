// The forest plot, the links of a chain, dose and response, the cost, the effect on updates.
const FOREST = 230, ROW = 26;

// What only few seeds, or q, leave as a hint is not.
const isClear = (row) => row.verdict === "higher" || row.verdict === "lower";

function forestRow(row, x, title) {
  const art = svg("svg", { viewBox: `0 0 ${FOREST} ${ROW}`, "aria-hidden": "true", class: isClear(row) ? "" : "unclear" },
    svg("line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: ROW, "stroke-dasharray": "2 2" }));
  if (row.mean === undefined) return art;
  for (const each of row.each || []) art.append(svg("line", { class: "each", x1: x(each), x2: x(each), y1: ROW - 7, y2: ROW - 2 }));
  if (row.low !== null) {
    const mid = ROW / 2 - 1, from = Math.max(2, x(row.low)), to = Math.min(FOREST - 2, x(row.high));
    art.append(svg("line", { class: "whisker", x1: from, x2: to, y1: mid, y2: mid }));
    if (from > x(row.low)) art.append(svg("path", { class: "cut", d: `M${from + 5} ${mid - 4}L${from} ${mid}L${from + 5} ${mid + 4}` }));
    if (to < x(row.high)) art.append(svg("path", { class: "cut", d: `M${to - 5} ${mid - 4}L${to} ${mid}L${to - 5} ${mid + 4}` }));
  }
  art.append(svg("circle", { class: "dot", cx: x(row.mean), cy: ROW / 2 - 1, r: 4.5 }), svg("title", {}, title));
  return art;
}

function forestAxis(low, high, x, share) {
  return svg("svg", { viewBox: `0 0 ${FOREST} 22`, "aria-hidden": "true" }, ticks(low, high, 4).map((tick) => [
    svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: 17, y2: 22 }),
    svg("text", { x: x(tick), y: 13, "text-anchor": "middle" }, (tick > 0 ? "+" : "") + short(Math.abs(tick) < 1e-12 ? 0 : tick, share))]));
}

// Means and seeds are all shown; an interval may take half as much again at each end, then it is cut.
function range(rows) {
  const there = rows.filter((row) => row.mean !== undefined), seen = [0, ...there.flatMap((row) => [row.mean, ...(row.each || [])])];
  const ends = there.flatMap((row) => [row.low, row.high]).filter((v) => v !== null), least = Math.min(...seen), most = Math.max(...seen), room = (most - least) / 2;
  const low = Math.max(least - room, Math.min(least, ...ends)), high = Math.min(most + room, Math.max(most, ...ends)), pad = (high - low || 1) * 0.04;
  return [low - pad, high + pad];
}

const lost = (row) => Object.entries(row.states).map(([state, count]) => `${count} ${state}`).join(", ");

function forest(rows, metric, caption, name, first = "arm", sides = ["treated", "control"], last = "difference") {
  const [low, high] = range(rows), x = scale(low, high, 8, FOREST - 8);
  const withQ = rows.some((row) => row.q), withBoot = rows.some((row) => row.boot);
  const heads = [head(first), head("seeds", "num"), ...sides.map((side) => head(side, "num")),
    el("th", { scope: "col", class: "plot" }, el("span", { class: "sr" }, "plot"), forestAxis(low, high, x, metric.share)),
    head(last, "num"), head("95 % interval"), withBoot && head("BCa bootstrap"), head("p", "num"), withQ && head("q", "num"), head("reading")].filter(Boolean);
  const body = rows.map((row) => el("tr", {},
    el("th", { scope: "row" }, name(row)), cell(ofPlanned(row.n || 0, row.planned), "num"),
    cell(row.treated || "–", "num"), cell(row.control || "–", "num"),
    el("td", { class: "plot" }, forestRow(row, x, `${name(row)}: ${row.said}`)),
    cell(row.said || "–", "num"), cell(row.interval || "–", "said"), withBoot && cell(row.boot || "–", "said"),
    cell(row.p || "–", "num"), withQ && cell(row.q || "–", "num"),
    cell([row.verdict, lost(row)].filter(Boolean).join("; "), isClear(row) ? "" : "muted")));
  return table(caption, heads, body.map((row) => row));
}

function drawOutcome(key) {
  const metric = data.metrics.find((one) => one.key === key);
  const named = (row) => data.arms[row.arm].name;
  place("outcome").replaceChildren(forest(data.outcomes.filter((row) => row.metric === key), metric, `Differences in ${metric.title}, arm by arm`, named));
  place("shares").replaceChildren(...shares(metric));
  place("doses").replaceChildren(...data.doses.map((set) => doses(set, metric)));
}

// Chain by chain: its links stand for themselves.
function shares(metric) {
  const rows = data.shares.filter((row) => row.metric === metric.key);
  return [...new Set(rows.map((row) => row.arm))].flatMap((arm) => {
    const name = data.arms[arm].name;
    return [el("h3", {}, `${name}: ${metric.title}`), forest(rows.filter((row) => row.arm === arm), metric, `What each link of ${name} adds to ${metric.title}`, (row) => row.link, "link", ["with it", "without it"], "share")];
  });
}

// What has nothing to be compared with: means and how far they spread.
function alone() {
  document.getElementById("alone").hidden = !data.alone.length;
  if (!data.alone.length) return;
  place("alone").append(table("Arms that are not compared", [head("arm"), head("runs", "num"), ...data.metrics.map((metric) => head(metric.title, "num"))], data.alone.map(([name, ...cells]) =>
    el("tr", {}, el("th", { scope: "row" }, name), cells.map((text) => cell(text, "num"))))));
}

function outcomes() {
  if (!data.outcomes.some((row) => row.mean !== undefined || Object.keys(row.states).some((state) => state !== "without a control"))) { document.getElementById("outcome").hidden = true; }
  if (!data.outcomes.length) return;
  if (!data.metrics.length) {
    place("outcome").append(table("Arms without an outcome yet", [head("arm"), head("seeds planned", "num"), head("runs")], data.outcomes.map((row) =>
      el("tr", {}, el("th", { scope: "row" }, data.arms[row.arm].name), cell(String(row.planned), "num"), cell(lost(row))))));
    return;
  }
  document.getElementById("shares").hidden = !data.shares.length;
  document.getElementById("doses").hidden = !data.doses.length;
  const chosen = choice("metric", "Metric", data.metrics, drawOutcome);
  const choices = document.querySelector('[data-choices="metric"]');
  choices.append(chosen.box);
  if (document.getElementById("outcome").hidden) place("shares").before(choices);
  drawOutcome(chosen.value);
}

function doses(set, metric) {
  const W = 400, H = 240, left = 58, bottom = 34, last = set.key.split(".").pop();
  const rows = set.arms.map((arm) => data.outcomes.find((row) => row.arm === arm && row.metric === metric.key) || {});
  const positive = set.x.every((dose) => dose > 0) && Math.max(...set.x) / Math.min(...set.x) >= 10;
  const at = positive ? set.x.map(Math.log10) : set.x;
  const x = scale(Math.min(...at), Math.max(...at), left + 12, W - 14), [low, high] = range(rows), y = scale(low, high, H - bottom, 10);
  const label = `${set.name}: difference in ${metric.title} over ${set.key}. ` + set.x.map((dose, k) => `${dose}: ${rows[k].said || "nothing to compare"}`).join("; ");
  const art = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label },
    ticks(low, high, 4).map((tick) => [svg("line", { class: "gridline", x1: left, x2: W, y1: y(tick), y2: y(tick) }), svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(Math.abs(tick) < 1e-12 ? 0 : tick, metric.share))]),
    svg("line", { class: "zero", x1: left, x2: W, y1: y(0), y2: y(0), "stroke-dasharray": "2 2" }),
    at.map((value, k) => svg("text", { x: x(value), y: H - bottom + 16, "text-anchor": "middle" }, short(set.x[k]))),
    svg("text", { x: (left + W) / 2, y: H - 3, "text-anchor": "middle" }, last + (positive ? " (log scale)" : "")),
    svg("path", { class: "mean", d: line(at.map(x), rows.map((row) => (row.mean === undefined ? null : y(row.mean)))) }));
  rows.forEach((row, k) => {
    if (row.mean === undefined) return;
    const group = svg("g", { class: isClear(row) ? "" : "unclear" });
    if (row.low !== null) group.append(svg("line", { class: "whisker", x1: x(at[k]), x2: x(at[k]), y1: Math.min(H - bottom, y(row.low)), y2: Math.max(4, y(row.high)) }));
    group.append(svg("circle", { class: "dot", cx: x(at[k]), cy: y(row.mean), r: 4.5 }, svg("title", {}, `${last} ${set.x[k]}: ${row.said}, ${row.interval}, n = ${row.n}`)));
    art.append(group);
  });
  const counts = rows.map((row) => row.n || 0), least = Math.min(...counts), most = Math.max(...counts);
  return el("figure", {}, el("figcaption", {}, el("b", {}, set.name), ` · ${metric.title} over ${last}, n = ${least === most ? most : `${least} to ${most}`} seeds each`), art);
}

function cost() {
  if (!data.costs.length) { place("cost").append(el("p", {}, "No pair of runs with step times yet.")); return; }
  const ends = data.costs.flatMap((row) => [row.low, row.high, 1]), low = Math.min(...ends), high = Math.max(...ends), pad = (high - low || 1) * 0.05;
  const x = scale(low - pad, high + pad, 8, FOREST - 8);
  const axis = svg("svg", { viewBox: `0 0 ${FOREST} 22`, "aria-hidden": "true" }, ticks(low - pad, high + pad, 4).map((tick) => [
    svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: 17, y2: 22 }), svg("text", { x: x(tick), y: 13, "text-anchor": "middle" }, short(tick) + "×")]));
  const heads = [head("arm"), head("pairs", "num"), head("step", "num"), head("control's", "num"), el("th", { scope: "col", class: "plot" }, el("span", { class: "sr" }, "plot"), axis), head("ratio", "num"), head("range"), head("measured step", "num")];
  place("cost").append(table("Step times", heads, data.costs.map((row) => el("tr", {}, el("th", { scope: "row" }, data.arms[row.arm].name), cell(String(row.n), "num"),
    cell(short(row.treated) + " ms", "num"), cell(short(row.control) + " ms", "num"),
    el("td", { class: "plot" }, svg("svg", { viewBox: `0 0 ${FOREST} ${ROW}`, "aria-hidden": "true" },
      svg("line", { class: "zero", x1: x(1), x2: x(1), y1: 0, y2: ROW, "stroke-dasharray": "2 2" }),
      svg("line", { class: "whisker", x1: x(row.low), x2: x(row.high), y1: ROW / 2, y2: ROW / 2 }), svg("circle", { class: "dot", cx: x(row.ratio), cy: ROW / 2, r: 4.5 }))),
    cell(short(row.ratio) + "×", "num"), cell(row.n > 1 ? `${short(row.low)}× to ${short(row.high)}×` : "one pair", "said"), cell(row.measured === null ? "–" : short(row.measured) + " ms", "num")))));
}

function updates() {
  document.getElementById("updates").hidden = !data.updates.length;
  if (data.updates.length) place("updates").append(table("Effect on the updates", [head("arm"), head("asked on"), ...data.updateTitles.map((title) => head(title, "num"))], data.updates.map((row) =>
    el("tr", {}, el("th", { scope: "row" }, data.arms[row.arm].name), cell(row.asked, "said"), row.numbers.map(([mean, interval]) => el("td", { class: "num" }, mean, interval && el("span", { class: "between" }, interval)))))));
}
