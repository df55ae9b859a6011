"""The contrast of the texts of a page in a real browser (WCAG 2, section 1.4.3)."""

from __future__ import annotations

from tests.support.playwright_here import Page

LEAST = 4.5
_TEXTS = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = (colour) => colour.map((c) => linear(c / 255))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const told = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const node = walker.currentNode.parentElement;
    if (!text || !node.checkVisibility() || ["SCRIPT", "STYLE", "OPTION"].includes(node.tagName)) continue;
    const style = getComputedStyle(node);
    const ink = parse(node instanceof SVGElement ? style.fill : style.color).slice(0, 3);
    const [a, b] = [light(ink), light(ground(node))].sort((x, y) => y - x);
    told.push([(a + 0.05) / (b + 0.05), `${node.tagName}.${node.getAttribute("class")} ${text.slice(0, 40)}`]);
  }
  return told;
}"""


def contrasts(page: Page) -> list[tuple[float, str]]:
    """Of every text that is seen: the contrast of its colour to what lies beneath it, and where it is."""
    return [(ratio, where) for ratio, where in page.evaluate(_TEXTS)]
