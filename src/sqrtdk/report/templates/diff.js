"use strict";
// Draws the logits and the masks from the data block. Every text goes in as textContent or as an attribute.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const tip = document.getElementById("tip");

  function svg(name, attributes = {}, text = null) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    return node;
  }
  function show(value) {
    const size = Math.abs(value);
    const text = size !== 0 && (size >= 1e6 || size < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
    return text.replace("-", "−");
  }
  function hint(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + box.height + 24 > window.innerHeight ? y - box.height - 12 : y + 16}px`;
  }
  function ticks(from, to) {
    const rough = (to - from) / 5;
    const size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((unit) => unit * size).find((unit) => unit >= rough);
    const every = [];
    for (let i = Math.ceil(from / step); i * step <= to && every.length < 20; i += 1) every.push(+(i * step).toPrecision(6));
    return every;
  }
  // Options of a select; a select of one is not shown.
  function offer(label, names) {
    const select = label.querySelector("select");
    select.replaceChildren(...names.map((name, index) => {
      const option = document.createElement("option");
      option.value = index;
      option.textContent = name;
      return option;
    }));
    label.hidden = names.length < 2;
    return select;
  }

  // What the pointer is over, and what the arrow keys go through: `places` has a text and a point each.
  function walk(drawing, told, places, near, step) {
    const cursor = svg("g", { class: "cursor" });
    drawing.append(cursor);
    let chosen = -1;
    function choose(index) {
      chosen = index;
      const place = places[index];
      cursor.replaceChildren(svg(place.wide ? "rect" : "circle", place.wide
        ? { x: place.x - place.wide / 2, y: place.y - place.wide / 2, width: place.wide, height: place.wide }
        : { cx: place.x, cy: place.y, r: 6 }));
      told.textContent = place.text;
    }
    drawing.addEventListener("pointermove", (event) => {
      const box = drawing.getBoundingClientRect();
      const wide = drawing.viewBox.baseVal.width / box.width;
      const index = near((event.clientX - box.left) * wide, (event.clientY - box.top) * wide);
      if (index < 0) { tip.hidden = true; return; }
      choose(index);
      hint(places[index].text, event.clientX, event.clientY);
    });
    drawing.addEventListener("pointerleave", () => { tip.hidden = true; });
    drawing.addEventListener("keydown", (event) => {
      const to = step(chosen, event.key);
      if (to === null || !places.length) return;
      event.preventDefault();
      choose(Math.max(0, Math.min(places.length - 1, to)));
    });
  }

  function drawScatter(figure, head) {
    const place = figure.querySelector(".drawing");
    const told = figure.querySelector(".told");
    const every = head.points;
    const values = every.flatMap((point) => [point[2], point[3]]);
    let low = Math.min(...values);
    let high = Math.max(...values);
    if (!values.length) [low, high] = [0, 1];
    const range = high - low || Math.abs(high) || 1;
    low -= range * 0.05;
    high += range * 0.05;
    const [W, H, L, R, T, B] = [460, 420, 54, 10, 10, 40];
    const px = (x) => L + ((x - low) / (high - low)) * (W - L - R);
    const py = (y) => H - B - ((y - low) / (high - low)) * (H - T - B);
    const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, tabindex: 0, role: "img", "aria-labelledby": figure.getAttribute("aria-labelledby") });
    drawing.append(svg("rect", { class: "frame", x: L, y: T, width: W - L - R, height: H - T - B }));
    for (const tick of ticks(low, high)) {
      drawing.append(
        svg("line", { class: "axis", x1: px(tick), x2: px(tick), y1: T, y2: H - B + 4 }),
        svg("line", { class: "axis", x1: L - 4, x2: W - R, y1: py(tick), y2: py(tick) }),
        svg("text", { x: px(tick), y: H - B + 17, "text-anchor": "middle" }, show(tick)),
        svg("text", { x: L - 8, y: py(tick) + 4, "text-anchor": "end" }, show(tick)),
      );
    }
    drawing.append(
      svg("text", { class: "name a", x: (L + W - R) / 2, y: H - 5, "text-anchor": "middle" }, "A"),
      svg("text", { class: "name b", x: 10, y: (T + H - B) / 2, "text-anchor": "middle" }, "B"),
      svg("line", { class: "equal", x1: px(low), y1: py(low), x2: px(high), y2: py(high) }),
    );
    const far = [...every].sort((one, other) => Math.abs(other[2] - other[3]) - Math.abs(one[2] - one[3]));
    const apart = (point) => Math.abs(point[2] - point[3]) > range / 1000;
    for (const point of [...far].reverse()) {
      drawing.append(svg("circle", { class: apart(point) ? "off" : "on", cx: px(point[2]).toFixed(1), cy: py(point[3]).toFixed(1), r: 3 }));
    }
    const places = far.map(([row, key, a, b]) => ({ x: px(a), y: py(b), text: `i = ${row}, j = ${key}:  A ${show(a)}  B ${show(b)}` }));
    const near = (x, y) => {
      let best = [-1, 14 ** 2];
      places.forEach((spot, index) => {
        const distance = (spot.x - x) ** 2 + (spot.y - y) ** 2;
        if (distance < best[1]) best = [index, distance];
      });
      return best[0];
    };
    walk(drawing, told, places, near, (at, key) => ({ ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1 }[key] ?? null));
    told.textContent = "";
    place.replaceChildren(drawing);
    const off = every.filter(apart).length;
    figure.querySelector(".count-on").textContent = every.length - off;
    figure.querySelector(".count-off").textContent = off;
    figure.querySelector(".count-dropped").textContent = head.dropped;
    figure.querySelector(".dropped").hidden = !head.dropped;
  }

  function drawMasks(figure, picture) {
    const kinds = { ".": "none", "+": "both", a: "a", b: "b" };
    const tall = picture.rows.length;
    const wide = tall ? picture.rows[0].length : 0;
    const [L, T] = [44, 22];
    const size = 408 / Math.max(wide, tall, 8);
    const drawing = svg("svg", { viewBox: `0 0 460 ${Math.max(80, T + tall * size + 8)}`, tabindex: 0, role: "img", "aria-labelledby": figure.getAttribute("aria-labelledby") });
    const counts = { none: 0, both: 0, a: 0, b: 0 };
    const places = [];
    picture.rows.forEach((row, y) => [...row].forEach((cell, x) => {
      const kind = kinds[cell];
      counts[kind] += 1;
      drawing.append(svg("rect", {
        class: `cell-${kind}`, x: (L + x * size).toFixed(2), y: (T + y * size).toFixed(2), width: size.toFixed(2), height: size.toFixed(2),
        "stroke-width": size > 7 ? 1 : 0,
      }));
      const who = { none: "−", both: "A, B", a: "A", b: "B" }[kind];
      places.push({ x: L + (x + 0.5) * size, y: T + (y + 0.5) * size, wide: size, text: `i = ${picture.row + y}, j = ${picture.key + x}:  ${who}` });
    }));
    for (const [at, last] of [[0, wide - 1], [wide - 1, wide - 1]].slice(0, wide > 1 ? 2 : wide)) {
      drawing.append(svg("text", { x: L + (at + 0.5) * size, y: T - 6, "text-anchor": at === last && at ? "end" : "start" }, `j = ${picture.key + at}`));
    }
    for (const at of tall > 1 ? [0, tall - 1] : [0].slice(0, tall)) {
      drawing.append(svg("text", { x: L - 5, y: T + (at + 0.5) * size + 4, "text-anchor": "end" }, `i = ${picture.row + at}`));
    }
    const near = (x, y) => {
      const [column, row] = [Math.floor((x - L) / size), Math.floor((y - T) / size)];
      return column >= 0 && column < wide && row >= 0 && row < tall ? row * wide + column : -1;
    };
    walk(drawing, figure.querySelector(".told"), places, near, (at, key) => {
      if (at < 0) return key.startsWith("Arrow") ? 0 : null;
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + wide, ArrowUp: at - wide }[key];
      return to === undefined ? null : to < 0 || to >= places.length ? at : to;
    });
    figure.querySelector(".told").textContent = "";
    figure.querySelector(".drawing").replaceChildren(drawing);
    for (const [kind, count] of Object.entries(counts)) figure.querySelector(`.count-${kind}`).textContent = count;
  }

  function begin(charts, pairs) {
    const [scatter, masks] = [charts.querySelector(".scatter"), charts.querySelector(".masks")];
    const site = offer(charts.querySelector(".pick-site"), pairs.map((pair) => pair.label));
    let head = null;
    function drawHead() {
      drawScatter(scatter, pairs[site.value].heads[head.value]);
    }
    function drawSite() {
      const pair = pairs[site.value];
      head = offer(charts.querySelector(".pick-head"), pair.heads.map((one) => String(one.head)));
      scatter.hidden = !pair.heads.length;
      masks.hidden = !pair.picture;
      if (pair.heads.length) drawHead();
      if (pair.picture) drawMasks(masks, pair.picture);
      charts.querySelector(".controls").hidden = [...charts.querySelectorAll(".controls label")].every((label) => label.hidden);
    }
    site.addEventListener("change", drawSite);
    charts.querySelector(".pick-head select").addEventListener("change", drawHead);
    drawSite();
  }

  for (const charts of document.querySelectorAll(".evidence")) {
    const pairs = data.folds[charts.dataset.fold];
    const fold = charts.closest("details");
    if (!pairs.length) continue;
    if (fold.open) begin(charts, pairs);
    else fold.addEventListener("toggle", () => begin(charts, pairs), { once: true });
  }
})();
