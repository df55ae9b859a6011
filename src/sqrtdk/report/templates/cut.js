"use strict";
// Shows that a box which scrolls cuts something off: a fade at its edges, and below it how many rows are out of sight.
(() => {
  const words = document.getElementById("more-below").content;
  const counts = new Map(); // box -> the line below it

  function mark(box) {
    const { right, bottom } = box.getBoundingClientRect();
    box.classList.toggle("cut-right", box.scrollWidth - box.clientWidth - box.scrollLeft > 1);
    box.classList.toggle("cut-bottom", box.scrollHeight - box.clientHeight - box.scrollTop > 1);
    const rows = right ? [...box.querySelectorAll("li, tbody tr")] : []; // a folded box has no size
    const hidden = rows.filter((row) => row.getBoundingClientRect().bottom > bottom + 1).length;
    const line = counts.get(box);
    line.hidden = hidden === 0;
    line.replaceChildren(words.cloneNode(true));
    for (const part of line.querySelectorAll("span")) part.textContent = part.textContent.replace("{count}", hidden);
  }

  const sizes = new ResizeObserver((entries) => { for (const { target } of entries) mark(target); });
  for (const box of document.querySelectorAll(".scroll, .wide, .more ul, .formula, #maps")) {
    const line = document.createElement("p");
    line.className = "below";
    line.hidden = true;
    line.setAttribute("aria-hidden", "true");
    box.after(line);
    counts.set(box, line);
    box.addEventListener("scroll", () => mark(box), { passive: true });
    sizes.observe(box);
  }
})();
