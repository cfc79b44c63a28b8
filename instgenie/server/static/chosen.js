// Adapters of an edit that are chosen from a list which the server has for this key, LoRAs or ControlNets. The list is a
// control like others: it has a value, a text. Subclasses say what a row shows and how the text is made.
import { ask } from "./api.js";
import { element, find } from "./dom.js";

export class Chosen {
  // `ids` are those of the list, of the select below it and of the panel around both; `path` lists what the server has.
  constructor({ ids, path, offered, most }, onChange) {
    Object.assign(this, { path, offered, most, onChange });
    this.names = []; // that the server has
    [this.list, this.select, this.panel] = ids.map(find);
    Object.defineProperties(this.list, {
      value: { get: () => this.text, set: (text) => this.show(this.chosenIn(text)) },
      validity: { value: { valid: true } },
    });
    this.select.addEventListener("change", () => this.add(this.select.value));
    this.show([]);
  }

  // Asks the server for what it has. Without any, nothing of this is shown.
  async load() {
    const { data } = await (await ask(this.path)).json();
    this.learn(data);
    this.offer();
  }

  learn(data) {
    this.names = data.map(({ id }) => id);
  }

  add(name) {
    if (!name) return;
    this.list.append(this.row(this.fresh(name)));
    this.changed();
    this.list.lastElementChild.querySelector("input[type=range]").focus();
  }

  show(chosen) {
    this.list.replaceChildren(...chosen.map((one) => this.row(one)));
    this.offer();
  }

  // Returns a slider with its value beside it.
  slider({ id, name, value, minimum, maximum, step }, onInput) {
    const slider = element("input", { id, type: "range", min: minimum, max: maximum, step, value, ariaLabel: name });
    const shown = element("output", { textContent: value });
    slider.addEventListener("input", () => {
      shown.textContent = slider.value;
      onInput(slider.value);
      this.onChange();
    });
    return [slider, shown];
  }

  remover(name, row) {
    const button = element("button", { type: "button", className: "why", textContent: "×", ariaLabel: `Remove ${name}` });
    button.addEventListener("click", () => {
      row().remove();
      this.changed();
      this.select.focus();
    });
    return button;
  }

  changed() {
    this.offer();
    this.onChange();
  }

  // Offers what is not chosen yet.
  offer() {
    const chosen = [...this.list.children].map(({ dataset }) => dataset.name);
    const free = this.names.filter((name) => !chosen.includes(name));
    const options = ["", ...free].map((value) => element("option", { value, textContent: value || this.offered }));
    this.select.replaceChildren(...options);
    this.select.hidden = !free.length || chosen.length >= this.most;
    this.panel.hidden = !this.names.length && !chosen.length;
  }
}
