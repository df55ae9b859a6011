// Draws the time line and the maps from the data block. Every text goes in as textContent or as an attribute.
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  const drawn = runs.filter((run) => run.first !== null);
  if (!runs.some((run) => run.sites.length)) return;
  if (typeof DecompressionStream === "undefined") { document.getElementById("old").hidden = false; return; }
  document.documentElement.dataset.drawn = "no";
  const { wholes, numbers } = await numbersOf(data.block);
  const { scaleOf, colourScale, ticks, yTicks } = drawing;
  const { BARS, SHAPES, ABOUT, zh, say, speak, svg, html, number, show, line, legend, nearest, mapOf, shortener } = pieces;
  speak(data.words);
  const byId = (id) => document.getElementById(id);
  const [statistic, siteSelect, headSelect, tip] = ["statistic", "site", "head", "tip"].map(byId);
  const labels = [...new Set(runs.flatMap((run) => run.sites.map((site) => site.label)))];

  for (const run of runs) for (const site of run.sites) {
    const count = site.steps.length;
    site.points ??= site.steps;
    for (const name of data.columns) {
      const heads = wholes(site.who[name], count);
      site.worst[name] = numbers(site.worst[name], count).map((value, at) => ({ value, head: heads[at] === 65535 ? -1 : heads[at] }));
      site.medians[name] = numbers(site.medians[name], count);
    }
  }
  const pointsOf = (site, name, place) => numbers(site.values[name], site.points.length, place * site.points.length);
  const unitOf = (name) => data.statistics[name].unit;
  const nameOf = (name) => data.statistics[name].name[zh() ? 1 : 0];
  function titleOf(name) {
    const of = data.statistics[name].of[zh() ? 1 : 0];
    return nameOf(name) + (of && !unitOf(name) ? say("unit_of", { unit: of }) : "");
  }

  const worstScale = Object.fromEntries(data.columns.map((name) => [
    name, colourScale(runs.flatMap((run) => run.sites.flatMap((site) => site.worst[name].map((one) => one.value))), unitOf(name)),
  ]));
  const lossScale = scaleOf(runs.flatMap((run) => run.loss[1].map(number)));
  const first = Math.min(...drawn.map((run) => run.first));
  const last = Math.max(...drawn.map((run) => run.last), first + 1);

  const heatMap = (run, name, x, width, tall) =>
    mapOf(run, name, { scale: worstScale[name], worst: data.statistics[name].worst, ends: [first, last], x, width, tall });
  const shorter = shortener(labels);

  const LOSS = 92;
  const FLAGS = 22;
  const MARK = 14; // pixels from one mark of an alarm to the next
  const TREND = 128;
  const panels = [...document.querySelectorAll(".panel")].map((figure) => ({
    figure, run: runs[Number(figure.dataset.run)], place: figure.querySelector(".drawing"), told: figure.querySelector(".told"),
  }));
  let cursor = null; // the step that is pointed at

  // Of two runs that were matched in order the other one's has another name.
  function siteOf(run) {
    const place = (one) => one.sites.findIndex((site) => site.label === siteSelect.value);
    return run.sites[place(run)] ?? (data.by === "order" ? run.sites[Math.max(...runs.map(place))] : undefined);
  }
  function series(run, name) {
    const site = siteOf(run);
    if (!site) return null;
    const medians = site.medians[name];
    if (headSelect.value === "worst") return { site, steps: site.steps, values: site.worst[name].map((one) => one.value), medians };
    const place = site.heads.indexOf(Number(headSelect.value));
    return { site, steps: site.points, values: place < 0 ? site.points.map(() => NaN) : pointsOf(site, name, place), medians };
  }

  function axis(drawing, scale, y, left, right, unit, bars = []) {
    for (const tick of yTicks(scale)) {
      drawing.append(svg("line", { class: "axis", x1: left, x2: right, y1: y(tick), y2: y(tick) }));
      drawing.append(svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, show(tick, unit)));
    }
    // The name of a bar stands above its line, or below it, where neither the title nor another bar is.
    const shown = bars.filter(([bar]) => bar > scale.low && bar < scale.high).sort(([a], [b]) => b - a);
    let free = 17; // from here on down
    shown.forEach(([bar, word], at) => {
      const here = y(bar);
      const next = at + 1 < shown.length ? y(shown[at + 1][0]) : Infinity;
      drawing.append(svg("line", { class: "bar-line", x1: left, x2: right, y1: here, y2: here }));
      const place = here - 12 >= free ? here - 3 : Math.max(here, free) + 14 <= next ? Math.max(here, free) + 11 : null;
      free = Math.max(free, place === null ? here + 1 : place + 3, here + 1);
      if (place !== null) drawing.append(svg("text", { class: "bar-name", x: left + 4, y: place }, `${show(bar, unit)} ${say(word)}`));
    });
  }

  function draw(panel, trendScale) {
    const { run, place } = panel;
    place.replaceChildren();
    if (run.first === null) { place.append(html("p", { class: "empty" }, say("nothing_recorded"))); return; }
    const name = statistic.value;
    const unit = unitOf(name);
    const width = Math.max(place.clientWidth, 240);
    const left = Math.min(width < 420 ? 74 : 150, 14 + 6.4 * Math.max(6, ...run.sites.map((site) => site.label.length)));
    const right = width - 12;
    const x = (step) => left + 4 + ((step - first) / (last - first)) * (right - left - 8);
    panel.x = x;
    const tall = Math.max(6, Math.min(22, 260 / Math.max(run.sites.length, 1)));
    const mapHeight = run.sites.length * tall;

    const top = svg("svg", { width, height: LOSS + FLAGS, role: "img", "aria-label": say("loss_and_alarms") });
    const yLoss = (value) => LOSS - 4 - lossScale.at(value) * (LOSS - 26);
    top.append(svg("text", { class: "title", x: left, y: 11 }, say("loss_title") + (lossScale.log ? say("logarithmic_after") : "")));
    const losses = run.loss[1].map(number);
    if (losses.length) axis(top, lossScale, yLoss, left, right, "");
    else top.append(svg("text", { x: (left + right) / 2, y: LOSS / 2, "text-anchor": "middle" }, say("no_loss")));
    top.append(svg("path", { class: "line-loss", d: line(run.loss[0], losses, x, yLoss, run.gaps) }));
    if (losses.length < 30) losses.forEach((value, at) => {
      if (Number.isFinite(value)) top.append(svg("circle", { class: "point-loss", cx: x(run.loss[0][at]), cy: yLoss(value), r: 2 }));
    });
    losses.forEach((value, at) => {
      if (!Number.isFinite(value)) top.append(svg("circle", { class: "lost", cx: x(run.loss[0][at]), cy: 18, r: 2 }));
    });
    top.append(svg("text", { x: left - 6, y: LOSS + 15, "text-anchor": "end" }, say("alarms")));
    top.append(svg("line", { class: "axis", x1: left, x2: right, y1: LOSS + 11, y2: LOSS + 11 }));
    // The worst first: an alarm that would lie on a mark is told with it.
    const order = ["critical", "fail", "warn", "note"];
    const marks = [];
    [...run.alarms].sort((a, b) => order.indexOf(a.severity) - order.indexOf(b.severity)).forEach((alarm) => {
      const at = x(alarm.step);
      const near = marks.find((mark) => Math.abs(mark.at - at) < MARK);
      if (near) { near.alarms.push(alarm); return; }
      const mark = svg("g", { class: `s-${alarm.severity} alarm`, transform: `translate(${at.toFixed(1)} ${LOSS + 11})` });
      mark.append(svg("path", { class: "flag", d: SHAPES[alarm.severity] }));
      marks.push(Object.assign(mark, { at, alarms: [alarm] }));
    });
    top.append(...marks);
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
      if (site === siteOf(run)) text.setAttribute("class", "title");
      names.append(text);
    });
    const map = heatMap(run, name, (step) => x(step) - left, right - left, tall);
    map.setAttribute("aria-label", `${titleOf(name)}: ${say("axes")}`);
    map.style.position = "absolute";
    map.style.left = `${left}px`;
    map.style.top = "0";
    row.append(names, map);
    place.append(row);
    panel.map = { map, tall: map.getBoundingClientRect().height / Math.max(run.sites.length, 1) || tall, left };
    place.setAttribute("aria-label", say("keys", { run: run.name }));

    const bottom = svg("svg", { width, height: TREND, role: "img", "aria-label": say("trend") });
    const yTrend = (value) => TREND - 24 - trendScale.at(value) * (TREND - 48);
    const narrow = width < 420;
    const site = siteOf(run);
    const label = site ? site.label : siteSelect.value;
    const heading = [
      `${titleOf(name)} · ${label} · ${headName()}${trendScale.log ? say("logarithmic_after") : ""}`,
      `${titleOf(name)} · ${shorter(label, 24)} · ${headName()}`,
      `${nameOf(name)} · ${shorter(label, 16)} · ${headName()}`,
      `${nameOf(name)} · ${shorter(label, 16)}`,
    ].find((text) => [...text].reduce((sum, one) => sum + (one > "⺀" ? 11.5 : 6.6), 0) < right - (narrow ? 0 : left)) ?? nameOf(name);
    bottom.append(svg("text", { class: "title", x: narrow ? 2 : left, y: 14 }, heading));
    axis(bottom, trendScale, yTrend, left, right, unit, BARS[name]);
    const one = series(run, name);
    if (one) {
      bottom.append(svg("path", { class: "line-median", d: line(one.site.steps, one.medians, x, yTrend, run.gaps) }));
      bottom.append(svg("path", { class: "line-head", d: line(one.steps, one.values, x, yTrend, run.gaps) }));
      if (one.values.length < 80) one.values.forEach((value, at) => {
        if (!Number.isNaN(value)) bottom.append(svg("circle", { class: "point-head", cx: x(one.steps[at]), cy: yTrend(value), r: 2 }));
      });
    } else {
      bottom.append(svg("text", { x: (left + right) / 2, y: TREND / 2, "text-anchor": "middle" }, say("not_in_run")));
    }
    for (const tick of ticks(first, last, Math.floor((right - left) / 80), 1)) {
      bottom.append(svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: TREND - 22, y2: TREND - 17 }));
      bottom.append(svg("text", { x: x(tick), y: TREND - 4, "text-anchor": "middle" }, String(tick)));
    }
    bottom.append(svg("text", { x: left - 16, y: TREND - 4, "text-anchor": "end" }, say("step_axis")));
    place.append(bottom);
    for (const [from, to] of run.gaps) for (const drawing of [top, bottom]) {
      drawing.append(svg("rect", { class: "gap", x: x(from), width: Math.max(x(to) - x(from), 1), y: 16, height: drawing === top ? LOSS - 16 : TREND - 40 }));
    }
    const over = svg("svg", { class: "over", width, height: LOSS + FLAGS + mapHeight + TREND, "aria-hidden": "true" });
    panel.cursor = svg("line", { class: "cursor", x1: 0, x2: 0, y1: 14, y2: LOSS + FLAGS + mapHeight + TREND - 22, visibility: "hidden" });
    panel.cell = svg("rect", { class: "cell", visibility: "hidden" });
    over.append(panel.cursor, panel.cell);
    place.append(over);
    point(cursor);
  }

  const headName = () => (headSelect.value === "worst" ? say("worst_head") : say("head", { head: headSelect.value }));
  const legendOf = (name, width) => legend(data.statistics[name], worstScale[name], width);

  function drawAll() {
    for (const option of statistic.options) option.textContent = nameOf(option.value);
    for (const group of statistic.querySelectorAll("optgroup")) group.label = zh() ? group.dataset.zh : group.dataset.en;
    for (const node of document.querySelectorAll("[data-label-en]")) node.setAttribute("aria-label", zh() ? node.dataset.labelZh : node.dataset.labelEn);
    headSelect.options[0].textContent = say("worst");
    for (const help of document.querySelectorAll(".help")) help.hidden = help.dataset.statistic !== statistic.value;
    const name = statistic.value;
    const every = runs.map((run) => series(run, name)).filter(Boolean);
    const trendScale = scaleOf(every.flatMap((one) => [...one.values, ...one.medians]), unitOf(name));
    for (const panel of panels) draw(panel, trendScale);
    byId("legend").replaceChildren(
      html("b", {}, titleOf(name)), ...legendOf(name, 180),
      html("span", { class: "quiet" }, say(`worst_${data.statistics[name].worst}`, { scale: say(worstScale[name].log ? "logarithmic" : "linear") })),
    );
    const infinite = runs.some((run) => run.sites.some((site) => data.columns.some((one) => site.worst[one].some(({ value }) => value === Infinity || value === -Infinity))));
    document.querySelector(".infinite").hidden = !infinite;
    document.querySelector(".head-name").textContent = headName();
  }

  // Every statistic as a small map; its name chooses it.
  const figures = [];
  for (const name of data.columns) runs.forEach((run, place) => {
    if (!run.sites.length) return;
    const figure = html("figure", { class: "card small" });
    const caption = html("figcaption");
    const ends = html("span", { class: "quiet" });
    const title = html("button", { type: "button" });
    caption.append(title, ends);
    figure.append(caption);
    byId("maps").append(figure);
    const tall = Math.max(2, Math.min(12, 120 / run.sites.length));
    figure.drawMap = () => {
      const width = Math.max(figure.clientWidth - 28, 120);
      const canvas = heatMap(run, name, (step) => 4 + ((step - first) / (last - first)) * (width - 8), width, tall);
      canvas.setAttribute("aria-label", title.textContent);
      figure.querySelector(":scope > canvas")?.remove();
      figure.append(canvas);
    };
    figure.drawHead = () => {
      title.textContent = (runs.length > 1 ? `${String.fromCharCode(65 + place)} · ` : "") + titleOf(name);
      ends.replaceChildren(...legendOf(name, 70));
    };
    figure.style.minHeight = `${run.sites.length * tall + 56}px`;
    figure.addEventListener("click", () => { statistic.value = name; drawAll(); byId("time").scrollIntoView(); });
    figures.push(figure);
  });
  let round = 0; // one map a task: the page answers in between
  function drawMaps() {
    const mine = round += 1;
    for (const figure of figures) { figure.drawHead(); setTimeout(() => { if (mine === round) figure.drawMap(); }); }
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
      if (steps.length) parts.push(say("loss_at", { loss: show(number(losses[nearest(steps, step)]), "", 4) }));
      if (one && one.site.steps.length) {
        const [place, middle] = [nearest(one.steps, step), nearest(one.site.steps, step)];
        const unit = unitOf(name);
        parts.push(say("sample", {
          step: one.steps[place], statistic: titleOf(name), value: show(one.values[place], unit), median: show(one.medians[middle], unit),
        }));
      }
      panel.told.textContent = [say("step", { step: Math.round(step) }), ...parts].join(" · ");
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
  function describe(site, at) {
    const one = site.worst[statistic.value][at];
    const step = say("step", { step: site.steps[at] });
    return `${step} · ${one.head < 0 ? show(NaN) : say("head_value", { head: site.heads[one.head], value: show(one.value, unitOf(statistic.value)) })}`;
  }
  function hint(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + box.height + 24 > window.innerHeight ? y - box.height - 12 : y + 16}px`;
  }
  // Arrow keys: over the samples of an attention, and over the attentions.
  function move(panel, key) {
    const sites = panel.run.sites;
    if (!sites.length) return;
    const now = panel.at ?? { row: Math.max(0, sites.indexOf(siteOf(panel.run))), step: last };
    const row = Math.max(0, Math.min(sites.length - 1, now.row + ({ ArrowUp: -1, ArrowDown: 1 }[key] ?? 0)));
    const steps = sites[row].steps;
    const place = nearest(steps, now.step) + ({ ArrowLeft: -1, ArrowRight: 1 }[key] ?? 0);
    const at = { Home: 0, End: steps.length - 1 }[key] ?? Math.max(0, Math.min(steps.length - 1, place));
    panel.at = { row, step: steps[at] };
    point(steps[at]);
    const x = panel.x(steps[at]);
    for (const [key_, value] of Object.entries({ x: x - 4, width: 8, y: LOSS + FLAGS + row * panel.map.tall, height: panel.map.tall, visibility: "visible" })) panel.cell.setAttribute(key_, value);
    panel.told.textContent = `${sites[row].label} · ${describe(sites[row], at)}`;
  }
  for (const panel of panels) {
    panel.place.addEventListener("keydown", (event) => {
      if (!panel.x || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Enter" && panel.at) {
        const site = panel.run.sites[panel.at.row];
        const one = site.worst[statistic.value][nearest(site.steps, panel.at.step)];
        choose(site.label, one.head < 0 ? "worst" : site.heads[one.head]);
        move(panel, "");
      } else if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) move(panel, event.key);
      else return;
      event.preventDefault();
    });
    panel.place.addEventListener("blur", () => { panel.at = undefined; panel.cell?.setAttribute("visibility", "hidden"); });
    panel.place.addEventListener("pointermove", (event) => {
      if (!panel.x) return;
      const box = panel.place.getBoundingClientRect();
      const [from, to] = [panel.x(first), panel.x(last)];
      const step = first + ((event.clientX - box.left - from) / (to - from)) * (last - first);
      point(Math.max(first, Math.min(last, step)));
      const mark = event.target.closest(".alarm");
      const cell = mark ? null : cellAt(panel, event);
      if (mark) {
        const there = mark.alarms.map((alarm) => alarm.text);
        hint([...there.slice(0, 6), ...(there.length > 6 ? [`+ ${there.length - 6}`] : [])].join("\n"), event.clientX, event.clientY);
      }
      else if (cell) {
        hint(`${cell.site.label}\n${describe(cell.site, cell.at)}`, event.clientX, event.clientY);
      } else tip.hidden = true;
    });
    panel.place.addEventListener("pointerleave", () => { tip.hidden = true; point(null); });
    panel.place.addEventListener("click", (event) => {
      const mark = event.target.closest(".alarm");
      if (mark) { go(panel.run, mark.alarms[0]); return; }
      const cell = panel.x && cellAt(panel, event);
      if (cell) choose(cell.site.label, cell.one.head < 0 ? "worst" : cell.site.heads[cell.one.head]);
    });
  }
  function go(run, alarm) {
    const about = ABOUT[alarm.name] ?? alarm.name;
    if (data.columns.includes(about)) statistic.value = about;
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
  const everything = () => { drawAll(); drawMaps(); };
  let shownWidth = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== shownWidth) { shownWidth = window.innerWidth; everything(); } });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", everything);
  // On paper: its width, its colours, what was not looked at yet, and what was not unfolded.
  window.matchMedia("print").addEventListener("change", ({ matches }) => {
    everything();
    for (const figure of figures) figure.drawMap();
    for (const one of document.querySelectorAll("details")) {
      if (matches) one.folded = !one.open;
      one.open = matches || !one.folded;
    }
  });
  new MutationObserver(everything).observe(document.documentElement, { attributes: true, attributeFilter: ["lang"] });
  everything();
  document.documentElement.dataset.drawn = "yes";
})();
