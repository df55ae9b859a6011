// What the page of a run is drawn with, whatever it shows: words, elements, lines, maps and short names.
const pieces = (() => {
  const { rgb, colour, LUT, style } = drawing;

  // Where an alarm begins, and what a value there is called.
  const [NOTE, WARN, FAIL, CRITICAL] = ["note", "warn", "fail", "critical"];
  const BARS = {
    max_logit: [[50, NOTE], [100, WARN], [1e3, FAIL], [1e4, CRITICAL]],
    row_offset: [[50, "bfloat16"]],
    stored_product: [[65504, "float16"]],
    scale_ratio: [[1, "textbook"]],
  };
  const SHAPES = { // told apart without colour
    note: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z", warn: "M0-6 6 5H-6Z", fail: "M0-6.5 6.5 0 0 6.5-6.5 0Z", critical: "M-6-6H6V6H-6Z",
  };
  // The statistic that an alarm is about, where it has another name.
  const ABOUT = {
    growth: "max_logit", entropy: "entropy_nats", entropy_trend: "entropy_nats", saturation: "saturated",
    collapsed: "entropy_fraction", ledger: "scale_ratio", fp16_range: "stored_product", bf16_offset: "row_offset",
    nonfinite: "nan_rows", layer_logits: "std_logit",
  };

  const SVG = "http://www.w3.org/2000/svg";
  const zh = () => document.documentElement.lang.startsWith("zh");
  let words = {}; // key -> [English, Chinese], from the data block
  const speak = (given) => { words = given; };
  const say = (key, parts = {}) => words[key][zh() ? 1 : 0].replace(/\{(\w+)\}/g, (_, name) => parts[name]);

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
  function show(value, unit = "", digits = 3) {
    if (Number.isNaN(value)) return say("not_measured");
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    if (unit === "%") return value > 0 && value < 0.0005 ? "<0.1%" : `${+(100 * value).toPrecision(3)}%`;
    const size = Math.abs(value);
    if (size >= 1000 && size < 1e6) return String(Math.round(+value.toPrecision(digits))).replace("-", "−");
    const text = size !== 0 && (size >= 1e6 || size < 1e-3) ? value.toExponential(digits > 3 ? digits - 1 : 1) : String(+value.toPrecision(digits));
    return text.replace("-", "−");
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

  function ramp(canvas, width, height) {
    canvas.width = width;
    canvas.height = height;
    const pen = canvas.getContext("2d");
    for (let i = 0; i < width; i += 1) { pen.fillStyle = rgb(i / (width - 1)); pen.fillRect(i, 0, 1, height); }
    return canvas;
  }

  // The ends of a statistic's colours and the ramp between them; what lies beyond them beside it.
  function legend({ ends, unit }, scale, width) {
    if (!ends) return [html("span", {}, say("not_measured"))];
    const [least, most] = ends.map(number);
    const end = (value, digits) => html("span", {}, show(value, unit, digits));
    // the numbers of the map have three digits, the ends of the data four
    const parts = [
      scale.below ? end(scale.low, 3) : end(least, 4),
      ramp(html("canvas", { class: "ramp", "aria-hidden": "true" }), width, 12),
      scale.above ? end(scale.high, 3) : end(most, 4),
    ];
    for (const [side, value, key] of [["below", least, "below_scale"], ["above", most, "above_scale"]]) if (scale[side]) {
      const words = say(key, { value: show(value, unit, 4) });
      // a small map has room for the number alone
      parts.push(html("span", { class: `beyond-${side}`, title: words }, width < 100 ? show(value, unit, 4) : words));
    }
    return parts;
  }

  // About how wide a text of a drawing is, in pixels: Chinese letters are wider.
  const widthOf = (text) => [...text].reduce((sum, one) => sum + (one > "⺀" ? 11.5 : 6.6), 0);

  function nearest(steps, step) {
    let best = 0;
    steps.forEach((one, at) => { if (Math.abs(one - step) < Math.abs(steps[best] - step)) best = at; });
    return best;
  }

  // A canvas of sites down and steps across, by pixels: what was not measured has a colour of its own, an infinity is a
  // chequered cell, one beyond the scale is striped, and of samples that share a pixel the worst counts.
  const far = (value) => Math.abs(Math.log(Math.abs(value)));
  const WORSE = { largest: (a, b) => a > b, least: (a, b) => a < b, farthest: (a, b) => far(a) > far(b) };
  function mapOf(run, name, { scale, worst, view, x, width, tall }) {
    const ratio = window.devicePixelRatio || 1;
    const [wide, rowPixels] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(tall * ratio))];
    const high = Math.max(1, run.sites.length * rowPixels);
    const canvas = html("canvas", { width: wide, height: high, role: "img" });
    canvas.style.width = `${width}px`;
    canvas.style.height = `${high / ratio}px`;
    const pen = canvas.getContext("2d");
    const image = pen.createImageData(wide, high);
    const pixels = new Uint32Array(image.data.buffer);
    const [wash, nothing, ink, paper] = ["--wash", "--void", "--ink", "--card"].map((one) => colour(style(one)));
    pixels.fill(wash);
    const worse = WORSE[worst];
    const beyond = { 1: [LUT[255], colour("#171c26")], [-1]: [LUT[0], colour("#ffffff")] };
    const line = rowPixels - (rowPixels > 5 * ratio ? Math.round(ratio) : 0);
    let [of, from, to] = [null, null, null];
    run.sites.forEach((site, row) => {
      const every = run.samples ?? site.steps; // by the samples of the run: one that this attention is not in stays empty
      if (of !== every) {
        of = every;
        [from, to] = [new Int32Array(wide).fill(-1), new Int32Array(wide)];
        bounds(every, x).forEach(([left, right], at) => {
          if (right < x(view.from) - 4 || left > x(view.to) + 4) return;
          const start = Math.max(0, Math.round(Math.max(left, x(view.from) - 4) * ratio));
          const end = Math.min(wide, Math.max(start + 1, Math.round(Math.min(right, x(view.to) + 4) * ratio)));
          for (let i = start; i < end; i += 1) { if (from[i] < 0) from[i] = at; to[i] = at; }
        });
      }
      const place = new Map(site.steps.map((step, at) => [step, at]));
      const top = row * rowPixels * wide;
      for (let i = 0; i < wide; i += 1) {
        if (from[i] < 0) continue;
        let value;
        for (let at = from[i]; at <= to[i]; at += 1) {
          const one = place.has(every[at]) ? site.worst[name][place.get(every[at])].value : undefined;
          if (one !== undefined && (value === undefined || Number.isNaN(value) || worse(one, value))) value = one;
        }
        if (value === undefined) continue;
        const plain = Number.isNaN(value) ? nothing : LUT[Math.round(255 * Math.max(0, Math.min(1, scale.at(value))))];
        const board = value === Infinity || value === -Infinity;
        const stripes = board ? [ink, paper] : beyond[scale.beyond(value)];
        const odd = (y) => (board ? (i >> 2) + (y >> 2) : (i + y) >> 2) & 1;
        for (let y = 0; y < line; y += 1) pixels[top + y * wide + i] = stripes ? stripes[1 - odd(y)] : plain;
      }
    });
    pen.putImageData(image, 0, 0);
    pen.scale(ratio, ratio);
    for (const [tone, alpha] of [["--card", 1], ["--soft", 0.28]]) {
      pen.fillStyle = style(tone);
      pen.globalAlpha = alpha;
      for (const [start, end] of run.gaps) pen.fillRect(x(start), 0, Math.max(x(end) - x(start), 1), high / ratio);
    }
    return canvas;
  }
  // Where the cells of samples begin and end: half way to the next; at a gap of the schedule no wider than before it.
  function bounds(steps, x) {
    return steps.map((step, at) => {
      const [before, after] = [steps[at - 1], steps[at + 1]];
      const left = before === undefined ? x(step) - ((after === undefined ? x(step) + 8 : x(after)) - x(step)) / 2 : (x(before) + x(step)) / 2;
      const right = after === undefined ? x(step) + ((before === undefined ? x(step) + 8 : x(step)) - (before === undefined ? x(step) : x(before))) / 2 : (x(after) + x(step)) / 2;
      return [left, right];
    });
  }

  // A label that is too long loses the end that all have, then what else all have, and then letters of its words: what
  // tells it from the others stays.
  function shortener(labels) {
    const parts = labels.map((label) => label.split("."));
    const same = (pick) => parts.every((one) => pick(one) === pick(parts[0]));
    let shared = 0;
    while (labels.length > 1 && parts.every((one) => one.length > shared + 1) && same((one) => one.at(-1 - shared))) shared += 1;
    const alike = labels.length > 1 && same((one) => one.length);
    return (label, most) => {
      if (label.length <= most) return label;
      let rest = label.split(".").slice(0, -shared || undefined);
      if (rest.join(".").length <= most) return rest.join(".");
      if (alike) rest = rest.filter((_, at) => !same((one) => one[at]));
      for (const letters of [12, 8, 6, 4, 3, 2]) {
        const text = rest.map((word) => word.slice(0, letters)).join(".");
        if (text.length <= most) return text;
      }
      return `…${rest.join(".").slice(1 - most)}`;
    };
  }

  return { BARS, SHAPES, ABOUT, zh, say, speak, svg, html, number, show, line, legend, widthOf, nearest, mapOf, shortener };
})();
