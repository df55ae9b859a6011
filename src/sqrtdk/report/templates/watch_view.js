// Which steps all drawings of a page show, how smooth their lines are, and which runs are hidden.
const viewing = (() => {
  // TensorBoard's exponential moving average: over samples, without the bias of the first ones to 0; what is not finite
  // stays where it is and counts for nothing.
  function smoothed(values, weight) {
    if (!weight) return values;
    let [sum, count] = [0, 0];
    return values.map((value) => {
      if (!Number.isFinite(value)) return value;
      count += 1;
      sum = weight * sum + (1 - weight) * value;
      return sum / (1 - weight ** count);
    });
  }

  // `changed(steps)` is called after each change; `steps` is false if only the lines are others.
  function viewOf(first, last, changed) {
    const view = { first, last, from: first, to: last, weight: 0, hidden: new Set() };
    const clamp = (step) => Math.max(first, Math.min(last, Math.round(step)));
    view.isWhole = () => view.from === first && view.to === last;
    view.zoom = (from, to) => {
      const low = Math.min(clamp(Math.min(from, to)), last - 1);
      const high = Math.max(clamp(Math.max(from, to)), low + 1);
      if (low === view.from && high === view.to) return;
      [view.from, view.to] = [low, high];
      changed(true);
    };
    view.whole = () => view.zoom(first, last);
    view.scale = (factor, middle) => {
      const span = Math.max(1, (view.to - view.from) * factor);
      const share = Math.max(0, Math.min(1, (middle - view.from) / (view.to - view.from)));
      view.zoom(middle - share * span, middle + (1 - share) * span);
    };
    view.reach = (step) => {
      if (step >= view.from && step <= view.to) return;
      const span = view.to - view.from;
      const from = Math.max(first, Math.min(last - span, step - span / 2));
      view.zoom(from, from + span);
    };
    view.smooth = (weight) => { view.weight = weight; changed(false); };
    view.toggle = (place) => {
      if (!view.hidden.delete(place)) view.hidden.add(place);
      changed(true);
    };
    view.x = (left, right) => (step) => left + 4 + ((step - view.from) / (view.to - view.from)) * (right - left - 8);
    view.stepAt = ({ left, right }, x) => {
      const share = (x - left - 4) / (right - left - 8);
      return Math.max(view.from, Math.min(view.to, view.from + share * (view.to - view.from)));
    };
    // Of the values of a line those that are shown; between two samples all, so that a scale has something to span.
    view.shown = (steps, values) => {
      const some = values.filter((_, at) => steps[at] >= view.from && steps[at] <= view.to);
      return some.some(Number.isFinite) ? some : values;
    };
    return view;
  }

  // Dragging over a drawing enlarges the steps that it crosses, a double click shows all, and so do keys. `chart` has
  // the drawing's `place`, and `left`, `right` and `over` (an SVG on top of it) once it is drawn.
  const STIRRED = 6; // pixels, below which a drag is a click
  function zoomable(chart, view, middle) {
    const { place } = chart;
    const at = (event) => event.clientX - place.getBoundingClientRect().left;
    let [start, band] = [null, null];
    const end = () => { band?.remove(); [start, band] = [null, null]; };
    place.addEventListener("pointerdown", (event) => { if (event.button === 0 && chart.over) start = at(event); });
    place.addEventListener("pointermove", (event) => {
      if (start === null) return;
      const now = at(event);
      if (!band && Math.abs(now - start) < STIRRED) return;
      if (!band) {
        place.setPointerCapture(event.pointerId);
        band = pieces.svg("rect", { class: "band", y: 0, height: chart.over.getAttribute("height") });
        chart.over.append(band);
      }
      const [low, high] = [Math.max(chart.left, Math.min(start, now)), Math.min(chart.right, Math.max(start, now))];
      band.setAttribute("x", low);
      band.setAttribute("width", Math.max(0, high - low));
    });
    place.addEventListener("pointerup", (event) => {
      if (band) {
        const [one, other] = [start, at(event)].map((x) => view.stepAt(chart, x));
        const still = (click) => click.stopImmediatePropagation(); // the click that ends a drag chooses nothing
        place.addEventListener("click", still, { capture: true });
        setTimeout(() => place.removeEventListener("click", still, { capture: true }));
        view.zoom(one, other);
      }
      end();
    });
    place.addEventListener("pointercancel", end);
    place.addEventListener("dblclick", view.whole);
    place.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "+" || event.key === "=") view.scale(0.5, middle());
      else if (event.key === "-") view.scale(2, middle());
      else if (event.key === "0" || event.key === "Escape") view.whole();
      else return;
      event.preventDefault();
    });
  }

  // The slider, the first and last step that are shown, and the button that shows all.
  function controlled(view) {
    const [smooth, weight, from, to, whole] = ["smooth", "weight", "from", "to", "whole"].map((id) => document.getElementById(id));
    for (const field of [from, to]) {
      [field.min, field.max] = [view.first, view.last];
      field.addEventListener("change", () => {
        if (Number.isFinite(from.valueAsNumber) && Number.isFinite(to.valueAsNumber)) view.zoom(from.valueAsNumber, to.valueAsNumber);
        show();
      });
    }
    smooth.addEventListener("input", () => view.smooth(smooth.valueAsNumber));
    whole.addEventListener("click", view.whole);
    function show() {
      [from.value, to.value] = [view.from, view.to];
      weight.textContent = view.weight.toFixed(2);
      whole.disabled = view.isWhole();
    }
    show();
    return show;
  }

  return { smoothed, viewOf, zoomable, controlled };
})();
