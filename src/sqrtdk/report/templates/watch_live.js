// A page that `sqrtdk watch show --serve` serves: it loads itself again when a part has landed, and stays as it was left.
(() => {
  const EVERY = 2000; // milliseconds
  const line = document.getElementById("live");
  const root = document.documentElement;
  const byIds = (...ids) => ids.map((id) => document.getElementById(id)).filter(Boolean);
  const chosen = () => byIds("statistic", "site", "head");
  const fields = () => byIds("smooth", "from", "to");
  const folds = () => [...document.querySelectorAll("details")];

  function restore() {
    const kept = JSON.parse(sessionStorage.getItem("sqrtdk watch") ?? "null");
    sessionStorage.removeItem("sqrtdk watch");
    if (!kept) return;
    for (const select of chosen()) {
      if (![...select.options].some((option) => option.value === kept.chosen[select.id])) continue;
      select.value = kept.chosen[select.id];
      select.dispatchEvent(new Event("change"));
    }
    // Only what was changed: a page that shows all steps goes on showing all.
    for (const field of fields()) if (field.id in kept.fields) {
      field.value = kept.fields[field.id];
      field.dispatchEvent(new Event(field.type === "range" ? "input" : "change"));
    }
    folds().forEach((fold, at) => { fold.open = Boolean(kept.open[at]); });
    window.scrollTo({ top: kept.top, behavior: "instant" });
  }
  function again() {
    const values = Object.fromEntries(chosen().map((select) => [select.id, select.value]));
    const changed = fields().filter((field) => field.value !== { from: field.min, to: field.max }[field.id]);
    const kept = { chosen: values, fields: Object.fromEntries(changed.map((field) => [field.id, field.value])), open: folds().map((fold) => fold.open), top: window.scrollY };
    sessionStorage.setItem("sqrtdk watch", JSON.stringify(kept));
    location.reload();
  }
  function tell(writer) {
    for (const text of line.querySelectorAll("[data-writer]")) text.hidden = text.dataset.writer !== writer;
  }
  async function ask() {
    try {
      const answer = await fetch("state", { cache: "no-store" });
      if (answer.ok) {
        const state = await answer.json();
        tell(state.writer);
        if (state.mark !== line.dataset.mark) { again(); return; }
      }
    } catch { tell("gone"); }
    setTimeout(ask, EVERY);
  }
  // The menus are filled once the page is drawn; one without an attention is drawn already.
  const drawn = new MutationObserver(() => { if (root.dataset.drawn === "yes") { drawn.disconnect(); restore(); } });
  drawn.observe(root, { attributes: true, attributeFilter: ["data-drawn"] });
  ask();
})();
