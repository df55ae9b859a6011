"use strict";
// Draws the time line and the maps from the data block. Every text goes in as textContent or as an attribute.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  const drawn = runs.filter((run) => run.first !== null);
  if (!drawn.length) return;
  // Viridis in nine steps: even in lightness, readable with every common colour blindness and in grey.
  const COLOURS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"]
    .map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  const BARS = { max_logit: [50, 100, 1e3, 1e4], scale_ratio: [1] };
  const SVG = "http://www.w3.org/2000/svg";
  const byId = (id) => document.getElementById(id);
  const [statistic, siteSelect, headSelect, tip] = ["statistic", "site", "head", "tip"].map(byId);
  const labels = [...new Set(runs.flatMap((run) => run.sites.map((site) => site.label)))];
  const zh = () => document.documentElement.lang.startsWith("zh");
  const say = (en, chinese) => (zh() ? chinese : en);
  const WORST = { largest: (a, b) => a > b, least: (a, b) => a < b, farthest: (a, b) => far(a) > far(b) };
  const far = (value) => Math.abs(Math.log(Math.abs(value)));

  function svg(name, attributes = {}, text = null) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    return node;
  }
  function html(name, attributes = {}, text = null) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    return node;
  }
  const number = (value) => (value === null || value === undefined ? NaN : Number(value));
  function show(value, unit = "") {
    if (Number.isNaN(value)) return say("not measured", "未测量");
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    if (unit === "%") return `${+(100 * value).toPrecision(3)}%`;
    const size = Math.abs(value);
    const text = size !== 0 && (size >= 1e6 || size < 1e-3) ? value.toExponential(1) : String(+value.toPrecision(4));
    return text.replace("-", "−");
  }
  function rgb(share) {
    const place = Math.max(0, Math.min(1, share)) * (COLOURS.length - 1);
    const low = Math.min(Math.floor(place), COLOURS.length - 2);
    return `rgb(${COLOURS[low].map((from, i) => Math.round(from + (COLOURS[low + 1][i] - from) * (place - low))).join(",")})`;
  }
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Of each site and statistic the worst head of each column: value and place in `heads`.
  for (const run of runs) for (const site of run.sites) {
    site.worst = {};
    for (const name of data.columns) {
      const worse = WORST[data.worst[name]];
      site.worst[name] = site.steps.map((_, at) => site.values[name].reduce((best, head, place) => {
        const value = number(head[at]);
        return Number.isNaN(value) || (best.head >= 0 && !worse(value, best.value)) ? best : { value, head: place };
      }, { value: NaN, head: -1 }));
    }
  }

  // From a value to its place between 0 and 1: the same for all runs; logarithmic where positive values span much.
  function scaleOf(values) {
    const finite = values.filter(Number.isFinite);
    let [low, high] = finite.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    if (!finite.length) [low, high] = [0, 1];
    const log = low > 0 && high > 30 * low;
    const at = (value) => {
      if (!Number.isFinite(value)) return value > 0 ? 1 : 0;
      if (high === low) return 0.5;
      return log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    };
    return { low, high, log, at };
  }
  const worstScale = Object.fromEntries(data.columns.map((name) => [
    name, scaleOf(runs.flatMap((run) => run.sites.flatMap((site) => site.worst[name].map((one) => one.value)))),
  ]));
  const lossScale = scaleOf(runs.flatMap((run) => run.loss[1].map(number)));
  const first = Math.min(...drawn.map((run) => run.first));
  const last = Math.max(...drawn.map((run) => run.last), first + 1);

  function ticks(from, to, most) {
    const rough = (to - from) / Math.max(most, 1) || 1;
    const size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((unit) => unit * size).find((unit) => unit >= rough * 0.999);
    const every = [];
    for (let i = Math.ceil(from / step); i * step <= to && every.length < 40; i += 1) every.push(+(i * step).toPrecision(8));
    return every;
  }
  function yTicks(scale) {
    if (!scale.log) return ticks(scale.low, scale.high, 3);
    const powers = [];
    for (let p = Math.ceil(Math.log10(scale.low)); p <= Math.log10(scale.high); p += 1) powers.push(10 ** p);
    const every = Math.ceil(powers.length / 4) || 1;
    const some = powers.filter((_, i) => i % every === 0);
    return some.length > 1 ? some : [scale.low, scale.high];
  }

  // A canvas of sites down and steps across; what was not measured has a colour of its own.
  function heatMap(run, name, x, width, tall) {
    const ratio = window.devicePixelRatio || 1;
    const height = Math.max(1, run.sites.length * tall);
    const canvas = html("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio), role: "img" });
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = style("--wash");
    pen.fillRect(0, 0, width, height);
    const scale = worstScale[name];
    run.sites.forEach((site, row) => {
      // by the samples of the run, so that one which this attention is not in stays empty
      const every = run.samples ?? site.steps;
      const all = bounds(every, x);
      const of = new Map(every.map((step, at) => [step, all[at]]));
      const edges = site.steps.map((step) => of.get(step) ?? [x(step) - 1, x(step) + 1]);
      site.worst[name].forEach((one, at) => {
        pen.fillStyle = Number.isNaN(one.value) ? style("--void") : rgb(scale.at(one.value));
        pen.fillRect(edges[at][0], row * tall, Math.max(edges[at][1] - edges[at][0], 0.8), tall - (tall > 5 ? 1 : 0));
      });
    });
    for (const [colour, alpha] of [["--card", 1], ["--soft", 0.28]]) {
      pen.fillStyle = style(colour);
      pen.globalAlpha = alpha;
      for (const [from, to] of run.gaps) pen.fillRect(x(from), 0, Math.max(x(to) - x(from), 1), height);
    }
    return canvas;
  }
  // Where the cells of samples begin and end: half way to the next; at a gap of the schedule no wider than before it.
  function bounds(steps, x) {
    return steps.map((step, at) => {
      const [before, after] = [steps[at - 1], steps[at + 1]];
      const left = before === undefined ? x(step) - ((after === undefined ? x(step) + 8 : x(after)) - x(step)) / 2 : (x(before) + x(step)) / 2;
      const right = after === undefined ? x(step) + ((before === undefined ? x(step) + 8 : x(step)) - (before === undefined ? x(step) : x(before))) / 2 : (x(after) + x(step)) / 2;
      return [Math.max(left, x(first) - 4), Math.min(right, x(last) + 4)];
    });
  }

  // A label that is too long loses the end that all have, and then its beginning.
  const parts = labels.map((label) => label.split("."));
  let shared = 0;
  while (labels.length > 1 && parts.every((one) => one.length > shared + 1 && one.at(-1 - shared) === parts[0].at(-1 - shared))) shared += 1;
  function shorter(label, most) {
    if (label.length <= most) return label;
    const rest = label.split(".").slice(0, -shared || undefined).join(".");
    return rest.length <= most ? rest : `…${rest.slice(1 - most)}`;
  }

  const LOSS = 92;
  const FLAGS = 22;
  const TREND = 128;
  const panels = [...document.querySelectorAll(".panel")].map((figure) => ({
    figure, run: runs[Number(figure.dataset.run)], place: figure.querySelector(".drawing"), told: figure.querySelector(".told"),
  }));
  let cursor = null; // the step that is pointed at

  const siteOf = (run) => run.sites.find((site) => site.label === siteSelect.value);
  function series(run, name) {
    const site = siteOf(run);
    if (!site) return null;
    const place = headSelect.value === "worst" ? -1 : site.heads.indexOf(Number(headSelect.value));
    const values = headSelect.value === "worst" ? site.worst[name].map((one) => one.value)
      : place < 0 ? site.steps.map(() => NaN) : site.values[name][place].map(number);
    return { site, values, medians: site.medians[name].map(number) };
  }

  function line(steps, values, x, y, gaps) {
    let path = "";
    let down = false;
    values.forEach((value, at) => {
      if (Number.isNaN(value)) { down = false; return; }
      if (at && gaps.some(([from, to]) => steps[at - 1] < from && to < steps[at])) down = false;
      path += `${down ? "L" : "M"}${x(steps[at]).toFixed(1)} ${y(value).toFixed(1)}`;
      down = true;
    });
    return path;
  }

  function axis(drawing, scale, y, left, right, unit, bars = []) {
    for (const tick of yTicks(scale)) {
      drawing.append(svg("line", { class: "axis", x1: left, x2: right, y1: y(tick), y2: y(tick) }));
      drawing.append(svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, show(tick, unit)));
    }
    let free = Infinity; // above the label before
    for (const bar of bars) if (bar > scale.low && bar < scale.high) {
      drawing.append(svg("line", { class: "bar-line", x1: left, x2: right, y1: y(bar), y2: y(bar) }));
      if (y(bar) > free) continue;
      drawing.append(svg("text", { x: right, y: y(bar) + 12, "text-anchor": "end" }, show(bar, unit)));
      free = y(bar) - 12;
    }
  }

  function draw(panel, trendScale) {
    const { run, place } = panel;
    place.replaceChildren();
    if (run.first === null) { place.append(html("p", { class: "empty" }, say("nothing is recorded", "没有记录"))); return; }
    const name = statistic.value;
    const unit = data.units[name];
    const width = Math.max(place.clientWidth, 240);
    const left = Math.min(width < 420 ? 74 : 150, 14 + 6.4 * Math.max(6, ...run.sites.map((site) => site.label.length)));
    const right = width - 12;
    const x = (step) => left + 4 + ((step - first) / (last - first)) * (right - left - 8);
    panel.x = x;
    const tall = Math.max(6, Math.min(22, 260 / Math.max(run.sites.length, 1)));
    const mapHeight = run.sites.length * tall;

    const top = svg("svg", { width, height: LOSS + FLAGS, role: "img", "aria-label": say("loss and alarms", "损失与警报") });
    const yLoss = (value) => LOSS - 4 - lossScale.at(value) * (LOSS - 26);
    top.append(svg("text", { class: "title", x: left, y: 11 }, say("Loss", "损失") + (lossScale.log ? say(", logarithmic", "，对数") : "")));
    axis(top, lossScale, yLoss, left, right, "");
    const losses = run.loss[1].map(number);
    top.append(svg("path", { class: "line-loss", d: line(run.loss[0], losses, x, yLoss, run.gaps) }));
    losses.forEach((value, at) => {
      if (!Number.isFinite(value)) top.append(svg("circle", { class: "lost", cx: x(run.loss[0][at]), cy: 18, r: 2 }));
    });
    top.append(svg("text", { x: left - 6, y: LOSS + 15, "text-anchor": "end" }, say("Alarms", "警报")));
    top.append(svg("line", { class: "axis", x1: left, x2: right, y1: LOSS + 11, y2: LOSS + 11 }));
    const order = ["note", "warn", "fail", "critical"];
    [...run.alarms].sort((a, b) => order.indexOf(a.severity) - order.indexOf(b.severity)).forEach((alarm) => {
      const mark = svg("g", { class: `s-${alarm.severity} alarm`, transform: `translate(${x(alarm.step).toFixed(1)} ${LOSS + 11})` });
      mark.append(svg("path", { class: "flag", d: "M0-6 6 0 0 6-6 0Z" }));
      mark.alarm = alarm;
      top.append(mark);
    });
    place.append(top);

    const row = html("div");
    row.style.position = "relative";
    row.style.height = `${mapHeight}px`;
    const names = svg("svg", { width: left, height: mapHeight, "aria-hidden": "true" });
    const every = Math.ceil(12 / tall);
    const most = Math.floor((left - 12) / 6);
    run.sites.forEach((site, at) => {
      if (at % every) return;
      const short = shorter(site.label, most);
      const text = svg("text", { x: left - 6, y: at * tall + tall / 2 + 4, "text-anchor": "end" }, short);
      if (site.label === siteSelect.value) text.setAttribute("class", "title");
      names.append(text);
    });
    const map = heatMap(run, name, (step) => x(step) - left, right - left, tall);
    map.setAttribute("aria-label", `${optionName()}: ${say("attentions down, steps across", "纵向为注意力，横向为训练步")}`);
    map.style.position = "absolute";
    map.style.left = `${left}px`;
    map.style.top = "0";
    row.append(names, map);
    place.append(row);
    panel.map = { map, tall, left };

    const bottom = svg("svg", { width, height: TREND, role: "img", "aria-label": say("trend of the chosen head", "所选头的趋势") });
    const yTrend = (value) => TREND - 24 - trendScale.at(value) * (TREND - 48);
    const heading = `${siteSelect.value} · ${headSelect.selectedOptions[0]?.textContent ?? ""}${trendScale.log ? say(", logarithmic", "，对数") : ""}`;
    bottom.append(svg("text", { class: "title", x: left, y: 14 }, heading));
    axis(bottom, trendScale, yTrend, left, right, unit, BARS[name]);
    const one = series(run, name);
    if (one) {
      bottom.append(svg("path", { class: "line-median", d: line(one.site.steps, one.medians, x, yTrend, run.gaps) }));
      bottom.append(svg("path", { class: "line-head", d: line(one.site.steps, one.values, x, yTrend, run.gaps) }));
      if (one.values.length < 80) one.values.forEach((value, at) => {
        if (!Number.isNaN(value)) bottom.append(svg("circle", { class: "point-head", cx: x(one.site.steps[at]), cy: yTrend(value), r: 2 }));
      });
    } else {
      bottom.append(svg("text", { x: (left + right) / 2, y: TREND / 2, "text-anchor": "middle" }, say("not in this run", "此次运行中没有")));
    }
    for (const tick of ticks(first, last, Math.floor((right - left) / 80))) {
      bottom.append(svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: TREND - 22, y2: TREND - 17 }));
      bottom.append(svg("text", { x: x(tick), y: TREND - 4, "text-anchor": "middle" }, String(tick)));
    }
    place.append(bottom);
    for (const [from, to] of run.gaps) for (const drawing of [top, bottom]) {
      drawing.append(svg("rect", { class: "gap", x: x(from), width: Math.max(x(to) - x(from), 1), y: 16, height: drawing === top ? LOSS - 16 : TREND - 40 }));
    }
    const over = svg("svg", { class: "over", width, height: LOSS + FLAGS + mapHeight + TREND, "aria-hidden": "true" });
    panel.cursor = svg("line", { class: "cursor", x1: 0, x2: 0, y1: 14, y2: LOSS + FLAGS + mapHeight + TREND - 22, visibility: "hidden" });
    over.append(panel.cursor);
    place.append(over);
    point(cursor);
  }

  const optionName = () => { const one = statistic.selectedOptions[0]; return zh() ? one.dataset.zh : one.dataset.en; };
  function ramp(canvas, width, height) {
    canvas.width = width;
    canvas.height = height;
    const pen = canvas.getContext("2d");
    for (let i = 0; i < width; i += 1) { pen.fillStyle = rgb(i / (width - 1)); pen.fillRect(i, 0, 1, height); }
    return canvas;
  }

  function drawAll() {
    for (const option of statistic.options) option.textContent = zh() ? option.dataset.zh : option.dataset.en;
    headSelect.options[0].textContent = say("the worst", "最差的头");
    for (const help of document.querySelectorAll(".help")) help.hidden = help.dataset.statistic !== statistic.value;
    const name = statistic.value;
    const scale = worstScale[name];
    const every = runs.map((run) => series(run, name)).filter(Boolean);
    const trendScale = scaleOf(every.flatMap((one) => [...one.values, ...one.medians]));
    for (const panel of panels) draw(panel, trendScale);
    const known = runs.some((run) => run.sites.some((site) => site.worst[name].some((one) => !Number.isNaN(one.value))));
    const unit = data.units[name];
    byId("legend").replaceChildren(html("b", {}, optionName()), ...(known ? [
      html("span", {}, show(scale.low, unit)), ramp(html("canvas", { "aria-hidden": "true" }), 180, 12), html("span", {}, show(scale.high, unit)),
      html("span", { class: "quiet" }, scale.log ? say("logarithmic", "对数") : say("linear", "线性")),
    ] : [html("span", {}, say("not measured", "未测量"))]));
    document.querySelector(".head-name").textContent = headSelect.value === "worst" ? say("the worst head", "最差的头") : `${say("head", "头")} ${headSelect.value}`;
    drawMaps();
  }

  // Every statistic as a small map; a click chooses it.
  function drawMaps() {
    const maps = byId("maps");
    maps.replaceChildren();
    for (const name of data.columns) runs.forEach((run, number_) => {
      if (run.first === null || !run.sites.length) return;
      const figure = html("figure", { class: "card small" });
      const caption = html("figcaption");
      const option = [...statistic.options].find((one) => one.value === name);
      const title = html("b", {}, (runs.length > 1 ? `${String.fromCharCode(65 + number_)} · ` : "") + option.textContent);
      const scale = worstScale[name];
      const known = run.sites.some((site) => site.worst[name].some((one) => !Number.isNaN(one.value)));
      const legend = html("span", { class: "quiet" });
      if (known) legend.append(show(scale.low, data.units[name]), Object.assign(ramp(html("canvas", { class: "ramp", "aria-hidden": "true" }), 70, 9)), show(scale.high, data.units[name]));
      else legend.append(say("not measured", "未测量"));
      caption.append(title, legend);
      figure.append(caption);
      maps.append(figure);
      const width = Math.max(figure.clientWidth - 28, 120);
      const x = (step) => 4 + ((step - first) / (last - first)) * (width - 8);
      const canvas = heatMap(run, name, x, width, Math.max(2, Math.min(12, 120 / run.sites.length)));
      canvas.setAttribute("aria-label", title.textContent);
      figure.append(canvas);
      figure.addEventListener("click", () => { statistic.value = name; drawAll(); byId("time").scrollIntoView(); });
    });
  }

  function heads() {
    const chosen = headSelect.value || "worst";
    const every = [...new Set(runs.flatMap((run) => siteOf(run)?.heads ?? []))].sort((a, b) => a - b);
    headSelect.replaceChildren(html("option", { value: "worst" }), ...every.map((head) => html("option", { value: head }, String(head))));
    headSelect.value = [...headSelect.options].some((option) => option.value === chosen) ? chosen : "worst";
  }
  function choose(label, head) {
    siteSelect.value = label;
    heads();
    if (head !== null && head !== undefined) headSelect.value = String(head);
    drawAll();
  }

  // What there is at a step, in words, and a line through all panels.
  function nearest(steps, step) {
    let best = 0;
    steps.forEach((one, at) => { if (Math.abs(one - step) < Math.abs(steps[best] - step)) best = at; });
    return best;
  }
  function point(step) {
    cursor = step;
    for (const panel of panels) {
      if (!panel.cursor) continue;
      panel.cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
      if (step === null) { panel.told.textContent = ""; continue; }
      const at = panel.x(step);
      panel.cursor.setAttribute("x1", at);
      panel.cursor.setAttribute("x2", at);
      const name = statistic.value;
      const one = series(panel.run, name);
      const [steps, losses] = panel.run.loss;
      const parts = [];
      if (steps.length) parts.push(`${say("loss", "损失")} ${show(number(losses[nearest(steps, step)]))}`);
      if (one && one.site.steps.length) {
        const place = nearest(one.site.steps, step);
        parts.push(`${say("sample of step", "采样步")} ${one.site.steps[place]}: ${optionName()} ${show(one.values[place], data.units[name])}, ${say("median of heads", "各头中位数")} ${show(one.medians[place], data.units[name])}`);
      }
      panel.told.textContent = `${say("step", "第")} ${Math.round(step)}${say("", " 步")} · ${parts.join(" · ")}`;
    }
  }
  function cellAt(panel, event) {
    const box = panel.map.map.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / panel.map.tall);
    const site = panel.run.sites[row];
    if (!site || event.clientX < box.left || event.clientX > box.right || event.clientY < box.top) return null;
    const x = event.clientX - box.left + panel.map.left;
    let best = 0;
    site.steps.forEach((step, at) => { if (Math.abs(panel.x(step) - x) < Math.abs(panel.x(site.steps[best]) - x)) best = at; });
    return { site, at: best, one: site.worst[statistic.value][best] };
  }
  function hint(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + box.height + 24 > window.innerHeight ? y - box.height - 12 : y + 16}px`;
  }
  for (const panel of panels) {
    panel.place.addEventListener("pointermove", (event) => {
      if (!panel.x) return;
      const box = panel.place.getBoundingClientRect();
      const [from, to] = [panel.x(first), panel.x(last)];
      const step = first + ((event.clientX - box.left - from) / (to - from)) * (last - first);
      point(Math.max(first, Math.min(last, step)));
      const mark = event.target.closest(".alarm");
      const cell = mark ? null : cellAt(panel, event);
      if (mark) {
        const there = panel.run.alarms.filter((alarm) => alarm.step === mark.alarm.step).map((alarm) => alarm.text);
        hint([...there.slice(0, 6), ...(there.length > 6 ? [`+ ${there.length - 6}`] : [])].join("\n"), event.clientX, event.clientY);
      }
      else if (cell) {
        const worst = cell.one.head < 0 ? show(NaN) : `${say("head", "头")} ${cell.site.heads[cell.one.head]}: ${show(cell.one.value, data.units[statistic.value])}`;
        hint(`${cell.site.label}\n${say("step", "步")} ${cell.site.steps[cell.at]} · ${worst}`, event.clientX, event.clientY);
      } else tip.hidden = true;
    });
    panel.place.addEventListener("pointerleave", () => { tip.hidden = true; point(null); });
    panel.place.addEventListener("click", (event) => {
      const mark = event.target.closest(".alarm");
      if (mark) { go(panel.run, mark.alarm); return; }
      const cell = panel.x && cellAt(panel, event);
      if (cell) choose(cell.site.label, cell.one.head < 0 ? "worst" : cell.site.heads[cell.one.head]);
    });
  }
  function go(run, alarm) {
    if (data.columns.includes(alarm.name)) statistic.value = alarm.name;
    const site = alarm.site === null ? null : run.sites[alarm.site];
    if (site) choose(site.label, alarm.head); else drawAll();
    point(alarm.step);
  }
  for (const button of document.querySelectorAll("button.show")) button.addEventListener("click", () => {
    const run = runs[Number(button.dataset.run)];
    byId("time").scrollIntoView();
    go(run, run.alarms[Number(button.dataset.alarm)]);
  });

  // The page opens with the site of the worst value.
  function worstSite() {
    let best = { value: -Infinity, label: labels[0] };
    for (const run of runs) for (const site of run.sites) for (const one of site.worst.max_logit) {
      if (one.value > best.value) best = { value: one.value, label: site.label };
    }
    return best.label;
  }
  for (const label of labels) siteSelect.append(html("option", { value: label }, label));
  if (labels.length) siteSelect.value = worstSite();
  heads();
  statistic.addEventListener("change", drawAll);
  headSelect.addEventListener("change", drawAll);
  siteSelect.addEventListener("change", () => { heads(); drawAll(); });
  document.querySelector(".controls").hidden = false;
  let shownWidth = 0;
  window.addEventListener("resize", () => { if (window.innerWidth !== shownWidth) { shownWidth = window.innerWidth; drawAll(); } });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  new MutationObserver(drawAll).observe(document.documentElement, { attributes: true, attributeFilter: ["lang"] });
  shownWidth = window.innerWidth;
  drawAll();
})();
