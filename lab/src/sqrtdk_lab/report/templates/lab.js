"use strict";
// Filters the claims. Without it the page shows every claim.
(() => {
  const chips = [...document.querySelectorAll("[data-answer][aria-pressed]")];
  const search = document.getElementById("search");
  const rows = [...document.querySelectorAll("tr[data-claim]")];
  const claims = rows.map((row) => document.getElementById(row.dataset.claim));
  // As it is seen: letters with an index have no underscore, and sqrt is a sign.
  const plain = (text) => text.toLowerCase().replaceAll("sqrt", "√").replaceAll(/[_^()\u00a0]/g, (sign) => (sign === "\u00a0" ? " " : "")).replaceAll(/\s+/g, " ");
  const texts = claims.map((claim, index) => {
    const prose = [...claim.querySelectorAll(".prose p, .ways p, figcaption")].map((node) => node.textContent);
    return plain([rows[index].textContent, ...prose].join(" "));
  });
  let answer = "";

  function sift() {
    const words = plain(search.value).split(" ").filter(Boolean);
    let count = 0;
    rows.forEach((row, index) => {
      const fits = (!answer || row.dataset.answer === answer) && words.every((word) => texts[index].includes(word));
      row.hidden = claims[index].hidden = !fits;
      count += fits;
    });
    for (const group of document.querySelectorAll(".register tbody")) group.hidden = !group.querySelector("tr[data-claim]:not([hidden])");
    for (const group of document.querySelectorAll("section.group")) group.hidden = !group.querySelector("article:not([hidden])");
    document.getElementById("count").textContent = count;
    document.getElementById("none").hidden = count > 0;
  }

  for (const chip of chips) chip.addEventListener("click", () => {
    answer = chip.dataset.answer;
    for (const other of chips) other.setAttribute("aria-pressed", String(other === chip));
    sift();
  });
  search.addEventListener("input", sift);
  // A link to a claim that the filter hides takes the filter away.
  window.addEventListener("hashchange", () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target || !target.hidden) return;
    search.value = "";
    chips[0].click();
    target.scrollIntoView();
  });

  // A formula can't wrap: one that is wider than its box is written smaller, as long as it can be read.
  // One that would be too small beside the text gets the whole width below it.
  const SMALLEST_FORMULA_PX = 11;
  function shrink(box) {
    box.style.fontSize = "";
    for (let tries = 0; tries < 4 && box.scrollWidth > box.clientWidth; tries += 1) {
      const size = parseFloat(getComputedStyle(box).fontSize);
      const fits = Math.floor((size * box.clientWidth * 20) / box.scrollWidth) / 20;
      box.style.fontSize = `${Math.max(fits, SMALLEST_FORMULA_PX)}px`;
    }
    return box.scrollWidth <= box.clientWidth;
  }
  function fit() {
    for (const box of document.querySelectorAll(".formula")) {
      const beside = box.closest(".body.beside");
      if (shrink(box) || !beside) continue;
      beside.classList.remove("beside");
      shrink(box);
    }
  }
  fit();
  window.addEventListener("resize", fit);

  document.querySelector(".controls").hidden = false;
})();
