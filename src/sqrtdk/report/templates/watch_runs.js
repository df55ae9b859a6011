// Several runs over one another: the loss and the chosen statistic, each run with a colour and a line of its own.
const overlayOf = (page) => {
  const figure = document.getElementById("overlay");
  if (!figure) return null;
  const { runs, view, series, siteOf, titleOf, unitOf, chosen, tip } = page;
  const { BARS, say, svg, html, number, show, line, nearest } = pieces;
  const [COLOURS, DASHES] = [8, ["", "7 4", "2 3", "9 3 2 3"]];
  const [LOSS, TREND, GAP] = [170, 200, 12];
  const chart = { place: figure.querySelector(".drawing") };
  const told = figure.querySelector(".told");
  const letter = (place) => String.fromCharCode(65 + place);
  const toneOf = (place) => `r${place % COLOURS}`;
  const dashOf = (place) => DASHES[Math.floor(place / COLOURS) % DASHES.length];
  let cursor = null;

  const swatch = (place) => {
    const sample = svg("svg", { viewBox: "0 0 22 10", class: toneOf(place), "aria-hidden": "true" });
    sample.append(svg("path", { class: "line-run", d: "M0 5H22", "stroke-dasharray": dashOf(place) }));
    return sample;
  };
  const named = (place) => [swatch(place), html("b", {}, letter(place)), document.createTextNode(` ${runs[place].short}`)];
  const buttons = runs.map((run, place) => {
    const button = html("button", { type: "button", title: run.name, "aria-pressed": "true" });
    const item = html("li");
    button.append(...named(place));
    item.append(button, html("span", { class: "quiet" }));
    button.addEventListener("click", () => {
      view.toggle(place);
      button.setAttribute("aria-pressed", String(!view.hidden.has(place)));
    });
    figure.querySelector(".runs").append(item);
    return item;
  });

  function lossOf(run) {
    return { steps: run.loss[0], values: run.loss[1].map(number) };
  }
  // Both charts: what a run has in it, and where it stands in the drawing.
  const CHARTS = [
    {
      tall: LOSS, scale: "loss", of: lossOf, unit: () => "", bars: () => [],
      title: (_, logarithmic) => say("loss_title") + (logarithmic ? say("logarithmic_after") : ""),
    },
    {
      tall: TREND, scale: "trend", of: (run) => series(run, chosen.statistic), unit: () => unitOf(chosen.statistic),
      title: (room, logarithmic) => page.heading(chosen.site, room, logarithmic), bars: () => BARS[chosen.statistic],
    },
  ];
  const shown = () => runs.map((run, place) => ({ run, place })).filter(({ place }) => !view.hidden.has(place));

  // The letters of runs stand where their lines end, one below the other where the lines end together.
  function letters(group, ends) {
    const [WIDE, TALL] = [12, 11];
    const taken = [];
    for (const end of ends.sort((a, b) => a.y - b.y)) {
      const x = end.x + 5;
      let y = Math.max(end.y + 4, 10);
      for (const other of taken) if (Math.abs(other.x - x) < WIDE && Math.abs(other.y - y) < TALL) y = other.y + TALL;
      taken.push({ x, y });
      group.append(svg("text", { class: `end ${toneOf(end.place)}`, x, y }, letter(end.place)));
    }
  }

  // The lines of all runs in a drawing; `most` values of a run are also drawn as points.
  function lines(plot, values, { x, y, most }) {
    const ends = [];
    const every = shown().map((one) => ({ ...one, ...(values(one.run) ?? { steps: [], values: [] }) }));
    const few = every.every(({ steps }) => steps.length < most);
    for (const { run, place, steps, values: raw } of every) {
      const [tone, smooth] = [toneOf(place), viewing.smoothed(raw, view.weight)];
      if (view.weight) plot.append(svg("path", { class: `raw line-run ${tone}`, d: line(steps, raw, x, y, run.gaps) }));
      plot.append(svg("path", { class: `line-run ${tone}`, "stroke-dasharray": dashOf(place), "data-run": place, d: line(steps, smooth, x, y, run.gaps) }));
      if (few) smooth.forEach((value, at) => {
        if (!Number.isNaN(value)) plot.append(svg("circle", { class: `point-run ${tone}`, cx: x(steps[at]), cy: y(value), r: 2 }));
      });
      const last = smooth.findLastIndex((value, at) => !Number.isNaN(value) && steps[at] >= view.from && steps[at] <= view.to);
      if (last < 0) continue;
      const end = { place, x: x(steps[last]), y: y(smooth[last]) };
      plot.append(svg("circle", { class: `point-run ${tone}`, cx: end.x, cy: end.y, r: 2.5 }));
      ends.push(end);
    }
    return ends;
  }
  function drawChart(one, scales, left, right) {
    const { tall } = one;
    const scale = scales[one.scale];
    const group = svg("svg", { width: right + 24, height: tall, role: "img", "aria-label": one.title(Infinity, scale.log) });
    const y = (value) => tall - 24 - scale.at(value) * (tall - 48);
    const wide = right > 420;
    group.append(svg("text", { class: "title", x: wide ? left : 2, y: 12 }, one.title(right - (wide ? left : 0), scale.log)));
    charts.yAxis(group, scale, y, left, right, one.unit(), one.bars());
    charts.stepAxis(group, view, chart.x, left, right, tall - 22);
    letters(group, lines(charts.plotOf(group, left, right, tall - 20), one.of, { x: chart.x, y, most: 40 }));
    return group;
  }
  // A statistic of the chosen attention and head, small: its lines and the ends of its scale.
  function small(name, width) {
    const tall = 96;
    const values = shown().map(({ run }) => series(run, name)).filter(Boolean).flatMap((one) => view.shown(one.steps, one.values));
    const [left, right] = [48, width - 20];
    const picture = svg("svg", { width, height: tall, role: "img", "aria-label": titleOf(name) });
    if (!values.some((value) => !Number.isNaN(value))) {
      picture.append(svg("text", { x: width / 2, y: tall / 2, "text-anchor": "middle" }, say("not_measured")));
      return picture;
    }
    const scale = drawing.scaleOf(values, unitOf(name));
    const y = (value) => tall - 8 - scale.at(value) * (tall - 16);
    charts.yAxis(picture, scale, y, left, right, unitOf(name), [], 3);
    letters(picture, lines(charts.plotOf(picture, left, right, tall), (run) => series(run, name), { x: view.x(left, right), y, most: 0 }));
    return picture;
  }

  function draw(scales) {
    const { place } = chart;
    const width = Math.max(place.clientWidth, 240);
    const [left, right] = [width < 420 ? 44 : 64, width - 24];
    Object.assign(chart, { left, right, x: view.x(left, right) });
    const height = LOSS + GAP + TREND;
    chart.over = svg("svg", { class: "over", width, height, "aria-hidden": "true" });
    chart.cursor = svg("line", { class: "cursor", x1: 0, x2: 0, y1: 16, y2: height - 22, visibility: "hidden" });
    chart.over.append(chart.cursor);
    place.replaceChildren(...CHARTS.map((one) => drawChart(one, scales, left, right)), chart.over);
    place.setAttribute("aria-label", say("keys_over"));
    buttons.forEach((item, at) => { item.lastChild.textContent = siteOf(runs[at]) ? "" : say("not_in_run"); });
    point(cursor);
  }

  // What a run has at the sample nearest to a step; null where it has none.
  function valueAt(one, run, step) {
    const values = one.of(run);
    if (!values || !values.steps.length) return null;
    const at = nearest(values.steps, step);
    const parts = [show(values.values[at], one.unit(), 4)];
    if (view.weight) parts.push(say("smoothed", { value: show(viewing.smoothed(values.values, view.weight)[at], one.unit(), 4) }));
    if (values.steps[at] !== Math.round(step)) parts.push(say("step", { step: values.steps[at] }));
    return parts.join(" · ");
  }
  function point(step) {
    cursor = step;
    if (!chart.cursor) return;
    chart.cursor.setAttribute("visibility", step !== null && step >= view.from && step <= view.to ? "visible" : "hidden");
    if (step === null) { told.textContent = ""; return; }
    for (const end of ["x1", "x2"]) chart.cursor.setAttribute(end, chart.x(step));
    const parts = CHARTS.map((one) => {
      const every = shown().map(({ run, place }) => [place, valueAt(one, run, step)]).filter(([, text]) => text !== null);
      return every.length ? `${one.title(Infinity, false)}: ${every.map(([place, text]) => `${letter(place)} ${text}`).join(", ")}` : "";
    });
    told.textContent = [say("step", { step: Math.round(step) }), ...parts].filter(Boolean).join(" · ");
  }
  function tell(event, step) {
    const y = event.clientY - chart.place.getBoundingClientRect().top;
    const one = CHARTS[y < LOSS + GAP / 2 ? 0 : 1];
    const rows = shown().map(({ run, place }) => {
      const row = html("span", { class: "row" });
      row.append(...named(place), html("span", { class: "value" }, valueAt(one, run, step) ?? say("not_in_run")));
      return row;
    });
    page.hint([html("span", { class: "row" }, `${one.title(Infinity, false)} · ${say("step", { step: Math.round(step) })}`), ...rows], event);
  }

  viewing.zoomable(chart, view, () => cursor ?? (view.from + view.to) / 2);
  chart.place.addEventListener("pointermove", (event) => {
    if (!chart.x) return;
    const step = view.stepAt(chart, event.clientX - chart.place.getBoundingClientRect().left);
    page.point(step);
    tell(event, step);
  });
  chart.place.addEventListener("pointerleave", () => { tip.hidden = true; page.point(null); });
  // Arrow keys go over the steps of which any run has a sample or a loss.
  chart.place.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (way === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    const every = [...new Set(shown().flatMap(({ run }) => CHARTS.flatMap((one) => one.of(run)?.steps ?? [])))].sort((a, b) => a - b);
    if (!every.length) return;
    const now = cursor === null ? (way > 0 ? -1 : every.length) : nearest(every, cursor);
    const step = every[Math.max(0, Math.min(every.length - 1, now + way))];
    view.reach(step);
    page.point(step);
    event.preventDefault();
  });

  return { draw, point, small };
};
