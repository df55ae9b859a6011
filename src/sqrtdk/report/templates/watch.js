// Draws the page of runs from its data block. Every text goes in as textContent or as an attribute.
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  const drawn = runs.filter((run) => run.first !== null);
  if (!runs.some((run) => run.sites.length)) return;
  if (typeof DecompressionStream === "undefined") { document.getElementById("old").hidden = false; return; }
  document.documentElement.dataset.drawn = "no";
  const { wholes, numbers } = await numbersOf(data.block);
  const { scaleOf, colourScale } = drawing;
  const { ABOUT, zh, say, speak, html, number, legend, mapOf, shortener, widthOf } = pieces;
  speak(data.words);
  const byId = (id) => document.getElementById(id);
  const [statistic, siteSelect, headSelect, tip] = ["statistic", "site", "head", "tip"].map(byId);
  const labels = [...new Set(runs.flatMap((run) => run.sites.map((site) => site.label)))];
  const chosen = { get statistic() { return statistic.value; }, get site() { return siteSelect.value; } };

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
  const headName = () => (headSelect.value === "worst" ? say("worst_head") : say("head", { head: headSelect.value }));

  const worstScale = Object.fromEntries(data.columns.map((name) => [
    name, colourScale(runs.flatMap((run) => run.sites.flatMap((site) => site.worst[name].map((one) => one.value))), unitOf(name)),
  ]));
  const colours = (name) => ({ scale: worstScale[name], worst: data.statistics[name].worst });
  const first = Math.min(...drawn.map((run) => run.first));
  const last = Math.max(...drawn.map((run) => run.last), first + 1);
  let due = false; // a slider moves more often than a page can be drawn
  const view = viewing.viewOf(first, last, (steps) => {
    showView();
    if (steps) { everything(); return; }
    if (!due) requestAnimationFrame(() => { due = false; redrawn(); });
    due = true;
  });
  const showView = viewing.controlled(view);

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

  function hint(what, { clientX, clientY }) {
    tip.replaceChildren(...[what].flat());
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(clientX + 14, window.innerWidth - box.width - 8))}px`;
    tip.style.top = `${clientY + box.height + 24 > window.innerHeight ? clientY - box.height - 12 : clientY + 16}px`;
  }
  const shorter = shortener(labels);
  // The title of a trend, as long as there is room for it.
  function heading(label, room, logarithmic) {
    const name = statistic.value;
    return [
      `${titleOf(name)} · ${label} · ${headName()}${logarithmic ? say("logarithmic_after") : ""}`,
      `${titleOf(name)} · ${shorter(label, 24)} · ${headName()}`,
      `${nameOf(name)} · ${shorter(label, 16)} · ${headName()}`,
      `${nameOf(name)} · ${shorter(label, 16)}`,
    ].find((text) => widthOf(text) < room) ?? nameOf(name);
  }
  const page = { runs, view, chosen, series, siteOf, titleOf, unitOf, heading, colours, shorter, hint, tip };
  const [panels, overlay] = [panelsOf(page), overlayOf(page)];
  page.point = (step) => { panels.point(step); overlay?.point(step); };
  page.choose = (label, head) => {
    siteSelect.value = label;
    heads();
    if (head !== null && head !== undefined) headSelect.value = String(head);
    redrawn();
  };
  page.go = (run, alarm) => {
    const about = ABOUT[alarm.name] ?? alarm.name;
    if (data.columns.includes(about)) statistic.value = about;
    view.reach(alarm.step);
    const site = alarm.site === null ? null : run.sites[alarm.site];
    if (site) page.choose(site.label, alarm.head); else drawAll();
    page.point(alarm.step);
  };

  const legendOf = (name, width) => legend(data.statistics[name], worstScale[name], width);
  // The same scale for all runs that are shown, over the steps that are.
  function scalesOf(name) {
    const some = runs.filter((_, at) => !view.hidden.has(at));
    const losses = some.flatMap((run) => view.shown(run.loss[0], run.loss[1].map(number)));
    const values = some.map((run) => series(run, name)).filter(Boolean)
      .flatMap((one) => [...view.shown(one.steps, one.values), ...view.shown(one.site.steps, one.medians)]);
    return { loss: scaleOf(losses), trend: scaleOf(values, unitOf(name)) };
  }
  function drawAll() {
    for (const option of statistic.options) option.textContent = nameOf(option.value);
    for (const group of statistic.querySelectorAll("optgroup")) group.label = zh() ? group.dataset.zh : group.dataset.en;
    for (const node of document.querySelectorAll("[data-label-en]")) node.setAttribute("aria-label", zh() ? node.dataset.labelZh : node.dataset.labelEn);
    headSelect.options[0].textContent = say("worst");
    for (const help of document.querySelectorAll(".help")) help.hidden = help.dataset.statistic !== statistic.value;
    const name = statistic.value;
    const scales = scalesOf(name);
    overlay?.draw(scales);
    panels.draw(scales);
    byId("legend").replaceChildren(
      html("b", {}, titleOf(name)), ...legendOf(name, 180),
      html("span", { class: "quiet" }, say(`worst_${data.statistics[name].worst}`, { scale: say(worstScale[name].log ? "logarithmic" : "linear") })),
    );
    const infinite = runs.some((run) => run.sites.some((site) => data.columns.some((one) => site.worst[one].some(({ value }) => value === Infinity || value === -Infinity))));
    document.querySelector(".infinite").hidden = !infinite;
    document.querySelector(".head-name").textContent = headName();
  }

  // Every statistic, small: a map of the run, or the lines of all runs; its name chooses it.
  const figures = data.columns.map((name) => {
    const [run] = runs;
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
      const picture = overlay ? overlay.small(name, width) : mapOf(run, name, { ...colours(name), view, x: view.x(0, width), width, tall });
      picture.setAttribute("aria-label", title.textContent);
      figure.querySelector(":scope > canvas, :scope > svg")?.remove();
      figure.append(picture);
    };
    figure.drawHead = () => {
      title.textContent = titleOf(name);
      if (!overlay) ends.replaceChildren(...legendOf(name, 70));
    };
    figure.style.minHeight = `${overlay ? 140 : run.sites.length * tall + 56}px`;
    figure.addEventListener("click", () => { statistic.value = name; drawAll(); byId("time").scrollIntoView(); });
    return figure;
  });
  let round = 0; // one map a task: the page answers in between
  const redrawn = () => { drawAll(); if (overlay) drawMaps(); }; // the maps of one run show all its attentions and heads
  function drawMaps() {
    const mine = round += 1;
    for (const figure of figures) { figure.drawHead(); setTimeout(() => { if (mine === round) figure.drawMap(); }); }
  }

  function heads() {
    const before = headSelect.value || "worst";
    const every = [...new Set(runs.flatMap((run) => siteOf(run)?.heads ?? []))].sort((a, b) => a - b);
    headSelect.replaceChildren(html("option", { value: "worst" }), ...every.map((head) => html("option", { value: head }, String(head))));
    headSelect.value = [...headSelect.options].some((option) => option.value === before) ? before : "worst";
  }
  for (const button of document.querySelectorAll("button.show")) button.addEventListener("click", () => {
    const run = runs[Number(button.dataset.run)];
    byId("time").scrollIntoView();
    page.go(run, run.alarms[Number(button.dataset.alarm)]);
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
  headSelect.addEventListener("change", redrawn);
  siteSelect.addEventListener("change", () => { heads(); redrawn(); });
  for (const controls of document.querySelectorAll(".controls")) controls.hidden = false;
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
