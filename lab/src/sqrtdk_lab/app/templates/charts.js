// Numbers as the reports write them, and plots as SVG: axes, curves, points, whiskers.
const charts = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const [HEIGHT, TOP, BOTTOM, RIGHT] = [242, 22, 40, 12];
  const [LARGEST_DRAWN, LEVEL_SPREAD] = [1e100, 1e-6];

  // As `%.4g`: four digits, none dropped left of the point below a million.
  function shown(value, digits = 4) {
    if (value === null || Number.isNaN(value)) return "-";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    const size = Math.abs(value);
    if (size >= 10 ** digits && size < 1e6) return value.toFixed(0);
    if (size === 0) return "0";
    const [head, power] = value.toExponential(digits - 1).split("e");
    const exponent = Number(power);
    if (exponent >= -4 && exponent < digits) {
      const text = value.toFixed(digits - 1 - exponent);
      return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
    }
    const sign = exponent < 0 ? "-" : "+";
    return `${head.includes(".") ? head.replace(/\.?0+$/, "") : head}e${sign}${String(Math.abs(exponent)).padStart(2, "0")}`;
  }
  const ratio = (value) => (Math.abs(value) >= 0.1 && Math.abs(value) < 1000 ? value.toFixed(3) : shown(value));
  function percent(value) {
    const whole = value === 0 || value === 1 || (value >= 0.1 && value <= 0.99);
    return `${(100 * value).toFixed(whole ? 0 : 1)}%`;
  }

  function node(name, attributes, children = []) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  // "p_{(i)}" as a text with an index, "10^{-3}" as one with a power.
  function label(text) {
    const parts = [];
    let back = 0;
    for (const [, plain, sign, index] of text.matchAll(/([^_^]*)(?:([_^])\{([^}]*)\})?/g)) {
      if (plain) parts.push(node("tspan", { dy: back }, [plain]));
      if (plain) back = 0;
      if (index === undefined) continue;
      const shift = sign === "_" ? 4 : -5;
      parts.push(node("tspan", { dy: back + shift, "font-size": "0.78em" }, [index]));
      back = -shift;
    }
    return parts;
  }

  // -- axes: a function from values to pixels, and its ticks with their labels

  const drawable = (value, log) => Number.isFinite(value) && Math.abs(value) < LARGEST_DRAWN && (!log || value > 0);

  function linear(low, high, from, to) {
    const rough = (high - low) / 5;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1) ticks.push([k * step, shown(k * step)]);
    return { at: (value) => from + ((value - low) / (high - low)) * (to - from), ticks };
  }

  function logarithmic(low, high, from, to, base, most) {
    const log = (value) => Math.log(value) / Math.log(base);
    const [first, last] = [Math.ceil(log(low) - 1e-9), Math.floor(log(high) + 1e-9)];
    const plain = base === 2 || (first >= -2 && last <= 3);
    const every = Math.max(1, Math.ceil((last - first + 1) / most));
    const ticks = [];
    for (let k = Math.ceil(first / every) * every; k <= last; k += every) {
      ticks.push([base ** k, plain ? shown(base ** k) : `10^{${String(k).replace("-", "−")}}`]);
    }
    if (base === 10 && ticks.length < 2) for (let k = first - 1; k <= last; k += 1) for (const m of [2, 5]) {
      const value = m * 10 ** k;
      if (value >= low && value <= high) ticks.push([value, shown(value)]);
    }
    return { at: (value) => from + (log(value / low) / log(high / low)) * (to - from), ticks: ticks.sort((a, b) => a[0] - b[0]) };
  }

  // Equal numbers that were rounded apart are one level, in the middle of the axis.
  function ends(values, log) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const room = 0.04;
    if (high - low <= LEVEL_SPREAD * Math.max(Math.abs(low), Math.abs(high))) return log ? [low / 10, high * 10] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    if (!log) return [low - room * (high - low), high + room * (high - low)];
    const widen = (high / low) ** room;
    return [low / widen, high * widen];
  }

  // -- one plot

  // series: { x, y, low, high, style: "line" | "curve" | "dashed" | "points", colour }; lines: [value, label].
  // Returns null if no value has a place on the axes.
  function draw({ x, y, xLog = 0, yLog = false, series, lines = [] }, width, named) {
    const points = series.map((one) => one.x.map((value, at) => ({
      x: value, y: one.y[at], low: one.low?.[at] ?? one.y[at], high: one.high?.[at] ?? one.y[at],
    })).filter((point) => drawable(point.x, xLog) && drawable(point.y, yLog)));
    const all = points.flat();
    if (!all.length) return null;
    const heights = all.flatMap((point) => [point.y, point.low, point.high]).filter((value) => drawable(value, yLog));
    const [yLow, yHigh] = ends([...heights, ...lines.map(([value]) => value)], yLog);
    const [xLow, xHigh] = ends(all.map((point) => point.x), xLog);
    const up = [HEIGHT - BOTTOM, TOP];
    const vertical = yLog ? logarithmic(yLow, yHigh, ...up, 10, 6) : linear(yLow, yHigh, ...up);
    const left = 14 + 6.6 * Math.max(...vertical.ticks.map(([, text]) => text.replace(/[\^{}]/g, "").length));
    const across = [left, width - RIGHT];
    const horizontal = xLog ? logarithmic(xLow, xHigh, ...across, xLog, Math.max(3, Math.floor(width / 44))) : linear(xLow, xHigh, ...across);
    const parts = [];
    for (const [value, text] of vertical.ticks) {
      const at = vertical.at(value);
      parts.push(node("path", { class: "grid", d: `M${left} ${at}H${width - RIGHT}` }));
      parts.push(node("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, label(text)));
    }
    for (const [value, text] of horizontal.ticks) {
      const at = horizontal.at(value);
      parts.push(node("path", { class: "grid", d: `M${at} ${TOP}V${HEIGHT - BOTTOM}` }));
      parts.push(node("text", { x: at, y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, label(text)));
    }
    parts.push(node("text", { class: "axis", x: 0, y: 12 }, label(y)));
    parts.push(node("text", { class: "axis", x: (left + width - RIGHT) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, label(x)));
    for (const [value, text] of lines) {
      const at = vertical.at(value);
      parts.push(node("path", { class: "line k8", d: `M${left} ${at}H${width - RIGHT}`, "stroke-dasharray": "1.5 3" }));
      parts.push(node("text", { x: width - RIGHT, y: at - 5, "text-anchor": "end" }, label(text)));
    }
    series.forEach((one, at) => parts.push(drawn(one, points[at], horizontal, vertical, yLog)));
    return node("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-labelledby": named }, parts);
  }

  function drawn({ style, colour }, points, horizontal, vertical, yLog) {
    const places = points.map((point) => [horizontal.at(point.x).toFixed(1), vertical.at(point.y).toFixed(1)]);
    const path = places.map(([px, py], at) => `${at ? "L" : "M"}${px} ${py}`).join("");
    const parts = [];
    if (style !== "points") parts.push(node("path", { class: "line", d: path, ...(style === "dashed" ? { "stroke-dasharray": "6 4" } : {}) }));
    const spread = points.filter((point) => point.low < point.high && drawable(point.high, yLog));
    for (const point of spread) {
      const at = horizontal.at(point.x).toFixed(1);
      const foot = drawable(point.low, yLog) ? vertical.at(point.low) : HEIGHT - BOTTOM;
      parts.push(node("path", { class: "whisker", d: `M${at} ${foot.toFixed(1)}V${vertical.at(point.high).toFixed(1)}` }));
    }
    const dots = style === "points" || (style === "line" && points.length <= 24) || (points.length === 1 && style === "curve");
    if (dots) for (const [px, py] of places) parts.push(node("circle", { class: "dot", cx: px, cy: py, r: style === "points" ? 2.8 : 2.4 }));
    return node("g", { class: `k${colour}` }, parts);
  }

  return { shown, ratio, percent, draw };
})();
