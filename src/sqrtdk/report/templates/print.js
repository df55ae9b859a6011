"use strict";
// What is folded is open on paper, and as it was afterwards.
(() => {
  let folded = [];
  window.addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const node of folded) node.open = true;
  });
  window.addEventListener("afterprint", () => { for (const node of folded) node.open = false; });
})();
