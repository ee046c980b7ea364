/* What all parts of the page share: data, formats, elements, theme. Text becomes text nodes only, never markup. */
"use strict";
const KV = (() => {
  const parse = (id) => JSON.parse(document.getElementById(id).textContent);
  const data = parse("data");
  data.rows.forEach((row, index) => { row.index = index; });
  const shapes = {};
  const shapesOf = (group) => (shapes[group] ||= parse(`shapes-${group}`));

  const MISSING = "–";
  const known = (v) => v !== null && v !== undefined;
  const share = (v, digits = 1) => (known(v) ? `${(100 * v).toFixed(digits)}%` : MISSING);
  const fixed = (v, digits = 3) => (known(v) ? v.toFixed(digits).replace("-", "−") : MISSING);
  const signed = (v) => (known(v) ? (v > 0 ? "+" : v < 0 ? "−" : "±") + Math.abs(v).toFixed(3) : MISSING);
  const seconds = (v) => (!known(v) ? MISSING : v >= 100 ? `${v.toFixed(0)} s` : v >= 1 ? `${v.toFixed(2)} s` : `${(1000 * v).toPrecision(3)} ms`);
  const bytes = (v) => {
    if (!known(v)) return MISSING;
    let unit = 0, size = v;
    while (size >= 1000 && unit < 4) { size /= 1024; unit += 1; }
    return `${unit === 0 ? size.toFixed(0) : size.toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  };
  const budget = (row) => (!known(row.budget) ? MISSING : typeof row.budget === "string" ? row.budget
    : row.share ? String(row.budget) : `${row.budget} tok`);
  const title = (row) => (row.base ? row.name : `${row.name} · ${budget(row)}`);

  /** An element: properties, then children; strings become text. */
  const el = (tag, props = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(props)) {
      if (value === null || value === undefined || value === false) continue;
      if (key === "class") node.className = value;
      else if (key === "text") node.textContent = value;
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value === true ? "" : value);
    }
    for (const child of children.flat()) if (known(child) && child !== false) node.append(child);
    return node;
  };
  const option = (value, label, selected) => {
    const node = el("option", { value, text: label });
    node.selected = Boolean(selected);
    return node;
  };
  const get = (id) => document.getElementById(id);
  const unique = (values) => [...new Set(values)];

  /* theme: auto, light, dark; kept where the browser lets us */
  const listeners = [];
  const THEMES = ["auto", "light", "dark"];
  const stored = () => { try { return localStorage.getItem("kvcompress-theme"); } catch { return null; } };
  let theme = THEMES.includes(stored()) ? stored() : "auto";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => theme === "dark" || (theme === "auto" && system.matches);
  const showTheme = () => {
    document.documentElement.dataset.theme = dark() ? "dark" : "light";
    const button = get("theme");
    const label = { auto: "Auto", light: "Light", dark: "Dark" }[theme];
    button.querySelector("span").textContent = label;
    button.setAttribute("aria-label", `Theme: ${label.toLowerCase()}. Change it`);
    listeners.forEach((listener) => listener());
  };
  const nextTheme = () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try { localStorage.setItem("kvcompress-theme", theme); } catch { /* a browser that keeps nothing from disk */ }
    showTheme();
  };
  system.addEventListener("change", showTheme);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  /* what is chosen stands in the address, so that a link shows the same; sections are reached without touching it */
  const address = {
    get: () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : ""),
    set: (values) => {
      const kept = address.get();
      for (const [key, value] of Object.entries(values)) if (value) kept.set(key, value); else kept.delete(key);
      const text = kept.toString();
      try { history.replaceState(null, "", text ? `#${text}` : location.href.split("#")[0]); } catch { /* a browser that keeps addresses of files as they are */ }
    },
  };

  return { data, address, shapesOf, known, share, fixed, signed, seconds, bytes, budget, title, el, option, get, unique, MISSING,
    theme: { next: nextTheme, show: showTheme, dark, changed: (f) => listeners.push(f), now: () => theme }, colour };
})();
