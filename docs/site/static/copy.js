/* A button on each block of code that copies what is to be run: no prompts, no output, no comments of a command. */
"use strict";

const WORDS = document.documentElement.lang.startsWith("zh") ? ["复制", "已复制"] : ["Copy", "Copied"];

/* A shell takes a comment amiss where it is typed (zsh), so a command goes without the one behind it. */
function runnable(text) {
  const lines = text.trimEnd().split("\n");
  const prompted = (prompts) => lines.filter((line) => prompts.some((prompt) => `${line} `.startsWith(prompt)));
  const python = prompted([">>> ", "... "]);
  const commands = prompted(["$ "]);
  if (python.length) return python.map((line) => line.slice(4)).join("\n");
  if (commands.length) return commands.map((line) => line.slice(2).replace(/\s+# .*$/, "")).join("\n");
  return lines.join("\n");
}

/* Without a secure address (a page served over plain http) a browser has no clipboard to write to. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.body.appendChild(document.createElement("textarea"));
  area.value = text;
  area.select();
  document.execCommand("copy");
  area.remove();
}

document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll('article [class^="highlight-"]:not(.highlight-text)')) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = WORDS[0];
    button.addEventListener("click", async () => {
      await copy(runnable(block.querySelector("pre").textContent));
      button.textContent = WORDS[1];
      setTimeout(() => (button.textContent = WORDS[0]), 1500);
    });
    block.classList.add("copied-from");
    block.append(button);
  }
});
