// The panel of a run: its loss, its alarms, a map of its attentions and the trend of the chosen head, over one axis.
const panelsOf = (page) => {
  const { runs, view, series, siteOf, titleOf, unitOf, shorter, chosen, hint, tip } = page;
  const { BARS, SHAPES, say, svg, html, number, show, line, nearest, mapOf } = pieces;
  const { yAxis, stepAxis, plotOf, curve, gapsOf } = charts;
  const LOSS = 92;
  const FLAGS = 22;
  const MARK = 14; // pixels from one mark of an alarm to the next
  const TREND = 128;
  const panels = [...document.querySelectorAll(".panel")].map((figure) => ({
    figure, run: runs[Number(figure.dataset.run)], place: figure.querySelector(".drawing"), told: figure.querySelector(".told"),
  }));
  let cursor = null; // the step that is pointed at

  function drawLoss(panel, scale, left, right, width) {
    const { run, x } = panel;
    const top = svg("svg", { width, height: LOSS + FLAGS, role: "img", "aria-label": say("loss_and_alarms") });
    const y = (value) => LOSS - 4 - scale.at(value) * (LOSS - 26);
    top.append(svg("text", { class: "title", x: left, y: 11 }, say("loss_title") + (scale.log ? say("logarithmic_after") : "")));
    const losses = run.loss[1].map(number);
    if (losses.length) yAxis(top, scale, y, left, right, "");
    else top.append(svg("text", { x: (left + right) / 2, y: LOSS / 2, "text-anchor": "middle" }, say("no_loss")));
    const plot = plotOf(top, left, right, LOSS + 2);
    curve(plot, "loss", { steps: run.loss[0], values: losses }, { x, y, gaps: run.gaps, view, most: 30 });
    losses.forEach((value, at) => {
      if (!Number.isFinite(value)) plot.append(svg("circle", { class: "lost", cx: x(run.loss[0][at]), cy: 18, r: 2 }));
    });
    gapsOf(plot, run.gaps, x, 16, LOSS - 16);
    top.append(svg("text", { x: left - 6, y: LOSS + 15, "text-anchor": "end" }, say("alarms")));
    top.append(svg("line", { class: "axis", x1: left, x2: right, y1: LOSS + 11, y2: LOSS + 11 }));
    // The worst first: an alarm that would lie on a mark is told with it.
    const order = ["critical", "fail", "warn", "note"];
    const marks = [];
    const shown = run.alarms.filter(({ step }) => step >= view.from && step <= view.to);
    shown.sort((a, b) => order.indexOf(a.severity) - order.indexOf(b.severity)).forEach((alarm) => {
      const at = x(alarm.step);
      const near = marks.find((mark) => Math.abs(mark.at - at) < MARK);
      if (near) { near.alarms.push(alarm); return; }
      const mark = svg("g", { class: `s-${alarm.severity} alarm`, transform: `translate(${at.toFixed(1)} ${LOSS + 11})` });
      mark.append(svg("path", { class: "flag", d: SHAPES[alarm.severity] }));
      marks.push(Object.assign(mark, { at, alarms: [alarm] }));
    });
    top.append(...marks);
    return top;
  }

  function drawMap(panel, left, right, name) {
    const { run, x } = panel;
    const tall = Math.max(6, Math.min(22, 260 / Math.max(run.sites.length, 1)));
    const row = html("div");
    row.style.position = "relative";
    row.style.height = `${run.sites.length * tall}px`;
    const names = svg("svg", { width: left, height: run.sites.length * tall, "aria-hidden": "true" });
    const every = Math.ceil(12 / tall);
    const most = Math.floor((left - 12) / 6);
    run.sites.forEach((site, at) => {
      if (at % every) return;
      const text = svg("text", { x: left - 6, y: at * tall + tall / 2 + 4, "text-anchor": "end" }, shorter(site.label, most));
      if (site === siteOf(run)) text.setAttribute("class", "title");
      names.append(text);
    });
    const map = mapOf(run, name, { ...page.colours(name), view, x: (step) => x(step) - left, width: right - left, tall });
    map.setAttribute("aria-label", `${titleOf(name)}: ${say("axes")}`);
    map.style.position = "absolute";
    map.style.left = `${left}px`;
    map.style.top = "0";
    row.append(names, map);
    panel.map = { map, left, tall };
    return row;
  }

  function drawTrend(panel, scale, left, right, width, name) {
    const { run, x } = panel;
    const bottom = svg("svg", { width, height: TREND, role: "img", "aria-label": say("trend") });
    const y = (value) => TREND - 24 - scale.at(value) * (TREND - 48);
    const narrow = width < 420;
    const site = siteOf(run);
    const label = site ? site.label : chosen.site;
    const heading = page.heading(label, right - (narrow ? 0 : left), scale.log);
    bottom.append(svg("text", { class: "title", x: narrow ? 2 : left, y: 14 }, heading));
    yAxis(bottom, scale, y, left, right, unitOf(name), BARS[name]);
    const one = series(run, name);
    const plot = plotOf(bottom, left, right, TREND - 22);
    if (one) {
      plot.append(svg("path", { class: "line-median", d: line(one.site.steps, viewing.smoothed(one.medians, view.weight), x, y, run.gaps) }));
      curve(plot, "head", one, { x, y, gaps: run.gaps, view, most: 80 });
    } else {
      bottom.append(svg("text", { x: (left + right) / 2, y: TREND / 2, "text-anchor": "middle" }, say("not_in_run")));
    }
    gapsOf(plot, run.gaps, x, 16, TREND - 40);
    stepAxis(bottom, view, x, left, right, TREND - 22);
    return bottom;
  }

  function draw(panel, scales) {
    const { run, place } = panel;
    place.replaceChildren();
    if (run.first === null) { place.append(html("p", { class: "empty" }, say("nothing_recorded"))); return; }
    const name = chosen.statistic;
    const width = Math.max(place.clientWidth, 240);
    const left = Math.min(width < 420 ? 74 : 150, 14 + 6.4 * Math.max(6, ...run.sites.map((site) => site.label.length)));
    const right = width - 12;
    Object.assign(panel, { left, right, x: view.x(left, right) });
    const row = drawMap(panel, left, right, name);
    place.append(drawLoss(panel, scales.loss, left, right, width), row, drawTrend(panel, scales.trend, left, right, width, name));
    panel.map.tall = panel.map.map.getBoundingClientRect().height / Math.max(run.sites.length, 1) || panel.map.tall;
    place.setAttribute("aria-label", say("keys", { run: run.name }));
    const height = LOSS + FLAGS + row.clientHeight + TREND;
    panel.over = svg("svg", { class: "over", width, height, "aria-hidden": "true" });
    panel.cursor = svg("line", { class: "cursor", x1: 0, x2: 0, y1: 14, y2: height - 22, visibility: "hidden" });
    panel.cell = svg("rect", { class: "cell", visibility: "hidden" });
    panel.over.append(panel.cursor, panel.cell);
    place.append(panel.over);
    point(cursor);
  }

  // What there is at a step, in words, and a line through all panels.
  function point(step) {
    cursor = step;
    for (const panel of panels) {
      if (!panel.cursor) continue;
      const seen = step !== null && step >= view.from && step <= view.to;
      panel.cursor.setAttribute("visibility", seen ? "visible" : "hidden");
      if (step === null) { panel.told.textContent = ""; continue; }
      const at = panel.x(step);
      panel.cursor.setAttribute("x1", at);
      panel.cursor.setAttribute("x2", at);
      const name = chosen.statistic;
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
    return { site, at: best, one: site.worst[chosen.statistic][best] };
  }
  function describe(site, at) {
    const one = site.worst[chosen.statistic][at];
    const step = say("step", { step: site.steps[at] });
    return `${step} · ${one.head < 0 ? show(NaN) : say("head_value", { head: site.heads[one.head], value: show(one.value, unitOf(chosen.statistic)) })}`;
  }
  // Arrow keys: over the samples of an attention, and over the attentions.
  function move(panel, key) {
    const sites = panel.run.sites;
    if (!sites.length) return;
    const now = panel.at ?? { row: Math.max(0, sites.indexOf(siteOf(panel.run))), step: view.to };
    const row = Math.max(0, Math.min(sites.length - 1, now.row + ({ ArrowUp: -1, ArrowDown: 1 }[key] ?? 0)));
    const steps = sites[row].steps;
    const place = nearest(steps, now.step) + ({ ArrowLeft: -1, ArrowRight: 1 }[key] ?? 0);
    const at = { Home: 0, End: steps.length - 1 }[key] ?? Math.max(0, Math.min(steps.length - 1, place));
    panel.at = { row, step: steps[at] };
    view.reach(steps[at]);
    page.point(steps[at]);
    const x = panel.x(steps[at]);
    for (const [key_, value] of Object.entries({ x: x - 4, width: 8, y: LOSS + FLAGS + row * panel.map.tall, height: panel.map.tall, visibility: "visible" })) panel.cell.setAttribute(key_, value);
    panel.told.textContent = `${sites[row].label} · ${describe(sites[row], at)}`;
  }
  for (const panel of panels) {
    zoomable(panel);
    panel.place.addEventListener("keydown", (event) => {
      if (!panel.x || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Enter" && panel.at) {
        const site = panel.run.sites[panel.at.row];
        const one = site.worst[chosen.statistic][nearest(site.steps, panel.at.step)];
        page.choose(site.label, one.head < 0 ? "worst" : site.heads[one.head]);
        move(panel, "");
      } else if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) move(panel, event.key);
      else return;
      event.preventDefault();
    });
    panel.place.addEventListener("blur", () => { panel.at = undefined; panel.cell?.setAttribute("visibility", "hidden"); });
    panel.place.addEventListener("pointermove", (event) => {
      if (!panel.x) return;
      page.point(view.stepAt(panel, event.clientX - panel.place.getBoundingClientRect().left));
      const mark = event.target.closest(".alarm");
      const cell = mark ? null : cellAt(panel, event);
      if (mark) {
        const there = mark.alarms.map((alarm) => alarm.text);
        hint([...there.slice(0, 6), ...(there.length > 6 ? [`+ ${there.length - 6}`] : [])].join("\n"), event);
      }
      else if (cell) hint(`${cell.site.label}\n${describe(cell.site, cell.at)}`, event);
      else tip.hidden = true;
    });
    panel.place.addEventListener("pointerleave", () => { tip.hidden = true; page.point(null); });
    panel.place.addEventListener("click", (event) => {
      const mark = event.target.closest(".alarm");
      if (mark) { page.go(panel.run, mark.alarms[0]); return; }
      const cell = panel.x && cellAt(panel, event);
      if (cell) page.choose(cell.site.label, cell.one.head < 0 ? "worst" : cell.site.heads[cell.one.head]);
    });
  }
  function zoomable(panel) {
    viewing.zoomable(panel, view, () => panel.at?.step ?? cursor ?? (view.from + view.to) / 2);
  }

  return {
    point,
    draw: (scales) => panels.forEach((panel) => {
      panel.figure.hidden = view.hidden.has(runs.indexOf(panel.run));
      if (!panel.figure.hidden) draw(panel, scales);
    }),
  };
};
