/* The cards with figures of one group of comparable runs. Each says what it can draw, draws it, and gives its numbers. */
"use strict";
KV.charts = (() => {
  const { data, el, get, option, unique, known } = KV;
  const { style, axis, tip, narrow, direct } = KV.plots;
  const BANDS = 7; // bands of more lines than these are a smear
  const state = { group: null, drawn: new Set(), pick: {} };

  const rowsOf = (group) => data.rows.filter((r) => r.g === group && r.ok);
  // where nothing is compressed the divergence is rounding, and has no place on a log scale
  const meant = (r) => known(r[measure().key]) && !(measure().log && (r.base || (r.share && r.budget >= 1 && r.ratio > 0.999)));
  const measure = () => (data.groups[state.group].divergence
    ? { key: "kl", label: "KL to the full cache (nats)", log: true, better: -1, format: (v) => v.toPrecision(3) }
    : { key: "score", label: "score", log: false, better: 1, format: (v) => v.toFixed(3) });
  const lines = (rows) => {
    const found = new Map();
    rows.filter((r) => !r.base).forEach((r) => { if (!found.has(r.name)) found.set(r.name, []); found.get(r.name).push(r); });
    return found;
  };
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const curve = (line, m) => line.map((r) => `${r.budget}:${known(r[m.key]) ? r[m.key].toFixed(3) : ""}`).sort().join();
  const selected = (rows) => rows.filter((r) => r.base || state.drawn.has(r.name));
  const styleOf = (name) => (state.drawn.has(name) ? style(name) : null);
  const floor = (v) => (measure().log ? Math.max(v, 1e-6) : v);
  const others = () => data.rows.filter((r) => r.origin !== "measured" && r.task === data.groups[state.group].task && known(r.score) && r.score <= 1);

  const describe = (row) => [KV.title(row), row.origin !== "measured" && `${row.origin}, not measured here: ${[row.model, row.source].filter(Boolean).join(", ")}`, `${measure().label}: ${measure().format(row[measure().key])}`,
    !measure().log && known(row.lo) && `95% interval ${row.lo.toFixed(2)} to ${row.hi.toFixed(2)}`,
    !row.base && known(row.delta) && `Δ full ${KV.signed(row.delta)}${row.sig ? " (significant)" : ""}`,
    known(row.ratio) && `bytes held ${KV.share(row.ratio)}${row.share ? `, asked ${KV.share(row.budget, 0)}` : ""}`,
    known(row.read) && `read per token ${KV.bytes(row.read)}`, known(row.tpot) && `per token ${KV.seconds(row.tpot)}`, ...row.flags];
  const table = (rows, columns) => ({ head: columns.map(([name]) => name), body: rows.map((row) => columns.map(([, of]) => of(row))) });
  const plainTable = (rows, x) => table(rows, [["run", KV.title], [x.label, (r) => x.show(r[x.key])], [measure().label, (r) => measure().format(r[measure().key])]]);

  const choice = (id, label, options, fallback) => {
    const values = options.map(([value]) => String(value));
    if (!values.includes(String(state.pick[id]))) state.pick[id] = String(fallback ?? values[0]);
    const node = el("select", { id: `c-${id}` }, options.map(([value, text]) => option(value, text, String(value) === state.pick[id])));
    node.addEventListener("change", () => { state.pick[id] = node.value; redraw(); });
    return el("label", { class: "field" }, label, node);
  };
  const budgets = (rows) => unique(rows.filter((r) => !r.base).map(KV.budget)).sort((a, b) => String(b).localeCompare(String(a), "en", { numeric: true }));
  const budgetChoice = (id, rows) => {
    const found = budgets(rows);
    return choice(id, "Budget", found.map((b) => [b, b]), found.includes("0.25") ? "0.25" : found[Math.floor(found.length / 2)]);
  };
  const atBudget = (id, rows) => selected(rows).filter((r) => r.base || KV.budget(r) === state.pick[id]);
  /** The part of 0 to 1 that scores and their intervals take, in tenths. */
  const scores = (rows) => {
    const found = rows.flatMap((r) => [r.score, r.lo, r.hi]).filter(known);
    return found.length ? [Math.max(0, Math.floor(10 * Math.min(...found) + 1e-9) / 10), Math.min(1, Math.ceil(10 * Math.max(...found) - 1e-9) / 10)] : [0, 1];
  };
  /** The part that shares take, in steps of a twentieth. */
  const across = (values) => (values.length ? [Math.max(0, Math.ceil(20 * Math.min(...values) - 1) / 20), Math.ceil(20 * Math.max(...values) - 0.2) / 20] : [0, 1]);
  const yAxis = (rows) => {
    const m = measure(), [min, max] = scores(rows);
    return axis({ type: m.log ? "log" : "value", name: `${m.label} ${m.better > 0 ? "↑" : "↓"}`, nameGap: narrow() ? 34 : 44, ...(m.log ? {} : { min, max: max > min ? max : min + 0.1 }) });
  };

  /* ---- score by budget */
  const XS = {
    ratio: { key: "ratio", label: "bytes held, measured", show: (v) => KV.share(v), unit: 1, tick: (v) => KV.share(v, 0) },
    budget: { key: "budget", label: "budget asked for", show: (v) => KV.share(v, 0) },
    read: { key: "read", label: "MiB read per decoded token", show: KV.bytes, unit: 2 ** 20, tick: String },
    tpot: { key: "tpot", label: "milliseconds per decoded token", show: KV.seconds, unit: 0.001, tick: String },
  };
  const byBudget = {
    id: "budget", title: () => (measure().log ? "Divergence by budget" : "Score by budget"), wide: true,
    note: () => "A line per method with the band of its 95% intervals, the full cache dashed. Budgets fall to the right. Compare at equal bytes held, not at equal names of budgets. +2 after a name: two grey methods have the same scores.",
    can: (rows) => [...lines(rows).values()].some((line) => line.filter((r) => known(r.ratio)).length > 1),
    controls: () => [choice("x-budget", "Across", [["ratio", "bytes held, measured"], ["budget", "budget asked for"]])],
    draw: (rows) => {
      const x = XS[state.pick["x-budget"]], m = measure();
      const usable = rows.filter((r) => meant(r) && known(r[x.key]) && (x.key !== "budget" || r.share));
      const base = usable.find((r) => r.base);
      const curves = new Map([...lines(usable)].map(([name, line]) => [name, curve(line, m)]));
      const alike = (name) => {
        const count = [...curves].filter(([other, text]) => other !== name && text === curves.get(name) && !state.drawn.has(other)).length;
        return count ? ` +${count}` : "";
      };
      const series = [...lines(usable)].map(([name, line]) => {
        const s = styleOf(name);
        const points = [...line].sort((p, q) => q[x.key] - p[x.key]).map((r) => ({ value: [r[x.key], floor(r[m.key])], row: r }));
        return { name, type: "line", data: points, symbol: s ? s.symbol : "none", symbolSize: 7, z: s ? 3 : 1, silent: !s, showAllSymbol: true,
          lineStyle: s ? { color: s.colour, width: 2, type: s.dash } : { color: KV.colour("faint"), width: 1 }, itemStyle: s ? s.item : { color: KV.colour("faint") },
          emphasis: { focus: "series" } };
      });
      const all = series.flatMap((one) => one.data.map((p) => p.value[1]));
      const ends = series.filter((one) => state.drawn.has(one.name) && one.data.length)
        .map((one) => ({ name: one.name + alike(one.name), y: one.data[one.data.length - 1].value[1], look: styleOf(one.name), colour: styleOf(one.name).colour, rank: mean(one.data.map((p) => p.value[1])) }));
      const [left, right] = across(usable.filter((r) => !r.base).map((r) => r[x.key])), [low, high] = m.log ? [Math.min(...all), Math.max(...all)] : scores(usable);
      series.push(KV.plots.names(ends, left, low, high, m.log));
      if (!m.log && ends.length <= BANDS) for (const [name, line] of lines(usable)) {
        const points = [...line].sort((p, q) => q[x.key] - p[x.key]).filter((r) => known(r.lo)).map((r) => [r[x.key], r.lo, r.hi]);
        if (state.drawn.has(name) && points.length > 1) series.push(KV.plots.band(points, styleOf(name).colour));
      }
      if (base) series.push({ name: base.name, type: "line", data: [], silent: true, markLine: { symbol: "none", silent: true, lineStyle: { color: KV.colour("muted"), type: [4, 3], width: 1 },
        label: { formatter: () => base.name, position: "insideStartTop", color: KV.colour("muted") }, data: [{ yAxis: floor(base[m.key]) }] } });
      const grey = others().filter((r) => known(r.ratio) || r.share);
      if (grey.length && !m.log) series.push({ name: "others", type: "scatter", symbolSize: 6, itemStyle: { color: KV.colour("muted"), opacity: 0.45 }, z: 2,
        data: grey.map((r) => ({ value: [r.ratio ?? r.budget, r.score], row: r })).filter(({ value }) => value[0] >= left && value[0] <= right && value[1] >= low && value[1] <= high) });
      return { legend: ends, plot: { grid: { left: narrow() ? 50 : 64, right: direct(ends.length) ? 150 : 18, top: 16, bottom: 48 },
        xAxis: axis({ type: "value", inverse: true, name: x.label, nameGap: 28, min: left, max: right, axisLabel: { formatter: (v) => `${Math.round(100 * v)}%` } }),
        yAxis: yAxis(usable), series, tooltip: { ...KV.plots.common().tooltip, formatter: (p) => tip(describe(p.data.row)) } }, numbers: plainTable(usable, x) };
    },
  };

  /* ---- Pareto fronts */
  const front = (points, better) => {
    const order = [...points].sort((p, q) => p.value[0] - q.value[0] || better * (q.value[1] - p.value[1]));
    let best = -Infinity;
    return order.filter((p) => { const ok = better * p.value[1] > best; if (ok) best = better * p.value[1]; return ok; });
  };
  const pareto = {
    id: "pareto", title: "Pareto front", wide: true,
    note: () => `Each point is a run. The line joins those that no other run beats in both: cheaper to the left, better to the ${measure().better > 0 ? "top" : "bottom"}.`,
    can: (rows) => rows.filter((r) => known(r.ratio)).length > 1,
    controls: (rows) => [choice("x-pareto", "Cost", ["ratio", "read", "tpot"].filter((k) => rows.filter((r) => known(r[k])).length > 1).map((k) => [k, XS[k].label]))],
    draw: (rows) => {
      const x = XS[state.pick["x-pareto"]], m = measure();
      const usable = rows.filter((r) => meant(r) && known(r[x.key]));
      const points = usable.map((r) => ({ value: [r[x.key] / x.unit, floor(r[m.key])], row: r }));
      const best = front(points, m.better);
      const names = new Set();
      const series = points.map((p) => p.row.name).filter((n) => !names.has(n) && names.add(n)).map((name) => {
        const s = styleOf(name), base = points.find((p) => p.row.name === name).row.base;
        return { name, type: "scatter", symbol: base ? "diamond" : s ? s.symbol : "circle", symbolSize: base ? 13 : s ? 10 : 6, z: s || base ? 3 : 2,
          itemStyle: base ? { color: KV.colour("text") } : s ? { borderColor: KV.colour("panel"), borderWidth: 1, ...s.item } : { color: KV.colour("faint") },
          data: points.filter((p) => p.row.name === name), emphasis: { focus: "series" } };
      });
      series.push({ name: "front", type: "line", step: "end", symbol: "none", silent: true, z: 2, data: best.map((p) => p.value), lineStyle: { color: KV.colour("muted"), type: "dashed", width: 1.5 } });
      series.push({ name: "named", type: "scatter", symbolSize: 1, silent: true, z: 4, data: [...best.map((p, i) => ({ value: p.value, row: p.row, text: i && best[i - 1].row.name === p.row.name ? KV.budget(p.row) : KV.title(p.row) })),
        ...points.filter((p) => p.row.base && !best.includes(p)).map((p) => ({ ...p, text: KV.title(p.row) }))], itemStyle: { color: "transparent" },
        label: { show: true, position: "top", distance: 7, formatter: (p) => p.data.text, color: KV.colour("text"), fontSize: 11 }, labelLayout: { hideOverlap: true } });
      if (x.key === "ratio" && !m.log) series.push({ name: "others", type: "scatter", symbolSize: 5, itemStyle: { color: KV.colour("muted"), opacity: 0.45 },
        data: others().filter((r) => known(r.ratio) || r.share).map((r) => ({ value: [r.ratio ?? r.budget, r.score], row: r })).filter(({ value }) => value[1] >= scores(usable)[0] && value[1] <= scores(usable)[1]) });
      const drawn = [...names].filter((name) => state.drawn.has(name)).map((name) => ({ name, colour: style(name).colour }));
      return { legend: drawn, plot: { grid: { left: narrow() ? 50 : 64, right: narrow() ? 18 : 120, top: 22, bottom: 48 },
        xAxis: axis({ type: "value", scale: x.key === "tpot", name: x.label, nameGap: 28, max: x.key === "ratio" ? (v) => Math.max(1, Math.ceil(20 * v.max) / 20) : null,
          axisLabel: { formatter: x.tick } }), yAxis: yAxis(usable), series,
        tooltip: { ...KV.plots.common().tooltip, formatter: (p) => tip(describe(p.data.row)) } },
        numbers: plainTable(best.map((p) => p.row), x), caption: "The front" };
    },
  };

  /* ---- ranks at equal measured bytes */
  const ranks = {
    id: "ranks", title: "Rank at equal bytes",
    note: () => "Methods at the same measured share of bytes. A run within 2% is taken as it is; else two runs around it are joined by a straight line, and it says so. Never beyond the runs there are.",
    can: () => data.groups[state.group].ranks.some((rank) => rank.rows.length > 1),
    controls: () => [choice("rank", "Bytes held", data.groups[state.group].ranks.map((r) => [r.at, KV.share(r.at, 0)]), data.groups[state.group].ranks.some((r) => r.at === 0.25) ? 0.25 : undefined)],
    draw: () => {
      const found = data.groups[state.group].ranks.find((r) => String(r.at) === state.pick.rank);
      return { numbers: { head: ["rank", "may be", "method", "score", ""], body: found.rows.map((r) => [known(r.rank) ? r.rank : KV.MISSING, known(r.rank_low) ? (r.rank_low === r.rank_high ? r.rank_low : `${r.rank_low}–${r.rank_high}`) : KV.MISSING, [r.method, r.variant].filter(Boolean).join(" "), KV.fixed(r.score), r.interpolated ? "interpolated" : known(r.score) ? "measured" : "no runs around it"]) } };
    },
  };

  /* ---- needles */
  const shapes = (row) => KV.shapesOf(state.group)[row.index] || {};
  const heatMap = {
    id: "heat", title: "Needle heat map", wide: true,
    note: () => "Mean score by where the answer lies: depth runs down from the start of the context to its end.",
    can: (rows) => rows.some((r) => shapes(r).heat),
    lengths: (rows) => unique(rows.flatMap((r) => (shapes(r).heat || []).map((c) => c[0]))).sort((a, b) => a - b),
    controls: (rows) => (heatMap.lengths(rows).length < 2 ? []
      : [choice("heat-run", "Run", rows.filter((r) => shapes(r).heat).map((r) => [r.index, KV.title(r)]))]),
    draw: (rows) => {
      const lengths = heatMap.lengths(rows), several = lengths.length > 1;
      const runs = several ? rows.filter((r) => String(r.index) === state.pick["heat-run"]) : selected(rows).filter((r) => shapes(r).heat);
      const depths = unique(runs.flatMap((r) => shapes(r).heat.map((c) => c[1]))).sort((a, b) => a - b);
      const x = several ? lengths.map(String) : runs.map(KV.title);
      const cells = runs.flatMap((r, at) => shapes(r).heat.map(([length, depth, score]) => [several ? lengths.indexOf(length) : at, depths.indexOf(depth), score]));
      const plot = KV.plots.heat({ x, y: depths.map((d) => KV.share(d, 0)), cells, max: 1, xName: several ? "prompt length (tokens)" : `run, prompts of ${lengths[0]} tokens`, yName: "depth",
        format: (v) => (known(v) ? v.toFixed(2).replace(/\.?0+$/, "") : ""), describe: ([i, j, v]) => [x[i], `depth ${KV.share(depths[j], 0)}`, `score ${v.toFixed(3)}`] });
      return { plot, numbers: { head: ["depth", ...x], body: depths.map((d, j) => [KV.share(d, 0), ...x.map((_, i) => KV.fixed((cells.find((c) => c[0] === i && c[1] === j) || [])[2]))]) } };
    },
  };

  /* ---- lines along a generation */
  const along = (id, key, title, note, xName, y) => ({
    id, title, note: () => note, can: (rows) => rows.some((r) => shapes(r)[key]),
    controls: (rows) => [budgetChoice(id, rows.filter((r) => shapes(r)[key]))],
    draw: (rows) => {
      const runs = atBudget(id, rows).filter((r) => shapes(r)[key] && !(r.base && y.log));
      const series = runs.map((r) => {
        const s = r.base ? { colour: KV.colour("muted"), dash: "dashed", item: {} } : styleOf(r.name);
        const [steps, values] = shapes(r)[key];
        return { name: r.name, look: r.base ? null : s, type: "line", symbol: "circle", symbolSize: 3, data: steps.map((step, i) => [step, y.log ? Math.max(values[i], 1e-6) : values[i] / (y.unit || 1)]), lineStyle: { color: s.colour, type: s.dash, width: 1.8 }, itemStyle: { color: s.colour },
          emphasis: { focus: "series" }, z: r.base ? 1 : 3 };
      });
      const all = series.flatMap((one) => one.data.map((p) => p[1]));
      const low = y.log ? Math.min(...all) : 0, right = Math.max(...series.flatMap((one) => one.data.map((p) => p[0])));
      const ends = series.map((one) => ({ name: one.name, y: one.data[one.data.length - 1][1], look: one.look, colour: one.lineStyle.color, rank: 0 }));
      series.push(KV.plots.names(ends, right, low, Math.max(...all), y.log));
      return { legend: ends, plot: { grid: { left: narrow() ? 60 : 76, right: direct(ends.length) ? 130 : 18, top: 14, bottom: 46 }, xAxis: axis({ type: "value", name: xName, nameGap: 28, max: "dataMax" }),
        yAxis: axis({ type: y.log ? "log" : "value", min: y.log ? null : 0, name: y.name, nameGap: narrow() ? 46 : 60, axisLabel: { formatter: y.unit ? String : y.show } }), series,
        tooltip: { ...KV.plots.common().tooltip, formatter: (p) => tip([p.seriesName, `${xName} ${p.value[0]}`, y.show(p.value[1] * (y.unit || 1))]) } },
        numbers: { head: ["run", "at the start", "at the end"], body: runs.map((r) => { const v = shapes(r)[key][1]; return [KV.title(r), y.show(v[0]), y.show(v[v.length - 1])]; }) } };
    },
  });
  const held = along("held", "held", "Memory along the generation", "Bytes of the cache held as tokens are generated, mean over samples; a straight line where only its two ends were recorded.", "tokens generated", { name: "MiB held", show: KV.bytes, unit: 2 ** 20 });
  const drift = along("drift", "drift", "Divergence by position", "Does the drift from the full cache grow along the text?", "token after the prompt", { name: "KL (nats)", log: true, show: (v) => Number(v).toPrecision(2) });

  /* ---- budgets of layers and heads */
  const layers = {
    id: "layers", title: "Tokens kept per layer", wide: true,
    note: () => "Tokens that each layer keeps after compression, mean over heads and samples. One run shows its heads where the record has them.",
    can: (rows) => rows.some((r) => !r.base && shapes(r).layers),
    controls: (rows) => [choice("layer-view", "Show", [["all", "all methods drawn, by layer"], ...selected(rows).filter((r) => shapes(r).heads).map((r) => [r.index, `${KV.title(r)}: layer × head`])]),
      state.pick["layer-view"] === "all" && budgetChoice("layer-budget", rows)].filter(Boolean),
    draw: (rows) => {
      const one = rows.find((r) => String(r.index) === state.pick["layer-view"]);
      const runs = one ? [one] : atBudget("layer-budget", rows).filter((r) => shapes(r).layers && !r.base);
      const lists = one ? shapes(one).heads[0].map((_, head) => shapes(one).heads.map((layer) => layer[head])) : runs.map((r) => shapes(r).layers);
      const y = one ? lists.map((_, head) => `head ${head}`) : runs.map((r) => r.name);
      const x = (lists[0] || []).map((_, layer) => String(layer));
      const cells = lists.flatMap((list, j) => list.map((v, i) => [i, j, v]));
      const max = Math.max(1, ...cells.map((c) => c[2]));
      const format = (v) => (known(v) ? String(Math.round(v)) : "");
      return { plot: { ...KV.plots.heat({ x, y, cells, max, xName: "layer", yName: "", format, describe: ([i, j, v]) => [y[j], `layer ${i}`, `${v.toFixed(1)} tokens`] }), },
        numbers: { head: ["layer", ...y], body: x.map((name, i) => [name, ...lists.map((list) => format(list[i]))]) } };
    },
  };

  /* ---- data sets of a suite */
  const suite = {
    id: "suite", title: "Data sets of a suite", wide: true,
    note: () => "An average is given only where every data set has a score; missing cells stay missing.",
    can: () => data.suites.length > 0,
    mine: () => data.suites[state.pick.suite] || data.suites[0],
    controls: () => [choice("suite", "Suite", data.suites.map((s, i) => [i, [s.suite, s.setting.model, s.setting["protocol.question"] && `question ${s.setting["protocol.question"]}`].filter(Boolean).join(" · ")])),
      choice("suite-budget", "Bars at budget", unique(suite.mine().rows.map((r) => KV.budget(r))).map((b) => [b, b]))],
    draw: () => {
      const mine = suite.mine();
      const short = (t) => t.task.slice(t.task.indexOf("/") + 1);
      const order = [...mine.rows].sort((a, b) => (b.average ?? -1) - (a.average ?? -1));
      const bars = mine.rows.filter((r) => KV.budget(r) === state.pick["suite-budget"] || r.budget === 1).slice(0, 7);
      return { legend: bars.map((r) => ({ name: r.method, series: `${r.method}${r.budget === 1 ? "" : ` ${KV.budget(r)}`}`, colour: r.budget === 1 && r.method === "full" ? KV.colour("muted") : style(r.method).colour })), always: true, plot: { grid: { left: 50, right: 16, top: 16, bottom: 70 },
        xAxis: axis({ type: "category", data: mine.tasks.map(short), splitLine: { show: false }, axisLabel: { rotate: mine.tasks.length > 5 ? 40 : 0, interval: 0, hideOverlap: false } }),
        yAxis: axis({ type: "value", min: 0, name: "score ↑", nameGap: 34 }),
        series: bars.map((r) => ({ name: `${r.method}${r.budget === 1 ? "" : ` ${KV.budget(r)}`}`, type: "bar", data: r.cells, itemStyle: { color: r.budget === 1 && r.method === "full" ? KV.colour("muted") : style(r.method).colour } })),
        tooltip: { ...KV.plots.common().tooltip, formatter: (p) => tip([p.seriesName, p.name, KV.fixed(p.value)]) } },
        numbers: { head: ["method", "budget", "average", ...mine.tasks.map(short)], body: order.map((r) => [[r.method, r.variant].filter(Boolean).join(" "), KV.budget(r), KV.fixed(r.average), ...r.cells.map((c) => KV.fixed(c))]) },
        open: true, caption: mine.mixed.length ? `No averages: ${mine.mixed.join(", ")} comes with more than one protocol or metric.` : "" };
    },
  };

  const CARDS = [byBudget, pareto, suite, heatMap, ranks, held, drift, layers];

  /* ---- the cards themselves */
  const numeric = (text) => typeof text === "number" || /^[−+±\d–]/.test(text);
  const numbersTable = ({ head, body }) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "numbers" }, el("table", { class: "plain" },
    el("thead", {}, el("tr", {}, head.map((text, i) => el("th", { scope: "col", class: i && body.every((line) => numeric(line[i])) ? "right" : "", text })))),
    el("tbody", {}, body.map((line) => el("tr", {}, line.map((text, i) => el(i ? "td" : "th", { scope: i ? null : "row", class: i && numeric(text) ? "right" : "", text })))))));
  /** Names of what is drawn, as a list that wraps, where they cannot stand beside the lines; a name under the pointer is brought out. */
  const legend = (made, chart) => (!made.legend || (!made.always && direct(made.legend.length)) ? [] : made.legend.map(({ name, series, colour }) => {
    const item = el("li", { tabindex: "0" }, swatch(name.replace(/ \+\d+$/, ""), colour), name);
    const bring = (type) => () => chart.dispatchAction({ type, seriesName: (series || name).replace(/ \+\d+$/, "") });
    for (const event of ["mouseenter", "focus"]) item.addEventListener(event, bring("highlight"));
    for (const event of ["mouseleave", "blur"]) item.addEventListener(event, bring("downplay"));
    return item;
  }));
  const paint = (card, node) => {
    const rows = rowsOf(state.group);
    const box = node.querySelector(".plot");
    node.querySelector(".controls").replaceChildren(...card.controls(rows));
    const made = card.draw(rows);
    // a choice that leaves nothing, such as a budget that no method drawn has
    const nothing = !made.numbers.body.length || (made.plot && made.plot.yAxis.data && !made.plot.yAxis.data.length);
    if (nothing) { made.plot = null; made.numbers = { head: ["Nothing to draw with this choice."], body: [] }; }
    if (!made.plot) KV.plots.clear(box);
    box.hidden = !made.plot;
    if (made.plot) {
      box.setAttribute("aria-label", `${node.querySelector("h3").textContent}; its numbers follow as a table`);
      const chart = KV.plots.draw(box, made.plot);
      node.querySelector(".legend").replaceChildren(...legend(made, chart));
    } else node.querySelector(".legend").replaceChildren();
    const details = node.querySelector("details"), bare = node.querySelector(".bare");
    bare.replaceChildren(...(made.plot ? [] : [numbersTable(made.numbers)]));
    details.hidden = !made.plot;
    if (!made.plot) return;
    const wasOpen = details.open || made.open;
    details.replaceChildren(el("summary", { text: made.caption || "Numbers" }));
    const fill = () => { if (details.open && details.children.length === 1) details.append(numbersTable(made.numbers)); };
    details.ontoggle = fill;
    details.open = wasOpen;
    fill();
  };
  const nodes = new Map();
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    const found = nodes.get(entry.target);
    if (entry.isIntersecting && found && !found.painted) { found.painted = true; paint(found.card, entry.target); }
  }), { rootMargin: "300px" });

  const redraw = () => {
    const active = document.activeElement?.id;
    for (const [node, found] of nodes) if (found.painted) paint(found.card, node);
    if (active && document.activeElement?.id !== active) get(active)?.focus();
  };
  const build = () => {
    const rows = rowsOf(state.group);
    for (const node of nodes.keys()) { seen.unobserve(node); KV.plots.clear(node.querySelector(".plot")); }
    nodes.clear();
    get("cards").replaceChildren(...CARDS.filter((card) => card.can(rows)).map((card) => {
      const node = el("article", { class: `card ${card.wide ? "broad" : ""}`, id: `card-${card.id}` },
        el("h3", { text: typeof card.title === "function" ? card.title() : card.title }), el("p", { class: "muted", text: card.note() }), el("div", { class: "controls" }),
        el("div", { class: "plot", role: "img", "aria-label": "figure, drawn when it comes into view" }), el("ul", { class: "legend", "aria-label": "names" }), el("div", { class: "bare" }), el("details", {}));
      nodes.set(node, { card, painted: false });
      return node;
    }));
    for (const node of nodes.keys()) seen.observe(node);
  };

  /** A line and a mark as a figure has them; grey where the name is not drawn and no colour is given. */
  const swatch = (name, given) => {
    const s = given ? style(name) : styleOf(name);
    const svg = (tag, attributes) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
      Object.entries(attributes).forEach(([key, value]) => node.setAttribute(key, value));
      return node;
    };
    const ink = given || (s ? s.colour : KV.colour("faint"));
    const box = svg("svg", { class: "swatch", viewBox: "0 0 26 12", "aria-hidden": "true" });
    box.append(svg("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: ink, "stroke-width": 1.6, "stroke-dasharray": s && s.dash !== "solid" ? s.dash.join(" ") : "none" }));
    box.append(svg("path", { d: style(name).mark, transform: "translate(7.6 0.6) scale(0.9)", fill: style(name).hollow ? KV.colour("panel") : ink, stroke: ink, "stroke-width": 1.2 }));
    return box;
  };
  const chips = () => {
    const names = [...lines(rowsOf(state.group)).keys()].sort();
    const toggle = (name, on) => {
      if (on) state.drawn.add(name);
      else state.drawn.delete(name);
      chips();
      redraw();
    };
    const active = document.activeElement?.id;
    get("methods").replaceChildren(get("methods").querySelector("legend"), ...names.map((name, i) => {
      const box = el("input", { type: "checkbox", id: `chip-${i}` });
      box.checked = state.drawn.has(name);
      box.addEventListener("change", () => toggle(name, box.checked));
      return el("label", { class: `chip ${box.checked ? "on" : ""}` }, box, swatch(name), name);
    }));
    get("methods").hidden = names.length < 2;
    if (active?.startsWith("chip-")) get(active)?.focus();
  };
  const choose = (group) => {
    state.group = group;
    const info = data.groups[group], rows = rowsOf(group), m = measure();
    const means = [...lines(rows)].map(([name, line]) => [name, mean(line.filter((r) => known(r[m.key])).map((r) => r[m.key]))]).filter(([, v]) => !Number.isNaN(v));
    means.sort((a, b) => m.better * (b[1] - a[1]) || a[0].localeCompare(b[0]));
    // the best whose curves differ; one of several equal curves stands for all of them
    const curves = new Map([...lines(rows)].map(([name, line]) => [name, curve(line, m)]));
    const different = means.filter(([name], i) => !means.slice(0, i).some(([earlier]) => curves.get(earlier) === curves.get(name)));
    const names = unique([...different, ...means].map(([name]) => name)).slice(0, 7);
    state.drawn = new Set(names);
    get("group").value = String(group);
    const n = unique(rows.map((r) => r.n));
    const few = info.compared > 0 && Math.max(...n) < info.least ? ` With ${Math.max(...n)} samples and ${info.compared} comparisons nothing can be marked as significant; that takes ${info.least} samples or more.` : "";
    get("group-note").textContent = `${info.title} · ${rows.length} runs of ${n.length === 1 ? n[0] : `${Math.min(...n)} to ${Math.max(...n)}`} samples.${info.baseline ? "" : " No uncompressed run to compare with."}${few}`;
    chips();
    build();
  };
  const start = () => {
    const usable = data.groups.map((g, i) => [i, g]).filter(([i]) => rowsOf(i).length);
    if (!usable.length) { get("figures").hidden = true; return; }
    const several = (key) => unique(data.groups.map((g) => g[key])).length > 1;
    get("group").append(...usable.map(([i, g]) => option(i, [several("sweep") && g.sweep, g.model, g.task, g.protocol, several("metric") && g.metric].filter(Boolean).join(" · "))));
    get("group").addEventListener("change", () => { choose(Number(get("group").value)); KV.address.set({ setting: get("group").value }); });
    KV.table.changed(() => {
      const visible = KV.table.visible().filter((r) => r.ok && known(r.g));
      if (visible.length && !visible.some((r) => r.g === state.group)) choose(visible[0].g);
    });
    KV.theme.changed(() => { if (state.group !== null) { chips(); redraw(); } });
    const named = () => usable.map(([i]) => i).find((i) => String(i) === KV.address.get().get("setting"));
    addEventListener("hashchange", () => { const wanted = named(); if (wanted !== undefined && wanted !== state.group) choose(wanted); });
    const visible = KV.table.visible().find((r) => r.ok && known(r.g));
    choose(named() ?? (visible ? visible.g : usable[0][0]));
  };
  return { start, choose, state, front };
})();
