// The parts of a chart over training steps: axes, lines with their raw values behind them, and gaps.
const charts = (() => {
  const { ticks, yTicks } = drawing;
  const { say, svg, show, line } = pieces;

  function yAxis(chart, scale, y, left, right, unit, bars = [], most = 5) {
    for (const tick of yTicks(scale, most)) {
      chart.append(svg("line", { class: "axis", x1: left, x2: right, y1: y(tick), y2: y(tick) }));
      chart.append(svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, show(tick, unit)));
    }
    // The name of a bar stands above its line, or below it, where neither the title nor another bar is.
    const shown = bars.filter(([bar]) => bar > scale.low && bar < scale.high).sort(([a], [b]) => b - a);
    let free = 17; // from here on down
    shown.forEach(([bar, word], at) => {
      const here = y(bar);
      const next = at + 1 < shown.length ? y(shown[at + 1][0]) : Infinity;
      chart.append(svg("line", { class: "bar-line", x1: left, x2: right, y1: here, y2: here }));
      const place = here - 12 >= free ? here - 3 : Math.max(here, free) + 14 <= next ? Math.max(here, free) + 11 : null;
      free = Math.max(free, place === null ? here + 1 : place + 3, here + 1);
      if (place !== null) chart.append(svg("text", { class: "bar-name", x: left + 4, y: place }, `${show(bar, unit)} ${say(word)}`));
    });
  }

  function stepAxis(chart, view, x, left, right, below) {
    for (const tick of ticks(view.from, view.to, Math.floor((right - left) / 80), 1)) {
      chart.append(svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: below, y2: below + 5 }));
      chart.append(svg("text", { x: x(tick), y: below + 18, "text-anchor": "middle" }, String(tick)));
    }
    chart.append(svg("text", { x: Math.max(left - 16, 36), y: below + 18, "text-anchor": "end" }, say("step_axis")));
  }

  // A drawing that cuts off what lies outside the steps that are shown.
  function plotOf(chart, left, right, tall) {
    const plot = svg("svg", { x: left, y: 0, width: right - left, height: tall, viewBox: `${left} 0 ${right - left} ${tall}` });
    chart.append(plot);
    return plot;
  }

  // A line of values, smoothed, and behind it the raw one; a point for each value where there are few.
  function curve(plot, name, { steps, values }, { x, y, gaps, view, most }) {
    const smooth = viewing.smoothed(values, view.weight);
    if (view.weight) plot.append(svg("path", { class: `raw of-${name}`, d: line(steps, values, x, y, gaps) }));
    plot.append(svg("path", { class: `line-${name}`, d: line(steps, smooth, x, y, gaps) }));
    const shown = steps.filter((step) => step >= view.from && step <= view.to).length;
    const there = name === "loss" ? Number.isFinite : (value) => !Number.isNaN(value); // a lost loss has a mark of its own
    if (shown < most) smooth.forEach((value, at) => {
      if (there(value)) plot.append(svg("circle", { class: `point-${name}`, cx: x(steps[at]), cy: y(value), r: 2 }));
    });
  }

  function gapsOf(plot, gaps, x, top, tall) {
    for (const [from, to] of gaps) {
      plot.append(svg("rect", { class: "gap", x: x(from), width: Math.max(x(to) - x(from), 1), y: top, height: tall }));
    }
  }

  return { yAxis, stepAxis, plotOf, curve, gapsOf };
})();
