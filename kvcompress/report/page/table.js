/* The table of runs: filters, sorting, details of a row. Rows are made as they are scrolled to. */
"use strict";
KV.table = (() => {
  const { data, el, get, option, unique, known, MISSING } = KV;
  const CHUNK = 120;
  const small = matchMedia("(max-width: 700px)");
  const PARTS = ["scorer", "allocator", "codec", "prefill", "reader", "schedule", "preset"];
  const many = (key) => unique(data.rows.filter((r) => r.ok).map((r) => r[key])).length > 1;
  const partsShown = (row) => row.parts.map((v, i) => [PARTS[i], v])
    .filter(([part, v]) => v && !(["none", "plain", "all", "uniform", "oneshot", "prompt"].includes(v) || part === "preset" && v === "paper"));

  /* a small picture of the interval beside the score: what it spans from 0 to 1 */
  const range = (row) => {
    if (!known(row.lo)) return null;
    const bar = el("span", { class: "range", "aria-hidden": "true" });
    const span = el("i"), dot = el("b");
    span.style.left = `${100 * row.lo}%`;
    span.style.width = `${Math.max(1, 100 * (row.hi - row.lo))}%`;
    dot.style.left = `${100 * row.score}%`;
    bar.append(span, dot);
    return bar;
  };
  const scoreCell = (row) => [
    el("span", { class: "main", text: KV.fixed(row.score) }),
    known(row.lo) && el("span", { class: "sub", text: `[${row.lo.toFixed(2)}, ${row.hi.toFixed(2)}]` }), row.ok && range(row)];
  const deltaCell = (row) => row.base ? el("span", { class: "muted", text: "baseline" }) : [
    el("span", { class: `main ${row.sig ? (row.delta < 0 ? "worse" : "better") : ""}` }, KV.signed(row.delta),
      row.sig && el("b", { class: "mark", title: "significant after Holm's correction", "aria-label": " significant", text: "✱" })),
    known(row.dlo) && el("span", { class: "sub", text: `[${KV.fixed(row.dlo, 2)}, ${KV.fixed(row.dhi, 2)}]` })];
  const bytesCell = (row) => [
    el("span", { class: "main", text: KV.share(row.ratio) }),
    known(row.held) && el("span", { class: "sub", text: `${KV.bytes(row.held)}${row.share && row.budget < 1 ? `, asked ${KV.share(row.budget, 0)}` : ""}` })];
  const flagsCell = (row) => [
    row.origin !== "measured" && el("span", { class: "flag", text: row.origin }),
    row.flags.map((flag) => el("span", { class: `flag ${/^(failed|oom|partial)/.test(flag) ? "bad" : ""}`, text: flag }))];
  const methodCell = (row) => {
    const open = el("button", { type: "button", class: "open", "aria-expanded": "false", "aria-label": `Details of ${KV.title(row)}` },
      el("span", { class: "tri", "aria-hidden": "true", text: "▸" }), el("span", { text: row.method || MISSING }));
    open.addEventListener("click", () => toggle(row, open));
    const extra = [row.variant, ...partsShown(row).map(([part, v]) => (part === "preset" ? `preset ${v}` : v))].filter(Boolean);
    return [open, extra.length > 0 && el("span", { class: "sub", text: extra.join(" · ") })];
  };

  /* of a protocol only what tells rows apart; the rest stands once above the table */
  const aspects = (text) => String(text).split(", ");
  const everywhere = data.rows.filter((r) => r.ok).map((r) => aspects(r.protocol));
  const shared = everywhere.length ? everywhere[0].filter((part) => everywhere.every((parts) => parts.includes(part))) : [];
  const protocol = (row) => aspects(row.protocol).filter((part) => !shared.includes(part)).join(", ") || MISSING;

  const number = (key) => (row) => row[key];
  const some = (key) => () => data.rows.some((r) => known(r[key]));
  const COLUMNS = [
    { key: "method", label: "Method", show: methodCell, sort: (r) => r.name.toLowerCase(), text: true },
    { key: "model", label: "Model", show: (r) => r.model || MISSING, sort: (r) => r.model, text: true, only: () => many("model") },
    { key: "task", label: "Task", show: (r) => r.task || MISSING, sort: (r) => r.task, text: true, only: () => many("task") },
    { key: "protocol", label: "Protocol", show: protocol, sort: (r) => r.protocol, text: true, only: () => many("protocol") },
    { key: "sweep", label: "Sweep", show: (r) => r.sweep || MISSING, sort: (r) => r.sweep, text: true, only: () => many("sweep") },
    { key: "budget", label: "Budget", show: KV.budget, sort: number("budget") },
    { key: "score", label: "Score", better: 1, show: scoreCell, sort: number("score"), down: true, only: some("score") },
    { key: "delta", label: "Δ full", better: 1, show: deltaCell, sort: (r) => (r.base ? 0 : r.delta), down: true, only: some("delta") },
    ...[["words4", "0–4k"], ["words8", "4–8k"], ["words9", "8k+"]].map(([key, label]) => ({ key, label, better: 1, show: (r) => (known(r[key]) ? KV.fixed(r[key]) : MISSING), sort: number(key), down: true, only: some(key) })),
    { key: "kl", label: "KL", better: -1, show: (r) => (known(r.kl) ? r.kl.toPrecision(3) : MISSING), sort: number("kl"), only: some("kl") },
    { key: "ratio", label: "KV bytes", better: -1, show: bytesCell, sort: number("ratio"), only: some("ratio") },
    { key: "read", label: "Read / token", better: -1, show: (r) => KV.bytes(r.read), sort: number("read"), only: some("read") },
    { key: "mem", label: "Peak memory", better: -1, show: (r) => KV.bytes(r.mem), sort: number("mem"), only: some("mem") },
    { key: "ttft", label: "First token", better: -1, show: (r) => KV.seconds(r.ttft), sort: number("ttft"), only: some("ttft") },
    { key: "tpot", label: "Per token", better: -1, show: (r) => KV.seconds(r.tpot), sort: number("tpot"), only: some("tpot") },
    { key: "n", label: "n", show: (r) => (known(r.n) ? String(r.n) : MISSING), sort: number("n") },
    { key: "flags", label: "Marks", show: flagsCell, sort: (r) => r.flags.join(), text: true, only: () => data.rows.some((r) => r.flags.length || r.origin !== "measured") },
  ].filter((column) => !column.only || column.only());

  /* which way is better, said once in the heading */
  const heading = (column) => `${column.label}${{ 1: " ↑", "-1": " ↓" }[column.better] || ""}`;

  const state = { sort: null, down: false, rows: [], made: 0, filters: {} };
  const listeners = [];

  /* ---- filters */
  const FIELDS = [
    ["model", "Model", (r) => r.model], ["task", "Task", (r) => r.task], ["protocol", "Protocol", (r) => protocol(r)],
    ["method", "Method", (r) => r.method], ["budget", "Budget", (r) => KV.budget(r)], ["sweep", "Sweep", (r) => r.sweep],
  ];
  const partNames = (row) => partsShown(row).map(([part, v]) => `${part}: ${v}`);
  const words = (row) => [row.method, row.name, row.variant, row.model, row.task, row.protocol, row.sweep, row.id, row.family, row.source,
    KV.budget(row), ...row.parts, ...row.flags].filter(Boolean).join(" ").toLowerCase();
  const natural = (a, b) => String(a).localeCompare(String(b), "en", { numeric: true });

  const buildFilters = () => {
    const form = get("filters");
    const search = el("input", { type: "search", id: "search", placeholder: "snapkv ada hidden …", autocomplete: "off" });
    form.append(el("label", { class: "field grow" }, "Search", search));
    search.addEventListener("input", () => { state.filters.search = search.value; update(); });
    const select = (id, label, values, fallback) => {
      const node = el("select", { id: `f-${id}` }, option("", fallback || "all"), values.map((v) => option(v, v)));
      node.addEventListener("change", () => { state.filters[id] = node.value; update(); });
      form.append(el("label", { class: "field" }, label, node));
    };
    for (const [id, label, of] of FIELDS) {
      const values = unique(data.rows.map(of)).filter((v) => known(v) && v !== MISSING).sort(natural);
      if (values.length > 1) select(id, label, values);
    }
    const parts = unique(data.rows.flatMap(partNames)).sort(natural);
    if (parts.length > 1) select("part", "Part", parts, "any");
    const orders = COLUMNS.filter((c) => !["flags", "protocol"].includes(c.key))
      .map((c) => [`${c.down ? "-" : ""}${c.key}`, `${c.label}${c.text ? "" : c.down ? ", highest first" : ", lowest first"}`]);
    const by = el("select", { id: "f-sort" }, option("", "setting and budget"), orders.map(([value, label]) => option(value, label)));
    by.addEventListener("change", () => { state.down = by.value.startsWith("-"); state.sort = by.value.replace("-", "") || null; update(); });
    form.append(el("label", { class: "field" }, "Sort by", by));
    const rest = data.rows.filter((r) => !r.ok).length;
    if (rest) {
      const node = el("select", { id: "f-show" }, option("ok", "on the board"), option("all", `all, also ${rest} others`));
      node.addEventListener("change", () => { state.filters.show = node.value; update(); });
      form.append(el("label", { class: "field" }, "Rows", node));
    }
    form.append(el("button", { type: "button", id: "clear", class: "quiet", text: "Reset", onclick: () => { form.reset(); state.filters = {}; state.sort = null; state.down = false; update(); } }));
    form.addEventListener("submit", (event) => event.preventDefault());
  };

  const passes = (row) => {
    const f = state.filters;
    if (!row.ok && (f.show || "ok") !== "all") return false;
    for (const [id, , of] of FIELDS) if (f[id] && String(of(row)) !== f[id]) return false;
    if (f.part && !partNames(row).includes(f.part)) return false;
    if (f.search) {
      row.words ||= words(row);
      if (!f.search.toLowerCase().split(/\s+/).every((word) => row.words.includes(word))) return false;
    }
    return true;
  };

  /* ---- sorting; what is missing stays last either way */
  const sorted = (rows) => {
    const column = COLUMNS.find((c) => c.key === state.sort);
    if (!column) return rows;
    const sign = state.down ? -1 : 1;
    return [...rows].sort((a, b) => {
      const x = column.sort(a), y = column.sort(b);
      if (!known(x) || !known(y)) return known(x) ? -1 : known(y) ? 1 : a.index - b.index;
      const order = typeof x === "number" && typeof y === "number" ? x - y : natural(x, y);
      return order ? sign * order : a.index - b.index;
    });
  };
  const sortBy = (column) => {
    const first = Boolean(column.down);
    if (state.sort !== column.key) { state.sort = column.key; state.down = first; }
    else if (state.down === first) state.down = !first;
    else { state.sort = null; state.down = false; }
    update();
  };
  const buildHead = () => {
    const line = el("tr");
    for (const column of COLUMNS) {
      const button = el("button", { type: "button", onclick: () => sortBy(column) }, heading(column), el("span", { class: "arrow", "aria-hidden": "true" }));
      line.append(el("th", { scope: "col", class: column.text ? "" : "num", "data-key": column.key }, button));
    }
    get("head").append(line);
  };
  const showHead = () => {
    for (const th of get("head").querySelectorAll("th")) {
      const on = th.dataset.key === state.sort;
      th.querySelector(".arrow").textContent = on ? (state.down ? "▼" : "▲") : "⇅";
      if (on) th.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    }
  };

  /* ---- rows */
  const makeRow = (row, previous) => {
    const line = el("tr", { class: `${row.ok ? "" : "off"} ${row.base ? "base" : ""} ${row.origin !== "measured" ? "foreign" : ""}` });
    if (!state.sort && previous && previous.g !== row.g) line.classList.add("first");
    line.dataset.row = row.index;
    for (const column of COLUMNS) {
      const shown = [column.show(row)].flat(2).filter((part) => part !== false && part !== null && part !== undefined);
      line.append(el(column.key === "method" ? "th" : "td",
        { class: `${column.text ? "" : "num"} c-${column.key} ${shown.length === 0 || shown[0] === MISSING ? "missing" : ""}`, "data-label": column.label, scope: column.key === "method" ? "row" : null }, shown));
    }
    return line;
  };
  const grow = (count) => {
    const lines = document.createDocumentFragment();
    const end = Math.min(state.rows.length, state.made + count);
    for (; state.made < end; state.made += 1) lines.append(makeRow(state.rows[state.made], state.rows[state.made - 1]));
    get("body").append(lines);
    const left = state.rows.length - state.made;
    get("more").hidden = left === 0;
    get("more").textContent = `Show ${left} more`;
  };
  const update = () => {
    state.rows = sorted(data.rows.filter(passes));
    state.made = 0;
    get("body").textContent = "";
    grow(small.matches ? 20 : CHUNK);
    showHead();
    const column = COLUMNS.find((c) => c.key === state.sort);
    get("count").textContent = `${state.rows.length} of ${data.rows.length} rows`;
    get("sorted").textContent = column ? `by ${column.label}, ${state.down ? "highest" : "lowest"} first` : "";
    // an order that the list does not have, such as lowest scores first, is shown by the heading alone
    const by = get("f-sort"), order = state.sort ? `${state.down ? "-" : ""}${state.sort}` : "";
    by.value = [...by.options].some((one) => one.value === order) ? order : "";
    KV.address.set({ ...Object.fromEntries([...FIELDS.map(([id]) => id), "part", "show", "search"].map((id) => [id, state.filters[id] === "ok" ? "" : state.filters[id]])), sort: order });
    listeners.forEach((listener) => listener());
  };
  /** Filters and order as the address has them; what it names and this page lacks is left out. */
  const follow = () => {
    const wanted = KV.address.get();
    state.filters = {};
    for (const id of [...FIELDS.map(([id_]) => id_), "part", "show"]) {
      const node = get(`f-${id}`);
      if (!node) continue;
      const value = wanted.get(id) || "";
      node.value = [...node.options].some((one) => one.value === value) ? value : node.options[0].value;
      state.filters[id] = node.value;
    }
    get("search").value = state.filters.search = wanted.get("search") || "";
    const order = wanted.get("sort") || "", key = order.replace(/^-/, "");
    state.sort = COLUMNS.some((c) => c.key === key) ? key : null;
    state.down = Boolean(state.sort) && order.startsWith("-");
    update();
  };

  /* ---- details of a row */
  const copy = (text, button) => {
    const done = () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
    const select = () => {
      const range_ = document.createRange();
      range_.selectNodeContents(button.parentNode.querySelector("code"));
      getSelection().removeAllRanges();
      getSelection().addRange(range_);
      if (document.execCommand("copy")) done();
    };
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, select);
    else select();
  };
  const details = (row) => {
    const facts = el("dl", { class: "facts" });
    const fact = (name, value) => { if (known(value) && value !== MISSING) facts.append(el("div", {}, el("dt", { text: name }), el("dd", { text: value }))); };
    PARTS.forEach((part, i) => fact(part, row.parts[i]));
    fact("protocol", row.protocol);
    fact("run", row.id);
    if (known(row.p)) fact("p-value", `${row.p.toPrecision(2)}, corrected ${row.pc.toPrecision(2)} (${row.dn} samples)`);
    if (known(row.kept)) fact("tokens kept", row.kept.toFixed(1));
    if (known(row.peak)) fact("most bytes held", KV.bytes(row.peak));
    if (row.moved) fact("moved per token", KV.bytes(row.moved));
    if (known(row.compress)) fact("compression", KV.seconds(row.compress));
    Object.entries(row.details).forEach(([key, value]) => fact(key.replace(/^(versions|protocol)\./, ""), value));
    fact("source", row.source);
    const links = row.origin === "measured" && el("p", { class: "links" },
      row.n > 0 && el("button", { type: "button", class: "primary", text: "View samples", onclick: () => KV.viewer.open(row) }),
      [["record.json", "Record"], ["samples.jsonl", "Samples as JSON lines"], ["config.yaml", "Configuration"]]
        .map(([file, label]) => el("a", { href: `${row.dir}/${file}`, text: label })));
    const command = row.cmd && el("div", { class: "cmd" }, el("span", { class: "muted", text: "Repeat it:" }), el("code", { text: row.cmd }),
      el("button", { type: "button", class: "quiet", text: "Copy", onclick: (event) => copy(row.cmd, event.currentTarget) }));
    return el("div", { class: "detail" }, row.error && el("p", { class: "bad", text: row.error }), links, command, facts);
  };
  const toggle = (row, button) => {
    const line = button.closest("tr");
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    if (open) line.nextSibling.remove();
    else line.after(el("tr", { class: "more" }, el("td", { colspan: COLUMNS.length }, details(row))));
  };

  const start = () => {
    buildFilters();
    buildHead();
    get("more").addEventListener("click", () => grow(small.matches ? 40 : CHUNK * 4));
    // where the table scrolls by itself, rows are made shortly before they come into view
    const box = get("body").closest(".scroll");
    box.addEventListener("scroll", () => { if (!get("more").hidden && box.scrollHeight - box.scrollTop - box.clientHeight < 900) grow(CHUNK); }, { passive: true });
    addEventListener("hashchange", follow);
    follow();
  };
  return { start, state, update, changed: (f) => listeners.push(f), visible: () => state.rows, shared };
})();
