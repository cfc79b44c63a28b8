// The results of this visit as a strip of thumbnails, newest first.
import { element } from "./dom.js";
import { thumbnail } from "./picture.js";

const MAX_KEPT = 24;
const SIDE = 128;

export class History {
  constructor(strip, onChoose) {
    Object.assign(this, { strip, onChoose });
    this.buttons = new Map(); // by result
  }

  add(result) {
    const button = element(
      "button",
      { type: "button", ariaLabel: `Result: ${result.prompt}, seed ${result.facts.seed}`, title: result.prompt },
      thumbnail(result.bitmap, SIDE),
    );
    button.addEventListener("click", () => this.onChoose(result));
    this.buttons.set(result, button);
    this.strip.prepend(button);
    this.strip.hidden = false;
    if (this.buttons.size > MAX_KEPT) this.forget(this.buttons.keys().next().value);
  }

  forget(result) {
    this.buttons.get(result).remove();
    this.buttons.delete(result);
  }

  mark(chosen) {
    for (const [result, button] of this.buttons) button.setAttribute("aria-current", String(result === chosen));
  }
}
