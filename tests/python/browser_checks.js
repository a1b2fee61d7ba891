// Measurements of a page, run inside it by test_report_browser.py. Each gives a list of complaints.

const shown = (element) => {
  const box = element.getBoundingClientRect();
  return box.width > 1 && box.height > 1;
};
const name = (element) => `${element.tagName}.${element.getAttribute("class") || ""}: ` +
  (element.textContent || "").trim().slice(0, 40);

// Elements beyond the window's right border, but for what scrolls by itself.
window.stickingOut = () => [...document.querySelectorAll("body *")].filter((element) =>
  shown(element) && !element.closest(".scroll, pre, svg, thead, .timeline, .track, .scale") &&
  element.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(name);

window.overlappingTexts = () => {
  const found = [];
  for (const svg of document.querySelectorAll("svg")) {
    const boxes = [...svg.querySelectorAll("text")].filter(shown)
      .map((text) => [text, text.getBoundingClientRect()]);
    const frame = svg.getBoundingClientRect();
    for (const [text, box] of boxes) {
      if (box.left < frame.left - 1 || box.right > frame.right + 1) found.push("cut off: " + name(text));
    }
    for (let i = 0; i < boxes.length; i++) {
      for (let j = i + 1; j < boxes.length; j++) {
        const [a, b] = [boxes[i][1], boxes[j][1]];
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        // Line boxes are higher than their letters.
        if (wide > 1.5 && high > 0.35 * Math.min(a.height, b.height)) {
          found.push(`${name(boxes[i][0])} | ${name(boxes[j][0])}`);
        }
      }
    }
  }
  return found;
};

const channels = (colour) => (colour.match(/[\d.]+/g) || []).map(Number);
const luminance = ([r, g, b]) => {
  const linear = [r, g, b].map((value) => {
    const part = value / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const background = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = channels(getComputedStyle(e).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};

window.lowContrast = (least) => {
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !shown(element)) continue;
    if (element.closest("style, title, .badgetext")) continue;
    const style = getComputedStyle(element);
    const ink = channels(element.closest("svg") ? style.fill : style.color);
    const [a, b] = [luminance(ink), luminance(background(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < least) found.add(`${ratio.toFixed(2)} ${name(element)}`);
  }
  return [...found];
};

window.unnamedFigures = () => [...document.querySelectorAll("svg, [role=img], [role=region]")]
  .filter((element) => !element.getAttribute("aria-label")).map(name);

window.smallestText = () => Math.min(...[...document.querySelectorAll("body *")]
  .filter((e) => shown(e) && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()))
  .map((e) => {
    const svg = e.closest("svg");
    const box = svg && svg.viewBox.baseVal;
    const scale = svg && box.width ? svg.getBoundingClientRect().width / box.width : 1;
    return e.classList.contains("badgetext") || e.classList.contains("sweepnumber")
      ? 99 : parseFloat(getComputedStyle(e).fontSize) * scale;
  }));
