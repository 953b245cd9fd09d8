// What each arm came to in the tasks of several, two by two.
const FW = 400, FH = 300, FLEFT = 62, FBOTTOM = 38, MAX_PAIRS = 6;

const toward = (axis, from, to) => {
  const at = scale(axis.log ? Math.log10(axis.low) : axis.low, axis.log ? Math.log10(axis.high) : axis.high, from, to);
  // an interval that goes on past the edge, or to where there is no logarithm, is cut there
  return (value) => at(axis.log ? Math.log10(Math.max(value, 1e-300)) : value);
};
const ticksOf = (axis) => (axis.log ? logTicks(Math.log10(axis.low), Math.log10(axis.high)).map((tick) => 10 ** tick) : ticks(axis.low, axis.high, 5));
const within = (value, one, other) => Math.max(Math.min(one, other), Math.min(Math.max(one, other), value));

function frontPanel(front, pair) {
  const [i, j] = pair.at, [across, up] = [front.axes[i], front.axes[j]];
  const x = toward(across, FLEFT, FW - 8), y = toward(up, FH - FBOTTOM, 8), cut = (v, first) => (first ? within(x(v), FLEFT, FW - 8) : within(y(v), FH - FBOTTOM, 8));
  const value = (v) => short(v, front.share), name = (k) => `${front.metric} ${front.names[k]}`;
  const label = `${name(j)} over ${name(i)}. ` + front.marks.map((mark, k) => `${k + 1} ${data.arms[mark.arm].name}: ${value(mark.mean[i])} and ${value(mark.mean[j])}${mark.beatenBy.length ? "" : ", not dominated"}`).join("; ");
  const art = svg("svg", { viewBox: `0 0 ${FW} ${FH}`, role: "img", "aria-label": label, class: "front" },
    ticksOf(up).map((tick) => [svg("line", { class: "gridline", x1: FLEFT, x2: FW - 8, y1: y(tick), y2: y(tick) }), svg("text", { x: FLEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, value(tick))]),
    ticksOf(across).map((tick) => [svg("line", { class: "gridline", x1: x(tick), x2: x(tick), y1: 8, y2: FH - FBOTTOM }), svg("text", { x: x(tick), y: FH - FBOTTOM + 15, "text-anchor": "middle" }, value(tick))]),
    svg("text", { x: (FLEFT + FW) / 2, y: FH - 4, "text-anchor": "middle" }, name(i) + (across.log ? " (log scale)" : "")),
    svg("text", { x: 0, y: 0, "text-anchor": "middle", transform: `translate(11 ${(FH - FBOTTOM) / 2}) rotate(-90)` }, name(j) + (up.log ? " (log scale)" : "")));
  for (const mark of front.marks) {
    const [cx, cy] = [x(mark.mean[i]), y(mark.mean[j])];
    const group = svg("g", { class: [mark.beatenBy.length ? "beaten" : "", data.arms[mark.arm].isControl ? "control" : ""].join(" ") }, mark.seeds.map((_, k) => svg("circle", { class: "run", cx: x(mark.each[i][k]), cy: y(mark.each[j][k]), r: 2 })));
    if (mark.low[i] !== null) group.append(svg("line", { class: "whisker", x1: cut(mark.low[i], true), x2: cut(mark.high[i], true), y1: cy, y2: cy }), svg("line", { class: "whisker", x1: cx, x2: cx, y1: cut(mark.low[j]), y2: cut(mark.high[j]) }));
    group.append(svg("circle", { class: "dot", cx, cy, r: 4.5 }, svg("title", {}, `${data.arms[mark.arm].name}: ${value(mark.mean[i])} and ${value(mark.mean[j])}, n = ${mark.seeds.length}`)));
    art.append(group);
  }
  for (const [atX, atY, text] of pair.labels) {
    const right = x(atX) > FW - 12 - 8 * text.length;
    art.append(svg("text", { class: "number", x: x(atX) + (right ? -7 : 7), y: y(atY) - 6, "text-anchor": right ? "end" : "start" }, text));
  }
  return el("figure", {}, el("figcaption", {}, el("b", {}, `${front.names[i]} and ${front.names[j]}`), ` · ${front.lower ? "lower left" : "upper right"} is better`), art);
}

function frontTable(front) {
  const value = (v) => short(v, front.share), name = (k) => data.arms[k].name;
  const heads = [head("", "num"), head("arm"), head("runs", "num"), ...front.names.map((task) => head(`${front.metric} ${task}`, "num")), head("dominated by")];
  return table(`${front.metric} of each task, arm by arm`, heads, front.marks.map((mark, k) => el("tr", {},
    cell(String(k + 1), "num"), el("th", { scope: "row" }, name(mark.arm)), cell(String(mark.seeds.length), "num"),
    front.names.map((_, task) => el("td", { class: "num" }, value(mark.mean[task]), mark.low[task] !== null && el("span", { class: "between" }, `${value(mark.low[task])} to ${value(mark.high[task])}`))),
    cell(mark.beatenBy.length ? mark.beatenBy.slice(0, 3).map(name).join(", ") + (mark.beatenBy.length > 3 ? ` and ${mark.beatenBy.length - 3} more` : "") : "none", mark.beatenBy.length ? "muted" : ""))));
}

function drawFront(key) {
  const front = data.fronts.find((one) => one.key === key), shown = front.pairs.slice(0, MAX_PAIRS);
  place("fronts").replaceChildren(el("div", { class: "panels" }, shown.map((pair) => frontPanel(front, pair))),
    ...(shown.length < front.pairs.length ? [el("p", { class: "muted" }, `The first ${shown.length} of ${front.pairs.length} pairs; the table has all tasks.`)] : []), frontTable(front));
}

function fronts() {
  document.getElementById("fronts").hidden = !data.fronts.length;
  if (!data.fronts.length) return;
  const chosen = choice("front", "Metric", data.fronts, drawFront);
  document.querySelector('[data-choices="front"]').append(chosen.box);
  drawFront(chosen.value);
}
