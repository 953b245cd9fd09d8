// The table of runs: sorted by its heads, filtered by text, state and arm.
function runs() {
  const box = place("runs"), columns = [
    { key: "name", title: "run", of: (run) => run.name, cls: "" },
    { key: "arm", title: "arm", of: (run) => data.arms[run.arm].name, cls: "" },
    { key: "seed", title: "seed", of: (run) => run.seed, cls: "num", number: true },
    { key: "state", title: "state", of: (run) => run.state, cls: "" },
    { key: "done", title: "steps", of: (run) => run.done, cls: "num", number: true },
    ...data.metrics.slice(0, 4).map((metric, k) => ({ key: "m" + k, title: metric.title, of: (run) => run.values[k], show: (v) => short(v, metric.share), cls: "num", number: true })),
    { key: "ms", title: "step, ms", of: (run) => run.ms, show: short, cls: "num", number: true },
  ];
  const find = el("input", { type: "search", id: "find", placeholder: "name, arm, reason, config", oninput: draw, value: store.get("find") || "" });
  const states = [...new Set(data.runs.map((run) => run.state))];
  const pick = (id, all, options) => el("select", { id, onchange() { store.set(id, made[id].value); draw(); } }, el("option", { value: "" }, all), options.map(([value, text]) => el("option", { value, selected: store.get(id) === value }, text)));
  const made = {};
  made["by-state"] = pick("by-state", "all states", states.map((state) => [state, state]));
  made["by-arm"] = pick("by-arm", "all arms", data.arms.map((arm, k) => [String(k), arm.name]));
  const shown = el("p", { class: "muted", role: "status", id: "shown" }), body = el("tbody");
  let [by, down] = (store.get("sort") || "").split(",");
  if (!columns.some((column) => column.key === by)) [by, down] = ["", ""];
  const heads = columns.map((column) => el("th", { scope: "col", class: column.cls, "data-key": column.key }, el("button", { type: "button", onclick() {
    down = by === column.key && !down ? "down" : ""; by = column.key; store.set("sort", `${by},${down}`); draw(); } }, column.title)));
  box.append(el("div", { class: "choices" }, el("label", { class: "line", for: "find" }, "Find ", find), el("label", { class: "line" }, "State ", made["by-state"]), el("label", { class: "line" }, "Arm ", made["by-arm"])), shown,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of runs" }, el("table", {}, el("thead", {}, el("tr", {}, heads, head("config"))), body)));
  const rows = new Map(data.runs.map((run) => [run, row(run, columns)]));
  const text = new Map(data.runs.map((run) => [run, [run.name, data.arms[run.arm].name, run.state, run.reason, run.config, ...run.notes].join(" ").toLowerCase()]));

  function draw() {
    store.set("find", find.value);
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean), state = made["by-state"].value, arm = made["by-arm"].value;
    const found = data.runs.filter((run) => (!state || run.state === state) && (!arm || String(run.arm) === arm) && words.every((word) => text.get(run).includes(word)));
    const column = columns.find((one) => one.key === by);
    if (column) found.sort((a, b) => compare(column, a, b) * (down && column.of(a) !== null && column.of(b) !== null ? -1 : 1));
    for (const th of heads) {
      if (th.dataset.key === by) th.setAttribute("aria-sort", down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    }
    body.replaceChildren(...found.map((run) => rows.get(run)));
    shown.textContent = `${found.length} of ${data.runs.length} runs`;
  }
  draw();
}

// What has no number stands last, whichever way it is sorted.
function compare(column, a, b) {
  const [x, y] = [column.of(a), column.of(b)];
  if (x === null || y === null) return (x === null) - (y === null);
  return column.number ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
}

function row(run, columns) {
  return el("tr", {}, columns.map((column) => {
    const value = column.of(run);
    if (column.key === "state") return el("td", {}, el("span", { class: `state ${run.state}` }, run.state), run.reason || run.notes.length ? el("span", { class: "reason" }, [run.reason, ...run.notes].filter(Boolean).join("; ")) : null);
    if (column.key === "done") return cell(run.done === run.steps ? String(run.done) : `${run.done} of ${run.steps}`, "num");
    if (column.key === "name") return el("th", { scope: "row" }, value);
    return cell(value === null ? "–" : column.show ? column.show(value) : String(value), column.cls);
  }), el("td", { class: "links" }, run.config ? [el("a", { href: `../${encodeURIComponent(run.name)}/config.yaml` , "aria-label": `config.yaml of ${run.name}` }, "config.yaml"), el("button", { type: "button", "aria-label": `Show the config of ${run.name}`, onclick: () => showConfig(run) }, "Show")] : "–"));
}

function showConfig(run) {
  const dialog = document.getElementById("config");
  document.getElementById("config-name").textContent = run.name;
  dialog.querySelector("pre").textContent = run.config;
  dialog.showModal();
}
