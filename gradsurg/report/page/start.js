// Put everything in its place; the theme, and in watch mode the reload.
function theme() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
  const kept = store.get("theme");
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; store.set("theme", root.dataset.theme); name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();
}

function contents() {
  const nav = document.getElementById("contents");
  for (const section of document.querySelectorAll("main section[id]")) {
    if (!section.hidden) nav.append(el("a", { href: `#${section.id}` }, section.querySelector("h2").textContent));
  }
}

// A page from a file cannot ask whether there is news: it loads itself anew, unless someone is busy in it.
function watch() {
  if (!data.refresh) return;
  const pause = document.getElementById("pause");
  const paused = () => pause.getAttribute("aria-pressed") === "true";
  const set = (on) => { pause.setAttribute("aria-pressed", String(on)); pause.textContent = on ? "Resume updates" : "Pause updates"; store.set("paused", on ? "1" : "0"); };
  pause.hidden = false;
  set(store.get("paused") === "1");
  pause.addEventListener("click", () => set(!paused()));
  const busy = () => paused() || document.hidden || document.getElementById("config").open || document.activeElement.matches("input, select, .panel") || !tip.hidden;
  history.scrollRestoration = "manual";
  const kept = Number(store.get("scroll"));
  if (kept) scrollTo({ top: kept, behavior: "instant" });
  setInterval(() => { if (!busy()) { store.set("scroll", String(scrollY)); location.reload(); } }, 1000 * data.refresh);
}

document.getElementById("config-close").addEventListener("click", () => document.getElementById("config").close());
// Keys can scroll a panel into view: what they read out stays.
addEventListener("scroll", () => { if (!document.activeElement.matches(".panel")) hideTip(); }, { passive: true });
theme();
outcomes();
fronts();
alone();
curves();
effects();
conflicts();
updates();
cost();
runs();
contents();
watch();
