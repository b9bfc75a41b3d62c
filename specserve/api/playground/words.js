// Elements, numbers and moments, as the page writes them. Text is only ever set as text.

export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export function rate(value) {
  return value === null ? "" : `${number(value)} tokens/s`;
}

export function number(value) {
  return value >= 100 ? value.toFixed(0) : value.toFixed(1);
}

export function percent(share) {
  return share > 0.9995 || share < 0.0005 ? `${(share * 100).toPrecision(3)} %` : `${(share * 100).toFixed(1)} %`;
}

export function pause(seconds) {
  return new Promise((resolve) => setTimeout(resolve, seconds * 1000));
}

export const MEANING = {
  accepted: "drafted, and the target accepted it",
  correction: "the target's own, where it rejected a draft",
  bonus: "the target's own, after all drafts were accepted",
  plain: "the target's own, in a round without drafts",
};
