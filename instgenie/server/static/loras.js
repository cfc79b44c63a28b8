// The LoRAs of an edit, each with a scale. Their text is the one that the API reads, NAME:SCALE,NAME:SCALE.
import { Chosen } from "./chosen.js";
import { element } from "./dom.js";

const MAX_SCALE = 2; // of the slider; a request may have more
const STEP = 0.05;

// Returns [[name, scale], ...].
export function lorasIn(text) {
  const parts = text ? text.split(",") : [];
  return parts.map((part) => part.split(":")).map(([name, scale = "1"]) => [name, scale]);
}

export class Loras extends Chosen {
  constructor(onChange) {
    super({ ids: ["loras", "add-lora", "lora-panel"], path: "/v1/loras", offered: "Add a LoRA", most: 8 }, onChange);
  }

  get text() {
    return [...this.list.children].map(({ dataset }) => `${dataset.name}:${dataset.scale}`).join(",");
  }

  chosenIn(text) {
    return lorasIn(text);
  }

  fresh(name) {
    return [name, "1"];
  }

  row([name, scale]) {
    const range = Math.max(MAX_SCALE, Math.abs(Number(scale)));
    const facts = { id: `scale-of-${name}`, name: `Scale of ${name}`, value: scale, minimum: -range, maximum: range, step: STEP };
    const slider = this.slider(facts, (value) => (row.dataset.scale = value));
    const row = element("li", {}, element("span", { textContent: name, title: name }), ...slider, this.remover(name, () => row));
    Object.assign(row.dataset, { name, scale });
    return row;
  }
}
