// The effect map (sites by steps) and the norms before and after; one slider for both.
// Cividis: told apart by all kinds of colour vision, and in grey.
const RAMP = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
// Blue under one, orange over it.
const TURN = ["#08519c", "#4292c6", "#9ecae1", "#d9e6ee", "#f4f1ec", "#f8dfc4", "#fdae6b", "#e6701e", "#a63603"];
const MEASURES = [
  { key: "cosine", title: "cosine", says: "cosine of the gradient before and after" },
  { key: "ratio", title: "norm ratio", says: "norm after over norm before", log: true },
  { key: "changed", title: "fraction changed", says: "fraction of entries changed", share: true },
  { key: "flipped", title: "sign flips", says: "fraction of entries with the other sign", share: true },
  { key: "zeroed", title: "zeroed", says: "fraction of entries made zero", share: true },
];

function mix(ramp, part) {
  const at = Math.max(0, Math.min(1, part)) * (ramp.length - 1), k = Math.min(ramp.length - 2, Math.floor(at)), rest = at - k;
  const of = (hex, from) => parseInt(hex.slice(from, from + 2), 16);
  return "rgb(" + [1, 3, 5].map((from) => Math.round(of(ramp[k], from) + rest * (of(ramp[k + 1], from) - of(ramp[k], from)))).join(",") + ")";
}

// One scale for all arms and transforms, so that sliding compares.
function colours(measure) {
  const all = data.maps.filter((map) => map.transform !== "none").flatMap((map) => map.means[measure.key].flat()).filter((v) => v !== null);
  if (measure.log) {
    const sizes = all.filter((v) => v > 0).map((v) => Math.abs(Math.log2(v)));
    const reach = Math.min(6, Math.max(0.5, Math.ceil(2 * Math.max(0, ...sizes)) / 2)), ends = [2 ** -reach, 1, 2 ** reach];
    return { ramp: TURN, ends: ends.map((v) => short(v)), of: (v) => mix(TURN, v <= 0 ? 0 : 0.5 + Math.log2(v) / (2 * reach)) };
  }
  const low = measure.key === "cosine" ? Math.floor(10 * Math.min(0.9, ...all)) / 10 : 0;
  const high = measure.key === "cosine" ? 1 : Math.max(0.01, ...all);
  return { ramp: RAMP, ends: [low, (low + high) / 2, high].map((v) => short(v, measure.share)), of: (v) => mix(RAMP, (v - low) / (high - low || 1)) };
}

function heat(map, measure) {
  const longest = Math.max(...map.sites.map((site) => site.length)), left = Math.min(300, 12 + 6.3 * longest), W = 900, h = map.sites.length > 40 ? 13 : 22;
  const H = map.sites.length * h + 26, count = map.ends.length, w = (W - left) / count, colour = colours(measure), rows = map.means[measure.key];
  const cut = (site) => (site.length > 46 ? "…" + site.slice(-45) : site);
  const label = `${measure.says}, ${map.sites.length} sites by ${count} intervals of steps; means over the whole training: ` + map.sites.slice(0, 12).map((site, k) => `${site} ${short(map.overall[measure.key][k], measure.share)}`).join(", ");
  const art = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label });
  map.sites.forEach((site, row) => {
    art.append(svg("text", { class: "name", x: left - 8, y: row * h + h / 2 + 4, "text-anchor": "end" }, cut(site)));
    rows[row].forEach((value, k) => art.append(svg("rect", { x: (left + k * w).toFixed(2), y: row * h, width: (w + 0.3).toFixed(2), height: h - 1, fill: value === null ? "var(--none)" : colour.of(value), "data-at": `${row},${k}` })));
  });
  const every = Math.ceil(count / 8);
  map.ends.forEach((step, k) => { if ((k + 1) % every === 0 || count === 1) art.append(svg("text", { x: left + (k + 1) * w, y: H - 8, "text-anchor": k + 1 === count ? "end" : "middle" }, k + 1 === count ? `step ${step}` : String(step))); });
  art.addEventListener("pointermove", (event) => {
    const at = event.target.dataset && event.target.dataset.at;
    if (!at) { hideTip(); return; }
    const [row, k] = at.split(",").map(Number);
    showTip(`${map.sites[row]}\nup to step ${map.ends[k]}\n${measure.title} ${short(rows[row][k], measure.share)}, n = ${runsOf(map.n)}`, event.clientX, event.clientY);
  });
  art.addEventListener("pointerleave", hideTip);
  const ramp = `linear-gradient(90deg, ${colour.ramp.join(", ")})`;
  const legend = el("div", { class: "legend" }, el("span", {}, colour.ends[0]), el("span", { class: "ramp", style: `background: ${ramp}`, role: "img", "aria-label": `Colours from ${colour.ends[0]} to ${colour.ends[2]}` }), el("span", {}, colour.ends[2]), el("span", {}, measure.says));
  return [el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Effect map" }, el("div", { style: "min-width: 34rem" }, art)), legend, numbers(map)];
}

function numbers(map) {
  return el("details", {}, el("summary", {}, "The same as numbers"), table("Effect at each site", [head("site"), ...MEASURES.map((measure) => head(measure.title, "num"))],
    map.sites.map((site, k) => el("tr", {}, el("th", { scope: "row" }, site), MEASURES.map((measure) => cell(short(map.overall[measure.key][k], measure.share), "num"))))));
}

function histogram(found) {
  const W = 900, H = 220, left = 46, bottom = 34, bins = found.before.length, after = found.after || [];
  const top = Math.max(0.001, ...found.before, ...after), x = scale(0, bins, left, W - 4), y = scale(0, top, H - bottom, 8), floor = y(0);
  const label = `Gradient norms of ${data.arms[found.arm].name}, ${found.transform}, n = ${runsOf(found.n)}, from ${short(10 ** found.low)} to ${short(10 ** found.high)}` + (found.after ? ", before and after" : "");
  const outline = `M${x(0)} ${floor}` + found.before.map((v, k) => `L${x(k)} ${y(v)}L${x(k + 1)} ${y(v)}`).join("") + `L${x(bins)} ${floor}`;
  const tickAt = scale(found.low, found.high, left, W - 4);
  const zeros = [["before", found.zeroBefore], ["after", found.zeroAfter]].filter(([, v]) => v).map(([when, v]) => `${short(v, true)} are zero ${when}`);
  return el("figure", {}, el("figcaption", {}, el("b", {}, "Gradient norms, all sites and measured steps"), ` · n = ${runsOf(found.n)}${zeros.length ? `; ${zeros.join(", ")} and not drawn` : ""}`),
    el("p", { class: "key" }, el("span", {}, el("i", { class: "box before" }), found.after ? "before" : "nothing was done to them"), found.after ? el("span", {}, el("i", { class: "box" }), "after") : null),
    svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label },
      ticks(0, top, 3).map((tick) => [svg("line", { class: "gridline", x1: left, x2: W, y1: y(tick), y2: y(tick) }), svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(tick, true))]),
      after.map((v, k) => (v ? svg("rect", { class: "bars after", x: x(k), y: y(v), width: x(1) - x(0) - 1, height: floor - y(v) }) : null)),
      svg("path", { class: "bars before", d: outline }),
      logTicks(found.low, found.high).map((tick) => svg("text", { x: tickAt(tick), y: H - bottom + 16, "text-anchor": "middle" }, short(10 ** tick))),
      svg("text", { x: (left + W) / 2, y: H - 2, "text-anchor": "middle" }, "norm (log scale)")));
}

function effects() {
  const box = place("effects");
  if (!data.maps.length) { box.append(el("p", {}, "No effect was measured: effects_every=0, nothing ran yet, or no transform acted.")); return; }
  const kept = Math.min(data.maps.length - 1, Number(store.get("map") || 0)), named = (map) => `${data.arms[map.arm].name}${map.transform === "none" ? " (nothing was done)" : map.transform === data.arms[map.arm].name.split(" · ")[0] ? "" : ` — ${map.transform}`}, n = ${runsOf(map.n)}`;
  const out = el("output", { id: "map-name", for: "map" }), art = el("div"), bars = el("div");
  const draw = () => {
    const map = data.maps[slider.value], measure = MEASURES.find((one) => one.key === picked.box.querySelector(":checked").value);
    slider.setAttribute("aria-valuetext", named(map));
    out.textContent = named(map);
    const open = art.querySelector("details")?.open;
    art.replaceChildren(...heat(map, measure));
    if (open) art.querySelector("details").open = true;
    const norms = data.norms.find((one) => one.arm === map.arm && one.transform === map.transform);
    bars.replaceChildren(...(norms ? [histogram(norms)] : []));
  };
  const slider = el("input", { type: "range", id: "map", min: 0, max: data.maps.length - 1, step: 1, value: kept, oninput() { store.set("map", slider.value); draw(); } });
  const picked = choice("measure", "Measure", MEASURES, draw);
  box.append(el("div", { class: "slider" }, el("label", { for: "map" }, "Arm and transform"), slider, out), el("div", { class: "choices" }, picked.box), art, bars);
  draw();
}
