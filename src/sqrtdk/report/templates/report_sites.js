"use strict";
// Folds the lines of the table of sites, opens them on paper, and filters them.
(() => {
  const controls = document.getElementById("filter-controls");
  if (!controls) return;
  const field = document.getElementById("filter");
  const shown = document.getElementById("shown");
  const words = JSON.parse(document.getElementById("data").textContent).words.shown;
  const folds = [...document.querySelectorAll("#site-list .fold")].map((body) => {
    const fold = { body, button: body.querySelector(".opens"), inside: body.querySelector(".inside") };
    body.querySelector(".site").addEventListener("click", (event) => {
      const marked = String(window.getSelection()) && !event.target.closest(".opens");
      if (!marked) open(fold, fold.inside.hidden);
    });
    open(fold, false);
    return fold;
  });

  function open(fold, wanted) {
    fold.inside.hidden = !wanted;
    fold.button.setAttribute("aria-expanded", String(wanted));
  }

  // Every word that was typed is somewhere in the line, or in one of its sites.
  function filter() {
    const typed = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let all = 0;
    let n = 0;
    for (const { body } of folds) {
      const sites = Number(body.dataset.sites);
      body.hidden = !typed.every((word) => body.dataset.searched.includes(word));
      all += sites;
      n += body.hidden ? 0 : sites;
    }
    const told = words.map((text, language) => {
      const span = document.createElement("span");
      span.className = language ? "zh" : "en";
      span.lang = language ? "zh-CN" : "en";
      span.textContent = text.replace("{n}", n).replace("{all}", all);
      return span;
    });
    shown.replaceChildren(...(typed.length ? told : []));
  }

  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = folds.filter((fold) => fold.inside.hidden);
    for (const fold of closed) open(fold, true);
  });
  window.addEventListener("afterprint", () => { for (const fold of closed) open(fold, false); });
  field.addEventListener("input", filter);
  controls.hidden = false;
  filter();
})();
