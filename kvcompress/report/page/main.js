/* The page but for its figures. */
"use strict";
(() => {
  const { data, get, el, unique } = KV;
  const ok = data.rows.filter((r) => r.ok);
  const count = (n, one, many) => `${n} ${n === 1 ? one : many || `${one}s`}`;
  get("sweep").textContent = data.title;
  get("h-top").textContent = data.title;
  const methods = unique(ok.map((r) => r.method)).length, settings = unique(ok.map((r) => r.g)).length;
  get("summary").textContent = `${count(ok.length, "run")} of ${count(methods, "method")} in ${count(settings, "setting")}, ${ok.reduce((n, r) => n + (r.n || 0), 0).toLocaleString("en")} samples.`;
  const same = (label, of) => {
    const values = unique(ok.map(of).filter((v) => v !== null && v !== undefined));
    return values.length === 1 ? `${label}${values[0]}` : null;
  };
  const shared = [same("model ", (r) => r.model), same("task ", (r) => r.task), ...KV.table.shared, same("metric ", (r) => r.details.metric), same("", (r) => r.details.dtype), same("", (r) => r.details.device),
    same("", (r) => r.details["versions.cpu"]), same("seed ", (r) => r.details.seed)].filter(Boolean);
  get("common").textContent = ok.length && shared.length ? `All of them: ${shared.join(" · ")}` : "";
  if (data.skipped.length) {
    const box = get("skipped");
    box.hidden = false;
    box.querySelector("summary").textContent = `${count(data.skipped.length, "record was", "records were")} skipped`;
    box.querySelector("ul").append(...data.skipped.map((text) => el("li", { text })));
  }
  get("theme").addEventListener("click", KV.theme.next);
  KV.theme.show();
  KV.viewer.start();
  KV.table.start();
  for (const link of document.querySelectorAll("a[href^=\"#\"]")) link.addEventListener("click", (event) => {
    event.preventDefault();
    const target = get(link.getAttribute("href").slice(1));
    target.tabIndex = -1;
    target.scrollIntoView();
    target.focus({ preventScroll: true });
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && !get("viewer").open) { event.preventDefault(); get("search").focus(); }
  });
})();
