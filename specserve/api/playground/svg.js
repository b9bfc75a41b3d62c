// Elements of SVG, as the page's drawings use them.

const SVG = "http://www.w3.org/2000/svg";

export function node(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  return made;
}

export function label(x, y, text, anchor) {
  const made = node("text", { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}
