// The static explorer: controls, and what follows from them. Formulas are in formulas.js, measurements in draws.js.
(() => {
  const [GREY, AWAKE_MS] = [8, 24];
  const { dims: DIMS, range_dims: RANGE_DIMS, halves: HALVES } = data.sizes;
  const root = document.documentElement;
  const results = document.getElementById("results");
  const query = new URLSearchParams(location.search);

  const spoken = () => (root.lang.startsWith("zh") ? 1 : 0);
  const say = (id, parts = {}) => data.words[id][spoken()].replace(/\{(\w+)\}/g, (_, name) => parts[name]);
  const shown = charts.shown;

  // -- settings: texts as a reader types them, then values as `sqrtdk_lab.app.settings` reads them

  class Refused extends Error {}
  const typed = {};
  const ruled = () => (Object.hasOwn(data.by_rule, typed.rule) ? data.by_rule[typed.rule] : null);
  const control = (name) => (name === "parameter" ? ruled() : data.controls[name]);

  function read(name, text) {
    const { low, high, whole, none, offered } = control(name);
    const refuse = (kind, parts) => {
      const label = name === "parameter" ? say(`app.parameter.${typed.rule}`) : say(`app.control.${name}`);
      throw new Refused(say("app.error.control", { name: label, said: say(`app.error.${kind}`, { got: `'${text}'`, ...parts }) }));
    };
    if (low === null) {
      if (!offered.includes(text)) refuse("choice", { offered: offered.join(", ") });
      return text;
    }
    if (none && text === "none") return null;
    const number = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text) ? Number(text) : NaN;
    if (!(number >= low && number <= high && (!whole || Number.isInteger(number)))) refuse(whole ? "whole" : "number", { low: shown(low, 10), high: shown(high, 10) });
    return number;
  }

  function settings() {
    const values = {};
    for (const name of Object.keys(data.controls)) values[name] = control(name) ? read(name, typed[name]) : null;
    return values;
  }

  function address() {
    const parts = new URLSearchParams();
    for (const name of Object.keys(data.controls)) if (control(name) && typed[name] !== control(name).default) parts.set(name, typed[name]);
    const text = parts.toString();
    try {
      history.replaceState(null, "", `${location.pathname}${text ? `?${text}` : ""}${location.hash}`);
    } catch { /* some browsers keep the address of a file as it is */ }
  }

  // -- controls

  const made = {};
  const nameOf = (name) => (name === "parameter" && ruled() ? say(`app.parameter.${typed.rule}`) : say(`app.control.${name}`));
  const wordsOf = (name) => (name === "softcap" ? { none: say("app.offered_softcap.none") } : {});
  const element = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [key, text] of Object.entries(attributes)) node.setAttribute(key, text);
    node.append(...children);
    return node;
  };

  function begin() {
    const choices = document.getElementById("choices");
    for (const [name, { offered, low, default: usual }] of Object.entries(data.controls)) {
      typed[name] = query.get(name) ?? usual;
      const host = element("div", { id: `control-${name}` });
      choices.append(host);
      const turned = (value) => {
        typed[name] = value;
        if (name === "rule") parameter(ruled()?.default);
        follow();
      };
      if (low !== null) {
        made[name] = sliders.build(host, { name, label: "", stops: offered, value: typed[name] }, turned);
        continue;
      }
      const select = element("select", { id: `field-${name}` }, ...offered.map((value) => element("option", { value })));
      const label = element("label", { for: select.id });
      host.classList.add("choice");
      host.append(label, select);
      select.addEventListener("change", () => turned(select.value));
      made[name] = { select, label };
    }
    parameter(query.get("parameter") ?? ruled()?.default);
  }

  function parameter(value = "none") {
    typed.parameter = value;
    document.getElementById("control-parameter").hidden = !ruled();
    if (ruled()) made.parameter.set({ label: nameOf("parameter"), stops: ruled().offered, value });
  }

  function name() { // in the language of the page
    for (const [control, { set, select, label }] of Object.entries(made)) {
      if (set) set({ label: nameOf(control), words: wordsOf(control) });
      else {
        label.textContent = nameOf(control);
        for (const option of select.options) option.textContent = say(`app.offered_${control}.${option.value}`);
        select.value = typed[control];
      }
    }
    document.title = say("app.page.title");
  }

  // -- what is drawn

  const plots = new Map();
  function put(figure, plot, legend, note = false) {
    plots.set(figure, plot);
    const place = document.getElementById(`figure-${figure}`);
    place.querySelector(".legend").replaceChildren(...legend.map(([mark, colour, id, over]) => {
      const text = over ? say(over, { of: say(id) }) : say(id);
      return element("li", {}, element("span", { class: `mark ${mark} k${colour}` }), text);
    }));
    place.querySelector(".note").hidden = !note;
    redraw(figure);
  }
  function redraw(figure) {
    const place = document.getElementById(`figure-${figure}`);
    const drawing = place.querySelector(".drawing");
    const svg = charts.draw(plots.get(figure), Math.max(240, drawing.clientWidth), `${figure}-caption`);
    drawing.replaceChildren(...(svg ? [svg] : []));
    place.querySelector(".empty").hidden = Boolean(svg);
  }

  function table(place, caption, head, body) {
    const cells = (row) => row.slice(1).map((text, at) => element("td", { role: "cell", "data-label": head[at + 1] }, text));
    const rowsMade = body.map((row) => element("tr", { role: "row" }, element("th", { scope: "row", role: "rowheader" }, row[0]), ...cells(row)));
    const titles = head.map((text) => element("th", { scope: "col", role: "columnheader" }, text));
    const whole = element("table", { role: "table" }, element("caption", {}, caption),
      element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...titles)), element("tbody", { role: "rowgroup" }, ...rowsMade));
    document.getElementById(place).replaceChildren(element("div", { class: "wide", tabindex: "0" }, whole));
  }

  // The chosen scale, then the overlaid one if it is another.
  function sidesOf(chosen) {
    const one = (rule, parameterOf, over) => ({
      over,
      factor: (d) => theory.scale(rule, d, chosen.keys, parameterOf) / chosen.temperature,
      std(d) { return theory.std(d, this.factor(d), chosen.query_variance, chosen.key_variance); },
    });
    const sides = [one(chosen.rule, chosen.parameter, null)];
    if (chosen.overlay !== "off" && chosen.overlay !== chosen.rule) sides.push(one(chosen.overlay, null, `app.legend.over_${chosen.overlay}`));
    return sides;
  }
  const theoryId = (chosen) => (chosen.softcap === null ? "app.legend.theory" : "app.legend.uncapped");
  const meansOf = (found) => ({
    entropy: rows.mean(found.entropy), peak: rows.mean(found.peak), jacobian: Math.sqrt(rows.mean(found.jacobian)),
    std: Math.sqrt(rows.mean(found.std.map((one) => one * one))),
  });

  function atOnce(chosen, sides, found) {
    const unit = (side) => Math.abs(side.factor(chosen.d_k)) * Math.sqrt(chosen.query_variance * chosen.key_variance);
    const series = sides.flatMap((side, at) => {
      const { low, high, counts } = rows.histogram(found[at].logits);
      const width = (high - low) / counts.length;
      if (!width) return [];
      const edges = counts.map((_, bin) => low + width * bin);
      const middles = edges.map((edge) => edge + width / 2);
      const total = counts.reduce((sum, one) => sum + one, 0);
      const expected = edges.map((edge) => theory.probabilityWithin(chosen.d_k, unit(side), edge, edge + width) / width);
      return [
        { x: middles, y: counts.map((one) => one / total / width), style: "points", colour: at },
        { x: middles, y: expected, style: "dashed", colour: at },
      ];
    });
    const legend = sides.map((side, at) => ["dots", at, "app.legend.measured", side.over]);
    put("logits", { x: "z", y: "p(z)", series }, [...legend, ["dashes", GREY, theoryId(chosen)]]);

    const ranks = Array.from({ length: chosen.keys }, (_, at) => at + 1);
    const sorted = sides.map((_, at) => found[at].logits.slice(0, 3).map((z) => Array.from(rows.statistics(z).weights).sort((a, b) => b - a)));
    const weights = sorted.flatMap((three, at) => three.map((y, colour) => ({ x: ranks, y, style: at ? "dashed" : "curve", colour })));
    const alone = sorted[0].every((row) => row[0] === 1 && row.slice(1).every((one) => one === 0));
    const entries = sides.map((side, at) => [at ? "dashes" : "line", 0, "app.legend.rows", side.over]);
    put("weights", { x: "i", y: "p_{(i)}", xLog: 10, yLog: true, series: weights, lines: [[1 / chosen.keys, "1/n"]] }, entries, alone);
  }

  function numbers(chosen, [side], found) {
    const means = meansOf(found);
    const textbook = theory.std(chosen.d_k, theory.scale("sqrt_dk", chosen.d_k), chosen.query_variance, chosen.key_variance);
    const scales = [side.factor(chosen.d_k), theory.scale("sqrt_dk", chosen.d_k)];
    const expect = (std) => [std, theory.entropy(chosen.keys, std), theory.peak(chosen.keys, std), theory.jacobian(chosen.keys, std)].map((one) => shown(one));
    const here = chosen.softcap === null ? expect(side.std(chosen.d_k)) : ["-", "-", "-", "-"];
    const there = expect(textbook);
    const share = charts.percent(rows.mean(found.entropy) / Math.log(chosen.keys));
    const saturated = found.peak.filter((one) => one > 0.99).length / found.peak.length;
    const told = {
      scale: [shown(scales[0]), shown(scales[0]), shown(scales[1])],
      ratio: [charts.ratio(scales[0] / scales[1]), charts.ratio(scales[0] / scales[1]), charts.ratio(1)],
      std: [shown(means.std), here[0], there[0]],
      max: [shown(Math.max(...found.max)), "-", "-"],
      entropy: [`${shown(means.entropy)} (${share})`, here[1], there[1]],
      effective: [shown(rows.mean(found.effective)), "-", "-"],
      peak: [shown(means.peak), here[2], there[2]],
      saturated: [charts.percent(saturated), "-", "-"],
      jacobian: [shown(means.jacobian), here[3], there[3]],
      gradient: [shown(rows.quantile(found.gradient, 0.5)), "-", "-"],
    };
    const head = ["", ...["measured", "expected", "textbook"].map((name) => say(`app.column.${name}`))];
    table("numbers", say("app.glance.caption", { d_k: chosen.d_k, keys: chosen.keys }), head,
      Object.entries(told).map(([name, cells]) => [say(`app.row.${name}`), ...cells]));
  }

  function* ranges(chosen, [side]) {
    const pairs = chosen.keys ** 2;
    const root = Math.sqrt(chosen.query_variance * chosen.key_variance);
    const unit = (d, before) => (before ? Math.abs(side.factor(d)) : 1) * root;
    const places = [...new Set([...RANGE_DIMS, chosen.d_k])].sort((a, b) => a - b);
    const largest = [[], []];
    for (const d of places) {
      for (const before of [0, 1]) largest[before].push(unit(d, before) * theory.expectedMax(d, pairs));
      yield null;
    }
    const [after, first] = largest;
    put("range", { x: "d_{k}", y: "max |q · k|", xLog: 2, yLog: true, series: [
      { x: places, y: after, style: "line", colour: 0 }, { x: places, y: first, style: "line", colour: 1 },
      { x: places, y: places.map(() => data.dtypes.float16.max), style: "dashed", colour: GREY },
    ] }, [["line", 0, "app.legend.after"], ["line", 1, "app.legend.before"], ["dashes", GREY, "app.legend.limit"]]);
    const [series, legend] = [[], []];
    for (const before of [0, 1]) HALVES.forEach((dtype, colour) => {
      series.push({ x: places, y: largest[before].map((one) => theory.spacing(one, dtype)), style: before ? "dashed" : "line", colour });
      legend.push([before ? "dashes" : "line", colour, `app.legend.${dtype}_${before ? "before" : "after"}`]);
    });
    put("step", { x: "d_{k}", y: "Δz", xLog: 2, yLog: true, series }, legend);
    const body = Object.keys(data.dtypes).flatMap((dtype) => [0, 1].map((before) => {
      const one = theory.forecast(chosen.d_k, pairs, unit(chosen.d_k, before), dtype);
      return [dtype, say(`app.place.${before ? "before" : "after"}`), ...[one.largest, one.limit, one.margin].map((value) => shown(value)), charts.percent(one.overflow), shown(one.step)];
    }));
    const head = ["dtype", "place", "largest", "limit", "margin", "overflow", "step"].map((name) => say(`app.column.${name}`));
    table("ranges", say("app.range.caption", { pairs: pairs.toLocaleString("en-US") }), head, body);
  }

  function overDims(chosen, sides, dims, found) {
    const x = dims;
    const at = dims.indexOf(chosen.d_k);
    const here = (y, colour) => ({ x: [chosen.d_k], y: [y[at]], style: "points", colour });
    const spread = (all) => ({ low: all.map((one) => rows.quantile(one, 0.05)), high: all.map((one) => rows.quantile(one, 0.95)) });
    const expected = (of) => sides.map((side, colour) => ({ x, y: dims.map((d) => of(chosen.keys, side.std(d))), style: "dashed", colour }));
    const last = [["dashes", GREY, theoryId(chosen)], ["dots", sides.length, "app.legend.here"]];
    for (const [name, y, of] of [["entropy", "H / nat", theory.entropy], ["peak", "max p_{i}", theory.peak]]) {
      const means = sides.map((_, colour) => {
        const all = found[colour].map((one) => one[name]);
        return { x, y: all.map(rows.mean), ...spread(all), style: "line", colour };
      });
      const legend = sides.map((side, colour) => ["line", colour, "app.legend.mean", side.over]);
      put(name, { x: "d_{k}", y, xLog: 2, series: [...expected(of), ...means, here(means[0].y, sides.length)] }, [...legend, ...last]);
    }
    const of = (pick, add) => sides.map((_, side) => ({ x, y: found[side].map(pick), style: "line", colour: side + add }));
    const roots = of((one) => Math.sqrt(rows.mean(one.jacobian)), 0);
    const medians = of((one) => Math.sqrt(rows.quantile(one.jacobian, 0.5)), sides.length);
    const named = (id, add) => sides.map((side, colour) => ["line", colour + add, id, side.over]);
    put("jacobian", { x: "d_{k}", y: "‖J‖_{F}", xLog: 2, series: [...expected(theory.jacobian), ...roots, ...medians, here(roots[0].y, 2 * sides.length)] },
      [...named("app.legend.rms", 0), ...named("app.legend.median", sides.length), last[0], ["dots", 2 * sides.length, "app.legend.here"]]);
    const shares = [[0.95, "app.legend.high"], [0.5, "app.legend.median"], [0.05, "app.legend.low"]];
    const gradients = sides.flatMap((side, at) => shares.map(([share], colour) => ({
      x, y: found[at].map((one) => rows.quantile(one.gradient, share)), style: at ? "dashed" : "line", colour,
    })));
    put("gradient", { x: "d_{k}", y: "‖∂L/∂q‖", xLog: 2, yLog: true, series: gradients },
      [...shares.map(([, id], colour) => ["line", colour, id]), ...sides.slice(1).map((side) => ["dashes", GREY, "app.legend.same", side.over])]);
  }

  // -- in steps, so that a slider never waits: a newer choice ends what an older one began

  let newest = 0;
  const kept = new Map(); // what was measured, of the last settings
  function* work(chosen) {
    const sides = sidesOf(chosen);
    const measured = function* (side, d) {
      const { seed, components, keys, query_variance, key_variance, softcap } = chosen;
      const key = JSON.stringify([seed, components, keys, query_variance, key_variance, softcap, side.factor(d), d, d === chosen.d_k]);
      if (!kept.has(key)) kept.set(key, yield* rows.measured(chosen, side.factor(d), d, d === chosen.d_k));
      return kept.get(key);
    };
    const dims = [...new Set([...DIMS, chosen.d_k])].sort((a, b) => a - b);
    if (kept.size > 4 * dims.length) kept.clear();
    const first = [];
    for (const side of sides) first.push(yield* measured(side, chosen.d_k));
    numbers(chosen, sides, first[0]);
    atOnce(chosen, sides, first);
    yield* ranges(chosen, sides);
    const found = sides.map(() => []);
    for (const d of dims) for (const [at, side] of sides.entries()) found[at].push(yield* measured(side, d));
    overDims(chosen, sides, dims, found);
  }

  async function follow() {
    const mine = (newest += 1);
    const message = document.getElementById("message");
    let chosen = null;
    try {
      chosen = settings();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      message.textContent = `${say("app.error.title")} ${error.message}`;
    }
    message.hidden = chosen !== null;
    results.classList.toggle("refused", chosen === null);
    results.setAttribute("aria-busy", String(chosen !== null));
    if (chosen === null) return;
    address();
    let woke = performance.now();
    for (const _ of work(chosen)) if (performance.now() - woke > AWAKE_MS) {
      await new Promise((go) => { setTimeout(go); });
      if (mine !== newest) return;
      woke = performance.now();
    }
    results.setAttribute("aria-busy", "false");
  }

  document.getElementById("explorer").hidden = false;
  begin();
  name();
  follow();
  new MutationObserver(() => { name(); follow(); }).observe(root, { attributeFilter: ["lang"] });
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (contentRect.width === width) return;
    width = contentRect.width;
    for (const figure of plots.keys()) redraw(figure);
  }).observe(document.getElementById("figures"));
})();
