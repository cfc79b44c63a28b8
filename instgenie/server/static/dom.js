// Helpers for the document. Text from users is set as text, never as HTML.

export const find = (id) => document.getElementById(id);

// What people do to a thing on the screen.
export const press = matchMedia("(pointer: coarse)").matches ? "tap" : "click";

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Makes the children of a <dl> from [[term, text, ...], ...].
export function terms(pairs) {
  return pairs.flatMap(([term, ...texts]) => [
    element("dt", { textContent: term }),
    element("dd", {}, ...texts.map((text) => element("span", { textContent: text }))),
  ]);
}

export const percent = (share) => `${share > 0 && share < 0.01 ? "<1" : Math.round(share * 100)} %`;

export function seconds(value) {
  return value < 0.1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 0)} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value ? Math.min(Math.floor(Math.log2(value) / 10), units.length - 1) : 0;
  const amount = value / 1024 ** power;
  return `${amount.toFixed(power && amount < 10 ? 1 : 0)} ${units[power]}`;
}
