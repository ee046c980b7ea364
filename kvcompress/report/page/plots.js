/* Figures: looks of methods, and what all figures have in common. */
"use strict";
KV.plots = (() => {
  const { data, el, colour, known } = KV;
  // kvcompress/report/styles.py says which method has which; null is the full cache's, black or white as the theme wants it
  const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999933"];
  // on a dark ground brighter, and the two blues further apart
  const DARK = ["#4a8fe0", "#f0762b", "#17b38a", "#dd94bd", "#a3d8f7", "#f2b53a", "#c9c95f"];
  const ink = (place) => (known(place) ? (KV.theme.dark() ? DARK : COLOURS)[place] : colour("text"));
  // in a box of 12 by 12
  const MARKS = { o: "M12 6A6 6 0 1 1 0 6A6 6 0 1 1 12 6Z", s: "M1 1H11V11H1Z", "^": "M6 0.5L12 11.5H0Z", v: "M0 0.5H12L6 11.5Z", D: "M6 0L12 6L6 12L0 6Z",
    P: "M4 0H8V4H12V8H8V12H4V8H0V4H4Z", X: "M0 2.5L2.5 0L6 3.5L9.5 0L12 2.5L8.5 6L12 9.5L9.5 12L6 8.5L2.5 12L0 9.5L3.5 6Z",
    p: "M6 0L12 4.6L9.7 12H2.3L0 4.6Z", "*": "M6 0L7.6 4.2L12 4.4L8.5 7.2L9.7 11.6L6 9.1L2.3 11.6L3.5 7.2L0 4.4L4.4 4.2Z" };
  const DASHES = ["solid", [6, 3], [2, 2], [6, 3, 2, 3]];
  // even in lightness, made for colour-blind readers; bright is much
  const CIVIDIS = ["#00224e", "#2a3f6d", "#575d6d", "#7d7c78", "#a59c74", "#d2c060", "#fee838"];
  const narrow = () => innerWidth < 700;
  // more names than this do not stand beside their lines without lying over each other: they are a list below the figure
  const DIRECT = 18;
  const direct = (count) => !narrow() && count <= DIRECT;

  /** The look of a name: the same in every figure, and in the PNG and SVG files. */
  const style = (name) => {
    const [place, mark, hollow, dash] = (Object.hasOwn(data.styles, name) && data.styles[name]) || [6, "o", true, 0];
    const c = ink(place);
    return { colour: c, mark: MARKS[mark], symbol: `path://${MARKS[mark]}`, hollow, dash: DASHES[dash],
      item: hollow ? { color: colour("panel"), borderColor: c, borderWidth: 1.6 } : { color: c } };
  };

  const axis = (more) => {
    const { nameTextStyle, ...rest } = more;
    return {
      nameLocation: "middle", axisLine: { show: more.type !== "category", lineStyle: { color: colour("line") } }, axisTick: { show: false },
      splitLine: { show: true, lineStyle: { color: colour("line"), opacity: 0.55 } },
      nameTextStyle: { color: colour("muted"), fontSize: 12, ...nameTextStyle }, ...rest,
      axisLabel: { color: colour("muted"), fontSize: 11, hideOverlap: true, ...rest.axisLabel },
    };
  };
  /** What a pointer on a point says: lines of plain text. */
  const tip = (lines) => el("div", { class: "tip" }, lines.filter(Boolean).map((line, i) => el("div", { class: i ? "" : "strong", text: line })));
  const common = () => ({
    animation: false, textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
    aria: { enabled: true },
    tooltip: { confine: true, backgroundColor: colour("panel"), borderColor: colour("line"), textStyle: { color: colour("text"), fontSize: 12 } },
  });

  const live = new Map();
  const watch = new ResizeObserver((seen) => seen.forEach(({ target }) => live.get(target)?.resize()));
  /** Draw into a box; the same box is drawn anew. */
  const draw = (box, option) => {
    live.get(box)?.dispose();
    const chart = echarts.init(box, null, { renderer: "svg" });
    chart.setOption({ ...common(), ...option });
    live.set(box, chart);
    watch.observe(box);
    return chart;
  };
  const clear = (box) => { live.get(box)?.dispose(); live.delete(box); watch.unobserve(box); };

  /** Names of lines right of the panel, apart from each other and near to where the lines end. */
  const names = (ends, x, low, high, log) => {
    const to = log ? Math.log10 : (v) => v, back = log ? (v) => 10 ** v : (v) => v;
    const order = [...ends].sort((a, b) => to(a.y) - to(b.y) || b.rank - a.rank);
    const bottom = to(low), top = to(high), gap = Math.min((top - bottom) / 19, (top - bottom) / Math.max(1, order.length - 1));
    const places = order.map((end) => Math.min(top, Math.max(bottom, to(end.y))));
    for (let i = 1; i < places.length; i += 1) places[i] = Math.max(places[i], places[i - 1] + gap);
    for (let i = places.length - 1, at = top; i >= 0; i -= 1, at = places[i + 1] - gap) places[i] = Math.min(places[i], at);
    return { name: "names", type: "scatter", symbolSize: 0.01, silent: true, clip: false, z: 5,
      data: order.map((end, i) => ({ value: [x, back(places[i])], ...(end.look && direct(ends.length) ? { symbol: end.look.symbol, symbolSize: 8, symbolOffset: [14, 0], itemStyle: end.look.item } : {}),
        label: { show: direct(ends.length), position: "right", align: "left", distance: end.look ? 20 : 10, fontSize: 11, color: colour("text"),
          formatter: `${end.look ? "" : "{dot|●} "}${end.name.replace(/[{}|]/g, " ")}`, rich: { dot: { color: end.colour, fontSize: 12 } } } })) };
  };

  /** The intervals of a line's points as a band: [x, low, high] each, in the order of the line. */
  const band = (points, fill) => ({ name: "interval", type: "custom", silent: true, clip: true, z: 1, data: [points[0].slice(0, 2)],
    renderItem: (params, api) => ({ type: "polygon", style: { fill, opacity: 0.13 },
      shape: { points: [...points.map((p) => api.coord([p[0], p[2]])), ...[...points].reverse().map((p) => api.coord([p[0], p[1]]))] } }) });

  const heat = ({ x, y, cells, max, xName, yName, format, describe }) => {
    const width = (narrow() ? innerWidth - 110 : 560) / x.length;
    const long = Math.max(...x.map((text) => text.length));
    const turned = x.length > 8 && long > 3;
    const under = turned ? Math.min(100, 22 + 5 * long) : 28;
    const wide = Math.max(...y.map((text) => text.length));
    return {
      grid: { left: (narrow() ? 20 : 34) + Math.min(110, 7 * wide) + (yName ? 8 : 0), right: 16, top: 34, bottom: under + 22 },
      xAxis: axis({ type: "category", data: x, name: xName, nameGap: under, splitLine: { show: false },
        axisLabel: { rotate: turned ? 55 : 0, interval: x.length > (narrow() ? 12 : 40) || narrow() && !turned ? "auto" : 0, hideOverlap: !turned || x.length > (narrow() ? 12 : 40) } }),
      yAxis: axis({ type: "category", data: y, name: yName, nameGap: 20 + Math.min(110, 7 * wide), inverse: true, splitLine: { show: false },
        axisLabel: { interval: "auto", width: 110, overflow: "truncate" } }),
      visualMap: { min: 0, max, calculable: false, orient: "horizontal", right: 10, top: 0, itemHeight: 110, itemWidth: 10,
        inRange: { color: CIVIDIS }, textStyle: { color: colour("muted"), fontSize: 11 }, text: [format(max), "0"], hoverLink: false },
      tooltip: { ...common().tooltip, formatter: (point) => tip(describe(point.value)) },
      series: [{ type: "heatmap", data: cells, itemStyle: { borderColor: colour("panel"), borderWidth: width > 12 ? 1.5 : 0 },
        label: { show: width > 30 && y.length <= 22 && x.length * y.length <= 400, fontSize: 10, formatter: (point) => format(point.value[2]) },
        emphasis: { itemStyle: { borderColor: colour("text"), borderWidth: 2 } } }],
    };
  };
  /* dark text on bright cells, bright on dark ones */
  const inked = (option, max) => {
    option.series[0].data = option.series[0].data.map((value) => ({ value, label: { color: known(value[2]) && value[2] > 0.55 * max ? "#111" : "#fff" } }));
    return option;
  };
  return { style, axis, tip, names, band, draw, clear, common, narrow, direct, heat: (spec) => inked(heat(spec), spec.max), live, COLOURS };
})();
