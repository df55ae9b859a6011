"use strict";
// Switches between English and Chinese. Without it the page is in English.
(() => {
  const root = document.documentElement;
  const languages = [...document.querySelectorAll("[data-language]")];
  const articles = [...document.querySelectorAll("main article, main .fold")];

  function speak(language) {
    // What the reader looks at stays where it is, though the other language takes another height.
    const seen = articles.find((article) => article.getBoundingClientRect().bottom > 80);
    const before = seen ? seen.getBoundingClientRect().top : 0;
    const reading = before < 80;
    root.lang = language;
    for (const button of languages) button.setAttribute("aria-pressed", String(button.dataset.language === language));
    if (seen && reading) window.scrollBy({ top: seen.getBoundingClientRect().top - before, behavior: "instant" });
  }

  for (const button of languages) button.addEventListener("click", () => {
    speak(button.dataset.language);
    history.replaceState(null, "", button.dataset.language === "en" ? "#en" : "#zh");
  });
  document.querySelector(".languages").hidden = false;
  const asked = { "#zh": "zh-CN", "#en": "en" }[location.hash];
  speak(asked || root.dataset.opens || (navigator.language.toLowerCase().startsWith("zh") ? "zh-CN" : "en"));
})();
