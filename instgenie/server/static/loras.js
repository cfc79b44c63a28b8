// The LoRAs of an edit: chosen from those that the server has for this key, each with a scale. The list is a control
// like others: its value is the text that the API reads, NAME:SCALE,NAME:SCALE.
import { ask } from "./api.js";
import { element, find } from "./dom.js";

const MAX_CHOSEN = 8;
const MAX_SCALE = 2; // of the slider; a request may have more
const STEP = 0.05;

// Returns [[name, scale], ...].
export function chosenIn(text) {
  const parts = text ? text.split(",") : [];
  return parts.map((part) => part.split(":")).map(([name, scale = "1"]) => [name, scale]);
}

export class Loras {
  constructor(onChange) {
    this.onChange = onChange;
    this.names = []; // that the server has
    this.list = find("loras");
    this.select = find("add-lora");
    Object.defineProperties(this.list, {
      value: { get: () => this.text, set: (text) => this.show(chosenIn(text)) },
      validity: { value: { valid: true } },
    });
    this.select.addEventListener("change", () => this.add(this.select.value));
    this.show([]);
  }

  // Asks the server for its LoRAs. Without any, nothing of this is shown.
  async load() {
    const { data } = await (await ask("/v1/loras")).json();
    this.names = data.map(({ id }) => id);
    this.offer();
  }

  get text() {
    return [...this.list.children].map(({ dataset }) => `${dataset.name}:${dataset.scale}`).join(",");
  }

  add(name) {
    if (!name) return;
    this.list.append(this.row(name, "1"));
    this.changed();
    this.list.lastElementChild.querySelector("input").focus();
  }

  show(chosen) {
    this.list.replaceChildren(...chosen.map(([name, scale]) => this.row(name, scale)));
    this.offer();
  }

  row(name, scale) {
    const id = `scale-of-${name}`;
    const range = Math.max(MAX_SCALE, Math.abs(Number(scale)));
    const slider = element("input", { id, type: "range", min: -range, max: range, step: STEP, value: scale, ariaLabel: `Scale of ${name}` });
    const shown = element("output", { textContent: scale });
    const remove = element("button", { type: "button", className: "why", textContent: "×", ariaLabel: `Remove ${name}` });
    const row = element("li", {}, element("span", { textContent: name, title: name }), slider, shown, remove);
    Object.assign(row.dataset, { name, scale });
    slider.addEventListener("input", () => {
      row.dataset.scale = shown.textContent = slider.value;
      this.onChange();
    });
    remove.addEventListener("click", () => {
      row.remove();
      this.changed();
      this.select.focus();
    });
    return row;
  }

  changed() {
    this.offer();
    this.onChange();
  }

  // Offers the LoRAs that are not chosen yet.
  offer() {
    const chosen = chosenIn(this.text).map(([name]) => name);
    const free = this.names.filter((name) => !chosen.includes(name));
    const options = ["", ...free].map((value) => element("option", { value, textContent: value || "Add a LoRA" }));
    this.select.replaceChildren(...options);
    this.select.hidden = !free.length || chosen.length >= MAX_CHOSEN;
    find("lora-panel").hidden = !this.names.length && !chosen.length;
  }
}
