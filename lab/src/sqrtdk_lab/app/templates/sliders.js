// A slider over the values that a control offers, and beside it a field for any other. Used by both pages of the
// explorer: `sqrtdk app` and the static one.
const sliders = (() => {
  // Of the offered values the nearest; numbers above 0 are compared by their ratio, since most steps are factors.
  function nearest(stops, value) {
    const exact = stops.indexOf(value);
    if (exact >= 0) return exact;
    const number = Number(value);
    const numbers = stops.map(Number);
    const factors = number > 0 && numbers.every((one) => Number.isNaN(one) || one > 0);
    const far = (one) => (factors ? Math.abs(Math.log(one / number)) : Math.abs(one - number));
    let best = 0;
    numbers.forEach((one, at) => { if (far(one) < far(numbers[best])) best = at; });
    return best;
  }

  // Fills an element. `moved(value)` is called with what the reader chose; `words` says how some values are called.
  function build(host, { name, label, stops, value, words = {} }, moved) {
    const make = (tag, attributes) => {
      const node = document.createElement(tag);
      for (const [key, text] of Object.entries(attributes)) node.setAttribute(key, text);
      return node;
    };
    const title = make("label", { id: `label-${name}`, for: `field-${name}` });
    const field = make("input", { id: `field-${name}`, type: "text", inputmode: "decimal", autocomplete: "off", spellcheck: "false", maxlength: "40", "aria-labelledby": title.id });
    const range = make("input", { type: "range", min: "0", step: "1", "aria-labelledby": title.id });
    let now = { label, stops, value, words };

    const shown = (text) => now.words[text] ?? text;
    function place() {
      const at = now.stops.indexOf(now.value);
      range.max = String(now.stops.length - 1);
      range.value = String(nearest(now.stops, now.value));
      range.setAttribute("aria-valuetext", shown(now.value));
      range.classList.toggle("between", at < 0);
    }
    function set(changes) {
      now = { ...now, ...changes };
      title.textContent = now.label;
      if ("value" in changes || "words" in changes) field.value = shown(now.value);
      place();
    }
    function take(text) {
      const named = Object.entries(now.words).find(([, word]) => word === text.trim());
      const chosen = named ? named[0] : text.trim();
      if (chosen === now.value) return;
      now.value = chosen;
      place();
      moved(chosen);
    }

    range.addEventListener("input", () => {
      field.value = shown(now.stops[Number(range.value)]);
      take(field.value);
    });
    field.addEventListener("change", () => take(field.value));
    field.addEventListener("keydown", (event) => { if (event.key === "Enter") take(field.value); });
    host.classList.add("slider");
    host.replaceChildren(title, field, range);
    set({ value, words });
    return { set };
  }

  // In a Gradio component: what a reader moves is told once it rests, what the server says is shown.
  const REST_MS = 150;
  function mount(element, props, trigger, watch) {
    const told = () => ({ label: props.title, stops: props.stops, value: String(props.value), words: props.words });
    let timer = 0;
    const slider = build(element, { name: props.name, ...told() }, (value) => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        props.value = value;
        trigger("input");
      }, REST_MS);
    });
    watch(["value", "stops", "title"], () => slider.set(told()));
  }

  return { nearest, build, mount };
})();
