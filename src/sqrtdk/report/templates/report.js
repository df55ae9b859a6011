"use strict";
// Draws the maps and the distributions from the data block. Every text goes in as textContent or as an attribute.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const maps = document.getElementById("maps");
  if (!maps || !data.groups.length) return;
  // Viridis in nine steps: even in lightness, readable with every common colour blindness and in grey.
  const COLOURS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"]
    .map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  const SVG = "http://www.w3.org/2000/svg";
  const tip = document.getElementById("tip");
  const view = document.getElementById("head-view");
  const statistic = document.getElementById("statistic");
  const spread = document.getElementById("spread");
  const language = () => (document.documentElement.lang.startsWith("zh") ? 1 : 0);
  const fill = (text, parts) => text.replace(/\{(\w+)\}/g, (_, key) => parts[key]);
  const say = (key, parts = {}) => fill(data.words[key][language()], parts);
  const rows = data.groups.flatMap((group) => group.rows);
  const grid = []; // grid[row][head] is the cell
  let chosen = null;

  const svg = (name, attributes = {}, text = null) => add(document.createElementNS(SVG, name), attributes, text);
  const html = (name, attributes = {}, text = null) => add(document.createElement(name), attributes, text);
  function add(node, attributes, text) {
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    return node;
  }
  const number = (value) => (value === null || value === undefined ? NaN : Number(value));
  const finite = (values) => values.filter(Number.isFinite);
  function show(value, unit = "") {
    if (Number.isNaN(value)) return say("no_data");
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    if (unit === "%") return `${+(100 * value).toPrecision(3)}%`;
    const size = Math.abs(value) < 1e-9 ? 0 : Math.abs(value);
    if (size === 0) value = 0;
    const text = size !== 0 && (size >= 1e6 || size < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
    return (unit ? `${text} ${unit}` : text).replace("-", "−");
  }
  function colour(share) {
    const place = Math.max(0, Math.min(1, share)) * (COLOURS.length - 1);
    const low = Math.min(Math.floor(place), COLOURS.length - 2);
    const mixed = COLOURS[low].map((from, i) => Math.round(from + (COLOURS[low + 1][i] - from) * (place - low)));
    return `rgb(${mixed.join(",")})`;
  }

  // The function from a value to its place between 0 and 1, and the two ends.
  function scaleFor(values) {
    const known = finite(values).sort((a, b) => a - b);
    const low = known.length ? known[0] : 0;
    const high = known.length ? known[known.length - 1] : 1;
    const at = (value) => {
      if (!Number.isFinite(value)) return value > 0 ? 1 : 0;
      if (high === low) return 0.5;
      if (spread.value === "linear") return (value - low) / (high - low);
      let from = 0;
      let to = known.length;
      while (from < to) {
        const middle = (from + to) >> 1;
        if (known[middle] < value) from = middle + 1; else to = middle;
      }
      return from / Math.max(known.length - 1, 1);
    };
    return { low, high, at };
  }

  // Widths of texts as they will be drawn beside a map, in pixels.
  function widths(texts) {
    const ruler = svg("svg");
    maps.replaceChildren(ruler);
    const drawn = texts.map((text) => svg("text", { class: "fails" }, text));
    ruler.append(...drawn);
    const found = drawn.map((text) => Math.ceil(text.getComputedTextLength()));
    ruler.remove();
    return found;
  }

  function build() {
    maps.replaceChildren();
    grid.length = 0;
    const most = Math.max(...rows.map((row) => row.logits.length));
    const names = new Set([...rows.map((row) => row.label.slice(0, 12)), say("heads")]);
    const margin = 10 + Math.max(...widths([...names]));
    const room = Math.max(maps.clientWidth - 40, 300) - margin;
    const wide = Math.max(8, Math.min(48, Math.floor(room / most)));
    const tall = Math.max(12, Math.min(24, wide));
    const every = [1, 2, 4, 8, 16, 32].find((step) => step * wide >= 18) || 64;
    data.groups.forEach((group) => {
      maps.append(html("h3", {}, group.title));
      const heads = Math.max(...group.rows.map((row) => row.logits.length));
      const drawing = svg("svg", {
        width: margin + heads * wide + 4, height: group.rows.length * tall + 18, role: "group",
        "aria-label": say("map", { title: group.title }),
      });
      const hatch = svg("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse" });
      hatch.append(svg("rect", { width: 5, height: 5 }), svg("path", { d: "M0 5L5 0", "stroke-width": 1 }));
      if (!document.getElementById("hatch")) drawing.append(hatch);
      group.rows.forEach((row, y) => {
        drawing.append(svg("text", {
          class: row.fails ? "fails" : "layer", x: margin - 6, y: y * tall + tall / 2 + 4, "text-anchor": "end",
        }, row.label.slice(0, 12)));
        const line = [];
        row.logits.forEach((_, head) => {
          const cell = svg("rect", {
            class: "cell", x: margin + head * wide, y: y * tall, width: wide, height: tall, rx: 2, tabindex: -1, role: "button",
          });
          cell.place = { row, head, line: grid.length };
          line.push(cell);
          drawing.append(cell);
        });
        grid.push(line);
      });
      for (let head = 0; head < heads; head += every) {
        const x = margin + (head + 0.5) * wide;
        drawing.append(svg("text", { x, y: group.rows.length * tall + 14, "text-anchor": "middle" }, String(head)));
      }
      const corner = { x: margin - 6, y: group.rows.length * tall + 14, "text-anchor": "end" };
      drawing.append(svg("text", corner, say("heads")));
      maps.append(drawing);
    });
    paint();
    const line = chosen === null ? data.opens : [chosen.line, chosen.head];
    choose(grid[line[0]][line[1]]);
  }

  function paint() {
    const meta = data.statistics.find((item) => item.key === statistic.value);
    const unit = meta.unit[language()];
    const scale = scaleFor(rows.flatMap((row) => row.values[meta.key].map(number)));
    for (const line of grid) {
      for (const cell of line) {
        const { row, head } = cell.place;
        const value = number(row.values[meta.key][head]);
        cell.classList.toggle("nothing", Number.isNaN(value));
        if (Number.isNaN(value)) cell.removeAttribute("fill"); else cell.setAttribute("fill", colour(scale.at(value)));
        const told = say("cell", { site: row.site, head, name: meta.name[language()], value: show(value, unit) });
        cell.setAttribute("aria-label", row.fails ? `${told} (${say("fails")})` : told);
      }
    }
    document.getElementById("help").textContent = meta.help[language()];
    const legend = document.getElementById("legend");
    const ramp = svg("svg", { viewBox: "0 0 60 4", preserveAspectRatio: "none", role: "img", "aria-label": say("scale") });
    for (let i = 0; i < 60; i += 1) ramp.append(svg("rect", { x: i, y: 0, width: 1.05, height: 4, fill: colour(i / 59) }));
    const swatch = svg("svg", { viewBox: "0 0 20 12", width: 20, role: "img", "aria-label": say("hatched") });
    swatch.append(svg("rect", { width: 20, height: 12, class: "nothing" }));
    swatch.setAttribute("class", "hatched");
    legend.replaceChildren(html("span", {}, show(scale.low, unit)), ramp, html("span", {}, show(scale.high, unit)));
    if (rows.some((row) => row.values[meta.key].some((value) => value === null))) legend.append(swatch, html("span", {}, say("no_data")));
  }

  function hint(cell, x, y) {
    tip.textContent = cell.getAttribute("aria-label");
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + box.height + 24 > window.innerHeight ? y - box.height - 12 : y + 16}px`;
  }
  maps.addEventListener("pointermove", (event) => {
    if (event.target.place) hint(event.target, event.clientX, event.clientY); else tip.hidden = true;
  });
  maps.addEventListener("pointerleave", () => { tip.hidden = true; });
  maps.addEventListener("focusout", () => {
    tip.hidden = true;
    for (const other of maps.querySelectorAll(".ring.focus")) other.remove();
  });
  maps.addEventListener("focusin", (event) => {
    if (!event.target.place || !event.target.matches(":focus-visible")) return;
    ring(event.target, "focus");
    const box = event.target.getBoundingClientRect();
    hint(event.target, box.right, box.bottom);
  });
  maps.addEventListener("click", (event) => { if (event.target.place) choose(event.target); });
  maps.addEventListener("keydown", (event) => {
    const place = event.target.place;
    if (!place) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose(event.target);
      return;
    }
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const line = grid[Math.max(0, Math.min(grid.length - 1, place.line + step[0]))];
    move(event.target, line[Math.max(0, Math.min(line.length - 1, place.head + step[1]))]);
    document.activeElement.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  function move(from, to) {
    from.setAttribute("tabindex", -1);
    to.setAttribute("tabindex", 0);
    to.focus({ focusVisible: true });
  }
  // Two lines, a dark one in a bright one, which are seen on every colour.
  function ring(cell, name) {
    for (const other of maps.querySelectorAll(`.ring.${name}`)) other.remove();
    for (const line of ["bright", "dark"]) {
      const rect = svg("rect", { class: `ring ${name} ${line}`, rx: 2 });
      for (const key of ["x", "y", "width", "height"]) rect.setAttribute(key, cell.getAttribute(key));
      cell.parentNode.append(rect);
    }
  }
  function choose(cell) {
    for (const other of maps.querySelectorAll(".cell[tabindex='0']")) other.setAttribute("tabindex", -1);
    cell.setAttribute("tabindex", 0);
    ring(cell, "chosen");
    chosen = cell.place;
    describe(chosen.row, chosen.head);
  }

  // Two distributions of one head against the Gaussian prediction, and its numbers.
  function describe(row, head) {
    const value = (key) => number(row.values[key][head]);
    const sigma = value("std_logit");
    const mean = value("mean_logit");
    const keys = value("keys");
    const expected = number(row.expected[head]);
    const title = html("h3", {}, say("title", { site: row.site, head }));
    const formula = html("p", { class: "note" });
    formula.append(html("code", {}, row.formula));
    const charts = html("div", { class: "charts" });
    charts.append(
      chart(say("logits"), say("logits_mean"), row.logits[head], { curve: { mean, sigma } },
        [["normal", say("normal", { mean: show(mean), std: show(sigma) })]]),
      chart(say("entropy"), say("entropy_mean"), row.entropies[head], {
        from: 0,
        lines: [["measured", value("entropy_nats")], ["expected", expected], ["limit", Math.log(keys)]],
      }, [
        ["measured", say("measured", { value: show(value("entropy_nats")) })],
        ["expected", say("expected", { keys: show(Math.round(keys)), value: show(expected) })],
        ["limit", say("limit", { value: show(Math.log(keys)) })],
      ]),
    );
    const facts = html("dl", { class: "facts" });
    const fact = (name, text) => {
      const pair = html("div");
      pair.append(html("dt", {}, name), html("dd", {}, text));
      facts.append(pair);
    };
    for (const item of data.statistics) fact(item.name[language()], show(value(item.key), item.unit[language()]));
    fact(say("quantiles"), ["p05", "p50", "p95"].map((key) => show(number(row[key][head]))).join(" / "));
    view.replaceChildren(title, formula, charts, facts);
  }

  function chart(name, note, bins, extra, swatches) {
    const figure = html("figure", { class: "chart" });
    const caption = html("figcaption", {}, `${name} `);
    caption.append(html("small", {}, note));
    figure.append(caption);
    if (!bins) {
      figure.append(html("p", { class: "empty" }, say("nothing")));
      return figure;
    }
    const [W, H, L, R, T, B] = [520, 230, 8, 8, 12, 24];
    const lines = (extra.lines || []).filter(([, x]) => Number.isFinite(x));
    const low = number(bins.low);
    const high = number(bins.high);
    let from = Math.min(low, extra.from ?? low, ...lines.map(([, x]) => x));
    let to = Math.max(high, ...lines.map(([, x]) => x));
    const edge = (to - from || 1) * 0.03;
    from -= extra.from === undefined ? edge : 0;
    to += edge;
    const width = (high - low) / bins.counts.length;
    const total = bins.counts.reduce((sum, count) => sum + count, 0);
    const curve = [];
    if (extra.curve && extra.curve.sigma > 0 && width > 0) {
      const { mean, sigma } = extra.curve;
      for (let i = 0; i <= 160; i += 1) {
        const x = from + ((to - from) * i) / 160;
        curve.push([x, (total * width * Math.exp(-(((x - mean) / sigma) ** 2) / 2)) / (sigma * Math.sqrt(2 * Math.PI))]);
      }
    }
    const top = Math.max(1, ...bins.counts, ...curve.map(([, y]) => y)) * 1.04;
    const px = (x) => L + ((x - from) / (to - from)) * (W - L - R);
    const py = (y) => H - B - (y / top) * (H - T - B);
    const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${name}: ${swatches.map((s) => s[1]).join("; ")}` });
    bins.counts.forEach((count, i) => {
      const x = px(low + i * width);
      const w = Math.max(px(low + (i + 1) * width) - x - 0.7, 0.8);
      if (count) drawing.append(svg("rect", { class: "bin", x: x.toFixed(2), y: py(count).toFixed(2), width: w.toFixed(2), height: (H - B - py(count)).toFixed(2) }));
    });
    drawing.append(svg("line", { class: "axis", x1: L, x2: W - R, y1: H - B, y2: H - B }));
    for (const tick of ticks(from, to)) {
      drawing.append(svg("line", { class: "axis", x1: px(tick), x2: px(tick), y1: H - B, y2: H - B + 4 }));
      drawing.append(svg("text", { x: px(tick), y: H - 6, "text-anchor": "middle" }, show(tick)));
    }
    if (curve.length) {
      const path = curve.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
      drawing.append(svg("path", { class: "normal", d: path }));
    }
    for (const [kind, x] of lines) drawing.append(svg("line", { class: kind, x1: px(x), x2: px(x), y1: T - 4, y2: H - B }));
    const list = html("ul", { class: "swatches" });
    for (const [kind, text] of swatches) {
      const item = html("li");
      const mark = svg("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" });
      mark.append(kind === "normal" ? svg("path", { class: kind, d: "M0 5H22" }) : svg("line", { class: kind, x1: 0, x2: 22, y1: 5, y2: 5 }));
      item.append(mark, document.createTextNode(text));
      list.append(item);
    }
    figure.append(drawing, list);
    return figure;
  }
  function ticks(from, to) {
    const rough = (to - from) / 6;
    const size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((unit) => unit * size).find((unit) => unit >= rough);
    const found = [];
    for (let i = Math.ceil(from / step); i * step <= to; i += 1) found.push(+(i * step).toPrecision(6));
    return found;
  }

  // What is in a language of the script's own: labels of the choices, then the maps, which write theirs anew.
  function speak() {
    for (const option of statistic.options) option.textContent = data.statistics[option.index].name[language()];
    for (const option of spread.options) option.textContent = say(option.value === "rank" ? "by_rank" : "by_value");
    build();
  }

  for (const item of data.statistics) statistic.append(html("option", { value: item.key }));
  statistic.addEventListener("change", paint);
  spread.addEventListener("change", paint);
  document.getElementById("map-controls").hidden = false;
  let shownWidth = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== shownWidth) build();
    shownWidth = window.innerWidth;
  });
  new MutationObserver(speak).observe(document.documentElement, { attributes: true, attributeFilter: ["lang"] });
  speak();
})();
