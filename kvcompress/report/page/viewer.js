/* Samples of two runs side by side. Their files are scripts beside the page, loaded when they are looked at. */
"use strict";
(() => {
  const { data, el, get, option, known } = KV;
  const waiting = {}, loaded = {};
  const receive = (name, value) => { loaded[name] = value; };
  KV.samples = receive;
  KV.prompts = receive;

  const load = (name) => (waiting[name] ||= new Promise((resolve, reject) => {
    const script = el("script", { src: `${encodeURIComponent(data.files)}/${name}` });
    script.addEventListener("load", () => (loaded[name] ? resolve(loaded[name]) : reject(new Error(name))));
    script.addEventListener("error", () => { delete waiting[name]; reject(new Error(name)); });
    document.head.append(script);
  }));

  const view = { a: null, b: null, items: [], at: 0, turn: 0 };
  const dialog = () => get("viewer");

  const choices = (row) => data.rows.filter((r) => r.g === row.g && r.origin === "measured" && r.n > 0);
  const fill = (select, rows, chosen, none) => {
    select.replaceChildren(...(none ? [option("", "nothing", !chosen)] : []), ...rows.map((r) => option(r.index, KV.title(r), r === chosen)));
  };
  const open = (row) => {
    const rows = choices(row);
    const base = rows.find((r) => r.base && r !== row) || rows.find((r) => r !== row) || null;
    fill(get("run-a"), rows, row, false);
    fill(get("run-b"), rows, base, true);
    get("differ").checked = false;
    dialog().showModal();
    show();
  };

  const show = async () => {
    const turn = (view.turn += 1);
    const pick = (id) => data.rows[get(id).value] || null;
    view.a = pick("run-a");
    view.b = get("run-b").value === "" ? null : pick("run-b");
    const group = data.groups[view.a.g];
    get("viewer-title").textContent = `${group.task} · ${group.protocol}`;
    get("viewer-status").textContent = "Loading …";
    try {
      const [prompts, a, b] = await Promise.all([load(group.prompts), load(view.a.file), view.b ? load(view.b.file) : []]);
      if (turn !== view.turn) return;
      const other = new Map(b.map((sample) => [sample.id, sample]));
      const all = a.map((sample) => ({ a: sample, b: other.get(sample.id), prompt: sample.prompt || prompts[sample.id] || {} }));
      view.items = all.filter((item) => !get("differ").checked || (item.b && item.b.score !== item.a.score));
      get("viewer-status").textContent = `${view.items.length} of ${all.length} samples`;
    } catch {
      if (turn !== view.turn) return;
      view.items = [];
      get("viewer-status").textContent = `The samples could not be loaded: is the folder ${data.files} beside this page?`;
    }
    list();
    select(0);
  };

  const list = () => {
    get("sample-list").replaceChildren(...view.items.map((item, at) => el("li", {},
      el("button", { type: "button", onclick: () => select(at) },
        el("span", { class: "id", text: item.a.id }),
        el("span", { class: "scores", text: KV.fixed(item.a.score, 2) + (item.b ? ` · ${KV.fixed(item.b.score, 2)}` : "") })))));
  };

  const strip = (item, sample, run) => {
    if (!sample || !sample.kept) return null;
    const canvas = el("canvas", { width: sample.kept.length, height: 1, role: "img",
      "aria-label": `Share of layers and heads that kept each part of the prompt, ${KV.title(run)}` });
    const painter = canvas.getContext("2d");
    sample.kept.forEach((value, x) => {
      painter.fillStyle = `rgba(${KV.theme.dark() ? "86,180,233" : "0,114,178"},${Math.max(0.03, value / 100)})`;
      painter.fillRect(x, 0, 1, 1);
    });
    const marks = (item.prompt.needles || []).map((offset) => {
      const mark = el("i", { class: "needle", title: "needle" });
      mark.style.left = `${(100 * offset) / item.prompt.tokens}%`;
      return mark;
    });
    return el("figure", { class: "strip" }, el("figcaption", { text: `kept by ${KV.title(run)}` }),
      el("div", { class: "band" }, canvas, marks),
      el("div", { class: "ends muted" }, el("span", { text: "start of the prompt" }), marks.length > 0 && el("span", { class: "key", text: "orange: needle" }),
        el("span", { text: `end${item.prompt.tokens ? `, ${item.prompt.tokens} tokens` : ""}` })));
  };
  const output = (sample, run) => {
    if (!run) return null;
    const box = el("section", { class: "output" }, el("h4", { text: KV.title(run) }));
    if (!sample) { box.append(el("p", { class: "muted", text: "This run has no such sample." })); return box; }
    box.append(el("p", { class: "muted", text: `score ${KV.fixed(sample.score)}${sample.end.length ? ` · ended by ${sample.end.join(", ")}` : ""}` }));
    sample.text.forEach((text) => box.append(el("pre", { text: text === "" ? "(nothing)" : text, tabindex: "0" })));
    if (sample.cut) box.append(el("p", { class: "muted", text: `${sample.cut} more characters are in samples.jsonl` }));
    return box;
  };
  const select = (at) => {
    const box = get("sample");
    const item = view.items[at];
    [...get("sample-list").querySelectorAll("button")].forEach((button, i) => {
      if (i === at) { button.setAttribute("aria-current", "true"); button.scrollIntoView({ block: "nearest" }); }
      else button.removeAttribute("aria-current");
    });
    if (!item) { box.replaceChildren(el("p", { class: "muted", text: "Nothing to show." })); return; }
    view.at = at;
    const { prompt } = item;
    const facts = [known(prompt.tokens) && `${prompt.tokens} tokens`, known(prompt.depth) && `needle at ${KV.share(prompt.depth, 0)}`].filter(Boolean);
    const expected = (prompt.references || []).map((texts) => texts.join("  or  ")).filter(Boolean);
    box.replaceChildren(...[
      el("div", { class: "sample-head" }, el("h3", { text: item.a.id }), el("span", { class: "muted", text: facts.join(" · ") }),
        el("span", { class: "steps" },
          el("button", { type: "button", class: "quiet", id: "previous", text: "← Previous", disabled: at === 0, onclick: () => select(at - 1) }),
          el("button", { type: "button", class: "quiet", id: "next", text: "Next →", disabled: at === view.items.length - 1, onclick: () => select(at + 1) }))),
      prompt.first && el("pre", { class: "prompt", text: `${prompt.first} …`, tabindex: "0" }),
      strip(item, item.a, view.a), view.b && strip(item, item.b, view.b),
      prompt.last && el("pre", { class: "prompt", text: `… ${prompt.last}`, tabindex: "0" }),
      expected.length > 0 && el("p", { class: "expected" }, el("b", { text: "Expected " }), expected.join(" · ")),
      el("div", { class: "outputs" }, output(item.a, view.a), output(item.b, view.b)),
    ].filter(Boolean));
  };

  KV.viewer = {
    open,
    start: () => {
      get("viewer-close").addEventListener("click", () => dialog().close());
      dialog().addEventListener("click", (event) => { if (event.target === dialog()) dialog().close(); });
      for (const id of ["run-a", "run-b", "differ"]) get(id).addEventListener("change", show);
      dialog().addEventListener("keydown", (event) => {
        if (/^(SELECT|INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
        const step = { ArrowRight: 1, j: 1, ArrowLeft: -1, k: -1 }[event.key];
        if (step && view.items[view.at + step]) { select(view.at + step); event.preventDefault(); }
      });
    },
  };
})();
